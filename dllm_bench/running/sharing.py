"""State that the samples of a cell share: made when a sample needs another one, booked with the sample it was made for.

Which method shares anything, and for which positions, is the method's own answer to `prepare`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dllm_bench.running.rows import preparation_columns
from dllm_bench.running.task import Sample

if TYPE_CHECKING:
    from dllm_bench.caching.shared import Shared
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.models.hub import Model
    from dllm_bench.running.spec import RunSpec

__all__ = ["Prepare", "Sharing", "affix"]

Prepare = Callable[..., "Shared | None"]


def affix(sample: Sample) -> tuple[int, int] | None:
    """The positions of the prompt that other samples hold too, as the task declares them."""
    return next(iter(sample.spans.get("affix", ())), None)


@dataclass
class Sharing:
    """Keeps the last shared state of one cell, for as long as the next sample can read it.

    Attributes:
        prepare: `dllm_bench.prepare` or a stand-in with its interface; None: every request makes its own.
        kept, requests: the state for the sample served last, and how many samples it has served.
        cost: what making it took, where it was made for that sample.
    """

    model: Model
    spec: RunSpec
    prepare: Prepare | None
    kept: Shared | None = None
    cost: Mapping[str, float] | None = None
    requests: int = 0

    @property
    def shares(self) -> bool:
        """Whether the cell's method has anything to share."""
        return self.spec.method.build().shares()

    def serve(self, sample: Sample, decode: DecodeSettings) -> dict[str, Any]:
        """Sees to it that `kept` serves this sample, or is None; returns the row's columns on it."""
        self.cost = None
        if self.prepare is None or not self.shares:
            return {}
        if self.kept is not None and not _holds(sample.prompt_ids, self.kept.ids):
            # let go before the next one is made: there are never two at a time
            self.kept = None
        last = self.kept
        self.kept = self.prepare(
            self.model, sample.prompt_ids, self.spec.method, decode=decode, span=affix(sample), reuse=last
        )
        if self.kept is None:
            return {}
        made = self.kept is not last
        self.cost = asdict(self.kept.cost) if made else None
        self.requests = 1 if made else self.requests + 1
        return {
            **preparation_columns(self.cost),
            "shared_requests": self.requests,
            "shared_bytes": sum(self.kept.bytes().values()),
        }

    def given(self, sample: Sample) -> dict[str, Any]:
        """What `generate` has to know of it; nothing where nothing is shared."""
        span = affix(sample) if self.shares else None
        told = {"span": span, "shared": self.kept}
        return {name: value for name, value in told.items() if value is not None}


def _holds(ids: tuple[int, ...], run: tuple[int, ...]) -> bool:
    """Whether `run` stands somewhere in `ids`. A match of bytes across ids counts too; `prepare` looks at each id."""
    return array("q", run).tobytes() in array("q", ids).tobytes()
