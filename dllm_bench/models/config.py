"""What the one network needs to know of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dllm_bench.errors import UserError, nearest

__all__ = ["NetworkConfig", "scale_rope"]


@dataclass(frozen=True)
class NetworkConfig:
    """Shapes and constants of a LLaDA or Dream network.

    Attributes:
        family: "llada" or "dream"; decides names in messages and defaults of decoding, never the arithmetic.
        hidden_size: D. num_layers: L. num_heads: H query heads. num_kv_heads: Hkv, a divisor of H. head_dim: d, even.
        ffn_size: inner width of the gated FFN.
        vocab_size: ids below it are tokens; embedding_size: rows of the embedding and of the head (>= vocab_size).
        max_positions: length the checkpoint was trained for. Longer input is allowed: the RoPE table grows.
        qkv_bias: q, k and v have biases. tied: the head is the embedding.
        shift: row i - 1 predicts position i (Dream); otherwise row i does.
        rope_cast: the RoPE table is cast to the activation dtype before use (Dream) instead of staying in float32.
        mask_id: the id that stands for a masked position. eos_ids: ids that end an answer (EOS, end of turn).
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    embedding_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    qkv_bias: bool
    tied: bool
    shift: bool
    rope_cast: bool
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int | None = None
    bos_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "max_positions")
        for name in sizes:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise UserError(f"config: {name} must be a whole number above 0, got {size!r}")
        if not (self.rope_theta > 0 and self.norm_eps > 0):
            raise UserError("config: rope_theta and rms_norm_eps must be above 0")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"config: {self.num_heads} heads cannot share {self.num_kv_heads} key/value heads")
        if self.head_dim % 2:
            raise UserError(f"config: RoPE needs an even head size, got {self.head_dim}")
        if self.embedding_size < self.vocab_size:
            raise UserError(f"config: embedding_size {self.embedding_size} is below vocab_size {self.vocab_size}")
        for name, ids in (("mask_token_id", (self.mask_id,)), ("eos_token_id", self.eos_ids)):
            for one in ids:
                if not 0 <= one < self.embedding_size:
                    raise UserError(f"config: {name} {one} is outside the embedding of {self.embedding_size} rows")

    def row_of(self, position: int) -> int:
        """The row whose logits predict `position`."""
        return max(position - 1, 0) if self.shift else position


def scale_rope(config: NetworkConfig, scaling: str | None) -> NetworkConfig:
    """Applies `--rope-scaling`: "ntk:X" multiplies rope_theta by X (LongLLaDA, arXiv 2506.14429); None leaves it."""
    if scaling is None or scaling == "none":
        return config
    kind, _, factor = scaling.partition(":")
    if kind != "ntk":
        near = nearest(kind, ["ntk", "none"]) or "ntk"
        raise UserError(f"unknown RoPE scaling '{scaling}': did you mean '{near}:13.6'? valid: none, ntk:FACTOR")
    try:
        value = float(factor)
    except ValueError:
        value = 0.0
    if not 1.0 <= value < float("inf"):
        raise UserError(f"RoPE scaling needs a factor of at least 1 such as ntk:13.6, got '{scaling}'")
    return replace(config, rope_theta=config.rope_theta * value)
