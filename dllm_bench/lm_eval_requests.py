"""What both directions of the lm-eval bridge have in common: how its requests become ids, budgets and stop strings.

Nothing here imports lm-eval.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.errors import UserError
from dllm_bench.models.text import TextCodec

__all__ = ["NOT_INSTALLED", "answer_pair", "budget_of", "chat_text", "lm_eval_folder", "start_ids", "stops_of"]

_LOG = logging.getLogger(__name__)
_DEFAULT_BUDGET = 256
# lm-eval's names for the same thing, the first one that is given counts
_BUDGETS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
NOT_INSTALLED = "lm-eval is not installed: pip install 'dllm-bench[lm-eval]'"
_END_OF_TEXT = "<|endoftext|>"
_told: set[str] = set()


def lm_eval_folder() -> Path:
    """Where lm-eval lies, found without importing it. Raises UserError with the command that installs it."""
    try:
        found = importlib.util.find_spec("lm_eval")
    except ImportError:
        found = None
    if found is None or not found.submodule_search_locations:
        raise UserError(NOT_INSTALLED)
    return Path(next(iter(found.submodule_search_locations)))


def budget_of(arguments: Mapping[str, Any]) -> int:
    """Tokens that a request may generate; lm-eval's default of 256 where it names none."""
    given = next((arguments[name] for name in _BUDGETS if arguments.get(name) is not None), _DEFAULT_BUDGET)
    try:
        budget = int(given)
    except (TypeError, ValueError):
        budget = 0
    if budget < 1:
        raise UserError(f"max_gen_toks must be a whole number above 0 (lm-eval's default: 256), got {given!r}")
    return budget


def stops_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Stop strings of a request, which stays as it is. Tells once which arguments have no part in decoding here."""
    until = arguments.get("until") or ()
    if isinstance(until, str):
        until = (until,)
    known = {"until", "do_sample", "temperature", *_BUDGETS}
    unused = {name for name in arguments if name not in known}
    if arguments.get("do_sample") and arguments.get("temperature"):
        unused |= {"do_sample", "temperature"}
    for name in sorted(unused - _told):
        _told.add(name)
        _LOG.warning(
            "lm-eval's generation argument %s=%r is not used: dllm-bench's own decode settings decide",
            name,
            arguments[name],
        )
    return tuple(str(stop) for stop in until)


def start_ids(codec: TextCodec) -> list[int]:
    """What stands in front of a text without context: BOS, or the end-of-text token where there is none.

    Raises UserError for a tokenizer that has neither.
    """
    end = codec.token_id(_END_OF_TEXT)
    found = codec.bare("") or ([] if end is None else [end])
    if not found:
        raise UserError(f"this model's tokenizer has no token to begin a text with (no BOS, no {_END_OF_TEXT})")
    return found


def answer_pair(codec: TextCodec, context: str, answer: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of the answer behind it, by lm-eval's rule: blanks at the end of the context count to the
    answer, and both are encoded together."""
    kept = context.rstrip()
    if not kept:
        return start_ids(codec), codec.encode(context + answer)
    ids = codec.bare(kept)
    return ids, codec.bare(context + answer)[len(ids) :]


def chat_text(codec: TextCodec, history: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
    """A conversation as lm-eval has it (role, content) in the model's chat template; without a new assistant turn the
    last one is an answer prefix and stays open."""
    return codec.template.chat([(turn["role"], turn["content"]) for turn in history], add_generation_prompt)
