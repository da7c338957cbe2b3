"""The loop over cells and samples: does what is missing, one durable row at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.running.choices import Judge, check_method
from dllm_bench.running.environment import Environment
from dllm_bench.running.measure import MemoryPeak, is_out_of_memory, release_memory
from dllm_bench.running.positions import check_samples
from dllm_bench.running.rows import (
    answer_columns,
    begun_columns,
    generation_columns,
    preparation_columns,
    sample_columns,
)
from dllm_bench.running.schema import RETRIED
from dllm_bench.running.sharing import Prepare, Sharing
from dllm_bench.running.spec import RunSpec
from dllm_bench.running.store import Store
from dllm_bench.running.task import Sample, Task

if TYPE_CHECKING:
    from dllm_bench.api import Generation
    from dllm_bench.models.hub import Model

__all__ = ["Cell", "Events", "Runner", "error_message", "missing_indices", "warm_up_settings"]

Generate = Callable[..., "Generation"]


@dataclass(frozen=True)
class Cell:
    """A spec with the number of its samples: indices 0 to samples - 1."""

    spec: RunSpec
    samples: int

    @property
    def keys(self) -> dict[int, str]:
        """Index -> key."""
        return {index: self.spec.key(index) for index in range(self.samples)}


class Events(Protocol):
    """What a runner tells while it works."""

    def begin(self, cell: Cell, missing: int) -> None:
        """A cell begins; `missing` of its samples have to be computed."""

    def row(self, row: Mapping[str, Any]) -> None:
        """A sample's row is in the store."""

    def end(self, cell: Cell) -> None:
        """All samples of the cell are in the store."""

    def warn(self, message: str) -> None:
        """Something that the user should know, one line."""


