"""The word keys are wonderwords' list, and importing the task stays light."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from dllm_bench.tasks.words import WordPairs, single_words, word_pairs

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ruler" / "samples.json").read_text(encoding="utf-8"))


def test_the_list_is_identical():
    words = word_pairs()
    assert len(words) == GOLDEN["n_words"] == 6_171_620
    assert {key: words[int(key)] for key in GOLDEN["words_probe"]} == GOLDEN["words_probe"]
    digest = hashlib.sha256(words[0].encode())
    rest = islice(words, 1, None)
    while chunk := list(islice(rest, 100_000)):
        digest.update("".join(f"\n{word}" for word in chunk).encode())
    assert digest.hexdigest() == GOLDEN["words_sha256"]


def test_access_and_iteration_agree():
    words = word_pairs()
    wanted = {i: words[i] for i in range(0, len(words), 9_973)}
    assert {i: word for i, word in enumerate(words) if i % 9_973 == 0} == wanted


def test_the_list_is_a_sequence():
    words = word_pairs()
    assert words[-1] == words[len(words) - 1] == GOLDEN["words_probe"]["6171619"]
    assert words[2:0:-1] == [words[2], words[1]]
    for outside in (len(words), -len(words) - 1):
        with pytest.raises(IndexError):
            words[outside]


def test_families_of_hyphenated_adjectives_are_sorted_together():
    adjectives, nouns = ["blue", "blue-eyed", "blu", "red", "blue"], ["boy", "fox", "eyed-x", "zoo"]
    assert list(WordPairs(adjectives, nouns)) == sorted({f"{a}-{n}" for a in adjectives for n in nouns})


def test_single_words_are_all_three_lists():
    words = single_words()
    assert len(words) == 8166 and list(words) == sorted(set(words))
    assert {"aardvark", "quizzical", "yell"} <= set(words)


def test_import_and_first_use_load_nothing_heavy():
    code = (
        "import sys; from dllm_bench.running.task import TASKS; from dllm_bench.tasks.words import word_pairs;"
        "[TASKS.get(name) for name in TASKS.names() if name.startswith('ruler_')]; word_pairs()[5];"
        "heavy = {'torch','transformers','lm_eval','datasets','pandas','nltk','wonderwords','numpy','tokenizers'};"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
