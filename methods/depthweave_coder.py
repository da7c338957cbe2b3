"""DepthWeave's coder: what a refresh does with the exact keys and values of a prompt, window of layers by window.

Shapes as in depthweave_codec: 2 kinds (K, V), G key heads of all batch rows, P tokens of the prompt, d channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dllm_bench.lazy import LazyModule
from dllm_bench.methods.depthweave_codec import WHOLE, Base, Codes, decode_some, encode, encode_base

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.caching.rows import Rows
    from dllm_bench.methods.depthweave_kv import DepthWeaveKvOptions
else:
    torch = LazyModule("torch")

__all__ = [
    "Coder",
    "Fresh",
    "LayerWindow",
    "fit_basis",
    "layer_windows",
    "precise",
    "route",
    "second_moment",
    "token_order",
]

_WEIGHTS_AT_ONCE = 1 << 24  # attention weights held at a time while response rows are watched
_PROBE_ROWS, _PROBE_HEADS = 16, 2
_CARRY = 0.5  # share of the old second moment in the new one
_RAISE, _LOWER, _CALM, _BOUNDS = 1.25, 0.9, 3, (0.25, 4.0)


def precise(dtype: torch.dtype) -> torch.dtype:
    """The precision that coding and decoding compute in."""
    return torch.promote_types(dtype, torch.float32)


# -- routing ----------------------------------------------------------------------------------------------------------


def token_order(mass: Tensor, spike: Tensor, flags: Tensor) -> Tensor:
    """Tokens [G, P], most important first: by ranks of attention mass and spike [G, P], and half a rank for a flag."""
    score = 2 * (_ranks(mass) + _ranks(spike)) + (mass.shape[1] - 1) * flags.long()
    return score.argsort(dim=1, descending=True, stable=True)


def _ranks(t: Tensor) -> Tensor:
    order = t.argsort(dim=1, stable=True)
    places = torch.arange(t.shape[1], device=t.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def route(order: Tensor, shares: Sequence[float], scale: float, whole: float) -> Tensor:
    """The level mark [G, P] of every token: the first `whole` of the order keep everything, the next ones by `shares`
    (scaled) of LEVELS channels, the rest none."""
    tokens = order.shape[1]
    places = torch.zeros(tokens, dtype=torch.uint8)
    first = 0
    for mark, share in enumerate(shares, start=1):
        count = math.floor(share * scale * tokens + 0.5 + 1e-9)
        places[first : first + count] = mark
        first += count
    if whole > 0:
        places[: max(1, math.floor(whole * tokens + 1e-9))] = WHOLE
    marks = torch.empty_like(order, dtype=torch.uint8)
    return marks.scatter_(1, order, places.to(order.device).expand_as(order))


# -- bases ------------------------------------------------------------------------------------------------------------


def second_moment(layers: Iterable[Tensor], weights: Tensor | None) -> Tensor:
    """Mean of y y^T [2, G, d, d] over layers [2, G, P, d] and tokens, weighted by [G, P]."""
    parts = []
    for y in layers:
        left = y if weights is None else y * weights.to(y.dtype).unsqueeze(2)
        parts.append(left.transpose(2, 3) @ y / y.shape[2])
    return torch.stack(parts).mean(dim=0)


def fit_basis(moment: Tensor, rank: int) -> Tensor:
    """The leading eigenvectors as rows [2, G, min(rank, d), d], in fp16 as they are kept and used."""
    vectors: Tensor = torch.linalg.eigh(moment).eigenvectors
    return vectors[..., -min(rank, moment.shape[-1]) :].flip(-1).transpose(2, 3).half().contiguous()


# -- windows of layers ------------------------------------------------------------------------------------------------


def layer_windows(layers: int, width: int) -> list[LayerWindow]:
    """Overlapping windows. Each layer is coded by the one whose middle is nearest, the lower one in doubt."""
    width = min(width, layers)
    starts = [*range(0, layers - width + 1, max(1, width // 2))]
    if starts[-1] != layers - width:
        starts.append(layers - width)
    windows = [LayerWindow(range(s, s + width), []) for s in starts]
    for layer in range(layers):
        # twice the distance, to stay in whole numbers
        min(windows, key=lambda w: abs(2 * layer - w.layers[0] - w.layers[-1])).coded.append(layer)
    return windows


@dataclass
class LayerWindow:
    """Neighbouring layers with one basis.

    Attributes:
        coded: the layers that use the basis. moment: second moments over the refreshes so far, the upper triangle.
        scale: of the shares. calm: probes in a row that were below the tolerance. error: the last probe's.
    """

    layers: range
    coded: list[int]
    moment: Tensor | None = None
    basis: Tensor | None = None
    scale: float = 1.0
    calm: int = 0
    error: float | None = None

    def fit(self, moment: Tensor, rank: int) -> None:
        """Moves the second moment [2, G, d, d] towards a new one, and takes the basis from it."""
        d = moment.shape[-1]
        row, column = torch.triu_indices(d, d, device=moment.device)
        if self.moment is not None:
            old = torch.empty_like(moment)
            old[..., row, column] = self.moment
            old[..., column, row] = self.moment
            moment = _CARRY * old + (1 - _CARRY) * moment
        self.moment = moment[..., row, column]
        self.basis = fit_basis(moment, rank)

    def judge(self, error: float, tolerance: float) -> bool:
        """Moves the scale by a probe's error; whether the shares grew, so that the window is coded again."""
        self.error = error
        if error > tolerance:
            self.scale, self.calm = min(_BOUNDS[1], _RAISE * self.scale), 0
            return True
        self.calm += 1
        if self.calm == _CALM:
            self.scale, self.calm = max(_BOUNDS[0], _LOWER * self.scale), 0
        return False


