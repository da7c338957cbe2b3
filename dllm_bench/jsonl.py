"""JSON lines that users hand in: every complaint names the place and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dllm_bench.errors import UserError

__all__ = ["file_objects", "json_objects", "text_field"]

_BOM = b"\xef\xbb\xbf"


def json_objects(lines: Iterable[bytes], name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line from 1, object) of each line that is not blank; `name` says where they come from.

    Raises UserError for a line that is not UTF-8, not JSON, or no object.
    """
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value = json.loads(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8 text: byte {error.start} is invalid") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise UserError(f'{where} is no JSON object such as {{"name": "value"}}')
        yield number, value


def file_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """`json_objects` of a file, which may be compressed (.gz). Raises UserError where it cannot be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            yield from json_objects(lines, str(path))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or error}") from None


def text_field(values: Mapping[str, Any], field: str, where: str) -> str:
    """The text of a field that must not be missing or blank. Raises UserError."""
    if field not in values:
        raise UserError(f"{where} has no field '{field}': it has {', '.join(values) or 'none'}")
    text = values[field]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: the field '{field}' must be a text that is not empty, got {text!r:.60}")
    return text
