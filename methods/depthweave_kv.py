"""DepthWeave-KV: the prompt's keys and values as low-rank codes on bases that neighbouring layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.caching.memory import Memory, Pieces, held_bytes
from dllm_bench.caching.part import Part
from dllm_bench.caching.rows import Rows
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.methods import depthweave_codec as codec
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.windows import Window
else:
    torch = LazyModule("torch")

__all__ = ["DepthWeaveKv", "DepthWeaveKvOptions", "DepthWeaveTuned", "DepthWeaveTunedOptions"]

_WEIGHTS_AT_ONCE = 1 << 24  # attention weights held at a time while response rows are watched
_PROBE_ROWS, _PROBE_HEADS = 16, 2
_CARRY = 0.5  # share of the old second moment in the new one
_RAISE, _LOWER, _CALM, _BOUNDS = 1.25, 0.9, 3, (0.25, 4.0)


@dataclass(frozen=True)
class DepthWeaveKvOptions(Options):
    """Options of DepthWeave-KV."""

    rank: int = option(24, "coefficients per vector, each in 8 bits", low=1)
    window: int = option(4, "neighbouring layers that share a basis; 1 gives every layer its own", low=1)
    center: bool = option(False, "take the prompt's mean off before coding, per layer and head")
    salience: bool = option(False, "fit the basis to tokens weighted by the attention they get")
    dense_top: float = option(
        0.0, "share of the tokens, most important first, that keep their whole residual in 4 bits", low=0, high=1
    )
    shares: tuple[float, ...] = option(
        (0.05, 0.15, 0.3), "shares of the tokens that keep the 8, 4 and 2 largest channels of their residual in 4 bits",
        low=0, high=1,
    )  # fmt: skip
    tolerance: float = option(0.1, "relative error of attention outputs above which a window keeps more", low=0)
    delimiters: Literal["auto"] | tuple[int, ...] = option(
        "auto", "token ids that count as more important; auto: line breaks, punctuation and special tokens", low=0
    )

    def check(self) -> None:
        if len(self.shares) != len(codec.LEVELS):
            near = ",".join(str(s) for s in (*self.shares, 0.0, 0.0, 0.0)[: len(codec.LEVELS)])
            raise UserError(
                f"depthweave_kv option shares needs {len(codec.LEVELS)} values (for 8, 4 and 2 channels), "
                f"got {len(self.shares)}: nearest valid: shares=[{near}]"
            )


@dataclass
class _Group:
    """A window of layers.

    Attributes:
        coded: the layers that use its basis. moment: second moments [2, G, d, d] over the refreshes so far, the upper
            triangle alone. scale: of the shares. calm: probes below the tolerance in a row. error: the last probe's.
    """

    layers: range
    coded: list[int]
    moment: Tensor | None = None
    basis: Tensor | None = None
    scale: float = 1.0
    calm: int = 0
    error: float | None = None


@dataclass
class _Layer:
    """One layer.

    Attributes:
        codes: the prompt as of its last refresh.
        k, v: exact keys (after RoPE) and values, of all positions behind the prompt, then of `renewed` prompt positions
            that passes computed since.
        raw: during a refresh, keys before RoPE and values [2, B, Hkv, N, d] of all positions.
        mass, spike: sum and maximum of the attention [G, P] that the prompt got in it from response rows.
        asked: the last of those rows' queries, of the heads that are probed.
    """

    codes: codec.Codes | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    renewed: dict[int, int] = field(default_factory=dict)
    raw: Tensor | None = None
    mean: Tensor | None = None
    mass: Tensor | None = None
    spike: Tensor | None = None
    asked: Tensor | None = None

    def let_go(self) -> None:
        """Drops what only a refresh needs."""
        self.raw = self.mean = self.mass = self.spike = self.asked = None


class DepthWeaveKv(Memory):
    """A refresh is exact; behind each of its layers' windows the prompt is coded anew, and the exact form is let go. Later
    passes decode one layer at a time. Everything behind the prompt stays exact, and so do prompt rows that a pass
    between two refreshes computes. It keeps everything itself: the memory below stays empty."""

    name = "depthweave_kv"
    paper = "DepthWeave-KV, arXiv 2607.06523, section 3 (no public code)"
    summary = "prompt K/V as 8-bit low-rank codes and routed 4-bit residuals (adapted: training-free router and gates)"
    caveat = "adapted: training-free router and gates"
    cost = (
        "memory for time: about rank + 6 bytes per prompt vector of K or V, bases and second moments per window; a decode "
        "of the prompt per layer and pass, and a fit, two codings at most and a probe per refresh"
    )
    notes = (
        "The paper describes a growing cache of an autoregressive model, trains gates and router, and names no "
        "hyperparameters. Here the prompt's codes are replaced at every refresh; the router ranks tokens by the attention "
        "of the response rows (mass, largest weight) and by a delimiter flag, the gate is the least-squares one, and the "
        "error is probed at refreshes, where exact K and V exist. Keys are coded before RoPE. The basis moves by an "
        "average of second moments over refreshes. A basis shared by layers saves only its own bytes, and costs error: "
        "window=1 is more exact at almost the same size. depthweave_tuned adds what finds needles: centring, salience "
        "weights, and the top tokens whole."
    )
    options_class = DepthWeaveKvOptions
    options: DepthWeaveKvOptions
    base = "fast_dllm"
    takes_values = True

    @classmethod
    def check_stack(cls, method: type[Part], below: tuple[type[Part], ...]) -> None:
        if below:
            raise UserError(f"{cls.name} keeps all keys and values itself, so it lies lowest: put '{below[-1].name}' on it")

    @property
    def exact(self) -> bool:
        """Prompt rows come back reduced, so a refresh writes all of them."""
        return False

    # -- life cycle -------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        super().begin(request)
        config = request.network.config
        if config.head_dim > codec.LARGEST_HEAD:
            raise UserError(f"{self.name} codes heads of at most {codec.LARGEST_HEAD} channels, not {config.head_dim}")
        self._prompt, self._length = request.canvas.start, request.length
        self._layers = [_Layer() for _ in range(config.num_layers)]
        self._groups = [_Group(*w) for w in codec.layer_windows(config.num_layers, self.options.window)]
        self._scratch: list[Tensor] = []
        self._coded = False

    def begin_pass(self, window: Window, refresh: bool) -> None:
        super().begin_pass(window, refresh)
        self._fresh_from = 0 if refresh else len(self._layers)
        self._here: int | None = None
        self._coded = False
        for group in self._groups:
            group.error = None

    def begin_refresh(self, layer: int) -> None:
        """From this layer on the pass writes all rows."""
        self._fresh_from = layer

    def end_pass(self) -> None:
        super().end_pass()
        self._leave()
        self._scratch, self._here = [], None

    def end(self) -> None:
        super().end()
        del self._layers, self._groups, self._scratch

    # -- keys and values --------------------------------------------------------------------------------------------

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        turned = self.network.rope(k, rows.where)
        if self._codes_soon(layer):
            self._enter(layer, k)
            raw = self._layers[layer].raw
            assert raw is not None
            rows.put(raw[0], k, dim=2)
            rows.put(raw[1], v, dim=2)
            rows.put(self._scratch[0], turned, dim=2)
            return
        places = self._places(layer, rows, k)
        places.put(self._layers[layer].k, turned, dim=2)
        places.put(self._layers[layer].v, v, dim=2)
        if layer == self._here:
            rows.put(self._scratch[0], turned, dim=2)
            rows.put(self._scratch[1], v, dim=2)

    def write_values(self, layer: int, rows: Rows, v: Tensor) -> None:
        """Values alone, of rows whose keys were written before in their exact form."""
        state = self._layers[layer]
        if self._codes_soon(layer):
            self._enter(layer, v)
            rows.put(state.raw[1] if state.raw is not None else None, v, dim=2)
            return
        known = len(state.renewed)
        self._places(layer, rows, v).put(state.v, v, dim=2)
        assert len(state.renewed) == known, "values of a coded prompt row came without keys"
        if layer == self._here:
            rows.put(self._scratch[1], v, dim=2)

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        if self._codes_soon(layer):
            self._watch(layer, q, rows)
        return [self.whole(layer)]

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        state = self._layers[layer]
        if self._codes_soon(layer):
            assert layer == self._here and state.raw is not None, "read before write"
            return self._scratch[0], state.raw[1]
        assert state.k is not None and state.v is not None, "read before write"
        if self._prompt == 0:
            return state.k, state.v
        if layer != self._here:
            self._decode(layer, state.k, state.v)
        return self._scratch[0], self._scratch[1]

    def gather(self, layer: int, first: Tensor, run: int = 1) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values [B, Hkv, n * run, d] of the runs of `run` neighbouring positions that begin at
        first [B, Hkv, n]: decodes these alone."""
        where = (first.unsqueeze(3) + torch.arange(run, device=first.device)).flatten(2)
        state = self._layers[layer]
        if layer == self._here or self._prompt == 0 or state.codes is None:
            index = where.unsqueeze(3).expand(-1, -1, -1, self.network.config.head_dim)
            k, v = self.whole(layer)
            return k.gather(2, index), v.gather(2, index)
        assert state.k is not None and state.v is not None
        flat = where.flatten(0, 1)
        tokens = flat.clamp(max=self._prompt - 1)
        heads = torch.arange(len(flat), device=flat.device)
        decoded = codec.decode(state.codes, self._precise(state.k), heads, tokens).to(state.k.dtype)
        decoded = decoded.unflatten(1, where.shape[:2])
        places, kept = self._slots(state, where)
        index = places.unsqueeze(3).expand_as(decoded[0])
        k = torch.where(kept, state.k.gather(2, index), self.network.rope(decoded[0], tokens.view_as(where)))
        return k, torch.where(kept, state.v.gather(2, index), decoded[1])

    def _slots(self, state: _Layer, where: Tensor) -> tuple[Tensor, Tensor]:
        """Where positions lie among the exact ones (0 for coded ones), and which are exact [..., 1]."""
        table = torch.arange(-self._prompt, self._length - self._prompt)
        for position, place in state.renewed.items():
            table[position] = place
        places = table.to(where.device)[where]
        return places.clamp(min=0), (places >= 0).unsqueeze(3)

    def _codes_soon(self, layer: int) -> bool:
        """Whether this pass refreshes the layer, so that its prompt is exact now and coded afterwards."""
        return layer >= self._fresh_from and self._prompt > 0

    def _places(self, layer: int, rows: Rows, like: Tensor) -> Rows:
        """Where rows lie among the exact positions of a layer; makes room for prompt rows that have none."""
        state, ahead = self._layers[layer], self._prompt
        if state.k is None:
            shape = (*like.shape[:2], self._length - ahead, like.shape[3])
            state.k, state.v = like.new_zeros(shape), like.new_zeros(shape)
        if rows.span is not None and rows.span.start >= ahead:
            return Rows.range(rows.span.start - ahead, rows.span.stop - ahead)
        positions = range(rows.span.start, rows.span.stop) if rows.span is not None else rows.where.tolist()
        fresh = [p for p in positions if p < ahead and p not in state.renewed]
        if fresh:
            for p in fresh:
                state.renewed[p] = self._length - ahead + len(state.renewed)
            more = state.k.new_zeros(*state.k.shape[:2], len(fresh), state.k.shape[3])
            assert state.v is not None
            state.k, state.v = torch.cat([state.k, more], dim=2), torch.cat([state.v, more], dim=2)
        return Rows.of([p - ahead if p >= ahead else state.renewed[p] for p in positions], like.device)

    def _decode(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Fills the scratch with all positions of the layer: the only decoded form that exists at a time."""
        state, ahead, behind = self._layers[layer], self._prompt, self._length - self._prompt
        assert state.codes is not None
        shape = (*k.shape[:2], self._length, k.shape[3])
        self._scratch += [k.new_empty(shape) for _ in range(2 - len(self._scratch))]
        decoded = codec.decode(state.codes, self._precise(k)).unflatten(1, k.shape[:2])
        decoded_k = self.network.rope(decoded[0].to(k.dtype), slice(0, ahead))
        for whole, coded, exact in zip(self._scratch, (decoded_k, decoded[1]), (k, v), strict=True):
            whole[:, :, :ahead] = coded
            whole[:, :, ahead:] = exact[:, :, :behind]
            if state.renewed:
                whole[:, :, list(state.renewed)] = exact[:, :, behind:]
        self._here = layer

    # -- a refresh --------------------------------------------------------------------------------------------------

    def _enter(self, layer: int, like: Tensor) -> None:
        """Opens a layer of a refresh: buffers of all positions, with what is exact of the rest already in them."""
        if layer == self._here:
            return
        self._leave()
        state, ahead, behind = self._layers[layer], self._prompt, self._length - self._prompt
        shape = (*like.shape[:2], self._length, like.shape[3])
        if not self._scratch:
            self._scratch = [like.new_empty(shape)]
        state.raw = like.new_empty((2, *shape))
        if state.k is not None and state.v is not None:
            self._scratch[0][:, :, ahead:] = state.k[:, :, :behind]
            state.raw[1][:, :, ahead:] = state.v[:, :, :behind]
        self._here = layer

    def _leave(self) -> None:
        """Closes the open layer of a refresh: keeps its rest, and codes the windows that end with it."""
        layer = self._here
        if layer is None or not self._codes_soon(layer):
            return
        state, ahead = self._layers[layer], self._prompt
        assert state.raw is not None
        state.k, state.v = self._scratch[0][:, :, ahead:].clone(), state.raw[1][:, :, ahead:].clone()
        state.renewed = {}
        if self.options.center:
            mean = self._exact(state).mean(dim=2, keepdim=True)
            state.mean = mean.half()
        for group in self._groups:
            if group.layers[-1] == layer:
                self._code(group)
        first = min((g.layers[0] for g in self._groups if g.layers[-1] > layer), default=len(self._layers))
        for done in self._layers[: min(first, layer + 1)]:
            done.let_go()

    def _exact(self, state: _Layer) -> Tensor:
        """Exact keys before RoPE and values of the prompt [2, G, P, d], in the precision that coding needs."""
        assert state.raw is not None
        return state.raw[:, :, :, : self._prompt].flatten(1, 2).to(self._precise(state.raw))

    def _precise(self, t: Tensor) -> torch.dtype:
        return torch.promote_types(t.dtype, torch.float32)

    def _watch(self, layer: int, q: Tensor, rows: Rows) -> None:
        """Attention of the response rows among these to the prompt."""
        canvas, state = self.request.canvas, self._layers[layer]
        keys = self.whole(layer)[0]
        b, h, n = keys.shape[:3]
        asked = _between(rows, q, canvas.start, canvas.stop)
        if asked.shape[2] == 0:
            return
        if state.mass is None or state.spike is None:
            state.mass = state.spike = torch.zeros(b * h, self._prompt, device=q.device)
        for some in asked.split(max(1, _WEIGHTS_AT_ONCE // (b * q.shape[1] * n)), dim=2):
            weights = self.network.attention_rows(some, [keys])[..., : self._prompt].unflatten(1, (h, -1))
            state.mass = state.mass + weights.sum(dim=(2, 3)).flatten(0, 1)
            state.spike = state.spike.maximum(weights.amax(dim=(2, 3)).flatten(0, 1))
        heads = min(_PROBE_HEADS, h) * (q.shape[1] // h)
        state.asked = asked[:, :heads, -_PROBE_ROWS:].clone()

    def _code(self, group: _Group) -> None:
        """Codes the layers of a window that this pass refreshed. Where it refreshed only some of the window's layers,
        the basis stays."""
        fresh = [i for i in group.layers if self._codes_soon(i)]
        coded = [i for i in group.coded if self._codes_soon(i)]
        if not coded:
            return
        mass, spike = self._attention(fresh)
        order = codec.token_order(mass, spike, self._flags(len(mass)))
        if len(fresh) == len(group.layers):
            self._fit(group, mass)
        assert group.basis is not None, "the first pass refreshes every layer"
        parts = {}
        for i in coded:
            parts[i] = codec.encode_base(self._centred(i), self._layers[i].mean, group.basis)
        self._encode(group, order, parts)
        if self._control(group, coded):
            self._encode(group, order, parts)
        self._coded = True

    def _attention(self, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The largest mass and spike [G, P] over layers; zeros where no response row was read."""
        found = [(s.mass, s.spike) for s in (self._layers[i] for i in layers) if s.mass is not None]
        if not found:
            raw = self._layers[layers[0]].raw
            assert raw is not None
            nothing = torch.zeros(raw.shape[1] * raw.shape[2], self._prompt, device=raw.device)
            return nothing, nothing
        mass, spike = zip(*found, strict=True)
        return torch.stack(mass).amax(dim=0), torch.stack(spike).amax(dim=0)

    def _flags(self, heads: int) -> Tensor:
        """Which prompt tokens are delimiters, for every head [G, P]."""
        wanted = self.options.delimiters
        if wanted == "auto":
            text = self.request.codec
            wanted = () if text is None else tuple(sorted(text.delimiter_ids))
        ids = self.request.ids[:, : self._prompt]
        flags = torch.isin(ids, torch.tensor(wanted, dtype=ids.dtype, device=ids.device))
        return flags.repeat_interleave(heads // len(ids), dim=0)

    def _centred(self, layer: int) -> Tensor:
        state = self._layers[layer]
        y = self._exact(state)
        return y if state.mean is None else y - state.mean.to(y.dtype)

    def _fit(self, group: _Group, mass: Tensor) -> None:
        """Moves the window's second moment towards this refresh's, and takes the basis from it."""
        weights = None
        if self.options.salience:
            total = mass.sum(dim=1, keepdim=True)
            weights = 1 + 5 * self._prompt * mass / total.clamp(min=torch.finfo(mass.dtype).tiny)
        moment = codec.second_moment([self._centred(i) for i in group.layers], weights)
        d = moment.shape[-1]
        row, column = torch.triu_indices(d, d, device=moment.device)
        if group.moment is not None:
            old = torch.zeros_like(moment)
            old[..., row, column] = group.moment
            old[..., column, row] = group.moment
            moment = _CARRY * old + (1 - _CARRY) * moment
        group.moment = moment[..., row, column]
        group.basis = codec.fit_basis(moment, self.options.rank)

    def _encode(self, group: _Group, order: Tensor, parts: dict[int, tuple[codec.Base, Tensor]]) -> None:
        marks = codec.route(order, self.options.shares, group.scale, self.options.dense_top)
        for layer, (base, left) in parts.items():
            self._layers[layer].codes = codec.encode_residual(base, left, marks)

    def _control(self, group: _Group, layers: Sequence[int]) -> bool:
        """Probes the window; whether it must be coded again because its shares grew."""
        errors = [e for e in map(self._probe, layers) if e is not None]
        if not errors:
            return False
        group.error = float(torch.stack(errors).mean())
        if group.error > self.options.tolerance:
            group.scale, group.calm = min(_BOUNDS[1], _RAISE * group.scale), 0
            return True
        group.calm += 1
        if group.calm == _CALM:
            group.scale, group.calm = max(_BOUNDS[0], _LOWER * group.scale), 0
        return False

    def _probe(self, layer: int) -> Tensor | None:
        """Mean relative error of the attention outputs of the last response rows, over a few heads."""
        state, ahead = self._layers[layer], self._prompt
        if state.asked is None:
            return None
        assert state.codes is not None and state.raw is not None and state.k is not None and state.v is not None
        b, h = state.k.shape[:2]
        few = min(_PROBE_HEADS, h)
        heads = torch.arange(b * h, device=state.k.device).view(b, h)[:, :few].flatten()
        tokens = torch.arange(ahead, device=heads.device).expand(len(heads), -1)
        decoded = codec.decode(state.codes, self._precise(state.k), heads, tokens).unflatten(1, (b, few))
        outputs = []
        for k, v in (state.raw[:, :, :few, :ahead], decoded.to(state.k.dtype)):
            keys = [self.network.rope(k, slice(0, ahead)), state.k[:, :few]]
            weights = self.network.attention_rows(state.asked, keys).unflatten(1, (few, -1)).flatten(2, 3)
            values = torch.cat([v, state.v[:, :few]], dim=2).to(self._precise(v))
            outputs.append((weights.to(values.dtype) @ values).flatten(2))
        exact, coded = outputs
        return ((exact - coded).norm(dim=2) / (exact.norm(dim=2) + 1e-6)).mean()

    # -- reports ----------------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        kinds: dict[str, list[Tensor | None]] = {"codes": [], "scales": [], "indices": [], "means": []}
        for state in self._layers:
            for kind, tensors in state.codes.tensors().items() if state.codes is not None else ():
                kinds[kind] += tensors
        kinds["bases"] = [g.basis for g in self._groups]
        kinds["moments"] = [g.moment for g in self._groups]
        kinds["keys"], kinds["values"] = [s.k for s in self._layers], [s.v for s in self._layers]
        return {kind: held_bytes(tensors) for kind, tensors in kinds.items()}

    def nominal_bytes(self) -> dict[str, float] | None:
        held, formula = self.bytes(), self._formula()
        kinds = {"codes": "code_bytes", "bases": "basis_bytes", "means": "mean_bytes"}
        return {**{k: formula[name] for k, name in kinds.items()}, "keys": held["keys"], "values": held["values"]}

    def _formula(self) -> dict[str, float]:
        """Nominal bytes of what is coded, and of the same in 16 bits."""
        codes = [s.codes for s in self._layers if s.codes is not None]
        vectors = sum(c.base.coefficients.shape[:3].numel() for c in codes)
        return {
            "code_bytes": sum(c.nominal_bytes() for c in codes),
            "basis_bytes": 2 * sum(g.basis.numel() for g in self._groups if g.basis is not None),
            "mean_bytes": 2 * sum(c.base.mean.numel() for c in codes if c.base.mean is not None),
            "raw_bytes": 2 * vectors * self.network.config.head_dim,
        }

    def report(self) -> dict[str, Any]:
        """After a pass that coded: per window the probe's error (None: not coded) and the scale of its shares, and the
        nominal bytes."""
        if not self._coded:
            return super().report()
        shown = {"probe_error": [g.error for g in self._groups], "scale": [g.scale for g in self._groups]}
        return {**super().report(), **shown, **self._formula()}


def _between(rows: Rows, q: Tensor, start: int, stop: int) -> Tensor:
    """The queries [B, H, m, d] of those rows that lie between two positions, in order of position."""
    if rows.span is not None:
        first = max(start, rows.span.start)
        last = max(first, min(stop, rows.span.stop))
        return q[:, :, first - rows.span.start : last - rows.span.start]
    assert rows.index is not None
    inside = sorted((p, i) for i, p in enumerate(rows.index.tolist()) if start <= p < stop)
    return q.index_select(2, torch.tensor([i for _, i in inside], device=q.device, dtype=torch.long))


@dataclass(frozen=True)
class DepthWeaveTunedOptions(DepthWeaveKvOptions):
    """Options of DepthWeave-KV, other defaults."""

    center: bool = option(True, "take the prompt's mean off before coding, per layer and head")
    salience: bool = option(True, "fit the basis to tokens weighted by the attention they get")
    dense_top: float = option(
        0.02, "share of the tokens, most important first, that keep their whole residual in 4 bits", low=0, high=1
    )


class DepthWeaveTuned(DepthWeaveKv):
    """DepthWeave-KV with what single important tokens need."""

    name = "depthweave_tuned"
    summary = (
        "depthweave_kv with center=true, salience=true, dense_top=0.02 (adapted: training-free router and gates)"
    )
    options_class = DepthWeaveTunedOptions
