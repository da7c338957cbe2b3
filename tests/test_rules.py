"""Commit rules and samplers, on logits made for the purpose; EOS and infill on the golden networks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from golden_cases import model
from torch import Tensor

from dllm_bench import UserError, generate
from dllm_bench.decoding.dream import dream_rule
from dllm_bench.decoding.rules import CommitRule, Decision, make_rule, split_evenly
from dllm_bench.decoding.sampling import private_generator
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window

LLADA, DREAM = "llada_fastdllm", "dream_fastdllm"
MASK, VOCAB = 9, 10
CPU = torch.device("cpu")


def rule(family: str = "llada", whole: bool = True, **decode: Any) -> CommitRule:
    settings = DecodeSettings.make(decode, family)
    return make_rule(settings, MASK, private_generator(settings.seed, CPU), family, whole)


def sure(*confidences: float) -> Tensor:
    """Logits [m, VOCAB]: row i gives token i the probability confidences[i], the others share the rest."""
    rows = []
    for i, c in enumerate(confidences):
        row = torch.full((VOCAB,), (1 - c) / (VOCAB - 1), dtype=torch.float64)
        row[i % (VOCAB - 1)] = c
        rows.append(row.log())
    return torch.stack(rows)


def window(count: int, step: int = 0, steps: int = 1) -> Window:
    return Window(0, 0, count, step, steps, tuple(range(count)))


def decide(made: CommitRule, logits: Tensor, step: int = 0, steps: int = 1) -> Decision:
    return made.decide(window(len(logits), step, steps), tuple(range(len(logits))), logits)


def test_quota_splits_the_remainder_first() -> None:
    assert split_evenly(10, 4) == [3, 3, 2, 2] and split_evenly(8, 8) == [1] * 8 and split_evenly(3, 8) == [1, 1, 1]
    made, logits = rule(gen_length=10, steps=4), sure(*(0.3 + 0.05 * i for i in range(10)))
    assert decide(made, logits, 0, 4).positions == [9, 8, 7]
    assert len(decide(made, logits[:7], 1, 4).positions) == 3
    assert len(decide(made, logits[:4], 2, 4).positions) == 2


def test_quota_counts_passes() -> None:
    for steps, per_pass in ((4, [3, 3, 2, 2]), (20, [1] * 10)):
        run = generate(
            model(LLADA), [1, 2], "baseline", {}, {"gen_length": 10, "steps": steps, "eos_stop": False}, trace=True
        )
        assert [len(p["committed"]) for p in run.passes or []] == per_pass


def test_fixed_number() -> None:
    run = generate(
        model(LLADA), [1, 2], "baseline", {}, {"gen_length": 10, "tokens_per_pass": 4, "eos_stop": False}, trace=True
    )
    assert [len(p["committed"]) for p in run.passes or []] == [4, 4, 2]
    more = {"gen_length": 10, "block_length": 5, "tokens_per_pass": 99, "eos_stop": False}
    assert generate(model(LLADA), [1, 2], "baseline", {}, more).nfe == 2


@pytest.mark.parametrize(
    ("threshold", "wanted"), [(0.8, [1, 3, 0]), (0.800001, [1, 3]), (0.95, [1]), (1.5, [1]), (0.0, [1, 3, 0, 2])]
)
def test_threshold_is_inclusive_and_takes_one_at_least(threshold: float, wanted: list[int]) -> None:
    logits = sure(0.8, 0.9, 0.4, 0.85)
    # a softmax may miss 0.8 by one unit in the last place
    bound = float(torch.softmax(logits[0], dim=-1)[0]) if threshold == 0.8 else threshold
    decision = decide(rule(gen_length=4, threshold=bound), logits)
    assert decision.positions == wanted and decision.tokens.tolist() == wanted


def test_threshold_above_one_and_zero() -> None:
    decode = {"gen_length": 8, "block_length": 4, "eos_stop": False}
    one = generate(model(LLADA), [1, 2], "baseline", {}, {**decode, "threshold": 1.5})
    everything = generate(model(LLADA), [1, 2], "baseline", {}, {**decode, "threshold": 0})
    assert (one.nfe, everything.nfe) == (8, 2)


@pytest.mark.parametrize(
    ("factor", "confidences", "count"),
    [
        # bounds of factor 1: (1), 2/3, 3/4, 4/5
        (1.0, (0.9, 0.7, 0.7, 0.2), 2),
        (1.0, (0.9, 0.8, 0.76, 0.2, 0.15), 3),
        (1.0, (0.2, 0.2, 0.2, 0.2), 1),
        # the last masked token is committed although it is the first to fail
        (1.0, (0.9, 0.7, 0.2), 3),
        (1.0, (0.2, 0.15), 2),
        (1.0, (0.2,), 1),
        (0.0, (0.99, 0.99, 0.99), 1),
        (9.0, (0.2, 0.2, 0.2, 0.2), 4),
    ],
)
def test_factor(factor: float, confidences: tuple[float, ...], count: int) -> None:
    assert len(decide(rule(gen_length=4, factor=factor), sure(*confidences)).positions) == count


def test_ties_go_to_the_left() -> None:
    assert decide(rule(gen_length=6, tokens_per_pass=2), sure(0.5, 0.5, 0.5, 0.5)).positions == [0, 1]


def test_random_remasking_is_uniform_and_private() -> None:
    logits, before = sure(0.9, 0.2, 0.5, 0.7, 0.3), torch.get_rng_state()
    made = rule(gen_length=5, tokens_per_pass=1, remasking="random", seed=3)
    drawn = Counter(decide(made, logits).positions[0] for _ in range(2000))
    assert all(320 < drawn[i] < 480 for i in range(5))  # 400 expected, standard deviation 18
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", [LLADA, DREAM])
@pytest.mark.parametrize(
    "decode",
    [{"remasking": "random", "tokens_per_pass": 2}, {"temperature": 1.0}, {"alg": "origin", "temperature": 0.5}],
)
def test_seeds_decide_and_nothing_else(name: str, decode: dict[str, Any]) -> None:
    def ids(seed: int) -> tuple[Any, ...]:
        run = generate(
            model(name),
            [4, 5, 6],
            "baseline",
            {},
            {"gen_length": 8, "seed": seed, "eos_stop": False, **decode},
            trace=True,
        )
        return run.output_ids, run.passes

    torch.manual_seed(1)
    before, first = torch.get_rng_state(), ids(7)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert ids(7) == first and ids(8) != first
    assert ids(2**63 - 1) == ids(2**63 - 1)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_temperature_one_draws_from_the_softmax(family: str) -> None:
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05] + [0.0] * 6)
    logits = wanted.log().clamp(min=-1e4).repeat(4000, 1)
    made = rule(family, gen_length=4000, temperature=1.0, **({"alg": "maskgit_plus"} if family == "dream" else {}))
    drawn = torch.bincount(made.sampler(logits)[0], minlength=VOCAB) / 4000
    assert (drawn - wanted).abs().max() < 0.03


def test_the_confidence_is_without_noise() -> None:
    logits = sure(0.6, 0.3).repeat(50, 1)
    tokens, confidence = rule(gen_length=100, temperature=2.0).sampler(logits)
    torch.testing.assert_close(confidence, torch.softmax(logits, -1).gather(1, tokens[:, None])[:, 0])
    assert len(set(tokens.tolist())) > 2


@pytest.mark.parametrize("name", [LLADA, DREAM])
def test_guidance_of_zero_is_none(name: str) -> None:
    decode = {"gen_length": 8, "block_length": 4, "threshold": 0.7}
    plain = generate(model(name), [1, 2, 3], decode=decode, trace=True)
    zero = generate(model(name), [1, 2, 3], decode={**decode, "cfg_scale": 0}, trace=True)
    guided = generate(model(name), [1, 2, 3], decode={**decode, "cfg_scale": 3.0}, trace=True)
    assert (plain.output_ids, plain.passes, plain.row_layers) == (zero.output_ids, zero.passes, zero.row_layers)
    assert guided.output_ids != plain.output_ids


class TestDream:
    def test_origin_reveals_its_share(self) -> None:
        steps, eps = 4, 1e-3
        times = torch.linspace(1, eps, steps + 1)
        made = rule("dream", gen_length=4000, steps=steps, alg="origin")
        for step in range(steps):
            share = len(decide(made, sure(0.5).repeat(4000, 1), step, steps).positions) / 4000
            wanted = 1.0 if step == steps - 1 else float(1 - times[step + 1] / times[step])
            assert abs(share - wanted) < 0.03

    def test_schedules_truncate_and_end_with_everything(self) -> None:
        made, logits = rule("dream", gen_length=4, steps=4, alg="maskgit_plus"), sure(0.2, 0.9, 0.3, 0.4)
        assert decide(made, logits, 0, 4).positions == []  # 4 * 0.24975 truncated
        assert decide(made, logits, 1, 4).positions == [1]
        assert decide(made, logits, 3, 4).positions == [1, 3, 2, 0]

    @pytest.mark.parametrize(("alg", "first"), [("maskgit_plus", 0), ("topk_margin", 1), ("entropy", 2)])
    def test_each_alg_has_its_own_confidence(self, alg: str, first: int) -> None:
        rows = torch.full((3, VOCAB), 1e-9)
        rows[0, :3] = torch.tensor([0.56, 0.22, 0.22])  # the most probable token
        rows[1, :5] = torch.tensor([0.53, 0.12, 0.12, 0.12, 0.11])  # the widest margin
        rows[2, :2] = torch.tensor([0.51, 0.49])  # the least entropy
        made = rule("dream", gen_length=3, steps=3, alg=alg)
        assert decide(made, rows.log(), 1, 3).positions == [first]

    def test_a_threshold_on_dream_is_its_own_alg(self) -> None:
        assert DecodeSettings.make({"threshold": 0.5}, "dream").alg == "confidence_threshold"
        assert DecodeSettings.make({}, "dream").alg == "entropy" and DecodeSettings.make({}, "llada").alg is None
        assert DecodeSettings.make({"alg": "confidence_threshold"}, "dream").threshold == 0.9

    def test_carried_budget(self) -> None:
        """Two tokens may be looked at per step; what failed stays in the budget of the next one."""
        made = rule("dream", gen_length=8, steps=4, threshold=0.5)
        low = sure(*[0.2] * 8)
        assert len(decide(made, low, 0, 4).positions) == 1
        assert decide(made, sure(0.2, 0.96, 0.97, 0.98, 0.9, 0.9, 0.9), 1, 4).positions == [3, 2, 1]
        assert len(decide(made, low[:4], 2, 4).positions) == 1

    @pytest.mark.parametrize(("top_p", "kept"), [(0.5, {0}), (0.55, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
    def test_nucleus_keeps_the_first_over_the_bound(self, top_p: float, kept: set[int]) -> None:
        logits = torch.tensor([0.5001, 0.3, 0.15, 0.0499] + [0.0] * 6).log().clamp(min=-1e4).repeat(600, 1)
        made = rule("dream", gen_length=600, temperature=1.0, top_p=top_p)
        assert set(made.sampler(logits)[0].tolist()) == kept

    def test_top_k(self) -> None:
        logits = torch.arange(VOCAB).float().repeat(400, 1) * 0.1
        made = rule("dream", gen_length=400, temperature=1.0, top_k=3)
        assert set(made.sampler(logits)[0].tolist()) == {7, 8}  # the third largest is the mask id
        assert rule("dream", gen_length=4, temperature=1.0, top_k=10**6).sampler(logits)[0].shape == (400,)

    def test_alg_temp_draws_positions(self) -> None:
        logits = sure(0.9, 0.3, 0.3, 0.3)
        made = rule("dream", gen_length=4, steps=4, alg="maskgit_plus", alg_temp=1.0)
        drawn = Counter(decide(made, logits, 2, 4).positions[0] for _ in range(300))
        assert len(drawn) == 4 and drawn[0] == max(drawn.values())
        cold = rule("dream", gen_length=4, steps=4, alg="maskgit_plus", alg_temp=1e-4)
        assert all(decide(cold, logits, 2, 4).positions[0] == 0 for _ in range(20))
        # one row holds all the weight, and four positions are still found
        assert sorted(decide(cold, logits, 3, 4).positions) == [0, 1, 2, 3]

    @pytest.mark.parametrize("alg", ["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"])
    @pytest.mark.parametrize("by_blocks", [False, True])
    def test_every_alg_fills_everything(self, alg: str, by_blocks: bool) -> None:
        decode = {"gen_length": 16, "block_length": 8, "steps": 8, "alg": alg, "eos_stop": False}
        if not by_blocks:
            decode["block_length"] = 16
        run = generate(model(DREAM), [1, 2], "fast_dllm" if by_blocks else "baseline", {}, decode)
        assert run.masks_left == 0 and len(run.output_ids) == 16

    def test_the_block_version_begins_with_one_token(self) -> None:
        settings = DecodeSettings.make({"gen_length": 6, "steps": 6, "threshold": 0.0}, "dream")
        made = dream_rule(settings, MASK, private_generator(0, CPU), whole=False)
        logits = sure(0.3, 0.9, 0.9)
        assert decide(made, logits, 0, 6).positions == [0]
        assert sorted(decide(made, logits, 1, 6).positions) == [0, 1, 2]


NUCLEI: list[dict[str, Any]] = [{"top_p": 0.5}, {"top_k": 1, "temperature": 0.5}, {"top_p": 0.9, "temperature": 1.0}]


@pytest.mark.parametrize("mask_logit", [20.0, 1e4])
@pytest.mark.parametrize(
    ("family", "decode"),
    [(f, d) for f in ("llada", "dream") for d in ({}, {"temperature": 1.0})] + [("dream", d) for d in NUCLEI],
)
def test_the_mask_id_is_never_chosen(family: str, decode: dict[str, Any], mask_logit: float) -> None:
    logits = sure(*[0.4, 0.5, 0.6] * 20)
    logits[:, MASK] = mask_logit
    tokens, confidence = rule(family, gen_length=60, **decode).sampler(logits)
    assert MASK not in tokens.tolist() and torch.isfinite(confidence).all()
    if decode.get("temperature", 0) == 0:
        assert tokens.tolist() == [i % 9 for i in range(60)], "the best of the other tokens"


class TestEosStop:
    """A network whose answers are steered: the head's rows are permuted so that EOS comes early."""

    @pytest.fixture
    def steered(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        loaded = model(LLADA)
        eos = loaded.config.eos_ids[0]
        plan: dict[int, int] = {}

        def forward(self: Any, win: Any) -> Any:
            out = genuine(self, win)
            logits = torch.zeros_like(out.logits)
            for i, p in enumerate(out.positions):
                logits[i, plan.get(p, 3)] = 5.0 + plan_sure.get(p, -0.01 * p)
            return type(out)(out.positions, logits)

        from dllm_bench.caching.method import Method

        genuine, plan_sure = Method.forward, dict[int, float]()
        monkeypatch.setattr(Method, "forward", forward)

        def run(places: dict[int, float], **decode: Any) -> Any:
            """EOS at each of these places of the response; the larger the number, the surer."""
            plan.update({2 + p: eos for p in places})
            plan_sure.update({2 + p: s for p, s in places.items()})
            settings = {"gen_length": 12, "block_length": 4, "tokens_per_pass": 1, **decode}
            return generate(loaded, [1, 2], "fast_dllm", {}, settings, trace=True), eos, loaded.config.mask_id

        return run

    def test_behind_eos_nothing_is_decoded(self, steered: Any) -> None:
        run, eos, mask = steered({2: -0.04})
        assert run.output_ids == [3, 3, eos] + [mask] * 9
        assert (run.nfe, run.masks_left, run.useful_tokens, run.canvas_tokens) == (3, 0, 2, 12)
        assert [p["kind"] for p in run.passes] == ["dense", "partial", "partial"]

    def test_masks_before_an_early_eos_are_still_filled(self, steered: Any) -> None:
        run, eos, mask = steered({2: 4.0})
        assert [c[0][0] for c in (p["committed"] for p in run.passes)] == [4, 2, 3]
        assert run.output_ids == [3, 3, eos] + [mask] * 9 and (run.masks_left, run.useful_tokens) == (0, 2)

    def test_an_earlier_eos_cuts_again(self, steered: Any) -> None:
        run, eos, mask = steered({1: 1.0, 3: 4.0})
        assert run.output_ids == [3, eos, mask, eos] + [mask] * 8
        assert (run.nfe, run.masks_left, run.useful_tokens) == (3, 0, 1)

    def test_eos_at_once(self, steered: Any) -> None:
        run, eos, mask = steered({0: 4.0})
        assert run.output_ids == [eos] + [mask] * 11 and (run.nfe, run.useful_tokens, run.masks_left) == (1, 0, 0)

    def test_off(self, steered: Any) -> None:
        run, eos, _ = steered({2: -0.04}, eos_stop=False)
        assert run.output_ids == [3, 3, eos] + [3] * 9
        assert (run.nfe, run.useful_tokens, run.masks_left) == (12, 2, 0)

    def test_several_in_one_pass(self, steered: Any) -> None:
        run, eos, mask = steered({1: 4.0, 3: 4.0}, tokens_per_pass=2)
        assert run.output_ids[:5] == [3, eos, mask, eos, mask]
        assert (run.nfe, run.useful_tokens, run.masks_left) == (2, 1, 0)


def test_step_cap_leaves_masks_and_counts_them() -> None:
    decode = {"gen_length": 16, "block_length": 8, "steps": 2, "threshold": 2.0, "eos_stop": False}
    run = generate(model(LLADA), [1, 2, 3], "fast_dllm", {"step_cap": True}, decode)
    mask = model(LLADA).config.mask_id
    assert run.nfe == 2 and run.masks_left == run.output_ids.count(mask) == 14 and run.useful_tokens == 2
    assert generate(model(LLADA), [1, 2, 3], "fast_dllm", {}, decode).masks_left == 0


@pytest.mark.parametrize("name", [LLADA, DREAM])
@pytest.mark.parametrize("method", ["baseline", "fast_dllm"])
@pytest.mark.parametrize("fill", [(0, 6), (4, 10), (6, 12)])
def test_infill(name: str, method: str, fill: tuple[int, int]) -> None:
    prompt = list(range(20, 32))
    run = generate(model(name), prompt, method, {}, {"fill": fill, "block_length": 3, "eos_stop": False}, trace=True)
    committed = sorted(p for one in run.passes or [] for p, _ in one["committed"])
    assert committed == list(range(*fill)) and len(run.output_ids) == 6 and run.masks_left == 0
    assert max(p["rows"] for p in run.passes or []) == len(prompt)
    other = [*prompt[: fill[0]], *[1] * 6, *prompt[fill[1] :]]
    again = generate(model(name), other, method, {}, {"fill": list(fill), "block_length": 3, "eos_stop": False})
    assert again.output_ids == run.output_ids, "what stood in the range does not matter"


@pytest.mark.parametrize(
    ("prompt", "fill", "said"),
    [
        ([1, 2, 3, 4], "0:4", "covers the whole prompt"),
        ([1, 2, 3, 4], "2:5", "beyond the prompt: nearest valid end is 4"),
        ([1, 2, 3, 4], "3:2", "START < END"),
        ([1, 2, 3, 4], "2:2", "START < END"),
        ([1, 2, 3, 4], "-2:2", "0 <= START"),
        ([1, 2, 3, 130], "0:2", "mask id 130 at position 3"),
        ([1, 2, 3, 999], "0:2", "id 999 at position 3"),
        ([130, 130, 3, 4], "0:1", "mask id 130 at position 1"),
        ([1, 2], "1", "START:END"),
        ([1, 2], "a:b", "START:END"),
        ([1, 2], [1], "START:END"),
        ([1, 2], [], "START:END"),
    ],
)
def test_bad_fills(prompt: list[int], fill: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        generate(model(LLADA), prompt, decode={"fill": fill})
    assert generate(model(LLADA), [130, 130, 3, 4], decode={"fill": "0:2"}).masks_left == 0
