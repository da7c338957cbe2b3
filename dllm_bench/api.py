"""The public Python interface: `load_model`, `generate` and `loglikelihood`."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.request import Request
from dllm_bench.caching.shared import Shared
from dllm_bench.caching.spec import MethodSpec, parse_method
from dllm_bench.decoding.canvas import Canvas, check_ids
from dllm_bench.decoding.likelihood import Likelihood, estimate_likelihood
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.sharing import provide
from dllm_bench.errors import UserError
from dllm_bench.models.hub import Model, load_model

if TYPE_CHECKING:
    from dllm_bench.models.counters import Counters

__all__ = ["Generation", "Likelihood", "generate", "load_model", "loglikelihood", "prepare", "useful_length"]


@dataclass(frozen=True)
class Generation:
    """One decoded response.

    Attributes:
        output_ids: ids of the response only; a position never filled (behind a committed EOS, or left over) holds the
            mask id.
        text: the useful tokens as text, special tokens left out; None where the model has no tokenizer.
        nfe: passes. dense_passes: those over all rows. row_layers: rows x layers really computed.
        masks_left: positions that should have been filled and were not.
        useful_tokens: response tokens before the first EOS or end-of-turn token, never masks.
        canvas_tokens: response positions in all.
        seconds: "dense", "partial", "commit", "total". pass_seconds: (kind, seconds) of each pass.
        cache_bytes: bytes held between passes by kind, at their peak; cache_bytes_peak: their sum.
        nominal_bytes: the same bytes by the formula of a method that has one (bit-packed codes); None elsewhere.
        passes: the trajectory, with `trace=True`.
        preparation: "rows", "row_layers" and "seconds" of state that requests can share, where it was made for this one
            alone; not part of counters and seconds. None where it was given (`prepare`) or is not needed.
        probe: the same of a pass before the first commit (a method's own choice of rows); part of counters and seconds.
    """

    output_ids: list[int]
    text: str | None
    nfe: int
    dense_passes: int
    row_layers: int
    masks_left: int
    useful_tokens: int
    canvas_tokens: int
    seconds: dict[str, float]
    pass_seconds: list[tuple[str, float]]
    first_commit_seconds: float | None
    first_block_seconds: float | None
    cache_bytes: dict[str, int]
    cache_bytes_peak: int
    counters: Counters
    passes: list[dict[str, Any]] | None = field(default=None)
    nominal_bytes: dict[str, float] | None = None
    preparation: dict[str, float] | None = None
    probe: dict[str, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """The fields that `dllm-bench generate --json` prints."""
        keys = ("output_ids", "nfe", "dense_passes", "row_layers", "masks_left", "useful_tokens", "text")
        shown = {key: getattr(self, key) for key in keys}
        return shown if self.passes is None else {**shown, "passes": self.passes}


def generate(
    model: Model,
    prompt_ids: Sequence[int],
    method: str | MethodSpec = "fast_dllm",
    options: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | DecodeSettings | None = None,
    trace: bool = False,
    *,
    span: tuple[int, int] | None = None,
    shared: Shared | None = None,
) -> Generation:
    """Decodes one response.

    Args:
        model: from `load_model`.
        prompt_ids: ids of the prompt (of the whole canvas with decode["fill"]).
        method: a method name such as "fast_dllm", or a parsed spec.
        options: the method's options, such as {"mode": "dual"}.
        decode: decode settings by the names of the command line's flags with underscores.
        trace: also return each pass (kind, rows, committed tokens, the method's decisions).
        span: the positions of the prompt that other requests hold too, half-open; for methods that share state.
        shared: that state, from `prepare`; without it such a method makes its own.

    Raises:
        UserError: one line naming what is wrong and the nearest valid choice; nothing was computed.
    """
    spec, settings, canvas = _laid_out(model, prompt_ids, method, options, decode, span)
    codec = model.codec if model.has_codec else None
    run = denoise(model.network, canvas, spec.build, settings, None, span, shared, trace, codec)
    return _generation(model, run, trace)


def prepare(
    model: Model,
    prompt_ids: Sequence[int],
    method: str | MethodSpec,
    options: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | DecodeSettings | None = None,
    *,
    span: tuple[int, int] | None = None,
    reuse: Shared | None = None,
) -> Shared | None:
    """Makes the state that requests with the same span of tokens can share: pass it to `generate` as `shared`.

    Takes what `generate` takes, so that the method finds the same span. It never changes afterwards; its `cost` is paid
    once. None where the method shares nothing in such a request.

    Args:
        reuse: state made before: it is given back when it stands for the same tokens.
    """
    spec, settings, canvas = _laid_out(model, prompt_ids, method, options, decode, span)
    built = spec.build()
    request = Request(model.network, canvas, canvas.ids, settings, span)
    if reuse is not None:
        try:
            return provide(built, replace(request, shared=reuse))[0].shared
        except UserError:
            pass
    return provide(built, request)[1]


def loglikelihood(
    model: Model,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    mc_num: int = 128,
    batch: int = 32,
    seed: int = 0,
) -> Likelihood:
    """Estimates the log-likelihood of an answer behind a prompt (see `decoding/likelihood.py`).

    No method takes part: the passes are independent of each other, and none is cached.

    Args:
        mc_num: noisy copies of the answer; an answer of one token needs one. batch: copies computed together.
        seed: the estimate is a function of it and of the ids alone.

    Raises:
        UserError: one line naming what is wrong; nothing was computed.
    """
    for name, value in (("mc_num", mc_num), ("batch", batch)):
        if value < 1:
            raise UserError(f"{name} must be at least 1 (nearest valid: 1), got {value}")
    prompt, answer = _ids(prompt_ids), _ids(answer_ids)
    check_ids([*enumerate(prompt)], model.config)
    check_ids([*enumerate(answer)] or [(0, prompt[0])], model.config)
    return estimate_likelihood(model.network, prompt, answer, mc_num=mc_num, batch=batch, seed=seed)


def _laid_out(
    model: Model,
    prompt_ids: Sequence[int],
    method: str | MethodSpec,
    options: Mapping[str, Any] | None,
    decode: Mapping[str, Any] | DecodeSettings | None,
    span: tuple[int, int] | None,
) -> tuple[MethodSpec, DecodeSettings, Canvas]:
    """Everything that is checked before anything is computed."""
    if isinstance(method, MethodSpec):
        if options:
            raise UserError("a parsed method spec has its options already")
        spec = method
    else:
        spec = parse_method(method, _values("options", options))
    settings = decode if isinstance(decode, DecodeSettings) else None
    settings = settings or DecodeSettings.make(_values("decode", decode), model.family)
    spec.build().check(settings)
    ids = _ids(prompt_ids)
    _check_span(span, len(ids))
    return spec, settings, Canvas.make(ids, settings, model.config, model.network.device)


def _values(name: str, given: Any) -> dict[str, Any]:
    """A mapping from a call, by names."""
    try:
        return {str(key): value for key, value in dict(given or {}).items()}
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a mapping of names to values, or None, got {given!r}") from None


def _check_span(span: Any, length: int) -> None:
    """Raises UserError for what is no half-open range of a prompt of `length` ids."""
    if span is None:
        return
    try:
        start, stop = (operator.index(place) for place in span)
    except (TypeError, ValueError):
        raise UserError(f"span must be two positions, such as (0, {length}), got {span!r}") from None
    if not 0 <= start <= stop <= length:
        raise UserError(f"span {start}:{stop} is no range of the prompt's {length} tokens")


def useful_length(ids: Sequence[int], mask_id: int, eos_ids: Sequence[int]) -> int:
    """Response tokens before the first EOS or end-of-turn token, masks not counted."""
    count = 0
    for token in ids:
        if token in eos_ids:
            break
        count += token != mask_id
    return count


def _ids(prompt_ids: Sequence[int]) -> list[int]:
    try:
        return [operator.index(i) for i in prompt_ids]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of more than one dimension
        raise UserError("prompt ids must be a list of whole numbers") from None


def _generation(model: Model, run: Run, trace: bool) -> Generation:
    ids, config = run.canvas.response(), model.config
    useful = useful_length(ids, config.mask_id, config.eos_ids)
    kept = [i for i in _until_eos(ids, config.eos_ids) if i != config.mask_id]
    passes = [
        {"kind": p.kind, "rows": p.rows, "committed": [list(c) for c in p.committed], "method": p.method}
        for p in run.passes
    ]
    return Generation(
        output_ids=ids,
        text=model.codec.decode(kept) if model.has_codec else None,
        nfe=run.counters.nfe,
        dense_passes=run.counters.dense_passes,
        row_layers=run.counters.row_layers,
        masks_left=len(run.canvas.masked),
        useful_tokens=useful,
        canvas_tokens=len(ids),
        seconds=run.clock.seconds(),
        pass_seconds=list(run.clock.passes),
        first_commit_seconds=run.clock.first_commit,
        first_block_seconds=run.clock.first_block,
        cache_bytes=dict(run.cache_bytes),
        cache_bytes_peak=sum(run.cache_bytes.values()),
        nominal_bytes=run.nominal_bytes,
        counters=run.counters,
        passes=passes if trace else None,
        preparation=asdict(run.preparation) if run.preparation is not None else None,
        probe=asdict(run.probe) if run.probe is not None else None,
    )


def _until_eos(ids: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    stop = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids))
    return list(ids[:stop])
