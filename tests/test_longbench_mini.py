"""The mini sets of longbench: filled to a length, the answer in one known place."""

from __future__ import annotations

import gzip
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from longbench_data import mini_rows, row, write, write_mini
from ruler_codecs import BpeCodec, leading_space_codec, word_codec

from dllm_bench.errors import UserError
from dllm_bench.options import make_options
from dllm_bench.running.task import Sample
from dllm_bench.tasks.longbench import LongBench, LongBenchOptions
from dllm_bench.tasks.longbench_data import built_in
from dllm_bench.tasks.longbench_mini import MINI, MiniSource

TEMPLATE = ("<user>\n", "</user>\n<assistant>\n")
CODECS = {"bpe": BpeCodec, "words": word_codec, "spaces": leading_space_codec}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mini(tmp_path_factory.mktemp("mini"))


def task(folder: Path, codec: Any = None) -> LongBench:
    options = make_options(LongBenchOptions, {"data": str(folder)}, owner="longbench")
    return LongBench(codec or BpeCodec(TEMPLATE), options)


def sample(made: LongBench, subset: str, index: int = 0, ctx: int | None = None, seed: int = 0) -> Sample:
    return made.sample(subset, index, ctx=ctx, gen_length=32, seed=seed)


def paragraphs(text: str) -> list[str]:
    """Those of the context: without the instruction line and all from the question on."""
    return text.split("\n\n")[1:-1]


@pytest.mark.parametrize("subset", MINI)
def test_an_item_as_it_is(subset: str, folder: Path) -> None:
    made = task(folder)
    for index, item in enumerate(mini_rows(subset)):
        one = sample(made, subset, index)
        before, after = MINI[subset].prompt.split("{context}")
        user = before + item["context"] + after.replace("{input}", item["input"])
        assert list(one.prompt_ids) == made.codec.wrap(user, item["answer_prefix"])
        assert one.references == tuple(item["answers"]) and one.nominal_ctx is None and "fill" not in one.meta
        assert one.meta["original_tokens"] == len(one.prompt_ids) and one.meta["truncated"] is False
    assert made.default_ctx(subset, 4096) is None and made.default_ctx("hotpotqa", 4096) == 4096


