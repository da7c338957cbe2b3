"""The result store: a folder of immutable parquet files, safe against a kill at any moment."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.errors import UserError
from dllm_bench.running.schema import PREFIXES, RESULTS, Kind, arrow_schema, new_row

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Store"]

_STALE_SECONDS = 3600.0


class Store:
    """Rows of one kind in the folder `root`: results, one per key, unless another kind is named.

    A file is written under a temporary name, flushed to the disk and renamed, so it is either whole or absent. Files
    are never changed. Compaction writes all rows into one new file before it deletes the old ones; a kill in between
    leaves rows twice, and readers keep one row per key (or those that were written together): the latest. Several
    processes may write to one folder.
    """

    def __init__(self, root: str | os.PathLike[str], kind: Kind = RESULTS) -> None:
        self.root, self.kind = Path(root), kind

    def check_writable(self) -> None:
        """Raises UserError where the folder cannot be made or written. Makes nothing."""
        place = self.root.absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise UserError(f"'{place}' is no folder: name another one with --out")
        if not os.access(place, os.W_OK | os.X_OK):
            raise UserError(f"'{place}' cannot be written to: name another folder with --out")

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Adds rows durably, all together: when this returns, they survive a crash.

        Raises ValueError for a malformed row, UserError where the folder cannot be written.
        """
        import pyarrow as pa

        table = [new_row(row, self.kind) for row in rows]
        self._write(pa.Table.from_pylist(table, schema=arrow_schema(self.kind)), "part")

    def read(self, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """One row per key, the latest, in the order in which they were begun. `columns`: only these.

        Raises UserError where a file is no result file or of a newer schema.
        """
        wanted = None if columns is None else list(dict.fromkeys([*columns, *self.kind.identity, "started_at"]))
        rows: list[dict[str, Any]] = self._latest(self._table(wanted)[0]).to_pylist()
        if columns is not None:
            rows = [{name: row[name] for name in columns} for row in rows]
        return rows

    def statuses(self) -> dict[str, str]:
        """Key -> status of every row."""
        return {row["key"]: row["status"] for row in self.read(["key", "status"])}

    def __len__(self) -> int:
        return len(self.statuses())

    def compact(self) -> None:
        """Brings all rows into one file. A kill at any moment neither loses nor doubles a row."""
        self._sweep()
        table, files = self._table(None)
        if len(files) > 1:
            self._replace(files, self._latest(table))

    def drop(self, keys: Collection[str]) -> int:
        """Removes the rows of `keys`; returns how many there were. A kill may leave some of them, it harms no other."""
        import pyarrow as pa
        import pyarrow.compute as pc

        table, files = self._table(None)
        table = self._latest(table)
        gone = pc.is_in(table["key"], value_set=pa.array(sorted(keys), pa.string()))
        count = int(pc.sum(gone).as_py() or 0)
        if count:
            self._replace(files, table.filter(pc.invert(gone)))
        return count

    def replace(self, *rows: Mapping[str, Any]) -> int:
        """Puts whole rows in the places of stored ones that tell of the same beginning; returns how many.

        Rows that were dropped or begun anew meanwhile are not brought back. All rows are written into one new file
        before the old ones are deleted: a kill leaves each row in its old or in its new form, and a reader that finds
        both takes the new one. Another process that compacts the folder at the same time may bring old forms back.
        """
        import pyarrow as pa

        table, files = self._table(None)
        table = self._latest(table)
        names = (*self.kind.identity, "started_at")
        places = list(zip(*(table[name].to_pylist() for name in names), strict=True))
        given = {tuple(row[name] for name in names): row for row in rows}
        fresh = [new_row(given[place], self.kind) for place in places if place in given]
        if fresh:
            kept = table.take(pa.array([i for i, place in enumerate(places) if place not in given], pa.int64()))
            made = pa.Table.from_pylist(fresh, schema=arrow_schema(self.kind))
            self._replace(files, pa.concat_tables([kept, made]))
        return len(fresh)

    def files(self) -> list[Path]:
        """The result files, in order of their names."""
        others = tuple(prefix for prefix in PREFIXES if prefix != self.kind.prefix)
        found = self.root.glob(f"{self.kind.prefix}*.parquet")
        return sorted(p for p in found if not p.name.startswith((".", *others)))

    def _replace(self, files: Iterable[Path], table: pa.Table) -> None:
        self._write(table, "rows")
        for file in files:
            file.unlink(missing_ok=True)
        _sync_folder(self.root)

    def _write(self, table: pa.Table, prefix: str) -> None:
        import pyarrow.parquet as pq

        name = f"{self.kind.prefix}{prefix}-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.parquet"
        temporary = self.root / f".tmp-{name}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as handle:
                    pq.write_table(table, handle, compression="zstd")
                    handle.flush()
                    os.fsync(handle.fileno())
                temporary.replace(self.root / name)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:  # no such place, no right to write there, or no space left
            raise UserError(f"cannot write results to '{self.root}': {error.strerror or error}") from error
        _sync_folder(self.root)

    def _table(self, columns: list[str] | None) -> tuple[pa.Table, list[Path]]:
        """All rows of all files, and the files. A file that vanishes was replaced by another process: look again."""
        import pyarrow as pa

        for _ in range(20):
            files = self.files()
            try:
                tables = [_load(file, columns, self.kind) for file in files]
            except FileNotFoundError:
                continue
            schema = arrow_schema(self.kind)
            if columns is not None:
                schema = pa.schema([schema.field(name) for name in columns])
            return pa.concat_tables(tables) if tables else schema.empty_table(), files
        raise UserError(f"the result files in {self.root} change too fast to be read")

    def _latest(self, table: pa.Table) -> pa.Table:
        """The rows of each key that were begun last, and of equal ones the last in the order of files."""
        import pyarrow as pa

        started = table["started_at"].cast(pa.int64()).to_pylist()
        order = sorted(range(len(table)), key=lambda i: (started[i], i))
        keys = table["key"].to_pylist()
        names = list(zip(*(table[name].to_pylist() for name in self.kind.identity), strict=True))
        begun = {keys[i]: started[i] for i in order}
        last = {names[i]: i for i in order}
        kept = [i for i in order if last[names[i]] == i and begun[keys[i]] == started[i]]
        return table.take(pa.array(kept, pa.int64()))

    def _sweep(self) -> None:
        """Deletes what killed writers left; young files may belong to a living one."""
        for file in self.root.glob(".tmp-*.parquet"):
            try:
                if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                    file.unlink()
            except FileNotFoundError:
                continue


def _load(file: Path, columns: list[str] | None, kind: Kind) -> pa.Table:
    """The rows of one file in today's schema: columns that it does not have yet are null."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(kind)
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    try:
        with pq.ParquetFile(file) as parquet:
            found = parquet.schema_arrow
            version = (found.metadata or {}).get(kind.mark.encode())
            if version is None:
                raise UserError(f"{file} is no {kind.name} file of dllm-bench")
            if int(version) > kind.version:
                raise UserError(
                    f"{file} has schema {int(version)}, this dllm-bench reads up to {kind.version}: upgrade it"
                )
            table = parquet.read(columns=[f.name for f in schema if f.name in found.names])
    except pa.ArrowInvalid as error:
        raise UserError(f"{file} is not readable as parquet: {error}") from error
    present = set(table.column_names)
    filled = [table[f.name].cast(f.type) if f.name in present else pa.nulls(len(table), f.type) for f in schema]
    return pa.Table.from_arrays(filled, schema=schema)


def _sync_folder(folder: Path) -> None:
    """Makes renames and deletions in the folder durable; some systems cannot open a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
