"""What methods and memories may know of the request they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from dllm_bench.caching.shared import Shared
    from dllm_bench.decoding.canvas import Canvas
    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.models.network import Network
    from dllm_bench.models.text import TextCodec

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """One stream of one request.

    Attributes:
        ids: the ids [1, N] of this stream, updated in place by every commit (the unconditional stream of guidance has
            its own, with the prompt masked). Methods read them and never write.
        canvas: the positions: response range, masked ones, dropped ones.
        span: the half-open range of positions that other requests hold too, as the task declares it; once the method
            has begun, the range that `shared` stands for.
        shared: state made outside of this request. Methods read it and never write.
        codec: what the ids mean as text; None where the model has no tokenizer.
    """

    network: Network
    canvas: Canvas
    ids: Tensor
    settings: DecodeSettings
    span: tuple[int, int] | None = None
    shared: Shared | None = None
    codec: TextCodec | None = None

    @property
    def length(self) -> int:
        """Positions of the canvas: N."""
        return self.canvas.length
