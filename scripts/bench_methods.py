"""Time and bytes of every cache method against context length, and of the bare arithmetic below them, in one run.

    python scripts/bench_methods.py [--ctx 1k,4k] [--methods fast_dllm,wavefilter:reselect_every=8] [--rounds 3]

A random network (4 layers, width 128, 4 heads, vocabulary 2,048) decodes 64 tokens in blocks of 32 by quota, one
token a pass. The baseline runs a few of its passes and is scaled to 64, since each of them costs the same. "bare" is
nothing but the matrix products and the attention of a pass: the floor that no implementation gets under. Times are
minima over rounds; compare them within one run only. "prepare" is a shared affix's own cost, paid once; "peak" is the
memory of the whole process.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dllm_bench.caching.method import Method
from dllm_bench.caching.part import METHODS
from dllm_bench.caching.spec import MethodSpec, parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import Run, denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.network import LayerWeights, Network, Weights
from dllm_bench.running.lengths import parse_ctx
from dllm_bench.running.measure import MemoryPeak

LAYERS, WIDTH, HEADS, VOCAB, FFN = 4, 128, 4, 2048, 512
TOKENS, BLOCK = 64, 32


def random_network() -> Network:
    """Seeded Gaussian weights; the mask's row of the head is zero, so it is never the answer."""
    draw = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    layers = [
        LayerWeights(
            attn_norm=torch.ones(WIDTH),
            qkv=matrix(3 * WIDTH, WIDTH),
            qkv_bias=None,
            attn_out=matrix(WIDTH, WIDTH),
            ffn_norm=torch.ones(WIDTH),
            gate_up=matrix(2 * FFN, WIDTH),
            down=matrix(WIDTH, FFN),
        )
        for _ in range(LAYERS)
    ]
    head = matrix(VOCAB, WIDTH)
    head[VOCAB - 1] = 0
    config = NetworkConfig(
        "llada", WIDTH, LAYERS, HEADS, HEADS, WIDTH // HEADS, FFN, VOCAB, VOCAB, 1e-5, 5e5, 4096,
        qkv_bias=False, tied=False, shift=False, rope_cast=False, mask_id=VOCAB - 1, eos_ids=(VOCAB - 2,),
    )  # fmt: skip
    return Network(config, Weights(matrix(VOCAB, WIDTH) * WIDTH**0.5, layers, torch.ones(WIDTH), head))


@dataclass
class Bare:
    """The matrix products and the attention of one pass over `rows` of `length` positions, and nothing else."""

    network: Network
    rows: int
    length: int

    def __post_init__(self) -> None:
        shape = (1, HEADS, self.length, WIDTH // HEADS)
        self._keys = [torch.randn(shape) for _ in range(LAYERS)]
        self._values = [torch.randn(shape) for _ in range(LAYERS)]

    def __call__(self) -> Tensor:
        x = torch.randn(1, self.rows, WIDTH)
        for i, w in enumerate(self.network.weights.layers):
            q = F.linear(x, w.qkv)[..., :WIDTH].view(1, self.rows, HEADS, -1).transpose(1, 2)
            o = F.scaled_dot_product_attention(q, self._keys[i], self._values[i])
            F.linear(o.transpose(1, 2).flatten(2), w.attn_out)
            F.linear(F.linear(x, w.gate_up)[..., :FFN], w.down)
        return F.linear(x[:, -BLOCK:], self.network.weights.head)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def decode(network: Network, spec: MethodSpec, length: int, passes: int | None = None) -> Run:
    """Decodes 64 tokens behind a random prompt; `passes` ends it early."""
    settings = DecodeSettings.make({"gen_length": TOKENS, "block_length": BLOCK, "eos_stop": False}, "llada")
    ids = torch.randint(0, VOCAB - 2, (length - TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    canvas = Canvas.make(ids, settings, network.config, network.device)
    limited = (lambda: _limited(spec.build(), passes)) if passes else spec.build
    return denoise(network, canvas, limited, settings, trace=False)


def _limited(method: Method, passes: int) -> Method:
    method.pass_limit = lambda settings: max(1, passes // 2)  # type: ignore[method-assign]
    return method


@dataclass
class Line:
    """What was measured of one method at one length: seconds, and bytes."""

    name: str
    dense: float | None
    partial: float | None
    total: float
    passes: int
    preparation: float | None
    held: int
    peak: int | None = None


def measure(network: Network, spec: MethodSpec, length: int, rounds: int, passes: int) -> Line:
    limit = passes if spec.name == "baseline" else None
    memory = MemoryPeak("cpu")
    memory.start()
    runs = [decode(network, spec, length, limit) for _ in range(rounds)]
    peak = memory.stop()
    best = min(runs, key=lambda r: r.clock.total)

    def least(kind: str) -> float | None:
        times = [s for r in runs for k, s in r.clock.passes if k == kind]
        return min(times, default=None)

    scale = TOKENS / best.counters.nfe if limit else 1.0
    cost = best.preparation.seconds if best.preparation else None
    held = sum(best.cache_bytes.values())
    return Line(
        spec.label, least("dense"), least("partial"), best.clock.total * scale, best.counters.nfe, cost, held, peak
    )


def bare_line(network: Network, length: int, rounds: int) -> Line:
    dense, partial = Bare(network, length, length), Bare(network, BLOCK, length)
    with torch.inference_mode():
        slow = min(seconds(dense) for _ in range(rounds + 1))
        quick = min(seconds(partial) for _ in range(10 * rounds))
    return Line("bare", slow, quick, 2 * slow + (TOKENS - 2) * quick, TOKENS, None, 0)


def table(length: int, lines: list[Line]) -> Table:
    """Milliseconds per pass, their ratio to the bare arithmetic, and the speed-up over the baseline."""
    bare = lines[0]
    base = next((one for one in lines if one.name == "baseline"), None)
    title = f"{length} positions, {TOKENS} tokens, blocks of {BLOCK}, quota"
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("method", no_wrap=True)
    for name in ("dense ms", "x bare", "partial ms", "x bare", "tok/s", "speed-up", "prepare ms", "MB held", "peak MB"):
        made.add_column(name, justify="right", no_wrap=True)
    for one in lines:
        made.add_row(
            one.name,
            _ms(one.dense),
            _ratio(one.dense, bare.dense),
            _ms(one.partial),
            _ratio(one.partial, bare.partial),
            f"{TOKENS / one.total:.1f}",
            _ratio(base.total if base else None, one.total),
            _ms(one.preparation),
            f"{one.held / 1e6:.2f}",
            "" if one.peak is None else f"{one.peak / 1e6:.0f}",
        )
    return made


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.2f}"


def _ratio(value: float | None, by: float | None) -> str:
    return "" if value is None or not by else f"{value / by:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctx", default="1k,4k")
    parser.add_argument("--methods", default=",".join(METHODS.names()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--baseline-passes", type=int, default=6, help="passes of the baseline that are run")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    network, console = random_network(), Console(width=130)
    names = [*dict.fromkeys(["baseline", *args.methods.split(",")])]
    for text in args.ctx.split(","):
        length = parse_ctx(text)
        lines = [bare_line(network, length, args.rounds)]
        for name in names:
            method, _, options = name.partition(":")
            spec = parse_method(method, options.split(":") if options else ())
            lines.append(measure(network, spec, length, args.rounds, args.baseline_passes))
        console.print(table(length, lines))


if __name__ == "__main__":
    main()
