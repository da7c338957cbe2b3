"""Memories: how the keys and values of a request are kept, and which of them a query reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dllm_bench.caching.part import Exact, Part
from dllm_bench.caching.rows import Rows
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.windows import Window
    from dllm_bench.options import Options
else:
    torch = LazyModule("torch")

__all__ = ["DenseMemory", "Memory", "PassMemory", "Pieces", "gather_runs", "held_bytes"]

# of (keys, values) or (keys, values, bias of the scores), as Network.attend takes them
Pieces = list[tuple["Tensor", ...]]


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind the tensors; a storage that several share counts once."""
    seen: dict[int, int] = {}
    for t in tensors:
        if t is not None:
            storage = t.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def gather_runs(t: Tensor, first: Tensor, run: int) -> Tensor:
    """Runs of `run` neighbouring positions of t [B, Hkv, N, d] that begin at first [B, Hkv, n]: [B, Hkv, n * run, d].

    A run is copied as one row, without an index per position, from wherever the buffer lies.
    """
    b, h, n, d = t.shape
    if t.stride(3) != 1 or t.stride(2) != d or t.stride(1) % d or t.stride(0) != h * t.stride(1):
        t = t.contiguous()
    step = t.stride(1) // d
    rows = t.as_strided(((b * h - 1) * step + n - run + 1, run * d), (d, 1))
    heads = torch.arange(0, b * h * step, step, device=t.device).view(b, h, 1)
    return rows.index_select(0, (first + heads).flatten()).view(b, h, -1, d)