class Runner:
    """Runs cells of one model and one task into a store.

    Args:
        generate: `dllm_bench.generate` or a stand-in with its interface.
        prepare: `dllm_bench.prepare` likewise; None: no sample shares anything with another one.
        judge: asks for the likelihoods of samples with choices; None: there are no such samples.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        store: Store,
        generate: Generate,
        environment: Environment,
        events: Events,
        prepare: Prepare | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.model, self.task, self.store = model, task, store
        self.generate, self.environment, self.events = generate, environment, events
        self.prepare, self.judge = prepare, judge
        self._written = 0
        self._warned = False

    def run(self, cells: Sequence[Cell], *, fresh: bool = False) -> int:
        """Computes the samples that the store lacks or that have to be retried; returns how many were computed.

        With `fresh` the rows of these cells are dropped first. Raises UserError, before anything is written, where
        the request cannot be met.
        """
        missing = missing_indices(self.store, cells, fresh)
        asked = [(cell.spec, todo) for cell, todo in zip(cells, missing, strict=True)]
        check_samples(self.model, self.task, asked)
        firsts = [self._sample(cell.spec, todo[0]) if todo else None for cell, todo in zip(cells, missing, strict=True)]
        for cell, first in zip(cells, firsts, strict=True):
            if first is not None and first[0].choices is not None:
                check_method(cell.spec.method, self.task.name)
        self._check_lengths(cells, [None if first is None else first[0] for first in firsts])
        for cell, todo, first in zip(cells, missing, firsts, strict=True):
            self.events.begin(cell, len(todo))
            if first is not None:
                self._warm_up(cell.spec, first[0])
            if fresh and cell is cells[0]:
                # only now that the first warm-up has shown that the request can be met
                self.store.drop({key for one in cells for key in one.keys.values()})
            sharing = Sharing(self.model, cell.spec, self.prepare)
            for place, index in enumerate(todo):
                row = self._row(cell.spec, index, first if place == 0 else None, sharing)
                self.store.append(row)
                self._written += 1
                self.events.row(row)
            self.events.end(cell)
        return self._written

    def _sample(self, spec: RunSpec, index: int) -> tuple[Sample, float]:
        """The sample and the seconds that it took to make."""
        begin = time.perf_counter()
        sample = self.task.sample(spec.subset, index, ctx=spec.ctx, gen_length=spec.gen_length, seed=spec.seed)
        return sample, time.perf_counter() - begin

    def _warm_up(self, spec: RunSpec, sample: Sample) -> None:
        """A short generation outside of all clocks, for kernels and allocators. Its failures show in the rows."""
        try:
            self.generate(
                self.model,
                sample.prompt_ids,
                method=spec.method,
                decode=warm_up_settings(spec.decode, spec.model_family),
                **Sharing(self.model, spec, None).given(sample),
            )
        except UserError:
            if not self._written:
                raise
        except Exception:
            release_memory(spec.device_type)

    def _row(self, spec: RunSpec, index: int, made: tuple[Sample, float] | None, sharing: Sharing) -> dict[str, Any]:
        decode = spec.sample_decode(index)
        row = begun_columns(spec, self.environment, index, decode)
        try:
            sample, seconds = made or self._sample(spec, index)
            row["tokenisation_seconds"] = seconds
            row.update(sample_columns(sample, self.model.max_positions))
            self._check_positions(sample.actual_ctx)
            # booked before decoding: it was paid for even where that fails
            row.update(sharing.serve(sample, decode))
            row.update(self._answer(spec, sample, decode, sharing))
        except UserError as error:
            if not self._written:
                raise
            row.update(status="error", error=str(error))
        except Exception as error:
            # one sample that fails must not end a run of hours: the row tells, and a rerun tries it again
            row.update(status="oom" if is_out_of_memory(error) else "error", error=error_message(error))
        if row["status"] == "oom":
            release_memory(spec.device_type)
        return row

    def _answer(self, spec: RunSpec, sample: Sample, decode: DecodeSettings, sharing: Sharing) -> dict[str, Any]:
        memory = MemoryPeak(spec.device_type)
        memory.start()
        if sample.choices is not None:
            assert self.judge is not None, "the task has choices, and nobody judges them"
            columns = self.judge.columns(self.task, sample, spec.method)
        else:
            given = sharing.given(sample)
            made = self.generate(self.model, sample.prompt_ids, method=spec.method, decode=decode, **given)
            columns = generation_columns(made) | preparation_columns(sharing.cost, made.preparation)
        peak = memory.stop()
        columns |= {"memory_peak_bytes": peak, "memory_peak_kind": memory.kind if peak is not None else None}
        return columns if sample.choices is not None else columns | answer_columns(self.task, sample, made)

    def _check_lengths(self, cells: Sequence[Cell], firsts: Sequence[Sample | None]) -> None:
        """Tells, before anything runs, of lengths beyond what was asked for or what the model is made for."""
        made = [(cell.spec, sample) for cell, sample in zip(cells, firsts, strict=True) if sample is not None]
        over = [(spec, sample) for spec, sample in made if spec.ctx is not None and sample.actual_ctx > spec.ctx]
        if over:
            spec, sample = over[0]
            self.events.warn(
                f"samples of {spec.label} take more than their context: prompt and budget of the first are "
                f"{sample.actual_ctx} tokens (column actual_ctx)"
            )
        for _, sample in made:
            self._check_positions(sample.actual_ctx)

    def _check_positions(self, tokens: int) -> None:
        if tokens > self.model.max_positions and not self._warned:
            self._warned = True
            self.events.warn(
                f"contexts of {tokens} tokens are beyond the {self.model.max_positions} positions that "
                f"{self.model.name} is made for: expect poor answers (column beyond_max_positions)"
            )


def warm_up_settings(decode: DecodeSettings, family: str) -> DecodeSettings:
    """Settings for one block in two passes where the commit rule allows it: the real shapes, little time."""
    block = decode.block_length or 1
    values = {**decode.as_dict(), "gen_length": block, "block_length": block, "steps": 2 if block % 2 == 0 else 1}
    if decode.alg is None:
        values.update(threshold=None, factor=None, tokens_per_pass=None)
    try:
        return DecodeSettings.make({name: value for name, value in values.items() if value is not None}, family)
    except UserError:
        return decode


def missing_indices(store: Store, cells: Sequence[Cell], fresh: bool) -> list[list[int]]:
    """Per cell the samples that the store lacks or that have to be retried; all of them when it starts afresh."""
    kept = {} if fresh else store.statuses()
    done = {key for key, status in kept.items() if status not in RETRIED}
    return [[index for index, key in cell.keys.items() if key not in done] for cell in cells]


def error_message(error: Exception) -> str:
    """One line for the row."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
