"""WaveFilter: queries read a selection of the prompt's keys, chosen from coarse to fine on their wavelet low-pass."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dllm_bench.caching.memory import Memory, Pieces, gather_runs, held_bytes
from dllm_bench.caching.part import Part
from dllm_bench.caching.regions import RegionKeys, RegionTransform
from dllm_bench.caching.selection import best_share, votes
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.caching.rows import Rows
    from dllm_bench.decoding.windows import Window
else:
    torch = LazyModule("torch")

__all__ = ["WaveFilter", "WaveFilterOptions", "WaveFilterTuned", "WaveFilterTunedOptions"]

_IDS_SHOWN = 64  # a trace lists the kept positions of a head up to here


@dataclass(frozen=True)
class WaveFilterOptions(Options):
    """Options of WaveFilter."""

    levels: int = option(2, "scales: regions of 2^levels tokens down to pairs", low=1, high=12)
    keep: tuple[float, ...] = option(
        (0.4, 0.4), "share of the regions kept at each scale, coarse to fine; the last holds for the scales left",
        above=0, high=1,
    )  # fmt: skip
    wavelet: Literal["haar", "db2", "db4", "sym4", "coif1"] = option(
        "haar", "low-pass filter; all but haar run the literal transform, through PyWavelets"
    )
    norm: Literal["ortho", "mean"] = option("ortho", "a region's key: orthonormal transform, or mean of its keys")
    group: Literal["kv_head", "layer"] = option("kv_head", "one selection per key head, or one per layer")
    reselect_every: int = option(1, "passes that share a selection, until the keys are refreshed", low=1)
    scope: Literal["prompt", "prompt+done"] = option("prompt", "what is filtered: the prompt, or finished blocks too")
    min_prompt: int = option(256, "nothing is filtered below this many tokens", low=0)
    force_keep: int = option(0, "first tokens that are always kept, beside the selection", low=0)
    literal: bool = option(False, "transform the gathered keys anew at every scale and pass: same result, paper's cost")
    rope_space: Literal["post", "center"] = option(
        "post", "average keys after RoPE, or before it and rotate the average to the region's center"
    )
    skip_layers: tuple[int, ...] = option((), "layers that are not filtered", low=0)

    def check(self) -> None:
        if not 1 <= len(self.keep) <= self.levels:
            near = ",".join(str(m) for m in (*self.keep, 0.4)[: self.levels])
            raise UserError(
                f"wavefilter option keep needs 1 to {self.levels} values (levels={self.levels}), got {len(self.keep)}: "
                f"nearest valid: keep=[{near}]"
            )
        if self.wavelet != "haar" and importlib.util.find_spec("pywt") is None:
            raise UserError(f"wavefilter option wavelet={self.wavelet} needs PyWavelets: install it, or use haar")

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of every scale, coarse to fine."""
        return self.keep + self.keep[-1:] * (self.levels - len(self.keep))


@dataclass
class _Choice:
    """What one layer reads: pairs [B, Hkv, k] of the filtered positions, ascending; pair i is positions 2i, 2i + 1.

    Attributes:
        cut: the filtered length it was made for. age: passes that used it. hidden: forced tokens [B, Hkv, F] that the
            pairs hold already. joint: the gathered piece, with the version of the keys and the forced pairs it holds.
    """

    cut: int
    pairs: Tensor
    age: int = 0
    hidden: Tensor | None = None
    joint: tuple[tuple[int, tuple[int, ...]], tuple[Tensor, ...]] | None = None


@dataclass
class _Layer:
    """State of one layer.

    Attributes:
        regions: region keys of the filtered positions. version: rises with every write among those.
        renewed: all that is filtered was written in this pass, so this layer reads densely.
        used: whether the last pass read the selection. visible: which keys [B, Hkv, N] that gave, once it is asked.
    """

    regions: RegionKeys
    version: int = 0
    choice: _Choice | None = None
    renewed: bool = False
    used: bool = False
    visible: Tensor | None = None


