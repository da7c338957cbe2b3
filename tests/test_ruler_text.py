"""Haystack texts, sentence splitting, and sizing."""

from __future__ import annotations

import re
import sys
import types

import pytest
from ruler_codecs import word_codec

from dllm_bench.errors import UserError
from dllm_bench.tasks import ruler_text
from dllm_bench.tasks.fitting import fit
from dllm_bench.tasks.prose import SENTENCES, built_in_sentences
from dllm_bench.tasks.ruler import RulerNiah, RulerOptions
from dllm_bench.tasks.ruler_text import Corpus, load_corpus, sentence_splitter, split_sentences


def test_the_built_in_text_is_plain_distinct_and_pinned():
    sentences = built_in_sentences()
    assert len(set(sentences)) == len(sentences) == SENTENCES >= 3000
    assert all(re.fullmatch(r"[A-Z][A-Za-z ,]+\.", sentence) for sentence in sentences)
    assert not re.search(r"magic|special|hidden|memorize", " ".join(sentences), re.IGNORECASE)
    corpus = load_corpus(None)
    # another text would change every essay sample: raise the task's version with it
    assert corpus.name == "built-in:d3c37cce"
    assert corpus.splitter == "known"
    assert split_sentences(corpus.text) == list(sentences)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ('He said "go." Then (he left.) Good…  Yes', ['He said "go."', "Then (he left.)", "Good…", "Yes"]),
        ("It costs 3.50 e.g. here. 12 of them.", ["It costs 3.50 e.g. here.", "12 of them."]),
        ("文です。次です！「終わり。」最後", ["文です。", "次です！", "「終わり。」", "最後"]),
        ("", []),
        (" no end ", ["no end"]),
    ],
)
def test_the_regular_expression_splits_sentences(text, sentences):
    assert split_sentences(text) == sentences


def test_punkt_is_used_where_its_data_are_installed(monkeypatch, tmp_path):
    def find(name):
        if missing:
            raise LookupError(name)
        return name

    missing = True
    nltk = types.ModuleType("nltk")
    nltk.data = types.SimpleNamespace(find=find)
    nltk.sent_tokenize = lambda text: text.split("|")
    nltk.download = lambda *args: pytest.fail("nothing may be downloaded")
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    assert sentence_splitter() == ("regex", split_sentences)
    missing = False
    (tmp_path / "text.txt").write_text("a|b|c", encoding="utf-8")
    corpus = load_corpus(str(tmp_path / "text.txt"))
    assert (corpus.splitter, corpus.sentences) == ("punkt", ("a", "b", "c"))


def test_the_hub_text_is_joined_as_in_lm_eval(monkeypatch):
    asked = []

    def hub_rows(name, split):
        asked.append((name, split))
        return {"text": ["First essay.\n\nIts end. ", "Second  essay."]}

    monkeypatch.setattr(ruler_text, "hub_rows", hub_rows)
    load_corpus.cache_clear()
    corpus = load_corpus("hub")
    load_corpus.cache_clear()
    assert asked == [("baber/paul_graham_essays", "train")]
    assert isinstance(corpus, Corpus)
    assert corpus.text == "First essay. Its end. Second essay."
    assert corpus.name.startswith("hub:baber/paul_graham_essays:")


def test_the_hub_text_is_named_in_the_key_and_by_fetch(monkeypatch):
    monkeypatch.setattr(ruler_text, "hub_rows", lambda name, split: {"text": ["First essay. Its end."]})
    load_corpus.cache_clear()
    task = RulerNiah(word_codec(), RulerOptions(haystack="hub"))
    [line] = task.fetch("single_2")
    data = task.data("single_2")
    load_corpus.cache_clear()
    assert re.fullmatch(r"hub:baber/paul_graham_essays:[0-9a-f]{8}:(regex|punkt)", data)
    assert line.startswith("hub:baber/paul_graham_essays: 21 bytes in 2 sentences") and data.split(":")[2] in line
    assert task.fetch("single_1") == [] and RulerNiah(word_codec()).fetch("single_2") == []
    assert RulerNiah(word_codec()).data("single_2") is None


def test_a_hub_that_cannot_be_reached_is_a_user_error(monkeypatch):
    def hub_rows(name, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(ruler_text, "hub_rows", hub_rows)
    load_corpus.cache_clear()
    with pytest.raises(UserError, match=r"paul_graham_essays, which could not be loaded \(no network\)"):
        load_corpus("hub")


@pytest.mark.parametrize("unit", [1, 7, 30, 400])
@pytest.mark.parametrize("guess", [0, 3, 10_000])
def test_fit_ends_within_its_bounds(unit, guess):
    """Words of up to nine letters, one token a letter: whole units where they suffice, else words, else letters."""
    tried = []

    def size(n, rest):
        tried.append(n)
        return 50 + n * unit + len(rest.replace(" ", ""))

    spare = " ".join(["abc", "defghijkl"] * unit)
    for limit in (50, 51, 57, 100, 449, 1000):
        made = fit(size, lambda n, tokens: spare, guess=guess, limit=limit, least=limit - 2)
        assert made is not None
        assert limit - 2 <= size(*made) <= limit
    assert fit(size, lambda n, tokens: spare, guess=guess, limit=49, least=48) is None
    assert len(tried) < 400


def test_fit_ends_where_counts_do_not_grow():
    assert fit(lambda n, rest: 10, lambda n, tokens: "some words", guess=0, limit=100, least=98) is not None
