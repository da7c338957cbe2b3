"""The contract of a checkpoint family: how its config file reads and what its tensors are called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dllm_bench.errors import UserError
from dllm_bench.models.config import NetworkConfig
from dllm_bench.registry import Registry

__all__ = ["ARCHITECTURES", "Architecture", "LayerNames", "Names", "end_ids", "require"]


@dataclass(frozen=True)
class LayerNames:
    """Official tensor names of one block; biases are empty where the family has none."""

    attn_norm: str
    q: str
    k: str
    v: str
    attn_out: str
    ffn_norm: str
    gate: str
    up: str
    down: str
    q_bias: str = ""
    k_bias: str = ""
    v_bias: str = ""


@dataclass(frozen=True)
class Names:
    """Official tensor names of a network; `head` is not read where the config ties it to the embedding."""

    embed: str
    final_norm: str
    head: str
    layers: tuple[LayerNames, ...]


class Architecture(ABC):
    """One checkpoint family. Third parties register theirs in the entry-point group `dllm_bench.models`."""

    model_types: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def parse(cls, config: Mapping[str, Any]) -> NetworkConfig:
        """Reads `config.json`. Raises UserError naming the field that is missing or not supported."""

    @classmethod
    @abstractmethod
    def names(cls, config: NetworkConfig) -> Names:
        """The tensor names to load."""


def require(config: Mapping[str, Any], field: str) -> Any:
    """A field that must be in the file: class defaults of the official code do not match its checkpoints."""
    if config.get(field) is None:
        raise UserError(f"config.json has no '{field}'")
    return config[field]


def end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`, one id or a list of them."""
    found = require(config, "eos_token_id")
    return tuple(found) if isinstance(found, list) else (found,)


ARCHITECTURES: Registry[Architecture] = Registry(
    "model architecture",
    "dllm_bench.models",
    "dllm_bench.models.architecture:Architecture",
    {"llada": "dllm_bench.models.llada:Llada", "dream": "dllm_bench.models.dream:Dream"},
)
