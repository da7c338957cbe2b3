"""Context lengths as they are typed and shown."""

from __future__ import annotations

import re

from dllm_bench.errors import UserError, nearest

__all__ = ["ctx_name", "parse_ctx"]

_LENGTHS = [256 << power for power in range(13)]


def ctx_name(ctx: int) -> str:
    """2048 -> 2k; lengths that are no multiple of 1024 as they are."""
    return f"{ctx // 1024}k" if ctx >= 1024 and ctx % 1024 == 0 else str(ctx)


def parse_ctx(text: str) -> int:
    """Tokens from 512, 2k or 1.5k. Raises UserError naming the nearest valid length."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    if found:
        tokens = float(found[1]) * {"": 1, "k": 1024, "m": 1024 * 1024}[found[2].lower()]
        if tokens == int(tokens) and tokens >= 1:
            return int(tokens)
        if not tokens:
            raise UserError(f"context length '{text}' has no room for a prompt: nearest valid is {_LENGTHS[0]}")
        closest = str(max(1, round(tokens)))
    else:
        digits = re.search(r"\d+", text)
        names = [ctx_name(length) for length in _LENGTHS]
        closest = nearest(text, names) or (ctx_name(_closest(int(digits[0]))) if digits else "2k")
    raise UserError(f"context length '{text}' is no number of tokens such as 512 or 2k: nearest valid is {closest}")


def _closest(tokens: int) -> int:
    return min(_LENGTHS, key=lambda length: abs(length - tokens))
