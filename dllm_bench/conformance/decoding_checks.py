"""Checks of what a decode leaves: a filled response and an untouched prompt, on every model, precision and length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dllm_bench.conformance.check import Failed, Skipped
from dllm_bench.conformance.fixtures import CONFIGS, make_prompt
from dllm_bench.conformance.subject import Decoded, Step, Subject, fixture_network
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.decoding.canvas import Canvas
else:
    torch = LazyModule("torch")

__all__ = ["CHECKS", "difference", "filled"]

_RULES: tuple[dict[str, Any], ...] = (
    {"threshold": 0.3},
    {"factor": 1.0},
    {"steps": 8},
    {"steps": 8, "remasking": "random"},
    {"tokens_per_pass": 3, "temperature": 0.7},
)
_DREAM_RULES: tuple[dict[str, Any], ...] = ({"threshold": 0.3}, {"alg": "entropy", "steps": 8}, {"factor": 1.0})


def filled(subject: Subject, done: Decoded, what: str = "") -> Decoded:
    """Raises Failed where a response has masks left; Skipped where the user's options ask for that."""
    response = done.canvas.response()
    left = sum(i == done.canvas.mask_id for i in response) - len(done.canvas.dropped)
    place = f"{what}: " if what else ""
    if left or done.canvas.masked:
        if subject.capped:
            raise Skipped("the options set end a block after a number of passes and leave its masks")
        raise Failed(f"{place}{left or len(done.canvas.masked)} of {len(response)} positions are still masked")
    return done


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference of logits, as a share of their largest value."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-9))


def no_mask_left(subject: Subject) -> None:
    """Every position is filled, in any blocks, in infill."""
    for gen, block in ((16, 8), (12, 12), (6, 1), (1, 1)):
        done = subject.decode(gen_length=gen, block_length=block)
        filled(subject, done, f"gen_length {gen}, block_length {block}")
    filled(subject, subject.decode(48, fill=(20, 36), gen_length=None), "fill 20:36 of 48 tokens")


def canvas_untouched(subject: Subject) -> None:
    """Only commits change the canvas, never the prompt.

    The ids before, in and behind the response, its range and its masked positions are followed pass by pass.
    """
    for prompt, fill in ((make_prompt(37), None), (make_prompt(48), (20, 36))):
        start, stop = fill or (len(prompt), len(prompt) + 16)
        ids = [*prompt[:start], *([CONFIGS["plain"].mask_id] * (stop - start)), *prompt[stop:]]
        masked = list(range(start, stop))

        def compare(
            canvas: Canvas,
            step: Step,
            ids: list[int] = ids,
            masked: list[int] = masked,
            span: tuple[int, int] = (start, stop),
        ) -> None:
            for position, token in step.committed:
                ids[position] = token
                masked.remove(position)
            found = canvas.ids[0].tolist()
            changed = [i for i, token in enumerate(ids) if found[i] != token]
            if changed:
                where = "response" if span[0] <= changed[0] < span[1] else "prompt"
                raise Failed(f"the id at position {changed[0]} of the {where} was overwritten")
            if (canvas.masked, canvas.dropped, canvas.start, canvas.stop) != (masked, [], *span):
                raise Failed("masked positions or range of the canvas were changed by something else than a commit")

        subject.decode(prompt, on_pass=compare, fill=fill, gen_length=None if fill else 16)


def candidates(subject: Subject) -> None:
    """Finite logits of the window's masks, in order."""

    def look(canvas: Canvas, step: Step) -> None:
        width = CONFIGS["plain"].embedding_size
        if tuple(step.logits.shape) != (len(step.positions), width):
            shape = tuple(step.logits.shape)
            raise Failed(f"logits have shape {shape}, not ({len(step.positions)}, {width})")
        if not step.positions or list(step.positions) != sorted(set(step.positions)):
            raise Failed(f"positions of a pass must be ascending, at least one, each once: got {step.positions[:8]}")
        strange = set(step.positions) - set(step.window.candidates)
        if strange:
            raise Failed(f"logits for position {min(strange)}, which is no candidate of the window")
        if not bool(torch.isfinite(step.logits).all()):
            raise Failed("logits are not finite")

    for model in ("plain", "shifted"):
        subject.decode(network=subject.network(model), on_pass=look)


def prompt_lengths(subject: Subject) -> None:
    """Prompts of 1 token, and around powers of two."""
    lengths = {1, 2, *(2**level + by for level in (2, 3, 4, 5) for by in (-1, 0, 1))}
    for length in sorted(lengths):
        for model in ("plain", "shifted"):
            try:
                done = subject.decode(length, network=subject.network(model), gen_length=8, block_length=4)
            except (Failed, UserError):
                raise
            except Exception as error:
                raise Failed(f"a prompt of {length} tokens raises {_told(error)}") from error
            filled(subject, done, f"a prompt of {length} tokens")


