"""Method specs: `fast_dllm`, `fast_dllm+wavefilter`, and the options set on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dllm_bench.caching.method import METHODS, Method
from dllm_bench.errors import UserError
from dllm_bench.options import Options, make_options

__all__ = ["MethodSpec", "parse_method", "split_sets"]


@dataclass(frozen=True)
class MethodSpec:
    """A method with all its options, checked, not yet built.

    Attributes:
        name: canonical name.
        parts: (part name, its options), the refresh method first.
    """

    name: str
    parts: tuple[tuple[str, Options], ...]

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its value; qualified by the part's name when there are several parts."""
        several = len(self.parts) > 1
        return {
            (f"{part}.{key}" if several else key): value
            for part, options in self.parts
            for key, value in options.as_dict().items()
        }

    @property
    def label(self) -> str:
        """Name with the options that differ from their defaults, for captions."""
        changed = []
        for part, options in self.parts:
            standard = type(options)().as_dict()
            for key, value in options.as_dict().items():
                if value != standard[key]:
                    shown = str(value).lower() if isinstance(value, bool) else value
                    changed.append(f"{part}.{key}={shown}" if len(self.parts) > 1 else f"{key}={shown}")
        return f"{self.name}({','.join(changed)})" if changed else self.name

    def build(self) -> Method:
        """A fresh instance, without state."""
        part, options = self.parts[0]
        return METHODS.get(part)(options)


def parse_method(text: str, sets: Sequence[str] | Mapping[str, Any] = ()) -> MethodSpec:
    """A spec from a method name and options (`key=value` strings, or a mapping).

    Raises UserError naming the nearest valid method, option or value.
    """
    if "+" in text:
        stacked = text.split("+")
        for part in stacked:
            METHODS.get(part)
        raise UserError(
            f"method '{text}': '{stacked[1]}' is a refresh method of its own and cannot stand behind '{stacked[0]}'"
        )
    cls = METHODS.get(text)
    values = split_sets(sets) if not isinstance(sets, Mapping) else dict(sets)
    prefix = f"{text}."
    for key in values:
        if key.startswith(prefix) and key.removeprefix(prefix) in values:
            raise UserError(f"option '{key.removeprefix(prefix)}' is set twice")
    values = {key.removeprefix(prefix): value for key, value in values.items()}
    _own(text, cls, values)
    options = make_options(cls.options_class, values, owner=f"method '{text}'")
    return MethodSpec(text, ((text, options),))


def _own(name: str, cls: type[Method], values: Mapping[str, Any]) -> None:
    """Refuses an option that belongs to another method, and says to which."""
    mine = {f.name for f in fields(cls.options_class)}
    for key in values:
        bare = key.rpartition(".")[2]
        if key in mine:
            continue
        owners = [n for n in METHODS.names() if n != name and _has(n, bare)]
        if owners:
            valid = f"its options: {', '.join(sorted(mine))}" if mine else "it has no options"
            raise UserError(f"option '{bare}' belongs to method '{owners[0]}', not to '{name}' ({valid})")


def _has(name: str, option: str) -> bool:
    try:
        return option in {f.name for f in fields(METHODS.get(name).options_class)}
    except UserError:  # a third-party method that does not load must not spoil the message
        return False


def split_sets(sets: Sequence[str]) -> dict[str, str]:
    """`key=value` strings to a dict. Raises UserError for a string without '=' or a key set twice."""
    values: dict[str, str] = {}
    for one in sets:
        key, equals, value = one.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set needs key=value, got '{one}'")
        if key.strip() in values:
            raise UserError(f"option '{key.strip()}' is set twice")
        values[key.strip()] = value.strip()
    return values