@dataclass
class Fresh:
    """One layer during a refresh.

    Attributes:
        raw: exact keys before RoPE and values [2, B, Hkv, N, d] of all positions.
        rest: keys after RoPE and values [2, B, Hkv, N - P, d] behind the prompt. mean: of the prompt [2, G, 1, d].
        mass, spike: sum and maximum of the attention [G, P] that the prompt got from response rows.
        asked: the last of those rows' queries, of the heads that are probed.
    """

    raw: Tensor
    rest: tuple[Tensor, Tensor] | None = None
    mean: Tensor | None = None
    mass: Tensor | None = None
    spike: Tensor | None = None
    asked: Tensor | None = None

    def prompt(self, length: int) -> Tensor:
        """What is coded [2, G, P, d]: the prompt, the mean off."""
        y = self.raw[:, :, :, :length].flatten(1, 2).to(precise(self.raw.dtype))
        return y if self.mean is None else y - self.mean.to(y.dtype)


class Coder:
    """Codes the layers of one request's prompt; holds the exact form of no more layers than its open windows need."""

    def __init__(self, request: Request, options: DepthWeaveKvOptions) -> None:
        self._request, self._network, self._options = request, request.network, options
        self._prompt = request.canvas.start
        self.windows = layer_windows(request.network.config.num_layers, options.window)
        self.fresh: dict[int, Fresh] = {}
        self._flags: Tensor | None = None

    def begin_pass(self) -> None:
        for window in self.windows:
            window.error = None

    def watch(self, layer: int, q: Tensor, rows: Rows, keys: Tensor) -> None:
        """Books the attention that response rows among these pay to the prompt; keys [B, Hkv, N, d] after RoPE."""
        canvas, fresh = self._request.canvas, self.fresh[layer]
        b, h, n = keys.shape[:3]
        asked = _between(rows, q, canvas.start, canvas.stop)
        if asked.shape[2] == 0:
            return
        if fresh.mass is None or fresh.spike is None:
            fresh.mass = fresh.spike = torch.zeros(b * h, self._prompt, device=q.device)
        for some in torch.split(asked, max(1, _WEIGHTS_AT_ONCE // (b * q.shape[1] * n)), dim=2):
            weights = torch.unflatten(self._network.attention_rows(some, [keys])[..., : self._prompt], 1, (h, -1))
            fresh.mass = fresh.mass + weights.sum(dim=(2, 3)).flatten(0, 1)
            fresh.spike = fresh.spike.maximum(weights.amax(dim=(2, 3)).flatten(0, 1))
        heads = min(_PROBE_HEADS, h) * (q.shape[1] // h)
        fresh.asked = asked[:, :heads, -_PROBE_ROWS:].clone()

    def close(self, layer: int, rest: tuple[Tensor, Tensor]) -> dict[int, Codes]:
        """A refreshed layer is complete, with its rest behind the prompt: codes of the windows that end here."""
        fresh = self.fresh[layer]
        fresh.rest = rest
        if self._options.center:
            fresh.mean = fresh.prompt(self._prompt).mean(dim=2, keepdim=True).half()
        made: dict[int, Codes] = {}
        for window in self.windows:
            if window.layers[-1] == layer:
                made |= self._code(window)
        needed = min((w.layers[0] for w in self.windows if w.layers[-1] > layer), default=layer + 1)
        self.fresh = {i: f for i, f in self.fresh.items() if i >= needed}
        if not self.fresh:
            self._flags = None
        return made

    def _code(self, window: LayerWindow) -> dict[int, Codes]:
        """Codes those layers of a window that the pass refreshed. The basis moves only when it refreshed them all."""
        fresh = [self.fresh[i] for i in window.layers if i in self.fresh]
        coded = [i for i in window.coded if i in self.fresh]
        if not coded:
            return {}
        mass, spike = self._attention(fresh)
        order = token_order(mass, spike, self._delimiters(len(mass)))
        if len(fresh) == len(window.layers):
            weights = self._salience(mass) if self._options.salience else None
            moment = second_moment((f.prompt(self._prompt) for f in fresh), weights)
            window.fit(moment, self._options.rank)
        assert window.basis is not None, "the first refresh covers every layer"
        bases = {i: encode_base(self.fresh[i].prompt(self._prompt), self.fresh[i].mean, window.basis) for i in coded}
        codes = self._encode(window, order, bases)
        errors = [self._probe(self.fresh[i], c) for i, c in codes.items() if self.fresh[i].asked is not None]
        if errors and window.judge(float(torch.stack(errors).mean()), self._options.tolerance):
            codes = self._encode(window, order, bases)
        return codes

    def _encode(self, window: LayerWindow, order: Tensor, bases: dict[int, Base]) -> dict[int, Codes]:
        marks = route(order, self._options.shares, window.scale, self._options.dense_top)
        return {i: encode(base, self.fresh[i].prompt(self._prompt), marks) for i, base in bases.items()}

    def _attention(self, layers: Sequence[Fresh]) -> tuple[Tensor, Tensor]:
        """The largest mass and spike [G, P] over layers; zeros where no response row was read."""
        mass = [f.mass for f in layers if f.mass is not None]
        spike = [f.spike for f in layers if f.spike is not None]
        if not mass:
            raw = layers[0].raw
            nothing = torch.zeros(raw.shape[1] * raw.shape[2], self._prompt, device=raw.device)
            return nothing, nothing
        return torch.stack(mass).amax(dim=0), torch.stack(spike).amax(dim=0)

    def _salience(self, mass: Tensor) -> Tensor:
        total = mass.sum(dim=1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
        return 1 + 5 * self._prompt * mass / total

    def _delimiters(self, heads: int) -> Tensor:
        """Which prompt tokens are delimiters, for every head [G, P]; the windows of a refresh share them."""
        if self._flags is None:
            wanted = self._options.delimiters
            if wanted == "auto":
                codec = self._request.codec
                wanted = () if codec is None else tuple(codec.delimiter_ids)
            ids = self._request.ids[:, : self._prompt]
            flags = torch.isin(ids, torch.tensor(wanted, dtype=ids.dtype, device=ids.device))
            self._flags = flags.repeat_interleave(heads // len(ids), dim=0)
        return self._flags

    def _probe(self, fresh: Fresh, codes: Codes) -> Tensor:
        """Mean relative error of the attention outputs of the last response rows, over a few heads."""
        assert fresh.asked is not None and fresh.rest is not None
        prompt, dtype = self._prompt, fresh.raw.dtype
        b, h = fresh.raw.shape[1:3]
        few = min(_PROBE_HEADS, h)
        heads = torch.arange(b * h, device=fresh.raw.device).view(b, h)[:, :few].flatten()
        tokens = torch.arange(prompt, device=heads.device).expand(len(heads), -1)
        decoded = torch.unflatten(decode_some(codes, precise(dtype), heads, tokens), 1, (b, few)).to(dtype)
        rest_k, rest_v = (t[:, :few] for t in fresh.rest)
        outputs = []
        for k, v in (fresh.raw[:, :, :few, :prompt], decoded):
            keys = [self._network.rope(k, slice(0, prompt)), rest_k]
            weights = torch.unflatten(self._network.attention_rows(fresh.asked, keys), 1, (few, -1)).flatten(2, 3)
            values = torch.cat([v, rest_v], dim=2).to(precise(dtype))
            outputs.append((weights.to(values.dtype) @ values).flatten(2))
        exact, coded = outputs
        error: Tensor = ((exact - coded).norm(dim=2) / (exact.norm(dim=2) + 1e-6)).mean()
        return error


def _between(rows: Rows, q: Tensor, start: int, stop: int) -> Tensor:
    """The queries [B, H, m, d] of those rows that lie between two positions, in order of position."""
    if rows.span is not None:
        first = max(start, rows.span.start)
        last = max(first, min(stop, rows.span.stop))
        return q[:, :, first - rows.span.start : last - rows.span.start]
    assert rows.index is not None
    inside = sorted((p, i) for i, p in enumerate(rows.index.tolist()) if start <= p < stop)
    return q.index_select(2, torch.tensor([i for _, i in inside], device=q.device, dtype=torch.long))
