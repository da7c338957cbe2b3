"""The public Python interface: `load_model` and `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.spec import MethodSpec, parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.models.hub import Model, load_model

if TYPE_CHECKING:
    from dllm_bench.models.counters import Counters

__all__ = ["Generation", "generate", "load_model", "useful_length"]


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
) -> Generation:
    """Decodes one response.

    Args:
        model: from `load_model`.
        prompt_ids: ids of the prompt (of the whole canvas with decode["fill"]).
        method: a method name such as "fast_dllm", or a parsed spec.
        options: the method's options, such as {"mode": "dual"}.
        decode: decode settings by the names of the command line's flags with underscores.
        trace: also return each pass (kind, rows, committed tokens, the method's decisions).

    Raises:
        UserError: one line naming what is wrong and the nearest valid choice; nothing was computed.
    """
    if isinstance(method, MethodSpec):
        if options:
            raise UserError("a parsed method spec has its options already")
        spec = method
    else:
        spec = parse_method(method, dict(options or {}))
    settings = decode if isinstance(decode, DecodeSettings) else DecodeSettings.make(decode or {}, model.family)
    spec.build().check(settings)
    canvas = Canvas.make(_ids(prompt_ids), settings, model.config, model.network.device)
    codec = model.codec if model.has_codec else None
    return _generation(model, denoise(model.network, canvas, spec.build, settings, codec=codec), trace)


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
        return [int(i) for i in prompt_ids]
    except (TypeError, ValueError):
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
        counters=run.counters,
        passes=passes if trace else None,
        nominal_bytes=run.nominal_bytes,
    )


def _until_eos(ids: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    stop = next((i for i, token in enumerate(ids) if token in eos_ids), len(ids))
    return list(ids[:stop])
