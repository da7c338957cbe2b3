"""Trains the embedded tiny model: a masked-diffusion Transformer in LLaDA's architecture.

    python scripts/train_tiny.py                 # all stages; goes on from its checkpoint
    python scripts/train_tiny.py --export        # writes weights and tokenizer to dllm_bench/models/tiny
    make reference                               # measures them, and writes the card

Ctrl-C saves and stops; the same command goes on. Every batch is a function of (seed, step), so a run is reproducible on
a CPU of the same kind with as many threads, stopped or not.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from tiny_data import Batch, Batches
from tiny_eval import held_out_accuracy
from tiny_export import FOLDER, export
from tiny_prompts import TEMPLATES, Maker
from tiny_stages import BLOCK, CONFIG, GEN, STAGES, Stage
from tiny_text import WORDS_DIR, Words, load_words, train_tokenizer
from tiny_trainer import Trainer, trained
from tokenizers import Tokenizer
from torch import Tensor

from dllm_bench.errors import UserError
from dllm_bench.models.network import Network

TOTAL = sum(stage.steps for stage in STAGES)
SAVED_EVERY = 120.0
"""Seconds between checkpoints."""


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

    def line(self, trainer: Trainer, end: int, rate: float) -> str:
        spent = time.perf_counter() - self.since
        left = (end - trainer.step) * spent / len(self.losses) / 60
        kinds = " ".join(f"{k} {100 * sum(v) / len(v):.0f}" for k, v in sorted(self.right.items()))
        return (
            f"step {trainer.step}/{end} loss {sum(self.losses) / len(self.losses):.3f} rate {rate:.1e} "
            f"{self.tokens / spent:.0f} tokens/s {trainer.seconds / 60:.1f} min, left {left:.0f} min; "
            f"masked tokens right, %: {kinds}"
        )


class Stop:
    """Notes Ctrl-C and SIGTERM, so that a step ends and is saved; a second one of either stops at once."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal = 0
        for number in self.SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self.signal = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)


def stage_at(step: int, stages: list[Stage]) -> tuple[Stage, float]:
    """The stage of a step and how far through it is (0 to 1)."""
    for stage in stages:
        if step < stage.steps:
            return stage, step / stage.steps
        step -= stage.steps
    raise ValueError("behind the last stage")


def train(trainer: Trainer, maker: Maker, last: Path, args: argparse.Namespace) -> int:
    """Trains to the end or for `args.steps` steps, saving at `last`. Returns the signal that stopped it, else 0."""
    batches, stop = Batches(maker, trainer.seed), Stop()
    trainer.net.grow_rope(max(p.span + p.length for s in STAGES for p in s.parts))
    end = min(TOTAL, trainer.step + (args.steps or TOTAL))
    print(f"steps {trainer.step} to {end} on {trainer.device} in {'bfloat16' if trainer.bfloat16 else 'float32'}, "
          f"saved to {last}; a line every {args.show} steps, held-out accuracy every {args.evaluate}",
          flush=True)  # fmt: skip
    progress, saved = Progress(), time.perf_counter()
    while trainer.step < end and not stop.signal:
        stage, through = stage_at(trainer.step, STAGES)
        began = time.perf_counter()
        batch = batches.make(trainer.step, stage.part(trainer.seed, trainer.step))
        rate = stage.rate(through) * min(1.0, (trainer.step - trainer.started + 1) / 200)
        progress.add(batch, *trainer.update(_move(batch, trainer.device), rate))
        trainer.seconds += time.perf_counter() - began
        if trainer.step % args.show == 0:
            print(progress.line(trainer, end, rate), flush=True)
            progress = Progress()
        if trainer.step % args.evaluate == 0 and not stop.signal:
            report(trainer.averaged(), maker, stage.checks, 8)
            progress = Progress()
        if time.perf_counter() - saved > SAVED_EVERY:
            trainer.save(last)
            saved = time.perf_counter()
    trainer.save(last)
    print(f"saved at step {trainer.step} of {TOTAL}; "
          + ("publish it with --export" if trainer.step == TOTAL else "the same command goes on"))  # fmt: skip
    return stop.signal


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
    """Writes the averaged weights, and the facts of the run that the card tells behind those of the runs before it.

    Raises UserError where nothing was trained, or half-trained weights would replace those of the package.
    """
    if trainer.step == trainer.started:
        raise UserError(f"'{args.folder}' trained no step yet: there is nothing to publish")
    if args.out.resolve() == FOLDER and trainer.step < TOTAL:
        raise UserError(f"training is at step {trainer.step} of {TOTAL}: name another --out than the package's own")
    run = {
        "from": trainer.started,
        "to": trainer.step,
        "tokens": trainer.tokens,
        "seconds": round(trainer.seconds),
        "threads": trainer.threads,
        "machine": args.machine,
        "about": args.about,
    }
    training = {
        "seed": trainer.seed,
        "parameters": sum(p.numel() for p in trainer.params.values()),
        "runs": [*trainer.before, run],
    }
    export(trainer.averaged().weights, tokenizer, training, args.out)
    print(f"wrote {args.out}")


