"""The method under test, and how the checks decode with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.memory import PassMemory
from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.part import METHODS, Part
from dllm_bench.caching.spec import MethodSpec, parse_method
from dllm_bench.conformance.check import Failed, Skipped
from dllm_bench.conformance.fixtures import CONFIGS, fixture_weights, make_prompt
from dllm_bench.conformance.meter import MeteredNetwork
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dllm_bench.caching.shared import Shared
    from dllm_bench.decoding.rules import Decision
    from dllm_bench.decoding.windows import Window
else:
    torch = LazyModule("torch")

__all__ = ["USUAL", "Decoded", "Step", "Subject", "decode", "fixture_network", "uncached", "unguided"]

USUAL: dict[str, Any] = {"gen_length": 16, "block_length": 8, "tokens_per_pass": 2, "eos_stop": False}
_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"remasking": "random"}, {"cfg_scale": 1.0})

OnPass = Callable[[Canvas, "Step"], None]


@dataclass(frozen=True)
class Step:
    """One pass: its window, the positions with logits, those logits, and what was committed as (position, id)."""

    window: Window
    positions: tuple[int, ...]
    logits: Tensor
    committed: tuple[tuple[int, int], ...]


@dataclass
class Decoded:
    """One decode with its passes."""

    run: Run
    canvas: Canvas
    prompt: list[int]
    steps: list[Step] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """The whole canvas."""
        found: list[int] = self.canvas.ids[0].tolist()
        return found

    def same(self, other: Decoded) -> bool:
        """Whether both committed the same tokens in the same passes, by the same logits to the last bit."""
        if self.ids != other.ids or len(self.steps) != len(other.steps):
            return False
        pairs = zip(self.steps, other.steps, strict=True)
        return all(a.committed == b.committed and torch.equal(a.logits, b.logits) for a, b in pairs)


def unguided(subject: Subject) -> None:
    """Raises Skipped where the method, with its options, decodes with guidance alone."""
    try:
        subject.settings(cfg_scale=0.0)
    except UserError as error:
        raise Skipped(f"needs guidance: {error}") from error


def uncached() -> Method:
    """The uncached decode that others are compared with: every pass over all rows, nothing kept."""
    return Method(None, PassMemory())


class Subject:
    """A method spec with options, and fixture networks to decode with.

    Options that a part names in `check_with` are set, unless the user has set them.

    Attributes:
        text: the spec as given. sets: options by qualified name.
    """

    def __init__(self, text: str, sets: Mapping[str, Any] | None = None) -> None:
        given = parse_method(text, dict(sets or {}))
        names = {name for name, _ in given.parts}
        qualified = {self._qualify(given, key) for key in sets or {}}
        small = {f"{n}.{k}": v for n in names for k, v in METHODS.get(n).check_with.items()}
        self.text = text
        self.given = given
        self.sets: dict[str, Any] = {
            **{key: value for key, value in small.items() if key not in qualified},
            **{self._qualify(given, key): value for key, value in (sets or {}).items()},
        }
        self.spec = parse_method(text, self.sets)
        self._variant = self._choose_variant(self.spec)
        self._networks: dict[tuple[str, str], MeteredNetwork] = {}

    @staticmethod
    def _qualify(spec: MethodSpec, key: str) -> str:
        part, _, bare = key.rpartition(".")
        owner = part or next(n for n, options in spec.parts if bare in options.as_dict())
        return f"{owner}.{bare}"

    @property
    def capped(self) -> bool:
        """Whether options that the user has set end blocks early, with masks left."""
        plain = parse_method(self.text)
        if self.given == plain:
            return False
        settings = self.settings()
        return plain.build().pass_limit(settings) is None and self.spec.build().pass_limit(settings) is not None

    @property
    def parts(self) -> list[type[Part]]:
        """The classes: the refresh method, then the memories from the bottom up."""
        return [METHODS.get(name) for name, _ in self.spec.parts]

    def variant(self, options: Mapping[str, Any]) -> MethodSpec:
        """The spec with other options, by qualified name. Raises UserError where they are refused."""
        return parse_method(self.text, {**self.sets, **options})

    def _choose_variant(self, spec: MethodSpec) -> dict[str, Any]:
        """The usual decode settings, or the first change of them that the method accepts."""
        first: UserError | None = None
        for extra in _VARIANTS:
            try:
                for config in CONFIGS.values():
                    spec.build().check(DecodeSettings.make({**USUAL, **extra}, config.family))
            except UserError as error:
                first = first or error
            else:
                return extra
        assert first is not None
        raise first

    def settings(self, spec: MethodSpec | None = None, family: str = "llada", **changes: Any) -> DecodeSettings:
        """The usual settings with changes; None unsets one. Raises UserError where the method refuses them."""
        spec = spec or self.spec
        extra = self._variant if spec is self.spec else self._choose_variant(spec)
        values = {k: v for k, v in {**USUAL, **extra, **changes}.items() if v is not None}
        made = DecodeSettings.make(values, family)
        spec.build().check(made)
        return made

    @property
    def guided(self) -> bool:
        """Whether the usual settings have guidance, which runs two streams."""
        return self.settings().cfg_scale > 0

    def reused(self) -> Callable[[], Method]:
        """Gives the same instances in every request: one, or one for each stream of guidance."""
        instances = itertools.cycle([self.spec.build() for _ in range(1 + self.guided)])
        return lambda: next(instances)

    def network(self, model: str = "plain", dtype: str = "float32") -> MeteredNetwork:
        """A fixture network; one object per model and precision, as in a run over many requests."""
        key = (model, dtype)
        if key not in self._networks:
            self._networks[key] = fixture_network(model, dtype)
        return self._networks[key]

    def decode(
        self,
        prompt: int | list[int] = 37,
        *,
        network: MeteredNetwork | None = None,
        spec: MethodSpec | None = None,
        make: Callable[[], Method] | None = None,
        on_pass: OnPass | None = None,
        span: tuple[int, int] | None = None,
        shared: Shared | None = None,
        **changes: Any,
    ) -> Decoded:
        """Decodes one prompt (or a random one of that length) and keeps every pass.

        Args:
            make: builds the methods; default: fresh ones from the spec.
            on_pass: sees each pass; it may raise.
            span, shared: what other requests hold too, and the state made of it, as `denoise` takes them.
            changes: changes of the usual decode settings.

        Raises:
            Failed: the decode goes on for ever.
        """
        network = network or self.network()
        settings = self.settings(spec, network.config.family, **changes)
        return decode(network, prompt, settings, make or (spec or self.spec).build, on_pass, span, shared)


def fixture_network(model: str, dtype: str) -> MeteredNetwork:
    """A fresh fixture network, its RoPE table long enough for every check."""
    config = CONFIGS[model]
    network = MeteredNetwork(config, fixture_weights(config, getattr(torch, dtype)))
    network.grow_rope(1024)
    return network


def decode(
    network: MeteredNetwork,
    prompt: int | list[int],
    settings: DecodeSettings,
    make: Callable[[], Method],
    on_pass: OnPass | None = None,
    span: tuple[int, int] | None = None,
    shared: Shared | None = None,
) -> Decoded:
    """Decodes with given settings. Raises Failed when the passes do not come to an end."""
    ids = make_prompt(prompt) if isinstance(prompt, int) else prompt
    assert settings.gen_length is not None
    limit = 2 * settings.gen_length + 8
    canvas = Canvas.make(ids, settings, network.config, network.device)
    steps: list[Step] = []

    def keep(window: Window, output: Output, decision: Decision) -> None:
        pairs = tuple(sorted(zip(decision.positions, decision.tokens.tolist(), strict=True)))
        steps.append(Step(window, tuple(output.positions), output.logits.clone(), pairs))
        if on_pass is not None:
            on_pass(canvas, steps[-1])
        if len(steps) > limit:
            raise Failed(f"{len(canvas.masked)} of {settings.gen_length} positions are masked after {limit} passes")

    run = denoise(network, canvas, make, settings, keep, span, shared)
    return Decoded(run, canvas, ids, steps)
