"""Made-up keys and values for the tests of DepthWeave-KV, and a bench that feeds them to its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from golden_cases import model
from torch import Tensor

from dllm_bench.caching.memory import DenseMemory
from dllm_bench.caching.request import Request
from dllm_bench.caching.rows import Rows
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window
from dllm_bench.methods.depthweave_kv import DepthWeaveKv, DepthWeaveKvOptions

GQA, MHA = "llada_depthweave/gqa", "llada_depthweave/mha"
WINDOW = Window(0, 0, 1, 0, 1, (0,))


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def low_rank_data(g: int = 2, p: int = 50, d: int = 32, seed: int = 0) -> Tensor:
    """Keys and values [2, g, p, d] with a falling spectrum."""
    turn = torch.linalg.qr(rand(2, g, d, d, seed=seed + 1)).Q
    return (rand(2, g, p, d, seed=seed) * torch.arange(1, d + 1).double() ** -0.8) @ turn


class Bench:
    """A memory fed with given keys and values, without a network pass around it."""

    def __init__(self, prompt: int = 40, gen: int = 8, name: str = GQA, dtype: str = "float64", batch: int = 1,
                 start: int | None = None, **options: Any) -> None:  # fmt: skip
        self.net = model(name, dtype).network
        self.length, self.batch = prompt + gen, batch
        ids = torch.arange(self.length).remainder(100).repeat(batch, 1)
        canvas = Canvas(ids[:1], prompt if start is None else start, self.length, self.net.config.mask_id, ())
        settings = DecodeSettings.make({"gen_length": gen}, "llada")
        values = dataclasses.replace(DepthWeaveKvOptions(rank=16), **options)
        self.memory = DepthWeaveKv(values, DenseMemory())
        self.memory.begin(Request(self.net, canvas, ids, settings))
        self.exact: dict[int, tuple[Tensor, Tensor]] = {}

    def tensors(self, layer: int, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        c = self.net.config
        dtype, s = self.net.dtype, 1000 * seed + layer
        kv = [low_rank_data(self.batch * c.num_kv_heads, rows, c.head_dim, s)[i].to(dtype) for i in (0, 1)]
        k, v = (t.view(self.batch, c.num_kv_heads, rows, c.head_dim) for t in kv)
        return 2 * rand(self.batch, c.num_heads, rows, c.head_dim, seed=s).to(dtype), k, v

    def layer(self, layer: int, rows: Rows, seed: int) -> tuple[Tensor, Tensor]:
        q, k, v = self.tensors(layer, rows.count, seed)
        turned = self.net.rope(k, rows.where)
        if layer not in self.exact:
            shape = (*k.shape[:2], self.length, k.shape[3])
            self.exact[layer] = (k.new_zeros(shape), k.new_zeros(shape))
        rows.put(self.exact[layer][0], turned, dim=2)
        rows.put(self.exact[layer][1], v, dim=2)
        self.memory.write(layer, rows, k, v)
        ((read_k, read_v),) = self.memory.read(layer, self.net.rope(q, rows.where), rows)
        return read_k.clone(), read_v.clone()

    def run(
        self, rows: Rows, refresh: bool, seed: int = 0, refresh_from: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        self.memory.begin_pass(WINDOW, refresh)
        found = []
        for layer in range(self.net.config.num_layers):
            if refresh_from == layer:
                self.memory.begin_refresh(layer)
            full = refresh_from is not None and layer >= refresh_from
            found.append(self.layer(layer, Rows.range(0, self.length) if full else rows, seed))
        self.memory.end_pass()
        return found

    def refresh(self, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        return self.run(Rows.range(0, self.length), True, seed)

    def whole(self) -> list[tuple[Tensor, Tensor]]:
        self.memory.begin_pass(WINDOW, False)
        found = [tuple(t.clone() for t in self.memory.whole(i)) for i in range(self.net.config.num_layers)]
        self.memory.end_pass()
        return found  # type: ignore[return-value]


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
