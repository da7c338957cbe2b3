"""The Monte-Carlo estimate of an answer's likelihood against the bound itself, and its cost."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import dream_config, llada_config, loaded, naive_logits, random_tensors, write

from dllm_bench import UserError, loglikelihood
from dllm_bench.decoding.likelihood import _masks

PROMPT, ANSWER = [3, 1, 4], [15, 9, 26]


def bound(config: dict[str, Any], tensors: dict[str, torch.Tensor], answer: list[int]) -> float:
    """The expectation over all masks, each through the plain Transformer."""
    length, terms = len(answer), []
    for number in range(1, length + 1):
        sums = []
        for places in combinations(range(length), number):
            noisy = [config["mask_token_id"] if i in places else token for i, token in enumerate(answer)]
            logs = naive_logits(config, tensors, [*PROMPT, *noisy]).log_softmax(-1)
            shift = config["model_type"] == "Dream"
            sums.append(sum(float(logs[len(PROMPT) + i - shift, answer[i]]) for i in places))
        terms.append(length / number * sum(sums) / len(sums))
    return sum(terms) / length


@pytest.mark.parametrize("config", [llada_config(), dream_config()], ids=["llada", "dream"])
def test_the_estimate_is_unbiased(config: dict[str, Any], tmp_path: Path) -> None:
    tensors = random_tensors(config)
    model = loaded(write(tmp_path, config, tensors))
    truth = bound(config, tensors, ANSWER)
    found = loglikelihood(model, PROMPT, ANSWER, mc_num=3000, batch=300)
    assert found.value == pytest.approx(truth, abs=0.02 * abs(truth))
    coarse = [loglikelihood(model, PROMPT, ANSWER, mc_num=5, batch=2, seed=s).value for s in range(300)]
    assert sum(coarse) / len(coarse) == pytest.approx(truth, abs=0.02 * abs(truth)) and len(set(coarse)) > 20
    assert loglikelihood(model, PROMPT, ANSWER[:1]).value == pytest.approx(bound(config, tensors, ANSWER[:1]), abs=1e-4)


def test_every_number_of_masks_is_equally_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.cat([_masks(5, 2, generator).sum(1) for _ in range(4000)])
    assert [round(float((numbers == n).float().mean()), 1) for n in range(1, 6)] == [0.2] * 5
    for _ in range(20):
        assert sorted(_masks(4, 8, generator).sum(1).tolist()) == [1, 1, 2, 2, 3, 3, 4, 4], "a batch is spread evenly"


def test_cost_and_seed(tmp_path: Path) -> None:
    config = llada_config()
    model = loaded(write(tmp_path, config, random_tensors(config)))
    one = loglikelihood(model, PROMPT, ANSWER, mc_num=10, batch=4, seed=1)
    counters = one.counters
    assert (counters.nfe, counters.dense_passes, len(one.pass_seconds)) == (10, 10, 3)
    assert counters.row_layers == 10 * 6 * config["n_layers"] and 10 <= counters.head_rows <= 30
    torch.manual_seed(99)
    again = loglikelihood(model, PROMPT, ANSWER, mc_num=10, batch=4, seed=1)
    assert again.value == one.value, "nothing but seed and ids decides"
    assert loglikelihood(model, PROMPT, ANSWER, mc_num=10, batch=4, seed=2).value != one.value
    assert loglikelihood(model, PROMPT, ANSWER[:1]).counters.nfe == 1, "one token can be masked in one way"
    nothing = loglikelihood(model, PROMPT, [])
    assert (nothing.value, nothing.counters.nfe) == (0.0, 0)


@pytest.mark.parametrize(
    ("prompt", "answer", "options", "message"),
    [
        ([], [1], {}, "empty"),
        ([1], [49], {}, "mask id"),
        ([1], [50], {}, "nearest valid is 49"),
        ([1], [2], {"mc_num": 0}, "nearest valid: 1"),
        ([1], [2], {"batch": 0}, "nearest valid: 1"),
    ],
)
def test_bad_input(prompt: list[int], answer: list[int], options: dict[str, int], message: str, tmp_path: Path) -> None:
    config = llada_config()
    model = loaded(write(tmp_path, config, random_tensors(config)))
    with pytest.raises(UserError, match=message):
        loglikelihood(model, prompt, answer, **options)