@pytest.mark.parametrize("template", [("", ""), TEMPLATE], ids=["bare", "chat"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("subset", MINI)
def test_filled_to_the_length(subset: str, codec: str, template: tuple[str, str], folder: Path) -> None:
    made = task(folder, CODECS[codec](template))
    for index, ctx in enumerate((384, 511, 1024, 3000)):
        one = sample(made, subset, index, ctx)
        assert 0.98 * ctx <= one.actual_ctx <= ctx and one.meta["fill"] == one.actual_ctx / ctx
        text = made.codec.decode(one.prompt_ids)
        other = task(folder, CODECS[codec](template))
        again = sample(other, subset, index, ctx)
        assert other.codec.decode(again.prompt_ids) == text and (again.meta, again.spans) == (one.meta, one.spans)
        item = mini_rows(subset)[index]
        joint = "" if template[1] else " "
        assert text.endswith(item["input"] + template[1] + joint + item["answer_prefix"])
        [(first, last)] = one.spans["needle"]
        key = re.findall(r"the ([a-z]+ [a-z]+)", item["input"])[0]
        found = paragraphs(text)
        assert len(found) == one.meta["paragraphs"] + one.meta["cut_unit"]
        place = one.meta["answer_paragraph"]
        span = made.codec.decode(one.prompt_ids[first:last])
        if subset == "mini_qa":
            sentence = f"The {key} is in room {item['answers'][0]}."
        else:
            sentence = f"This is all about the {key}: Paragraph {place}."
        assert span.strip() == sentence
        assert sentence in found[place - 1]
        assert [at for at, one_ in enumerate(found, 1) if f"the {key} " in one_.lower()] == [place]


def test_paragraphs_are_numbered_by_their_places(folder: Path) -> None:
    one = sample(task(folder), "mini_retrieval", 3, 2000)
    text = BpeCodec().decode(one.prompt_ids)
    numbers = [int(n) for n in re.findall(r": Paragraph (\d+)\.", text)]
    whole = one.meta["paragraphs"]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) - whole in (0, 1) and whole > 12
    assert one.references == (f"Paragraph {one.meta['answer_paragraph']}",)
    assert LongBench.grade("mini_retrieval", _said(one, f" {one.meta['answer_paragraph']}.")) == {"score": 1.0}


def _said(one: Sample, text: str) -> Any:
    from dllm_bench.running.task import Answer

    return Answer(text, one.references, one.meta)


def test_places_depend_on_index_length_and_seed(folder: Path) -> None:
    made = task(folder)
    places = {sample(made, "mini_qa", index, 2000).meta["answer_paragraph"] for index in range(12)}
    assert len(places) > 6 and max(places) > 15 and min(places) < 8
    texts = [sample(made, "mini_qa", 0, ctx, seed).prompt_ids for ctx, seed in ((2000, 0), (2000, 1), (1999, 0))]
    assert len({BpeCodec().decode(ids)[:600] for ids in texts}) == 3


def test_own_paragraphs_come_before_others(folder: Path) -> None:
    item = mini_rows("mini_qa")[5]
    one = sample(task(folder), "mini_qa", 5, 400)
    assert one.meta["paragraphs"] >= 3
    text = BpeCodec().decode(one.prompt_ids)
    assert all(paragraph in text for paragraph in item["context"].split("\n\n"))


@pytest.mark.parametrize("subset", MINI)
def test_too_small(subset: str, folder: Path) -> None:
    made = task(folder)
    with pytest.raises(UserError, match=r"the minimum is (\d+)$") as error:
        sample(made, subset, 2, 64)
    least = int(str(error.value).rsplit(" ", 1)[1])
    assert sample(made, subset, 2, least).actual_ctx == least
    with pytest.raises(UserError, match=f"the minimum is {least}$"):
        sample(made, subset, 2, least - 1)


@pytest.mark.parametrize(
    ("subset", "fields", "message"),
    [
        ("mini_qa", {"input": "Where is it?"}, "the question 'Where is it\\?' is none of this set"),
        ("mini_qa", {"context": "Rain."}, "0 of its paragraphs answer"),
        ("mini_qa", {"answers": ["nowhere"]}, "0 of its paragraphs answer"),
        ("mini_retrieval", {"answers": ["Paragraph 9"]}, "its answering paragraph is number [123], and it says other"),
    ],
)
def test_bad_items(subset: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, subset, [{**mini_rows(subset)[0], **fields}])
    with pytest.raises(UserError, match=message):
        sample(task(tmp_path), subset)


def test_nothing_to_fill_with(tmp_path: Path) -> None:
    only = mini_rows("mini_qa", count=1, paragraphs=1)
    write(tmp_path, "mini_qa", only)
    made = task(tmp_path)
    assert sample(made, "mini_qa").meta["paragraphs"] == 1
    with pytest.raises(UserError, match="no other paragraph to fill"):
        sample(made, "mini_qa", ctx=1024)


def test_a_folder_given_holds_the_mini_sets_too(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa", [row()])
    with pytest.raises(UserError, match=r"has no mini_qa.jsonl"):
        task(tmp_path).size("mini_qa")


@pytest.mark.parametrize("name", MINI)
def test_the_built_in_sets(name: str) -> None:
    source = files("dllm_bench.tasks.data").joinpath(f"{name}.jsonl.gz")
    if not source.is_file():
        with pytest.raises(UserError, match=f"lacks its built-in data set {name}"):
            built_in(name)
        pytest.skip("the data is not there yet")
    items = built_in(name)
    assert len(items) >= 500 and gzip.decompress(source.read_bytes()).count(b"\n") == len(items)
    codec = BpeCodec()
    prompts = MiniSource(codec, name, items)
    for item in items:
        made = prompts.as_it_is(item)
        assert made.references == item.answers and item.dataset == name and item.answer_prefix
        assert made.needle[0] < made.needle[1]
