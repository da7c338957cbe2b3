"""No cache: every pass computes every row."""

from __future__ import annotations

from dllm_bench.caching.memory import Memory, PassMemory
from dllm_bench.caching.method import Method
from dllm_bench.caching.part import Exact

__all__ = ["Baseline"]


class Baseline(Method):
    """The uncached denoising loop of LLaDA and Dream, the reference of every speed-up."""

    name = "baseline"
    paper = "LLaDA, arXiv 2502.09992 (generate.py); Dream, arXiv 2508.15487 (diffusion_generate)"
    summary = "no cache: a dense pass for every step"
    cost = "N rows x all layers per pass; holds nothing between passes"

    keeps_cache = False
    uncached = True
    exact_with = Exact()

    @classmethod
    def bottom_memory(cls) -> Memory:
        return PassMemory()
