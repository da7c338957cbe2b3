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

__all__ = ["DualCache", "FastDllm", "FastDllmOptions"]


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


class DualCache(Method):
    """The schedule of the dual cache: a refresh as a block's first pass, then passes over the block alone."""

    by_blocks = True
    exact_with = Exact(decode={"block_length": 4, "tokens_per_pass": 4})  # every pass starts a block

    def rows(self, window: Window) -> Rows:
        self._refresh = window.step == 0
        return self.refresh_rows() if self._refresh else Rows.range(self._first(window), self.last(window))

    def refresh_rows(self) -> Rows:
        """The rows of a refresh."""
        return Rows.range(0, self.request.length)

    def last(self, window: Window) -> int:
        """Where the passes behind the refresh end."""
        return window.stop

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        return window.candidates if self._refresh else window.inner

    def report(self) -> dict[str, Any]:
        return {"refresh": self._refresh, **super().report()}

    def _first(self, window: Window) -> int:
        """The block's start, or the row before it where shifted logits need that row for a token still masked."""
        first = min(window.inner)
        return min(window.start, self.network.config.row_of(first))


class FastDllm(DualCache):
    """Block-wise approximate cache. A block's first pass is dense, renews every key and value, and decodes as well;
    tokens committed afterwards enter the cached rows only at the next block's refresh."""

    name = "fast_dllm"
    paper = "Fast-dLLM, arXiv 2505.22618, section 3.2 (NVlabs/Fast-dLLM a9b81e4, v1)"
    summary = "dense refresh per block, then the block alone (dual) or with its suffix (prefix)"
    cost = "per block one dense pass, then block rows (dual) or block + suffix rows (prefix); K and V of all positions"
    options_class = FastDllmOptions
    options: FastDllmOptions

    def pass_limit(self, settings: DecodeSettings) -> int | None:
        return settings.steps_per_block if self.options.step_cap else None

    def last(self, window: Window) -> int:
        return window.stop if self.options.mode == "dual" else self.request.length
