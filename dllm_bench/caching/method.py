"""The contract of a refresh method: which rows a pass computes, layer by layer, and what it keeps between passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dllm_bench.caching.memory import DenseMemory, Memory
from dllm_bench.caching.rows import Rows
from dllm_bench.lazy import LazyModule
from dllm_bench.options import Options
from dllm_bench.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.decoding.canvas import Canvas
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.decoding.windows import Window
    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = ["METHODS", "Method", "Output", "Request"]


@dataclass(frozen=True)
class Request:
    """What a method may know of the request it serves.

    Attributes:
        ids: the ids [1, N] of this stream, updated in place by every commit (the unconditional stream of guidance has
            its own, with the prompt masked). A method reads them and never writes.
        canvas: the positions: response range, masked ones, dropped ones.
    """

    network: Network
    canvas: Canvas
    ids: Tensor
    settings: DecodeSettings

    @property
    def length(self) -> int:
        """Positions of the canvas: N."""
        return self.canvas.length


@dataclass(frozen=True)
class Output:
    """What a pass gives to the commit rule: the candidates it has logits for, and those logits [len(positions), V]."""

    positions: tuple[int, ...]
    logits: Tensor


class Method:
    """Base of all refresh methods: the ordinary pre-norm layer with a dense memory.

    One instance serves one stream, request after request. Between `begin` and `end` it may hold state; after `end` it
    holds none.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    options_class: ClassVar[type[Options]] = Options
    by_blocks: ClassVar[bool] = False
    """Whether the method refreshes per block, so that Dream's schedules run in their block version."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options if options is not None else self.options_class()
        self.memory = self.make_memory()

    def make_memory(self) -> Memory:
        """The memory at the bottom of the stack."""
        return DenseMemory()

    # -- life cycle -------------------------------------------------------------------------------------------------

    def check(self, settings: DecodeSettings) -> None:
        """Raises UserError when options and decode settings do not fit together. Called before anything is loaded."""

    def pass_limit(self, settings: DecodeSettings) -> int | None:
        """Passes after which a block ends although masks are left; None: no such limit."""
        return None

    def begin(self, request: Request) -> None:
        """A request starts."""
        self.request = request
        self.network = request.network
        self.memory.begin(request.network, request.length)

    def commit(self, positions: Sequence[int]) -> None:
        """Positions were just fixed on the canvas."""

    def end(self) -> None:
        """The request is over: lets go of everything it held."""
        self.memory.end()
        del self.request, self.network

    # -- one pass ---------------------------------------------------------------------------------------------------

    def rows(self, window: Window) -> Rows:
        """The rows that enter layer 0 in this pass."""
        return Rows.range(0, self.request.length)

    def targets(self, window: Window, rows: Rows) -> tuple[int, ...]:
        """The candidates of the window that this pass computes logits for."""
        return window.candidates

    def forward(self, window: Window) -> Output:
        """Runs the pass and gives logits for its candidates, and for nothing else."""
        rows = self.rows(window)
        x = self.network.embed(rows.take(self.request.ids))
        self.started = rows
        for layer in range(self.network.config.num_layers):
            x, rows = self.layer(layer, x, rows)
        positions = self.targets(window, rows)
        places = rows.places([self.network.config.row_of(p) for p in positions])
        index = torch.tensor(places, device=x.device, dtype=torch.long)
        return Output(positions, self.network.head(x.index_select(1, index))[0])

    def layer(self, layer: int, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """One layer over x [1, M, D] of `rows`: residuals and rows that enter the next layer."""
        net = self.network
        q, k, v = net.project(layer, x)
        self.memory.write(layer, rows, net.rope(k, rows.where), v)
        q = net.rope(q, rows.where)
        x = x + net.out(layer, net.attend(q, self.memory.read(layer, q, rows)))
        return x + net.ffn(layer, x), rows

    # -- reports ----------------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        """Bytes held between passes, by kind; measured from the tensors."""
        return self.memory.bytes()

    def report(self) -> dict[str, Any]:
        """What the method decided in the last pass, for the trace."""
        return {}


METHODS: Registry[Method] = Registry(
    "method",
    "dllm_bench.methods",
    "dllm_bench.caching.method:Method",
    {
        "baseline": "dllm_bench.methods.baseline:Baseline",
        "fast_dllm": "dllm_bench.methods.fast_dllm:FastDllm",
    },
)