def commit_rules(subject: Subject) -> None:
    """Every commit rule, Dream's too, and a stop at EOS."""
    refused = 0
    for model, rules in (("plain", _RULES), ("shifted", _DREAM_RULES)):
        for rule in (*rules, {"eos_stop": True, "tokens_per_pass": 2}):
            changes = {"tokens_per_pass": None, "remasking": None, **rule}
            network = _many_ends(subject, model) if rule.get("eos_stop") else subject.network(model)
            try:
                subject.settings(None, network.config.family, **changes)
            except UserError:  # the method says which rules it works with
                refused += 1
                continue
            filled(subject, subject.decode(network=network, **changes), _rule_name(rule))
    if refused == len(_RULES) + len(_DREAM_RULES) + 2:
        raise Failed("every commit rule is refused")


def _many_ends(subject: Subject, model: str) -> Any:
    """A fixture in which a quarter of the vocabulary ends an answer, so that one comes up."""
    from dataclasses import replace

    network = fixture_network(model, "float32")
    network.config = replace(network.config, eos_ids=tuple(range(0, 60, 4)))
    return network


def _rule_name(rule: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in rule.items())


def guidance(subject: Subject) -> None:
    """Guidance runs a second stream beside the first."""
    try:
        done = subject.decode(cfg_scale=1.0)
    except UserError as error:
        raise Skipped(f"refused: {error}") from error
    filled(subject, done)
    if not done.same(subject.decode(cfg_scale=1.0)):
        raise Failed("the same guided request gives other logits the second time")


def gqa_model(subject: Subject) -> None:
    """Query heads that share key heads."""
    _on_model(subject, "gqa")


def bias_model(subject: Subject) -> None:
    """Biases of q, k and v."""
    _on_model(subject, "bias")


def shifted_model(subject: Subject) -> None:
    """Logits shifted by one row (Dream)."""
    _on_model(subject, "shifted")


def first_pass(subject: Subject) -> None:
    """A first pass over all rows gives uncached logits."""
    if not _on_model(subject, "plain"):
        raise Skipped(_why_inexact(subject))


def dtypes(subject: Subject) -> None:
    """Precisions float32, bfloat16 and float64."""
    for dtype, allowed in (("float64", 1e-4), ("float32", 1e-3), ("bfloat16", 0.1)):
        for model in ("plain", "shifted"):
            try:
                _on_model(subject, model, dtype, allowed)
            except (Failed, Skipped, UserError):
                raise
            except Exception as error:
                raise Failed(f"in {dtype}: {_told(error)}") from error


def _on_model(subject: Subject, model: str, dtype: str = "float64", allowed: float = 1e-4) -> bool:
    """Decodes on a fixture and compares the first pass, where it is dense; whether it could be compared."""
    network = subject.network(model, dtype)
    done = filled(subject, subject.decode(network=network))
    for step in done.steps:
        if not bool(torch.isfinite(step.logits).all()):
            raise Failed(f"logits are not finite in {dtype}")
        if step.logits.dtype is not network.dtype:
            raise Failed(f"logits are {step.logits.dtype} in {dtype}")
    method, first = subject.spec.build(), done.steps[0]
    if not method.exact_first or subject.guided or done.run.passes[0].kind != "dense" or _is_probe(done):
        return False
    plain = fixture_network(model, dtype)
    ids = torch.tensor([[*done.prompt, *([plain.config.mask_id] * len(done.canvas.response()))]])
    places = torch.tensor([plain.config.row_of(p) for p in first.positions])
    with torch.inference_mode():
        exact = plain.head(plain.hidden(ids).index_select(1, places))[0]
    off = difference(first.logits, exact)
    if off > allowed:
        raise Failed(f"logits of the first pass are off by {off:.1%} of the largest one ({dtype}, {model} model)")
    return True


def _is_probe(done: Decoded) -> bool:
    """Whether a pass was made before the first window's."""
    return len(done.run.passes) != len(done.steps)


def _why_inexact(subject: Subject) -> str:
    if not subject.spec.build().exact_first:
        return "the method says that dense passes are not exact (exact_first)"
    if subject.guided:
        return "the options need guidance, which mixes two streams"
    return "the first pass does not compute all rows"


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


CHECKS = [
    no_mask_left,
    canvas_untouched,
    candidates,
    prompt_lengths,
    commit_rules,
    guidance,
    first_pass,
    gqa_model,
    bias_model,
    shifted_model,
    dtypes,
]
