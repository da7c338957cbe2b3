"""Decode settings of one request: canvas, windows and commit rule, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dllm_bench.errors import UserError
from dllm_bench.options import Options, make_options, option

__all__ = ["ALGS", "DecodeSettings"]

Alg = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold"]
ALGS: tuple[str, ...] = ("origin", "maskgit_plus", "topk_margin", "entropy", "confidence_threshold")
_DEFAULT_LENGTH = 128
_DEFAULT_THRESHOLD = 0.9


@dataclass(frozen=True)
class DecodeSettings(Options):
    """How one response is decoded. None means "not given"; `resolve` fills what follows from the rest.

    At most one of threshold, factor and tokens_per_pass rules the commits; with none of them and no `alg`, the quota of
    the LLaDA paper does (gen_length / steps tokens per pass).
    """

    gen_length: int | None = option(None, "response length in tokens (default 128, or the filled range)", low=1)
    block_length: int | None = option(None, "tokens per block (default: the whole response)", low=1)
    steps: int | None = option(None, "passes in all that quota and Dream schedules spread commits over", low=1)
    threshold: float | None = option(None, "commit every token at least this confident, at least one per pass", low=0)
    factor: float | None = option(None, "Fast-dLLM's factor rule: commit n while (n + 1)(1 - c_n) < factor", low=0)
    tokens_per_pass: int | None = option(None, "commit this many tokens in every pass", low=1)
    remasking: Literal["low_confidence", "random"] = option("low_confidence", "which tokens stay masked")
    temperature: float = option(0.0, "Gumbel noise (LLaDA) or softmax temperature (Dream); 0 is greedy", low=0)
    top_p: float | None = option(None, "nucleus of Dream's sampling", above=0, high=1)
    top_k: int | None = option(None, "largest k of Dream's sampling", low=1)
    alg: Alg | None = option(None, "Dream's schedule")
    alg_temp: float = option(0.0, "temperature of the choice of positions in Dream's schedules", low=0)
    eps: float = option(1e-3, "last time step of Dream's schedules", above=0, high=1)
    cfg_scale: float = option(0.0, "classifier-free guidance: un + (scale + 1)(cond - un)", low=0)
    seed: int = option(0, "seed of the sample's private generator", low=0, high=2**63 - 1)
    eos_stop: bool = option(True, "do not decode behind a committed EOS or end-of-turn token")
    fill: tuple[int, ...] | None = option(None, "START:END of the prompt to fill instead of a response behind it")
    confidence_dtype: Literal["auto", "float64", "model"] = option(
        "auto", "precision of confidences: float64 for LLaDA, the model's own for Dream"
    )

    @classmethod
    def make(cls, values: Mapping[str, Any], family: str | None = None) -> DecodeSettings:
        """Settings from flags or keyword values, resolved and checked. Raises UserError naming what is valid.

        `family` is the network's; None checks as far as that goes before a model is loaded.
        """
        given = dict(values)
        if "no_eos_stop" in given:  # the command line's flag, by its own name
            given.setdefault("eos_stop", not given.pop("no_eos_stop"))
        if isinstance(given.get("fill"), str):
            given["fill"] = _range(given["fill"])
        return make_options(cls, given, owner="decode").resolve(family)

    def resolve(self, family: str | None) -> DecodeSettings:
        """Fills gen_length, block_length, steps and the rule that a Dream network needs, then checks the whole."""
        made = self._with_length()
        given = [n for n in ("threshold", "factor", "tokens_per_pass") if getattr(made, n) is not None]
        if len(given) > 1:
            raise UserError(f"{_flag(given[0])} and {_flag(given[1])} exclude each other: give one of them")
        if family == "dream" and made.alg is None and made.factor is None and made.tokens_per_pass is None:
            alg: Alg = "confidence_threshold" if made.threshold is not None else "entropy"
            made = replace(made, alg=alg)
        if made.alg is not None:
            made = made._with_alg(given)
        if made.alg is not None or family is not None:
            made._check_sampling()
        return made._with_steps()

    def _with_length(self) -> DecodeSettings:
        length = self.gen_length
        if self.fill is not None:
            if len(self.fill) != 2 or not 0 <= self.fill[0] < self.fill[1]:
                raise UserError(f"fill must be START:END with 0 <= START < END, got {_joined(self.fill)}")
            span = self.fill[1] - self.fill[0]
            if length not in (None, span):
                raise UserError(
                    f"gen_length {length} does not match fill {_joined(self.fill)}: nearest valid is {span}"
                )
            length = span
        length = length or _DEFAULT_LENGTH
        block = self.block_length or length
        if length % block:
            below, above = length - length % block, length - length % block + block
            valid = f"{below} or {above}" if below else str(above)
            divisor = max(d for d in range(1, min(block, length) + 1) if length % d == 0)
            raise UserError(
                f"gen_length {length} is not a multiple of block_length {block}: "
                f"nearest valid gen_length is {valid} (or block_length {divisor})"
            )
        return replace(self, gen_length=length, block_length=block)

    def _with_alg(self, given: list[str]) -> DecodeSettings:
        wrong = [n for n in given if n != "threshold"]
        if wrong:
            raise UserError(f"{_flag(wrong[0])} is no part of Dream's schedule --alg {self.alg}: leave one of them out")
        if self.alg == "confidence_threshold":
            return replace(self, threshold=_DEFAULT_THRESHOLD if self.threshold is None else self.threshold)
        if self.threshold is not None:
            raise UserError(f"--threshold belongs to --alg confidence_threshold, not to --alg {self.alg}")
        return self

    def _check_sampling(self) -> None:
        if self.alg is None:
            for name, unset in (("top_p", None), ("top_k", None), ("alg_temp", 0.0), ("eps", 1e-3)):
                if getattr(self, name) != unset:
                    raise UserError(f"{_flag(name)} belongs to Dream's schedules: it needs --alg ({', '.join(ALGS)})")
        elif self.alg_temp and self.alg in ("origin", "confidence_threshold"):
            raise UserError(f"--alg-temp has no meaning with --alg {self.alg}: it takes no share by confidence")
        elif self.remasking != "low_confidence":
            raise UserError(f"--remasking {self.remasking} has no meaning with --alg {self.alg}: use --alg origin")
        if self.remasking == "random" and (self.threshold is not None or self.factor is not None):
            raise UserError("--remasking random has no confidence to compare: use it with --steps or --tokens-per-pass")

    def _with_steps(self) -> DecodeSettings:
        assert self.gen_length is not None and self.block_length is not None
        blocks = self.gen_length // self.block_length
        steps = self.gen_length if self.steps is None else self.steps
        if steps % blocks:
            near = max(blocks, round(steps / blocks) * blocks)
            raise UserError(f"steps {steps} is not a multiple of the {blocks} blocks: nearest valid is {near}")
        if self.alg == "confidence_threshold" and blocks == 1 and self.gen_length % steps:
            near = min(
                (d for d in range(1, self.gen_length + 1) if self.gen_length % d == 0), key=lambda d: abs(d - steps)
            )
            raise UserError(f"steps {steps} does not divide gen_length {self.gen_length}: nearest valid is {near}")
        return replace(self, steps=steps)

    @property
    def blocks(self) -> int:
        """Number of blocks of a resolved setting."""
        assert self.gen_length is not None and self.block_length is not None
        return self.gen_length // self.block_length

    @property
    def steps_per_block(self) -> int:
        """Passes that a block's schedule is spread over."""
        assert self.steps is not None
        return self.steps // self.blocks


def _range(text: str) -> tuple[int, int]:
    start, colon, stop = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return int(start), int(stop)
    except ValueError:
        raise UserError(f"fill must be START:END, such as 8:40, got '{text}'") from None


def _joined(fill: tuple[int, ...]) -> str:
    return ":".join(str(f) for f in fill)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
