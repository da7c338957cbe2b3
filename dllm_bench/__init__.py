"""dllm-bench: an honest benchmark for long-context caching methods of diffusion language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dllm_bench.api import Generation, generate, load_model, loglikelihood, prepare
    from dllm_bench.errors import UserError

__version__ = "0.1.0"
__all__ = ["Generation", "UserError", "__version__", "generate", "load_model", "loglikelihood", "prepare"]

_HOMES = {
    "Generation": "dllm_bench.api",
    "generate": "dllm_bench.api",
    "load_model": "dllm_bench.api",
    "loglikelihood": "dllm_bench.api",
    "prepare": "dllm_bench.api",
    "UserError": "dllm_bench.errors",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: `import dllm_bench` alone stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dllm_bench' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
