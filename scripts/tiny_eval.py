"""Exact accuracy of the tiny model with real decoding: block by block, by threshold or by quota, without caches."""

from __future__ import annotations

import random

import torch
from tiny_facts import document
from tiny_prompts import KINDS, Maker, Prompt
from torch import Tensor

from dllm_bench.models.network import Network


@torch.no_grad()
def decode(
    net: Network, ids: Tensor, start: int, block: int, maker: Maker, threshold: float | None
) -> tuple[Tensor, int]:
    """Fills the masks of ids [B, N] behind `start`; a threshold commits what is surer than it, None one token a pass.

    Returns the ids and the number of passes. At least one token of every sample is committed in a pass. Blocks behind
    the one in which every sample has ended stay masked.
    """
    ids, passes, mask = ids.clone(), 0, maker.mask
    for left in range(start, ids.shape[1], block):
        window = slice(left, min(left + block, ids.shape[1]))
        while bool((open_ := ids[:, window] == mask).any()):
            logits = net.head(net.hidden(ids)[:, window]).float()
            logits[..., mask] = float("-inf")
            sure, token = torch.softmax(logits, -1).max(-1)
            sure = sure.masked_fill(~open_, -1.0)
            take = torch.zeros_like(open_) if threshold is None else (sure > threshold) & open_
            take |= torch.nn.functional.one_hot(sure.argmax(-1), sure.shape[1]).bool() & open_
            ids[:, window] = torch.where(take, token, ids[:, window])
            passes += 1
        done = ids[:, start : window.stop]
        if bool(((done == maker.eot) | (done == maker.eos)).any(1).all()):
            break
    return ids, passes


def answers(maker: Maker, response: list[int]) -> list[int]:
    """The response up to its first end token."""
    ends = [i for i, t in enumerate(response) if t in (maker.eos, maker.eot)]
    return response[: ends[0]] if ends else response


def held_out_prompt(maker: Maker, rng: random.Random, kind: str, budget: int) -> Prompt:
    """A prompt that training never saw; word problems have the length that they have."""
    if kind == "problem":
        return maker.problem(rng, evaluation=True)
    if kind in KINDS:
        return maker.prompt(rng, KINDS[kind], budget, evaluation=True)
    return document(maker, rng, kind, budget, evaluation=True)


def held_out_accuracy(
    net: Network,
    maker: Maker,
    kind: str,
    length: int,
    count: int,
    *,
    gen: int,
    block: int,
    threshold: float | None = 0.9,
    batch: int = 8,
    seed: int = 1,
) -> tuple[float, float, float]:
    """Share of held-out samples answered exactly; mean share of their values found; passes until the end."""
    rng = random.Random(f"held-out-{seed}-{kind}-{length}")
    prompts = [held_out_prompt(maker, rng, kind, length - gen) for _ in range(count)]
    prompts.sort(key=lambda p: len(p.ids))
    exact = part = passes = 0.0
    groups: list[list[int]] = []
    for i, p in enumerate(prompts):
        # samples of one length can share a batch
        if groups and len(prompts[groups[-1][0]].ids) == len(p.ids) and len(groups[-1]) < batch:
            groups[-1].append(i)
        else:
            groups.append([i])
    for group in groups:
        rows = [prompts[i].ids + [maker.mask] * gen for i in group]
        start = len(prompts[group[0]].ids)
        device = net.device
        out, used = decode(net, torch.tensor(rows, device=device), start, block, maker, threshold)
        passes += used * len(group)
        for i, row in zip(group, out[:, start:].tolist(), strict=True):
            got = answers(maker, row)
            exact += got == prompts[i].answer[:-1]
            text = maker.decode(got)
            part += sum(r in text for r in prompts[i].references) / len(prompts[i].references)
    return exact / count, part / count, passes / count
