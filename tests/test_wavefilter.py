"""WaveFilter beyond the decodes: transforms, selections, what is read, what is held, and what it stands on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_cases import GOLDEN, cases, model
from safetensors.torch import load_file
from test_golden_wavefilter import NAME, check, elastic_cases, fast_dllm_cases, options, run
from torch import Tensor

from dllm_bench import UserError, generate
from dllm_bench.caching.memory import DenseMemory, Memory, gather_runs
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.selection import best_share, votes
from dllm_bench.caching.spec import parse_method
from dllm_bench.caching.wavelets import low_pass
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.methods.wavefilter import WaveFilter
from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.network import Network, Weights

UNITS = load_file(GOLDEN / "wavelet_units" / "cases.safetensors")


def unit_cases(kind: str) -> list[dict[str, Any]]:
    import json

    found: list[dict[str, Any]] = json.loads((GOLDEN / "wavelet_units" / "cases.json").read_text())[kind]
    return found


class Held(DenseMemory):
    """A memory filled by hand: keys are stored as they are given."""

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._k[layer], self._v[layer] = k, v

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        rows.put(self._k[layer], k, dim=2)
        rows.put(self._v[layer], v, dim=2)


class Bench:
    """A filter over a memory that is filled by hand: prompt, then a response."""

    def __init__(
        self, prompt: int, kv_heads: int, group: int, d: int, sets: dict[str, Any], response: int = 8, **config: Any
    ) -> None:
        shape = {"hidden_size": d, "num_layers": 1, "num_heads": kv_heads * group, "num_kv_heads": kv_heads}
        self.config = NetworkConfig(
            **{
                "family": "llada", **shape, "head_dim": d, "ffn_size": d, "vocab_size": 9, "embedding_size": 9,
                "norm_eps": 1e-5, "rope_theta": 1e4, "max_positions": 64, "qkv_bias": False, "tied": False,
                "shift": False, "rope_cast": False, "mask_id": 8, "eos_ids": (7,), **config,
            }
        )  # fmt: skip
        self.net = Network(self.config, Weights(torch.zeros(9, d), [], torch.ones(d), torch.zeros(9, d)))
        settings = DecodeSettings.make({"gen_length": response, "steps": response}, "llada")
        self.canvas = Canvas.make([1] * prompt, settings, self.config, self.net.device)
        spec = parse_method("fast_dllm+wavefilter", {"min_prompt": 0, **sets})
        self.memory = WaveFilter(spec.parts[1][1], Held())
        self.held = self.memory.lower
        assert isinstance(self.held, Held)
        self.memory.begin(Request(self.net, self.canvas, self.canvas.ids, settings))
        self.length = prompt + response
        generator = torch.Generator().manual_seed(5)
        self.k, self.v = torch.randn(2, 1, kv_heads, self.length, d, generator=generator).unbind(0)
        self.q = torch.randn(1, kv_heads * group, response, d, generator=generator)
        self.held.fill(0, self.k, self.v)
        self.rows = Rows.range(prompt, self.length)

    def read(self, start: int | None = None) -> tuple[Tensor, ...]:
        """One partial pass."""
        start = self.canvas.start if start is None else start
        self.memory.begin_pass(Window(0, start, start + 4, 1, 4, (start,)), refresh=False)
        (piece,) = self.memory.read(0, self.q, self.rows)
        self.memory.end_pass()
        return piece

    def kept(self) -> list[list[int]]:
        self.read()
        found = self.memory.kept(0)
        assert found is not None
        return found


@pytest.mark.parametrize("case", unit_cases("dwt"), ids=lambda c: f"{c['wavelet']}-{c['n']}-{c['level']}")
def test_low_pass_is_the_transforms(case: dict[str, Any]) -> None:
    x, y = UNITS[case["x"]], UNITS[case["y"]]
    torch.testing.assert_close(low_pass(x, case["wavelet"], case["level"], "ortho"), y, atol=1e-9, rtol=0)
    mean = low_pass(x, case["wavelet"], case["level"], "mean")
    torch.testing.assert_close(mean, y / math.sqrt(2) ** case["level"], atol=1e-9, rtol=0)


def test_haar_keeps_the_energy() -> None:
    x = torch.randn(32, 5, dtype=torch.float64)
    low = low_pass(x, "haar", 1, "ortho")
    high = (x[::2] - x[1::2]) * math.sqrt(0.5)
    assert float(low.square().sum() + high.square().sum()) == pytest.approx(float(x.square().sum()))


@pytest.mark.parametrize("literal", [False, True], ids=["pyramid", "literal"])
@pytest.mark.parametrize("case", unit_cases("select"), ids=lambda c: str(c["id"]))
def test_selections(case: dict[str, Any], literal: bool) -> None:
    its = case["options"]
    forced = [p for p in its["force_keep"] if p >= 4]
    sets = {
        "levels": its["levels"], "keep": its["props"], "norm": its["norm"], "group": its["group"], "literal": literal,
        "rope_space": its["rope_space"], "force_keep": 4 if its["force_keep"] else 0,
    }  # fmt: skip
    center = its["rope_space"] == "center"
    theta = {"rope_theta": its["theta"]} if center else {}
    bench = Bench(case["P"], case["kv_heads"], case["group"], case["d"], sets, **theta)
    keys = UNITS[case["K"]].unsqueeze(0)
    # the filter turns keys back that a memory has turned
    bench.k[:, :, : case["P"]] = bench.net.rope(keys, slice(0, case["P"])) if center else keys
    bench.q = UNITS[case["Q"]].unsqueeze(0)
    bench.memory.require(forced)
    bench.read()
    assert bench.memory.kept(0) == case["kept"]


@pytest.mark.parametrize("length", range(3, 21))
def test_ragged_prompts_read_what_a_mask_would_show(length: int) -> None:
    for forced, required in [(0, []), (3, [7, 9])]:
        bench = Bench(length, 2, 2, 8, {"force_keep": forced, "keep": [0.5, 0.5]}, response=9 - length % 2)
        bench.memory.require([p for p in required if p < length])
        piece = bench.read()
        kept = bench.memory.kept(0)
        shown = torch.zeros(2, bench.length, dtype=torch.bool)
        shown[:, length:] = True
        for head, positions in enumerate(kept or [list(range(length))] * 2):
            assert positions == sorted(set(positions)) and max(positions) < length
            assert set(range(length - length % 4, length)) <= set(positions)
            assert {p for p in (*range(forced), *required) if p < length} <= set(positions)
            shown[head, positions] = True
        bias = torch.zeros(shown.shape).masked_fill(~shown, -math.inf).view(1, 2, 1, -1)
        torch.testing.assert_close(
            bench.net.attend(bench.q, [piece]), bench.net.attend(bench.q, [(bench.k, bench.v, bias)])
        )
        assert bench.net.counters.selections == (length >= 4)
        counted = sum(len(head) for head in kept) if kept else 0
        assert (bench.net.counters.kept_keys, bench.net.counters.seen_keys) == (counted, 2 * length * bool(kept))
        rows = bench.memory.attention_rows(0, bench.q)
        assert rows.shape == (1, 4, bench.q.shape[2], bench.length)
        torch.testing.assert_close(rows.sum(dim=3), torch.ones(rows.shape[:3]))
        assert ((rows > 0) == shown.repeat_interleave(2, dim=0).view(1, 4, 1, -1)).all()
        readable = bench.memory.readable(0)
        if kept is None:
            assert readable is None
        else:
            assert readable is not None and readable.tolist() == shown.any(dim=0).nonzero()[:, 0].tolist()


def test_a_constant_key_and_a_shift_by_regions_change_nothing() -> None:
    first = Bench(64, 2, 2, 16, {}).kept()
    moved = Bench(64, 2, 2, 16, {})
    moved.k += torch.randn(16, generator=torch.Generator().manual_seed(1))
    assert moved.kept() == first
    turned = Bench(64, 2, 2, 16, {})
    turned.k[:, :, :64] = turned.k[:, :, :64].roll(8, dims=2)
    assert turned.kept() == [sorted((p + 8) % 64 for p in head) for head in first]
    one = [Bench(64, 2, 1, 16, {"norm": norm}, response=1).kept() for norm in ("ortho", "mean")]
    assert one[0] == one[1] != first


def test_a_planted_block_is_found() -> None:
    bench = Bench(128, 1, 1, 32, {"keep": [0.1, 0.5]}, response=1)
    bench.k[:, :, :128] = 0.01 * bench.k[:, :, :128]
    bench.k[:, :, 40:44] += bench.q[0, 0, 0]
    assert {40, 41, 42, 43} <= set(bench.kept()[0])


def test_other_wavelets_run_literally() -> None:
    plain = Bench(64, 2, 1, 16, {})
    haar = plain.kept()
    other = Bench(64, 2, 1, 16, {"wavelet": "db2"})
    assert other.kept() != haar and [len(h) for h in other.kept()] == [len(h) for h in haar]
    assert other.memory.bytes()["region_keys"] == 0 < plain.memory.bytes()["region_keys"]


def test_region_keys_follow_the_keys() -> None:
    """Small writes mend what they touch, a refresh builds anew, and neither differs from a fresh filter."""
    for sets in ({}, {"rope_space": "center"}, {"norm": "mean", "levels": 3, "keep": [0.6, 0.6, 0.5]}):
        bench = Bench(85, 2, 2, 16, sets)
        counters = bench.net.counters
        bench.read()
        first, changed = bench.kept(), 0
        assert counters.index_builds == 1 and counters.selections == 2
        for rows in (Rows.range(21, 27), Rows.of([3, 70, 84, 88], bench.net.device), Rows.range(82, 90)):
            fresh = 4 * torch.randn(2, 1, 2, rows.count, 16, generator=torch.Generator().manual_seed(rows.count))
            bench.memory.write(0, rows, *fresh.unbind(0))
            other = Bench(85, 2, 2, 16, sets)
            other.k.copy_(bench.k)
            assert bench.kept() == other.kept()
            changed += bench.kept() != first
            first = bench.kept()
        assert changed >= 2 and counters.index_builds == 1
        everything = torch.randn(2, 1, 2, bench.length, 16, generator=torch.Generator().manual_seed(3))
        bench.memory.write(0, Rows.range(0, bench.length), *everything.unbind(0))
        other = Bench(85, 2, 2, 16, sets)
        other.k.copy_(bench.k)
        assert bench.kept() == other.kept() and counters.index_builds == 2


def test_a_pass_that_renews_all_that_is_filtered_reads_all() -> None:
    for rows, dense in [
        (Rows.range(0, 20), True),
        (Rows.range(0, 19), False),
        (Rows.range(1, 28), False),
        (Rows(None, torch.arange(27).flip(0), 27), True),
        (Rows.of([0, *range(9, 28)], torch.device("cpu")), True),
        (Rows.of([0, 5, 9], torch.device("cpu")), False),
    ]:
        bench = Bench(22, 2, 1, 8, {})
        bench.read()
        bench.memory.begin_pass(Window(0, 22, 26, 1, 4, (22,)), refresh=False)
        bench.memory.write(0, rows, *torch.ones(2, 1, 2, rows.count, 8).unbind(0))
        piece = bench.memory.read(0, bench.q, bench.rows)[0]
        assert (piece[0].shape[2] == 30) == dense and (bench.memory.kept(0) is None) == dense


def test_few_rows_of_a_short_prompt_renew_nothing() -> None:
    bench = Bench(8, 1, 1, 8, {}, response=16)
    bench.read()
    bench.memory.begin_pass(Window(0, 8, 12, 1, 4, (8,)), refresh=False)
    rows = Rows.of([0, *range(9, 17)], torch.device("cpu"))
    bench.memory.write(0, rows, *torch.ones(2, 1, 1, 9, 8).unbind(0))
    bench.memory.read(0, bench.q, bench.rows)
    assert bench.memory.kept(0) is not None


def test_a_refresh_reads_all() -> None:
    bench = Bench(24, 1, 1, 8, {})
    window = Window(0, 24, 28, 1, 4, (24,))
    bench.memory.begin_pass(window, refresh=True)
    assert bench.memory.read(0, bench.q, bench.rows)[0][0].shape[2] == 32
    bench.memory.begin_pass(window, refresh=False)
    bench.memory.begin_refresh(0)
    assert bench.memory.read(0, bench.q, bench.rows)[0][0].shape[2] == 32
    assert bench.memory.kept(0) is None and bench.read()[0].shape[2] < 32


def test_other_tokens_can_be_required_while_a_selection_lasts() -> None:
    bench = Bench(64, 1, 1, 8, {"reselect_every": 9, "keep": [0.1, 0.1]})
    for required in ([], [20, 21], [33], []):
        bench.memory.require(required)
        piece, kept = bench.read(), bench.memory.kept(0)
        assert kept is not None and set(required) <= set(kept[0])
        shown = torch.full((bench.length,), -math.inf)
        shown[64:] = 0
        shown[kept[0]] = 0
        whole = bench.net.attend(bench.q, [(bench.k, bench.v, shown.view(1, 1, 1, -1))])
        torch.testing.assert_close(bench.net.attend(bench.q, [piece]), whole)


def test_fresh_values_reach_a_selection_that_lasts() -> None:
    bench = Bench(32, 1, 1, 8, {"reselect_every": 4})
    bench.read()
    bench.memory.write_values(0, Rows.range(0, 32), torch.full((1, 1, 32, 8), 3.0))
    piece, kept = bench.read(), bench.memory.kept(0)
    assert kept is not None and int((piece[1] == 3.0).all(dim=3).sum()) == len(kept[0])
    assert bench.net.counters.selections == bench.net.counters.index_builds == 1


@pytest.mark.parametrize("forced", [0, 3])
def test_a_selection_lasts_as_long_as_asked(forced: int) -> None:
    bench = Bench(64, 2, 1, 16, {"reselect_every": 3, "force_keep": forced}, response=7)
    made = []
    for step in range(7):
        bench.q = torch.randn(bench.q.shape, generator=torch.Generator().manual_seed(step))
        if step == 4:  # new rows of the response, then most of the prompt
            fresh = torch.randn(2, 1, 2, 7, 16, generator=torch.Generator().manual_seed(9))
            bench.memory.write(0, Rows.range(64, 71), *fresh.unbind(0))
        if step == 5:
            bench.memory.write(0, Rows.range(1, 40), *torch.ones(2, 1, 2, 39, 16).unbind(0))
        piece = bench.read()
        made.append(bench.memory.kept(0))
        shown = torch.zeros(2, bench.length)
        shown[:, :64] = -math.inf
        for head, positions in enumerate(made[-1] or []):
            shown[head, positions] = 0
        whole = bench.net.attend(bench.q, [(bench.k, bench.v, shown.view(1, 2, 1, -1))])
        torch.testing.assert_close(bench.net.attend(bench.q, [piece]), whole)
    assert made[0] == made[1] == made[2] != made[3] == made[4] == made[5] != made[6]
    assert bench.net.counters.selections == 3
    assert bench.memory.bytes()["selected"] > 0
    bench.memory.write(0, Rows.range(0, bench.length), bench.k.flip(2), bench.v.flip(2))
    bench.read()
    assert bench.net.counters.selections == 4


def test_finished_blocks_can_be_filtered_too() -> None:
    bench = Bench(16, 1, 1, 8, {"scope": "prompt+done"}, response=32)
    for start in (16, 24, 40):
        bench.read(start)
        other = Bench(start, 1, 1, 8, {}, response=48 - start)
        other.k[:], other.v[:] = bench.k, bench.v
        other.q = bench.q
        assert bench.memory.kept(0) == other.kept()
    assert bench.net.counters.index_builds <= 2
    lasting = Bench(16, 1, 1, 8, {"scope": "prompt+done", "reselect_every": 9, "keep": [0.3, 0.5]}, response=32)
    assert [lasting.read(start)[0].shape[2] for start in (16, 40, 40)] == [36, 14, 14]
    assert Bench(16, 1, 1, 8, {}, response=32).memory.kept(0) is None


def test_votes_in_parts_are_the_votes() -> None:
    q, keys = torch.randn(2, 3, 10, 8), torch.randn(2, 3, 20, 8)
    whole = torch.softmax(q @ keys.transpose(2, 3), dim=3).sum(dim=2)
    for at_once in (1, 90, 500, 900, 10**6):
        torch.testing.assert_close(votes(q, keys, at_once), whole)


def test_the_best_share_is_stable_and_ascending() -> None:
    scores = torch.tensor([[3.0, 1.0, 3.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [1e-30, 2e-30, 5.0, 0.0, 4.0]])
    assert best_share(scores, 0.4).tolist() == [[0, 2], [0, 1], [2, 4]]
    assert best_share(scores, 0.41).tolist() == [[0, 2, 4], [0, 1, 2], [1, 2, 4]]
    assert best_share(torch.rand(25), 0.28).shape == (7,)  # 0.28 * 25 is a little more than 7 in floating point
    assert best_share(scores, 0.01).tolist() == [[0], [0], [2]]


@pytest.mark.parametrize("values", [1, 2, 5, 40, 10**6])
def test_the_best_share_is_that_of_a_stable_sort(values: int) -> None:
    draw = torch.Generator().manual_seed(values)
    for share in (0.01, 0.27, 0.4, 0.99):
        scores = torch.randint(0, values, (2, 3, 100), generator=draw) / 8
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : math.ceil(share * 100)]
        assert torch.equal(best_share(scores, share), best.sort(dim=-1).values)


def test_runs_are_gathered_from_buffers_and_views() -> None:
    t = torch.randn(2, 3, 11, 4)
    first = torch.randint(0, 9, (2, 3, 5))
    wanted = torch.stack([t[b, h, i : i + 2] for b in range(2) for h in range(3) for i in first[b, h].tolist()])
    for source in (t, t.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([t, t], dim=2)[:, :, :11]):
        assert torch.equal(gather_runs(source, first, 2), wanted.view(2, 3, 10, 4))


# -- in a decode ----------------------------------------------------------------------------------------------------


def decode(method: str, sets: dict[str, Any], prompt: int = 70, kind: str = "mha", **changed: Any) -> Any:
    ids = [(11 * i) % 120 for i in range(prompt)]
    dtype = changed.pop("dtype", "float32")
    settings = {"gen_length": 16, "block_length": 8, "steps": 16, "eos_stop": False, **changed}
    return generate(model(f"{NAME}/{kind}", dtype), ids, method, sets, settings, trace=True)


@pytest.mark.parametrize("base", ["fast_dllm", "elastic_cache"])
def test_keeping_everything_is_the_base(base: str) -> None:
    changed = {} if base == "fast_dllm" else {"block_length": None}
    plain = decode(base, {}, **changed)
    for sets in ({"keep": [1, 1], "min_prompt": 0}, {"skip_layers": [0, 1, 2, 3], "min_prompt": 0}, {}):
        made = decode(f"{base}+wavefilter", sets, **changed)
        assert made.output_ids == plain.output_ids and made.counters.selections == 0
        assert all(not any(p["method"]["kept_per_head"]) for p in made.passes)
    assert decode(f"{base}+wavefilter", {"min_prompt": 70}, **changed).counters.selections > 0


def test_float64_and_the_presets() -> None:
    for case in (fast_dllm_cases[0], elastic_cases[0]):
        base = {"fast_dllm.mode": case["method"]}
        if case["method"] == "elastic":
            names = {"window": "window_length", "gamma": "gamma", "track": "track_num"}
            base = {k: case["args"][v] for k, v in names.items()}
        name = "elastic_cache" if case["method"] == "elastic" else "fast_dllm"
        check(case, *run(case, f"{name}+wavefilter", {**options(case), **base}, "float64"))
    tuned = next(c for c in fast_dllm_cases if c["wavefilter"]["force_keep"])
    check(tuned, *run(tuned, "wavefilter_tuned", {"fast_dllm.mode": tuned["method"], "min_prompt": 0}))
    paper = next(c for c in fast_dllm_cases if c["prompt_len"] > 256 and c["wavefilter"]["props"] == [0.4, 0.4])
    check(paper, *run(paper, "wavefilter", {"fast_dllm.mode": paper["method"], "norm": paper["wavefilter"]["norm"]}))


@pytest.mark.parametrize("mode", ["dual", "prefix"])
@pytest.mark.parametrize("sets", [{"reselect_every": 4, "force_keep": 2}, {"scope": "prompt+done"}, {"group": "layer"}])
def test_every_option_decodes(mode: str, sets: dict[str, Any]) -> None:
    for kind in ("mha", "gqa"):
        plain, literal = (
            decode("fast_dllm+wavefilter", {"mode": mode, "min_prompt": 0, "literal": literal, **sets}, kind=kind)
            for literal in (False, True)
        )
        assert plain.masks_left == 0 and plain.counters.selections == literal.counters.selections > 0
        assert plain.output_ids == literal.output_ids


def test_bfloat16_infill_guidance_and_dream() -> None:
    assert decode("wavefilter_tuned", {"min_prompt": 0}, dtype="bfloat16").masks_left == 0
    assert decode("wavefilter", {"min_prompt": 0}, cfg_scale=1.0).masks_left == 0
    infill = decode("wavefilter", {"min_prompt": 0}, gen_length=None, fill="40:56", steps=16)
    assert infill.masks_left == 0
    assert {p["method"]["filtered"] for p in infill.passes} == {40}
    ids = [(7 * i) % 100 for i in range(64)]
    # the row before the first block is the prompt's last token, and is written in every pass
    settings = {"gen_length": 16, "block_length": 8, "steps": 16, "eos_stop": False}
    made = generate(model("dream_fastdllm"), ids, "wavefilter", {"min_prompt": 0}, settings)
    again = generate(model("dream_fastdllm"), ids, "wavefilter", {"min_prompt": 0, "literal": True}, settings)
    assert made.output_ids == again.output_ids
    assert made.counters.index_builds == 2 * model("dream_fastdllm").config.num_layers


def test_what_is_held_is_measured_and_let_go() -> None:
    made = decode("wavefilter", {"min_prompt": 0}, prompt=64)
    held = made.cache_bytes
    assert held["region_keys"] * 8 * 80 == 3 * (held["keys"] + held["values"]) * 64  # 3/8 of the prompt's share
    assert held["indices"] > 0 == held["selected"]
    memory = parse_method("wavefilter").build().memory
    before = set(vars(memory))
    loaded = model(f"{NAME}/mha")
    settings = DecodeSettings.make({"gen_length": 4, "steps": 4}, "llada")
    canvas = Canvas.make([5] * 8, settings, loaded.config, loaded.network.device)
    memory.begin(Request(loaded.network, canvas, canvas.ids, settings))
    memory.begin_pass(Window(0, 8, 12, 0, 4, (8,)), refresh=True)
    memory.end()
    leftovers = {k: v for k, v in vars(memory).items() if k not in before}
    assert not any(isinstance(v, torch.Tensor | list) for v in leftovers.values())


@pytest.mark.parametrize(
    ("method", "sets", "words"),
    [
        ("wavefilter", {"keep": [0.4, 0.4, 0.4]}, r"nearest valid: keep=\[0.4,0.4\]"),
        ("wavefilter", {"keep": []}, "1 to 2 values"),
        ("wavefilter", {"keep": [0.4, 1.5]}, "at most 1"),
        ("wavefilter", {"keep": [0.0, 0.5]}, "above 0"),
        ("wavefilter", {"levels": 0}, "at least 1"),
        ("wavefilter", {"wavelet": "har"}, "haar"),
        ("wavefilter+wavefilter_tuned", {}, "same filter"),
        ("baseline+wavefilter", {}, "does not keep the keys"),
    ],
)
def test_what_does_not_fit_is_refused(method: str, sets: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_method(method, sets)


def test_nothing_lies_on_a_filter_and_layers_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from dllm_bench.caching import spec as specs

    class Above(DenseMemory):
        name = "above"

    plain = specs.METHODS.get
    monkeypatch.setattr(specs.METHODS, "get", lambda name: Above if name == "above" else plain(name))
    with pytest.raises(UserError, match="serves no memory above it: put 'above' below it"):
        parse_method("fast_dllm+wavefilter+above")
    assert issubclass(plain("wavefilter"), Memory)
    with pytest.raises(UserError, match="the model has 4 layers"):
        decode("wavefilter", {"skip_layers": [4]})


def test_levels_alone_repeat_the_last_share() -> None:
    assert parse_method("wavefilter", {"wavefilter.levels": "3"}).parts[1][1].shares == (0.4, 0.4, 0.4)  # type: ignore[attr-defined]


def test_pywavelets_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs PyWavelets"):
        parse_method("wavefilter", {"wavelet": "db4"})
    assert len(cases(NAME)) == 53
