"""Training of the embedded model: it repeats itself, stops and goes on without loss, and refuses bad input."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_tiny
from tiny_data import Batches, Part
from tiny_export import FOLDER
from tiny_prompts import Maker
from tiny_stages import Stage
from tiny_text import load_words
from tiny_trainer import Trainer

from dllm_bench.errors import UserError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a tokenizer, and training of four small steps."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stage = Stage(4, (1e-3, 1e-3), (Part({"single_1": 1.0}, 224, 2),), (("single_1", 224),))
    monkeypatch.setattr(train_tiny, "STAGES", [stage])
    monkeypatch.setattr(train_tiny, "TOTAL", 4)
    monkeypatch.setattr(train_tiny, "FOLDER", tmp_path / "package")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    yield folder
    for number, handler in former.items():
        signal.signal(number, handler)


def command(*words: object) -> int:
    threads = torch.get_num_threads()
    return train_tiny.run(train_tiny.parser().parse_args(["--threads", str(threads), *map(str, words)]))


def test_training_is_deterministic_and_resumes(maker: Maker, tmp_path: Path) -> None:
    batches = Batches(maker, 0)

    def step(trainer: Trainer) -> None:
        trainer.net.grow_rope(4096 + 224)
        trainer.update(batches.make(trainer.step, Part({"single_1": 1.0}, 224, 2, stretch=0.5, span=4096)), 1e-3)

    straight, broken, resumed = (Trainer(0, "cpu") for _ in range(3))
    step(straight)
    step(straight)
    step(broken)
    broken.save(tmp_path / "last.pt")
    resumed.load(tmp_path / "last.pt")
    step(resumed)
    assert resumed.step == 2
    for name, p in straight.params.items():
        assert torch.equal(p, resumed.params[name])
        assert torch.equal(straight.average[name], resumed.average[name])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(
    number: signal.Signals, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = train_tiny.Progress.add

    def interrupted(progress: Any, *given: Any) -> None:
        signal.raise_signal(number)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == [signal.SIG_DFL] * 2
        add(progress, *given)

    monkeypatch.setattr(train_tiny, "held_out_accuracy", lambda *given, **named: (0.5, 0.75, 3.0))
    with monkeypatch.context() as patch:
        patch.setattr(train_tiny.Progress, "add", interrupted)
        assert command("--folder", small, "--show", 1, "--evaluate", 1) == 128 + number
    out = capsys.readouterr().out
    assert "steps 0 to 4 on cpu" in out and "step 1/4 loss" in out and "saved at step 1 of 4" in out
    assert "held out" not in out, "a stop does not wait for a measurement"
    assert command("--folder", small, "--evaluate", 4) == 0
    out = capsys.readouterr().out
    assert "steps 1 to 4" in out and "held out, exact/values: single_1@224 50%/75% (3.0" in out
    assert "saved at step 4 of 4" in out


def test_a_run_that_starts_from_another_tells_both(small: Path, tmp_path: Path) -> None:
    first, more, second = tmp_path / "first", tmp_path / "more", tmp_path / "second"
    assert command("--folder", small, "--steps", 2) == 0
    assert command("--folder", small, "--export", "--out", first, "--about", "one") == 0
    more.mkdir()
    (more / "tokenizer.json").write_text("left behind by another run", encoding="utf-8")
    assert command("--folder", more, "--start", first, "--steps", 1) == 0
    assert (more / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert command("--folder", more, "--start", first) == 0, "the same command goes on"
    assert command("--folder", more, "--export", "--out", second, "--about", "two") == 0
    told = json.loads((second / "training.json").read_text(encoding="utf-8"))
    assert [(run["from"], run["to"], run["about"]) for run in told["runs"]] == [(0, 2, "one"), (2, 4, "two")]
    assert {run["threads"] for run in told["runs"]} == {torch.get_num_threads()}
    with pytest.raises(UserError, match=r"was trained to step 4, and the last stage ends at 4: add a stage"):
        command("--folder", tmp_path / "new", "--start", second)
    with pytest.raises(UserError, match="was trained with seed 0: pass --seed 0"):
        command("--folder", tmp_path / "new", "--start", first, "--seed", 1)
    with pytest.raises(UserError, match="did not begin from"):
        command("--folder", more, "--start", second)
    for record in ("[]", '{"seed": 0, "runs": null}', '{"seed": 0, "runs": [{"to": "x"}]}', "{"):
        (second / "training.json").write_text(record, encoding="utf-8")
        with pytest.raises(UserError, match="does not tell at which step"):
            command("--folder", tmp_path / "new", "--start", second)
    (first / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError):
        command("--folder", tmp_path / "new", "--start", first)
    assert not (tmp_path / "new").exists()


def test_bad_input_is_one_line(small: Path, tmp_path: Path) -> None:
    untrained = Trainer(3, "cpu")
    untrained.save(small / "last.pt")
    untrained.step = 2
    (tmp_path / "half").mkdir()
    untrained.save(tmp_path / "half" / "last.pt")
    (tmp_path / "other").mkdir()
    torch.save([1, 2], tmp_path / "other" / "last.pt")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "last.pt").write_bytes((small / "last.pt").read_bytes()[:500])
    for words, told in (
        (("--device", "nope"), "cannot train on device 'nope': valid here: cpu"),
        (("--folder", small), "was trained with seed 3: pass --seed 3"),
        (("--folder", small, "--seed", 3, "--export"), "trained no step yet"),
        (
            ("--folder", tmp_path / "half", "--seed", 3, "--export", "--out", tmp_path / "package"),
            "training is at step 2 of 4: name another --out",
        ),
        (("--folder", small, "--start", FOLDER, "--export"), "--start is for training"),
        (("--folder", tmp_path / "other"), "is not a whole checkpoint"),
        (("--folder", tmp_path / "none", "--export"), "there is no checkpoint"),
        (("--folder", tmp_path / "broken"), "is not a whole checkpoint"),
        (("--folder", tmp_path / "new", "--start", tmp_path), "config.json is missing"),
    ):
        with pytest.raises(UserError, match=told):
            command(*words)
    (tmp_path / "broken" / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="is no tokenizer"):
        train_tiny.tokenizer_of(tmp_path / "broken", load_words(), 0)
    assert not (tmp_path / "new").exists() and not (tmp_path / "none").exists()


@pytest.mark.parametrize("words", [["--threads", "0"], ["--show", "x"], ["--words", "no/such/folder"], ["--bogus"]])
def test_the_command_ends_with_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--folder", str(tmp_path / "new"), *words])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(SystemExit) as ended:
        train_tiny.main()
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == "" and told.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
