"""Frozen option dataclasses of methods and tasks: parsing, checking, describing."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from dllm_bench.errors import UserError, choice, nearest, nearest_number

__all__ = ["Options", "describe", "make_options", "option"]

O = TypeVar("O", bound="Options")  # noqa: E741


@dataclass(frozen=True)
class Options:
    """Base of all option sets. Fields are scalars, Literals or lists of them; `check` refuses bad combinations."""

    def check(self) -> None:
        """Raises UserError for a value out of range, naming the nearest valid one."""

    def as_dict(self) -> dict[str, Any]:
        """Every option with its value, for the row and its key."""
        return dataclasses.asdict(self)


def option(
    default: Any, help: str, *, low: float | None = None, high: float | None = None, above: float | None = None
) -> Any:
    """A dataclass field with its help text and its range: `low` and `high` are inclusive, `above` is exclusive."""
    meta = {"help": help, "low": low, "high": high, "above": above}
    if isinstance(default, list | dict):
        raise TypeError("an option's default must be immutable: use a tuple")
    return dataclasses.field(default=default, metadata=meta)


def make_options(cls: type[O], values: Mapping[str, Any], *, owner: str) -> O:
    """Builds and checks options from strings (`--set key=value`) or Python values.

    Raises UserError with the nearest valid option or value.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            if not fields:
                raise UserError(f"{owner} has no options, so '{key}' cannot be set")
            raise choice(f"option of {owner}", key, fields)
        parsed[key] = _convert(value, hints[key], f"{owner} option '{key}'", fields[key])
        _in_range(parsed[key], fields[key].metadata, f"{owner} option '{key}'")
    made = cls(**parsed)
    made.check()
    return made


def describe(cls: type[Options]) -> list[tuple[str, str, Any, str]]:
    """(name, type, default, help) of each option."""
    hints = typing.get_type_hints(cls)
    return [(f.name, _type_name(hints[f.name]), f.default, f.metadata.get("help", "")) for f in dataclasses.fields(cls)]


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(str(a) for a in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return "|".join(_type_name(a) for a in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_type_name(get_args(hint)[0])}"
    return "none" if hint is type(None) else hint.__name__


def _convert(value: Any, hint: Any, what: str, field: dataclasses.Field[Any]) -> Any:
    origin = get_origin(hint)
    if origin is Literal:
        return _literal(value, get_args(hint), what)
    if origin in (Union, types.UnionType):
        return _union(value, get_args(hint), what, field)
    if origin is tuple:
        return _list(value, get_args(hint)[0], what, field)
    if hint is bool:
        return _boolean(value, what)
    if hint is str:
        return str(value)
    return _number(value, hint, what, field)


def _literal(value: Any, allowed: tuple[Any, ...], what: str) -> Any:
    for one in allowed:
        if value == one or str(value).lower() == str(one).lower():
            return one
    raise choice(f"value for {what}:", str(value), [str(a) for a in allowed])


def _union(value: Any, kinds: tuple[Any, ...], what: str, field: dataclasses.Field[Any]) -> Any:
    if type(None) in kinds and (value is None or str(value).lower() in ("none", "null")):
        return None
    last: UserError | None = None
    for kind in (k for k in kinds if k is not type(None)):
        try:
            return _convert(value, kind, what, field)
        except UserError as error:
            last = error
    if str(value).isalpha() and any(get_origin(kind) is Literal for kind in kinds):
        raise choice(f"value for {what}:", str(value), [name for kind in kinds for name in _type_name(kind).split("|")])
    assert last is not None, "a union without members"
    raise last


def _list(value: Any, kind: Any, what: str, field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value if value.lstrip().startswith("[") else f"[{value}]")
        except json.JSONDecodeError:
            example = "[3,17]" if kind is int else "[0.4,0.4]"
            raise UserError(f"{what} must be a list such as {example}, got '{value}'") from None
    if not isinstance(value, list | tuple):
        value = [value]
    return tuple(_convert(v, kind, what, field) for v in value)


def _boolean(value: Any, what: str) -> bool:
    if isinstance(value, bool):
        return value
    known: dict[str, bool] = {"true": True, "false": False, "on": True, "off": False, "yes": True, "no": False}
    text = str(value).lower()
    if text in known:
        return known[text]
    if text in ("1", "0"):
        return text == "1"
    raise UserError(f"{what} must be true or false (nearest: {nearest(text, known) or 'true'}), got '{value}'")


def _number(value: Any, kind: Callable[[Any], Any], what: str, field: dataclasses.Field[Any]) -> Any:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = kind(value)
        if isinstance(value, float) and value != number and value == value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        name = "a whole number" if kind is int else "a number"
        raise UserError(f"{what} must be {name}{number_hint(str(value), field)}, got '{value}'") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise UserError(f"{what} must be finite, got '{value}'")
    return number


def number_hint(text: str, field: dataclasses.Field[Any]) -> str:
    """The valid number nearest to a text that is none, in brackets; empty where that cannot be told."""
    low, high, above = (field.metadata.get(name) for name in ("low", "high", "above"))
    usual: Any = field.default if type(field.default) in (int, float) else None
    whole = type(usual) is int or "int" in str(field.type)
    near = nearest_number(text, whole=whole, low=low, high=high, otherwise=usual)
    return f" (nearest valid: {near:g})" if above is None or near > above else ""


def _in_range(value: Any, meta: Mapping[str, Any], what: str) -> None:
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, bool) or not isinstance(one, int | float):
            continue
        low, high, above = meta.get("low"), meta.get("high"), meta.get("above")
        if low is not None and one < low:
            raise UserError(f"{what} must be at least {low} (nearest valid: {low}), got {one}")
        if above is not None and one <= above:
            raise UserError(f"{what} must be above {above}, got {one}")
        if high is not None and one > high:
            raise UserError(f"{what} must be at most {high} (nearest valid: {high}), got {one}")
