"""Runs fidelity comparisons over cells and samples: does what is missing, one durable sample at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.fidelity import Comparison, Step, compare, uncached
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError
from dllm_bench.running.environment import Environment
from dllm_bench.running.measure import is_out_of_memory, release_memory
from dllm_bench.running.positions import check_samples
from dllm_bench.running.rows import begun_columns, sample_columns
from dllm_bench.running.runner import Cell, Events, error_message, missing_indices
from dllm_bench.running.store import Store
from dllm_bench.running.task import Sample, Task

if TYPE_CHECKING:
    from dllm_bench.decoding.loop import Run
    from dllm_bench.models.hub import Model
    from dllm_bench.running.spec import RunSpec

__all__ = ["FidelityRunner", "comparison_rows"]

_SAMPLE = ("prompt_hash", "prompt_tokens", "actual_ctx")


class FidelityRunner:
    """Compares the methods of cells with the uncached trajectory, into a store of fidelity rows."""

    def __init__(self, model: Model, task: Task, store: Store, environment: Environment, events: Events) -> None:
        self.model, self.task, self.store = model, task, store
        self.environment, self.events = environment, events
        self._written = 0
        # methods of one context length and subset follow each other, and share their uncached trajectories
        self._truths: dict[int, Run] = {}
        self._truths_of: tuple[Any, ...] = ()

    def run(self, cells: Sequence[Cell], *, fresh: bool = False) -> int:
        """Compares the samples that the store lacks or that have to be retried; returns how many were compared.

        With `fresh` the rows of these cells are dropped first. Raises UserError, before anything is written, where
        the request cannot be met.
        """
        missing = missing_indices(self.store, cells, fresh)
        asked = [(cell.spec, todo) for cell, todo in zip(cells, missing, strict=True)]
        check_samples(self.model, self.task, asked)
        for cell, todo in zip(cells, missing, strict=True):
            if todo:
                self._sample(cell.spec, todo[0])  # a length that is too small shows before anything is computed
        for cell, todo in zip(cells, missing, strict=True):
            self.events.begin(cell, len(todo))
            for index in todo:
                rows = self._rows(cell.spec, index)
                if fresh and not self._written:
                    # only now that the first sample has shown that the request can be met
                    self.store.drop({key for one in cells for key in one.keys.values()})
                self.store.append(*rows)
                self._written += 1
                self.events.row(_told(rows))
            self.events.end(cell)
        return self._written

    def _sample(self, spec: RunSpec, index: int) -> Sample:
        sample = self.task.sample(spec.subset, index, ctx=spec.ctx, gen_length=spec.gen_length, seed=spec.seed)
        if sample.choices is not None:
            raise UserError(
                f"task '{spec.task}' subset '{spec.subset}' is judged by likelihoods: there is no trajectory to compare"
            )
        return sample

    def _rows(self, spec: RunSpec, index: int) -> list[dict[str, Any]]:
        decode = spec.sample_decode(index)
        row = {**begun_columns(spec, self.environment, index, decode), "status": "ok"}
        try:
            sample = self._sample(spec, index)
            row.update({name: sample_columns(sample, self.model.max_positions)[name] for name in _SAMPLE})
            found = self._compare(spec, sample, decode)
            return [{**row, **columns} for columns in comparison_rows(found)]
        except UserError as error:
            if not self._written:
                raise
            row.update(status="error", error=str(error))
        except Exception as error:
            # one sample that fails must not end a run of hours: the row tells, and a rerun tries it again
            row.update(status="oom" if is_out_of_memory(error) else "error", error=error_message(error))
            release_memory(spec.device_type)
        return [row]

    def _compare(self, spec: RunSpec, sample: Sample, decode: DecodeSettings) -> Comparison:
        network = self.model.network
        truth = self._truth(spec, sample, decode)
        spans = sample.spans.get("affix", ())
        return compare(
            network,
            self._canvas(sample, decode),
            spec.method.build,
            decode,
            truth,
            span=spans[0] if len(spans) == 1 else None,
            needles=sample.spans.get("needle", ()),
            codec=self.model.codec if self.model.has_codec else None,
        )

    def _truth(self, spec: RunSpec, sample: Sample, decode: DecodeSettings) -> Run:
        shared = (spec.subset, spec.ctx, spec.seed, spec.decode)
        if shared != self._truths_of:
            self._truths, self._truths_of = {}, shared
        if sample.index not in self._truths:
            self._truths[sample.index] = uncached(self.model.network, self._canvas(sample, decode), decode)
        return self._truths[sample.index]

    def _canvas(self, sample: Sample, decode: DecodeSettings) -> Canvas:
        return Canvas.make(sample.prompt_ids, decode, self.model.config, self.model.network.device)


def comparison_rows(found: Comparison) -> list[dict[str, Any]]:
    """The columns of one comparison, a row per committing pass."""
    shared = {
        "passes": len(found.steps),
        "uncached_passes": found.uncached_passes,
        "tokens_compared": found.compared,
        "tokens_agreeing": found.agreeing,
        "first_divergent_step": found.first_step,
        "first_divergent_position": found.first_position,
    }
    return [{**shared, "step": number, **_step_columns(step)} for number, step in enumerate(found.steps)]


def _step_columns(step: Step) -> dict[str, Any]:
    drifts = {
        f"{kind}_drift_{part}": _known(values)
        for kind, by_part in (("key", step.key_drift), ("value", step.value_drift))
        for part, values in by_part.items()
    }
    return {
        "block": step.window.block,
        "block_step": step.window.step,
        "kind": step.kind,
        "rows": step.rows,
        "candidates": len(step.positions),
        "committed_positions": [p for p, _ in step.committed],
        "committed_tokens": [token for _, token in step.committed],
        "committed_agreeing": step.agreeing,
        "same_commits": step.same,
        "kl_mean": fmean(step.kl) if step.kl else None,
        "kl_max": max(step.kl, default=None),
        **drifts,
        "mass_kept": _known(step.mass_kept),
        "needles_kept": _known(step.needles_kept),
    }


def _known(values: Sequence[float | None]) -> list[float | None] | None:
    """One number per layer; None where no layer has one."""
    return list(values) if any(value is not None for value in values) else None


def _told(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What progress shows of a sample: its agreement, and its divergence summed over all candidates."""
    ok = rows[0]["status"] == "ok"
    counted = [(row["kl_mean"], row["candidates"]) for row in rows if ok and row["kl_mean"] is not None]
    return {
        "status": rows[0]["status"],
        "compared": rows[0]["tokens_compared"] if ok else 0,
        "agreeing": rows[0]["tokens_agreeing"] if ok else 0,
        "kl_sum": sum(mean * number for mean, number in counted),
        "kl_count": sum(number for _, number in counted),
    }
