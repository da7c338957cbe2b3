"""Sparse-dLLM: per block, the keys and values outside it that its queries score highest; the others are evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.memory import Memory, Pieces, held_bytes
from dllm_bench.caching.method import Method
from dllm_bench.caching.part import Exact
from dllm_bench.caching.rows import Rows
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.windows import Window
    from dllm_bench.models.config import NetworkConfig
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")

__all__ = ["EvictingMemory", "SparseDllm", "SparseDllmOptions"]

_CHOOSING = 1  # the pass of a block that evicts: one later than the block's first, when keys have settled


@dataclass(frozen=True)
class SparseDllmOptions(Options):
    """Options of Sparse-dLLM."""

    keep_ratio: float = option(0.5, "share of the positions outside the block that is kept", above=0, high=1)
    kernel_size: int = option(3, "width of the max-pooling of scores over neighbours (odd)", low=1)

    def check(self) -> None:
        if self.kernel_size % 2 == 0:
            raise UserError(
                f"sparse_dllm option kernel_size must be odd (nearest valid: {self.kernel_size - 1} or "
                f"{self.kernel_size + 1}), got {self.kernel_size}"
            )


def _block(window: Window, config: NetworkConfig) -> Rows:
    """The block's rows, with the one before it where that row predicts the block's first token."""
    return Rows.range(config.row_of(window.start), window.stop)


class EvictingMemory(Memory):
    """Per layer one buffer: the kept positions outside the block, then the block, whose part is written in place.

    A block's dense passes read what they write. Its second one chooses what stays, by the mean rotated query of the
    block's rows against every key outside, pooled over neighbours; all heads keep the same positions.
    """

    options: SparseDllmOptions

    def begin(self, request: Request) -> None:
        super().begin(request)
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}
        self._fresh: Pieces = []

    def begin_pass(self, window: Window, refresh: bool) -> None:
        self._dense, self._chooses = refresh, refresh and window.step == _CHOOSING
        self._block = _block(window, self.network.config)
        if refresh:
            for held in (self._k, self._v, self._kept):
                held.clear()

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        k = self.network.rope(k, rows.where)
        if self._dense:
            self._fresh = [(k, v)]
            return
        for buffer, fresh in ((self._k[layer], k), (self._v[layer], v)):
            buffer[:, :, -rows.count :] = fresh

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        if not self._dense:
            return [(self._k[layer], self._v[layer])]
        if self._chooses:
            self._evict(layer, q)
        return self._fresh

    def _evict(self, layer: int, q: Tensor) -> None:
        """Keeps the best positions outside the block, and the block itself."""
        (k, v), block = self._fresh[0], self._block.span
        assert block is not None
        scores = self._scores(self._block.take(q, dim=2), k)
        outside = torch.cat((scores[: block.start], scores[block.stop :]))
        width = self.options.kernel_size
        pooled = F.max_pool1d(outside[None, None], width, stride=1, padding=width // 2)[0, 0]
        best = pooled.topk(int(self.options.keep_ratio * len(pooled))).indices.sort().values
        kept = torch.where(best < block.start, best, best + self._block.count)
        index = torch.cat((kept, torch.arange(block.start, block.stop, device=kept.device)))
        self._k[layer], self._v[layer] = k.index_select(2, index), v.index_select(2, index)
        self._kept[layer] = kept
        self.network.counters.selections += 1

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Mean over heads of (mean query of the rows) . key, for each key of k [1, Hkv, N, d]: [N]."""
        mean = q[0].mean(dim=1)
        grouped = mean.view(k.shape[1], -1, k.shape[3]).sum(dim=1) / mean.shape[0]
        return (k[0] @ grouped[:, :, None])[:, :, 0].sum(dim=0)

    def end_pass(self) -> None:
        self._fresh = []

    def readable(self, layer: int) -> Tensor | None:
        block = self._block.span
        if self._dense or block is None:
            return None
        inside = torch.arange(block.start, block.stop, device=self.network.device)
        return torch.cat((self._kept[layer], inside)).sort().values

    def bytes(self) -> dict[str, int]:
        held = {"keys": self._k, "values": self._v, "indices": self._kept}
        return {kind: held_bytes(tensors.values()) for kind, tensors in held.items()}

    def report(self) -> dict[str, Any]:
        return {"kept": {layer: kept.tolist() for layer, kept in self._kept.items()}} if self._chooses else {}

    def end(self) -> None:
        super().end()
        for held in (self._k, self._v, self._kept):
            held.clear()
        self._fresh = []


class SparseDllm(Method):
    """Two dense passes per block, the second of which evicts; then the block alone, over what was kept and itself."""

    name = "sparse_dllm"
    paper = "Sparse-dLLM, arXiv 2508.02558, method section (OpenMOSS/Sparse-dLLM 3fd8986)"
    summary = "per block two dense passes, then the block alone over the highest-scored half of the other positions"
    cost = (
        "per block two dense passes, then block rows; K and V of keep_ratio of the positions outside the block, and of "
        "the block; no gain with fewer than three passes per block"
    )
    notes = (
        "Pooling runs over the seam between what lies before and behind the block, as in the code. With shifted logits "
        "(Dream) the row before the block counts as part of it. The released code has no guidance; here each stream "
        "keeps its own cache."
    )
    options_class = SparseDllmOptions
    exact_with = Exact(decode={"block_length": 4, "tokens_per_pass": 4})
    options: SparseDllmOptions
    keeps_cache = False  # not of all positions

    def __init__(self, options: Options | None = None, memory: Memory | None = None) -> None:
        super().__init__(options, memory)
        self.memory.options = self.options

    @classmethod
    def bottom_memory(cls) -> Memory:
        return EvictingMemory()

    def rows(self, window: Window) -> Rows:
        self._refresh = window.step <= _CHOOSING
        return Rows.range(0, self.request.length) if self._refresh else _block(window, self.network.config)

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return window.inner

    def report(self) -> dict[str, Any]:
        return {"refresh": self._refresh, **super().report()}
