"""`dllm-bench prepare` fetches once and checks; afterwards nothing needs a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from fakes import ToyTask
from offline import BLOCKED_SCRIPT, block_network
from test_text import LLADA_SPECIALS, byte_level
from tiny_checkpoints import llada_config, write
from typer.testing import CliRunner, Result

from dllm_bench.commands.prepare import prepare
from dllm_bench.errors import UserError
from dllm_bench.models.hub import load_info, load_model
from dllm_bench.running.task import TASKS

ROOT = Path(__file__).parent.parent
REVISION = "0123456789abcdef0123456789abcdef01234567"


class FetchedTask(ToyTask):
    """Data for "single" comes from afar, "multi" is made by rule."""

    name = "fetched_task"
    fetched: ClassVar[list[str]] = []

    def fetch(self, subset: str) -> list[str]:
        self.fetched.append(subset)
        return ["owner/data: 12 bytes, SHA-256 abc…"] if subset == "single" else []


class LostTask(ToyTask):
    name = "lost_task"

    def fetch(self, subset: str) -> list[str]:
        raise UserError("the data of lost_task is not to be had: give --task-set data=DIR, or go online once")


for task in (FetchedTask, LostTask):
    TASKS.register(task.name, task)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_text_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty hub cache, and no network."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    block_network(monkeypatch)
    yield folder


def write_text_model(folder: Path) -> Path:
    tokenizer = byte_level(LLADA_SPECIALS)
    size = 256 + len(LLADA_SPECIALS)
    mask, eos = (tokenizer.token_to_id(t) for t in ("<|mdm_mask|>", "<|endoftext|>"))
    write(folder, llada_config(vocab_size=size, embedding_size=size, mask_token_id=mask, eos_token_id=eos))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def put_in_cache(cache: Path, checkpoint: Path, *, weights: bool) -> Path:
    """A snapshot as the hub's client keeps it."""
    place = cache / "models--owner--name"
    snapshot = place / "snapshots" / REVISION
    shutil.copytree(checkpoint, snapshot, ignore=None if weights else shutil.ignore_patterns("*.safetensors"))
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(REVISION)
    return snapshot


