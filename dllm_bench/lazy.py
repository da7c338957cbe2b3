"""Heavy modules that are imported when they are first used, so that `--help` and error paths stay quick."""

from __future__ import annotations

import importlib
import types
from typing import Any

__all__ = ["LazyModule"]


class LazyModule(types.ModuleType):
    """Stands for a module and imports it at the first attribute access.

    Use it beside a real import for the type checker::

        if TYPE_CHECKING:
            import torch
        else:
            torch = LazyModule("torch")
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        self.__dict__[name] = value
        return value