def tokenizer_of(folder: Path, words: Words, seed: int) -> Tokenizer:
    """The tokenizer of a run, trained when it starts. Raises UserError for a file that holds none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        print("training the tokenizer", flush=True)
        train_tokenizer(words, TEMPLATES, CONFIG["vocab_size"], seed).save(str(path))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise UserError(f"'{path}' is no tokenizer ({error}): move it away to make it anew") from error


def device_of(name: str) -> str:
    """`name`, if tensors can be there; raises UserError."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise UserError(f"cannot train on device '{name}': valid here: {', '.join(known)}") from error
    return name


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def parser() -> Parser:
    made = Parser(description=__doc__, formatter_class=_Help)
    add = made.add_argument
    add("--folder", type=Path, default=Path("checkpoints/tiny"), help="where the checkpoint and the tokenizer are")
    add("--words", type=Path, default=WORDS_DIR, help="folder of the word lists")
    add("--start", type=Path, help="folder of a published model to go on from, instead of a fresh start")
    add("--steps", type=positive, help="stop after so many steps more, instead of at the end")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--device", default="cpu", help="cpu or cuda")
    add("--threads", type=positive, default=1, help="of the CPU, for training")
    add("--show", type=positive, default=50, help="steps between lines of progress")
    add("--evaluate", type=positive, default=1000, help="steps between measurements of held-out accuracy")
    add("--export", action="store_true", help="publish the checkpoint instead of training")
    add("--out", type=Path, default=FOLDER, help="where --export writes")
    add("--machine", default="two cores of a server CPU, shared", help="words for the card that --export writes")
    add("--about", default="all stages", help="what this run trained, for the card that --export writes")
    return made


def begin(trainer: Trainer, start: Path, folder: Path) -> None:
    """Begins a run in `folder` with the weights and the tokenizer of a published model that has stages to go."""
    trainer.start_from(start)
    if trainer.step >= TOTAL:
        raise UserError(
            f"'{start}' was trained to step {trainer.step}, and the last stage ends at {TOTAL}: add a stage"
        )
    tokenizer = (start / "tokenizer.json").read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer)


def run(args: argparse.Namespace) -> int:
    """Trains or publishes. Returns the exit code; raises UserError and OSError for bad input."""
    torch.set_num_threads(args.threads)
    device = device_of(args.device)
    words = load_words(args.words)
    last = args.folder / "last.pt"
    if args.export and args.start:
        raise UserError("--start is for training: --export publishes the checkpoint of --folder")
    trainer = Trainer(args.seed, device)
    if args.export or last.exists():
        trainer.load(last)
        if args.start and trained(args.start)[1] != trainer.before:
            raise UserError(f"the run in '{args.folder}' did not begin from '{args.start}': name another --folder")
    elif args.start:
        begin(trainer, args.start, args.folder)
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(args.folder, words, args.seed)
    if args.export:
        publish(trainer, tokenizer, args)
        return 0
    stopped = train(trainer, Maker(tokenizer, words), last, args)
    return 128 + stopped if stopped else 0


def main() -> None:
    made = parser()
    args = made.parse_args()
    try:
        sys.exit(run(args))
    except KeyboardInterrupt:  # before the first step: there is nothing to save
        sys.exit(128 + signal.SIGINT)
    except UserError as error:
        made.error(str(error))
    except OSError as error:
        made.error(f"'{error.filename}': {error.strerror}" if error.filename else str(error))


if __name__ == "__main__":
    main()
