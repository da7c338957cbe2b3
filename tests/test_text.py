"""Tokenizers and chat templates: exact prompts, special ids from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import dream_config, llada_config, loaded, write
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dllm_bench import UserError, generate
from dllm_bench.models.text import TEMPLATES, TextCodec, load_codec

LLADA_SPECIALS = ["<|startoftext|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLADA_SPECIALS += ["<|mdm_mask|>"]
DREAM_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
LLADA_TEXT = (
    "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nWhat is it?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
DREAM_TEXT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is it?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def byte_level(specials: list[str], first: int = 0) -> Tokenizer:
    """One token per byte, ids from `first` on, then the special tokens."""
    made: Any = Tokenizer(
        models.BPE({c: first + i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return made  # type: ignore[no-any-return]


def codec(tmp_path: Path, specials: list[str], family: str, template: str = "auto") -> TextCodec:
    byte_level(specials).save(str(tmp_path / "tokenizer.json"))
    found = load_codec(tmp_path, family, template)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("family", "specials", "text"), [("llada", LLADA_SPECIALS, LLADA_TEXT), ("dream", DREAM_SPECIALS, DREAM_TEXT)]
)
def test_templates(family: str, specials: list[str], text: str, tmp_path: Path) -> None:
    made = codec(tmp_path, specials, family)
    assert made.template.name == family
    kept = "  What is it? \n"
    assert made.render(kept) == (text if family == "llada" else text.replace("What is it?", kept))
    assert made.render("What is it?") == text
    assert made.render("What is it?", "It is") == text + "It is"
    ids, special = made.wrap("What is it?"), {made.token_id(s) for s in specials}
    pieces = [s for s in specials for _ in range(text.count(s))]
    assert sorted(i for i in ids if i in special) == sorted(made.token_id(s) for s in pieces)  # type: ignore[type-var]
    assert made.wrap("What is it?", "It is") == ids + made.encode("It is")
    if family == "llada":
        assert ids[0] == made.token_id("<|startoftext|>") and ids.count(ids[0]) == 1


def test_a_tokenizer_that_adds_bos_itself_does_not_double_it(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    made: Any = byte_level(LLADA_SPECIALS)
    bos = made.token_to_id("<|startoftext|>")
    made.post_processor = TemplateProcessing(single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", bos)])
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_codec(tmp_path, "llada")
    assert found is not None and made.encode("a").ids[0] == bos
    assert found.wrap("a").count(bos) == 1 and bos not in found.encode("a")


@pytest.mark.parametrize(
    ("bos", "specials"), [("<|startoftext|>", LLADA_SPECIALS), ("<|beginoftext|>", DREAM_SPECIALS)]
)
def test_the_plain_template(bos: str, specials: list[str], tmp_path: Path) -> None:
    made = codec(tmp_path, specials, "llada", "plain")
    assert made.render(" one ") == bos + "one" and made.render("one", "two") == bos + "one two"
    assert made.wrap("one")[0] == made.token_id(bos) and made.wrap("one").count(made.wrap("one")[0]) == 1


@pytest.mark.parametrize(
    ("family", "bos", "specials"),
    [("llada", "<|startoftext|>", LLADA_SPECIALS), ("dream", "<|beginoftext|>", DREAM_SPECIALS), ("llada", "", [])],
)
def test_without_the_template(family: str, bos: str, specials: list[str], tmp_path: Path) -> None:
    made = codec(tmp_path, specials, family)
    assert made.render(" one \n", "two", template=False) == bos + " one \ntwo"
    ids = made.wrap(" one \n", "two", template=False)
    assert ids == [*([made.token_id(bos)] if bos else []), *made.encode(" one \ntwo")]


def test_plain_is_what_a_tokenizer_without_the_tokens_gets(tmp_path: Path) -> None:
    made = codec(tmp_path, [], "llada")
    assert made.template.name == "plain" and made.render("one") == "one"


def test_a_template_without_its_tokens(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'dream' needs <\|im_end\|>; nearest valid: --chat-template plain"):
        codec(tmp_path, LLADA_SPECIALS, "llada", "dream")
    with pytest.raises(UserError, match="did you mean 'llada'"):
        codec(tmp_path, LLADA_SPECIALS, "llada", "lada")


def test_decode_leaves_out_specials_and_unknown_ids(tmp_path: Path) -> None:
    made = codec(tmp_path, LLADA_SPECIALS, "llada")
    text = "Zwölf Äpfel 🍎 \u202e\x00\n"
    ids = made.encode(text)
    assert made.decode(ids) == text
    end = made.token_id("<|eot_id|>")
    assert end is not None and made.decode([end, *ids, end, 99_999, -1, 1 << 40]) == text
    assert made.token_id("<|no such|>") is None and made.token_id("") is None


def test_ids_behind_a_gap_are_decoded(tmp_path: Path) -> None:
    byte_level([], first=1000).save(str(tmp_path / "tokenizer.json"))
    made = load_codec(tmp_path, "llada")
    assert made is not None and made.decode(made.encode("far")) == "far"


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    made: Any = byte_level(LLADA_SPECIALS)
    made.enable_truncation(8)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    found = load_codec(tmp_path, "llada")
    assert found is not None and len(found.encode("x" * 100)) == 100 and len(found.encode("x")) == 1


def test_identity_follows_tokenizer_and_template(tmp_path: Path) -> None:
    names = [("llada", LLADA_SPECIALS), ("plain", LLADA_SPECIALS), ("plain", [*LLADA_SPECIALS, "<|more|>"])]
    found = [codec(tmp_path, specials, "llada", name).identity() for name, specials in names]
    assert len(set(found)) == 3
    assert codec(tmp_path, LLADA_SPECIALS, "llada", "llada").identity() == found[0]


def test_no_tokenizer_and_a_broken_one(tmp_path: Path) -> None:
    assert load_codec(tmp_path, "llada") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json is not a tokenizer file"):
        load_codec(tmp_path, "llada")


def vocab_files(folder: Path, specials: list[str], shift: int = 0) -> Path:
    """vocab.json, merges.txt and the added tokens of tokenizer_config.json, as Dream ships them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocab |= {a + b: len(letters) + i for i, (a, b) in enumerate(merges)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(f"{a} {b}" for a, b in merges) + "\n")
    table = {str(len(vocab) + i + shift): {"content": s, "special": True} for i, s in enumerate(specials)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    return folder


def test_vocab_and_merges(tmp_path: Path) -> None:
    made = load_codec(vocab_files(tmp_path, DREAM_SPECIALS), "dream")
    assert made is not None and made.template.name == "dream"
    assert made.token_id("<|im_end|>") == 256 + 3 + 2
    assert made.tokenizer.encode("the the").tokens == ["the", "Ġthe"]
    assert made.tokenizer.encode("12 ab!?").tokens == ["1", "2", "Ġ", "a", "b", "!", "?"]
    assert made.decode(made.wrap("Zwölf the 🍎")).endswith("user\nZwölf the 🍎\nassistant\n")
    assert made.encode("e\u0301") == made.encode("é"), "the family's tokenizer composes accents first"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"added_tokens_decoder": {"x": {}}}', '{"added_tokens_decoder": {"9": {}}}']
)
def test_a_broken_tokenizer_config(text: str, tmp_path: Path) -> None:
    vocab_files(tmp_path, DREAM_SPECIALS)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer_config.json is not a readable"):
        load_codec(tmp_path, "dream")


