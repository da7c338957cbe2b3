"""Checkpoint folders to networks: config.json and safetensors only; nothing is executed or unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.errors import UserError, nearest
from dllm_bench.lazy import LazyModule
from dllm_bench.models.architecture import ARCHITECTURES, Architecture, LayerNames
from dllm_bench.models.config import NetworkConfig
from dllm_bench.models.network import LayerWeights, Network, Weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

__all__ = ["load_network", "missing_weights", "read_config", "read_json"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError names the file where it is missing or broken."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a JSON object")
    return found


def read_config(folder: Path) -> tuple[type[Architecture], NetworkConfig]:
    """The architecture and the network config of a checkpoint folder. Errors name the file and the field."""
    path = folder / "config.json"
    raw = read_json(path)
    kind = str(raw.get("model_type") or "")
    if kind.lower() not in ARCHITECTURES.names():
        near = nearest(kind, ARCHITECTURES.names())
        hint = f"did you mean '{near}'? " if near else ""
        known = ", ".join(ARCHITECTURES.names())
        raise UserError(f"{path}: unknown architecture (model_type '{kind}'): {hint}supported: {known}")
    architecture = ARCHITECTURES.get(kind.lower())
    try:
        return architecture, architecture.parse(raw)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path}: a field has the wrong type: {error}") from None


def load_network(
    folder: Path, architecture: type[Architecture], config: NetworkConfig, dtype: torch.dtype, device: torch.device
) -> Network:
    """Loads the weights of `folder` into one network.

    Raises UserError naming the file and the tensor that is missing, truncated, or of another shape.
    """
    reader = _Reader(folder, dtype, device)
    names = architecture.names(config)
    wide, c = (config.embedding_size, config.hidden_size), config
    embed = reader.read(names.embed, wide)
    layers = [_layer(reader, n, c) for n in names.layers]
    final = reader.read(names.final_norm, (c.hidden_size,))
    head = embed if c.tied else reader.read(names.head, wide)
    return Network(config, Weights(embed, layers, final, head))


def missing_weights(folder: Path) -> list[str]:
    """Names of the weight files that `load_network` needs and the folder lacks."""
    index = folder / _INDEX
    table = read_json(index).get("weight_map") if index.is_file() else None
    names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else [_SINGLE]
    return [name for name in names if not (folder / name).is_file()]


def _layer(reader: _Reader, names: LayerNames, c: NetworkConfig) -> LayerWeights:
    width, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = [reader.read(n, (s, width)) for n, s in ((names.q, q), (names.k, kv), (names.v, kv))]
    bias = None
    if c.qkv_bias:
        found = [(names.q_bias, q), (names.k_bias, kv), (names.v_bias, kv)]
        bias = torch.cat([reader.read(n, (s,)) for n, s in found])
    gate_up = [reader.read(n, (c.ffn_size, width)) for n in (names.gate, names.up)]
    return LayerWeights(
        attn_norm=reader.read(names.attn_norm, (width,)),
        qkv=torch.cat(qkv),
        qkv_bias=bias,
        attn_out=reader.read(names.attn_out, (width, q)),
        ffn_norm=reader.read(names.ffn_norm, (width,)),
        gate_up=torch.cat(gate_up),
        down=reader.read(names.down, (width, c.ffn_size)),
    )


class _Reader:
    """Tensors by name out of one safetensors file or several shards, each opened once."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._open: dict[str, Any] = {}
        self._where = self._locate()

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self._folder / _INDEX
        if index.is_file():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict):
                raise UserError(f"{index} has no 'weight_map'")
            return {str(k): str(v) for k, v in table.items()}
        if not (self._folder / _SINGLE).is_file():
            other = sorted(p.name for p in self._folder.glob("*.bin"))
            hint = f" ({other[0]} would have to be unpickled, which is never done)" if other else ""
            raise UserError(f"{self._folder / _SINGLE} is missing, and so is {_INDEX}{hint}")
        return dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._open:
            path = self._folder / name
            if Path(name).name != name:
                raise UserError(f"{self._folder / _INDEX} names a file outside the folder: {name}")
            if not path.is_file():
                raise UserError(f"{path} is missing, though {_INDEX} names it")
            try:
                self._open[name] = safe_open(str(path), framework="pt", device=str(self._device))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is truncated or not a safetensors file: {error}") from None
        return self._open[name]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor, checked against the shape that the config implies."""
        if name not in self._where:
            near = nearest(name, self._where)
            hint = f" (nearest there: {near})" if near else ""
            raise UserError(f"{self._folder}: tensor {name} is missing{hint}")
        path = self._folder / self._where[name]
        file = self._file(self._where[name])
        if name not in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            raise UserError(f"{path}: tensor {name} is missing, though {_INDEX} names it")
        found = tuple(file.get_slice(name).get_shape())
        if found != shape:
            raise UserError(f"{path}: tensor {name} has shape {list(found)}, config.json implies {list(shape)}")
        tensor: Tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{path}: tensor {name} is {kind}: quantised checkpoints are not supported")
        return tensor.to(self._dtype)
