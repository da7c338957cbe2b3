"""Checkpoints on disk: every layout that must load, and one clear line for each that must not."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GOLDEN
from safetensors.torch import save_file
from tiny_checkpoints import dream_config, llada_config, loaded, naive_logits, random_tensors, write, write_shards

from dllm_bench import UserError, load_model
from dllm_bench.models.config import scale_rope

IDS = [3, 1, 4, 1, 5, 49, 9, 2, 6, 49, 49, 7]
CONFIGS = {
    "llada": llada_config(),
    "llada, grouped keys": llada_config(n_kv_heads=2),
    "llada, one key head": llada_config(n_kv_heads=None, multi_query_attention=True),
    "llada, qkv bias": llada_config(include_qkv_bias=True, n_kv_heads=2),
    "llada, tied": llada_config(weight_tying=True),
    "llada, wide embedding": llada_config(embedding_size=64),
    "dream": dream_config(),
    "dream, tied": dream_config(tie_word_embeddings=True, num_key_value_heads=1),
}


def logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    net = loaded(folder, dtype).network
    with torch.inference_mode():
        return net.head(net.hidden(torch.tensor([IDS])))[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_plain_transformer(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    full = {**config, "n_kv_heads": config.get("n_kv_heads") or 1} if "llada" in name else config
    tensors = random_tensors(full)
    found = logits(write(tmp_path, config, tensors), "float64")
    wanted = naive_logits(full, tensors, IDS)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert wanted.std() > 0.1, "a network that says nothing would pass"


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path, llada_config())
    assert loaded(folder, dtype).network.dtype == getattr(torch, dtype)
    wide = naive_logits(llada_config(), random_tensors(llada_config()), IDS)
    torch.testing.assert_close(logits(folder, dtype).double(), wide, atol=1e-4 if "16" not in dtype else 0.5, rtol=0)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    config = llada_config()
    tensors = random_tensors(config)
    one, many = write(tmp_path / "one", config, tensors), write_shards(tmp_path / "many", config, tensors)
    assert torch.equal(logits(one), logits(many))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    weights = loaded(write(tmp_path, llada_config(weight_tying=True))).network.weights
    assert weights.head is weights.embed


def broken(tmp_path: Path, change: Callable[[Path], Any], config: dict[str, Any] | None = None) -> str:
    """The message that a checkpoint gives after `change` was done to its folder."""
    folder = write(tmp_path / "checkpoint", config or llada_config())
    change(folder)
    with pytest.raises(UserError) as error:
        loaded(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def without(name: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        tensors = random_tensors(llada_config())
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return change


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_no_config(tmp_path: Path) -> None:
    assert "config.json is missing" in broken(tmp_path, lambda f: (f / "config.json").unlink())


@pytest.mark.parametrize("text", ["{", "[1]", "null", "\xff", "[" * 100_000, '{"n_layers": ' + "1" * 5000 + "}"])
def test_config_is_no_json_object(text: str, tmp_path: Path) -> None:
    message = broken(tmp_path, lambda f: (f / "config.json").write_text(text, encoding="latin-1"))
    assert "config.json" in message and "JSON" in message


@pytest.mark.parametrize(("kind", "near"), [("lada", "llada"), ("Dreams", "dream")])
def test_unknown_architecture_names_the_nearest(kind: str, near: str, tmp_path: Path) -> None:
    message = broken(tmp_path, lambda f: rewrite(f, model_type=kind))
    assert "config.json" in message and f"did you mean '{near}'?" in message and "llada, dream" in message


@pytest.mark.parametrize("kind", [None, "", "gpt2", 7])
def test_no_architecture_at_all(kind: Any, tmp_path: Path) -> None:
    assert "unknown architecture" in broken(tmp_path, lambda f: rewrite(f, model_type=kind))


LLADA_FIELDS = ["d_model", "n_layers", "n_heads", "vocab_size", "rms_norm_eps", "rope_theta", "max_sequence_length"]
LLADA_FIELDS += ["weight_tying", "mask_token_id", "eos_token_id"]
DREAM_FIELDS = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
DREAM_FIELDS += ["rms_norm_eps", "rope_theta", "max_position_embeddings", "mask_token_id", "eos_token_id"]


@pytest.mark.parametrize(
    ("config", "field"),
    [(llada_config(), f) for f in LLADA_FIELDS] + [(dream_config(), f) for f in DREAM_FIELDS],
    ids=lambda v: v if isinstance(v, str) else v["model_type"],
)
def test_a_missing_field_is_named(config: dict[str, Any], field: str, tmp_path: Path) -> None:
    assert f"no '{field}'" in broken(tmp_path, lambda f: rewrite(f, **{field: None}), config)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llada", "block_type", "sequential"),
        ("llada", "layer_norm_type", "default"),
        ("llada", "activation_type", "gelu"),
        ("llada", "rope", False),
        ("llada", "alibi", True),
        ("llada", "attention_layer_norm", True),
        ("llada", "include_bias", True),
        ("llada", "scale_logits", True),
        ("llada", "input_emb_norm", True),
        ("llada", "block_group_size", 2),
        ("dream", "hidden_act", "gelu"),
        ("dream", "rope_scaling", {"type": "yarn"}),
        ("dream", "use_sliding_window", True),
    ],
)
def test_variants_that_are_not_computed(family: str, field: str, value: Any, tmp_path: Path) -> None:
    config = llada_config() if family == "llada" else dream_config()
    message = broken(tmp_path, lambda f: rewrite(f, **{field: value}), config)
    assert field in message and "not supported" in message


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("n_heads", 0, "config.json"),
        ("n_heads", 5, "not a multiple of n_heads 5"),
        ("n_heads", "4", "wrong type"),
        ("n_kv_heads", 3, "cannot share 3"),
        ("n_layers", "2", "num_layers must be a whole number"),
        ("n_layers", 0, "num_layers must be a whole number above 0, got 0"),
        ("n_layers", 2.5, "num_layers must be a whole number"),
        ("rms_norm_eps", "tiny", "wrong type"),
        ("rope_theta", 0, "rope_theta"),
        ("mask_token_id", 50, "mask_token_id 50 is outside"),
        ("mask_token_id", "49", "wrong type"),
        ("eos_token_id", [48, "47"], "wrong type"),
        ("embedding_size", 40, "below vocab_size 50"),
    ],
)
def test_a_field_of_no_sense(field: str, value: Any, said: str, tmp_path: Path) -> None:
    message = broken(tmp_path, lambda f: rewrite(f, **{field: value}))
    assert said in message and "config.json" in message


@pytest.mark.parametrize("name", sorted(random_tensors(llada_config()))[::3])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    message = broken(tmp_path, without(name))
    assert f"tensor {name} is missing" in message and str(tmp_path / "checkpoint") in message


def test_a_shape_that_the_config_does_not_imply(tmp_path: Path) -> None:
    message = broken(tmp_path, lambda f: rewrite(f, mlp_hidden_size=40))
    assert "blocks.0.ff_proj.weight has shape [48, 32], config.json implies [40, 32]" in message
    assert "model.safetensors" in message


def test_a_quantised_tensor(tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        tensors = random_tensors(llada_config())
        name = "model.transformer.blocks.1.up_proj.weight"
        save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")

    message = broken(tmp_path, change)
    assert "blocks.1.up_proj.weight is int8" in message and "quantised" in message


@pytest.mark.parametrize("keep", [0, 4, 500, -100])
def test_a_truncated_file(keep: int, tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])

    message = broken(tmp_path, cut)
    assert "model.safetensors is truncated or not a safetensors file" in message


def sharded(tmp_path: Path, change: Callable[[Path], Any]) -> str:
    folder = write_shards(tmp_path / "shards", llada_config(), random_tensors(llada_config()))
    change(folder)
    with pytest.raises(UserError) as error:
        loaded(folder)
    return str(error.value)


def remap(folder: Path, name: str, file: str) -> None:
    path = folder / "model.safetensors.index.json"
    table = json.loads(path.read_text())
    table["weight_map"][name] = file
    path.write_text(json.dumps(table))


def test_a_missing_shard(tmp_path: Path) -> None:
    message = sharded(tmp_path, lambda f: (f / "model-00002-of-00003.safetensors").unlink())
    assert "model-00002-of-00003.safetensors is missing, though model.safetensors.index.json names it" in message


def test_a_truncated_shard(tmp_path: Path) -> None:
    def cut(folder: Path) -> None:
        path = folder / "model-00003-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    assert "model-00003-of-00003.safetensors is truncated" in sharded(tmp_path, cut)


def test_an_index_that_names_the_wrong_file(tmp_path: Path) -> None:
    name = "model.transformer.ln_f.weight"

    def change(folder: Path) -> None:
        table = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        remap(folder, name, next(f for f in sorted(set(table.values())) if f != table[name]))

    message = sharded(tmp_path, change)
    assert f"tensor {name} is missing, though" in message and ".safetensors" in message


def test_an_index_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    message = sharded(tmp_path, lambda f: remap(f, "model.transformer.ln_f.weight", "../other.safetensors"))
    assert "outside the folder" in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    message = sharded(tmp_path, lambda f: (f / "model.safetensors.index.json").write_text(text))
    assert "model.safetensors.index.json" in message


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled",))


def test_nothing_is_unpickled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
        (folder / "modeling_llada.py").write_text("raise SystemExit('executed')")

    message = broken(tmp_path, change)
    assert "model.safetensors is missing" in message and "pytorch_model.bin would have to be unpickled" in message
    assert "unpickled\n" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ("yarn:2", "valid: none, ntk:FACTOR"),
        ("nkt:2", "did you mean 'ntk:13.6'"),
        ("ntk", "factor of at least 1"),
        ("ntk:", "factor of at least 1"),
        ("ntk:abc", "factor of at least 1"),
        ("ntk:0.5", "factor of at least 1"),
        ("ntk:-3", "factor of at least 1"),
        ("ntk:nan", "factor of at least 1"),
        ("ntk:inf", "factor of at least 1"),
    ],
)
def test_rope_scaling_errors(scaling: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_model(str(GOLDEN / "llada_fastdllm"), rope_scaling=scaling, device="cpu")


def test_rope_scaling_equals_a_config_with_that_theta(tmp_path: Path) -> None:
    tensors = random_tensors(llada_config())
    scaled = load_model(str(write(tmp_path / "a", llada_config(), tensors)), rope_scaling="ntk:4", device="cpu")
    plain = loaded(write(tmp_path / "b", llada_config(rope_theta=40000.0), tensors))
    ids = torch.tensor([IDS])
    assert torch.equal(scaled.network.hidden(ids), plain.network.hidden(ids))
    assert scale_rope(plain.config, None) is plain.config is scale_rope(plain.config, "none")
    assert scaled.rope_scaling == "ntk:4" and plain.rope_scaling is None


@pytest.mark.parametrize(
    ("name", "said"), [("lada-8b-base", "llada-8b-base"), ("tinny", "tiny"), ("./nowhere", "exist")]
)
def test_unknown_models(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_model(name)


def test_a_folder_that_is_nearly_there(tmp_path: Path) -> None:
    write(tmp_path / "my-model", llada_config())
    with pytest.raises(UserError, match=r"nearest there: .*my-model"):
        load_model(str(tmp_path / "my-modle"))


def test_a_revision_belongs_to_the_hub() -> None:
    with pytest.raises(UserError, match="--revision abc belongs to a hub id, and tiny is embedded"):
        load_model("tiny", revision="abc")


def test_fingerprints_tell_weights_and_configs_apart(tmp_path: Path) -> None:
    prints = [
        loaded(write(tmp_path / "a", llada_config())).fingerprint,
        loaded(write(tmp_path / "b", llada_config(rope_theta=2e4))).fingerprint,
        loaded(write(tmp_path / "c", llada_config(), random_tensors(llada_config(), seed=1))).fingerprint,
    ]
    assert len(set(prints)) == 3
    assert loaded(write(tmp_path / "d", llada_config())).fingerprint == prints[0]


def test_several_eos_ids(tmp_path: Path) -> None:
    assert loaded(write(tmp_path, llada_config(eos_token_id=[48, 47]))).config.eos_ids == (48, 47)
