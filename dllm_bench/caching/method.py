"""The contract of a refresh method: which rows a pass computes, layer by layer, and what it keeps between passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dllm_bench.caching.memory import DenseMemory, Memory
from dllm_bench.caching.part import Part
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.decoding.windows import Blocks
from dllm_bench.lazy import LazyModule
from dllm_bench.options import Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.shared import Shared
    from dllm_bench.decoding.canvas import Canvas
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.decoding.windows import Window, Windows
    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = ["Method", "Output"]


@dataclass(frozen=True)
class Output:
    """What a pass gives to the commit rule: the candidates it has logits for, and those logits [len(positions), V]."""

    positions: tuple[int, ...]
    logits: Tensor


class Method(Part):
    """Base of all refresh methods: the ordinary pre-norm layer over a memory.

    One instance serves one stream, request after request. Between `begin` and `end` it may hold state; after `end` it
    holds none.

    Attributes:
        by_blocks: it refreshes per block, so Dream's schedules run in their block version.
        slides: its window slides over the masks instead (see `windows`), so Dream's threshold needs no budget.
        keeps_cache: it keeps keys and values of all positions between passes, so memories can be stacked on it.
        renews_values: it renews values without their keys, so memories on it must take them.
        uncached: each pass stands alone, so that what independent passes say (a likelihood) is the method's own.
        exact_first: a first pass over all rows gives the uncached logits, since there is nothing older to read.
    """

    by_blocks: ClassVar[bool] = False
    slides: ClassVar[bool] = False
    keeps_cache: ClassVar[bool] = True
    renews_values: ClassVar[bool] = False
    uncached: ClassVar[bool] = False
    exact_first: ClassVar[bool] = True

    def __init__(self, options: Options | None = None, memory: Memory | None = None) -> None:
        super().__init__(options)
        self.memory = memory if memory is not None else self.bottom_memory()
        self.shared: Shared | None = None

    @classmethod
    def bottom_memory(cls) -> Memory:
        """The memory that lies at the bottom of the stack."""
        return DenseMemory()

    # -- life cycle -------------------------------------------------------------------------------------------------

    def check(self, settings: DecodeSettings) -> None:
        """Raises UserError when options and decode settings do not fit together. Called before anything is loaded."""

    def pass_limit(self, settings: DecodeSettings) -> int | None:
        """Passes after which a block ends although masks are left; None: no such limit."""
        return None

    def windows(self, canvas: Canvas, settings: DecodeSettings, limit: int | None) -> Windows:
        """Which masks each pass may commit; by default blocks, which end after `limit` passes at the latest."""
        assert settings.block_length is not None
        return Blocks(canvas, settings.block_length, settings.steps_per_block, limit)

    def guidance_holds(self) -> int:
        """Passes behind the coming one in which guidance runs the conditional stream alone, and takes the difference of
        the two streams from the coming one. Asked of the conditional stream's method before a pass that runs both."""
        return 0

    def begin(self, request: Request) -> None:
        """A request starts."""
        self.request = request
        self.network = request.network
        self.shared = request.shared
        self.started = Rows.range(0, 0)
        self.memory.begin(request)

    def commit(self, positions: Sequence[int]) -> None:
        """Positions were just fixed on the canvas."""

    def end(self) -> None:
        """The request is over: lets go of everything it held."""
        self.memory.end()
        self.shared = None
        del self.request, self.network, self.started

    # -- state across requests --------------------------------------------------------------------------------------

    @classmethod
    def shares(cls) -> bool:
        """Whether requests can share state at all: the class then has a `shared_span` of its own."""
        return cls.shared_span is not Method.shared_span

    def shared_span(self, request: Request) -> tuple[int, int] | None:
        """The positions whose state comes from outside the request, half-open; None where there are none. Called before
        `begin`. Raises UserError for a range that does not fit the canvas."""
        return None

    def prepare(self, network: Network, ids: Tensor) -> Mapping[str, Sequence[Tensor]]:
        """Makes the state [one tensor per layer, by kind] that stands for ids [1, L]. It depends on nothing else, runs
        outside of every request's clock and counters, and is read by any number of requests."""
        raise TypeError(f"{type(self).__name__} has a shared span but makes no shared state")

    # -- one pass ---------------------------------------------------------------------------------------------------

    def probe(self) -> Rows | None:
        """A pass before the first window that commits nothing: runs it and gives the rows that entered layer 0. None:
        the method needs none."""
        return None

    def rows(self, window: Window) -> Rows:
        """The rows that enter layer 0 in this pass."""
        return Rows.range(0, self.request.length)

    def refreshes(self, window: Window, rows: Rows) -> bool:
        """Whether a pass over these rows renews the cache, so that its queries must read everything exactly."""
        return rows.covers(self.request.length)

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        """The candidates of the window that this pass computes logits for."""
        return window.candidates

    def forward(self, window: Window) -> Output:
        """Runs the pass and gives logits for its candidates, and for nothing else."""
        rows = self.rows(window)
        self.started = rows
        self.memory.begin_pass(window, self.refreshes(window, rows))
        x = self.network.embed(rows.take(self.request.ids))
        for layer in range(self.network.config.num_layers):
            x, rows = self.layer(layer, x, rows)
        self.memory.end_pass()
        positions = self.targets(window, rows)
        places = rows.places([self.network.config.row_of(p) for p in positions])
        index = torch.tensor(places, device=x.device, dtype=torch.long)
        return Output(positions, self.network.head(x.index_select(1, index))[0])

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """One layer over x [1, M, D] of `rows`: residuals and rows that enter the next layer."""
        net = self.network
        q, k, v = net.project(layer, x)
        self.memory.write(layer, rows, k, v)
        q = net.rope(q, rows.where)
        x = x + net.out(layer, net.attend(q, self.memory.read(layer, q, rows)))
        return x + net.ffn(layer, x), rows

    # -- reports ----------------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        """Bytes held between passes, by kind; measured from the tensors."""
        return {**self.memory.bytes(), **(self.shared.bytes() if self.shared is not None else {})}

    def nominal_bytes(self) -> dict[str, float] | None:
        """Bytes by kind with the formulas of the memories that have one; None where none has."""
        nominal = self.memory.nominal_bytes()
        if nominal is None:
            return None
        return nominal | {kind: held for kind, held in self.bytes().items() if kind not in self.memory.bytes()}

    def report(self) -> dict[str, Any]:
        """What the method and its memory decided in the last pass, for the trace."""
        return self.memory.report()