def test_added_tokens_must_get_their_ids(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"would get id 259 behind vocab.json, not 262"):
        load_codec(vocab_files(tmp_path, DREAM_SPECIALS, shift=3), "dream")


def test_a_broken_vocabulary(tmp_path: Path) -> None:
    vocab_files(tmp_path, DREAM_SPECIALS)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nzz qq\n")
    with pytest.raises(UserError, match="no byte-level BPE"):
        load_codec(tmp_path, "dream")


@pytest.mark.parametrize(
    ("config", "specials", "end"),
    [(llada_config, LLADA_SPECIALS, "<|eot_id|>"), (dream_config, DREAM_SPECIALS, "<|im_end|>")],
)
def test_end_of_turn_ends_an_answer(config: Any, specials: list[str], end: str, tmp_path: Path) -> None:
    made = byte_level(specials)
    ids = {s: made.token_to_id(s) for s in specials}
    mask = ids["<|mdm_mask|>" if "<|mdm_mask|>" in ids else "<|mask|>"]
    made.save(str(tmp_path / "tokenizer.json"))
    size = 256 + len(specials)
    fields = {"vocab_size": size, "mask_token_id": mask, "eos_token_id": ids["<|endoftext|>"]}
    write(tmp_path, config(**fields, **({"embedding_size": size} if config is llada_config else {})))
    model = loaded(tmp_path)
    assert model.config.eos_ids == (ids["<|endoftext|>"], ids[end])
    assert model.has_codec and model.chat_template == model.family
    run = generate(model, model.codec.wrap("x"), decode={"gen_length": 8, "block_length": 4, "threshold": 0.9})
    useful = [i for i in run.output_ids[: run.useful_tokens] if i != mask]
    assert run.text == model.codec.decode(useful)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    model = loaded(write(tmp_path, llada_config()))
    assert not model.has_codec and model.chat_template is None
    with pytest.raises(UserError, match="only --prompt-ids"):
        _ = model.codec
    assert generate(model, [1], decode={"gen_length": 2}).text is None


