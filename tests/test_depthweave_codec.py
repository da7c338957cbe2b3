"""DepthWeave-KV's numbers: bases, codes, routing, windows, the controller."""

from __future__ import annotations

import itertools

import pytest
import torch
from depthweave_data import low_rank_data, rand
from torch import Tensor

from dllm_bench.methods.depthweave_codec import (
    WHOLE,
    Base,
    decode,
    decode_some,
    encode,
    encode_base,
    pack_channels,
    quantize,
    unpack_channels,
)
from dllm_bench.methods.depthweave_coder import LayerWindow, fit_basis, layer_windows, route, second_moment, token_order


def base_of(y: Tensor, rank: int) -> Base:
    return encode_base(y, None, fit_basis(second_moment([y], None), rank))


def coded(y: Tensor, rank: int, mark: int) -> Tensor:
    """y after coding with every token at one level."""
    marks = torch.full(y.shape[1:3], mark, dtype=torch.uint8)
    return decode(encode(base_of(y, rank), y, marks), y.dtype)


# -- the codec --------------------------------------------------------------------------------------------------------


def test_the_basis_is_orthonormal_and_holds_the_leading_directions() -> None:
    y = low_rank_data()
    basis = fit_basis(second_moment([y], None), 8).double()
    torch.testing.assert_close(
        basis @ basis.transpose(2, 3), torch.eye(8).double().expand(2, 2, 8, 8), atol=2e-3, rtol=0
    )
    leading = torch.linalg.svd(y).Vh[:, :, :8]
    overlap = torch.linalg.svdvals(basis @ leading.transpose(2, 3))
    assert float(overlap.min()) > 0.999


def test_a_basis_of_all_directions_loses_nothing_but_rounding() -> None:
    y = low_rank_data()
    basis = fit_basis(second_moment([y], None), 99).double()
    assert basis.shape[2] == 32
    torch.testing.assert_close(y @ basis.transpose(2, 3) @ basis, y, atol=1e-2, rtol=0)
    assert float((coded(y, 32, 0) - y).norm() / y.norm()) < 0.02


def test_more_directions_never_raise_the_error() -> None:
    y = low_rank_data()
    moment = second_moment([y], None)
    errors = []
    for rank in range(1, 33, 3):
        b = torch.linalg.qr(fit_basis(moment, rank).double().transpose(2, 3)).Q
        errors.append((y - y @ b @ b.transpose(2, 3)).norm(dim=3))
    assert all(bool((b <= a + 1e-6).all()) for a, b in itertools.pairwise(errors))


def test_more_residual_channels_never_raise_the_error_of_a_vector() -> None:
    y = low_rank_data()
    errors = [(coded(y, 8, mark) - y).norm(dim=3) for mark in (0, 3, 2, 1)]
    assert all(bool((b <= a + 1e-9).all()) for a, b in itertools.pairwise(errors))
    assert float(errors[-1].mean()) < 0.9 * float(errors[0].mean())


@pytest.mark.parametrize("rank", [1, 8, 24])
def test_a_whole_residual_is_nearly_exact_at_any_rank(rank: int) -> None:
    y = low_rank_data()
    left = (coded(y, rank, 0) - y).norm(dim=3)
    assert bool(((coded(y, rank, WHOLE) - y).norm(dim=3) <= 0.2 * left + 1e-9).all())


def test_the_gate_is_the_best_factor_in_its_range() -> None:
    y = low_rank_data()
    base = base_of(y, 8)
    codes = encode(base, y, torch.ones(2, 50, dtype=torch.uint8))
    part, left = codes.residuals[0], y - coded(y, 8, 0)
    channels = part.all_channels(32)
    assert channels is not None
    v = left.flatten(1, 2).gather(2, channels)
    numbers, scales = quantize(v, 7)
    gates = part.scales.double() / scales.double()
    assert float(gates.max()) <= 1 + 1e-3 and float(gates.min()) >= 0
    assert float(gates.min()) < 0.999, "some gate has to differ from 1 to show anything"
    plain = numbers * scales.double()
    for factor in (0.9, 1.0, 1.1):
        gated = ((plain * gates - v) ** 2).sum(dim=2)
        assert bool((gated <= ((plain * min(factor, 1.0) - v) ** 2).sum(dim=2) + 1e-6).all())


