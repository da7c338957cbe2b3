"""Method specs: `fast_dllm`, `wavefilter`, `elastic_cache+wavefilter`, and the options set on their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dllm_bench.caching.memory import Memory
from dllm_bench.caching.method import Method
from dllm_bench.caching.part import METHODS, Part
from dllm_bench.errors import UserError, choice
from dllm_bench.options import Options, make_options

__all__ = ["MethodSpec", "parse_method", "split_sets"]


@dataclass(frozen=True)
class MethodSpec:
    """A method with all its options, checked, not yet built.

    Attributes:
        parts: (part name, its options): the refresh method, then the memories from the bottom up.
    """

    parts: tuple[tuple[str, Options], ...]

    @property
    def name(self) -> str:
        """Canonical name: the parts joined with "+"."""
        return "+".join(name for name, _ in self.parts)

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its value; qualified by the part's name when there are several parts."""
        return {self._key(part, key): v for part, options in self.parts for key, v in options.as_dict().items()}

    @property
    def label(self) -> str:
        """Name with the options that differ from their defaults and the caveats of its parts, for captions."""
        changed = []
        for part, options in self.parts:
            standard = type(options)().as_dict()
            for key, value in options.as_dict().items():
                if value != standard[key]:
                    changed.append(f"{self._key(part, key)}={_shown(value)}")
        caveats = [f" [{c}]" for c in dict.fromkeys(METHODS.get(part).caveat for part, _ in self.parts) if c]
        return self.name + (f"({','.join(changed)})" if changed else "") + "".join(caveats)

    def _key(self, part: str, key: str) -> str:
        return f"{part}.{key}" if len(self.parts) > 1 else key

    def build(self) -> Method:
        """A fresh instance, without state."""
        (name, options), *above = self.parts
        cls = METHODS.get(name)
        assert issubclass(cls, Method)
        memory: Memory | None = cls.bottom_memory()
        for upper, its_options in above:
            upper_class = METHODS.get(upper)
            assert issubclass(upper_class, Memory)
            memory = upper_class(its_options, memory)
        return cls(options, memory)


def parse_method(text: str, sets: Sequence[str] | Mapping[str, Any] = ()) -> MethodSpec:
    """A spec from a method name and options (`key=value` strings, or a mapping).

    Raises UserError naming the nearest valid method, option or value, or the reason why parts do not fit together.
    """
    text = str(text)  # a call from Python may hold anything
    names = _stack(text)
    classes = [METHODS.get(name) for name in names]
    _check_stack(text, names, classes)
    values = dict(sets) if isinstance(sets, Mapping) else split_sets(sets)
    shared = _assign(text, names, classes, values)
    owners = [f"method '{name}'" for name in names]
    parts = zip(names, classes, owners, strict=True)
    return MethodSpec(tuple((n, make_options(c.options_class, shared[n], owner=o)) for n, c, o in parts))


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


def _stack(text: str) -> list[str]:
    """Part names, the refresh method first: a memory named alone stands on its own base."""
    names = text.split("+")
    first, *others = [METHODS.get(name) for name in names]
    if not issubclass(first, Memory):
        return names
    methods = [name for name, cls in zip(names[1:], others, strict=True) if not issubclass(cls, Memory)]
    if methods:
        near = "+".join([methods[0], *(name for name in names if name != methods[0])])
        raise UserError(f"method '{text}': '{methods[0]}' is a refresh method, and that comes first: {near}")
    return [first.base, *names]


def _check_stack(text: str, names: list[str], classes: list[type[Part]]) -> None:
    """Refuses what does not fit together, with the reason."""
    method, *above = classes
    if len(set(names)) < len(names):
        raise UserError(f"method '{text}' names a part twice")
    for name, cls in zip(names[1:], above, strict=True):
        if not issubclass(cls, Memory):
            raise UserError(
                f"method '{text}': '{name}' is a refresh method, and '{names[0]}' is one too: "
                "a spec has one refresh method, then memories"
            )
        if not getattr(method, "keeps_cache", True):
            raise UserError(
                f"method '{text}': '{names[0]}' does not keep the keys and values of all positions, "
                f"so '{name}' has nothing to work on"
            )
        if getattr(method, "renews_values", False) and not cls.takes_values:
            raise UserError(
                f"method '{text}': '{names[0]}' renews values without their keys, which '{name}' does not take"
            )
    for i, cls in enumerate(above):
        assert issubclass(cls, Memory)
        cls.check_stack(method, tuple(above[:i]))
        if i and not getattr(above[i - 1], "carries", True):
            raise UserError(f"method '{text}': '{names[i]}' serves no memory above it: put '{names[i + 1]}' below it")


def _assign(
    text: str, names: list[str], classes: list[type[Part]], values: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Sorts options to parts: `part.key`, or a bare key that only one part has."""
    known = {n: {f.name for f in fields(c.options_class)} for n, c in zip(names, classes, strict=True)}
    shared: dict[str, dict[str, Any]] = {n: {} for n in names}
    for key, value in values.items():
        part, _, bare = key.rpartition(".")
        owners = [n for n in names if bare in known[n] and part in ("", n)]
        if len(owners) > 1:
            raise UserError(
                f"option '{bare}' is ambiguous in '{text}': write {' or '.join(f'{n}.{bare}' for n in owners)}"
            )
        if not owners:
            raise _stray(text, names, known, part, bare)
        if bare in shared[owners[0]]:
            raise UserError(f"option '{bare}' is set twice")
        shared[owners[0]][bare] = value
    return shared


def _stray(text: str, names: list[str], known: Mapping[str, set[str]], part: str, bare: str) -> UserError:
    """The error for an option that no part has."""
    mine = sorted({key for n in names for key in known[n]})
    valid = f"its options: {', '.join(mine)}" if mine else "it has no options"
    others = _owners(bare, (n for n in METHODS.names() if n not in names))
    if part and part not in names and (part not in others or any(bare in known[n] for n in names)):
        return choice("part of method", part, names)
    if others:
        return UserError(f"option '{bare}' belongs to method '{others[0]}', not to '{text}' ({valid})")
    if not mine:
        return UserError(f"method '{text}' has no options, so '{bare}' cannot be set")
    return choice(f"option of method '{text}':", bare, mine)


def _owners(option: str, names: Iterable[str]) -> list[str]:
    found = []
    for name in names:
        try:
            if option in {f.name for f in fields(METHODS.get(name).options_class)}:
                found.append(name)
        except UserError:  # a third-party method that does not load must not spoil the message
            continue
    return found


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ",".join(map(_shown, value)) + "]" if isinstance(value, tuple) else str(value)
