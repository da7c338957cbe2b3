"""What is run: the request as it was typed, its check, and the cells that it expands to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.spec import MethodSpec, parse_method, split_sets
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.options import Options, make_options
from dllm_bench.running.lengths import ctx_name, parse_ctx
from dllm_bench.running.task import TASKS, Codec, Task

if TYPE_CHECKING:
    from dllm_bench.models.hub import Model

__all__ = [
    "Plan",
    "Request",
    "RunSpec",
    "TaskRequest",
    "check",
    "check_ctxs",
    "check_task",
    "decode_settings",
    "expand",
    "generation_budget",
    "members",
]

_DEFAULT_BLOCK = 32
_DEFAULT_THRESHOLD = 0.9
# with one of these the user has chosen another commit rule than the threshold
_OTHER_RULES = ("threshold", "factor", "tokens_per_pass", "steps", "alg")


@dataclass(frozen=True)
class Request:
    """A run as it was asked for. Lists may hold comma lists; `decode` holds only the settings that were given."""

    methods: Sequence[str]
    task: str
    ctxs: Sequence[str] = ()
    subsets: Sequence[str] = ()
    samples: int = 20
    seed: int = 0
    decode: Mapping[str, Any] = field(default_factory=dict)
    sets: Sequence[str] = ()
    task_sets: Sequence[str] = ()


@dataclass(frozen=True)
class TaskRequest:
    """A task with options and subsets that are known to be valid; it needs a codec to become a task."""

    name: str
    task_class: type[Task]
    options: Options
    subsets: tuple[str, ...]

    def build(self, codec: Codec) -> Task:
        """The task for one codec."""
        return self.task_class(codec, self.options)


@dataclass(frozen=True)
class Plan:
    """A request whose names, options and lengths are known to be valid; it needs a model to become cells."""

    request: Request
    methods: tuple[MethodSpec, ...]
    task_class: type[Task]
    task_options: Options
    subsets: tuple[str, ...]
    ctxs: tuple[int | None, ...]


@dataclass(frozen=True)
class RunSpec:
    """One cell: everything that decides the answers of its samples, beside their index.

    `decode` holds resolved settings with the seed 0: each sample's own seed follows from `seed` and its index.
    """

    model: str
    model_revision: str | None
    model_fingerprint: str
    model_family: str
    dtype: str
    rope_scaling: str | None
    chat_template: str | None
    codec: str
    method: MethodSpec
    decode: DecodeSettings
    task: str
    task_version: int
    task_options: Options
    task_data: str | None
    subset: str
    ctx: int | None
    seed: int
    device_type: str
    package_version: str

    @property
    def label(self) -> str:
        """One line for progress and messages."""
        ctx = "" if self.ctx is None else f" · {ctx_name(self.ctx)}"
        return f"{self.method.label} · {self.task}/{self.subset}{ctx}"

    @property
    def gen_length(self) -> int:
        """Generation budget in tokens."""
        assert self.decode.gen_length is not None
        return self.decode.gen_length

    def key(self, index: int) -> str:
        """Hash of all that decides the answer to sample `index`; not of names, time or machine."""
        parts = self.columns()
        for name in ("model", "model_revision", "model_family", "method_label", "chat_template"):
            del parts[name]
        if parts["task_data"] is None:  # rows of before this column keep their keys
            del parts["task_data"]
        return hashlib.sha256(_json({**parts, "index": index}).encode()).hexdigest()[:32]

    def columns(self) -> dict[str, Any]:
        """The columns of a row that all samples of the cell share."""
        decode = self.decode.as_dict()
        del decode["seed"]
        return {
            "model": self.model,
            "model_revision": self.model_revision,
            "model_fingerprint": self.model_fingerprint,
            "model_family": self.model_family,
            "dtype": self.dtype,
            "rope_scaling": self.rope_scaling,
            "chat_template": self.chat_template,
            "codec": self.codec,
            "method": self.method.name,
            "method_label": self.method.label,
            "method_options": _json(self.method.options),
            "decode_settings": _json(decode),
            "gen_length": self.gen_length,
            "task": self.task,
            "task_version": self.task_version,
            "task_options": _json(self.task_options.as_dict()),
            "task_data": self.task_data,
            "subset": self.subset,
            "nominal_ctx": self.ctx,
            "seed": self.seed,
            "device_type": self.device_type,
            "package_version": self.package_version,
        }

    def sample_decode(self, index: int) -> DecodeSettings:
        """The decode settings of one sample: its seed is a hash of the run's seed and the index."""
        digest = hashlib.sha256(f"{self.seed}/{index}".encode()).digest()
        return replace(self.decode, seed=int.from_bytes(digest[:4], "big") >> 1)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def members(texts: Iterable[str]) -> list[str]:
    """The members of comma lists, each once, in order."""
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))


