"""Checks at the attention itself: what a pass has just computed is seen, at its own position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dllm_bench.caching.rows import Rows
from dllm_bench.conformance.check import Failed
from dllm_bench.conformance.subject import Subject, unguided

if TYPE_CHECKING:
    from torch import Tensor

    from dllm_bench.caching.method import Method
    from dllm_bench.conformance.meter import Fresh, OnAttend

__all__ = ["CHECKS"]

_CLOSE = 1e-4


def fresh_rows(subject: Subject) -> None:
    """Queries see the rows of their pass, in place.

    The fresh value of every row that their layer has just computed, with the key of its own position.
    """
    method = _Keeper(subject)

    def look(q: Tensor, parts: Any, fresh: Fresh) -> None:
        v, k = fresh.get("v"), fresh.get("k")
        if v is None:
            return
        where = method.positions(v.shape[2]) if k is not None else None
        rotated = subject.network().rope(k, where) if k is not None and where is not None else None
        seen = v.new_zeros(v.shape[:3]).bool()
        for part in parts:
            equal = (part[1][:, :, None] == v[:, :, :, None]).all(dim=-1)
            if rotated is not None:
                equal &= (part[0][:, :, None] - rotated[:, :, :, None]).abs().amax(dim=-1) < _CLOSE
            seen |= equal.any(dim=-1)
        if not bool(seen.all()):
            number = int((~seen).any(dim=1).sum())
            raise Failed(f"{number} of {v.shape[2]} rows that a layer has just computed are not seen as they are")

    _watch(subject, look, method)


def own_positions(subject: Subject) -> None:
    """Queries are rotated to their absolute positions."""
    method = _Keeper(subject)

    def look(q: Tensor, parts: Any, fresh: Fresh) -> None:
        made = fresh.get("q")
        where = method.positions(q.shape[2])
        if made is None or where is None or made.shape != q.shape:
            return
        if float((subject.network().rope(made, where) - q).abs().max()) > _CLOSE:
            raise Failed(f"queries of {q.shape[2]} rows are not rotated to their positions")

    _watch(subject, look, method)


class _Keeper:
    """Builds methods and knows which rows the last one's pass computes."""

    def __init__(self, subject: Subject) -> None:
        self._subject, self._made = subject, list[Any]()

    def __call__(self) -> Method:
        self._made.append(self._subject.spec.build())
        made: Method = self._made[-1]
        return made

    def positions(self, count: int) -> Tensor | slice | None:
        """Where `count` rows stand: those of the pass, or all; None where they are others."""
        method = self._made[-1]
        if not hasattr(method, "request"):
            return None
        if method.started.count == count:
            rows: Rows = method.started
            return rows.where
        return slice(0, count) if count == method.request.length else None


def _watch(subject: Subject, look: OnAttend, method: _Keeper) -> None:
    unguided(subject)
    network = subject.network()
    network.on_attend = look
    try:
        for prompt in (37, 1):
            subject.decode(prompt, make=method, cfg_scale=0.0)
    finally:
        network.on_attend = None


CHECKS: list[Any] = [fresh_rows, own_positions]
