"""Writes the card of the embedded model from the facts of its training and from what was measured of it.

python scripts/tiny_card.py         # reads results/model and results/reference, writes dllm_bench/models/tiny/README.md
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_export import FOLDER
from tiny_stages import BLOCK, CONFIG, GEN, STAGES

from dllm_bench.errors import UserError
from dllm_bench.reporting.leaderboard import COLUMNS_READ, leaderboard
from dllm_bench.reporting.style import noted
from dllm_bench.reporting.tables import records
from dllm_bench.running.lengths import ctx_name
from dllm_bench.running.store import Store

RESULTS = FOLDER.parents[2] / "results"
HEADER = ("task", "context", "method", "decoding", "n", "score, %", "95 %", "all right, %", "passes")
RULES = ("threshold 0.9", "4 tokens a pass", "one token a pass")
"""Commit rules in the order in which they are told."""


def rule(decode: Mapping[str, Any]) -> str:
    """The commit rule in a word or two."""
    if decode.get("threshold") is not None:
        return f"threshold {decode['threshold']:g}"
    per_pass = decode["gen_length"] / decode["steps"]
    # with more steps than tokens each pass commits one, and the last ones are not needed
    return "one token a pass" if per_pass <= 1 else f"{per_pass:g} tokens a pass"


def line(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """What the table says of one method on one subset at one length."""
    return (
        f"{record['task']} {record['subset']}",
        "–" if record["ctx"] is None else ctx_name(record["ctx"]),
        name,
        record["rule"],
        str(record["n"]),
        f"{100 * record['accuracy']:.1f}",
        f"{100 * record['accuracy_low']:.0f}–{100 * record['accuracy_high']:.0f}",
        f"{100 * record['all_right']:.1f}",
        f"{record['nfe']:.1f}",
    )


def lines(found: list[dict[str, Any]]) -> list[str]:
    """The table of what was measured, and below it what marks behind names mean."""
    names, notes = noted((record["method_label"] for record in found), narrow=True)
    rows = (line(record, names[record["method_label"]].replace("\n", "")) for record in found)
    return [table(HEADER, rows), *notes]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows))


def measured(folder: Path) -> list[dict[str, Any]]:
    """A record of each method, with each commit rule, on each subset at each length.

    Only scores and passes are told of them, in which the machine plays no part: a run that stopped on one may have gone
    on on another. `all_right` is the share of samples with a full score. Raises UserError for a folder without rows.
    """
    rows = Store(folder).read(COLUMNS_READ)
    if not rows:
        raise UserError(f"'{folder}' has no rows: run 'make reference'")
    anywhere = ({**row, "device_name": None, "threads": None} for row in rows)
    sections = leaderboard(anywhere, by_subset=True)
    entries = (entry for section in sections for cell in section.cells for entry in cell.entries)
    found = []
    for record, entry in zip(records(sections), entries, strict=True):
        record["rule"] = rule(entry.decode)
        record["method_label"] = entry.rows[0]["method_label"]
        record["all_right"] = sum(row["score"] == 1 for row in entry.rows) / max(entry.n, 1)
        found += [record] if record["n"] else []
    places = {(r["task"], r["ctx"], r["subset"]): i for i, r in enumerate(found)}
    rules = {name: i for i, name in enumerate(RULES)}
    return sorted(found, key=lambda r: (places[r["task"], r["ctx"], r["subset"]], rules.get(r["rule"], len(rules))))


def told(run: Mapping[str, Any]) -> str:
    """What one of the runs that led to the published weights took, and what it trained."""
    return (
        f"Steps {run['from']} to {run['to']}, {run['tokens'] / 1e6:.1f} M tokens in {run['seconds'] / 60:.0f} min with "
        f"{run['threads']} thread{'s' * (run['threads'] > 1)} on {run['machine']}: {run['about']}."
    )


def card(training: Mapping[str, Any], alone: list[dict[str, Any]], methods: list[dict[str, Any]]) -> str:
    """The model card: what it is, how it was trained, and what was measured without a cache and with each method."""
    tested = ctx_name(max(record["ctx"] or 0 for record in alone))
    paragraphs = [
        "# dllm-bench tiny",
        f"A masked-diffusion Transformer in LLaDA's architecture with {training['parameters'] / 1e6:.2f} M parameters "
        f"({CONFIG['n_layers']} layers, width {CONFIG['d_model']}, {CONFIG['n_heads']} heads, vocabulary "
        f"{CONFIG['vocab_size']}, `rope_theta` {CONFIG['rope_theta']:.0e}). It finds numbers that are hidden in a "
        "text, in RULER's wording, numbers of rooms and paragraphs in the built-in documents, and solves the word "
        "problems that come with the package, so that accuracy differences between cache methods are real on a "
        "laptop. It is no language model: it cannot chat, and knows no other task.",
        "Trained by this repository on text it makes itself; no outside text or weights went into it. The word lists "
        "are those of the wonderwords package (MIT). Weights and tokenizer are under the licence of this repository.",
        "## Training",
        *training_told(training),
        "## Measured accuracy",
        *measures_told(tested),
        "### Without a cache",
        *lines(alone),
        "### With each method",
        *lines(methods),
        "Several values are answered in the order in which they stand in the text. Single needles do not fall with "
        "context; needles among needles, several values and questions about documents do.",
    ]
    return "\n\n".join(map(wrapped, paragraphs)) + "\n"


def wrapped(paragraph: str) -> str:
    """In lines of 120 letters, but for code, tables and headings."""
    as_it_is = paragraph.startswith(("```", "|", "#"))
    return paragraph if as_it_is else textwrap.fill(paragraph, 120, break_long_words=False)


def training_told(training: Mapping[str, Any]) -> list[str]:
    """Command, data, objective and the runs that led to the published weights."""
    longest, span = (max(getattr(p, name) for s in STAGES for p in s.parts) for name in ("length", "span"))
    runs = training["runs"]
    tokens, minutes = sum(run["tokens"] for run in runs) / 1e6, sum(run["seconds"] for run in runs) / 60
    return [
        "```\npython scripts/train_tiny.py && python scripts/train_tiny.py --export\nmake reference\n```",
        "What it learned from: needles in RULER's wording (in RULER's noise, in made-up essays, among other needles; 1 "
        "to 24 keys with 1 to 8 values), documents that tell which room a thing is in or which paragraph is about it, "
        "word problems of one to three steps, and plain sums; `scripts/tiny_stages.py` has the shares and lengths of "
        "each stage. The loss is the cross entropy of the answer's masked tokens, the optimiser AdamW; the published "
        "weights are a moving average of the training's, in bfloat16.",
        f"Seed {training['seed']}; {tokens:.1f} M tokens in {minutes:.0f} min in all. {' '.join(map(told, runs))} The "
        "first run starts from a hand-made copying circuit plus noise (`scripts/tiny_init.py`).",
        f"Sequences have up to {longest} tokens; many stand for texts of up to {span} tokens, by skipped positions and "
        "by haystack tokens that count in attention as many copies of themselves, or by keys that stand at the "
        "positions of such copies.",
        "Data, stages and width were changed between these runs, each of which went on from the weights of the one "
        "before (`--start`). So the command above, which trains all stages at full width from the beginning, does not "
        "give the same weights, and was not run to its end. `--device cuda` was not tried: no GPU was at hand.",
    ]


def measures_told(tested: str) -> list[str]:
    """What the tables tell, and of which samples."""
    return [
        f"By `dllm-bench run`, at up to {tested} tokens, generation of at most {GEN} tokens in blocks of {BLOCK} "
        "(`make reference` and `make reference-long`; rows in `results/model` and `results/reference`). Scores "
        "pool several machines; this page gives no speeds.",
        "`score`: the task's own; where several values are asked for, RULER's, the mean share of them that the answer "
        "names. `all right`: samples with a full score. `95 %`: the interval of the score, Wilson's where it is all or "
        "nothing, Student's t for shares. `passes`: through the network, until the answer's end. `threshold 0.9` "
        "commits every token of at least that confidence in each pass; `4 tokens a pass` and `one token a pass` commit "
        "that many.",
        "No sample was seen in training. Numbers and places are drawn anew; RULER's noise is the same sentences in "
        "both, its essays come from another generator (`tasks/prose.py`). A tenth of RULER's keys never occurs in "
        "training; the benchmark draws from all. Word problems are held out by a hash of their wording, so that the "
        "same sum may occur with other names; the documents' things are held out by hash, too. But what the later "
        "runs trained was chosen by what earlier weights answered wrong at 4k and 32k, on the samples measured here: "
        "they were not set aside until the end.",
        "`single_3` and `multikey_3` ask for UUIDs: the model, trained on numbers of seven digits alone, answers with "
        "such a number.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    training = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    try:
        text = card(training, *(measured(args.results / name) for name in ("model", "reference")))
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    (FOLDER / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
