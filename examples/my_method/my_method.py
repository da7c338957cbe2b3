"""Periodic refresh: a dense pass at the start of a block and every few passes, the block's rows alone in between."""

from dataclasses import dataclass

from dllm_bench.caching.method import Method
from dllm_bench.caching.part import Exact
from dllm_bench.caching.rows import Rows
from dllm_bench.options import Options, option


@dataclass(frozen=True)
class PeriodicOptions(Options):
    every: int = option(4, "passes of a block from one dense pass to the next", low=1)


class Periodic(Method):
    name = "periodic"
    paper = "none: the example of docs/writing_a_method.md"
    summary = "dense pass every few passes of a block, the block's rows in between"
    cost = "N rows every `every` passes, block rows otherwise; K and V of all positions"
    options_class = PeriodicOptions
    exact_with = Exact(options={"every": 1})

    def rows(self, window):
        self.dense = window.step % self.options.every == 0
        if self.dense:
            return Rows.range(0, self.request.length)
        # where logits are shifted, the row before the block's first mask predicts it
        return Rows.range(min(window.start, self.network.config.row_of(min(window.inner))), window.stop)

    def targets(self, window, rows):
        return window.candidates if self.dense else window.inner
