"""What every part of a method spec has: a name, its paper, its cost, its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dllm_bench.options import Options
from dllm_bench.registry import Registry

__all__ = ["METHODS", "Exact", "Part"]


@dataclass(frozen=True)
class Exact:
    """A promise: with these options and decode settings (for instance one pass per block), decoding equals the uncached
    one with the same decode settings. Conformance holds a part to it."""

    options: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)


class Part:
    """Base of refresh methods and of memories.

    A variant with other defaults is a subclass with a name and an options class of its own.

    Attributes:
        name: as in specs. paper: where it is described, and the code it follows. summary: one line.
        cost: what it computes and holds. notes: where paper and public code differ, and which the default follows.
        exact_with: when it changes nothing; None: it makes no such promise.
        check_with: options with which it does its work on the short prompts of conformance too (a smallest length that
            would turn it off, set to 0).
        caveat: what must stand beside its name wherever it is shown; empty for most.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    notes: ClassVar[str] = ""
    caveat: ClassVar[str] = ""
    options_class: ClassVar[type[Options]] = Options
    exact_with: ClassVar[Exact | None] = None
    check_with: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: Options | None = None) -> None:
        self.options = options if options is not None else self.options_class()


METHODS: Registry[Part] = Registry(
    "method",
    "dllm_bench.methods",
    "dllm_bench.caching.part:Part",
    {
        "baseline": "dllm_bench.methods.baseline:Baseline",
        "fast_dllm": "dllm_bench.methods.fast_dllm:FastDllm",
        "dllm_cache": "dllm_bench.methods.dllm_cache:DllmCache",
        "elastic_cache": "dllm_bench.methods.elastic_cache:ElasticCache",
        "acache": "dllm_bench.methods.acache:ACache",
        "wavefilter": "dllm_bench.methods.wavefilter:WaveFilter",
        "wavefilter_tuned": "dllm_bench.methods.wavefilter:WaveFilterTuned",
        "depthweave_kv": "dllm_bench.methods.depthweave_kv:DepthWeaveKv",
        "depthweave_tuned": "dllm_bench.methods.depthweave_kv:DepthWeaveTuned",
        "dkv_cache": "dllm_bench.methods.dkv_cache:DkvCache",
        "sparse_dllm": "dllm_bench.methods.sparse_dllm:SparseDllm",
    },
)
