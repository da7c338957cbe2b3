"""The store keeps whole rows, one per key, whatever moment it is killed at."""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rows import make_row

from dllm_bench.errors import UserError
from dllm_bench.running import schema
from dllm_bench.running.store import Store

TESTS = Path(__file__).parent


def test_rows_come_back_with_nulls_and_zeros_apart(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    store.append(make_row(index=0, score=0.0, cache_bytes_peak=0, memory_peak_bytes=None, needle_depths=None))
    (row,) = store.read()
    assert row["score"] == 0.0 and row["cache_bytes_peak"] == 0
    assert row["memory_peak_bytes"] is None and row["needle_depths"] is None


def test_a_malformed_row_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(ValueError, match="colour"):
        store.append({**make_row(), "colour": "red"})
    with pytest.raises(ValueError, match="'key'"):
        store.append({**make_row(), "key": None})
    assert store.files() == [] and list(tmp_path.iterdir()) == []


def test_of_rows_with_one_key_the_last_begun_counts(tmp_path: Path) -> None:
    store, now = Store(tmp_path), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    store.append(make_row(status="ok", score=1.0, started_at=now + dt.timedelta(seconds=9)))
    store.append(make_row(status="oom", score=None, started_at=now))
    assert [(r["status"], r["score"]) for r in store.read()] == [("ok", 1.0)]
    assert len(store) == 1
    store.compact()
    assert [(r["status"], r["score"]) for r in store.read()] == [("ok", 1.0)]


def test_compaction_keeps_every_row_in_one_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for index in range(5):
        store.append(make_row(index=index))
    before = store.read()
    assert len(store.files()) == 5
    store.compact()
    assert len(store.files()) == 1 and store.read() == before
    store.compact()
    assert len(store.files()) == 1


def test_drop_removes_only_the_asked_keys(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [make_row(index=index) for index in range(4)]
    for row in rows:
        store.append(row)
    assert store.drop({rows[1]["key"], rows[3]["key"], "never there"}) == 2
    assert [row["index"] for row in store.read()] == [0, 2]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for below in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with pytest.raises(UserError, match="file' is no folder"):
            Store(below).check_writable()
        with pytest.raises(UserError, match="cannot write results to"):
            Store(below).append(make_row())
    Store(tmp_path / "a" / "b").check_writable()
    assert not (tmp_path / "a").exists(), "a check makes nothing"
    monkeypatch.setattr(os, "access", lambda *_: False)  # a root user may write anywhere
    with pytest.raises(UserError, match="cannot be written to"):
        Store(tmp_path / "a" / "b").check_writable()


def test_a_foreign_or_newer_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), file)
    with pytest.raises(UserError, match=r"other\.parquet is no result file"):
        Store(tmp_path).read()
    newer = schema.arrow_schema().with_metadata({"dllm_bench_schema_version": str(schema.SCHEMA_VERSION + 1)})
    pq.write_table(newer.empty_table(), file)
    with pytest.raises(UserError, match=r"other\.parquet has schema"):
        Store(tmp_path).read()
    file.write_bytes(b"PAR1 torn")
    with pytest.raises(UserError, match="not readable"):
        Store(tmp_path).read()


def test_a_column_that_an_older_file_lacks_is_null(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([schema.new_row(make_row())], schema=schema.arrow_schema())
    pq.write_table(table.drop_columns(["row_layers"]), tmp_path / "old.parquet")
    assert [row["row_layers"] for row in Store(tmp_path).read()] == [None]


WRITER = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from rows import make_row
from dllm_bench.running import store as module

point, count = {point!r}, {count!r}
seen = 0

def here(name):
    global seen
    if name == point:
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

# the calls between which a kill can fall
fsync, replace, unlink = os.fsync, Path.replace, Path.unlink
def killing_fsync(handle): here("before fsync"); fsync(handle); here("after fsync")
def killing_replace(self, target):
    here("before rename"); replace(self, target); here("after rename")
def killing_unlink(self, missing_ok=False):
    unlink(self, missing_ok=missing_ok)
    if not self.name.startswith(".tmp"): here("after delete")
os.fsync, Path.replace, Path.unlink = killing_fsync, killing_replace, killing_unlink

store = module.Store({root!r})
kept = store.statuses()
for index in range(4):
    row = make_row(index=index)
    if row["key"] not in kept:
        store.append(row)
        print(index, flush=True)
store.compact()
print("compacted", flush=True)
"""


def write_rows(root: Path, point: str, count: int) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(WRITER).format(tests=str(TESTS), root=str(root), point=point, count=count)
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, cwd=TESTS.parent, timeout=60, check=False)


@pytest.mark.skipif(os.name != "posix", reason="kill -9 needs a POSIX system")
@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("before fsync", 1),  # the first temporary file is written, not durable
        ("after fsync", 3),  # the second one is durable, not renamed
        ("before rename", 2),
        ("after rename", 2),
        ("before rename", 5),  # the compacted file exists under its temporary name
        ("after rename", 5),  # every row lies in two files
        ("after delete", 2),  # half of the old files are gone
        ("after delete", 4),
    ],
)
def test_a_kill_leaves_whole_rows_and_the_rerun_adds_the_rest(tmp_path: Path, point: str, count: int) -> None:
    root = tmp_path / "runs"
    killed = write_rows(root, point, count)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    told = [int(line) for line in killed.stdout.split()]
    rows = Store(root).read()
    found = [row["index"] for row in rows]
    assert len(set(found)) == len(found) and set(told) <= set(found) <= set(range(4))
    assert all(same(row, make_row(index=row["index"])) for row in rows)

    store = Store(root)
    kept = store.statuses()
    missing = [row for row in map(make_row_at, range(4)) if row["key"] not in kept]
    assert {row["index"] for row in missing} == set(range(4)) - set(found), "a kept row would be done again"
    for row in missing:
        store.append(row)
    store.compact()
    assert sorted(row["index"] for row in Store(root).read()) == [0, 1, 2, 3]
    assert sum(pq.read_metadata(file).num_rows for file in Store(root).files()) == 4


def make_row_at(index: int) -> dict[str, Any]:
    return make_row(index=index)


def same(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(row[name] == value for name, value in wanted.items())


def test_the_schema_page_is_the_schema() -> None:
    page = (TESTS.parent / "docs" / "schema.md").read_text(encoding="utf-8")
    assert page == schema.markdown(), "make it again: python -m dllm_bench.running.schema > docs/schema.md"
    fields = {field.name: field for field in schema.arrow_schema()}
    assert list(fields) == [column.name for column in schema.COLUMNS]
    for column in schema.COLUMNS:
        assert f"| `{column.name}` | {column.type} | {'yes' if column.nullable else 'no'} | {column.text} |" in page
        assert fields[column.name].metadata[b"description"].decode() == column.text
