"""The tiny model while it is trained: its network, its loss, its optimiser and its checkpoint file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_data import Batch
from tiny_grow import grown
from tiny_init import structured_weights
from tiny_stages import network_config
from torch import Tensor

from dllm_bench.errors import UserError
from dllm_bench.models.checkpoint import load_network, read_config
from dllm_bench.models.network import Network, Weights

__all__ = ["Trainer", "trained"]


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


def has_bfloat16(device: str) -> bool:
    """Whether the device multiplies bfloat16 matrices; a CPU that does not is ten times slower with them."""
    if not device.startswith("cpu"):
        return True
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16") or found.get("bf16"))


def loss_of(net: TrainingNetwork, batch: Batch, bfloat16: bool) -> tuple[Tensor, list[float]]:
    """Weighted cross-entropy of the masked tokens, and per sample the share of those of weight 1 that are right."""
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bfloat16):
        logits = net.last_rows(batch)
    chosen = batch.weights > 0
    weights, labels = batch.weights[chosen], batch.labels[chosen]
    picked = logits[chosen].float()
    each = F.cross_entropy(picked, labels, reduction="none")
    hit = torch.zeros_like(batch.weights)
    hit[chosen] = (picked.argmax(-1) == labels).float()
    full = (batch.weights == 1.0).float()
    return (each * weights).sum() / weights.sum(), ((hit * full).sum(1) / full.sum(1)).tolist()


_STATE = ("seed", "step", "started", "before", "tokens", "seconds", "threads")


class Trainer:
    """Weights, optimiser and moving average of a run, with its checkpoint file.

    Attributes:
        step: steps done, those of the runs before included; started: step at which this run began.
        before: facts of the runs that led to the weights this one began with, as a card tells them.
        tokens, seconds, threads: what this run took.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device, self.bfloat16 = seed, device, has_bfloat16(device)
        self.config = network_config()
        weights = structured_weights(self.config, seed)
        self.step, self.started, self.tokens, self.seconds = 0, 0, 0, 0.0
        self.before: list[dict[str, Any]] = []
        self.threads = torch.get_num_threads()
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
        loss, right = loss_of(self.net, batch, self.bfloat16)
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

    def start_from(self, folder: Path) -> None:
        """Goes on from a published model, which may be narrower (see tiny_grow.py), where its last run ended.

        Raises UserError where the folder has no model, none that this one can grow from, or no record of its training.
        """
        architecture, config = read_config(folder)
        old = load_network(folder, architecture, config, torch.float32, torch.device("cpu")).weights
        seed, self.before = trained(folder)
        if seed != self.seed:
            raise UserError(f"'{folder}' was trained with seed {seed}: pass --seed {seed}")
        self.step = self.started = self.before[-1]["to"]
        try:
            new = dict(leaves(old if config == self.config else grown(old, config, self.config, self.seed)))
        except ValueError as error:
            raise UserError(f"'{folder}' cannot become this model: {error}") from error
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(new[name])
                self.average[name].copy_(p)

    def save(self, path: Path) -> None:
        """Writes all of it, so that a stop at any moment leaves the former checkpoint or this one."""
        state = {
            **{name: getattr(self, name) for name in _STATE},
            "weights": {n: p.detach() for n, p in self.params.items()},
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        """Raises UserError for a file that is no checkpoint, or one of another seed: batches follow from the seed."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            if state["seed"] != self.seed:
                raise UserError(f"'{path}' was trained with seed {state['seed']}: pass --seed {state['seed']}")
            with torch.no_grad():
                for name, p in self.params.items():
                    p.copy_(state["weights"][name])
                    self.average[name].copy_(state["average"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            for name in _STATE:
                setattr(self, name, state[name])
        except FileNotFoundError as error:
            raise UserError(f"there is no checkpoint '{path}': train first, or name another --folder") from error
        except (RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
            raise UserError(f"'{path}' is not a whole checkpoint of this model: move it away to start over") from error


def trained(folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Seed and runs of a published model; raises UserError where its record is missing or broken."""
    path = folder / "training.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        seed, runs = int(told["seed"]), list(told["runs"])
        if not runs or not all(isinstance(run["to"], int) for run in runs):
            raise ValueError("a run without an end")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"'{path}' does not tell at which step the training of the model ended") from error
    return seed, runs


def _to(weights: Weights, device: str) -> Weights:
    for layer in weights.layers:
        for name in ("attn_norm", "qkv", "attn_out", "ffn_norm", "gate_up", "down"):
            setattr(layer, name, getattr(layer, name).to(device))
    return Weights(weights.embed.to(device), weights.layers, weights.final_norm.to(device), weights.head.to(device))