def test_the_largest_channels_are_kept() -> None:
    y = low_rank_data()
    part = encode(base_of(y, 8), y, torch.full((2, 50), 3, dtype=torch.uint8)).residuals[0]
    channels = part.all_channels(32)
    assert channels is not None
    left = (y - coded(y, 8, 0)).flatten(1, 2).abs()
    assert torch.equal(channels.sort(dim=2).values, left.topk(2, dim=2).indices.sort(dim=2).values)


@pytest.mark.parametrize(("n", "block"), [(5, 32), (32, 32), (40, 32), (64, 32)])
def test_quantized_numbers_lie_within_half_a_step(n: int, block: int) -> None:
    t = rand(7, n)
    codes, scales = quantize(t, 127, block)
    assert codes.dtype == torch.int8 and scales.shape == (7, -(-n // block))
    steps = scales.double().repeat_interleave(block, dim=1)[:, :n]
    assert bool(((codes * steps - t).abs() <= 0.51 * steps).all())
    assert int(codes.abs().max()) == 127


def test_zeros_are_coded_as_zeros() -> None:
    y = torch.zeros(2, 2, 6, 32, dtype=torch.float64)
    assert not coded(y, 4, 1).any() and not coded(y, 4, WHOLE).any()


@pytest.mark.parametrize("bits", [1, 5, 7, 8])
@pytest.mark.parametrize("count", [1, 8, 19])
def test_packed_channels_come_back(bits: int, count: int) -> None:
    ids = torch.randint(0, 1 << bits, (count,), generator=torch.Generator().manual_seed(bits))
    packed = pack_channels(ids, bits)
    assert packed.numel() == bits * -(-count // 8)
    assert torch.equal(unpack_channels(packed, bits, count), ids)


@pytest.mark.parametrize("d", [6, 32, 48, 128])
@pytest.mark.parametrize("center", [False, True])
def test_some_vectors_decode_as_among_all(d: int, center: bool) -> None:
    y = low_rank_data(3, 41, d)
    mean = y.mean(dim=2, keepdim=True).half() if center else None
    y = y if mean is None else y - mean.double()
    basis = fit_basis(second_moment([y], None), 40)
    marks = torch.stack([torch.randperm(41, generator=torch.Generator().manual_seed(i)) % 5 for i in range(3)])
    # the same numbers of each level in every head
    codes = encode(encode_base(y, mean, basis), y, marks.to(torch.uint8))
    whole = decode(codes, torch.float64)
    tokens = torch.tensor([[40, 0, 7, 7], [3, 2, 1, 0]])
    some = decode_some(codes, torch.float64, torch.tensor([2, 0]), tokens)
    wanted = torch.stack([whole[:, 2, tokens[0]], whole[:, 0, tokens[1]]], dim=1)
    torch.testing.assert_close(some, wanted)
    torch.testing.assert_close(decode(codes, torch.float64, slice(1, 3)), whole[:, 1:3])


def test_identical_layers_share_the_basis_that_one_of_them_would_have() -> None:
    y = low_rank_data()
    one, shared = (second_moment(layers, None) for layers in ([y], [y, y, y]))
    torch.testing.assert_close(one, shared)


def test_weighted_tokens_pull_the_basis() -> None:
    y = low_rank_data()
    weights = torch.ones(2, 50)
    weights[:, 7] = 1e6
    direction = y[:, :, 7] / y[:, :, 7].norm(dim=2, keepdim=True)
    first = fit_basis(second_moment([y], weights), 1)[:, :, 0].double()
    assert bool(((first * direction).sum(dim=2).abs() > 0.99).all())


# -- routing and windows ----------------------------------------------------------------------------------------------


def test_the_order_is_by_ranks_and_a_flag_is_half_a_rank() -> None:
    mass = torch.tensor([[0.1, 0.5, 0.2, 0.5, 0.0]])
    spike = torch.tensor([[0.3, 0.1, 0.2, 0.1, 0.1]])
    none = torch.zeros(1, 5, dtype=torch.bool)
    # ranks of mass 1 3 2 4 0, of spike 4 0 3 1 2: scores 10 6 10 10 4
    assert token_order(mass, spike, none).tolist() == [[0, 2, 3, 1, 4]]
    flags = torch.tensor([[False, False, False, True, True]])
    assert token_order(mass, spike, flags).tolist() == [[3, 0, 2, 4, 1]]
    flags = torch.tensor([[False, True, False, False, False]])
    assert token_order(mass, spike, flags).tolist() == [[0, 1, 2, 3, 4]], "a flag is worth 4 of 5 tokens"


def test_permuting_tokens_permutes_the_routing() -> None:
    mass, spike = rand(2, 30, seed=1).abs(), rand(2, 30, seed=2).abs()
    flags = torch.zeros(2, 30, dtype=torch.bool)
    turn = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    order, turned = (
        token_order(m[:, t], s[:, t], flags) for m, s, t in ((mass, spike, slice(None)), (mass, spike, turn))
    )
    marks, moved = route(order, (0.1, 0.2, 0.3), 1.0, 0.0), route(turned, (0.1, 0.2, 0.3), 1.0, 0.0)
    # equal scores are told apart by position, which the permutation changes
    ranks = [m.argsort(1).argsort(1) for m in (mass, spike)]
    alone = (ranks[0] + ranks[1])[0]
    single = [i for i in range(30) if (alone == alone[turn[i]]).sum() == 1]
    assert [int(moved[0, i]) for i in single] == [int(marks[0, turn[i]]) for i in single]


@pytest.mark.parametrize(
    ("scale", "whole", "counts"),
    [
        (1.0, 0.0, {1: 5, 2: 15, 3: 30, WHOLE: 0}),
        (1.0, 0.02, {1: 3, 2: 15, 3: 30, WHOLE: 2}),
        (1.0, 0.07, {1: 0, 2: 13, 3: 30, WHOLE: 7}),
        (4.0, 0.001, {1: 19, 2: 60, 3: 20, WHOLE: 1}),
        (0.25, 0.0, {1: 1, 2: 4, 3: 8, WHOLE: 0}),
        (1.0, 1.0, {1: 0, 2: 0, 3: 0, WHOLE: 100}),
    ],
)
def test_each_level_gets_its_share(scale: float, whole: float, counts: dict[int, int]) -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).unsqueeze(0)
    marks = route(order, (0.05, 0.15, 0.3), scale, whole)
    assert {mark: int((marks == mark).sum()) for mark in counts} == counts
    if whole == 0.02:
        assert marks[0, order[0, :6]].tolist() == [WHOLE, WHOLE, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("layers", "width", "windows"),
    [
        (6, 4, [([0, 1, 2, 3], [0, 1, 2]), ([2, 3, 4, 5], [3, 4, 5])]),
        (5, 4, [([0, 1, 2, 3], [0, 1, 2]), ([1, 2, 3, 4], [3, 4])]),
        (3, 1, [([0], [0]), ([1], [1]), ([2], [2])]),
        (4, 2, [([0, 1], [0, 1]), ([1, 2], [2]), ([2, 3], [3])]),
        (2, 4, [([0, 1], [0, 1])]),
        (8, 4, [([0, 1, 2, 3], [0, 1, 2]), ([2, 3, 4, 5], [3, 4]), ([4, 5, 6, 7], [5, 6, 7])]),
    ],
)
def test_windows_overlap_and_each_layer_has_one(
    layers: int, width: int, windows: list[tuple[list[int], list[int]]]
) -> None:
    assert [(list(w.layers), w.coded) for w in layer_windows(layers, width)] == windows


def test_the_controller_raises_at_once_and_lowers_after_three_calm_probes() -> None:
    window = LayerWindow(range(1), [0])
    assert window.judge(0.2, 0.1) and window.scale == 1.25
    assert not any(window.judge(e, 0.1) for e in (0.1, 0.05)) and window.scale == 1.25
    assert window.judge(0.11, 0.1) and window.scale == 1.5625, "a loud probe starts the count again"
    assert [(window.judge(0.0, 0.1), window.scale)[1] for _ in range(4)] == [1.5625, 1.5625, 1.5625 * 0.9, 1.5625 * 0.9]
    for _ in range(20):
        window.judge(1.0, 0.1)
    assert window.scale == 4.0
    for _ in range(200):
        window.judge(0.0, 0.1)
    assert window.scale == 0.25


def test_the_second_moment_moves_half_way_at_each_refresh() -> None:
    window = LayerWindow(range(1), [0])
    moments = [second_moment([low_rank_data(seed=s)], None) for s in (0, 5)]
    window.fit(moments[0], 4)
    window.fit(moments[1], 4)
    assert window.basis is not None
    wanted = fit_basis((moments[0] + moments[1]) / 2, 4).double()
    torch.testing.assert_close(torch.linalg.svdvals(window.basis.double() @ wanted.transpose(2, 3)).min().item(), 1.0,
                               atol=2e-3, rtol=0)  # fmt: skip
    before = window.moment
    window.fit((moments[0] + moments[1]) / 2, 4)
    torch.testing.assert_close(window.moment, before)
