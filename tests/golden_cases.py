"""Golden fixtures made by the official codes, as parameters of tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from dllm_bench import load_model
from dllm_bench.models.hub import Model

GOLDEN = Path(__file__).parent / "golden"


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / name / "cases.json").read_text())["cases"]
    return found


@cache
def model(name: str, dtype: str = "float32") -> Model:
    return load_model(str(GOLDEN / name), dtype=dtype, device="cpu")


def cases_meta(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / name / "cases.json").read_text())["meta"]
    return found