def test_templates_are_named_by_their_keys() -> None:
    assert {name: t.name for name, t in TEMPLATES.items()} == {name: name for name in TEMPLATES}


@pytest.mark.parametrize(("family", "specials"), [("llada", LLADA_SPECIALS), ("dream", DREAM_SPECIALS)])
def test_a_conversation_of_one_turn_is_the_template(family: str, specials: list[str], tmp_path: Path) -> None:
    template = codec(tmp_path, specials, family).template
    assert template.chat([("user", " What is it? ")]) == template.render(" What is it? ", "")
    prefilled = template.chat([("user", "What is it?"), ("assistant", "It is ")], opened=False)
    assert prefilled == template.render("What is it?", "It is "), "the prefix stays as it is"


def test_conversations(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "2+2?")]
    (tmp_path / "a").mkdir()
    dream = codec(tmp_path / "a", DREAM_SPECIALS, "dream").template
    assert dream.chat(turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    llada = codec(tmp_path, LLADA_SPECIALS, "llada").template
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    expected = "".join(head.format(role) + words + "<|eot_id|>" for role, words in turns)
    assert llada.chat(turns) == "<|startoftext|>" + expected + head.format("assistant")
    with pytest.raises(UserError, match="has no turns"):
        TEMPLATES["plain"].chat(turns)


@pytest.mark.parametrize(
    ("family", "template", "bos"),
    [
        ("llada", "llada", "<|startoftext|>"),
        ("dream", "dream", "<|beginoftext|>"),
        ("dream", "plain", "<|beginoftext|>"),
    ],
)
def test_bare_prompts_begin_once(family: str, template: str, bos: str, tmp_path: Path) -> None:
    made = codec(tmp_path, LLADA_SPECIALS if family == "llada" else DREAM_SPECIALS, family, template)
    first = made.token_id(bos)
    assert made.bare("Question: x ") == made.bare(bos + "Question: x ") == [first, *made.encode("Question: x ")]
    assert made.bare("") == [first]
    if template != "plain":
        text = made.template.chat([("user", "hi")])
        assert made.bare(text) == made.encode(text) == made.wrap("hi"), "a rendered conversation has what it needs"
