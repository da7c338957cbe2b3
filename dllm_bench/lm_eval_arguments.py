"""The arguments of dllm-bench as an lm-eval model: `--model_args pretrained=…,method=…,…`.

Nothing here imports lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dllm_bench.caching.spec import MethodSpec, parse_method, split_sets
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError, nearest
from dllm_bench.options import Options, make_options, option

__all__ = ["Arguments", "ModelOptions"]

_LOADING = ("dtype", "device", "rope_scaling", "chat_template", "revision")
_OWNER = "model_args"


@dataclass(frozen=True)
class ModelOptions(Options):
    """What is neither a decode setting nor an option of the method."""

    pretrained: str = option("", "model: short name, folder, or hub id")
    method: str = option("baseline", "cache method; parts stack with +")
    set: str | None = option(None, "options of the method: key=value;key=value")
    seed: int = option(0, "seed of decoding and of estimates", low=0)
    mc_num: int = option(128, "noisy copies of an answer whose likelihood is asked for", low=1)
    mc_batch: int = option(32, "copies computed together", low=1)
    check_greedy: bool = option(True, "also decode each answer whose likelihood is asked for: is_greedy")
    dtype: str = option("auto", "auto, float64, float32, bfloat16, float16")
    device: str = option("auto", "auto, cpu, cuda, cuda:N")
    rope_scaling: str | None = option(None, "ntk:FACTOR for longer contexts")
    chat_template: str = option("auto", "auto, llada, dream, plain")
    revision: str | None = option(None, "hub revision instead of the pinned one")
    batch_size: str = option("1", "lm-eval's --batch_size: requests are decoded one at a time")
    max_batch_size: str | None = option(None, "lm-eval's --max_batch_size: likewise")

    def check(self) -> None:
        if not self.pretrained:
            raise UserError("model_args need pretrained=MODEL (nearest valid: pretrained=tiny)")
        if self.batch_size not in ("1", "auto") or self.max_batch_size not in (None, "1"):
            raise UserError("dllm_bench decodes one request at a time: nearest valid is --batch_size 1")


@dataclass(frozen=True)
class Arguments:
    """Checked arguments.

    Attributes:
        decode: the decode settings that were given.
    """

    options: ModelOptions
    method: MethodSpec
    decode: Mapping[str, Any]

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Arguments:
        """Sorts arguments by name. Raises UserError for an unknown one, naming the nearest."""
        own = {f.name for f in fields(ModelOptions)}
        settings = {f.name for f in fields(DecodeSettings)} - {"fill", "seed"}
        options = make_options(ModelOptions, {k: v for k, v in given.items() if k in own}, owner=_OWNER)
        sets: dict[str, Any] = dict(split_sets([one for one in (options.set or "").split(";") if one.strip()]))
        # an option that its part alone has may be named without it in set=…, as on the command line
        standard = parse_method(options.method)
        qualified = {f"{part}.{key}": key for part, its in standard.parts for key in its.as_dict()}
        for name, value in given.items():
            if name in qualified:
                if sets.keys() & {name, qualified[name]}:
                    raise UserError(f"option '{name}' is set twice")
                sets[name] = value
            elif name not in own and name not in settings:
                raise _unknown(name, [*own, *settings, *qualified], qualified)
        decode = {k: v for k, v in given.items() if k in settings}
        make_options(DecodeSettings, decode, owner=_OWNER)
        return cls(options, parse_method(options.method, sets), decode)

    def loading(self) -> dict[str, Any]:
        """What `load_model` takes."""
        return {"spec": self.options.pretrained, **{name: getattr(self.options, name) for name in _LOADING}}


def _unknown(name: str, known: list[str], qualified: Mapping[str, str]) -> UserError:
    """The error for an argument that does not exist; a method's option without its part is understood."""
    bare = next((full for full, key in qualified.items() if key == name), None)
    near = bare or nearest(name, known) or nearest(name.rpartition(".")[2], list(qualified.values()))
    hint = f"did you mean '{near}'? " if near else ""
    return UserError(f"unknown argument '{name}' in model_args: {hint}valid: {', '.join(sorted(known))}")
