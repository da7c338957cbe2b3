"""`dllm-bench show-prompt` shows what a run gives to the model, without loading the model."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes import ToyTask
from test_prepare import write_text_model
from typer.testing import CliRunner, Result

from dllm_bench.commands.run import run
from dllm_bench.commands.show_prompt import abbreviated, show_prompt
from dllm_bench.errors import UserError
from dllm_bench.models.hub import load_info, load_model
from dllm_bench.running.store import Store
from dllm_bench.running.task import TASKS, Sample

ROOT = Path(__file__).parent.parent
NIAH = ("--task", "ruler_niah", "--ctx", "512")


class FreeTask(ToyTask):
    """Takes any context length, and remembers which."""

    name = "free_task"
    ctx = "optional"

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        ids = tuple(self.codec.wrap(f"up to {ctx}, \x1b[31mred\x1b[0m"))
        return Sample(self.name, subset, index, seed, ids, ("egg",), gen_length, None, ("\n", "Q:"))


TASKS.register("free_task", FreeTask)


def call(command: Any, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def shown(*arguments: str) -> str:
    result = call(show_prompt, *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def told(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(*arguments, "--json"))
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("--subset", "multikey_1", "--seed", "5"),
        ("--subset", "single_1", "--gen-length", "64"),
        ("--chat-template", "plain", "--task-set", "questions=2", "--subset", "multikey_2"),
    ],
)
def test_the_facts_are_those_of_a_run(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = call(run, "--method", "baseline", "--samples", "2", "--out", str(tmp_path), *NIAH, *arguments)
    assert done.exit_code == 0, done.output
    rows = {row["index"]: row for row in Store(tmp_path).read()}
    for index in (0, 1):
        facts, row = told(*NIAH, *arguments, "--index", str(index)), rows[index]
        del facts["prompt"], facts["model_revision"], facts["spans"], facts["until"], facts["choices"]
        for name in ("task_options", "sample_meta"):
            assert facts.pop(name) == json.loads(row[name])
        assert facts == {name: row[name] for name in facts}


def test_the_text_is_the_prompt_with_its_special_tokens() -> None:
    codec, facts = load_info("tiny").codec, told(*NIAH, "--ids")
    assert codec.encode(facts["prompt"]) == facts["prompt_ids"]
    assert facts["prompt"].startswith("<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n")
    assert len(facts["prompt_ids"]) == facts["prompt_tokens"] == facts["actual_ctx"] - facts["gen_length"]
    [[start, stop]] = facts["spans"]["question"]
    assert codec.decode(facts["prompt_ids"][start:stop]).startswith("What is the special magic number for ")
    assert facts["gen_length"] == 48, "the embedded model's card names a smaller budget than the task"
    assert json.loads(shown(*NIAH, "--ids")) == facts["prompt_ids"]
    text = shown(*NIAH)
    assert text.endswith(f"--- prompt ---\n{facts['prompt']}\n")
    for fact in ("prompt_hash", "codec", "prompt_tokens", "actual_ctx"):
        assert str(facts[fact]) in text.partition("--- prompt ---")[0]
    assert f"question {start}:{stop}" in text and facts["references"][0] in text


def test_ids_go_on_to_generate() -> None:
    python, ids = [sys.executable, "-m", "dllm_bench"], shown(*NIAH, "--ids")
    command = [*python, "generate", "--method", "baseline", "--prompt-ids", "-", "--json"]
    done = subprocess.run(command, input=ids, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and told(*NIAH)["references"][0] in json.loads(done.stdout)["text"], done.stderr


def test_a_task_without_a_length_gets_the_models_positions(tmp_path: Path) -> None:
    assert told("--task", "free_task")["prompt"].count("up to 32768,") == 1
    assert "up to 99," in told("--task", "free_task", "--ctx", "99")["prompt"]
    facts = told("--task", "free_task", "--model", str(write_text_model(tmp_path)))
    assert "up to 64," in facts["prompt"] and facts["gen_length"] == 64 and facts["beyond_max_positions"]
    assert 'until       ["\\n", "Q:"]' in shown("--task", "free_task")


def test_the_weights_are_not_read(tmp_path: Path) -> None:
    folder = write_text_model(tmp_path)
    identity = load_model(str(folder)).codec.identity()
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert told("--task", "free_task", "--model", str(folder))["codec"] == identity
    script = f"""
import sys
from dllm_bench.cli import main
sys.argv = ["dllm-bench", "show-prompt", *{NIAH!r}]
main()
print(sorted(set(sys.modules) & {{"torch", "transformers", "datasets", "numpy", "pyarrow"}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.endswith("\n[]\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*NIAH, "--index", "-1"), "index must be at least 0 (nearest valid: 0), got -1"),
        ((*NIAH, "--seed", "-1"), "seed must be at least 0"),
        ((*NIAH, "--subset", "all"), "a prompt has one subset, not 8: nearest valid is single_1"),
        (("--task", "ruler_niah", "--ctx", "512,1k"), "a prompt has one context length, not 2: nearest valid is 512"),
        (("--task", "ruler_niah"), "needs a context length, such as --ctx 2k"),
        (("--task", "ruler_niah", "--ctx", "0"), "context length '0' has no room for a prompt: nearest valid is 256"),
        ((*NIAH, "--gen-length", "0"), "gen_length' must be at least 1 (nearest valid: 1), got 0"),
        ((*NIAH, "--gen-length", "600"), "a generation budget of 600: the minimum is"),
        (
            ("--task", "toy_task", "--subset", "multi", "--ctx", "512", "--index", "3"),
            "nearest valid index is 2, got 3",
        ),
        (("--task", "ruler_naih", "--ctx", "512"), "did you mean 'ruler_niah'"),
        ((*NIAH, "--chat-template", "lada"), "did you mean 'llada'"),
        ((*NIAH, "--task-set", "question=2"), "did you mean 'questions'"),
        ((*NIAH, "--haystack", "REDME.md"), "haystack 'REDME.md' does not exist"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = call(show_prompt, *arguments)
    assert isinstance(result.exception, UserError) and message in str(result.exception), result.output
    assert result.stdout == "" and "\n" not in str(result.exception)


def on_a_terminal(*arguments: str) -> str:
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dllm_bench", "show-prompt", *arguments]
    with subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL, cwd=ROOT) as process:
        os.close(theirs)
        told = b""
        while chunk := _read(ours):
            told += chunk
    os.close(ours)
    assert process.returncode == 0
    return told.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side is closed
        return b""


def test_only_a_terminal_gets_less_than_the_whole() -> None:
    long = ("--task", "ruler_niah", "--ctx", "4k")
    whole = shown(*long)
    brief = on_a_terminal(*long)
    prompt = whole.partition("--- prompt ---\n")[2]
    left_out = len(prompt) - 1 - 3000
    head, note, tail = brief.partition(f"\n[… {left_out:,} characters left out here; --full shows them …]\n")
    assert note and whole.startswith(head) and whole.endswith(tail)
    assert len(whole) - len(head) - len(tail) == left_out
    assert on_a_terminal(*long, "--full") == whole


def test_abbreviated() -> None:
    assert abbreviated("abcdef", 6) == "abcdef" and abbreviated("", 6) == ""
    assert abbreviated("abcdefghi", 5).split("\n") == [
        "abc",
        "[… 4 characters left out here; --full shows them …]",
        "hi",
    ]
