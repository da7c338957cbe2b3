"""Independent measurement: what goes through the primitives, which operations run, which tensors are alive."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.request import Request
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.lazy import LazyModule
from dllm_bench.models.counters import Counters
from dllm_bench.models.network import Network
from dllm_bench.options import Options

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["MeteredNetwork", "Tally", "Watch", "held_tensors", "storage_sizes", "surviving_tensors"]

OnAttend = Callable[["Tensor", Any, "Fresh"], None]
Fresh = dict[str, "Tensor"]
"""What a layer has just projected, before RoPE: "q", "k", "v". Of several projections the last one counts, and keys are
there only where they came with the values."""


@dataclass
class Tally:
    """Rows counted at the primitives, beside the network's own counters.

    Attributes:
        started: rows of each pass through the embedding.
        projected: rows x layers for which q, k or v were computed. attended: query rows x layers.
        ffn: rows x layers. head: rows.
    """

    started: list[int] = field(default_factory=list)
    projected: int = 0
    attended: int = 0
    ffn: int = 0
    head: int = 0


class MeteredNetwork(Network):
    """The network, with a tally of its own per request and a mark while a primitive runs.

    Attributes:
        inside: how many primitives are running, one within another.
        on_attend: sees queries, what they attend to, and what the layer has just projected.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inside = 0
        self.on_attend: OnAttend | None = None
        self._tallies: list[tuple[Counters, Tally]] = []
        self._layer, self._fresh = -1, Fresh()

    def reset(self) -> None:
        """Forgets all tallies."""
        self._tallies, self._layer, self._fresh = [], -1, {}

    def tally(self, counters: Counters | None = None) -> Tally:
        """The tally kept beside these counters (default: those of the request that runs now)."""
        wanted = self.counters if counters is None else counters
        for one, tally in self._tallies:
            if one is wanted:
                return tally
        self._tallies.append((wanted, Tally()))
        return self._tallies[-1][1]

    def others(self, counters: Counters) -> list[Tally]:
        """Tallies kept beside any other counters."""
        return [tally for one, tally in self._tallies if one is not counters]

    def see(self, name: str, given: Mapping[str, Any]) -> None:
        """Counts a call of a primitive."""
        tally = self.tally()
        if name == "embed":
            tally.started.append(_rows(given["ids"]))
        elif name == "project":
            tally.projected += _rows(given["x"])
        elif name == "ffn":
            tally.ffn += _rows(given["x"])
        elif name == "head":
            tally.head += _rows(given["x"])
        elif name == "attend":
            tally.attended += given["q"].shape[0] * given["q"].shape[2]
            if self.on_attend is not None:
                self.on_attend(given["q"], given["parts"], self._fresh)

    def saw(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        """Keeps what a layer has just projected, for `on_attend`."""
        if name != "project" or self.on_attend is None:
            return
        layer, want = given["layer"], given.get("want", "qkv")
        if layer != self._layer:
            self._layer, self._fresh = layer, {}
        if "v" in want:
            self._fresh.pop("k", None)
        self._fresh |= {n: t for n, t in zip(want, result, strict=True) if n != "k" or "v" in want}


def _rows(t: Tensor) -> int:
    return t.shape[0] * t.shape[1]


def _metered(name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(genuine)

    @functools.wraps(genuine)
    def run(self: MeteredNetwork, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        self.see(name, given)
        self.inside += 1
        try:
            result = genuine(self, *args, **kwargs)
        finally:
            self.inside -= 1
        self.saw(name, given, result)
        return result

    return run


# every public function of the network, those of later versions too: whatever reads weights must be one of them
for _name, _genuine in list(vars(Network).items()):
    if inspect.isfunction(_genuine) and not _name.startswith("_"):
        setattr(MeteredNetwork, _name, _metered(_name, _genuine))


class Watch:
    """Sees every operation in a `with` block: the largest new tensor, and weights read outside of the primitives.

    Attributes:
        elements, shape, operation: of the largest tensor made so far.
        strayed: operations that read a weight outside of the network's primitives.
    """

    def __init__(self, network: MeteredNetwork) -> None:
        self.elements, self.shape, self.operation = 0, tuple[int, ...](), ""
        self.strayed: list[str] = []
        weights = network.weights
        everything = [weights.embed, weights.final_norm, weights.head]
        everything += [t for layer in weights.layers for t in vars(layer).values() if t is not None]
        self._weights = set(storage_sizes(everything))
        self._network = network
        self._mode: Any = None

    def __enter__(self) -> Watch:
        from torch.utils._python_dispatch import TorchDispatchMode

        watch = self

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                """Nothing is compiled here, and a mode that guards against it imports the compiler: several seconds."""
                return False

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                watch.saw(func, args, out)
                return out

        self._mode = Mode()  # type: ignore[no-untyped-call]
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)

    def saw(self, func: Any, args: Any, out: Any) -> None:
        """Books one operation."""
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and (held := _elements(t)) > self.elements:
                self.elements, self.shape, self.operation = held, tuple(t.shape), str(func)
        if self._network.inside:
            return
        for t in (one for a in args for one in (a if isinstance(a, list | tuple) else (a,))):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() in self._weights:
                self.strayed.append(str(func))


def _elements(t: Tensor) -> int:
    """Numbers that a tensor takes: a view that shows some of them several times takes no more than its storage."""
    return min(t.numel(), t.untyped_storage().nbytes() // t.element_size())


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages behind the tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


@contextmanager
def surviving_tensors() -> Iterator[list[Tensor]]:
    """Gives a list that holds, after the block, every tensor made in it that Python still holds anywhere."""
    found: list[Tensor] = []
    kind = torch.Tensor
    gc.freeze()  # what is there already need not be looked through
    try:
        yield found
        gc.collect()
        found += [one for one in gc.get_objects() if issubclass(type(one), kind)]
    finally:
        gc.unfreeze()


def held_tensors(root: Any) -> list[Tensor]:
    """Tensors that an object leads to: attributes and containers, however deep, but not the request it serves."""
    found: list[Tensor] = []
    seen: set[int] = set()
    left = [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, Network | Request | Canvas | Options | type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, str | bytes):
            continue
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        else:
            left += vars(one).values() if hasattr(one, "__dict__") and not inspect.isroutine(one) else []
            left += [getattr(one, n) for n in getattr(type(one), "__slots__", ()) if hasattr(one, n)]
    return found
