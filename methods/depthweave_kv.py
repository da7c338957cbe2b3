"""DepthWeave-KV: the prompt's keys and values as low-rank codes on bases that neighbouring layers share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.caching.memory import Memory, Pieces, held_bytes
from dllm_bench.caching.part import Part
from dllm_bench.caching.rows import Rows
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.methods.depthweave_codec import LARGEST_HEAD, LEVELS, Codes, decode, decode_some
from dllm_bench.methods.depthweave_coder import Coder, Fresh, precise
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.request import Request
    from dllm_bench.decoding.windows import Window
else:
    torch = LazyModule("torch")

__all__ = ["DepthWeaveKv", "DepthWeaveKvOptions", "DepthWeaveTuned", "DepthWeaveTunedOptions"]

_DECODED_AT_ONCE = 1 << 27  # numbers of a layer that are decoded at a time


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
        if len(self.shares) != len(LEVELS):
            near = ",".join(str(s) for s in (*self.shares, 0.0, 0.0, 0.0)[: len(LEVELS)])
            raise UserError(
                f"depthweave_kv option shares needs {len(LEVELS)} values (for 8, 4 and 2 channels), "
                f"got {len(self.shares)}: nearest valid: shares=[{near}]"
            )


@dataclass
class _Layer:
    """What one layer holds between passes.

    Attributes:
        codes: the prompt as of its last refresh.
        k, v: exact keys (after RoPE) and values, of all positions behind the prompt, then of prompt positions that
            passes computed since; `renewed` says where each of those lies.
    """

    codes: Codes | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    renewed: dict[int, int] = field(default_factory=dict)


class DepthWeaveKv(Memory):
    """A refresh is exact; as soon as it has a whole window of layers, their prompt is coded and the exact form let go.
    Later passes decode one layer at a time. What is behind the prompt stays exact, and so do prompt rows that a pass
    between two refreshes computes. It keeps everything itself: the memory below stays empty."""

    name = "depthweave_kv"
    paper = "DepthWeave-KV, arXiv 2607.06523, section 3 (no public code)"
    summary = "prompt K/V as 8-bit low-rank codes and routed 4-bit residuals"
    caveat = "adapted: training-free router and gates"
    cost = (
        "saves memory, not time: holds about rank + 6 bytes per prompt vector of K or V, bases and second moments per "
        "window; a decode of the prompt per layer and pass, and a fit, a probe and at most two codings per refresh"
    )
    notes = (
        "The paper describes a growing cache of an autoregressive model, trains gates and router, and names no "
        "hyperparameters. Here the prompt's codes are replaced at every refresh; the router ranks tokens by the "
        "attention of the response rows (mass, largest weight) and by a delimiter flag, the gate is the least-squares "
        "one, and the error is probed at refreshes, where exact K and V exist. Keys are coded before RoPE. The basis "
        "moves by an average of second moments over refreshes. A basis shared by layers saves only its own bytes, and "
        "costs error: window=1 is more exact at almost the same size. depthweave_tuned adds what finds needles: "
        "centring, salience weights, and the top tokens whole."
    )
    options_class = DepthWeaveKvOptions
    options: DepthWeaveKvOptions
    base = "fast_dllm"
    takes_values = True

    @classmethod
    def check_stack(cls, method: type[Part], below: tuple[type[Part], ...]) -> None:
        if below:
            raise UserError(
                f"{cls.name} keeps all keys and values itself, so it lies lowest: put '{below[-1].name}' on it"
            )

    @property
    def exact(self) -> bool:
        """Prompt rows come back reduced, so a refresh writes all of them."""
        return False

    # -- life cycle -------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        super().begin(request)
        config = request.network.config
        if config.head_dim > LARGEST_HEAD:
            raise UserError(f"{self.name} codes heads of at most {LARGEST_HEAD} channels, not {config.head_dim}")
        given, last = self.options.delimiters, config.embedding_size - 1
        if given != "auto" and max(given, default=0) > last:
            raise UserError(f"{self.name} option delimiters: token ids end at {last} (nearest valid), got {max(given)}")
        self._prompt, self._length = request.canvas.start, request.length
        self._layers = [_Layer() for _ in range(config.num_layers)]
        self._coder = Coder(request, self.options)
        self._scratch: list[Tensor] = []
        self._here: int | None = None
        self._asked: tuple[Rows, list[int]] | None = None
        self._coded = False

    def begin_pass(self, window: Window, refresh: bool) -> None:
        super().begin_pass(window, refresh)
        self._fresh_from = 0 if refresh else len(self._layers)
        # a study may have read a layer since the last pass
        self._scratch, self._here = [], None
        self._coded = False
        self._coder.begin_pass()

    def begin_refresh(self, layer: int) -> None:
        """From this layer on the pass writes all rows."""
        self._fresh_from, self._here = layer, None

    def end_pass(self) -> None:
        super().end_pass()
        self._leave()
        self._scratch, self._here, self._asked = [], None, None
        # from now on what was refreshed is read as it was coded
        self._fresh_from = len(self._layers)

    def end(self) -> None:
        super().end()
        del self._layers, self._coder, self._scratch

    # -- keys and values --------------------------------------------------------------------------------------------

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        turned = self.network.rope(k, rows.where)
        if self._refreshes(layer):
            raw = self._enter(layer, k).raw
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
        """Values alone, of rows whose keys are kept in their exact form."""
        if self._refreshes(layer):
            rows.put(self._enter(layer, v).raw[1], v, dim=2)
            return
        state = self._layers[layer]
        known = len(state.renewed)
        self._places(layer, rows, v).put(state.v, v, dim=2)
        assert len(state.renewed) == known, "values of a coded prompt row came without keys"
        if layer == self._here:
            rows.put(self._scratch[1], v, dim=2)

    def read(self, layer: int, q: Tensor, rows: Rows) -> Pieces:
        k, v = self.whole(layer)
        if self._refreshes(layer):
            self._coder.watch(layer, q, rows, k)
        return [(k, v)]

    def whole(self, layer: int) -> tuple[Tensor, Tensor]:
        if self._refreshes(layer):
            return self._scratch[0], self._coder.fresh[layer].raw[1]
        state = self._layers[layer]
        assert state.k is not None and state.v is not None, "read before write"
        if self._prompt == 0:
            return state.k, state.v
        if layer != self._here:
            shape = (*state.k.shape[:2], self._length, state.k.shape[3])
            self._scratch += [state.k.new_empty(shape) for _ in range(2 - len(self._scratch))]
            self._decode(layer, state.k, state.v, self._scratch)
            self._here = layer
        return self._scratch[0], self._scratch[1]

    def held(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Decoded into buffers of the caller's, so that nothing here changes."""
        state = self._layers[layer]
        if state.k is None or state.v is None:
            return None
        if self._prompt == 0:
            return state.k, state.v
        if state.codes is None:
            return None
        shape = (*state.k.shape[:2], self._length, state.k.shape[3])
        k, v = state.k.new_empty(shape), state.v.new_empty(shape)
        self._decode(layer, state.k, state.v, [k, v])
        return k, v

    def gather(self, layer: int, first: Tensor, run: int = 1) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values [B, Hkv, n * run, d] of the runs of `run` neighbouring positions that begin at
        first [B, Hkv, n]: decodes these alone."""
        where = (first.unsqueeze(3) + torch.arange(run, device=first.device)).flatten(2)
        state = self._layers[layer]
        if layer == self._here or self._prompt == 0:
            index = where.unsqueeze(3).expand(-1, -1, -1, self.network.config.head_dim)
            k, v = self.whole(layer)
            return k.gather(2, index), v.gather(2, index)
        assert state.codes is not None and state.k is not None and state.v is not None, "read before write"
        tokens = where.clamp(max=self._prompt - 1)
        heads = torch.arange(where.shape[0] * where.shape[1], device=where.device)
        decoded = decode_some(state.codes, precise(state.k.dtype), heads, tokens.flatten(0, 1))
        decoded = torch.unflatten(decoded.to(state.k.dtype), 1, where.shape[:2])
        places = self._slots(state, where)
        exact = (places >= 0).unsqueeze(3)
        index = places.clamp(min=0).unsqueeze(3).expand_as(decoded[0])
        k = torch.where(exact, state.k.gather(2, index), self.network.rope(decoded[0], tokens))
        return k, torch.where(exact, state.v.gather(2, index), decoded[1])

    def _slots(self, state: _Layer, where: Tensor) -> Tensor:
        """Where positions lie among the exact ones; negative: they are coded."""
        if not state.renewed:
            return where - self._prompt
        slots = torch.arange(-self._prompt, self._length - self._prompt)
        slots[list(state.renewed)] = torch.tensor(list(state.renewed.values()))
        return slots.to(where.device)[where]

    def _places(self, layer: int, rows: Rows, like: Tensor) -> Rows:
        """Where rows lie among the exact positions of a layer; makes room for prompt rows that have none."""
        state, ahead = self._layers[layer], self._prompt
        if state.k is None or state.v is None:
            shape = (*like.shape[:2], self._length - ahead, like.shape[3])
            state.k, state.v = like.new_zeros(shape), like.new_zeros(shape)
        if rows.span is not None and rows.span.start >= ahead:
            return Rows.range(rows.span.start - ahead, rows.span.stop - ahead)
        positions = self._positions(rows)
        fresh = [p for p in positions if p < ahead and p not in state.renewed]
        if fresh:
            state.renewed |= {p: state.k.shape[2] + i for i, p in enumerate(fresh)}
            more = state.k.new_zeros(*state.k.shape[:2], len(fresh), state.k.shape[3])
            state.k, state.v = torch.cat([state.k, more], dim=2), torch.cat([state.v, more], dim=2)
        return Rows.of([p - ahead if p >= ahead else state.renewed[p] for p in positions], like.device)

    def _positions(self, rows: Rows) -> list[int]:
        """The rows on the host; those of a pass are asked for layer after layer."""
        if self._asked is None or self._asked[0] is not rows:
            where = rows.where
            self._asked = (rows, [*range(where.start, where.stop)] if isinstance(where, slice) else where.tolist())
        return self._asked[1]

    def _decode(self, layer: int, k: Tensor, v: Tensor, into: list[Tensor]) -> None:
        """Fills two buffers with keys and values of all positions of the layer, exact where k and v are."""
        state, ahead, behind = self._layers[layer], self._prompt, self._length - self._prompt
        assert state.codes is not None, "read before the first refresh"
        b, h, _, d = k.shape
        flat = [t.flatten(0, 1)[:, :ahead] for t in into]
        at_once = max(1, _DECODED_AT_ONCE // (2 * ahead * d))
        for first in range(0, b * h, at_once):
            heads = slice(first, min(first + at_once, b * h))
            keys, values = decode(state.codes, precise(k.dtype), heads).to(k.dtype)
            flat[0][heads] = self.network.rope(keys.unsqueeze(0), slice(0, ahead))[0]
            flat[1][heads] = values
        for whole, exact in zip(into, (k, v), strict=True):
            whole[:, :, ahead:] = exact[:, :, :behind]
            if state.renewed:
                whole[:, :, list(state.renewed)] = exact[:, :, behind:]

    # -- refreshes --------------------------------------------------------------------------------------------------

    def _refreshes(self, layer: int) -> bool:
        """Whether this pass refreshes the layer, so that its prompt is exact now and coded afterwards."""
        return layer >= self._fresh_from and self._prompt > 0

    def _enter(self, layer: int, like: Tensor) -> Fresh:
        """Opens a layer of a refresh: buffers of all positions, with what is exact of the rest already in them."""
        if layer == self._here:
            return self._coder.fresh[layer]
        self._leave()
        state, ahead, behind = self._layers[layer], self._prompt, self._length - self._prompt
        shape = (*like.shape[:2], self._length, like.shape[3])
        if not self._scratch:
            self._scratch = [like.new_empty(shape)]
        fresh = self._coder.fresh[layer] = Fresh(like.new_empty((2, *shape)))
        if state.k is not None and state.v is not None:
            self._scratch[0][:, :, ahead:] = state.k[:, :, :behind]
            fresh.raw[1][:, :, ahead:] = state.v[:, :, :behind]
        self._here = layer
        return fresh

    def _leave(self) -> None:
        """Closes the open layer of a refresh: keeps its rest, and takes the codes of the windows that end with it."""
        layer, ahead = self._here, self._prompt
        if layer is None or not self._refreshes(layer):
            return
        state, raw = self._layers[layer], self._coder.fresh[layer].raw
        state.k, state.v = self._scratch[0][:, :, ahead:].clone(), raw[1][:, :, ahead:].clone()
        state.renewed = {}
        for coded, codes in self._coder.close(layer, (state.k, state.v)).items():
            self._layers[coded].codes = codes
            self._coded = True

    # -- reports ----------------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        kinds: dict[str, list[Tensor | None]] = {"codes": [], "scales": [], "indices": [], "means": []}
        for state in self._layers:
            for kind, tensors in state.codes.tensors().items() if state.codes is not None else ():
                kinds[kind] += tensors
        kinds["bases"] = [w.basis for w in self._coder.windows]
        kinds["moments"] = [w.moment for w in self._coder.windows]
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
            "basis_bytes": 2 * sum(w.basis.numel() for w in self._coder.windows if w.basis is not None),
            "mean_bytes": 2 * sum(c.base.mean.numel() for c in codes if c.base.mean is not None),
            "raw_bytes": 2 * vectors * self.network.config.head_dim,
        }

    def report(self) -> dict[str, Any]:
        """After a pass that coded: per window the probe's error (None: not coded) and the scale of its shares, and the
        nominal bytes."""
        if not self._coded:
            return super().report()
        windows = self._coder.windows
        shown = {"probe_error": [w.error for w in windows], "scale": [w.scale for w in windows]}
        return {**super().report(), **shown, **self._formula()}


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
    summary = "depthweave_kv with center=true, salience=true, dense_top=0.02"
    options_class = DepthWeaveTunedOptions
