"""Fast-dLLM: one dense refresh per block, then passes over the block (and, in prefix mode, what follows it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.caching.method import Method
from dllm_bench.caching.part import Exact
from dllm_bench.caching.rows import Rows
from dllm_bench.errors import UserError
from dllm_bench.options import Options, option

if TYPE_CHECKING:
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.decoding.windows import Window

__all__ = ["FastDllm", "FastDllmOptions"]


@dataclass(frozen=True)
class FastDllmOptions(Options):
    """Options of Fast-dLLM."""

    mode: Literal["dual", "prefix"] = option(
        "dual", "dual keeps prefix and suffix and recomputes the block; prefix recomputes block and suffix"
    )
    step_cap: bool = option(
        False, "end a block after steps / blocks passes and leave its masks, as v1's dual cache does (dual only)"
    )

    def check(self) -> None:
        if self.step_cap and self.mode == "prefix":
            raise UserError("fast_dllm option step_cap=true needs mode=dual: v1's prefix cache has no such cap")


class FastDllm(Method):
    """Block-wise approximate cache. A block's first pass is dense, renews every key and value, and decodes as well;
    tokens committed afterwards enter the cached rows only at the next block's refresh."""

    name = "fast_dllm"
    paper = "Fast-dLLM, arXiv 2505.22618, section 3.2 (NVlabs/Fast-dLLM a9b81e4, v1)"
    summary = "dense refresh per block, then the block alone (dual) or with its suffix (prefix)"
    cost = "per block one dense pass, then block rows (dual) or block + suffix rows (prefix); K and V of all positions"
    options_class = FastDllmOptions
    by_blocks = True
    exact_with = Exact(decode={"block_length": 4, "tokens_per_pass": 4})  # every pass starts a block
    options: FastDllmOptions

    def pass_limit(self, settings: DecodeSettings) -> int | None:
        return settings.steps_per_block if self.options.step_cap else None

    def rows(self, window: Window) -> Rows:
        self._refresh = window.step == 0
        if self._refresh:
            return Rows.range(0, self.request.length)
        stop = window.stop if self.options.mode == "dual" else self.request.length
        return Rows.range(self._first(window), stop)

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return window.candidates if self._refresh else window.inner

    def report(self) -> dict[str, Any]:
        return {"refresh": self._refresh, **super().report()}

    def _first(self, window: Window) -> int:
        """The block's start, or the row before it where shifted logits need that row for a token still masked."""
        first = min(window.inner)
        return min(window.start, self.network.config.row_of(first))
