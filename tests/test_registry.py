"""Registries: entry points, base classes, and plug-ins that do not load."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from dllm_bench import UserError
from dllm_bench.caching.method import Method
from dllm_bench.caching.part import METHODS
from dllm_bench.caching.spec import parse_method, split_sets
from dllm_bench.errors import ChoiceError
from dllm_bench.methods.baseline import Baseline
from dllm_bench.registry import Registry

GROUP = "dllm_bench.methods"
BUILTIN = {
    "baseline": "dllm_bench.methods.baseline:Baseline",
    "fast_dllm": "dllm_bench.methods.fast_dllm:FastDllm",
}


class Foreign(Baseline):
    name = "foreign"

    class Inner(Baseline):
        name = "inner"


POINTS = {
    "foreign": f"{__name__}:Foreign",
    "inner": f"{__name__}:Foreign.Inner",
    "gone": "no_such_module_at_all:Thing",
    "empty": f"{__name__}:NoSuchClass",
    "wrong": "dllm_bench.options:Options",
    "thing": f"{__name__}:BUILTIN",
    "module": f"{__name__}",
    "raises": "raising_plugin:Thing",
    "baseline": f"{__name__}:Foreign",
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[Method]:
    def found(*, group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in POINTS.items()] if group == GROUP else []

    class Raising(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("broken at import")

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    monkeypatch.setitem(sys.modules, "raising_plugin", Raising("raising_plugin"))
    return Registry("method", GROUP, "dllm_bench.caching.method:Method", BUILTIN)


def test_entry_points(registry: Registry[Method]) -> None:
    assert registry.names()[:2] == ["baseline", "fast_dllm"] and set(registry.names()) == set(POINTS) | set(BUILTIN)
    assert registry.get("foreign") is Foreign and registry.get("inner") is Foreign.Inner
    assert registry.get("baseline") is Baseline, "a plug-in cannot take a built-in name"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone", "method 'gone' does not load from no_such_module_at_all:Thing"),
        ("empty", "NoSuchClass"),
        ("module", "does not load"),
        ("raises", "broken at import"),
        ("wrong", "must be a subclass of Method"),
        ("thing", "must be a subclass of Method"),
    ],
)
def test_plug_ins_that_do_not_load(name: str, said: str, registry: Registry[Method]) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=said):
            registry.get(name)


def test_did_you_mean(registry: Registry[Method]) -> None:
    with pytest.raises(ChoiceError, match="unknown method 'fast_dlm': did you mean 'fast_dllm'"):
        registry.get("fast_dlm")
    with pytest.raises(ChoiceError, match="did you mean 'foreign'"):
        registry.get("foriegn")


def test_register_from_python(registry: Registry[Method]) -> None:
    registry.register("mine", Foreign)
    assert registry.get("mine") is Foreign and "mine" in registry.names()
    for taken in ("mine", "baseline", "gone"):
        with pytest.raises(UserError, match="registered already"):
            registry.register(taken, Foreign)
    with pytest.raises(UserError, match="subclass"):
        registry.register("refused", dict)  # type: ignore[arg-type]
    assert "refused" not in registry.names(), "a refused class leaves no trace"


def test_a_broken_plug_in_spoils_no_other_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS._paths, "gone", "no_such_module_at_all:Thing")
    assert parse_method("fast_dllm", ["mode=prefix"]).options["mode"] == "prefix"
    with pytest.raises(UserError, match="belongs to method 'fast_dllm', not to 'baseline'"):
        parse_method("baseline", ["mode=prefix"])
    with pytest.raises(UserError, match="'nothing' cannot be set"):
        parse_method("baseline", ["nothing=1"])


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("window", "write elastic_cache.window or depthweave_kv.window"),
        ("elastic_cash.window", "unknown part of method 'elastic_cash': did you mean 'elastic_cache'"),
        ("depthweave_tuned.window", "unknown part of method 'depthweave_tuned': did you mean 'depthweave_kv'"),
        ("fast_dllm.mode", "belongs to method 'fast_dllm'"),
        ("depthweave_kv.gamma", "did you mean"),
    ],
)
def test_options_of_a_stack(key: str, said: str) -> None:
    text = "elastic_cache+depthweave_kv"
    assert parse_method(text, ["depthweave_kv.window=2", "gamma=0.5"]).options["depthweave_kv.window"] == 2
    with pytest.raises(UserError) as error:
        parse_method(text, [f"{key}=3"])
    assert said in str(error.value)


def test_specs() -> None:
    spec = parse_method("fast_dllm", ["fast_dllm.mode=prefix"])
    assert spec.label == "fast_dllm(mode=prefix)" and spec.name == "fast_dllm"
    assert parse_method("fast_dllm").label == "fast_dllm"
    with pytest.raises(UserError, match="'mode' is set twice"):
        parse_method("fast_dllm", ["fast_dllm.mode=prefix", "mode=dual"])
    assert parse_method("fast_dllm", {"step_cap": True}).label == "fast_dllm(step_cap=true)"
    assert spec.build() is not spec.build() and type(spec.build()).__name__ == "FastDllm"
    for text in ("baseline+fast_dllm", "fast_dllm+baseline"):
        with pytest.raises(UserError, match="one refresh method, then memories"):
            parse_method(text)
    with pytest.raises(UserError, match=r"a refresh method, and that comes first: elastic_cache\+wavefilter"):
        parse_method("wavefilter+elastic_cache")
    for text in ("", "+", "fast_dllm+", "Fast_dllm", "fast_dllm+nothing"):
        with pytest.raises(ChoiceError, match="unknown method"):
            parse_method(text)


@pytest.mark.parametrize("bad", [["mode"], ["=x"], [" =x"], [""], ["mode=a", "mode=b"]])
def test_bad_sets(bad: list[str]) -> None:
    with pytest.raises(UserError):
        split_sets(bad)
    assert split_sets(["a = b=c "]) == {"a": "b=c"}
