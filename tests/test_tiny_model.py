"""The embedded model: what its files hold, how its training samples are made, and that it really retrieves."""

from __future__ import annotations

import gzip
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_mini_sets import SETS, items
from tiny_data import Batches, Part
from tiny_eval import held_out_accuracy
from tiny_export import FOLDER
from tiny_facts import FACT, FORMS, LABEL, document
from tiny_grow import grown
from tiny_problems import held_out_problem, problem
from tiny_prompts import KINDS, Maker
from tiny_text import SPECIALS, WORDS_DIR, draw_key, held_out, load_words
from tokenizers import Tokenizer

from dllm_bench.models.checkpoint import load_network, read_config
from dllm_bench.models.network import Network

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def net() -> Network:
    architecture, config = read_config(FOLDER)
    return load_network(FOLDER, architecture, config, torch.float32, torch.device("cpu"))


def test_weights_are_small_bfloat16_and_of_the_configured_shapes(net: Network) -> None:
    from safetensors import safe_open

    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 16_000_000
    with safe_open(str(path), framework="pt") as file:
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118 - no mapping
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert sum(t.numel() for t in tensors.values()) <= 8_000_000
    assert all(bool(t.isfinite().all()) for t in tensors.values())
    assert net.config.family == "llada"
    assert not net.config.tied


def test_config_has_the_official_fields() -> None:
    ours = json.loads((FOLDER / "config.json").read_text())
    official = json.loads((GOLDEN / "llada_fastdllm" / "config.json").read_text())
    assert set(ours) - {"bos_token_id"} <= set(official)
    assert ours["model_type"] == "llada"
    own = json.loads((FOLDER / "dllm_bench.json").read_text())
    assert own["chat_template"] == "llada"
    assert own["decode"]["gen_length"] % own["decode"]["block_length"] == 0


def test_tokenizer_has_lladas_special_tokens_and_single_digits(tokenizer: Tokenizer) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert [tokenizer.token_to_id(t) for t in SPECIALS] == list(range(len(SPECIALS)))
    for name, token in (("bos", SPECIALS[0]), ("eos", SPECIALS[1]), ("pad", SPECIALS[1]), ("mask", SPECIALS[2])):
        assert config[f"{name}_token_id"] == tokenizer.token_to_id(token)
    assert tokenizer.encode("is: 1234567.").tokens[-8:] == [*"1234567", "."]
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    text = "Größe — 数 & <tags>\n\n 'quoted'"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_loads_the_tokenizer(tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    loaded = PreTrainedTokenizerFast.from_pretrained(str(FOLDER))
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token, loaded.mask_token) == (
        SPECIALS[0],
        SPECIALS[1],
        SPECIALS[1],
        SPECIALS[2],
    )
    text = f"{SPECIALS[0]}One of the 42.{SPECIALS[5]}"
    assert loaded(text, add_special_tokens=False).input_ids == tokenizer.encode(text).ids


def test_pieces_of_a_prompt_tokenise_as_the_whole_text(maker: Maker, tokenizer: Tokenizer) -> None:
    for kind in KINDS.values():
        prompt = maker.prompt(random.Random(5), kind, 400)
        text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
        assert tokenizer.encode(text).ids == prompt.ids
        assert text.count("<|startoftext|>") == 1
        assert all(r in text for r in prompt.references)


@pytest.mark.parametrize("name", ["room", "rooms", "paragraph", "paragraphs"])
def test_documents_tell_what_is_asked_for(maker: Maker, tokenizer: Tokenizer, name: str) -> None:
    prompt = document(maker, random.Random(3), name, 1024)
    text = tokenizer.decode(prompt.ids, skip_special_tokens=False)
    told = FORMS[name.removesuffix("s")].prefix
    answer = tokenizer.decode([*prompt.ids[-40:], *prompt.answer])
    pairs = re.findall(told.replace("{thing}", r"([\w\s'-]+?)") + r" (\d+)\.", answer)
    assert [place for _, place in pairs] == prompt.references
    assert 1 < len(pairs) <= 12 if name.endswith("s") else len(pairs) == 1
    stated = FACT if name.startswith("room") else LABEL
    assert all(stated.format(thing=thing, place=place, number=place) in text for thing, place in pairs)
    assert len(prompt.ids) + len(prompt.answer) <= 1024 + 32


def test_batches_depend_on_seed_and_step_alone(maker: Maker) -> None:
    mix = {"single_1": 1.0, "multivalue": 1.0, "listing": 1.0}

    def make(seed: int, step: int) -> torch.Tensor:
        return Batches(maker, seed).make(step, Part(mix, 256, 4, stretch=0.5, span=8192)).ids

    random.seed(1)
    first = make(0, 7)
    random.seed(2)
    assert torch.equal(first, make(0, 7))
    assert not torch.equal(first, make(0, 8))
    assert not torch.equal(first, make(1, 7))


def test_only_masked_answer_tokens_are_trained(maker: Maker) -> None:
    batch = Batches(maker, 0).make(3, Part({"single_1": 1.0, "multivalue": 1.0}, 256, 8, stretch=1.0, span=8192))
    seen = batch.ids[:, -batch.rows :]
    trained = batch.weights > 0
    assert bool((seen[trained] == maker.mask).all())
    assert torch.equal(seen[~trained & (batch.labels > 0)], batch.labels[~trained & (batch.labels > 0)])
    assert bool((batch.positions.diff(dim=-1) >= 1).all())


