"""DepthWeave-KV's memory: what it gives back of what was written, pass by pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depthweave_data import MHA, WINDOW, Bench, error
from torch import Tensor

from dllm_bench.caching.memory import Memory, PassMemory
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.methods import depthweave_coder
from dllm_bench.methods.depthweave_codec import Codes
from dllm_bench.models.network import Network


def test_a_refresh_reads_exactly_and_later_passes_read_codes() -> None:
    bench = Bench()
    for layer, found in enumerate(bench.refresh()):
        assert error(found, bench.exact[layer]) == 0
    for layer, found in enumerate(bench.whole()):
        prompt = [t[:, :, :40] for t in found]
        assert 0.02 < error(prompt, [t[:, :, :40] for t in bench.exact[layer]]) < 0.5
        assert error([t[:, :, 40:] for t in found], [t[:, :, 40:] for t in bench.exact[layer]]) == 0


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_codes_come_back_at_their_positions(dtype: str) -> None:
    """Nearly lossless settings: a key rotated to a wrong place would be far off."""
    bench = Bench(dtype=dtype, rank=32, dense_top=1.0, center=True)
    bench.refresh()
    for layer, found in enumerate(bench.whole()):
        assert found[0].dtype == bench.net.dtype
        assert error(found, bench.exact[layer]) < 0.01


def test_rows_behind_the_prompt_are_exact_after_a_partial_pass() -> None:
    bench = Bench()
    bench.refresh()
    before = bench.whole()
    read = bench.run(Rows.range(42, 46), False, seed=1)
    for layer, found in enumerate(bench.whole()):
        assert error([t[:, :, 40:] for t in found], [t[:, :, 40:] for t in bench.exact[layer]]) == 0
        assert error([t[:, :, :40] for t in found], [t[:, :, :40] for t in before[layer]]) == 0
        assert error(read[layer], found) == 0


@pytest.mark.parametrize("rows", [Rows.range(38, 43), Rows.of([3, 41, 7, 47], torch.device("cpu")), Rows.range(5, 6)])
def test_prompt_rows_that_a_partial_pass_computes_stay_exact_until_the_refresh(rows: Rows) -> None:
    bench = Bench()
    bench.refresh()
    before = bench.whole()
    held = bench.memory.bytes()
    bench.run(rows, False, seed=1)
    bench.run(Rows.range(5, 8), False, seed=2)
    touched = sorted({*torch.arange(48)[rows.where].tolist(), 5, 6, 7})
    ahead = [p for p in touched if p < 40]
    rest = [p for p in range(40) if p not in ahead]
    assert bench.memory.bytes()["keys"] == held["keys"] * (8 + len(ahead)) // 8
    for layer, found in enumerate(bench.whole()):
        assert error([t[:, :, touched] for t in found], [t[:, :, touched] for t in bench.exact[layer]]) == 0
        assert error([t[:, :, rest] for t in found], [t[:, :, rest] for t in before[layer]]) == 0
    bench.refresh(seed=3)
    assert bench.memory.bytes()["keys"] == held["keys"]
    for layer, found in enumerate(bench.whole()):
        assert error([t[:, :, :40] for t in found], [t[:, :, :40] for t in bench.exact[layer]]) > 0.02


def test_a_read_before_a_write_in_the_same_pass_sees_the_write_afterwards() -> None:
    bench = Bench()
    bench.refresh()
    bench.memory.begin_pass(WINDOW, False)
    before = bench.memory.whole(0)[0].clone()
    rows = Rows.of([4, 41], torch.device("cpu"))
    found = bench.layer(0, rows, seed=5)[0]
    kept = [p for p in range(48) if p not in (4, 41)]
    assert error([found[:, :, [4, 41]]], [bench.exact[0][0][:, :, [4, 41]]]) == 0
    assert error([found[:, :, kept]], [before[:, :, kept]]) == 0


def test_layers_of_one_pass_may_have_other_rows() -> None:
    bench = Bench()
    bench.refresh()
    bench.memory.begin_pass(WINDOW, False)
    for layer, positions in enumerate(([3, 41], [9, 45], [1, 3], [40, 47], [41, 3])):
        found = bench.layer(layer, Rows.of(positions, torch.device("cpu")), seed=1)
        at = [[t[:, :, positions] for t in pair] for pair in (found, bench.exact[layer])]
        assert error(at[0], at[1]) == 0
    bench.memory.end_pass()
    for layer, positions in enumerate(([3, 41], [9, 45], [1, 3], [40, 47], [41, 3])):
        at = [[t[:, :, positions] for t in pair] for pair in (bench.whole()[layer], bench.exact[layer])]
        assert error(at[0], at[1]) == 0


def test_a_layer_may_be_read_before_its_refresh_begins() -> None:
    bench = Bench()
    bench.refresh()
    bench.memory.begin_pass(WINDOW, False)
    bench.memory.whole(0)
    bench.memory.begin_refresh(0)
    for layer in range(5):
        assert error(bench.layer(layer, Rows.range(0, 48), 1), bench.exact[layer]) == 0
    bench.memory.end_pass()
    for layer, found in enumerate(bench.whole()):
        assert error([t[:, :, :40] for t in found], [t[:, :, :40] for t in bench.exact[layer]]) < 0.6


def test_values_alone_can_be_written_behind_the_prompt() -> None:
    bench = Bench()
    bench.refresh()
    v = bench.tensors(0, 3, seed=4)[2]
    before = bench.whole()[0]
    for seen_before in (False, True):
        bench.memory.begin_pass(WINDOW, False)
        if seen_before:
            bench.memory.whole(0)
            v = v + 1
        bench.memory.write_values(0, Rows.range(43, 46), v)
        k, found = (t.clone() for t in bench.memory.whole(0))
        bench.memory.end_pass()
        assert torch.equal(found[:, :, 43:46], v) and torch.equal(k, before[0])
        assert torch.equal(bench.whole()[0][1], found)
    with pytest.raises(AssertionError, match="without keys"):
        bench.memory.write_values(0, Rows.range(3, 5), v[:, :, :2])


def test_values_alone_can_be_written_in_a_refresh() -> None:
    bench = Bench()
    bench.refresh()
    bench.memory.begin_pass(WINDOW, True)
    v = bench.tensors(0, 3, seed=4)[2]
    bench.memory.write_values(0, Rows.range(43, 46), v)
    k, found = bench.memory.whole(0)
    assert torch.equal(found[:, :, 43:46], v)
    assert torch.equal(k[:, :, 40:], bench.exact[0][0][:, :, 40:])


@pytest.mark.parametrize("loaded", [False, True])
def test_gathering_reads_what_the_whole_holds(loaded: bool) -> None:
    bench = Bench(name=MHA, center=True, dense_top=0.1)
    bench.refresh()
    bench.run(Rows.of([3, 41, 7], torch.device("cpu")), False, seed=1)
    wanted = bench.whole()
    first = torch.tensor([[[0, 2, 6, 38, 40, 46], [46, 40, 38, 2, 6, 2]]])
    bench.memory.begin_pass(WINDOW, False)
    for layer, (k, v) in enumerate(wanted):
        if loaded:
            bench.memory.whole(layer)
        found = bench.memory.gather(layer, first, 2)
        where = torch.stack([first, first + 1], dim=3).flatten(2)
        for got, t in zip(found, (k, v), strict=True):
            torch.testing.assert_close(got, t.gather(2, where.unsqueeze(3).expand(-1, -1, -1, t.shape[3])))


def test_rows_of_a_batch_are_independent() -> None:
    double = Bench(batch=2, dense_top=0.1)
    double.refresh()
    found = double.whole()
    for row in range(2):
        single = Bench(dense_top=0.1)
        tensors = double.tensors

        def one(layer: int, rows: int, seed: int, row: int = row, tensors: Any = tensors) -> Any:
            return tuple(t[row : row + 1] for t in tensors(layer, rows, seed))

        single.tensors = one  # type: ignore[method-assign]
        single.refresh()
        # the probe looks at both rows; with the default tolerance it decides the same for each here
        for a, b in zip(found, single.whole(), strict=True):
            torch.testing.assert_close([t[row : row + 1] for t in a], list(b))


def test_recoding_unchanged_keys_changes_nothing() -> None:
    bench = Bench(tolerance=1e9)
    bench.refresh()
    first = bench.whole()
    bench.refresh()
    for a, b in zip(first, bench.whole(), strict=True):
        torch.testing.assert_close(list(a), list(b), atol=1e-9, rtol=0)


def test_centring_takes_a_constant_off() -> None:
    codes: list[list[Tensor]] = []
    for shift in (0.0, 8.0):
        bench = Bench(center=True, tolerance=1e9)
        tensors = bench.tensors

        def moved(layer: int, rows: int, seed: int, shift: float = shift, tensors: Any = tensors) -> Any:
            q, k, v = tensors(layer, rows, seed)
            k, v = ((t * 64).round() / 64 for t in (k, v))
            k[:, :, :40] -= k[:, :, :40].mean(dim=2, keepdim=True)
            v[:, :, :40] -= v[:, :, :40].mean(dim=2, keepdim=True)
            return 0 * q, k + shift, v + shift

        bench.tensors = moved  # type: ignore[method-assign]
        bench.refresh()
        found = [s.codes for s in bench.memory._layers]
        codes.append([c.base.coefficients for c in found if c is not None])
    assert all(int((a - b).abs().max()) <= 1 for a, b in zip(*codes, strict=True))


def test_a_partial_refresh_codes_its_layers_anew_and_leaves_the_others() -> None:
    bench = Bench(rank=8, center=True)  # five layers: windows 0-3 and 1-4
    bench.refresh()
    before, windows = bench.whole(), bench.memory._coder.windows
    bases = [w.basis for w in windows]
    bench.run(Rows.range(42, 46), False, seed=1, refresh_from=2)
    assert [a is w.basis for a, w in zip(bases, windows, strict=True)] == [True, True], "no window was refreshed whole"
    assert bench.memory.report()["probe_error"][0] is not None
    after = bench.whole()
    for layer in range(5):
        exact = [t[:, :, :40] for t in bench.exact[layer]]
        assert error([t[:, :, :40] for t in after[layer]], exact) < 0.9
        assert layer < 2 or error([t[:, :, :40] for t in before[layer]], exact) > 1
        if layer < 2:
            assert error([t[:, :, :40] for t in after[layer]], [t[:, :, :40] for t in before[layer]]) == 0
    bench.run(Rows.range(42, 46), False, seed=2, refresh_from=1)
    assert [a is w.basis for a, w in zip(bases, windows, strict=True)] == [True, False]
    bench.run(Rows.range(42, 46), False, seed=2, refresh_from=4)
    report = bench.memory.report()
    assert report["probe_error"][0] is None and report["probe_error"][1] is not None


def test_layers_are_let_go_as_soon_as_their_windows_are_coded() -> None:
    bench = Bench(name=MHA)  # six layers: windows 0-3 and 2-5
    bench.memory.begin_pass(WINDOW, True)
    most = []
    for layer in range(6):
        bench.layer(layer, Rows.range(0, 48), 0)
        most.append(sorted(bench.memory._coder.fresh))
    bench.memory.end_pass()
    assert most == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [2, 3, 4], [2, 3, 4, 5]]
    assert not bench.memory._coder.fresh and not bench.memory._scratch


def test_a_probe_of_exact_keys_and_values_finds_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tolerance=0.0)
    raw: list[Tensor] = []
    probe = depthweave_coder.Coder._probe

    def watched(self: Any, fresh: Any, codes: Codes) -> Tensor:
        raw[:] = [fresh.raw[:, :, :, :40].flatten(1, 2)]
        return probe(self, fresh, codes)

    monkeypatch.setattr(depthweave_coder.Coder, "_probe", watched)
    monkeypatch.setattr(depthweave_coder, "decode_some", lambda codes, dtype, heads, tokens: raw[0][:, heads])
    bench.refresh()
    assert bench.memory.report()["probe_error"] == [0.0, 0.0]
    assert bench.memory.report()["scale"] == [1.0, 1.0]


@pytest.mark.parametrize("at_once", [1 << 24, 1])
def test_watched_attention_is_that_of_response_rows_over_all_keys(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(depthweave_coder, "_WEIGHTS_AT_ONCE", at_once)
    bench = Bench(gen=20)
    bench.memory.begin_pass(WINDOW, True)
    keys = bench.layer(0, Rows.range(0, 60), 0)[0]
    q = bench.net.rope(bench.tensors(0, 60, 0)[0], slice(0, 60))
    weights = torch.softmax(q[:, :, 40:] @ keys.transpose(2, 3) / 32**0.5, dim=3)[..., :40]
    fresh = bench.memory._coder.fresh[0]
    assert fresh.mass is not None and fresh.spike is not None and fresh.asked is not None
    torch.testing.assert_close(fresh.mass.double(), weights.sum(dim=(1, 2)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fresh.spike.double(), weights.amax(dim=(1, 2)), atol=1e-5, rtol=1e-5)
    assert torch.equal(fresh.asked, q[:, :, -16:])


def test_a_layer_is_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(name=MHA, center=True, dense_top=0.1)
    bench.refresh()
    wanted = bench.whole()
    monkeypatch.setattr("dllm_bench.methods.depthweave_kv._DECODED_AT_ONCE", 1)
    for a, b in zip(wanted, bench.whole(), strict=True):
        torch.testing.assert_close(list(a), list(b))


def test_a_refresh_without_response_rows_keeps_the_scale() -> None:
    bench = Bench(salience=True)
    bench.refresh()
    before = bench.memory.report()["scale"]
    bench.run(Rows.range(0, 40), True, seed=1)
    report = bench.memory.report()
    assert report["scale"] == before and report["probe_error"] == [None, None]
    for layer, found in enumerate(bench.whole()):
        assert error([t[:, :, :40] for t in found], [t[:, :, :40] for t in bench.exact[layer]]) < 0.5
        assert error([t[:, :, 40:] for t in found], [t[:, :, 40:] for t in bench.exact[layer]]) == 0


def test_only_response_rows_are_watched() -> None:
    """The order of the rows does not matter, and prompt queries do not count."""
    shown = []
    for scattered in (False, True):
        bench = Bench(dense_top=0.1, salience=True)
        turn = torch.randperm(48, generator=torch.Generator().manual_seed(1)) if scattered else torch.arange(48)
        tensors = bench.tensors

        def placed(layer: int, rows: int, seed: int, turn: Tensor = turn, tensors: Any = tensors,
                   scattered: bool = scattered) -> Any:  # fmt: skip
            q, k, v = tensors(layer, rows, seed)
            if scattered:
                q[:, :, :40] += 3
            return tuple(t[:, :, turn] for t in (q, k, v))

        bench.tensors = placed  # type: ignore[method-assign]
        bench.run(Rows.of(turn.tolist(), torch.device("cpu")), True)
        shown.append((bench.whole(), bench.memory.report()))
    assert shown[0][1] == pytest.approx(shown[1][1])
    for a, b in zip(shown[0][0], shown[1][0], strict=True):
        torch.testing.assert_close(list(a), list(b))


def reachable(root: Any) -> dict[int, int]:
    """Bytes of every storage that attributes, lists and dicts lead to from an object of the memory."""
    sizes: dict[int, int] = {}
    left, seen = [root], set()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, Request | Network):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            sizes[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif hasattr(one, "__dict__"):
            left += vars(one).values()
    return sizes


@pytest.mark.parametrize("center", [False, True])
def test_every_byte_held_between_passes_is_counted(center: bool) -> None:
    bench = Bench(name=MHA, center=center, dense_top=0.1)
    for step in range(2):
        bench.refresh(seed=step)
        bench.run(Rows.range(38, 43), False, seed=5)
        held = bench.memory.bytes()
        assert sum(held.values()) == sum(reachable(bench.memory).values())
        assert (held["means"] > 0) == center
        # two windows of two kinds and two heads: the upper triangle of 32 x 32, and 16 rows in fp16
        assert (held["moments"], held["bases"]) == (8 * 528 * 8, 8 * 16 * 32 * 2)


def test_nothing_is_held_after_a_request() -> None:
    bench = Bench()
    bench.refresh()
    assert bench.memory.bytes()["codes"] > 0
    bench.memory.end()
    assert not [name for name in vars(bench.memory) if name in ("_layers", "_coder", "_scratch", "request")]


class _Above(Memory):
    """Keeps one thing of its own over what lies below."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        raise NotImplementedError

    def read(self, layer: int, q: Tensor, rows: Rows) -> Any:
        raise NotImplementedError

    def bytes(self) -> dict[str, int]:
        return {**super().bytes(), "extra": 7}


def test_nominal_bytes_count_what_lies_above_as_stored() -> None:
    bench = Bench()
    bench.refresh()
    nominal = bench.memory.nominal_bytes()
    assert nominal is not None
    assert _Above(lower=bench.memory).nominal_bytes() == {**nominal, "extra": 7}
    assert _Above(lower=PassMemory()).nominal_bytes() is None
