"""Checks of what outlives a pass or a request: nothing that changes an answer, and no tensor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dllm_bench.caching.request import Request
from dllm_bench.conformance.check import Failed, Skipped
from dllm_bench.conformance.fixtures import make_prompt
from dllm_bench.conformance.meter import held_tensors, storage_sizes, surviving_tensors
from dllm_bench.conformance.subject import Step, Subject
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.sharing import provide

if TYPE_CHECKING:
    from dllm_bench.caching.method import Method
    from dllm_bench.caching.shared import Shared
    from dllm_bench.conformance.meter import MeteredNetwork

__all__ = ["CHECKS"]


class _Stop(Exception):
    """Ends a decode in the middle, as an error in a commit rule would."""


def same_again(subject: Subject) -> None:
    """The same request again, another in between.

    To the last bit, with the same instance and with a new one.
    """
    first, reused = subject.decode(37), subject.reused()
    for again, what in (
        (subject.decode(37), "a new instance"),
        (subject.decode(37, make=reused), "a new instance"),
        (subject.decode(37, make=reused), "the same instance"),
    ):
        if not first.same(again):
            raise Failed(f"the same request gives something else the second time, with {what}")
    for make, what in ((reused, "the same instance"), (subject.spec.build, "a new instance")):
        subject.decode(52, make=make)
        if not first.same(subject.decode(37, make=make)):
            raise Failed(f"a request gives something else after another request, with {what}")


def independent(subject: Subject) -> None:
    """Requests in any order, and one amid another."""
    requests = {"a": make_prompt(37), "b": make_prompt(52, seed=1), "c": make_prompt(37, seed=2)}
    alone = {name: subject.decode(prompt) for name, prompt in requests.items()}
    for order in ("abc", "cba"):
        reused = subject.reused()
        for name in order:
            if not alone[name].same(subject.decode(requests[name], make=reused)):
                raise Failed(f"a request gives something else in the order {order}")
    inner: list[bool] = []

    def interrupt(canvas: Canvas, step: Step) -> None:
        network, name = subject.network(), "bc"[len(inner) % 2]
        outer = network.counters
        inner.append(subject.decode(requests[name]).same(alone[name]))
        network.counters = outer

    outer = subject.decode(requests["a"], on_pass=interrupt)
    if not (outer.same(alone["a"]) and all(inner)):
        raise Failed("a request gives something else when others run between its passes")


def recovers(subject: Subject) -> None:
    """Starts clean after an error amid a request."""
    first, reused = subject.decode(37), subject.reused()

    for prompt, left in ((37, 12), (52, 6)):

        def stop(canvas: Canvas, step: Step, left: int = left) -> None:
            if len(canvas.masked) <= left:
                raise _Stop

        try:
            subject.decode(prompt, make=reused, on_pass=stop)
        except _Stop:
            pass
        else:
            raise Failed("the decode ended before it could be stopped")
        if not first.same(subject.decode(37, make=reused)):
            raise Failed("a request gives something else after one that was stopped by an error")


def lets_go(subject: Subject) -> None:
    """After end(): no bytes, and no tensor alive."""
    made: list[Method] = []

    def build() -> Method:
        made.append(subject.spec.build())
        return made[-1]

    subject.decode(37, make=build)  # constants that are made once (filters, say) may stay
    with surviving_tensors() as left:
        subject.decode(41, make=build)
    if left:
        raise Failed(f"{len(left)} tensors of the request are alive after its end, one of shape {tuple(left[0].shape)}")
    for method in made:
        held = _bytes_of(method)
        if held:
            raise Failed(f"bytes() says {held} after the end of the request")


def _bytes_of(method: Method) -> int:
    try:
        return sum(method.bytes().values())
    except AttributeError:  # what it would have measured is gone
        return 0


def bytes_measured(subject: Subject) -> None:
    """bytes() tells what is held between passes.

    All floating-point tensors that the method leads to, and no more than all tensors.
    """
    made: list[Method] = []
    weights = set(storage_sizes(held_tensors(subject.network().weights)))

    def build() -> Method:
        made.append(subject.spec.build())
        return made[-1]

    def compare(canvas: Canvas, step: Step) -> None:
        held = [t for t in held_tensors(made) if t.untyped_storage().data_ptr() not in weights]
        every = sum(storage_sizes(t for t in held if t is not canvas.ids).values())
        floats = sum(storage_sizes(t for t in held if t.is_floating_point()).values())
        told = sum(sum(method.bytes().values()) for method in made)
        if told < floats:
            raise Failed(f"bytes() says {told:,}, but floating-point tensors of {floats:,} bytes are held")
        if told > every:
            raise Failed(f"bytes() says {told:,}, but only {every:,} bytes of tensors are held")

    subject.decode(300, make=build, on_pass=compare)


def shared_untouched(subject: Subject) -> None:
    """State that requests share is read, never written.

    Requests with other questions to one text, the first one again at the end: each answers as with state of its own.
    """
    if not subject.spec.build().shares():
        raise Skipped("requests share no state")
    text, span = make_prompt(48), (0, 48)
    for model in ("plain", "shifted"):
        network = subject.network(model)
        shared = _shared(subject, network, [*text, *make_prompt(9)], span)
        before = shared.checksum()
        for seed in (1, 2, 1):
            prompt = [*text, *make_prompt(9, seed)]
            alone = subject.decode(prompt, network=network, span=span)
            sharing = subject.decode(prompt, network=network, span=span, shared=shared)
            if shared.checksum() != before:
                raise Failed("a request wrote the state that it shares with others")
            if not alone.same(sharing):
                raise Failed("a request gives something else with shared state than with state of its own")


def _shared(subject: Subject, network: MeteredNetwork, prompt: list[int], span: tuple[int, int]) -> Shared:
    settings = subject.settings(None, network.config.family)
    canvas = Canvas.make(prompt, settings, network.config, network.device)
    made = provide(subject.spec.build(), Request(network, canvas, canvas.ids, settings, span))[1]
    if made is None:
        raise Skipped("with these options requests share no state")
    return made


def plain_reports(subject: Subject) -> None:
    """Reports for the trace are plain data for JSON."""
    done = subject.decode(37)
    for number, one in enumerate(done.run.passes):
        try:
            json.dumps(one.method, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Failed(f"the report of pass {number} is no plain data: {error}") from error


CHECKS: list[Any] = [same_again, independent, recovers, lets_go, bytes_measured, shared_untouched, plain_reports]
