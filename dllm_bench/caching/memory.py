"""Memories: how the keys and values of a request are kept, and which of them a query reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dllm_bench.caching.part import Exact, Part
from dllm_bench.caching.rows import Rows

if TYPE_CHECKING:
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.windows import Window
    from dllm_bench.options import Options

__all__ = ["DenseMemory", "Memory", "PassMemory", "Pieces", "held_bytes"]

Pieces = list[tuple["Tensor", "Tensor"]]


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind the tensors; a storage that several share counts once."""
    seen: dict[int, int] = {}
    for t in tensors:
        if t is not None:
            storage = t.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


class Memory(Part):
    """Keys and values of all layers of one request.

    Memories stack: one that reads a selection, or keeps another form, may lie on another (`lower`). Keys come in before
    RoPE with the rows they belong to, so that a memory may keep them in the form it needs; queries come in after RoPE.

    A refresh reads everything exactly, so a memory promises to change nothing where every pass is one. In any pass,
    what it gives holds the fresh value of every row that the pass has just written.

    Attributes:
        base: the refresh method that a spec naming this memory alone means.
        takes_values: it takes values without keys (`write_values`); needed on methods that renew values alone.
    """

    base: ClassVar[str] = ""
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

    def select(self, layer: int, q: Tensor, rows: Rows) -> None:
        """Chooses now, before the write, what the following `read` with the same queries gives.

        A method calls it when it needs `attention_rows` from before and after a write over the same keys.
        """
        if self.lower is not None:
            self.lower.select(layer, q, rows)

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

    def held(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys (after RoPE) and values [B, Hkv, N, d] of all positions in order, as they lie here between two
        passes, for studies of drift; None where not all are held. Changes nothing."""
        return self.lower.held(layer) if self.lower is not None else None

    def attention_rows(self, layer: int, q: Tensor) -> Tensor:
        """Attention of a few queries q [B, H, m, d] (after RoPE) over all positions, float32 [B, H, m, N].

        A memory that reads a selection gives what `select` or `read` chose last, and 0 elsewhere.
        """
        return self.network.attention_rows(q, [self.whole(layer)[0]])

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
        self._fresh = [(self.network.rope(k, rows.where), v)]

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
        rows.put(self._v[layer], v, dim=2)

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
