"""Writes the built-in mini sets: word problems in GSM8K's fields, questions about documents in LongBench's fields.

    python scripts/make_mini_sets.py            # writes dllm_bench/tasks/data/mini_*.jsonl.gz

All text is made here. Questions and things asked for are those that the tiny model's training holds out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_facts import FACT, FORMS, LABEL, draw_place, draw_things, paragraph
from tiny_problems import problem
from tiny_text import WORDS_DIR, Words, load_words

PARAGRAPHS = 4
SENTENCES = {"room": (2, 4), "paragraph": (1, 3)}
"""Of a paragraph, least and most."""


def math_item(rng: random.Random, words: Words, number: int) -> dict[str, Any]:
    question, answer = problem(rng, evaluation=True)
    return {"question": question, "answer": answer}


def _item(name: str, form: str, number: int, thing: str, context: list[str], answer: str) -> dict[str, Any]:
    text = "\n\n".join(context)
    return {
        "_id": f"{name}-{number:04d}",
        "dataset": name,
        "language": "en",
        "input": FORMS[form].question.format(thing=thing),
        "context": text,
        "answers": [answer],
        "answer_prefix": FORMS[form].prefix.format(thing=thing),
        "length": len(text.split()),
        "all_classes": None,
    }


def qa_item(rng: random.Random, words: Words, number: int) -> dict[str, Any]:
    """A document in which two of the paragraphs tell which room a thing is in; one of them is asked for."""
    asked, other, *_ = draw_things(rng, words, PARAGRAPHS, evaluation=True)
    place = draw_place(rng)
    facts = [FACT.format(thing=asked, place=place), FACT.format(thing=other, place=draw_place(rng))]
    context = [paragraph(rng, words, *SENTENCES["room"]) for _ in range(PARAGRAPHS)]
    for fact, chosen in zip(facts, rng.sample(context, len(facts)), strict=True):
        chosen.insert(rng.randint(0, len(chosen)), fact)
    return _item("mini_qa", "room", number, asked, [" ".join(lines) for lines in context], place)


def retrieval_item(rng: random.Random, words: Words, number: int) -> dict[str, Any]:
    """Numbered paragraphs, each about one thing; the number of one is asked for."""
    things = draw_things(rng, words, PARAGRAPHS, evaluation=True)
    context = [
        " ".join([*paragraph(rng, words, *SENTENCES["paragraph"]), LABEL.format(thing=thing, number=i + 1)])
        for i, thing in enumerate(things)
    ]
    place = rng.randrange(len(things))
    return _item("mini_retrieval", "paragraph", number, things[place], context, f"Paragraph {place + 1}")


SETS: dict[str, tuple[Callable[[random.Random, Words, int], dict[str, Any]], str]] = {
    "mini_gsm8k": (math_item, "question"),
    "mini_qa": (qa_item, "input"),
    "mini_retrieval": (retrieval_item, "input"),
}
"""Maker of an item, and the field that no two items share."""


def items(name: str, count: int, seed: int, words: Words) -> list[dict[str, Any]]:
    """`count` items of a set, all with different questions."""
    make, unique = SETS[name]
    rng = random.Random(f"{name}-{seed}")
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        item = make(rng, words, len(made))
        made.setdefault(item[unique], item)
    return list(made.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=WORDS_DIR)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    words = load_words()
    for name in SETS:
        lines = [json.dumps(item, ensure_ascii=False) for item in items(name, args.count, args.seed, words)]
        # no time and no name in the file: the same items give the same bytes
        data = gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0)
        (args.folder / f"{name}.jsonl.gz").write_bytes(data)
        print(f"{name}: {len(lines)} items, {len(data):,} bytes")


if __name__ == "__main__":
    main()
