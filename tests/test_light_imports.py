"""What each command imports: help, lists and mistakes nothing heavy; generate only what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from golden_cases import GOLDEN

ROOT = Path(__file__).parent.parent
LLADA = str(GOLDEN / "llada_fastdllm")
HEAVY = (
    "torch",
    "transformers",
    "lm_eval",
    "datasets",
    "matplotlib",
    "pandas",
    "pywt",
    "numpy",
    "pyarrow",
    "jieba",
    "rouge",
)
OPTIONAL = ("lm_eval", "datasets", "pywt", "pandas", "matplotlib", "pyarrow", "transformers")

# runs several command lines one after another and says after each what is loaded
REPORT = """
import contextlib, io, json, sys
from dllm_bench.cli import main
for args in json.loads(sys.stdin.read()):
    sys.argv, code, err = ["dllm-bench", *args], 0, io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
    print(json.dumps([code, len(err.getvalue().splitlines()), sorted(set(sys.modules) & set({heavy!r}))]))
"""
BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Refuse())
from dllm_bench.cli import main
sys.argv = ["dllm-bench", *sys.argv[1:]]
main()
"""


def python(script: str, *args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, timeout=120)


COMMANDS: list[tuple[list[str], int]] = [
    (["--help"], 0),
    (["--version"], 0),
    (["generate", "--help"], 0),
    (["fidelity", "--help"], 0),
    (["fidelity", "--method", "fast_dlm"], 2),
    (["fidelity", "--method", "fast_dllm", "--plot", "drift.pgn"], 2),
    (["list", "methods"], 0),
    (["list", "models"], 0),
    (["show", "fast_dllm"], 0),
    (["show", "fast_dlm"], 2),
    (["prepare", "--task", "ruler_niah"], 0),
    (["prepare", "--task", "ruler_naih"], 2),
    (["show-prompt", "--task", "ruler_niah", "--ctx", "512"], 0),
    (["show-prompt", "--task", "ruler_niah", "--ctx", "64"], 2),
    (["show", "gsm8k"], 0),
    (["score", "--task", "gsm9k", "--predictions", "x"], 2),
    (["score", "--task", "gsm8k", "--predictions", "no-such-file.jsonl"], 2),
    (["rescore", "no-such-folder"], 2),
    (["show", "longbench"], 0),
    (["generate", "--gen-lenght", "3"], 2),
    (["generate", "--gen-length", "three"], 2),
    (["generate", "--method", "fast_dlm", "--prompt", "x"], 2),
    (["generate", "--gen-length", "9", "--block-length", "2", "--prompt", "x"], 2),
    (["generate", "--dtype", "float23", "--prompt", "x"], 2),
    (["generate", "--device", "gpu", "--prompt", "x"], 2),
    (["generate", "--model", "lada-8b-base", "--prompt", "x"], 2),
    (["generate", "--prompt-ids", "no-such-file.json"], 2),
]


def test_nothing_heavy() -> None:
    done = python(REPORT.format(heavy=HEAVY), stdin=json.dumps([args for args, _ in COMMANDS]))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(COMMANDS), done.stderr
    for (args, code), (given, lines, loaded) in zip(COMMANDS, found, strict=True):
        assert (given, lines, loaded) == (code, 1 if code else 0, []), args


def test_import_is_light() -> None:
    done = python(f"import sys, dllm_bench; print(*set(sys.modules) & set({HEAVY!r}))")
    assert (done.returncode, done.stdout.strip()) == (0, "")


def test_generate_without_the_optional_packages() -> None:
    args = ("generate", "--model", LLADA, "--prompt-ids", "-", "--gen-length", "4")
    done = python(BLOCKED.format(blocked=OPTIONAL), *args, stdin="[1, 2, 3]")
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.split(",")) == 4


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "dllm_bench", "--version"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("dllm-bench ") and done.stderr == ""
