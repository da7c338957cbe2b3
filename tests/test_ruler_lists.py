"""RULER's vt, cwe and fwe: exact length, and answers that follow from the prompt alone."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qa_files import write_folder
from ruler_codecs import TEMPLATE, BpeCodec, word_codec
from ruler_solvers import BUDGETS, CODECS, check, make

from dllm_bench.errors import ChoiceError, UserError
from dllm_bench.options import make_options
from dllm_bench.running.task import TASKS
from dllm_bench.tasks.draws import below, permuted, private_random, shuffled
from dllm_bench.tasks.ruler_cwe import RulerCwe
from dllm_bench.tasks.ruler_fwe import RulerFwe
from dllm_bench.tasks.ruler_vt import RulerVt

LISTS = (RulerVt, RulerCwe, RulerFwe)


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
    assert (
        task.size(task.default_subset) is None
        and task.data(task.default_subset) is None
        and task.fetch(task.default_subset) == []
    )
    with pytest.raises(ChoiceError, match=f"did you mean '{task.default_subset}'"):
        task.budget(task.default_subset + "x")
    with pytest.raises(ChoiceError):
        task.sample("no", 0, ctx=4096, gen_length=32, seed=0)
    with pytest.raises(UserError, match=f"{cls.name} needs a context length"):
        task.sample(task.default_subset, 0, ctx=None, gen_length=32, seed=0)


PINS = {
    "ruler_niah": "ec626bb916962580",
    "ruler_vt": "eb7f5c009ec640d0",
    "ruler_cwe": "e5d8138868d97cb0",
    "ruler_fwe": "fd3b4517e5999c5c",
    "ruler_qa": "8fc51a810bc80e83",
}


@pytest.mark.parametrize("name", PINS)
def test_samples_are_pinned(name, tmp_path):
    """Other samples under the same version would mix with the rows of old ones: raise the task's version with them."""
    cls = TASKS.get(name)
    options = {"data": str(write_folder(tmp_path))} if name == "ruler_qa" else {}
    task = cls(word_codec(TEMPLATE), make_options(cls.options_class, options, owner=name))
    digest = hashlib.sha256()
    for subset in cls.subsets:
        for index, ctx in ((0, 1024), (5, 2000), (3, 4096)):
            sample = task.sample(subset, index, ctx=ctx, gen_length=64, seed=7)
            digest.update(task.codec.decode(sample.prompt_ids).encode())
            digest.update(repr((sample.references, sorted(sample.spans.items()))).encode())
    assert task.version == 1
    assert digest.hexdigest()[:16] == PINS[name]


def test_permutations_are_complete_even_and_pinned():
    assert sorted(permuted(100, private_random("a"))) == list(range(100))
    assert list(permuted(0, private_random("a"))) == []
    first = Counter(next(permuted(4, private_random("p", k))) for k in range(4000))
    last = Counter(shuffled("abcd", private_random("p", k))[-1] for k in range(4000))
    assert all(900 <= n <= 1100 for n in [*first.values(), *last.values()])
    assert {below(3, private_random("b", k)) for k in range(50)} == {0, 1, 2}
    # other permutations would change every sample: raise the tasks' versions with them
    assert list(permuted(8, private_random("pinned"))) == [7, 3, 4, 6, 5, 2, 0, 1]
