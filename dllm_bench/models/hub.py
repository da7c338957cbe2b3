"""Model names to loaded models: the embedded one, local folders, and hub ids."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.errors import UserError, choice, nearest
from dllm_bench.hub_access import TIMEOUT_S, quiet
from dllm_bench.lazy import LazyModule
from dllm_bench.models.architecture import Architecture
from dllm_bench.models.checkpoint import load_network, missing_weights, read_config, read_json
from dllm_bench.models.config import NetworkConfig, scale_rope
from dllm_bench.models.text import TextCodec, load_codec

if TYPE_CHECKING:
    import torch

    from dllm_bench.models.network import Network
else:
    torch = LazyModule("torch")

__all__ = [
    "DEVICES",
    "DTYPES",
    "EMBEDDED",
    "SHORT_NAMES",
    "Model",
    "ModelInfo",
    "ShortName",
    "card_of",
    "check_device",
    "check_dtype",
    "fingerprint",
    "load_info",
    "load_model",
]


@dataclass(frozen=True)
class ShortName:
    """A name for a checkpoint: where it lies, and what its files do not say."""

    source: str
    revision: str | None
    chat_template: str
    summary: str


# Revisions: the hub snapshots that public logs of these models name; None follows the hub's main branch.
SHORT_NAMES: dict[str, ShortName] = {
    "tiny": ShortName("", None, "auto", "embedded model: LLaDA's architecture, trained by scripts/train_tiny.py"),
    "llada-8b-instruct": ShortName(
        "GSAI-ML/LLaDA-8B-Instruct", "08b83a6feb34df1a6011b80c3c00c7563e963b07", "llada", "LLaDA 8B, instruction-tuned"
    ),
    "llada-8b-base": ShortName(
        "GSAI-ML/LLaDA-8B-Base", "0f2787f2d87eac5eed8a087d5ecd24277e6255b2", "plain", "LLaDA 8B, pre-trained"
    ),
    "llada-1.5": ShortName(
        "GSAI-ML/LLaDA-1.5", "43716255dd5ce01192bcfc073a2557e969a2f271", "llada", "LLaDA 1.5 8B, preference-tuned"
    ),
    "dream-7b-instruct": ShortName(
        "Dream-org/Dream-v0-Instruct-7B",
        "05334cb9faaf763692dcf9d8737c642be2b2a6ae",
        "dream",
        "Dream 7B, instruction-tuned",
    ),
    "dream-7b-base": ShortName("Dream-org/Dream-v0-Base-7B", None, "plain", "Dream 7B, pre-trained"),
}
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
EMBEDDED = "tiny"
"""Name of the model inside the package."""

_TINY = Path(__file__).parent / "tiny"
_CARD = "dllm_bench.json"
_TEXT_FILES = ["*.json", "merges.txt"]
_WEIGHT_FILES = ["*.safetensors"]


@dataclass(kw_only=True)
class ModelInfo:
    """What a model says without its weights: enough to make its prompts.

    Attributes:
        name: as the user gave it. revision: hub revision, None for a folder. source: hub id, None for a folder.
        folder: where its files lie.
        decode_defaults: decode settings of the model's own card (`dllm_bench.json`), empty without one.
    """

    name: str
    revision: str | None
    source: str | None
    folder: Path
    architecture: type[Architecture]
    config: NetworkConfig
    rope_scaling: str | None
    decode_defaults: dict[str, Any] = field(default_factory=dict)
    _codec: TextCodec | None = None

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def has_codec(self) -> bool:
        return self._codec is not None

    @property
    def codec(self) -> TextCodec:
        """Tokenizer and chat template. Raises UserError when the checkpoint ships no tokenizer."""
        if self._codec is None:
            raise UserError(f"{self.folder} has no tokenizer.json, so only --prompt-ids works with it")
        return self._codec

    @property
    def chat_template(self) -> str | None:
        return self._codec.template.name if self._codec else None


@dataclass(kw_only=True)
class Model(ModelInfo):
    """A loaded model: the network, and what identifies it in a row.

    Attributes:
        fingerprint: hash of config.json and of the weight files' sizes and first 64 MiB.
    """

    fingerprint: str
    network: Network
    dtype: str
    device: str

    def __post_init__(self) -> None:
        # one truth: a model whose network is replaced has the config of that network
        self.config = self.network.config


def check_dtype(dtype: str) -> None:
    """Raises UserError for an unknown dtype name, without importing torch."""
    if dtype not in DTYPES:
        raise choice("dtype", dtype, DTYPES)


def check_device(device: str) -> None:
    """Raises UserError for a device that is not auto, cpu, cuda or cuda:N, without importing torch."""
    if device not in DEVICES and not re.fullmatch(r"cuda:\d+", device):
        raise choice("device", device, [*DEVICES, "cuda:0"])


def load_info(
    spec: str = "tiny",
    rope_scaling: str | None = None,
    chat_template: str | None = "auto",
    revision: str | None = None,
    *,
    weights: bool = False,
) -> ModelInfo:
    """Reads config, tokenizer and card of a model, not its weights: quick for a model of any size.

    Takes what `load_model` takes. Files of a hub model are fetched where they are not here yet, the weights only with
    `weights`.
    """
    name = _word("model", spec, "tiny")
    folder, source, revision, template = _resolve(name, revision, weights)
    architecture, config = read_config(folder)
    config = scale_rope(config, None if rope_scaling is None else str(rope_scaling))
    chosen = _word("chat template", chat_template, "auto")
    codec = load_codec(folder, config.family, template if chosen == "auto" else chosen)
    card = folder / _CARD
    return ModelInfo(
        name=name,
        revision=revision,
        source=source,
        folder=folder,
        architecture=architecture,
        config=_with_ends(config, codec),
        rope_scaling=None if rope_scaling in (None, "none") else rope_scaling,
        decode_defaults=dict(read_json(card).get("decode", {})) if card.is_file() else {},
        _codec=codec,
    )


def load_model(
    spec: str = "tiny",
    dtype: str | None = "auto",
    device: str | None = "auto",
    rope_scaling: str | None = None,
    chat_template: str | None = "auto",
    revision: str | None = None,
) -> Model:
    """Loads a short name, a local folder, or a hub id.

    Args:
        spec: a name of SHORT_NAMES, a folder with config.json and safetensors, or OWNER/NAME on the hub.
        dtype: one of DTYPES; auto or None is float32 on a CPU and bfloat16 on a GPU.
        device: auto, cpu, cuda or cuda:N.
        rope_scaling: "ntk:FACTOR" multiplies rope_theta.
        chat_template: auto, llada, dream or plain.
        revision: hub revision instead of the pinned one.

    Raises:
        UserError: one line naming the file, tensor or option that is wrong.
    """
    dtype, device = _word("dtype", dtype, "auto"), _word("device", device, "auto")
    check_dtype(dtype)
    check_device(device)
    info = load_info(spec, rope_scaling, chat_template, revision, weights=True)
    where = _device(device)
    kind = _dtype(dtype, where)
    return Model(
        **vars(info),
        fingerprint=fingerprint(info.folder),
        network=load_network(info.folder, info.architecture, info.config, kind, where),
        dtype=str(kind).removeprefix("torch."),
        device=str(where),
    )


def card_of(name: str) -> dict[str, Any]:
    """What a short name's own card says (the embedded model's); empty for models that lie elsewhere."""
    if name != EMBEDDED or not (_TINY / _CARD).is_file():
        return {}
    decode = read_json(_TINY / _CARD).get("decode", {})
    return {"decode": ", ".join(f"{k}={v}" for k, v in decode.items()), "card": str(_TINY / "README.md")}


def _with_ends(config: NetworkConfig, codec: TextCodec | None) -> NetworkConfig:
    """Adds the template's end-of-turn id, as the tokenizer gives it, to the ids that end an answer."""
    end = codec.token_id(codec.template.end) if codec else None
    if end is None or end in config.eos_ids:
        return config
    return replace(config, eos_ids=(*config.eos_ids, end))


