"""Makes the state that requests share, with a clock and counters of its own, and hands it to a request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dllm_bench.caching.method import Method
from dllm_bench.caching.request import Request
from dllm_bench.caching.shared import Shared
from dllm_bench.decoding.clock import Clock
from dllm_bench.errors import UserError
from dllm_bench.lazy import LazyModule
from dllm_bench.models.counters import Counters

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

__all__ = ["provide"]


def provide(method: Method, request: Request) -> tuple[Request, Shared | None]:
    """The request with its resolved span and the shared state for it, and that state again where it was made here.

    Raises UserError when the state that the request brought does not fit.
    """
    span = method.shared_span(request)
    if span is None:
        if request.shared is not None:
            raise UserError(f"method '{method.name}' reads no shared state in this request: leave it out")
        return replace(request, span=None), None
    if request.shared is not None:
        request.shared.check(method.name, request.network, request.ids[0, slice(*span)].tolist())
        return replace(request, span=span), None
    made = _make(method, request, span)
    return replace(request, span=span, shared=made), made


def _make(method: Method, request: Request, span: tuple[int, int]) -> Shared:
    network, ids = request.network, request.ids[:, slice(*span)]
    counters, clock, others = Counters(), Clock(network.device), network.counters
    network.grow_rope(request.length)
    network.counters = counters
    try:
        with torch.inference_mode():
            clock.begin()
            tensors = method.prepare(network, ids)
            clock.end()
    finally:
        network.counters = others
    return Shared(method.name, network, tuple(ids[0].tolist()), tensors, counters, clock.total)
