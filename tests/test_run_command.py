"""`dllm-bench run` from the command line: exit codes, progress, table, Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from fakes import EOS, ToyGenerate, ToyModel
from typer.testing import CliRunner, Result

import dllm_bench
from dllm_bench.commands.run import run
from dllm_bench.errors import UserError
from dllm_bench.running.store import Store

TESTS = Path(__file__).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def call(
    monkeypatch: pytest.MonkeyPatch, folder: Path, generate: ToyGenerate, *arguments: str, model: Any = None
) -> Result:
    loads: list[dict[str, Any]] = []

    def load(**given: Any) -> Any:
        loads.append(given)
        return model or ToyModel(name=given["spec"])

    monkeypatch.setattr(dllm_bench, "load_model", load, raising=False)
    monkeypatch.setattr(dllm_bench, "generate", generate, raising=False)
    app = typer.Typer()
    app.command()(run)
    base = ["--task", "toy_task", "--out", str(folder), "--model", "toy"]
    result = CliRunner().invoke(app, [*base, *arguments])
    result.loads = loads  # type: ignore[attr-defined]
    return result


def test_a_grid_ends_with_a_table(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    arguments = ["--method", "baseline", "--method", "fast_dllm", "--ctx", "256,512", "--samples", "3"]
    result = call(monkeypatch, folder, ToyGenerate(), *arguments)
    assert result.exit_code == 0, result.output
    assert "[4/4] fast_dllm · toy_task/single · 512: 3 samples, 100.0 % 12.0 tok/s" in result.stderr
    assert "decoded with gen_length 64, block_length 32, threshold 0.9" in result.stdout
    assert len(Store(folder)) == 12 and len(Store(folder).files()) == 1
    again = call(monkeypatch, folder, generate := ToyGenerate(), *arguments)
    assert again.exit_code == 0 and generate.calls == []
    assert "nothing to do, 3 kept" in again.stderr and again.stdout == result.stdout


def test_the_table_holds_only_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    call(monkeypatch, folder, ToyGenerate(), "--method", "baseline,fast_dllm", "--ctx", "256", "--samples", "2")
    result = call(monkeypatch, folder, ToyGenerate(), "--method", "baseline", "--ctx", "256", "--samples", "1")
    assert "fast_dllm" not in result.stdout and "baseline" in result.stdout


def test_flags_reach_the_settings(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    arguments = ["--method", "fast_dllm", "--ctx", "256", "--samples", "1", "--set", "mode=prefix", "--task-set"]
    arguments += ["word=ham", "--gen-length", "64", "--block-length", "16", "--steps", "8", "--temperature", "0.5"]
    arguments += ["--no-eos-stop", "--seed", "5", "--dtype", "float64", "--device", "cpu"]
    result = call(monkeypatch, folder, ToyGenerate(), *arguments)
    assert result.exit_code == 0, result.output
    (row,) = Store(folder).read()
    for part in ('"steps": 8', '"block_length": 16', '"temperature": 0.5', '"eos_stop": false', '"threshold": null'):
        assert part in row["decode_settings"]
    assert '"mode": "prefix"' in row["method_options"] and '"word": "ham"' in row["task_options"]
    assert (row["seed"], row["references"], row["score"]) == (5, ["ham"], 0.0)
    (load,) = result.loads  # type: ignore[attr-defined]
    assert (load["spec"], load["dtype"], load["device"], load["chat_template"]) == ("toy", "float64", "cpu", "auto")


def test_failed_samples_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def answer(index: int) -> None:
        if index:
            raise torch.OutOfMemoryError("no room") if index == 1 else ValueError("bad shape")

    arguments = ["--method", "baseline", "--ctx", "256", "--samples", "3"]
    result = call(monkeypatch, folder, ToyGenerate(answer), *arguments)
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("2 of 3 samples failed: 1 out of memory, 1 by an error (ValueError: bad shape)")
    assert call(monkeypatch, folder, ToyGenerate(), *arguments).exit_code == 0


def test_masks_left_are_loud(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    arguments = ["--method", "baseline", "--ctx", "256", "--samples", "1"]
    result = call(monkeypatch, folder, ToyGenerate(masks_left=1), *arguments)
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1] == "1 of 1 samples failed: 1 with masks left (scored 0)"
    again = call(monkeypatch, folder, ToyGenerate(), *arguments)
    assert again.exit_code == 1, "the stored answer still has masks"


def test_ctrl_c_keeps_the_rows(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def answer(index: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    arguments = ["--method", "baseline", "--ctx", "256", "--samples", "4"]
    result = call(monkeypatch, folder, ToyGenerate(answer), *arguments)
    assert result.exit_code == 130
    assert "stopped: 2 rows are kept in" in result.stderr and "the same command" in result.stderr
    call(monkeypatch, folder, generate := ToyGenerate(), *arguments)
    assert generate.calls == [2, 3] and len(Store(folder)) == 4


def test_a_finite_task_gives_what_it_has(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    arguments = ["--method", "baseline", "--ctx", "256", "--samples", "9", "--subset", "multi"]
    result = call(monkeypatch, folder, ToyGenerate(lambda i: [EOS] * 128), *arguments)
    assert result.exit_code == 0 and "fewer samples than the 9 asked for: toy_task/multi has 3" in result.stderr
    assert len(Store(folder)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "baseline", "--ctx", "2kk"], "nearest valid is 2k"),
        (["--method", "baseline"], "needs a context length"),
        (["--method", "fast_dlm", "--ctx", "2k"], "did you mean 'fast_dllm'"),
        (["--method", "fast_dllm", "--ctx", "2k", "--set", "moed=dual"], "did you mean 'mode'"),
        (["--method", "baseline", "--ctx", "2k", "--gen-length", "60", "--block-length", "32"], "nearest valid"),
        (["--method", "baseline", "--ctx", "64"], "nearest valid is 128"),
        # the first sample of every cell is made before anything runs
        (["--method", "baseline", "--ctx", "256,64"], "nearest valid is 128"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: list[str], message: str
) -> None:
    result = call(monkeypatch, folder, ToyGenerate(), *arguments)
    assert isinstance(result.exception, UserError) and message in str(result.exception)
    assert "\n" not in str(result.exception) and not folder.exists()


def test_commands_import_nothing_heavy() -> None:
    heavy = ["torch", "pandas", "pyarrow", "matplotlib", "numpy", "transformers", "datasets", "lm_eval", "scipy"]
    code = f"""
import sys
import dllm_bench.commands.run, dllm_bench.commands.leaderboard, dllm_bench.commands.plot
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS.parent, check=True)
    assert done.stdout.strip() == "[]"


def test_runner_and_store_work_without_optional_parts(tmp_path: Path) -> None:
    code = f"""
import sys
for name in ("lm_eval", "datasets", "pywt", "scipy", "transformers", "matplotlib"):
    sys.modules[name] = None
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from fakes import ToyGenerate
from test_runner import run
rows = run(Path({str(tmp_path)!r}), ToyGenerate())
from dllm_bench.reporting.leaderboard import leaderboard
from dllm_bench.reporting.tables import to_markdown
assert len(rows) == 4 and to_markdown(leaderboard(rows))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS.parent, check=False)
    assert done.returncode == 0, done.stderr


def test_haystack_is_an_option_of_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dllm_bench import cli

    out = tmp_path / "runs"
    arguments = ["run", "--method", "baseline", "--task", "ruler_niah", "--ctx", "512", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["dllm-bench", *arguments, "--haystack", str(tmp_path / "gone.txt")])
        cli.main()
    assert stop.value.code == 2 and "gone.txt' does not exist" in capsys.readouterr().err
    assert not out.exists()
