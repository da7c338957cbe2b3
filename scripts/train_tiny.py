"""Trains the embedded tiny model: a masked-diffusion Transformer in LLaDA's architecture that retrieves needles.

    python scripts/train_tiny.py                 # all stages; resumes from checkpoints/tiny
    python scripts/train_tiny.py --export        # writes weights and tokenizer to dllm_bench/models/tiny
    make reference                               # measures them, and writes the card

Every batch is a function of (seed, step), so a run on the CPU is reproducible and resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_data import Batch, Batches
from tiny_eval import held_out_accuracy
from tiny_export import FOLDER, export
from tiny_grow import grown
from tiny_init import structured_weights
from tiny_prompts import TEMPLATES, Maker
from tiny_stages import BLOCK, CONFIG, GEN, STAGES, Stage, network_config
from tiny_text import WORDS_DIR, load_words, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from dllm_bench.models.checkpoint import load_network, read_config
from dllm_bench.models.network import Network, Weights


class TrainingNetwork(Network):
    """The project's network with what only training needs: attention with copies of keys, few rows at the end."""

    copies: Tensor | None = None

    def attend(self, q: Tensor, parts: Any) -> Tensor:
        if self.copies is None and q.shape[2] >= 1024:  # below, two plain products are faster in training
            return super().attend(q, parts)
        k, v = (torch.cat([p[i] for p in parts], 2) for i in (0, 1))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if self.copies is not None:
            scores = scores + (self.copies if self.copies.shape[2] == 1 else self.copies[:, :, -q.shape[2] :])
        return torch.softmax(scores, -1) @ v

    def last_rows(self, batch: Batch, far: int = 16) -> Tensor:
        """Logits of the last `batch.rows` positions; the last layer computes no others.

        A haystack token that stands for m copies weighs m in attention, but only for readers at least `far` tokens
        away: to its neighbours it is the one token that it is.
        """
        n = batch.ids.shape[1]
        self.copies = None
        if batch.copies is not None:
            index = torch.arange(n, device=batch.ids.device)
            apart = (index[:, None] - index[None, :]).abs() >= far
            self.copies = (batch.copies[:, None, None, :] * apart).to(torch.bfloat16)
        if batch.ghosts is not None:
            own = torch.zeros(batch.ids.shape, device=batch.ids.device)
            self.copies = torch.cat([own, batch.ghosts[2]], 1)[:, None, None, :].to(torch.bfloat16)
        x = self.embed(batch.ids)
        last = self.config.num_layers - 1
        for layer in range(last + 1):
            q, k, v = self.project(layer, x)
            if layer == last:
                q, x = q[:, :, -batch.rows :], x[:, -batch.rows :]
            parts = [(self.rope(k, batch.positions), v)]
            if batch.ghosts is not None:
                index = batch.ghosts[0][:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
                parts.append((self.rope(k.gather(2, index), batch.ghosts[1][:, None, :]), v.gather(2, index)))
            x = x + self.out(layer, self.attend(self.rope(q, batch.positions[..., -q.shape[2] :]), parts))
            x = x + self.ffn(layer, x)
        return self.head(x)


def leaves(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The trained tensors by name."""
    yield "embed", weights.embed
    yield "head", weights.head
    yield "final_norm", weights.final_norm
    for i, layer in enumerate(weights.layers):
        for name in ("attn_norm", "qkv", "attn_out", "ffn_norm", "gate_up", "down"):
            yield f"{i}.{name}", getattr(layer, name)


def loss_of(net: TrainingNetwork, batch: Batch) -> tuple[Tensor, list[float]]:
    """Weighted cross-entropy of the masked tokens, and per sample the share of those of weight 1 that are right."""
    with torch.autocast(batch.ids.device.type, torch.bfloat16):
        logits = net.last_rows(batch)
    chosen = batch.weights > 0
    weights, labels = batch.weights[chosen], batch.labels[chosen]
    picked = logits[chosen].float()
    each = F.cross_entropy(picked, labels, reduction="none")
    hit = torch.zeros_like(batch.weights)
    hit[chosen] = (picked.argmax(-1) == labels).float()
    full = (batch.weights == 1.0).float()
    return (each * weights).sum() / weights.sum(), ((hit * full).sum(1) / full.sum(1)).tolist()


@dataclass
class Progress:
    """Means since the last progress line."""

    losses: list[float] = field(default_factory=list)
    right: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    since: float = field(default_factory=time.perf_counter)

    def add(self, batch: Batch, loss: float, right: list[float]) -> None:
        self.losses.append(loss)
        self.tokens += batch.ids.numel()
        for kind, share in zip(batch.kinds, right, strict=True):
            if not math.isnan(share):
                self.right.setdefault(kind, []).append(share)

    def line(self, trainer: Trainer, total: int, rate: float) -> str:
        spent = time.perf_counter() - self.since
        left = (total - trainer.step) * spent / len(self.losses) / 60
        kinds = " ".join(f"{k} {100 * sum(v) / len(v):.0f}" for k, v in sorted(self.right.items()))
        return (
            f"step {trainer.step}/{total} loss {sum(self.losses) / len(self.losses):.3f} rate {rate:.1e} "
            f"{self.tokens / spent:.0f} tokens/s {trainer.seconds / 60:.1f} min, left {left:.0f} min; "
            f"masked tokens right, %: {kinds}"
        )


class Trainer:
    """Weights, optimiser and moving average of a run, with its checkpoint file."""

    def __init__(self, folder: Path, seed: int, device: str) -> None:
        self.folder, self.seed, self.device = folder, seed, device
        self.config = network_config()
        weights = structured_weights(self.config, seed)
        self.step, self.started, self.tokens, self.seconds = 0, 0, 0, 0.0
        self.net = TrainingNetwork(self.config, _to(weights, device))
        self.params = dict(leaves(self.net.weights))
        for p in self.params.values():
            p.requires_grad_()
        self.average = {n: p.detach().clone() for n, p in self.params.items()}
        decay = [p for p in self.params.values() if p.dim() > 1]
        plain = [p for p in self.params.values() if p.dim() == 1]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=True)

    def update(self, batch: Batch, rate: float) -> tuple[float, list[float]]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, right = loss_of(self.net, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.params.values()), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.ids.numel()
        decay = min(0.998, 1 - 10 / (self.step - self.started + 20))
        with torch.no_grad():
            names = list(self.params)
            torch._foreach_lerp_([self.average[n] for n in names], [self.params[n] for n in names], 1 - decay)
        return float(loss.detach()), right

    def averaged(self) -> Network:
        """A plain network with the averaged weights."""
        net = Network(self.config, structured_weights(self.config, self.seed))
        with torch.no_grad():
            for name, p in leaves(net.weights):
                p.copy_(self.average[name])
        net.weights = _to(net.weights, self.device)
        return net

    def start_from(self, folder: Path, step: int) -> None:
        """Begins at `step` with the weights of a published model, which may be narrower (see tiny_grow.py)."""
        architecture, config = read_config(folder)
        old = load_network(folder, architecture, config, torch.float32, torch.device("cpu")).weights
        new = dict(leaves(old if config == self.config else grown(old, config, self.config, self.seed)))
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(new[name])
                self.average[name].copy_(p)
        self.step = self.started = step

    def save(self, path: Path) -> None:
        state = {
            "step": self.step,
            "started": self.started,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "weights": {n: p.detach() for n, p in self.params.items()},
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.step, self.started = state["step"], state["started"]
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(state["weights"][name])
                self.average[name].copy_(state["average"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def _to(weights: Weights, device: str) -> Weights:
    for layer in weights.layers:
        for name in ("attn_norm", "qkv", "attn_out", "ffn_norm", "gate_up", "down"):
            setattr(layer, name, getattr(layer, name).to(device))
    return Weights(weights.embed.to(device), weights.layers, weights.final_norm.to(device), weights.head.to(device))


def stage_at(step: int, stages: list[Stage]) -> tuple[Stage, float] | None:
    """The stage of a step and how far through it is (0 to 1); None behind the last."""
    for stage in stages:
        if step < stage.steps:
            return stage, step / stage.steps
        step -= stage.steps
    return None


def train(trainer: Trainer, maker: Maker, args: argparse.Namespace) -> None:
    batches = Batches(maker, trainer.seed)
    last = trainer.folder / "last.pt"
    if last.exists():
        trainer.load(last)
        print(f"resuming at step {trainer.step}", flush=True)
    elif args.start:
        trainer.start_from(args.start, args.start_step)
    trainer.net.grow_rope(max(p.span + p.length for s in STAGES for p in s.parts))
    total = sum(s.steps for s in STAGES)
    progress, saved = Progress(), time.perf_counter()
    while (where := stage_at(trainer.step, STAGES)) is not None:
        stage, through = where
        began = time.perf_counter()
        part = stage.part(trainer.seed, trainer.step)
        batch = batches.make(trainer.step, part)
        rate = stage.rate(through) * min(1.0, (trainer.step - trainer.started + 1) / 200)
        progress.add(batch, *trainer.update(_move(batch, trainer.device), rate))
        trainer.seconds += time.perf_counter() - began
        if trainer.step % args.show == 0:
            print(progress.line(trainer, total, rate), flush=True)
            progress = Progress()
        if trainer.step % args.evaluate == 0:
            report(trainer.averaged(), maker, stage.checks, 8)
            progress = Progress()
        if time.perf_counter() - saved > 120:
            trainer.save(last)
            saved = time.perf_counter()
    trainer.save(last)


def _move(batch: Batch, device: str) -> Batch:
    if device == "cpu":
        return batch
    moved = {n: (v.to(device) if isinstance(v, Tensor) else v) for n, v in vars(batch).items()}
    if batch.ghosts is not None:
        moved["ghosts"] = tuple(t.to(device) for t in batch.ghosts)
    return Batch(**moved)


def report(net: Network, maker: Maker, checks: tuple[tuple[str, int], ...], count: int) -> None:
    parts = []
    for kind, length in checks:
        began = time.perf_counter()
        exact, part, passes = held_out_accuracy(net, maker, kind, length, count, gen=GEN, block=BLOCK)
        parts.append(
            f"{kind}@{length} {exact:.0%}/{part:.0%} ({passes:.1f} passes, {time.perf_counter() - began:.0f}s)"
        )
    print("  held out, exact/values:", "; ".join(parts), flush=True)


def publish(trainer: Trainer, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Writes the averaged weights, and the facts of the run that the card tells behind those of the runs before it."""
    run = {
        "from": trainer.started,
        "to": trainer.step,
        "tokens": trainer.tokens,
        "seconds": round(trainer.seconds),
        "threads": args.threads,
        "machine": args.machine,
        "about": args.about,
    }
    training = {
        "seed": args.seed,
        "parameters": sum(p.numel() for p in trainer.params.values()),
        "runs": [*runs_before(trainer.started), run],
    }
    export(trainer.averaged().weights, tokenizer, training)


def runs_before(step: int) -> list[dict[str, Any]]:
    """The runs that led to the published weights up to `step`."""
    path = FOLDER / "training.json"
    if step == 0 or not path.exists():
        return []
    return [run for run in json.loads(path.read_text(encoding="utf-8"))["runs"] if run["to"] <= step]


def tokenizer_of(folder: Path, words_dir: Path, seed: int) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        words = load_words(words_dir)
        train_tokenizer(words, TEMPLATES, CONFIG["vocab_size"], seed).save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/tiny"))
    parser.add_argument("--words", type=Path, default=WORDS_DIR)
    parser.add_argument("--start", type=Path, help="folder of a published model to go on from")
    parser.add_argument("--start-step", type=int, default=0, help="step at which --start goes on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--show", type=int, default=50)
    parser.add_argument("--evaluate", type=int, default=1000)
    parser.add_argument("--machine", default="two cores of a server CPU, shared", help="words for the card")
    parser.add_argument("--about", default="all stages", help="what this run trained, for the card")
    parser.add_argument("--export", action="store_true", help="publish the checkpoint instead of training")
    parser.add_argument("--checkpoint", default="last.pt", help="file in the folder that is measured or published")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(args.folder, args.words, args.seed)
    maker = Maker(tokenizer, load_words(args.words))
    trainer = Trainer(args.folder, args.seed, args.device)
    if not args.export:
        train(trainer, maker, args)
        return
    trainer.load(args.folder / args.checkpoint)
    publish(trainer, tokenizer, args)


if __name__ == "__main__":
    main()
