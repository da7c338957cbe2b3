"""Small files in the form of LongBench's, for its tests."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CLASSES = ["Food", "Date", "Animal", "Number of something"]
_ADJECTIVES = ("brave", "quiet", "hollow", "amber", "distant", "gentle", "rusty", "northern")
_NOUNS = ("lantern", "harbor", "kettle", "violin", "orchard", "compass", "ladder", "market")
_CLAUSES = (
    "The morning was cold and the road was empty.",
    "Somebody had left the gate open.",
    "Nobody spoke of it for the rest of the week.",
    "The old baker counted the loaves twice.",
    "A boat went by with its lamps unlit.",
)


def row(number: int = 0, **fields: Any) -> dict[str, Any]:
    """An item with every official column."""
    return {
        "input": f"Who wrote letter {number}?",
        "context": " ".join(f"Line {i} of story {number} tells of rain." for i in range(200)),
        "answers": ["Ada", "Ada Lovelace"],
        "length": 3000 + 1000 * number,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": f"id-{number}",
        **fields,
    }


def write(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], newline: str = "\n") -> Path:
    """NAME.jsonl with real letters, not escapes, as the official files have them."""
    path = folder / f"{name}.jsonl"
    lines = [json.dumps(one, ensure_ascii=False) + newline for one in rows]
    path.write_bytes("".join(lines).encode())
    return path


def mini_rows(name: str, count: int = 12, paragraphs: int = 3) -> list[dict[str, Any]]:
    """Items in the form of the built-in sets: every key is asked for once, in one of several paragraphs."""
    rng = random.Random(name)
    pairs = [f"{a} {n}" for a in _ADJECTIVES for n in _NOUNS]
    rng.shuffle(pairs)
    rows = []
    for number in range(count):
        keys = [pairs[(number * paragraphs + i) % len(pairs)] for i in range(paragraphs)]
        places = [str(rng.randint(100, 9999)) for _ in keys]
        asked = rng.randrange(paragraphs)
        texts = []
        for at, (key, place) in enumerate(zip(keys, places, strict=True), start=1):
            sentences = [rng.choice(_CLAUSES) for _ in range(3)]
            fact = f"The {key} is in room {place}."
            last = [f"This is all about the {key}: Paragraph {at}."] if name == "mini_retrieval" else []
            texts.append(" ".join([*sentences[:2], fact, sentences[2], *last]))
        qa = name == "mini_qa"
        rows.append(
            row(
                number,
                input=f"Which room is the {keys[asked]} in?" if qa else f"Which paragraph is about the {keys[asked]}?",
                context="\n\n".join(texts),
                answers=[places[asked] if qa else f"Paragraph {asked + 1}"],
                dataset=name,
                answer_prefix=f"The {keys[asked]} is in room"
                if qa
                else f"The paragraph about the {keys[asked]} is Paragraph",
            )
        )
    return rows


def write_mini(folder: Path) -> Path:
    """Both mini sets, compressed as in the package."""
    for name in ("mini_qa", "mini_retrieval"):
        packed = gzip.compress("".join(json.dumps(one) + "\n" for one in mini_rows(name)).encode(), mtime=0)
        (folder / f"{name}.jsonl.gz").write_bytes(packed)
    return folder
