"""Where LongBench's items come from: official jsonl files in a folder, the hub, or the package (the mini sets)."""

from __future__ import annotations

import gzip
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dllm_bench.errors import UserError, nearest
from dllm_bench.jsonl import file_objects, json_objects

__all__ = ["FIELDS", "HUB_DATASET", "Item", "built_in", "data_file", "digest", "from_file", "from_hub"]

HUB_DATASET = "THUDM/LongBench"
FIELDS = ("input", "context", "answers", "length", "dataset", "language", "all_classes", "_id")
"""The columns of the official files."""

_ARCHIVE = "data.zip"
_TIMEOUT_S = 10


@dataclass(frozen=True)
class Item:
    """One question of a data set.

    Attributes:
        length: of context and input in words (Chinese: characters), as the data set says.
        classes: names of all classes; empty where the answer is no class.
        answer_prefix: words that the answer begins with already (mini sets).
    """

    id: str
    input: str
    context: str
    answers: tuple[str, ...]
    length: int
    dataset: str
    language: str
    classes: tuple[str, ...] = ()
    answer_prefix: str = ""


def from_file(path: Path, *, asks: bool, classes: bool) -> list[Item]:
    """Items of a jsonl file (.gz too).

    Args:
        asks: whether the prompt needs an input. classes: whether the score needs the classes.
    Raises:
        UserError: naming the line and the field that is wrong, an id that is there twice, or an empty file.
    """
    return _items(file_objects(path), str(path), asks, classes)


def data_file(folder: Path, name: str) -> Path:
    """The file of a data set. Raises UserError, naming the nearest file, where the folder lacks it."""
    found = [path for path in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz") if path.is_file()]
    if found:
        return found[0]
    if not folder.is_dir():
        raise UserError(f"longbench option 'data': '{folder}' is no folder; it has to hold {name}.jsonl")
    there = sorted(path.name for path in folder.iterdir() if path.name.endswith((".jsonl", ".jsonl.gz")))
    near = nearest(f"{name}.jsonl", there)
    hint = f"nearest there: {near}" if near else f"it holds {len(there)} jsonl files"
    raise UserError(f"longbench option 'data': '{folder}' has no {name}.jsonl ({hint})")


def digest(path: Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def built_in(name: str) -> list[Item]:
    """Items of a set inside the package."""
    source = files("dllm_bench.tasks.data").joinpath(f"{name}.jsonl.gz")
    if not source.is_file():
        raise UserError(f"this installation lacks its built-in data set {name}: install the package again")
    with source.open("rb") as packed, gzip.open(packed) as lines:
        return _items(json_objects(lines, name), name, True, False)


def from_hub(name: str, *, asks: bool, classes: bool) -> list[Item]:
    """Items from the archive of official files on the hub, or from the local cache where it is there.

    The data set's own loading script is of no use: the library `datasets` runs none since its version 4.
    """
    try:
        with zipfile.ZipFile(_archive()) as archive, archive.open(f"data/{name}.jsonl") as lines:
            return _items(json_objects(lines, f"{HUB_DATASET} {name}"), f"{HUB_DATASET} {name}", asks, classes)
    except UserError:
        raise
    except Exception as error:  # the hub's client raises many kinds, all of which mean that the data is not to be had
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(
            f"longbench {name}: the data set {HUB_DATASET} could not be had from the hub ({reason}): give the folder "
            f"of the official {name}.jsonl with --data DIR (or --task-set data=DIR), go online once, or take the "
            "built-in --subset mini_qa or mini_retrieval"
        ) from None


def _archive() -> str:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        return str(hf_hub_download(HUB_DATASET, _ARCHIVE, repo_type="dataset", local_files_only=True))
    except Exception:
        pass
    # without a network this fails at once, and the download only after minutes of trying again
    HfApi().dataset_info(HUB_DATASET, timeout=_TIMEOUT_S)
    return str(hf_hub_download(HUB_DATASET, _ARCHIVE, repo_type="dataset"))


def _items(rows: Iterable[tuple[int, Mapping[str, Any]]], name: str, asks: bool, classes: bool) -> list[Item]:
    items = []
    lines: dict[str, int] = {}
    for number, row in rows:
        item = _item(row, f"{name}, line {number}", asks, classes)
        if item.id in lines:
            raise UserError(f"{name}: lines {lines[item.id]} and {number} have the same _id '{item.id}'")
        lines[item.id] = number
        items.append(item)
    if not items:
        raise UserError(f"{name} holds no item")
    return items


def _item(row: Mapping[str, Any], where: str, asks: bool, classes: bool) -> Item:
    missing = [field for field in FIELDS if field not in row]
    if missing:
        raise UserError(
            f"{where} lacks the column '{missing[0]}': it has {', '.join(row) or 'none'}; "
            f"the official files have {', '.join(FIELDS)}"
        )
    names = _texts(row, "all_classes", where) if row["all_classes"] is not None else ()
    if classes and not names:
        raise UserError(f"{where}: 'all_classes' is empty, but the score needs the names of all classes")
    length = row["length"]
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        raise UserError(f"{where}: 'length' must be a whole number from 0 on, got {length!r:.60}")
    answers = _texts(row, "answers", where)
    if not answers:
        raise UserError(f"{where}: 'answers' is empty, so nothing can be scored: it needs at least one")
    return Item(
        id=_text(row, "_id", where, True),
        input=_text(row, "input", where, asks),
        context=_text(row, "context", where, True),
        answers=answers,
        length=length,
        dataset=_text(row, "dataset", where, False),
        language=_text(row, "language", where, False),
        classes=names,
        answer_prefix=_text(row, "answer_prefix", where, False) if "answer_prefix" in row else "",
    )


def _text(row: Mapping[str, Any], field: str, where: str, needed: bool) -> str:
    text = row[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: '{field}' must be a text, got {text!r:.60}")
    if needed and not text.strip():
        raise UserError(f"{where}: '{field}' is empty, but the prompt needs it")
    return text


def _texts(row: Mapping[str, Any], field: str, where: str) -> tuple[str, ...]:
    texts = row[field]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: '{field}' must be a list of texts, got {texts!r:.60}")
    return tuple(texts)
