"""State that requests share: made once, outside of their clocks, and only read by them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dllm_bench.caching.memory import held_bytes
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.models.counters import Counters
    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = ["Cost", "Shared"]


@dataclass(frozen=True)
class Cost:
    """What a piece of work beside the committing passes took.

    Attributes:
        rows: rows that entered layer 0. row_layers: rows x layers really computed.
    """

    rows: int
    row_layers: int
    seconds: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.rows + other.rows, self.row_layers + other.row_layers, self.seconds + other.seconds)


@dataclass(frozen=True)
class Shared:
    """What a method made from a run of tokens, for every request whose canvas holds that run.

    Attributes:
        method: name of the method. network: the one that made it, and the only one that may read it.
        ids: the tokens it stands for.
        tensors: one per layer, by kind. Nobody writes them.
        counters, seconds: what making it computed and took.
    """

    method: str
    network: Network = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    tensors: Mapping[str, Sequence[Tensor]] = field(repr=False)
    counters: Counters
    seconds: float

    @property
    def cost(self) -> Cost:
        """Paid once, however many requests read it."""
        return Cost(len(self.ids), self.counters.row_layers, self.seconds)

    def bytes(self) -> dict[str, int]:
        """Bytes held, by kind."""
        return {f"shared_{kind}": held_bytes(tensors) for kind, tensors in self.tensors.items()}

    def checksum(self) -> str:
        """Hash of every byte: equal before and after a request."""
        digest = hashlib.sha256()
        for kind in sorted(self.tensors):
            for t in self.tensors[kind]:
                digest.update(t.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def check(self, method: str, network: Network, ids: Sequence[int]) -> None:
        """Raises UserError when it was not made by this method and network from these tokens."""
        if self.method != method:
            raise UserError(f"the shared state was made by method '{self.method}', not by '{method}'")
        if self.network is not network:
            raise UserError("the shared state was made with another loaded model: prepare it with this one")
        if len(self.ids) != len(ids):
            raise UserError(f"the shared state stands for {len(self.ids)} tokens, the request's span has {len(ids)}")
        wrong = next((i for i, (a, b) in enumerate(zip(self.ids, ids, strict=True)) if a != b), None)
        if wrong is not None:
            raise UserError(
                f"the shared state stands for other tokens: number {wrong} is {self.ids[wrong]} there, "
                f"{ids[wrong]} in the request"
            )