def call(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(prepare)
    return CliRunner().invoke(app, list(arguments))


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.exception
    return result.stdout.splitlines()


def refused(result: Result) -> str:
    assert isinstance(result.exception, UserError) and result.stdout == "", result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_each_source_is_a_line() -> None:
    FetchedTask.fetched.clear()
    assert lines(call("--task", "fetched_task", "--subset", "all")) == [
        "model tiny: part of the package, nothing to fetch",
        "task fetched_task/single:",
        "  owner/data: 12 bytes, SHA-256 abc…",
        "task fetched_task: nothing to fetch for multi (3 samples)",
        "ready: runs need no network",
    ]
    assert FetchedTask.fetched == ["single", "multi"]
    assert "task fetched_task: nothing to fetch for multi (3 samples)" in lines(call("--task", "fetched_task:multi"))


def test_a_folder_is_listed_with_sizes_and_hashes(checkpoint: Path) -> None:
    import hashlib

    told = lines(call("--model", str(checkpoint)))
    assert told[0] == f"model {checkpoint}: a folder here, nothing to fetch"
    file = checkpoint / "tokenizer.json"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert f"  tokenizer.json: {file.stat().st_size / 1000:.1f} kB, SHA-256 {digest}…, {file}" in told
    [weights] = [line for line in told if "weights" in line]
    assert load_model(str(checkpoint)).fingerprint in weights and told[-1] == "ready: runs need no network"
    (checkpoint / "model.safetensors").unlink()
    assert "run needs the weights" in lines(call("--model", str(checkpoint)))[-1]
    assert "model.safetensors is missing" in refused(call("--model", str(checkpoint), "--weights"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to prepare: --task"),
        (["--subset", "single"], "belong to a task"),
        (["--haystack", "x.txt"], "belong to a task"),
        (["--task", "fetched_tusk"], "did you mean 'fetched_task'"),
        (["--task", "fetched_task", "--subset", "singel"], "did you mean 'single'"),
        (["--task", "fetched_task", "--task-set", "wrd=x"], "did you mean 'word'"),
        (["--task", "fetched_task", "--model", "llada-9b"], "did you mean 'llada-1.5'"),
        (["--task", "fetched_task", "--revision", "x"], "tiny is embedded"),
        (["--task", "lost_task"], "give --task-set data=DIR, or go online once"),
    ],
)
def test_what_cannot_be_had_is_one_line(arguments: list[str], message: str) -> None:
    assert message in refused(call(*arguments))


def test_a_hub_model_without_a_network_is_one_line_at_once(cache: Path) -> None:
    said = refused(call("--model", "llada-8b-instruct", "--weights"))
    assert "cannot get GSAI-ML/LLaDA-8B-Instruct from the hub" in said and "local folder" in said
    assert "'dllm-bench prepare --model llada-8b-instruct --weights'" in said
    said = refused(call("--model", "owner/name", "--revision", REVISION))
    assert f"'dllm-bench prepare --model owner/name --revision {REVISION}'" in said


def test_a_snapshot_without_weights_makes_prompts_and_says_what_it_lacks(cache: Path, checkpoint: Path) -> None:
    snapshot = put_in_cache(cache, checkpoint, weights=False)
    told = lines(call("--model", "owner/name"))
    assert told[0] == f"model owner/name: owner/name, revision {REVISION}"
    assert told[-1] == "ready: show-prompt needs no network; run needs the weights of owner/name too (add --weights)"
    assert load_info("owner/name").folder == snapshot
    with pytest.raises(UserError, match=r"cannot get owner/name .* prepare --model owner/name --weights"):
        load_model("owner/name")


def test_a_whole_snapshot_needs_no_network(cache: Path, checkpoint: Path) -> None:
    put_in_cache(cache, checkpoint, weights=True)
    assert lines(call("--model", "owner/name", "--weights"))[-1] == "ready: runs need no network"
    model, info = load_model("owner/name"), load_info(str(checkpoint))
    assert model.source == "owner/name" and model.codec.identity() == info.codec.identity()
    assert model.fingerprint == load_model(str(checkpoint)).fingerprint


@pytest.mark.parametrize("weights", [False, True])
def test_what_is_not_there_is_fetched_once(
    weights: bool, cache: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[dict[str, Any]] = []
    real = huggingface_hub.snapshot_download

    def download(source: str, **given: Any) -> str:
        if given.get("local_files_only"):
            return real(source, **given)
        asked.append(given)
        return str(put_in_cache(cache, checkpoint, weights="*.safetensors" in given["allow_patterns"]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: OnlineApi())
    arguments = ["--model", "owner/name", *(["--weights"] if weights else [])]
    first = lines(call(*arguments))
    assert lines(call(*arguments)) == first and len(asked) == 1
    assert ("*.safetensors" in asked[0]["allow_patterns"]) == weights == (first[-1] == "ready: runs need no network")


class OnlineApi:
    """Answers that everything is there."""

    def model_info(self, *_: Any, **__: Any) -> None:
        pass


def test_a_prepared_machine_runs_with_the_network_off(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", BLOCKED_SCRIPT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)

    task = ("--task", "ruler_niah", "--subset", "single_2", "--haystack", "README.md")
    done = run("prepare", *task)
    assert (done.returncode, done.stderr) == (0, "") and "file:README.md" in done.stdout
    shown = run("show-prompt", *task, "--ctx", "512", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    ran = run("run", "--method", "baseline", *task, "--ctx", "512", "--samples", "1", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    from dllm_bench.running.store import Store

    [row] = Store(tmp_path).read()
    told = json.loads(shown.stdout)
    same = (
        "prompt_hash",
        "prompt_tokens",
        "actual_ctx",
        "nominal_ctx",
        "gen_length",
        "codec",
        "references",
        "task_data",
    )
    assert {name: told[name] for name in same} == {name: row[name] for name in same}
