"""RULER's common and frequent words: wording, frequencies, and options."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from ruler_codecs import TEMPLATE, BpeCodec, word_codec
from ruler_solvers import CODECS, HEAD, check, listed, make

from dllm_bench.errors import UserError
from dllm_bench.options import make_options
from dllm_bench.tasks.ruler_cwe import CweOptions, RulerCwe
from dllm_bench.tasks.ruler_fwe import FweOptions, RulerFwe, zeta
from dllm_bench.tasks.words import single_words


@pytest.mark.parametrize(("ctx", "often", "seldom", "example"), [(4095, 6, 1, (20, 3, 1)), (4096, 30, 3, (40, 10, 3))])
def test_cwe_frequencies_are_nvidias(ctx, often, seldom, example):
    task = RulerCwe(word_codec())
    sample = make(task, 1, ctx)
    text = check(task, sample)
    parts = text.split(f"{HEAD}Memorize the ones that appear most often.\n")
    assert parts[0] == "" and len(parts) == 3
    counts = Counter(listed(parts[2].split("\nQuestion:")[0]))
    assert all(counts[word] == often for word in sample.references)
    rest = Counter(count for word, count in counts.items() if word not in sample.references)
    assert rest[seldom] >= len(counts) - 10 - 2 and max(rest) == seldom
    assert sample.meta == {
        "fill": sample.meta["fill"],
        "words": len(counts),
        "entries": sum(counts.values()),
        "freq_cw": often,
        "freq_ucw": seldom,
    }
    assert set(counts) <= set(single_words())
    # the example
    context, answer = parts[1].split("\nQuestion: What are the 10 most common words in the above list? Answer: ")
    words, common, uncommon = example
    solved = listed(answer.removeprefix("The top 10 words that appear most often in the list are: ").strip())
    assert Counter(Counter(listed(context)).values()) == {common: 10, uncommon: words - 10}
    assert all(Counter(listed(context))[word] == common for word in solved) and len(set(solved)) == 10
    assert text.endswith(
        "\nQuestion: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "options", [{"num_cw": 3}, {"shots": 0}, {"shots": 2}, {"freq_cw": 5, "freq_ucw": 4}, {"num_cw": 1, "shots": 0}]
)
def test_cwe_options(codec, options):
    task = RulerCwe(CODECS[codec](TEMPLATE), make_options(CweOptions, options, owner="ruler_cwe"))
    count = options.get("num_cw", 10)
    for ctx in (task.minimum("cwe", 120), 2500, 6000):
        if ctx >= task.minimum("cwe", 120, ctx):
            sample = make(task, 2, ctx)
            text = check(task, sample, count)
            assert text.count(HEAD) == 1 + options.get("shots", 1)
            assert f"What are the {count} most common words" in text and f"The top {count} words" in text
            assert "freq_cw" not in options or (sample.meta["freq_cw"] == 5 and sample.meta["freq_ucw"] == 4)


def test_cwe_has_words_for_any_length():
    """Beyond the list of single words come pairs of them, all different."""
    task = RulerCwe(word_codec(), CweOptions(freq_ucw=1, freq_cw=12))
    sample = make(task, 0, 80_000)
    check(task, sample)
    assert sample.meta["words"] > len(single_words())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freq_ucw": 7}, "nearest valid: freq_cw=8.* 6 times and others 7 times for contexts below 4096"),
        ({"freq_cw": 3}, "nearest valid: freq_cw=4"),
        ({"freq_cw": 4, "freq_ucw": 4}, "nearest valid: freq_cw=5"),
        ({"num_cw": 20}, "nearest valid: 19"),
        ({"num_cw": 0}, "nearest valid: 1"),
        ({"words": 3}, "unknown option of ruler_cwe 'words'"),
    ],
)
def test_cwe_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        make_options(CweOptions, options, owner="ruler_cwe")


def test_cwe_is_larger_from_4096_tokens_on():
    task = RulerCwe(BpeCodec(TEMPLATE))
    small, large = task.minimum("cwe", 120), task.minimum("cwe", 120, 4096)
    assert small < 4096 < large
    check(task, make(task, 0, 4095))
    with pytest.raises(UserError, match=f"the minimum is {large}"):
        make(task, 0, 4096)
    check(task, make(task, 0, large))


# -- frequent words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.2, 2.0, 3.5])
def test_fwe_frequencies_follow_the_zeta_distribution(alpha):
    task = RulerFwe(word_codec(), FweOptions(alpha=alpha))
    sample = make(task, 0, 16384)
    text = check(task, sample)
    coded = re.search(r"coded words\. (.*)\nQuestion:", text)[1].split(" ")
    counts = [count for _, count in Counter(coded).most_common()]
    assert Counter(coded).most_common(1)[0][0] == "..."
    draws = counts[1] * 2**alpha * zeta(alpha)
    for rank, count in enumerate(counts[1:9], 2):
        assert abs(count - draws / zeta(alpha) / rank**alpha) <= 2
    assert len(counts) <= 16384 // 50
    assert all(re.fullmatch(r"[a-z]{6}|\.+", word) for word in coded)


def test_fwe_wording():
    task = RulerFwe(BpeCodec())
    text = check(task, make(task, 1, 1000))
    assert text.startswith(
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. "
    )
    assert text.endswith(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )


@pytest.mark.parametrize("options", [{"alpha": 1.01}, {"alpha": 4.0}, {"coded_wordlen": 12}, {"vocab_size": 4}])
def test_fwe_options(options):
    task = RulerFwe(word_codec(TEMPLATE), make_options(FweOptions, options, owner="ruler_fwe"))
    least = task.minimum("fwe", 50)
    for ctx in (least, least + 100, 3 * least):
        sample = make(task, 3, ctx)
        check(task, sample)
        assert all(len(word) == options.get("coded_wordlen", 6) for word in sample.references)
    if "vocab_size" in options:
        assert sample.meta["vocabulary"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1}, "above 1.0"),
        ({"alpha": 5}, "nearest valid: 4.0"),
        ({"vocab_size": 3}, "nearest valid: 4"),
        ({"coded_wordlen": 2}, "nearest valid: 4"),
    ],
)
def test_fwe_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        make_options(FweOptions, options, owner="ruler_fwe")


def test_zeta():
    """Values from tables."""
    assert zeta(2.0) == pytest.approx(1.6449340668482264, rel=1e-9)
    assert zeta(4.0) == pytest.approx(1.0823232337111382, rel=1e-9)
    assert zeta(1.5) == pytest.approx(2.6123753486854883, rel=1e-9)
    assert zeta(1.01) == pytest.approx(100.5779433384968, rel=1e-9)
