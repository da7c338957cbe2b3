"""Small GSM8K files of the official form, with problems of the tests' own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

TEST = [
    ("Ann has 5 figs. She buys 3 more. How many figs does she have?", "5+3=<<5+3=8>>8 figs\n#### 8"),
    ("A car costs $1,200 and a bike {half}.  How much are both?", "1200/2=<<1200/2=600>>600\n#### 1,800"),
    ("It is 2 degrees and falls by 7. What is it now?", "2-7=<<2-7=-5>>-5\n#### -5"),
]
TRAIN = [
    (f"Tom reads {n} pages a day. How many in 2 days?", f"{n}*2=<<{n}*2={2 * n}>>{2 * n}\n#### {2 * n}")
    for n in range(20)
]
MINI = [
    (f"Mia has {n} shells. She finds 2 more. How many shells does Mia have now?", f"{n}+2={n + 2}\n#### {n + 2}")
    for n in range(9)
]


def lines(problems: list[tuple[str, str]]) -> str:
    told: list[dict[str, Any]] = [{"question": q, "answer": a} for q, a in problems]
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in told)


def official(folder: Path) -> Path:
    """A folder with test.jsonl and train.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "test.jsonl").write_text(lines(TEST), encoding="utf-8")
    (folder / "train.jsonl").write_text(lines(TRAIN), encoding="utf-8")
    return folder


def mini(file: Path) -> Path:
    """A file of the built-in set's form."""
    file.write_bytes(gzip.compress(lines(MINI).encode()))
    return file
