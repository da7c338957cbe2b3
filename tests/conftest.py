"""Settings and fixtures of the whole suite."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

# read when the hub's client is imported: no test may touch a network
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
import torch
from lm_eval_files import write_model, write_tasks
from tiny_export import FOLDER
from tiny_prompts import Maker
from tiny_text import load_words
from tokenizers import Tokenizer

from dllm_bench import cli
from dllm_bench.decoding import streams

# the networks of the tests are tiny: a second thread only waits for the first
torch.set_num_threads(1)

Called = tuple[int, str, str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Called]:
    """Runs the command line in this process: exit code, stdout, stderr."""

    def run(*args: str, stdin: str | bytes = b"", reader: type[io.TextIOWrapper] = io.TextIOWrapper) -> Called:
        given = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["dllm-bench", *args])
        monkeypatch.setattr(sys, "stdin", reader(io.BytesIO(given), encoding="utf-8"))
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def bytes_by_pass(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Filled, while a test decodes, with the bytes held after each pass."""
    found: list[dict[str, int]] = []
    original = streams.Streams.bytes

    def watched(self: streams.Streams) -> dict[str, int]:
        found.append(original(self))
        return found[-1]

    monkeypatch.setattr(streams.Streams, "bytes", watched)
    return found


@pytest.fixture(scope="session")
def lm_eval_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of lm-eval task files with local data: see lm_eval_files.py."""
    return write_tasks(tmp_path_factory.mktemp("lm_eval_tasks"))


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaDA network with a token per byte."""
    return write_model(tmp_path_factory.mktemp("byte_model"))


@pytest.fixture(scope="session")
def maker() -> Maker:
    """What draws the training samples of the embedded model."""
    return Maker(Tokenizer.from_file(str(FOLDER / "tokenizer.json")), load_words())
