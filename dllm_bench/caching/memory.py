"""Memories: how the keys and values of a request are kept, and which of them a query reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dllm_bench.caching.rows import Rows
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = ["DenseMemory", "Memory", "PassMemory", "held_bytes"]

Pieces = list[tuple["Tensor", "Tensor"]]


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages behind the tensors; a storage that several share counts once."""
    seen: dict[int, int] = {}
    for t in tensors:
        if t is not None:
            storage = t.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


class Memory(ABC):
    """Keys (after RoPE, at their absolute positions) and values [B, Hkv, T, d] of all layers of one request."""

    def begin(self, network: Network, length: int) -> None:
        """A request over a canvas of `length` positions starts."""
        self.network, self.length = network, length

    @abstractmethod
    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        """Keeps fresh keys and values of `rows`."""

    @abstractmethod
    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        """The pieces that queries q [B, H, M, d] of `rows` attend to."""

    def refreshed(self, layer: int) -> None:
        """All rows of the layer were just written: derived state may be rebuilt."""

    def bytes(self) -> dict[str, int]:
        """Bytes held now, by kind; measured from the tensors."""
        return {}

    def end(self) -> None:
        """The request is over: everything is let go."""


class PassMemory(Memory):
    """Keeps nothing: queries read what their own pass has just written."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        self._fresh = [(k, v)]

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        return self._fresh

    def end(self) -> None:
        self._fresh = []


class DenseMemory(Memory):
    """One key and one value buffer of canvas length per layer, written in place."""

    def begin(self, network: Network, length: int) -> None:
        super().begin(network, length)
        self._k: list[Tensor | None] = [None] * network.config.num_layers
        self._v: list[Tensor | None] = [None] * network.config.num_layers

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        if self._k[layer] is None:
            shape = (k.shape[0], k.shape[1], self.length, k.shape[3])
            self._k[layer], self._v[layer] = k.new_zeros(shape), v.new_zeros(shape)
        rows.put(self._k[layer], k, dim=2)
        rows.put(self._v[layer], v, dim=2)

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        k, v = self._k[layer], self._v[layer]
        assert k is not None and v is not None, "read before write"
        return [(k, v)]

    def bytes(self) -> dict[str, int]:
        return {"keys": held_bytes(self._k), "values": held_bytes(self._v)}

    def end(self) -> None:
        self._k, self._v = [], []