def test_ghost_keys_stand_in_the_gaps_and_count_for_all_missing_haystack(maker: Maker) -> None:
    batch = Batches(maker, 0).make(5, Part({"single_1": 1.0}, 320, 4, stretch=1.0, span=16384, ghosts=256))
    assert batch.ghosts is not None
    assert batch.copies is None
    index, place, weight = batch.ghosts
    for b in range(4):
        real = set(batch.positions[b, 0].tolist())
        used = weight[b].isfinite()
        assert not real & set(place[b][used].tolist())
        # a ghost's copy starts whole pieces behind its piece, so positions differ and ids are those of the haystack
        assert bool((place[b][used] > batch.positions[b, 0][index[b][used]]).all())
        # together they weigh what all missing tokens do, up to the gaps' remainders and what stands next to its piece
        missing = int(batch.positions[b, 0, -1]) + 1 - 320
        assert missing > 256
        assert 0.7 * missing < float(weight[b][used].exp().sum()) <= missing


def test_samples_stand_for_texts_of_the_lengths_asked_for(maker: Maker) -> None:
    def longest(**settings: Any) -> list[int]:
        part = Part(length=320, batch=16, **settings)
        return (Batches(maker, 0).make(5, part).positions[:, 0, -1] + 1).tolist()

    one, many = {"single_1": 1.0}, {"multivalue": 1.0}
    assert longest(mix=one) == [320] * 16
    far = longest(mix=one, stretch=1.0, least=12288, span=16384)
    # haystack pieces have no room for the last part of a copy
    assert all(12000 < n <= 16384 for n in far) and len(set(far)) > 8
    near = longest(mix=many, stretch=1.0, least=12288, span=16384)
    assert all(n == 320 or 0.9 * 8 * 320 < n <= 8 * 320 for n in near), "several needles are kept near"
    assert len(set(near)) > 1


def test_answers_are_masked_whole_as_often_as_asked_for(maker: Maker) -> None:
    def whole(share: float) -> int:
        batch = Batches(maker, 0).make(5, Part({"single_1": 1.0}, 256, 40, whole=share))
        response = batch.labels > 0
        return int(((batch.ids[:, -batch.rows :] == maker.mask) | ~response).all(1).sum())

    assert whole(1.0) == 40
    assert whole(0.0) < 10 < whole(0.6) < 35


def test_word_problems_share_no_batch() -> None:
    with pytest.raises(ValueError, match="problem, single_1: word problems"):
        Part({"problem": 1.0, "single_1": 1.0}, 256, 4)


def test_held_out_keys_never_occur_in_training(maker: Maker) -> None:
    words = load_words()
    trained = [draw_key(random.Random(i), words, False) for i in range(300)]
    kept = [draw_key(random.Random(i), words, True) for i in range(300)]
    assert not any(held_out(k) for k in trained)
    assert all(held_out(k) for k in kept)


@pytest.mark.parametrize(
    ("kind", "threshold", "count"),
    [("single_1", 0.9, 6), ("single_1", None, 2), ("paragraph", 0.9, 6), ("room", 0.9, 6), ("problem", 0.9, 10)],
)
def test_the_model_retrieves_and_calculates(
    net: Network, maker: Maker, kind: str, threshold: float | None, count: int
) -> None:
    exact, _, _ = held_out_accuracy(net, maker, kind, 320, count, gen=48, block=16, threshold=threshold)
    assert exact >= (0.8 if kind.startswith("single") else 0.5)


def test_a_grown_model_computes_what_it_did(net: Network) -> None:
    wider = replace(
        net.config, hidden_size=net.config.hidden_size + net.config.head_dim, num_heads=net.config.num_heads + 1,
        num_kv_heads=net.config.num_kv_heads + 1, ffn_size=net.config.ffn_size + 64,
    )  # fmt: skip
    new = grown(net.weights, net.config, wider, 0)
    silent = net.config.num_heads * net.config.head_dim
    for layer in new.layers:
        layer.attn_out[:, silent:] = 0.0  # without its head the wider model is the old one
    new.embed[:, net.config.hidden_size :] = 0.0
    ids = torch.randint(6, 2000, (1, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old_logits, new_logits = net.head(net.hidden(ids)), Network(wider, new).head(Network(wider, new).hidden(ids))
    torch.testing.assert_close(new_logits, old_logits, atol=2e-3, rtol=1e-3)


def test_problems_are_right_and_within_their_range() -> None:
    signs = set()
    for i in range(500):
        question, answer = problem(random.Random(i), evaluation=i % 2 == 0)
        assert held_out_problem(question) == (i % 2 == 0)
        *steps, last = answer.split("\n")
        assert 1 <= len(steps) <= 3
        for step in steps:
            a, sign, b, result = re.fullmatch(r"(\d{3})([-+*/])(\d{3})=(\d{3})", step).groups()
            x, y = int(a), int(b)
            assert int(result) == {"+": x + y, "-": x - y, "*": x * y, "/": x / y}[sign]
            signs.add(sign)
        assert last == f"#### {int(result)}"
        assert all(1 <= int(n) <= 999 for n in re.findall(r"\d+", question + answer))
    assert signs == set("+-*/")


@pytest.mark.parametrize("name", list(SETS))
def test_the_mini_sets_are_those_of_their_script(name: str) -> None:
    text = gzip.decompress((WORDS_DIR / f"{name}.jsonl.gz").read_bytes()).decode()
    stored = [json.loads(line) for line in text.splitlines()]
    assert len(stored) >= 500
    assert items(name, len(stored), 0, load_words()) == stored
