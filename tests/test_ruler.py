"""RULER samples: exact length, spans, independence of order, and clear errors."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from ruler_codecs import TEMPLATE, BpeCodec, RegexCodec, leading_space_codec, word_codec

from dllm_bench.errors import ChoiceError, UserError
from dllm_bench.options import make_options
from dllm_bench.running.task import TASKS
from dllm_bench.tasks import ruler_prompt
from dllm_bench.tasks.ruler import FILL, RulerNiah, RulerOptions
from dllm_bench.tasks.ruler_prompt import NOISE, SETTINGS
from dllm_bench.tasks.ruler_text import load_corpus

SUBSETS = tuple(SETTINGS)
CODECS = {"bpe": BpeCodec, "word": word_codec, "leading_space": leading_space_codec}
NEEDLE = re.compile(r"One of the special magic (\w+) for ([^:]+) is: ([0-9a-f-]+)\.")


def check(task: RulerNiah, sample) -> str:
    """Everything that holds for each sample; returns its text."""
    codec = task.codec
    ctx = sample.nominal_ctx
    assert FILL * ctx <= sample.actual_ctx <= ctx, sample.meta
    assert sample.meta["fill"] == sample.actual_ctx / ctx
    text = codec.decode(sample.prompt_ids)
    assert len(sample.spans["needle"]) == len(sample.references) == len(sample.meta["needle_depths"])
    (question, end) = sample.spans["question"][0]
    assert end == len(sample.prompt_ids)
    assert codec.decode(sample.prompt_ids[question:end]).strip().startswith("What ")
    keys = []
    for reference, (start, stop) in zip(sample.references, sample.spans["needle"], strict=True):
        found = NEEDLE.fullmatch(codec.decode(sample.prompt_ids[start:stop]).strip())
        assert found and found[3] == reference
        assert text.count(reference) == 1
        keys.append(found[2])
    query = text[text.rindex("special magic ") :]
    assert all(key in query for key in keys)
    return text


@pytest.mark.parametrize("template", [("", ""), TEMPLATE], ids=["bare", "template"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("subset", SUBSETS)
def test_samples_fill_their_length(subset, codec, template):
    task = RulerNiah(CODECS[codec](template))
    for ctx in (256, 300, 777, 1024, 4096):
        if ctx >= task.minimum(subset, 128):
            for index in range(3):
                check(task, task.sample(subset, index, ctx=ctx, gen_length=128, seed=1))
    for index in range(8):
        check(task, task.sample(subset, index, ctx=450 + 11 * index, gen_length=16, seed=2))


@pytest.mark.parametrize("subset", SUBSETS)
@pytest.mark.parametrize("ctx", [32768, 131072])
def test_long_samples_fill_their_length(subset, ctx):
    task = RulerNiah(word_codec(TEMPLATE))
    check(task, task.sample(subset, 0, ctx=ctx, gen_length=128, seed=0))


@pytest.mark.parametrize("subset", ["single_1", "multivalue"])
def test_long_samples_of_a_real_tokenizer(subset):
    check(task := RulerNiah(BpeCodec(TEMPLATE)), task.sample(subset, 5, ctx=131072, gen_length=128, seed=0))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("subset", SUBSETS)
def test_ids_are_those_of_the_whole_text(subset, codec):
    """Put together from pieces or not: the ids are what the codec gives for the prompt that they spell."""
    codec = CODECS[codec](TEMPLATE)
    task = RulerNiah(codec)
    for index in range(1, 9):
        sample = task.sample(subset, index, ctx=1200, gen_length=128, seed=3)
        text = codec.decode(sample.prompt_ids)
        user, prefix = text.removeprefix(TEMPLATE[0]).split(TEMPLATE[1])
        assert list(sample.prompt_ids) == codec.wrap(user, prefix)


@pytest.mark.parametrize(("make", "whole"), [(word_codec, False), (leading_space_codec, True)])
def test_the_haystack_is_encoded_once_where_pieces_add_up(make, whole):
    task = RulerNiah(make(TEMPLATE))
    task.sample("single_2", 1, ctx=8192, gen_length=128, seed=0)
    task.codec.encoded_characters = 0
    for index in range(2, 6):
        task.sample("single_2", index, ctx=8192, gen_length=128, seed=0)
    assert (task.codec.encoded_characters > 4 * 20_000) == whole


WORDS = r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+[\r\n]*|\s"


def test_a_tokenizer_that_deceives_short_checks_gets_the_whole_encoding():
    """Tokens that depend on the far context: only comparing whole prompts can notice that."""

    class Nonlocal(RegexCodec):
        def encode(self, text):
            ids = super().encode(text)
            return [i + 10**6 if len(ids) > 2500 and k % 97 == 0 else i for k, i in enumerate(ids)]

        def decode(self, ids):
            return super().decode([i % 10**6 for i in ids])

    codec = Nonlocal(WORDS)
    task = RulerNiah(codec)
    for index in range(1, 7):  # a few samples are compared by themselves, so more than one is looked at
        sample = task.sample("single_1", index, ctx=4096, gen_length=128, seed=0)
        assert FILL * 4096 <= sample.actual_ctx <= 4096
        assert max(sample.prompt_ids) >= 10**6
        assert list(sample.prompt_ids) == codec.wrap(codec.decode(sample.prompt_ids))


def test_a_token_over_a_joint_in_some_samples_only():
    """A single token for the end of a line and the beginning of a needle whose key begins with a to f."""
    codec = RegexCodec(r" again\.\nOne of the special magic numbers for [a-f]|" + WORDS)
    task = RulerNiah(codec)
    long = 0
    for index in range(40):
        sample = task.sample("single_1", index, ctx=1024, gen_length=128, seed=0)
        assert list(sample.prompt_ids) == codec.wrap(codec.decode(sample.prompt_ids))
        [(start, stop)] = sample.spans["needle"]
        assert sample.references[0] in codec.decode(sample.prompt_ids[start:stop])
        long += codec.decode(sample.prompt_ids[start : start + 1]).startswith(" again.")
    assert 0 < long < 40
    assert all(task._filler.sound.values())  # so the sample's own joints must have told


@pytest.mark.parametrize("subset", SUBSETS)
def test_too_small_a_length_names_a_minimum_that_works(subset):
    task = RulerNiah(BpeCodec(TEMPLATE))
    with pytest.raises(UserError, match=rf"{subset} with a generation budget of 64: the minimum is \d+") as error:
        task.sample(subset, 0, ctx=100, gen_length=64, seed=0)
    minimum = int(str(error.value).split()[-1])
    for index in range(40):
        check(task, task.sample(subset, index, ctx=minimum, gen_length=64, seed=0))
    with pytest.raises(UserError, match=f"minimum is {minimum}"):
        task.sample(subset, 3, ctx=minimum - 1, gen_length=64, seed=0)


def test_samples_do_not_depend_on_order_or_global_state():
    codec = BpeCodec()
    asked = [(subset, index) for subset in SUBSETS for index in (0, 1, 7)]

    def make(order, state):
        random.seed(state)
        task = RulerNiah(codec)
        return {one: task.sample(*one, ctx=1024, gen_length=128, seed=5) for one in order}

    forward = make(asked, 1)
    before = random.getstate()
    assert make(asked[::-1], 2) == forward
    alone = RulerNiah(codec).sample("multikey_3", 7, ctx=1024, gen_length=128, seed=5)
    assert alone == forward["multikey_3", 7]
    random.seed(1)
    assert random.getstate() == before


def test_index_seed_and_length_each_change_the_sample():
    task = RulerNiah(BpeCodec())
    one = task.sample("single_1", 0, ctx=1024, gen_length=128, seed=0)
    others = [
        task.sample("single_1", 1, ctx=1024, gen_length=128, seed=0),
        task.sample("single_1", 0, ctx=1025, gen_length=128, seed=0),
        task.sample("single_1", 0, ctx=1024, gen_length=128, seed=1),
    ]
    assert len({sample.references for sample in [one, *others]}) == 4


def test_needles_are_the_same_for_every_tokenizer():
    """So that models can be compared sample by sample."""
    made = [RulerNiah(make()).sample("multiquery", 4, ctx=2048, gen_length=128, seed=0) for make in CODECS.values()]
    assert len({sample.references for sample in made}) == 1


@pytest.mark.parametrize("subset", ["single_1", "single_2", "multikey_2"])
def test_depths_are_roughly_uniform(subset):
    task = RulerNiah(word_codec())
    depths = [
        task.sample(subset, index, ctx=2048, gen_length=128, seed=0).meta["needle_depths"][0] for index in range(400)
    ]
    quarters = Counter(min(int(depth // 25), 3) for depth in depths)
    assert all(70 <= quarters[k] <= 130 for k in range(4)), quarters
    assert min(depths) < 5
    assert max(depths) > 90


def test_no_key_or_value_comes_twice():
    task = RulerNiah(word_codec())
    for subset, count in (("multikey_1", 4), ("multiquery", 4), ("multikey_3", 100), ("multikey_2", 300)):
        sample = task.sample(subset, 0, ctx=16384, gen_length=128, seed=0)
        found = NEEDLE.findall(task.codec.decode(sample.prompt_ids))
        assert len(found) >= count
        assert len({key for _, key, _ in found}) == len({value for _, _, value in found}) == len(found)
    sample = task.sample("multivalue", 0, ctx=16384, gen_length=128, seed=0)
    found = NEEDLE.findall(task.codec.decode(sample.prompt_ids))
    assert len({key for _, key, _ in found}) == 1
    assert len({value for _, _, value in found}) == len(found) == 4


def test_a_key_or_value_that_comes_again_is_drawn_again(monkeypatch):
    monkeypatch.setattr(ruler_prompt, "_draw", lambda kind, rng: str(int(rng.random() * 60)))
    setting = SETTINGS["multiquery"]
    for seed in range(20):
        needles = ruler_prompt.draw_needles(setting, random.Random(seed))
        assert len(needles.taken) == 8
        decoy = ruler_prompt.draw_decoys(setting, needles, random.Random(seed))
        found = [
            one
            for line in [*needles.sentences, decoy(20)] + [decoy(k) for k in range(20)]
            for one in NEEDLE.fullmatch(line).groups()[1:]
        ]
        assert len(set(found)) == len(found) == 8 + 42


def test_wording_and_layout():
    task = RulerNiah(BpeCodec())
    sample = task.sample("single_1", 2, ctx=600, gen_length=128, seed=0)
    head, *lines, question = check(task, sample).split("\n")
    assert head == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    [needle] = [line for line in lines if line not in (NOISE, lines[-1])]
    key = NEEDLE.fullmatch(needle)[2]
    assert NOISE.startswith(lines[-1])
    assert question == (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )


@pytest.mark.parametrize("subset", ["multikey_2", "multikey_3"])
def test_decoys_are_whole_and_noise_fills_the_rest(subset):
    task = RulerNiah(BpeCodec())
    _, *lines, _ = check(task, task.sample(subset, 1, ctx=600, gen_length=128, seed=0)).split("\n")
    assert all(NEEDLE.fullmatch(line) for line in lines[:-1])
    assert NEEDLE.fullmatch(lines[-1]) or " ".join([NOISE] * 9).startswith(lines[-1])


@pytest.mark.parametrize("codec", CODECS)
def test_user_text_of_any_kind(tmp_path, codec):
    text = tmp_path / "odd.txt"
    odd = "Größe {context} {0} zählt.\r\nA %s and a {query}!\r\n\r\n長い文章は読みにくい。次の文です。 Naïve 🙂 text? "
    text.write_bytes(b"\xef\xbb\xbf" + odd.encode() * 3)
    task = RulerNiah(CODECS[codec](TEMPLATE), RulerOptions(haystack=str(text)))
    for subset in ("single_2", "multikey_1"):
        for index in range(4):
            sample = task.sample(subset, index, ctx=900 + index, gen_length=128, seed=0)
            made = check(task, sample)
            assert "Größe {context} {0} zählt." in made
            assert "\r" not in made and "\ufeff" not in made
            assert sample.meta["haystack"].startswith("file:odd.txt:")
            assert sample.meta["splitter"] in ("regex", "punkt")


def test_text_that_is_too_short_begins_again(tmp_path):
    (tmp_path / "short.txt").write_text("Only one sentence stands here.", encoding="utf-8")
    task = RulerNiah(BpeCodec(), RulerOptions(haystack=str(tmp_path / "short.txt")))
    made = check(task, task.sample("single_2", 0, ctx=2048, gen_length=128, seed=0))
    assert made.count("Only one sentence stands here.") > 50


def test_text_without_sentence_ends_still_gives_depths(tmp_path):
    (tmp_path / "code.txt").write_text("word " * 20_000, encoding="utf-8")
    (tmp_path / "unbroken.txt").write_text("ab" * 20_000, encoding="utf-8")
    for name in ("code.txt", "unbroken.txt"):
        task = RulerNiah(BpeCodec(), RulerOptions(haystack=str(tmp_path / name)))
        made = [task.sample("single_2", index, ctx=4096, gen_length=128, seed=0) for index in range(12)]
        assert all(check(task, sample) for sample in made)
        assert len({sample.meta["needle_depths"][0] for sample in made}) > 4


def test_a_folder_is_read_in_order(tmp_path):
    for name, content in (("b.txt", "Second file."), ("a.md", "First file."), ("c.bin", "Not text.")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    task = RulerNiah(BpeCodec(), RulerOptions(haystack=str(tmp_path)))
    made = check(task, task.sample("multivalue", 0, ctx=1024, gen_length=128, seed=0))
    assert "First file. Second file. First file." in NEEDLE.sub("", made).replace("  ", " ")
    assert "Not text" not in made


def test_a_missing_haystack_names_the_nearest_file(tmp_path):
    (tmp_path / "essays.txt").write_text("Text.", encoding="utf-8")
    with pytest.raises(UserError, match=r"esays\.txt' does not exist: did you mean '.*essays\.txt'"):
        make_options(RulerOptions, {"haystack": str(tmp_path / "esays.txt")}, owner="ruler_niah")
    with pytest.raises(UserError, match="does not exist"):
        RulerNiah(BpeCodec(), RulerOptions(haystack=str(tmp_path / "no" / "file"))).sample(
            "single_2", 0, ctx=1024, gen_length=128, seed=0
        )


@pytest.mark.parametrize(("content", "message"), [(b" \r\n\t", "holds no text"), (b"ab\xff\xfe", "byte 2 is invalid")])
def test_unusable_haystacks_are_errors(tmp_path, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    task = RulerNiah(BpeCodec(), RulerOptions(haystack=str(tmp_path / "bad.txt")))
    with pytest.raises(UserError, match=message):
        task.sample("single_2", 0, ctx=1024, gen_length=128, seed=0)
    (tmp_path / "empty").mkdir()
    task = RulerNiah(BpeCodec(), RulerOptions(haystack=str(tmp_path / "empty")))
    with pytest.raises(UserError, match="has no text file"):
        task.sample("single_2", 0, ctx=1024, gen_length=128, seed=0)


def test_a_tokenizer_without_tokens_is_an_error_and_no_hang():
    class Mute(RegexCodec):
        def encode(self, text):
            return []

        def wrap(self, user, answer_prefix=""):
            return [1, 2, 3]

    with pytest.raises(UserError, match="gives no tokens"):
        RulerNiah(Mute("x")).sample("single_1", 0, ctx=1024, gen_length=128, seed=0)


def test_registry_options_and_names():
    assert TASKS.get("ruler_niah") is RulerNiah
    assert RulerNiah.subsets == SUBSETS and RulerNiah.default_subset == "single_1"
    task = RulerNiah(BpeCodec(), make_options(RulerOptions, {"compat": "lm_eval"}, owner="ruler_niah"))
    assert task.options.as_dict() == {"haystack": None, "compat": "lm_eval", "questions": 1}
    assert {task.budget(subset) for subset in SUBSETS} == {128}
    with pytest.raises(ChoiceError, match="did you mean 'multikey_3'"):
        task.sample("multikey3", 0, ctx=4096, gen_length=128, seed=0)
    with pytest.raises(UserError, match="needs a context length"):
        task.sample("single_1", 0, ctx=None, gen_length=128, seed=0)


# -- several questions to one haystack ------------------------------------------------------------------------------


def test_the_affix_is_everything_before_the_question():
    for codec in CODECS.values():
        task = RulerNiah(codec(TEMPLATE))
        for subset in SUBSETS:
            sample = task.sample(subset, 1, ctx=1200, gen_length=128, seed=0)
            [(start, stop)], [(question, _)] = sample.spans["affix"], sample.spans["question"]
            assert (start, stop) == (0, question)
            text = task.codec.decode(sample.prompt_ids[:stop])
            assert text.startswith(TEMPLATE[0] + SETTINGS[subset].head())
            assert "mentioned in the provided text" not in text


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("subset", "questions"), [("multikey_1", 4), ("multikey_2", 5), ("multikey_3", 2)])
def test_questions_share_a_haystack_to_the_token(subset, questions, codec):
    task = RulerNiah(CODECS[codec](TEMPLATE), RulerOptions(questions=questions))
    for ctx in (700, 2048):
        made = [task.sample(subset, index, ctx=ctx, gen_length=64, seed=3) for index in range(2 * questions)]
        for sample in made:
            assert sample.meta["questions"] == questions and 0.97 * ctx <= sample.actual_ctx <= ctx
            # the needle asked for stands where the span says, and its key in the question
            [(start, stop)], [reference] = sample.spans["needle"], sample.references
            found = NEEDLE.fullmatch(task.codec.decode(sample.prompt_ids[start:stop]).strip())
            assert found[3] == reference
            assert found[2] in task.codec.decode(sample.prompt_ids[sample.spans["question"][0][0] :])
            text = task.codec.decode(sample.prompt_ids)
            user, prefix = text.removeprefix(TEMPLATE[0]).split(TEMPLATE[1])
            assert list(sample.prompt_ids) == task.codec.wrap(user, prefix)
        groups = [made[:questions], made[questions:]]
        for group in groups:
            assert len({sample.prompt_ids[: sample.spans["affix"][0][1]] for sample in group}) == 1
            assert len({sample.references for sample in group}) == questions
            assert [sample.meta["question"] for sample in group] == list(range(questions))
        assert groups[0][0].prompt_ids != groups[1][0].prompt_ids


def test_questions_do_not_depend_on_order_nor_on_one_another():
    options = RulerOptions(questions=4)
    task = RulerNiah(BpeCodec(), options)
    ordered = [task.sample("multikey_1", index, ctx=1024, gen_length=64, seed=0) for index in range(8)]
    other = RulerNiah(BpeCodec(), options)
    mixed = {index: other.sample("multikey_1", index, ctx=1024, gen_length=64, seed=0) for index in (6, 1, 7, 3, 0)}
    assert all(mixed[index] == ordered[index] for index in mixed)
    assert other.sample("multikey_1", 3, ctx=1024, gen_length=64, seed=1) != ordered[3]
    assert other.sample("multikey_1", 3, ctx=1100, gen_length=64, seed=0) != ordered[3]


def test_the_first_question_asks_for_what_one_question_asks_for():
    alone = RulerNiah(BpeCodec()).sample("multikey_1", 2, ctx=1024, gen_length=64, seed=0)
    first = RulerNiah(BpeCodec(), RulerOptions(questions=2)).sample("multikey_1", 4, ctx=1024, gen_length=64, seed=0)
    assert alone.references == first.references and "questions" not in alone.meta


@pytest.mark.parametrize(
    ("subset", "questions", "message"),
    [
        ("single_2", 2, "keys for 1 question .* not for 2: nearest valid is questions=1; .*multikey_1, multikey_2 and"),
        ("multivalue", 3, "nearest valid is questions=1"),
        ("multiquery", 2, "nearest valid is questions=1"),
        ("multikey_1", 5, "keys for 4 questions .*nearest valid is questions=4; multikey_2 and multikey_3 allow 5"),
    ],
)
def test_more_questions_than_keys_are_refused(subset, questions, message):
    with pytest.raises(UserError, match=message):
        RulerNiah(BpeCodec(), RulerOptions(questions=questions)).budget(subset)


def test_questions_are_checked_with_the_other_options():
    with pytest.raises(UserError, match="nearest valid is questions=1"):
        make_options(RulerOptions, {"questions": "2", "compat": "lm_eval"}, owner="ruler_niah")
    with pytest.raises(UserError, match="nearest valid: 1"):
        make_options(RulerOptions, {"questions": "0"}, owner="ruler_niah")
    task = RulerNiah(BpeCodec(), RulerOptions(questions=40))
    least = task.minimum("multikey_3", 64)
    assert least > 40 * 30
    with pytest.raises(UserError, match=f"the minimum is {least}"):
        task.sample("multikey_3", 0, ctx=least - 1, gen_length=64, seed=0)
    assert task.sample("multikey_3", 39, ctx=least + 100, gen_length=64, seed=0).actual_ctx <= least + 100


def test_the_content_of_a_haystack_belongs_to_the_key(tmp_path):
    file, found = tmp_path / "hay.txt", []
    for text in ("Rain fell on the hill. It was late.", "Snow fell on the hill. It was late."):
        file.write_text(text, encoding="utf-8")
        load_corpus.cache_clear()
        found.append(RulerNiah(BpeCodec(), RulerOptions(haystack=str(file))).data("single_2"))
    assert all(name.startswith("file:hay.txt:") for name in found) and found[0] != found[1]
    assert RulerNiah(BpeCodec(), RulerOptions()).data("single_2") is None
