"""What every part of a method spec has: a name, its paper, its cost, its options."""

from __future__ import annotations

from typing import ClassVar

from dllm_bench.options import Options
from dllm_bench.registry import Registry

__all__ = ["METHODS", "Part"]


class Part:
    """Base of refresh methods and of memories.

    A variant with other defaults is a subclass with a name and an options class of its own.

    Attributes:
        name: as in specs. paper: where it is described, and the code it follows. summary: one line.
        cost: what it computes and holds. notes: where paper and public code differ, and which the default follows.
        caveat: what must stand beside its name wherever it is shown; empty for most.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    notes: ClassVar[str] = ""
    caveat: ClassVar[str] = ""
    options_class: ClassVar[type[Options]] = Options

    def __init__(self, options: Options | None = None) -> None:
        self.options = options if options is not None else self.options_class()


METHODS: Registry[Part] = Registry(
    "method",
    "dllm_bench.methods",
    "dllm_bench.caching.part:Part",
    {
        "baseline": "dllm_bench.methods.baseline:Baseline",
        "depthweave_kv": "dllm_bench.methods.depthweave_kv:DepthWeaveKv",
        "depthweave_tuned": "dllm_bench.methods.depthweave_kv:DepthWeaveTuned",
        "fast_dllm": "dllm_bench.methods.fast_dllm:FastDllm",
    },
)