def check(request: Request) -> Plan:
    """Checks all that can be checked without a model. Raises UserError naming the nearest valid choice."""
    names = members(request.methods)
    if not names:
        raise UserError("name a method: --method baseline")
    if request.samples < 1:
        raise UserError(f"samples must be at least 1 (nearest valid: 1), got {request.samples}")
    if request.seed < 0:
        raise UserError(f"seed must be at least 0 (nearest valid: 0), got {request.seed}")
    methods = tuple(parse_method(name, request.sets) for name in names)
    asked = check_task(request.task, request.subsets, request.task_sets)
    ctxs = check_ctxs(asked, request.ctxs)
    request = replace(request, task=asked.name, subsets=asked.subsets)
    return Plan(request, methods, asked.task_class, asked.options, asked.subsets, ctxs)


def check_task(task: str, subsets: Sequence[str] = (), task_sets: Sequence[str] = ()) -> TaskRequest:
    """Checks a task, or TASK:SUBSET, with its subsets and `key=value` options. Raises UserError."""
    name, _, subset = task.partition(":")
    found = TASKS.get(name)
    options = make_options(found.options_class, split_sets(task_sets), owner=f"task '{name}'")
    asked = TaskRequest(name, found, options, _subsets([*subsets, subset], found))
    found.check_request(asked.subsets, options)
    return asked


def _subsets(texts: Sequence[str], task: type[Task]) -> tuple[str, ...]:
    groups, found = task.groups(), list[str]()
    for name in members(texts) or [task.default_subset]:
        if name not in groups:
            task.check_subset(name)
        found += groups.get(name, (name,))
    return tuple(dict.fromkeys(found))


def check_ctxs(request: TaskRequest, texts: Sequence[str]) -> tuple[int | None, ...]:
    """Context lengths in tokens; (None,) where none is given and the task needs none. Raises UserError."""
    asked, kind = members(texts), request.task_class.ctx
    if kind == "none":
        if asked:
            raise UserError(f"task '{request.name}' has no context lengths: leave --ctx out")
        return (None,)
    if not asked and kind == "optional":
        return (None,)
    if not asked:
        raise UserError(f"task '{request.name}' needs a context length, such as --ctx 2k")
    return tuple(dict.fromkeys(parse_ctx(text) for text in asked))


def generation_budget(given: Mapping[str, Any], budget: int, card: Mapping[str, Any]) -> int:
    """Tokens to generate: what was given, else the task's budget, or the smaller one that the model's card names."""
    asked = given.get("gen_length")
    return int(asked) if asked is not None else min(budget, int(card.get("gen_length", budget)))


def decode_settings(given: Mapping[str, Any], budget: int, card: Mapping[str, Any], family: str) -> DecodeSettings:
    """Settings from what was given, then the model's card, the task's budget in tokens, and the defaults.

    The card may name a smaller budget than the task's; without another commit rule the threshold is 0.9, in blocks
    of 32 or of the next smaller number that divides the budget. Raises UserError for settings that do not fit together.
    """
    values: dict[str, Any] = {"block_length": _DEFAULT_BLOCK, **card}
    values["gen_length"] = generation_budget({}, budget, card)
    if any(given.get(name) is not None for name in _OTHER_RULES) or given.get("remasking") == "random":
        values = {name: value for name, value in values.items() if name not in _OTHER_RULES}
        if given.get("alg") == "confidence_threshold":
            values["threshold"] = _DEFAULT_THRESHOLD
    elif not any(values.get(name) is not None for name in _OTHER_RULES):
        values["threshold"] = _DEFAULT_THRESHOLD
    values.update({name: value for name, value in given.items() if value is not None})
    if given.get("block_length") is None:
        values["block_length"] = _block(int(values["block_length"]), int(values["gen_length"]))
    return DecodeSettings.make(values, family)


def _block(default: int, gen_length: int) -> int:
    """The largest block up to the default that divides the budget, since official budgets such as 50 or 120 are no
    multiples of it; where that is less than half of the default, the smallest one above."""
    most = min(default, gen_length)
    below = next((block for block in range(most, 0, -1) if gen_length % block == 0), default)
    if 2 * below >= most:
        return below
    return next(block for block in range(most, gen_length + 1) if gen_length % block == 0)


def expand(plan: Plan, model: Model, task: Task, package_version: str) -> list[RunSpec]:
    """The cells in the order in which they run: by context length, subset and method.

    Raises UserError for decode settings that the family or a method refuses.
    """
    given = plan.request.decode
    decodes = {s: decode_settings(given, task.budget(s), model.decode_defaults, model.family) for s in plan.subsets}
    for method in plan.methods:
        for decode in decodes.values():
            method.build().check(decode)
    return [
        RunSpec(
            model=model.name,
            model_revision=model.revision,
            model_fingerprint=model.fingerprint,
            model_family=model.family,
            dtype=model.dtype,
            rope_scaling=model.rope_scaling,
            chat_template=model.chat_template,
            codec=model.codec.identity(),
            method=method,
            decode=replace(decodes[subset], seed=0),
            task=plan.request.task,
            task_version=task.version,
            task_options=plan.task_options,
            task_data=task.data(subset),
            subset=subset,
            ctx=task.default_ctx(subset, model.max_positions) if ctx is None else ctx,
            seed=plan.request.seed,
            device_type=model.device.partition(":")[0],
            package_version=package_version,
        )
        for ctx in plan.ctxs
        for subset in plan.subsets
        for method in plan.methods
    ]
