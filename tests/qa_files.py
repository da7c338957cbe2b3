"""Small data in the official formats of SQuAD 2.0 and HotpotQA, with all their fields."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

ODD = "Größe {context} {0} %s {query}\r\nzählt. 長い文章 🙂 \\n"
_WORDS = ("river", "stone", "mill", "bridge", "winter", "grain", "wheel", "harbour", "lantern", "orchard", "copper")


def prose(rng: Random, words: int) -> str:
    """Words in sentences of eight."""
    drawn = [rng.choice(_WORDS) for _ in range(words)]
    return " ".join(" ".join(drawn[k : k + 8]).capitalize() + "." for k in range(0, words, 8))


def squad(articles: int = 6, paragraphs: int = 5, longest: int = 120) -> dict[str, Any]:
    """Each paragraph holds one fact; the third question of each has no answer. Some texts are odd on purpose."""
    rng = Random(5)
    data = []
    for a in range(articles):
        made = []
        for p in range(paragraphs):
            fact = f"The keeper of house {a}-{p} was called Nael{a}x{p}."
            context = f"{prose(rng, rng.randint(8, longest))} {fact} {ODD if (a + p) % 4 == 0 else ''}".strip(" ")
            at = context.index(f"Nael{a}x{p}")
            answers = [{"text": text, "answer_start": at} for text in (f"Nael{a}x{p}", f"Nael{a}x{p}.")]
            asked = f"  Who was the keeper of house {a}-{p}? {{context}}"
            made.append(
                {
                    "qas": [
                        {"question": asked, "id": f"q{a}.{p}", "answers": answers, "is_impossible": False},
                        {"question": asked, "id": f"q{a}.{p}", "answers": answers[:1], "is_impossible": False},
                        {
                            "plausible_answers": answers,
                            "question": "Who was not?",
                            "id": f"n{a}.{p}",
                            "answers": [],
                            "is_impossible": True,
                        },
                    ],
                    "context": context,
                }
            )
        data.append({"title": f"House_{a}", "paragraphs": made})
    # an empty document and an empty answer
    data[0]["paragraphs"].append({"qas": [], "context": ""})
    data[1]["paragraphs"][0]["qas"].append(
        {"question": "What?", "id": "e", "answers": [{"text": " ", "answer_start": 0}], "is_impossible": False}
    )
    return {"version": "v2.0", "data": data}


def hotpot(questions: int = 12) -> list[dict[str, Any]]:
    """Ten documents each, two of them with the facts; one is empty and one odd."""
    rng = Random(6)
    made = []
    for q in range(questions):
        context: list[Any] = [[f"Place {q}-{k}", [prose(rng, 12) + " ", prose(rng, 8)]] for k in range(8)]
        context[3] = [f"Empty {q} {{0}}", []]
        context[4][1].append(ODD)
        context.insert(2, [f"Band {q}", [f"Band {q} came from town T{q}.", " It was loud."]])
        context.insert(7, [f"Town T{q}", [f"Town T{q} lies on the river", f" R{q}."]])
        made.append(
            {
                "_id": f"h{q}",
                "answer": f"R{q}",
                "question": f"On which river lies the town of Band {q}?",
                "supporting_facts": [[f"Band {q}", 0], [f"Town T{q}", 1]],
                "context": context,
                "type": "bridge",
                "level": "hard",
            }
        )
    return made


def write_folder(folder: Path) -> Path:
    """Both files under their official names."""
    for name, content in (("dev-v2.0.json", squad()), ("hotpot_dev_distractor_v1.json", hotpot())):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder
