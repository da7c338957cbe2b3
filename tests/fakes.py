"""Stand-ins for a model, a task and `generate`: what they answer is set by the test, so every count is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dllm_bench.api import Generation
from dllm_bench.errors import UserError
from dllm_bench.models.counters import Counters
from dllm_bench.options import Options, option
from dllm_bench.running.task import TASKS, Answer, Sample, Task

EOS = 0


class ToyCodec:
    """Ids are code points; 0 is EOS."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i != EOS)

    def wrap(self, user: str, answer_prefix: str = "", *, template: bool = True) -> list[int]:
        return self.encode(user + answer_prefix)

    def identity(self) -> str:
        return "toy-codec"


@dataclass(frozen=True)
class ToyOptions(Options):
    word: str = option("egg", "the word to say")
    style: Literal["plain", "loud"] = option("plain", "how to ask")


class ToyTask(Task):
    """Asks for a word. The sample's index stands in the prompt."""

    name = "toy_task"
    version = 3
    summary = "says a word"
    source = "made up"
    subsets = ("single", "multi")
    default_subset = "single"
    options_class = ToyOptions

    def budget(self, subset: str) -> int:
        return 64 if subset == "single" else 128

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        assert ctx is not None and isinstance(self.options, ToyOptions)
        if ctx < 128:
            raise UserError(f"ctx {ctx} is too small: nearest valid is 128")
        question = f"say {self.options.word} {index} {seed} "
        room = ctx - gen_length - len(question)
        ids = (*self.codec.encode(question), *[ord(".")] * room)
        spans, meta = {"needle": ((4, 7),)}, {"needle_depths": [10.0 * index], "truncated": False}
        return Sample("toy_task", subset, index, seed, ids, (self.options.word,), gen_length, ctx, ("\n",), spans, meta)

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        return {"score": float(answer.prediction == answer.references[0])}

    def size(self, subset: str) -> int | None:
        return None if subset == "single" else 3


if "toy_task" not in TASKS.names():
    TASKS.register("toy_task", ToyTask)


@dataclass
class ToyModel:
    name: str = "toy"
    revision: str | None = None
    fingerprint: str = "f00d"
    dtype: str = "float32"
    device: str = "cpu"
    family: str = "llada"
    max_positions: int = 4096
    rope_scaling: str | None = None
    chat_template: str | None = "plain"
    decode_defaults: dict[str, Any] = field(default_factory=dict)
    codec: ToyCodec = field(default_factory=ToyCodec)


def padded(text: str, gen_length: int) -> list[int]:
    ids = [ord(letter) for letter in text]
    return (ids + [EOS] * gen_length)[:gen_length]


class ToyGenerate:
    """Says "egg" and then EOS, in a quarter of a second by its own clock; `answer(index)` may give ids or raise.

    Attributes:
        calls: indices of the samples that were decoded, warm-ups left out; `warm_ups`: their number.
    """

    def __init__(self, answer: Callable[[int], list[int] | None] | None = None, masks_left: int = 0) -> None:
        self.answer, self.masks_left = answer, masks_left
        self.calls: list[int] = []
        self.seeds: list[int] = []
        self.warm_ups = 0

    def __call__(self, model: Any, prompt_ids: Sequence[int], *, method: Any, decode: Any) -> Generation:
        question = ToyCodec().decode(prompt_ids)
        if decode.gen_length < 64:
            self.warm_ups += 1
            return self._made(padded("egg", decode.gen_length))
        index = int(question.split()[2])
        self.calls.append(index)
        self.seeds.append(decode.seed)
        ids = self.answer(index) if self.answer else None
        return self._made(padded("egg", decode.gen_length) if ids is None else ids)

    def _made(self, ids: list[int]) -> Generation:
        useful = ids.index(EOS) if EOS in ids else len(ids)
        return Generation(
            output_ids=ids,
            text=None,
            nfe=5,
            dense_passes=1,
            row_layers=640,
            masks_left=self.masks_left,
            useful_tokens=useful,
            canvas_tokens=len(ids),
            seconds={"dense": 0.125, "partial": 0.0625, "commit": 0.03125, "total": 0.25},
            pass_seconds=[("dense", 0.125), ("partial", 0.03125), ("partial", 0.03125)],
            first_commit_seconds=0.125,
            first_block_seconds=None,
            cache_bytes={"kv": 4096},
            cache_bytes_peak=4096,
            counters=Counters(nfe=5, dense_passes=1, row_layers=640),
        )


def digest(rows: Sequence[dict[str, Any]]) -> str:
    """Hash of rows without what a clock or the machine's memory decides."""
    left_out = {"started_at", "tokenisation_seconds", "memory_peak_bytes"}
    told = sorted(json.dumps({k: v for k, v in row.items() if k not in left_out}, sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()