class Memory(Part):
    """Keys and values of all layers of one request.

    Memories stack: one that reads a selection, or keeps another form, may lie on another (`lower`). Keys come in before
    RoPE with the rows they belong to, so that a memory may keep them in the form it needs; queries come in after RoPE.

    A refresh reads everything exactly, so a memory promises to change nothing where every pass is one. In any pass,
    what it gives holds the fresh value of every row that the pass has just written.

    Attributes:
        base: the refresh method that a spec naming this memory alone means.
        carries: other memories may lie on it; it then serves `whole` and `gather`.
        takes_values: it takes values without keys (`write_values`); needed on methods that renew values alone.
    """

    base: ClassVar[str] = ""
    carries: ClassVar[bool] = True
    takes_values: ClassVar[bool] = False
    exact_with = Exact()

    def __init__(self, options: Options | None = None, lower: Memory | None = None) -> None:
        super().__init__(options)
        self.lower = lower

    @classmethod
    def check_stack(cls, method: type[Part], below: tuple[type[Part], ...]) -> None:
        """Raises UserError with the reason when this memory cannot lie on `below` (bottom first) under `method`."""

    def begin(self, request: Request) -> None:
        """A request starts."""
        self.request, self.network = request, request.network
        if self.lower is not None:
            self.lower.begin(request)

    def begin_pass(self, window: Window, refresh: bool) -> None:
        """A pass starts. In a refresh queries read everything exactly: it renews the cache and must not see less."""
        if self.lower is not None:
            self.lower.begin_pass(window, refresh)

    def begin_refresh(self, layer: int) -> None:
        """In the middle of a pass: from `layer` on it computes all rows, and those layers are refreshed."""
        if self.lower is not None:
            self.lower.begin_refresh(layer)

    def require(self, positions: Sequence[int]) -> None:
        """Positions that queries must be able to read, until the next call names others."""
        if self.lower is not None:
            self.lower.require(positions)

    @property
    def exact(self) -> bool:
        """Whether rows that a refresh does not write are read in it just as they were written before. A memory that
        keeps a reduced form says no; a refresh then has to write every position."""
        return self.lower is None or self.lower.exact

    @abstractmethod
    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        """Keeps fresh keys (before RoPE) and values [B, Hkv, M, d] of `rows`."""

    def write_values(self, layer: int, rows: Rows, v: Tensor) -> None:
        """Keeps fresh values of `rows`; their keys stay as they are. Only asked of a memory that `takes_values`."""
        raise TypeError(f"{type(self).__name__} does not take values without keys")

    @abstractmethod
    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        """The pieces of keys (after RoPE) and values that queries q [B, H, M, d] of `rows` attend to."""

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values [B, Hkv, N, d] of all positions in order, for memories above."""
        raise TypeError(f"{type(self).__name__} cannot serve a memory above it")

    def gather(self, layer: int, first: Tensor, run: int = 1) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values [B, Hkv, n * run, d] of the runs of `run` neighbouring positions that begin at
        first [B, Hkv, n], for memories above. A memory that would have to make `whole` reads only these."""
        k, v = self.whole(layer)
        return gather_runs(k, first, run), gather_runs(v, first, run)

    def held(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys (after RoPE) and values [B, Hkv, N, d] of all positions in order, as they lie here between two
        passes, for studies of drift; None where not all are held. Changes nothing."""
        return self.lower.held(layer) if self.lower is not None else None

    def scores(self, layer: int, q: Tensor) -> Tensor:
        """Scaled products of a few queries q [B, H, m, d] (after RoPE) with the keys held now, float32 [B, H, m, N]."""
        return self.network.scores(q, [self.whole(layer)[0]])

    def weights(self, layer: int, scores: Tensor) -> Tensor:
        """Scores, of this or an earlier moment, to attention over what the last `read` of the layer gave; 0 elsewhere.

        A method that compares the attention from before and after a write takes the scores before it, and the weights
        of both after the read: so the two are over the same keys.
        """
        return torch.softmax(scores, dim=-1)

    def attention_rows(self, layer: int, q: Tensor) -> Tensor:
        """Attention of a few queries q [B, H, m, d] over what the last `read` gave, float32 [B, H, m, N]."""
        return self.weights(layer, self.scores(layer, q))

    def readable(self, layer: int) -> Tensor | None:
        """Ascending positions that the last `read` of the layer gave to at least one head; None: all."""
        return None

    def end_pass(self) -> None:
        """The pass is over; in a refresh, all layers were written."""
        if self.lower is not None:
            self.lower.end_pass()

    def bytes(self) -> dict[str, int]:
        """Bytes held now, by kind, with those of the memory below; measured from the tensors."""
        return self.lower.bytes() if self.lower is not None else {}

    def nominal_bytes(self) -> dict[str, float] | None:
        """Bytes by kind as the paper's formula counts them, where that differs from what is stored; kinds without a
        formula as stored. None: there is no formula in the stack, and `bytes` says all."""
        lower = self.lower.nominal_bytes() if self.lower is not None else None
        if self.lower is None or lower is None:
            return None
        return lower | {kind: held for kind, held in self.bytes().items() if kind not in self.lower.bytes()}

    def report(self) -> dict[str, Any]:
        """What was decided in the last pass, for the trace."""
        return self.lower.report() if self.lower is not None else {}

    def end(self) -> None:
        """The request is over: everything is let go."""
        if self.lower is not None:
            self.lower.end()
        del self.request, self.network


class PassMemory(Memory):
    """Keeps nothing: queries read what their own pass has just written."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        self._fresh: Pieces = [(self.network.rope(k, rows.where), v)]

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        return self._fresh

    def end_pass(self) -> None:
        self._fresh = []


class DenseMemory(Memory):
    """One key (after RoPE) and one value buffer of canvas length per layer, written in place."""

    takes_values = True

    def begin(self, request: Request) -> None:
        super().begin(request)
        self._k: list[Tensor | None] = [None] * request.network.config.num_layers
        self._v: list[Tensor | None] = [None] * request.network.config.num_layers

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        if self._k[layer] is None:
            shape = (k.shape[0], k.shape[1], self.room(), k.shape[3])
            self._k[layer], self._v[layer] = k.new_zeros(shape), v.new_zeros(shape)
        places = self.places(rows)
        places.put(self._k[layer], self.network.rope(k, rows.where), dim=2)
        places.put(self._v[layer], v, dim=2)

    def write_values(self, layer: int, rows: Rows, v: Tensor) -> None:
        self.places(rows).put(self._v[layer], v, dim=2)

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        return [self.whole(layer)]

    def room(self) -> int:
        """Positions that the buffers have room for."""
        return self.request.length

    def places(self, rows: Rows) -> Rows:
        """Where rows lie in the buffers."""
        return rows

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        k, v = self._k[layer], self._v[layer]
        assert k is not None and v is not None, "read before write"
        return k, v

    def held(self, layer: int) -> tuple[Tensor, Tensor] | None:
        k, v = self._k[layer], self._v[layer]
        return None if k is None or v is None or k.shape[2] != self.request.length else (k, v)

    def bytes(self) -> dict[str, int]:
        return {"keys": held_bytes(self._k), "values": held_bytes(self._v)}

    def end(self) -> None:
        super().end()
        self._k, self._v = [], []
