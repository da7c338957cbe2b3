"""Checks of a part's options and texts, and of the promise under which it changes nothing."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from dllm_bench.caching.part import Exact
from dllm_bench.conformance.check import Failed, Skipped
from dllm_bench.conformance.decoding_checks import difference
from dllm_bench.conformance.subject import Decoded, Subject, decode, fixture_network, uncached
from dllm_bench.errors import UserError

__all__ = ["CHECKS"]


def described(subject: Subject) -> None:
    """Texts and option help are given.

    Name, paper, summary and cost are not empty, every option has a help text, and the options dataclass is frozen.
    """
    for (name, _), part in zip(subject.spec.parts, subject.parts, strict=True):
        if part.name != name:
            raise Failed(f"'{name}' is registered, but the class is named '{part.name}'")
        for text in ("paper", "summary", "cost"):
            if not getattr(part, text).strip():
                raise Failed(f"{name}: {text} is empty")
        for one in dataclasses.fields(part.options_class):
            if not one.metadata.get("help"):
                raise Failed(f"{name}: option {one.name} has no help text (use option(…))")
        if not part.options_class.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise Failed(f"{name}: the options dataclass is not frozen")


def options_refused(subject: Subject) -> None:
    """Values outside ranges and choices are refused.

    With a UserError, before anything is computed.
    """
    asked = 0
    for name, key, value in _each(subject, _outside):
        asked += 1
        try:
            subject.variant({f"{name}.{key}": value})
        except UserError:
            continue
        raise Failed(f"option {key}={value} is accepted, though out of range")
    if not asked:
        raise Skipped("no option has a range or choices")


def options_work(subject: Subject) -> None:
    """Bounds and choices decode, or are refused.

    Every choice, both bounds of every range, and extreme values where there is no bound.
    """
    asked = 0
    for name, key, value in _each(subject, _within):
        asked += 1
        try:
            spec = subject.variant({f"{name}.{key}": value})
            settings = subject.settings(spec)
            done = decode(subject.network(), 37, settings, spec.build)
        except UserError:
            continue
        except Failed as error:
            raise Failed(f"option {key}={value}: {error}") from error
        except Exception as error:
            text = " ".join(str(error).split())[:100]
            raise Failed(f"option {key}={value} is accepted, then raises {type(error).__name__}: {text}") from error
        if done.canvas.masked and spec.build().pass_limit(settings) is None:
            raise Failed(f"option {key}={value} leaves {len(done.canvas.masked)} positions masked")
    if not asked:
        raise Skipped("there are no options")


def _each(subject: Subject, values: Any) -> Iterator[tuple[str, str, Any]]:
    for (name, _), part in zip(subject.spec.parts, subject.parts, strict=True):
        hints = typing.get_type_hints(part.options_class)
        for one in dataclasses.fields(part.options_class):
            for kind in _kinds(hints[one.name]):
                for value in values(kind, one.metadata):
                    yield name, one.name, value


def _kinds(hint: Any) -> list[Any]:
    """The scalar types that a hint is made of."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if get_origin(hint) is tuple:
        return _kinds(get_args(hint)[0])
    return [hint]


def _outside(kind: Any, meta: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return ["no_such_choice"]
    if kind not in (int, float):
        return []
    step, found = kind(1), []
    if meta.get("low") is not None:
        found.append(kind(meta["low"]) - step)
    if meta.get("above") is not None:
        found += [kind(meta["above"]), kind(meta["above"]) - step]
    if meta.get("high") is not None:
        found.append(kind(meta["high"]) + step)
    return found


def _within(kind: Any, meta: Any) -> list[Any]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind is bool:
        return [False, True]
    if kind not in (int, float):
        return []
    low, above, high = (meta.get(bound) for bound in ("low", "above", "high"))
    if low is not None:
        found = [low]
    elif above is not None:
        found = [above + 1 if kind is int else above + 1e-6]
    else:
        found = [-1, 0]
    return [kind(value) for value in (*found, 1000 if high is None else high)]


def exact(subject: Subject) -> None:
    """Equals the uncached decode where promised.

    Under the options and decode settings of `exact_with`: the same candidates, logits and commits, pass by pass.
    """
    promise = _promise(subject)
    spec, refused = subject.variant(promise.options), 0
    for model, scale in (("plain", 0.0), ("gqa", 0.0), ("shifted", 0.0), ("plain", 1.0)):
        network = subject.network(model, "float64")
        try:
            settings = subject.settings(spec, network.config.family, **{**promise.decode, "cfg_scale": scale})
        except UserError:  # a method may do without guidance, or ask for it
            refused += 1
            continue
        found = decode(network, 37, settings, spec.build)
        plain = decode(fixture_network(model, "float64"), 37, settings, uncached)
        _compare(found, plain, f"on the {model} model" + (" with guidance" if scale else ""))
    if refused == 4:
        raise Failed("the decode settings of exact_with are refused")


def _compare(found: Decoded, plain: Decoded, where: str) -> None:
    for number, (a, b) in enumerate(zip(found.steps, plain.steps, strict=False)):
        if a.positions != b.positions:
            missing = sorted(set(b.positions) - set(a.positions))
            raise Failed(f"pass {number} gives no logits for {missing[:4]}, the uncached one does, {where}")
        off = difference(a.logits, b.logits)
        if off > 1e-4 or a.committed != b.committed:
            raise Failed(f"logits of pass {number} are off by {off:.1%} of the largest one {where}")
    if len(found.steps) != len(plain.steps):
        raise Failed(f"{len(found.steps)} passes, uncached {len(plain.steps)}, {where}")


def _promise(subject: Subject) -> Exact:
    """What all parts promise together. Raises Skipped where one promises nothing."""
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for (name, _), part in zip(subject.spec.parts, subject.parts, strict=True):
        promise: Exact | None = part.exact_with
        if promise is None:
            raise Skipped(f"{name} makes no such promise")
        options |= {f"{name}.{key}": value for key, value in promise.options.items()}
        settings |= promise.decode
    return Exact(options, settings)


CHECKS: list[Any] = [described, options_refused, options_work, exact]
