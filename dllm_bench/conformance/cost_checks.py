"""Checks of what a method computes: counted truly, and nothing that grows with the square of the context."""

from __future__ import annotations

from typing import Any

from dllm_bench.conformance.check import Failed
from dllm_bench.conformance.meter import MeteredNetwork, Tally, Watch
from dllm_bench.conformance.subject import Decoded, Subject, unguided
from dllm_bench.errors import UserError

__all__ = ["CHECKS"]

_LONG = 704  # prompt of the long decode; twice the canvas of the other one
_GROWTH = 2.2  # a doubled context may double what is held, and a little more


def counters(subject: Subject) -> None:
    """Counters equal an independent count.

    Passes, dense passes and rows, counted at the primitives, with guidance too.
    """
    guided: dict[str, Any] = {"cfg_scale": 1.0}
    for model, changes in (("plain", {}), ("shifted", {}), ("plain", guided)):
        network = subject.network(model)
        network.reset()
        try:
            done = subject.decode(network=network, **changes)
        except UserError as error:
            if changes:  # a method may refuse guidance
                continue
            raise Failed(str(error)) from error
        told = done.run.counters
        _equal("nfe", told.nfe, len(done.run.passes))
        if subject.settings(None, network.config.family, **changes).cfg_scale == 0:
            _compare_passes(done, network.tally(told))
        _compare_rows(done, network)


def _compare_passes(done: Decoded, tally: Tally) -> None:
    rows, length = [p.rows for p in done.run.passes], done.canvas.length
    _equal("nfe", len(rows), len(tally.started))
    for number, (told, seen) in enumerate(zip(rows, tally.started, strict=True)):
        if told != seen:
            raise Failed(f"pass {number} says that it started with {told} rows, but {seen} were embedded")
    _equal("dense_passes", done.run.counters.dense_passes, sum(n == length for n in tally.started))


def _compare_rows(done: Decoded, network: MeteredNetwork) -> None:
    told, tally = done.run.counters, network.tally(done.run.counters)
    _equal("row_layers", told.row_layers, tally.ffn)
    _equal("projected_rows", told.projected_rows, tally.projected)
    _equal("attended_rows", told.attended_rows, tally.attended)
    _equal("head_rows", told.head_rows, tally.head)
    # work under other counters must be what the loop knows of: state that requests share
    beside = sum(other.ffn for other in network.others(told))
    _equal("row_layers beside its counters", getattr(getattr(done.run, "preparation", None), "row_layers", 0), beside)


def _equal(name: str, told: int, counted: int) -> None:
    if told != counted:
        raise Failed(f"{name} is {told}, but {counted} were counted at the primitives")


def primitives_only(subject: Subject) -> None:
    """Weights are read by the primitives alone.

    So no work goes uncounted.
    """
    for model in ("plain", "shifted"):
        network = subject.network(model)
        with Watch(network) as watch:
            subject.decode(network=network)
        if watch.strayed:
            raise Failed(f"{watch.strayed[0]} reads a weight outside of the network's primitives")


def logits_used(subject: Subject) -> None:
    """No logits but those given out."""
    unguided(subject)
    done = subject.decode(cfg_scale=0.0)
    given = sum(len(step.positions) for step in done.steps)
    if done.run.counters.head_rows != given:
        raise Failed(f"{done.run.counters.head_rows} rows of logits were computed, {given} were given out")


def no_square(subject: Subject) -> None:
    """No tensor grows with the square of the context."""
    small, large = (_largest(subject, length) for length in (_LONG // 2 - 8, _LONG))
    length = _LONG + 16
    if large.elements >= length * length // 2 or large.elements > 3 * small.elements:
        raise Failed(f"{large.operation} makes a tensor of shape {large.shape} over {length} positions")


def _largest(subject: Subject, length: int) -> Watch:
    network = subject.network()
    with Watch(network) as watch:
        subject.decode(length, block_length=16, tokens_per_pass=4)
    return watch


def linear_memory(subject: Subject) -> None:
    """What is held grows no faster than the context."""
    small, large = (sum(subject.decode(n).run.cache_bytes.values()) for n in (_LONG // 2 - 8, _LONG))
    if small and large > _GROWTH * small:
        raise Failed(f"twice the context holds {large / small:.1f} times the bytes ({small:,} and {large:,})")


CHECKS: list[Any] = [counters, primitives_only, logits_used, no_square, linear_memory]
