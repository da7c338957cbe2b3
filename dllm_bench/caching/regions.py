"""Region keys: one key for every 2, 4, 8 … neighbouring positions, held beside the keys and renewed with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dllm_bench.caching.memory import Memory
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.wavelets import low_pass
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = ["RegionKeys", "RegionTransform"]


@dataclass(frozen=True)
class RegionTransform:
    """How the keys of 2^scale positions become the key of their region.

    Attributes:
        levels: scales there are, 1 … levels. wavelet, norm: as `low_pass` takes them.
        center: average the keys before RoPE, and rotate the average to the region's center.
    """

    network: Network
    levels: int
    wavelet: str = "haar"
    norm: str = "ortho"
    center: bool = False

    def __call__(self, keys: Tensor, where: Tensor, scale: int) -> Tensor:
        """Keys [B, Hkv, n, d] (after RoPE) at positions `where` ([n], or per head) to [B, Hkv, n / 2^scale, d]."""
        if not self.center:
            return low_pass(keys, self.wavelet, scale, self.norm)
        plain = self.network.rope_at(keys, where, back=True)
        centers = where[..., :: 1 << scale] + ((1 << scale) - 1) / 2
        return self.network.rope_at(low_pass(plain, self.wavelet, scale, self.norm), centers)


class RegionKeys:
    """Region keys of the first positions of one layer, at every scale.

    Only for transforms in which a region's key follows from its own positions (haar): a write then changes the regions
    it touches and no other.

    Attributes:
        transform: what makes them.
        levels: region keys [B, Hkv, n, d] of the scales 1 … levels; behind the regions asked for there may be room.
    """

    def __init__(self, transform: RegionTransform) -> None:
        self.levels: list[Tensor] = []
        self.transform = transform
        self._built = 0  # positions that the region keys stand for
        self._stale: list[Rows] = []  # written since

    def forget(self) -> None:
        """Every key was written anew."""
        self._built, self._stale = 0, []

    def touch(self, rows: Rows) -> None:
        """The keys of these rows were written."""
        if self._built:
            self._stale.append(rows)

    def renew(self, memory: Memory, layer: int, cut: int, room: int) -> None:
        """Brings them up to date for the first `cut` positions, a multiple of 2^levels; `room` is as far as they may
        ever reach. All are made anew after `forget` or where most have changed, else those that changed."""
        if self._built == cut and not self._stale:
            return
        regions = cut >> self.transform.levels
        parts = [self._touched(rows, regions) for rows in self._stale]
        parts.append(torch.arange(self._built >> self.transform.levels, regions, device=self.transform.network.device))
        if self._built == 0 or sum(len(p) for p in parts) > regions // 2:
            self._build(memory.whole(layer)[0][:, :, :cut], room)
        elif touched := [p for p in parts if len(p)]:
            self._mend(memory, layer, torch.cat(touched))
        self._built, self._stale = cut, []

    def _build(self, keys: Tensor, room: int) -> None:
        self.transform.network.counters.index_builds += 1
        where = torch.arange(keys.shape[2], device=keys.device)
        below = keys
        for scale in range(1, self.transform.levels + 1):
            # after RoPE a scale follows from the one below it
            center = self.transform.center
            fresh = self.transform(keys, where, scale) if center else self.transform(below, where, 1)
            if len(self.levels) < scale:
                self.levels.append(keys.new_empty(*keys.shape[:2], room >> scale, keys.shape[3]))
            below = self.levels[scale - 1][:, :, : fresh.shape[2]].copy_(fresh)

    def _mend(self, memory: Memory, layer: int, regions: Tensor) -> None:
        """Makes the coarsest regions [n], and all below them, again."""
        levels, inside = self.transform.levels, 1 << self.transform.levels
        first = regions << levels
        keys = memory.gather(layer, first.expand(*self.levels[0].shape[:2], -1), inside)[0]
        tokens = (first.unsqueeze(1) + torch.arange(inside, device=regions.device)).flatten()
        for scale, level in enumerate(self.levels, start=1):
            inner = torch.arange(inside >> scale, device=regions.device)
            index = ((regions << (levels - scale)).unsqueeze(1) + inner).flatten()
            level.index_copy_(2, index, self.transform(keys, tokens, scale))

    def _touched(self, rows: Rows, regions: int) -> Tensor:
        """The coarsest regions that rows lie in; rows behind them count for the last, which is only made again."""
        levels = self.transform.levels
        if rows.span is not None:
            last = min((rows.span.stop - 1) >> levels, regions - 1)
            return torch.arange(rows.span.start >> levels, last + 1, device=self.transform.network.device)
        assert rows.index is not None
        return (rows.index >> levels).clamp(max=regions - 1)
