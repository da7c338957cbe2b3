"""Names to classes: built-in ones by import path, third-party ones by entry point, imported when asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from dllm_bench.errors import UserError, choice

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """A lazy table of classes of one kind.

    Args:
        kind: word for messages ("method", "task", "model").
        group: entry-point group in which third parties register theirs.
        base: import path `module:attribute` of the class that every entry must inherit from.
        builtin: name -> import path `module:attribute`.
    """

    def __init__(self, kind: str, group: str, base: str, builtin: Mapping[str, str]) -> None:
        self.kind, self.group = kind, group
        self._base = base
        self._paths = dict(builtin)
        self._classes: dict[str, type[T]] = {}
        self._scanned = False

    def _scan(self) -> None:
        if not self._scanned:
            for point in importlib.metadata.entry_points(group=self.group):
                self._paths.setdefault(point.name, point.value)
            self._scanned = True

    def names(self) -> list[str]:
        """All names, built-in first, in order of registration."""
        self._scan()
        return list(self._paths)

    def register(self, name: str, cls: type[T]) -> None:
        """Adds a class from Python (entry points do it for installed packages)."""
        self._scan()
        if name in self._paths or name in self._classes:
            raise UserError(f"{self.kind} '{name}' is registered already")
        self._classes[name] = self._checked(name, cls)
        self._paths[name] = f"{cls.__module__}:{cls.__qualname__}"

    def get(self, name: str) -> type[T]:
        """The class of `name`. Raises ChoiceError (names the nearest valid one) or UserError (it does not load)."""
        if name in self._classes:
            return self._classes[name]
        if name not in self._paths:
            self._scan()
        if name not in self._paths:
            raise choice(self.kind, name, self._paths)
        self._classes[name] = self._checked(name, self._load(name))
        return self._classes[name]

    def _load(self, name: str) -> Any:
        path = self._paths[name]
        module, _, attribute = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except Exception as error:  # a plug-in's module may raise anything while it is imported
            raise UserError(f"{self.kind} '{name}' does not load from {path}: {error}") from error
        return found

    def _checked(self, name: str, cls: Any) -> type[T]:
        module, _, attribute = self._base.partition(":")
        base = getattr(importlib.import_module(module), attribute)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise UserError(f"{self.kind} '{name}' must be a subclass of {attribute}, got {cls!r}")
        return cls