class WaveFilter(Memory):
    """In a partial pass every layer scores regions of the prompt against the rows of the pass, keeps the best share at
    each scale, and attends to the kept pairs of tokens and to everything behind the prompt."""

    name = "wavefilter"
    paper = "WaveFilter, arXiv 2606.00724, sections 3.1, 3.2 and appendices A, B (no public code)"
    summary = "partial passes read a share of the prompt's keys, picked by a Haar cascade"
    cost = (
        "scores against P/4 + 0.2 P keys and attention over 0.16 P instead of P (defaults): 0.385 of the prompt's "
        "attention; the region keys add 37.5 % to K and V: it saves time, not memory"
    )
    notes = (
        "No public code: the defaults are the paper's, and ours where it is silent. The paper transforms the gathered "
        "keys again at every scale, layer and step; for Haar the region keys of the unfiltered prompt give the same "
        "selection, so by default they are kept and renewed with the keys (literal=true pays the paper's cost). Its "
        "sum of scores is printed over regions and read as over rows, and ids of a finer scale count within the "
        "coarser selection. Where it is silent: one selection per key head, keys after RoPE at their positions, all "
        "rows and query heads of a group vote, the last P mod 2^levels tokens are kept, and passes and layers that "
        "renew all rows are not filtered. In infill only what stands before the response is filtered, what stands "
        "behind it is kept whole. The paper tunes keep per data set within [0.3, 1]. A selection shared by passes "
        "(reselect_every) has no guard against queries that drift."
    )
    base = "fast_dllm"
    carries = False
    takes_values = True
    options_class: ClassVar[type[Options]] = WaveFilterOptions
    check_with: ClassVar[Mapping[str, Any]] = {"min_prompt": 0}
    options: WaveFilterOptions
    lower: Memory

    @classmethod
    def check_stack(cls, method: type[Part], below: tuple[type[Part], ...]) -> None:
        if any(issubclass(b, WaveFilter) for b in below):
            raise UserError("wavefilter and wavefilter_tuned are the same filter: use one of them")

    # -- life cycle -------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        super().begin(request)
        count, options = request.network.config.num_layers, self.options
        beyond = [i for i in options.skip_layers if i >= count]
        if beyond:
            raise UserError(
                f"wavefilter option skip_layers: the model has {count} layers, 0 to {count - 1} "
                f"(nearest valid: {count - 1}), got {beyond[0]}"
            )
        center = options.rope_space == "center"
        transform = RegionTransform(request.network, options.levels, options.wavelet, options.norm, center)
        self._layers = [_Layer(RegionKeys(transform)) for _ in range(count)]
        self._literal = options.literal or options.wavelet != "haar"
        self._required: tuple[int, ...] = ()
        self._forced: tuple[int, ...] = ()
        self._cut = -1
        self._rest: Tensor | None = None

    def begin_pass(self, window: Window, refresh: bool) -> None:
        super().begin_pass(window, refresh)
        canvas, options = self.request.canvas, self.options
        self._limit = canvas.start
        if options.scope == "prompt+done":
            self._limit = min(max(canvas.start, window.start), canvas.stop)
        cut = self._limit >> options.levels << options.levels
        if cut != self._cut:
            self._cut = cut
            # an odd rest begins one position early, and that one is cut off again
            self._odd = (self.request.length - cut) % 2
            self._rest = torch.arange(cut - self._odd, self.request.length, 2, device=self.network.device)
        filters = cut > 0 and self._limit >= options.min_prompt and min(options.shares) < 1
        self._dense_from = 0 if refresh or not filters else len(self._layers)
        self._force(tuple(p for p in sorted({*range(options.force_keep), *self._required}) if p < cut))
        for state in self._layers:
            state.renewed, state.used, state.visible = False, False, None

    def begin_refresh(self, layer: int) -> None:
        super().begin_refresh(layer)
        self._dense_from = min(self._dense_from, layer)

    def require(self, positions: Sequence[int]) -> None:
        super().require(positions)
        self._required = tuple(positions)

    def end(self) -> None:
        super().end()
        for name in ("_layers", "_forced", "_forced_tokens", "_forced_pairs", "_neighbours", "_required", "_rest"):
            self.__dict__.pop(name, None)

    # -- keys and values --------------------------------------------------------------------------------------------

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        self.lower.write(layer, rows, k, v)
        state = self._layers[layer]
        if rows.lowest >= self._cut:
            return
        state.version += 1
        if self._renews(rows):
            state.choice, state.renewed = None, True
            state.regions.forget()
        else:
            state.regions.touch(rows)

    def write_values(self, layer: int, rows: Rows, v: Tensor) -> None:
        self.lower.write_values(layer, rows, v)
        self._layers[layer].version += rows.lowest < self._cut

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        state = self._layers[layer]
        if state.renewed or layer >= self._dense_from or layer in self.options.skip_layers:
            return self.lower.read(layer, q, rows)
        choice, b = state.choice, q.shape[0]
        heads = self.network.config.num_kv_heads
        if choice is None or choice.cut != self._cut or choice.age >= self.options.reselect_every:
            folded = q.reshape(b, heads, -1, q.shape[3]) * q.shape[3] ** -0.5
            choice = state.choice = _Choice(self._cut, self._choose(layer, state, folded))
            self.network.counters.selections += 1
        choice.age += 1
        state.used = True
        counters = self.network.counters
        counters.seen_keys += b * heads * self._limit
        counters.kept_keys += b * heads * (2 * choice.pairs.shape[2] + self._limit - self._cut)
        return [self._joint(layer, state, choice)]

    def scores(self, layer: int, q: Tensor) -> Tensor:
        return self.lower.scores(layer, q)

    def weights(self, layer: int, scores: Tensor) -> Tensor:
        visible = self._visible(layer)
        if visible is None:
            return self.lower.weights(layer, scores)
        grouped = scores.view(*visible.shape[:2], -1, scores.shape[3])
        return torch.softmax(grouped.masked_fill(~visible.unsqueeze(2), -math.inf), dim=3).view(scores.shape)

    def readable(self, layer: int) -> Tensor | None:
        visible = self._visible(layer)
        return self.lower.readable(layer) if visible is None else visible.flatten(0, 1).any(dim=0).nonzero()[:, 0]

    def _visible(self, layer: int) -> Tensor | None:
        """Which keys [B, Hkv, N] the last read of the layer gave; None: all."""
        state = self._layers[layer]
        if not state.used or state.choice is None:
            return None
        if state.visible is None:
            pairs = state.choice.pairs
            state.visible = torch.zeros(*pairs.shape[:2], self.request.length, dtype=torch.bool, device=pairs.device)
            state.visible.scatter_(2, torch.cat([2 * pairs, 2 * pairs + 1], dim=2), True)
            state.visible[..., self._cut :] = True
            if self._forced:
                state.visible[..., self._forced_tokens] = True
        return state.visible

    def end_pass(self) -> None:
        super().end_pass()
        hidden = [s.choice.hidden for s in self._layers if s.used and s.choice and s.choice.hidden is not None]
        if hidden:  # counted once a pass, since it waits for the device
            self.network.counters.kept_keys += int((~torch.stack(hidden)).sum())

    def _renews(self, rows: Rows) -> bool:
        """Whether these rows renew everything that is filtered; for positions that only the device knows, whether they
        are as many and more than lie behind it."""
        if rows.span is not None:
            return bool(rows.span.start == 0 and rows.span.stop >= self._cut)
        return rows.lowest == 0 and rows.count >= max(self._cut, self.request.length - self._limit + 1)

    def _joint(self, layer: int, state: _Layer, choice: _Choice) -> tuple[Tensor, ...]:
        """One piece of everything kept: what is behind the filtered positions, the pairs, the forced tokens."""
        shape = (*choice.pairs.shape[:2], -1)
        assert self._rest is not None
        rest = self._rest.expand(shape)
        key = (state.version, self._forced)
        if choice.joint is not None and choice.joint[0] == key:
            piece = choice.joint[1]
            for kept, fresh in zip(piece, self.lower.gather(layer, rest, 2), strict=False):
                kept[:, :, : fresh.shape[2] - self._odd] = fresh[:, :, self._odd :]
            return piece
        forced = [(self._forced_pairs * 2).expand(shape)] if self._forced else []
        k, v = self.lower.gather(layer, torch.cat([rest, choice.pairs * 2, *forced], dim=2), 2)
        piece = (k[:, :, self._odd :], v[:, :, self._odd :])
        choice.hidden = None
        if self._forced:
            piece = (*piece, self._bias(choice, piece[0]))
        if self.options.reselect_every > 1:
            choice.joint = (key, piece)
        return piece

    def _bias(self, choice: _Choice, k: Tensor) -> Tensor:
        """Hides the neighbours of forced tokens, and forced tokens that the selection holds already."""
        pairs = choice.pairs
        wanted = self._forced_pairs.repeat(*pairs.shape[:2], 1)
        place = torch.searchsorted(pairs, wanted).clamp(max=pairs.shape[2] - 1)
        double = pairs.gather(2, place) == wanted
        choice.hidden = double.repeat_interleave(2, dim=2) | self._neighbours
        bias = k.new_zeros(*k.shape[:2], 1, k.shape[2])
        bias[..., -choice.hidden.shape[2] :].masked_fill_(choice.hidden.unsqueeze(2), -math.inf)
        return bias

    def _force(self, positions: tuple[int, ...]) -> None:
        """Sets the forced tokens, the pairs they lie in, and which tokens of those pairs are not forced."""
        if positions != self._forced:
            self._forced, device = positions, self.network.device
            pairs = sorted({p >> 1 for p in positions})
            self._forced_tokens, self._forced_pairs = (torch.tensor(p, device=device) for p in (positions, pairs))
            self._neighbours = torch.tensor(
                [p not in positions for i in pairs for p in (2 * i, 2 * i + 1)], device=device
            )

    # -- selection --------------------------------------------------------------------------------------------------

    def _choose(self, layer: int, state: _Layer, q: Tensor) -> Tensor:
        """The kept pairs [B, Hkv, k], ascending, for scaled queries [B, Hkv, R, d]."""
        if self._literal:
            return self._choose_literally(layer, q)
        room = self._cut if self.options.scope == "prompt" else self.request.canvas.stop
        state.regions.renew(self.lower, layer, self._cut, room)
        regions: Tensor | None = None
        for scale, share in zip(range(self.options.levels, 0, -1), self.options.shares, strict=True):
            keys = state.regions.levels[scale - 1]
            keys = keys[:, :, : self._cut >> scale] if regions is None else gather_runs(keys, regions * 2, 2)
            kept = self._best(q, keys, share)
            regions = kept if regions is None else 2 * regions.gather(2, kept >> 1) + (kept & 1)
        assert regions is not None
        return regions

    def _choose_literally(self, layer: int, q: Tensor) -> Tensor:
        """The same by the paper's letter: transform what is left of the keys, gather, and again at the next scale."""
        self.network.counters.index_builds += 1
        transform = self._layers[layer].regions.transform
        left = torch.arange(self._cut, device=q.device).expand(*q.shape[:2], -1)
        keys = self.lower.whole(layer)[0][:, :, : self._cut]
        for scale, share in zip(range(self.options.levels, 0, -1), self.options.shares, strict=True):
            kept = self._best(q, transform(keys, left, scale), share)
            tokens = (kept << scale).unsqueeze(-1) + torch.arange(1 << scale, device=q.device)
            left = left.gather(2, tokens.flatten(2))
            if scale > 1:
                keys = self.lower.gather(layer, left)[0]
        return left[:, :, ::2] >> 1

    def _best(self, q: Tensor, keys: Tensor, share: float) -> Tensor:
        """The best share of the regions, ascending: most attended by all rows and query heads of the group."""
        b, h, n, _ = keys.shape
        if share >= 1:
            return torch.arange(n, device=q.device).expand(b, h, -1)
        found = votes(q, keys)
        if self.options.group == "layer":
            found = found.sum(dim=1, keepdim=True).expand(b, h, n)
        return best_share(found, share)

    # -- reports ----------------------------------------------------------------------------------------------------

    def kept(self, layer: int) -> list[list[int]] | None:
        """The filtered positions that each key head of the layer read in the last pass; None: all of them."""
        state = self._layers[layer]
        if not state.used or state.choice is None:
            return None
        tail = range(self._cut, self._limit)
        pairs = state.choice.pairs[0].tolist()
        return [sorted({*(p for i in head for p in (2 * i, 2 * i + 1)), *self._forced, *tail}) for head in pairs]

    def bytes(self) -> dict[str, int]:
        choices = [s.choice for s in self._layers if s.choice is not None]
        joint = [t for c in choices if c.joint is not None for t in c.joint[1]]
        return {
            **super().bytes(),
            "region_keys": held_bytes(t for s in self._layers for t in s.regions.levels),
            "indices": held_bytes([self._rest, *(t for c in choices for t in (c.pairs, c.hidden))]),
            "selected": held_bytes(joint),
        }

    def report(self) -> dict[str, Any]:
        """How much was filtered, and how many positions each key head of a layer kept, forced ones aside."""
        tail = self._limit - self._cut
        counts = [s.choice.pairs.shape[2] * 2 + tail if s.used and s.choice else None for s in self._layers]
        shown: dict[str, Any] = {"filtered": self._limit, "kept_per_head": counts}
        if 0 < max(c or 0 for c in counts) <= _IDS_SHOWN:
            shown["kept"] = [self.kept(i) for i in range(len(self._layers))]
        return {**super().report(), **shown}


@dataclass(frozen=True)
class WaveFilterTunedOptions(WaveFilterOptions):
    """Options of WaveFilter, other defaults."""

    keep: tuple[float, ...] = option(
        (0.6, 0.27), "share of the regions kept at each scale, coarse to fine; the last holds for the scales left",
        above=0, high=1,
    )  # fmt: skip
    norm: Literal["ortho", "mean"] = option("mean", "a region's key: orthonormal transform, or mean of its keys")
    force_keep: int = option(4, "first tokens that are always kept, beside the selection", low=0)


class WaveFilterTuned(WaveFilter):
    """WaveFilter lenient at the coarse scale and strict at the fine one, at the same share of tokens."""

    name = "wavefilter_tuned"
    summary = "wavefilter with keep=[0.6,0.27], region means and the first 4 tokens kept"
    cost = "as wavefilter, 0.435 of the prompt's attention"
    options_class = WaveFilterTunedOptions
