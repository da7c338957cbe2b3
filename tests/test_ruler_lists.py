"""RULER's vt, cwe and fwe: exact length, and answers that follow from the prompt alone."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruler_codecs import TEMPLATE, BpeCodec, RegexCodec, leading_space_codec, word_codec

from dllm_bench.errors import ChoiceError, UserError
from dllm_bench.options import make_options
from dllm_bench.running.task import TASKS, Task
from dllm_bench.tasks.draws import below, permuted, private_random, shuffled
from dllm_bench.tasks.fitting import FILL
from dllm_bench.tasks.ruler_cwe import CweOptions, RulerCwe
from dllm_bench.tasks.ruler_fwe import FweOptions, RulerFwe, zeta
from dllm_bench.tasks.ruler_prompt import NOISE
from dllm_bench.tasks.ruler_vt import RulerVt, VtOptions
from dllm_bench.tasks.words import single_words

CODECS = {"bpe": BpeCodec, "word": word_codec, "leading_space": leading_space_codec}
LISTS = (RulerVt, RulerCwe, RulerFwe)
BUDGETS = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}
INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
HEAD = "Below is a numbered list of words. In these words, some appear more often than others. "


def make(task: Task, index: int, ctx: int, *, gen_length: int | None = None, seed: int = 0):
    gen_length = BUDGETS[task.name] if gen_length is None else gen_length
    return task.sample(task.default_subset, index, ctx=ctx, gen_length=gen_length, seed=seed)


def solve_vt(text: str) -> set[str]:
    """Follows the assignments of the last problem in the text."""
    *_, problem = text.split(INSTRUCTION)
    value = re.search(r"assigned the value (\d+) in the text above", problem)[1]
    known = {value}
    # assignments may be read in any order: once more as long as something is found
    pairs = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+) ?$", problem, re.MULTILINE)
    while grown := {name for name, source in pairs if source in known} - known:
        known |= grown
    return known - {value}


def listed(problem: str) -> list[str]:
    numbers, words = zip(*re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", problem), strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    return list(words)


def solve_cwe(text: str, count: int) -> set[str]:
    """Counts the words of the last list in the text."""
    *_, problem = text.split("Memorize the ones that appear most often.\n")
    counts = Counter(listed(problem.split("\nQuestion:")[0])).most_common()
    assert len(counts) == count or counts[count - 1][1] > counts[count][1]
    return {word for word, _ in counts[:count]}


def solve_fwe(text: str) -> set[str]:
    """Counts the coded words; the third must come more often than the fourth."""
    coded = re.search(r"appeared coded words\. (.*)\nQuestion:", text)[1].split(" ")
    counts = Counter(word for word in coded if set(word) != {"."}).most_common()
    assert len(counts) == 3 or counts[2][1] > counts[3][1]
    return {word for word, _ in counts[:3]}


def check(task: Task, sample, count: int = 10) -> str:
    """Everything that holds for each sample; returns its text."""
    codec, ctx = task.codec, sample.nominal_ctx
    assert FILL * ctx <= sample.actual_ctx <= ctx, sample.meta
    assert sample.meta["fill"] == sample.actual_ctx / ctx
    text = codec.decode(sample.prompt_ids)
    [(question, end)], [affix] = sample.spans["question"], sample.spans["affix"]
    assert end == len(sample.prompt_ids) and affix == (0, question)
    assert codec.decode(sample.prompt_ids[question:end]).strip().startswith("Question: ")
    solved = {
        "ruler_vt": solve_vt,
        "ruler_cwe": lambda text: solve_cwe(text, count),
        "ruler_fwe": solve_fwe,
    }[task.name](text)
    assert set(sample.references) == solved and len(sample.references) == len(solved)
    assert task.score(sample, f"They are {', '.join(solved)}.") == 1.0
    return text


@pytest.mark.parametrize("template", [("", ""), TEMPLATE], ids=["bare", "template"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cls", LISTS)
def test_samples_fill_their_length_and_can_be_solved(cls, codec, template):
    task = cls(CODECS[codec](template))
    for ctx in (256, 300, 777, 1300, 4096, 5000):
        if ctx >= task.minimum(task.default_subset, task.tokens, ctx):
            for index in range(3):
                check(task, make(task, index, ctx, seed=1))
    least = task.minimum(task.default_subset, 16)
    for index in range(12):
        check(task, make(task, index, least + 7 * index, gen_length=16, seed=2))


@pytest.mark.parametrize("cls", LISTS)
@settings(max_examples=15, deadline=None)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    more=st.integers(0, 3000),
    gen_length=st.integers(1, 200),
    seed=st.integers(0, 1 << 40),
    index=st.integers(0, 10_000),
)
def test_any_length_seed_and_budget(cls, codec, more, gen_length, seed, index):
    task = cls(CODECS[codec](TEMPLATE))
    ctx = task.minimum(task.default_subset, gen_length) + more
    ctx = max(ctx, task.minimum(task.default_subset, gen_length, ctx))
    check(task, make(task, index, ctx, gen_length=gen_length, seed=seed))


@pytest.mark.parametrize("cls", LISTS)
def test_long_samples(cls):
    task = cls(word_codec(TEMPLATE))
    for ctx in (32768, 131072):
        check(task, make(task, 0, ctx))


@pytest.mark.parametrize("cls", LISTS)
def test_ids_are_those_of_the_whole_text(cls):
    codec = BpeCodec(TEMPLATE)
    task = cls(codec)
    for index in range(4):
        sample = make(task, index, 1800)
        user, prefix = codec.decode(sample.prompt_ids).removeprefix(TEMPLATE[0]).split(TEMPLATE[1])
        assert list(sample.prompt_ids) == codec.wrap(user, prefix)


@pytest.mark.parametrize("cls", LISTS)
def test_samples_do_not_depend_on_order_or_global_state(cls):
    codec = BpeCodec()
    asked = [(index, ctx) for ctx in (1500, 5200) for index in (0, 1, 7)]

    def made(order, state):
        random.seed(state)
        task = cls(codec)
        return {one: make(task, *one, seed=5) for one in order}

    forward = made(asked, 1)
    before = random.getstate()
    assert made(asked[::-1], 2) == forward
    random.seed(1)
    assert random.getstate() == before
    assert make(cls(codec), 7, 1500, seed=5) == forward[7, 1500]
    others = [make(cls(codec), 0, 1500, seed=6), forward[1, 1500], forward[0, 5200], make(cls(codec), 0, 1501, seed=5)]
    assert len({sample.references for sample in [forward[0, 1500], *others]}) == 5


@pytest.mark.parametrize("cls", LISTS)
def test_answers_are_the_same_for_every_tokenizer(cls):
    made = [make(cls(codec()), 4, 6000) for codec in CODECS.values()]
    assert len({sample.references for sample in made}) == 1


@pytest.mark.parametrize("cls", LISTS)
def test_too_small_a_length_names_a_minimum_that_works(cls):
    task = cls(BpeCodec(TEMPLATE))
    subset = task.default_subset
    with pytest.raises(
        UserError, match=rf"too small for {task.name} {subset} with a .* 64: the minimum is \d+"
    ) as error:
        make(task, 0, 100, gen_length=64)
    least = int(str(error.value).split()[-1])
    for index in range(30):
        check(task, make(task, index, least, gen_length=64))
    with pytest.raises(UserError, match=f"minimum is {least}"):
        make(task, 3, least - 1, gen_length=64)


@pytest.mark.parametrize("cls", LISTS)
def test_contract(cls):
    assert TASKS.get(cls.name) is cls
    task = cls(BpeCodec())
    assert task.budget(task.default_subset) == BUDGETS[task.name]
    assert task.size(task.default_subset) is None and task.data() is None and task.fetch(task.default_subset) == []
    with pytest.raises(ChoiceError, match=f"did you mean '{task.default_subset}'"):
        task.budget(task.default_subset + "x")
    with pytest.raises(ChoiceError):
        task.sample("no", 0, ctx=4096, gen_length=32, seed=0)
    with pytest.raises(UserError, match=f"{cls.name} needs a context length"):
        task.sample(task.default_subset, 0, ctx=None, gen_length=32, seed=0)


# -- variable tracking ----------------------------------------------------------------------------------------------


def test_vt_wording_example_and_spans():
    codec = BpeCodec()
    task = RulerVt(codec)
    sample = make(task, 2, 2048)
    text = check(task, sample)
    example, problem = text.split(INSTRUCTION)[1:]
    value = re.search(r"value (\d+) in", problem)[1]
    names = sample.references
    assert len(names) == 5 and all(re.fullmatch(r"[A-Z]{5}", name) for name in names)
    assert 10_000 <= int(value) <= 99_998
    assert problem.endswith(
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are: "
    )
    body, _ = problem.split("\nQuestion")
    assert set(body.split("\n")) - {NOISE} == {f"VAR {names[0]} = {value}"} | {
        f"VAR {later} = VAR {former} " for former, later in pairwise(names)
    } | ({body.split("\n")[-1]} if sample.meta["cut_unit"] else set())
    # each span is the line that assigns its variable, and the chain stands in its order
    assert list(sample.spans["needle"]) == sorted(sample.spans["needle"])
    for name, (start, end) in zip(names, sample.spans["needle"], strict=True):
        assert codec.decode(sample.prompt_ids[start:end]).startswith(f"VAR {name} = ")
    assert sample.meta["needle_depths"] == sorted(sample.meta["needle_depths"])
    # the example is solved, and has up to 500 tokens without its answer
    question, answer = example.rsplit("they are: ", 1)
    assert answer.endswith("\n\n")
    assert set(answer.split()) == solve_vt(INSTRUCTION + question) and all(len(name) == 3 for name in answer.split())
    unsolved = INSTRUCTION + question + "they are: "
    line = len(codec.encode(NOISE + "\n"))
    assert 500 - line - 8 <= len(codec.encode(unsolved)) <= 500 + 8


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("options", [{"chains": 3, "hops": 2}, {"chains": 2, "hops": 12}, {"shots": 0}, {"hops": 1}])
def test_vt_options(codec, options):
    chosen = make_options(VtOptions, options, owner="ruler_vt")
    task = RulerVt(CODECS[codec](TEMPLATE), chosen)
    for index in range(4):
        sample = make(task, index, 4000)
        text = check(task, sample)
        assert len(sample.references) == chosen.hops + 1 == len(sample.spans["needle"])
        assert text.count(INSTRUCTION) == 1 + chosen.shots
        problem = text.split(INSTRUCTION)[-1]
        assert len(re.findall(r"^VAR .* = \d+$", problem, re.MULTILINE)) == chosen.chains
        assert f", {chosen.hops + 1} variables" in problem


def test_vt_places_are_uniform_and_chains_are_mixed():
    task = RulerVt(word_codec(), VtOptions(chains=2, hops=3, shots=0))
    depths, mixed = [], 0
    for index in range(300):
        sample = make(task, index, 1500)
        depths += sample.meta["needle_depths"]
        order = re.findall(r"^VAR (\w+) = ", task.codec.decode(sample.prompt_ids), re.MULTILINE)
        mixed += [name in sample.references for name in order] not in (
            [True] * 4 + [False] * 4,
            [False] * 4 + [True] * 4,
        )
    quarters = Counter(min(int(depth // 25), 3) for depth in depths)
    assert all(230 <= quarters[k] <= 370 for k in range(4)), quarters
    assert mixed > 250


def test_vt_with_a_token_over_a_joint():
    """A single token for the end of a line of noise and an assignment of some variables."""
    codec = RegexCodec(r" again\.\nVAR [A-M]| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s")
    task = RulerVt(codec)
    for index in range(20):
        sample = make(task, index, 1100)
        check(task, sample)
        assert list(sample.prompt_ids) == codec.wrap(codec.decode(sample.prompt_ids))
        for name, (start, end) in zip(sample.references, sample.spans["needle"], strict=True):
            assert f"{name[1:]} = " in codec.decode(sample.prompt_ids[start:end])


# -- common words ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("options", "message"),
    [({"chains": 0}, "nearest valid: 1"), ({"hops": 65}, "nearest valid: 64"), ({"shots": 2}, "1")],
)
def test_vt_options_out_of_range(options, message):
    with pytest.raises(UserError, match=message):
        make_options(VtOptions, options, owner="ruler_vt")


def test_zeta():
    """Values from tables."""
    assert zeta(2.0) == pytest.approx(1.6449340668482264, rel=1e-9)
    assert zeta(4.0) == pytest.approx(1.0823232337111382, rel=1e-9)
    assert zeta(1.5) == pytest.approx(2.6123753486854883, rel=1e-9)
    assert zeta(1.01) == pytest.approx(100.5779433384968, rel=1e-9)


# -- draws ----------------------------------------------------------------------------------------------------------


def test_permutations_are_complete_even_and_pinned():
    assert sorted(permuted(100, private_random("a"))) == list(range(100))
    assert list(permuted(0, private_random("a"))) == []
    first = Counter(next(permuted(4, private_random("p", k))) for k in range(4000))
    last = Counter(shuffled("abcd", private_random("p", k))[-1] for k in range(4000))
    assert all(900 <= n <= 1100 for n in [*first.values(), *last.values()])
    assert {below(3, private_random("b", k)) for k in range(50)} == {0, 1, 2}
    # other permutations would change every sample: raise the tasks' versions with them
    assert list(permuted(8, private_random("pinned"))) == [7, 3, 4, 6, 5, 2, 0, 1]
