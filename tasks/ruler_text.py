"""Haystack texts for RULER's essay subsets: the built-in prose, a user's files, or lm-eval's essays from the hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from dllm_bench.errors import UserError, nearest
from dllm_bench.hub_access import hub_rows
from dllm_bench.tasks.prose import built_in_sentences

__all__ = ["HUB", "HUB_DATASET", "Corpus", "check_haystack", "load_corpus", "sentence_splitter", "split_sentences"]

HUB = "hub"
HUB_DATASET = "baber/paul_graham_essays"
_TEXT_FILES = (".txt", ".md", ".text")
_LONGEST = 1000
_END = re.compile(r"[.!?…]+[\"'”’)\]]*\s+(?=[^\sa-z])|[。！？]+[”’」』）]*\s*")


@dataclass(frozen=True)
class Corpus:
    """Haystack text as sentences without line breaks.

    Attributes:
        text: the text itself, each run of white space collapsed to one space.
        name: where it comes from, with the first 8 hex digits of the SHA-256 of its text.
        splitter: how sentences were found: "known" (built-in), "punkt" (NLTK) or "regex".
    """

    name: str
    text: str
    sentences: tuple[str, ...]
    splitter: str


def check_haystack(haystack: str | None) -> None:
    """Raises UserError where the file or folder is missing; names the nearest one beside it."""
    if haystack is None or haystack == HUB or Path(haystack).exists():
        return
    path = Path(haystack)
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    hint = f": did you mean '{path.parent / near}'?" if near else " (a text file, a folder of text files, or 'hub')"
    raise UserError(f"haystack '{haystack}' does not exist{hint}")


@cache
def load_corpus(haystack: str | None) -> Corpus:
    """The corpus of a haystack option: None for the built-in text, "hub", or the path of a file or folder.

    White space is collapsed, as in lm-eval. Raises UserError where the text is missing, empty or not UTF-8.
    """
    check_haystack(haystack)
    if haystack is None:
        sentences = built_in_sentences()
        text = " ".join(sentences)
        return Corpus(f"built-in:{_digest(text)}", text, sentences, "known")
    splitter, split = sentence_splitter()
    text = _hub_text() if haystack == HUB else _read(Path(haystack))
    text = re.sub(r"\s+", " ", text)
    if not text.strip():
        raise UserError(f"haystack '{haystack}' holds no text")
    name = f"hub:{HUB_DATASET}" if haystack == HUB else f"file:{Path(haystack).name}"
    pieces = [piece for sentence in split(text.strip()) for piece in _bounded(sentence)]
    return Corpus(f"{name}:{_digest(text)}", text, tuple(pieces), splitter)


def sentence_splitter() -> tuple[str, Callable[[str], list[str]]]:
    """NLTK's punkt where it and its data are installed (nothing is downloaded), else a regular expression."""
    try:
        import nltk

        nltk.data.find("tokenizers/punkt_tab/english")
    except (ImportError, LookupError):
        return "regex", split_sentences
    return "punkt", lambda text: [str(s) for s in nltk.sent_tokenize(text)]


def split_sentences(text: str) -> list[str]:
    """Sentences by punctuation: an end mark, then white space and no lower-case letter; or a full-width end mark."""
    cuts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    parts = [text[a:b].strip() for a, b in pairwise(cuts)]
    return [part for part in parts if part]


def _bounded(sentence: str) -> list[str]:
    """Cuts what has no sentence ends for pages on end (code, lists), so that needles find places in it."""
    parts = []
    rest = sentence
    while len(rest) > _LONGEST:
        space = rest.rfind(" ", 1, _LONGEST)
        cut = space if space > 0 else _LONGEST
        parts.append(rest[:cut].strip())
        rest = rest[cut:].strip()
    return [part for part in [*parts, rest] if part]


def _read(path: Path) -> str:
    """Text of a file, or of all text files below a folder in the order of their paths."""
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in _TEXT_FILES)
        if not found:
            raise UserError(f"haystack folder '{path}' has no text file ({', '.join(_TEXT_FILES)})")
        return "\n".join(_read(p) for p in found)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"haystack '{path}' is not UTF-8 text: byte {error.start} is invalid") from None
    except OSError as error:
        raise UserError(f"haystack '{path}' cannot be read: {error.strerror}") from None


def _hub_text() -> str:
    try:
        return " ".join(hub_rows(HUB_DATASET, split="train")["text"])
    except Exception as error:  # the hub's client raises many kinds, all of which mean that the text is not to be had
        raise UserError(
            f"haystack 'hub' needs the data set {HUB_DATASET}, which could not be loaded ({error}): "
            "give a text file or folder, or leave the option out for the built-in text"
        ) from None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