def _word(kind: str, value: Any, default: str) -> str:
    """A name that was given from Python: None is the default, and a torch dtype or device its own name."""
    if value is None:
        return default
    if isinstance(value, bool | int | float | bytes):
        raise UserError(f"{kind} must be a name, got {value!r} (nearest valid: '{default}')")
    return str(value).removeprefix("torch.")


def _resolve(spec: str, revision: str | None, weights: bool) -> tuple[Path, str | None, str | None, str]:
    """Folder, hub id, hub revision and chat template of a model name."""
    path = Path(spec).expanduser()
    if spec == EMBEDDED:
        if revision is not None:
            raise UserError(f"--revision {revision} belongs to a hub id, and {spec} is embedded")
        return _TINY, None, None, "auto"
    if spec in SHORT_NAMES:
        short = SHORT_NAMES[spec]
        revision = revision or short.revision
        return _download(spec, short.source, revision, weights), short.source, revision, short.chat_template
    if path.is_dir():
        if revision is not None:
            raise UserError(f"--revision {revision} belongs to a hub id, and {spec} is a folder")
        return path, None, None, "auto"
    here = spec.count("/") == 1 and path.parent.is_dir()
    looks_like_path = spec.startswith((".", "/", "~")) or path.exists() or spec.count("/") > 1 or here
    if spec.count("/") == 1 and not looks_like_path:
        return _download(spec, spec, revision, weights), spec, revision, "auto"
    if looks_like_path:
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        hint = f" (nearest there: {path.parent / near})" if near else ""
        raise UserError(f"model folder {path} does not exist{hint}")
    raise choice("model", spec, SHORT_NAMES)


def _download(name: str, source: str, revision: str | None, weights: bool) -> Path:
    """A hub snapshot: data files only, taken from the local cache when all that is asked for is there."""
    from huggingface_hub import HfApi, snapshot_download

    files = [*_TEXT_FILES, *(_WEIGHT_FILES if weights else [])]
    try:
        found = Path(snapshot_download(source, revision=revision, allow_patterns=files, local_files_only=True))
        # a snapshot folder may hold a part only: what was fetched for its tokenizer, or until a download broke off
        if (found / "config.json").is_file() and not (weights and missing_weights(found)):
            return found
    except Exception:
        pass
    try:
        with quiet():
            HfApi().model_info(source, revision=revision, timeout=TIMEOUT_S)  # fails at once where there is no network
            return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    except Exception as error:  # the hub client raises many kinds; each means that the files are not to be had
        reason = str(error).split("\n")[0][:200] or type(error).__name__
        command = f"dllm-bench prepare --model {name}"
        command += f" --revision {revision}" if revision and name == source else ""
        command += " --weights" if weights else ""
        raise UserError(
            f"cannot get {source} from the hub ({reason}): give --model a local folder instead, or fetch it once "
            f"with the network on ('{command}')"
        ) from None


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UserError(f"device '{device}' is not there: this torch sees no CUDA GPU; nearest valid: cpu")
        index = int(device.partition(":")[2] or 0)
        if index >= count:
            raise UserError(f"device '{device}' is not there; nearest valid: cuda:{count - 1}")
        return torch.device("cuda", index)
    return torch.device("cpu")


def _dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found: torch.dtype = getattr(torch, dtype)
    return found


def fingerprint(folder: Path) -> str:
    """Hash of config.json and of each weight file: whole when it is small, else its size, header and first bytes."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 26))
    return digest.hexdigest()[:16]
