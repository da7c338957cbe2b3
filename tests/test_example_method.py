"""The example of a third-party method: installed into a folder of its own, offline, and used from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dllm_bench.conformance.runner import CHECKS

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "my_method"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the example into; built from a copy, since a build writes beside its source."""
    base = tmp_path_factory.mktemp("third_party")
    shutil.copytree(EXAMPLE, base / "source")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(base / "site"), str(base / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return base / "site"


# all command lines in one process: each would import torch anew
DRIVER = """
import contextlib, io, json, sys
from dllm_bench.cli import main
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, code, out, err = ["dllm-bench", *arguments], 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    told.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""
COMMANDS = {
    "list": ["list", "methods"],
    "show": ["show", "periodic"],
    "check": ["check", "periodic", "--set", "every=3", "--json"],
    "refused": ["run", "--method", "periodic", "--set", "every=0", "--task", "ruler_niah", "--ctx", "512"],
    "run": ["run", "--method", "periodic", "--task", "ruler_niah", "--ctx", "512", "--samples", "1", "--out"],
    "generate": [
        *("generate", "--model", str(ROOT / "tests" / "golden" / "llada_fastdllm"), "--method", "periodic"),
        *("--set", "every=3", "--gen-length", "16", "--block-length", "8", "--tokens-per-pass", "1"),
        *("--no-eos-stop", "--device", "cpu", "--json", "--trace", "--prompt-ids"),
    ],
}


def call(*commands: list[str], site: Path | None = None) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command line."""
    paths = os.pathsep.join(str(p) for p in (site, ROOT) if p)
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, "-c", DRIVER, json.dumps(commands)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def told(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What each command says where the example is installed."""
    folder = tmp_path_factory.mktemp("told")
    prompt = folder / "ids.json"
    prompt.write_text(json.dumps([3, 4, 5, 6, 7, 8, 9]))
    ends = {"generate": str(prompt), "run": str(folder / "runs")}
    lines = {name: [*line, *([ends[name]] if name in ends else [])] for name, line in COMMANDS.items()}
    return dict(zip(lines, call(*lines.values(), site=installed), strict=True))


def test_it_is_listed_and_shown(told: dict[str, tuple[int, str, str]]) -> None:
    code, out, _ = told["list"]
    assert code == 0 and any(line.startswith("periodic ") for line in out.splitlines())
    code, out, _ = told["show"]
    assert code == 0 and "passes of a block from one dense pass to the next" in " ".join(out.split())


def test_it_is_nowhere_else() -> None:
    ((code, _, err),) = call(["show", "periodic"])
    assert code == 2 and "unknown name 'periodic'" in err


def test_it_conforms(told: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = told["check"]
    assert code == 0, out + err
    found = json.loads(out)
    assert found["options"] == {"every": 3}
    assert [c["name"] for c in found["checks"] if c["status"] != "pass"] == ["shared_untouched"], "it shares nothing"


def test_it_runs(told: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = told["run"]
    assert code == 0 and "periodic" in out, err
    code, _, err = told["refused"]
    assert code == 2 and "every' must be at least 1" in err, "its options are checked before a model is loaded"
    code, out, err = told["generate"]
    assert code == 0, err
    found = json.loads(out)
    assert [p["rows"] for p in found["passes"]] == [23, 8, 8, 23, 8, 8, 23, 8] * 2
    assert (found["nfe"], found["dense_passes"], found["masks_left"]) == (16, 6, 0)


def test_the_guide_shows_the_example_as_it_is() -> None:
    guide = (ROOT / "docs" / "writing_a_method.md").read_text()
    for name in ("my_method.py", "pyproject.toml"):
        assert f"\n{(EXAMPLE / name).read_text()}```" in guide, f"{name} differs from docs/writing_a_method.md"
    table = [line.split() for line in guide.splitlines() if "pass  " in line or "skip  " in line]
    assert [line[0] for line in table] == [c.name for c in CHECKS] and f"\n{len(CHECKS)} checks on random" in guide
    told = {line[0]: " ".join(line[2:]) for line in table if line[1] == "pass"}
    assert told == {c.name: c.what for c in CHECKS if c.name != "shared_untouched"}
    assert len((EXAMPLE / "my_method.py").read_text().splitlines()) <= 40
