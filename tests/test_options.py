"""Options: parsing, ranges, and errors that name what is valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from dllm_bench.errors import ChoiceError, UserError, choice, nearest
from dllm_bench.options import Options, describe, make_options, option


@dataclass(frozen=True)
class Some(Options):
    count: int = option(3, "how many", low=1, high=9)
    ratio: float = option(0.5, "a share", above=0, high=1)
    mode: Literal["dual", "prefix"] = option("dual", "which")
    level: Literal[1, 2] = option(1, "a number of choice")
    flag: bool = option(False, "a switch")
    name: str = option("x", "any text")
    maybe: float | None = option(None, "may be missing", low=0)
    either: int | Literal["auto"] = option("auto", "a number or auto", low=2)
    word: Literal["auto"] | tuple[int, ...] = option("auto", "a word or a list", low=0)
    shares: tuple[float, ...] = option((0.4, 0.6), "several", low=0, high=1)

    def check(self) -> None:
        if self.flag and self.mode == "prefix":
            raise UserError("flag needs dual")


def made(**values: Any) -> Some:
    return make_options(Some, values, owner="some")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("count", "7", 7),
        ("count", 7.0, 7),
        ("count", " 7 ", 7),
        ("ratio", "1e-3", 0.001),
        ("ratio", 1, 1.0),
        ("mode", "PREFIX", "prefix"),
        ("level", "2", 2),
        ("flag", "on", True),
        ("flag", "False", False),
        ("flag", "1", True),
        ("flag", 0, False),
        ("name", 5, "5"),
        ("maybe", "none", None),
        ("maybe", None, None),
        ("maybe", "0", 0.0),
        ("either", "auto", "auto"),
        ("either", "4", 4),
        ("shares", "[0.1, 0.2]", (0.1, 0.2)),
        ("shares", "0.1,0.2", (0.1, 0.2)),
        ("shares", 0.3, (0.3,)),
        ("shares", [0, 1], (0.0, 1.0)),
    ],
)
def test_values(key: str, value: Any, wanted: Any) -> None:
    found = getattr(made(**{key: value}), key)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("count", 0, "at least 1 (nearest valid: 1), got 0"),
        ("count", 10, "at most 9 (nearest valid: 9), got 10"),
        ("count", 2.5, "a whole number (nearest valid: 2), got '2.5'"),
        ("count", "2.5", "a whole number"),
        ("count", "1e1", "a whole number"),
        ("count", "", "a whole number"),
        ("count", True, "a whole number"),
        ("count", float("inf"), "a whole number"),
        ("count", float("nan"), "a whole number"),
        ("count", 10**400, "at most 9"),
        ("count", "9" * 5000, "a whole number"),
        ("ratio", 0, "above 0, got 0.0"),
        ("ratio", "nan", "finite"),
        ("ratio", "-inf", "finite"),
        ("ratio", float("nan"), "finite"),
        ("ratio", 10**400, "a number"),
        ("ratio", "half", "a number (nearest valid: 0.5), got 'half'"),
        ("ratio", None, "a number"),
        ("ratio", True, "a number"),
        ("mode", "duel", "did you mean 'dual'? valid: dual, prefix"),
        ("level", 3, "valid: 1, 2"),
        ("flag", "tru", "nearest: true"),
        ("flag", 2, "true or false"),
        ("maybe", -1, "at least 0"),
        ("either", 1, "at least 2"),
        ("either", "atuo", "did you mean 'auto'"),
        ("shares", "[0.1, 2]", "at most 1"),
        ("word", "atuo", "did you mean 'auto'? valid: auto, list of int"),
        ("word", "[1,", "a list such as [3,17], got"),
        ("shares", "[0.1", "a list such as [0.4,0.4]"),
        ("shares", "[0.1, x]", "a list such as"),
        ("shares", "[true]", "a number"),
    ],
)
def test_errors(key: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as error:
        made(**{key: value})
    assert said in str(error.value) and "some option" in str(error.value) and f"'{key}'" in str(error.value)


def test_large_whole_numbers_keep_every_digit() -> None:
    @dataclass(frozen=True)
    class Seeded(Options):
        seed: int = option(0, "any")

    for value in (2**53 + 1, 2**63 - 1, 10**400):
        assert make_options(Seeded, {"seed": value}, owner="x").seed == value
    assert make_options(Seeded, {"seed": str(2**53 + 1)}, owner="x").seed == 2**53 + 1


def test_unknown_options_and_combinations() -> None:
    with pytest.raises(ChoiceError, match="unknown option of some 'cuont': did you mean 'count'"):
        made(cuont=3)
    with pytest.raises(UserError, match="has no options, so 'count' cannot be set"):
        make_options(Options, {"count": 1}, owner="nothing")
    with pytest.raises(UserError, match="flag needs dual"):
        made(flag=True, mode="prefix")
    with pytest.raises(TypeError):
        option([1], "a mutable default")


def test_describe_and_as_dict() -> None:
    kinds = {name: kind for name, kind, _, _ in describe(Some)}
    assert kinds["mode"] == "dual|prefix" and kinds["maybe"] == "float|none" and kinds["shares"] == "list of float"
    assert kinds["either"] == "int|auto" and kinds["flag"] == "bool"
    assert made(count=4).as_dict() == {**Some().as_dict(), "count": 4}
    assert hash(made()) == hash(Some()), "frozen: an option set can be a key"


def test_nearest_and_one_line() -> None:
    assert nearest("FAST_DLM", ["fast_dllm", "baseline"]) == "fast_dllm"
    assert nearest("zzz", ["fast_dllm"]) is None and nearest("", []) is None
    assert str(choice("thing", "a\nb", [])) == "unknown thing 'a b': valid: none"
