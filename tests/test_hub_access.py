"""Data sets of the hub come from the local cache, and without a network a missing one fails at once."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from offline import block_network

from dllm_bench.hub_access import hub_rows, quiet

datasets = pytest.importorskip("datasets")
REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    block_network(monkeypatch)
    return tmp_path / "cache"


def put(cache: Path, config: str, rows: list[dict[str, str]]) -> None:
    """Rows of owner/some_data as `datasets` keeps them after it has fetched them."""
    source = cache.parent / f"{config}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    made = datasets.load_dataset("json", data_files={"test": str(source)}, cache_dir=str(cache.parent / config))["test"]
    [arrow] = [Path(file["filename"]) for file in made.cache_files]
    folder = cache / "owner___some_data" / config / "0.0.0" / REVISION
    folder.mkdir(parents=True)
    arrow.rename(folder / "some_data-test.arrow")
    info = json.loads((arrow.parent / "dataset_info.json").read_text())
    info |= {"config_name": config, "dataset_name": "some_data"}
    (folder / "dataset_info.json").write_text(json.dumps(info))


def test_the_cache_answers_without_a_network(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    put(cache, "default", [{"text": "one"}, {"text": "zwei"}])
    capfd.readouterr()
    rows = hub_rows("owner/some_data", split="test")
    assert list(rows["text"]) == ["one", "zwei"] and list(rows) == [{"text": "one"}, {"text": "zwei"}]
    put(cache, "main", [{"text": "three"}])
    assert list(hub_rows("owner/some_data", "main", split="test")["text"]) == ["three"]
    assert "cache" not in capfd.readouterr().err


def test_what_is_not_there_fails_at_once_and_quietly(
    cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits to try again"))
    with pytest.raises(Exception, match=r"network is off|offline mode"):
        hub_rows("owner/some_data", split="test")
    assert capfd.readouterr().err == ""


def test_what_is_fetched_is_asked_for_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    fetched: list[tuple[object, ...]] = []

    def load_dataset(*asked: object, split: str) -> object:
        fetched.append((*asked, split))
        put(cache, "main", [{"text": "new"}])
        return {"text": ["new"]}

    class OnlineApi:
        def dataset_info(self, *_: object, **__: object) -> None:
            pass

    with monkeypatch.context() as online:
        online.setattr(huggingface_hub, "HfApi", OnlineApi)
        real = datasets.load_dataset

        def load(path: str, *rest: object, **given: object) -> object:
            return load_dataset(path, *rest, **given) if path == "owner/some_data" else real(path, *rest, **given)

        online.setattr(datasets, "load_dataset", load)
        assert hub_rows("owner/some_data", "main", split="test")["text"] == ["new"]
    assert list(hub_rows("owner/some_data", "main", split="test")["text"]) == ["new"]
    assert fetched == [("owner/some_data", "main", "test")]


def test_levels_of_loggers_come_back() -> None:
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    with pytest.raises(ZeroDivisionError), quiet():
        assert logger.level == logging.ERROR
        raise ZeroDivisionError
    assert logger.level == level
