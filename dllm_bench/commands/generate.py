"""`dllm-bench generate`: decodes given ids or text and prints the answer, or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dllm_bench.errors import UserError

if TYPE_CHECKING:
    from dllm_bench.api import Generation
    from dllm_bench.models.hub import Model

__all__ = ["decode_values", "generate"]


def generate(
    model: str = typer.Option("tiny", help="Short name, folder, or hub id.", show_default=True),
    method: str = typer.Option("fast_dllm", help="Method spec, such as fast_dllm."),
    sets: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Option of the method; may be repeated."),
    prompt: str | None = typer.Option(None, help="Prompt text; the model's chat template goes around it."),
    answer_prefix: str = typer.Option("", help="With --prompt: words that the answer starts with already."),
    prompt_ids: str | None = typer.Option(None, metavar="FILE|-", help="JSON list of ids, or list of such lists."),
    gen_length: int | None = typer.Option(None, help="Response length in tokens."),
    block_length: int | None = typer.Option(None, help="Tokens per block; default: the whole response."),
    steps: int | None = typer.Option(None, help="Passes that quota and Dream schedules spread commits over."),
    threshold: float | None = typer.Option(None, help="Commit tokens at least this confident."),
    factor: float | None = typer.Option(None, help="Fast-dLLM's factor rule."),
    tokens_per_pass: int | None = typer.Option(None, help="Commit this many tokens in each pass."),
    remasking: str | None = typer.Option(None, help="low_confidence or random."),
    temperature: float | None = typer.Option(None, help="0 is greedy."),
    top_p: float | None = typer.Option(None, help="Nucleus of Dream's sampling."),
    top_k: int | None = typer.Option(None, help="Largest k of Dream's sampling."),
    cfg_scale: float | None = typer.Option(None, help="Classifier-free guidance."),
    alg: str | None = typer.Option(None, help="Dream's schedule: origin, maskgit_plus, topk_margin, entropy, …"),
    alg_temp: float | None = typer.Option(None, help="Temperature of the choice of positions (Dream)."),
    eps: float | None = typer.Option(None, help="Last time step of Dream's schedules."),
    seed: int | None = typer.Option(None, help="Seed of the sample's private generator."),
    no_eos_stop: bool = typer.Option(False, "--no-eos-stop", help="Decode behind a committed EOS too."),
    fill: str | None = typer.Option(None, metavar="START:END", help="Fill this range of the prompt ids (infill)."),
    confidence_dtype: str | None = typer.Option(None, help="auto, float64 or model."),
    dtype: str = typer.Option("auto", help="auto, float64, float32, bfloat16 or float16."),
    device: str = typer.Option("auto", help="auto, cpu, cuda or cuda:N."),
    rope_scaling: str | None = typer.Option(None, help="ntk:FACTOR multiplies rope_theta."),
    chat_template: str = typer.Option("auto", help="auto, llada, dream or plain."),
    revision: str | None = typer.Option(None, help="Hub revision instead of the pinned one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of the text."),
    trace: bool = typer.Option(False, help="With --json: add what each pass committed."),
) -> None:
    """Decode one prompt with any method and print the answer.

    Without decode options a model's own card decides (see `dllm-bench show tiny`).
    """
    from dllm_bench.caching.spec import parse_method
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.models.hub import check_device, check_dtype

    values = decode_values(locals())
    spec = parse_method(method, sets)
    check_dtype(dtype)
    check_device(device)
    if (prompt is None) == (prompt_ids is None):
        raise UserError("give either --prompt TEXT or --prompt-ids FILE")
    if answer_prefix and prompt is None:
        raise UserError("--answer-prefix goes with --prompt: ids hold the whole prompt already")
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty: give at least one word")
    if trace and not as_json:
        raise UserError("--trace needs --json")
    spec.build().check(DecodeSettings.make(values))
    given = read_ids(prompt_ids) if prompt_ids is not None else None

    from dllm_bench.api import generate as run
    from dllm_bench.decoding.canvas import Canvas
    from dllm_bench.models.hub import load_model

    loaded = load_model(model, dtype, device, rope_scaling, chat_template, revision)
    settings = DecodeSettings.make(with_card(values, loaded), loaded.family)
    prompts, several = given if given is not None else ([loaded.codec.wrap(prompt or "", answer_prefix)], False)
    # laid out before any is decoded: a bad prompt is refused at once
    warn_beyond(loaded, max(Canvas.make(i, settings, loaded.config, loaded.network.device).length for i in prompts))
    results = [run(loaded, ids, spec, None, settings, trace) for ids in prompts]
    _print(results, several, as_json)


def decode_values(flags: dict[str, Any]) -> dict[str, Any]:
    """The decode settings among a command's parameters: those that were given."""
    from dataclasses import fields

    from dllm_bench.decoding.settings import DecodeSettings

    names = [f.name for f in fields(DecodeSettings)]
    values = {name: flags[name] for name in names if flags.get(name) is not None}
    if flags.get("no_eos_stop"):
        values["eos_stop"] = False
    return values


def with_card(values: dict[str, Any], model: Model) -> dict[str, Any]:
    """Adds the decode settings of the model's card when the user gave no length at all."""
    if any(name in values for name in ("gen_length", "block_length", "steps", "fill")):
        return values
    card = {k: v for k, v in model.decode_defaults.items() if k in ("gen_length", "block_length")}
    ruled = any(name in values for name in ("threshold", "factor", "tokens_per_pass", "alg"))
    return {**({} if ruled else {"threshold": 0.9}), **card, **values} if card else values


def warn_beyond(model: Model, length: int) -> None:
    """One warning on stderr when the canvas is longer than the checkpoint's nominal maximum."""
    if length > model.max_positions:
        print(
            f"dllm-bench: warning: {length} positions are beyond the {model.max_positions} that "
            f"{model.name} was trained for",
            file=sys.stderr,
        )


def read_ids(source: str) -> tuple[list[list[int]], bool]:
    """Prompts from a file or stdin ("-"), and whether it was a list of lists. Raises UserError for anything else."""
    name = "standard input" if source == "-" else source
    if source.lstrip().startswith("["):
        raise UserError("--prompt-ids takes a file, or - to read the list from standard input, not the list itself")
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8-sig")
        found = json.loads(text)
    except OSError as error:
        raise UserError(f"--prompt-ids: cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--prompt-ids: {name} is not JSON ({error})") from None
    several = isinstance(found, list) and bool(found) and all(isinstance(one, list) for one in found)
    prompts = found if several else [found]
    for one in prompts:
        if not isinstance(one, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in one):
            raise UserError(f"--prompt-ids: {name} must hold a JSON list of whole numbers, or a list of such lists")
    return prompts, several


def _print(results: list[Generation], several: bool, as_json: bool) -> None:
    if as_json:
        shown = [r.as_json() for r in results]
        typer.echo(json.dumps(shown if several else shown[0], ensure_ascii=False))
        return
    for r in results:
        typer.echo(r.text if r.text is not None else json.dumps(r.output_ids))
        if r.masks_left:
            print(f"dllm-bench: {r.masks_left} positions are still masked", file=sys.stderr)
