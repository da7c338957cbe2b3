"""Deterministic counters of one request, filled by the network's primitives and by the memories."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Counters"]


@dataclass
class Counters:
    """What was really computed.

    Attributes:
        nfe: passes of the conditional stream (a guided pass counts once, as in the official code).
        dense_passes: passes that started over all rows of the canvas.
        row_layers: rows x layers that went through the FFN, over all streams.
        projected_rows: rows x layers for which at least one of q, k, v was computed.
        attended_rows: query rows x layers that attention ran for.
        weight_rows: query rows x layers whose attention weights were computed as such, beside the attention.
        head_rows: rows for which logits were computed.
        selections: times a memory chose a subset of its keys.
        kept_keys, seen_keys: keys (over key heads) that filtered reads kept, out of those the filter chose among.
        index_builds: times a memory built anew what it searches a layer's keys with.
    """

    nfe: int = 0
    dense_passes: int = 0
    row_layers: int = 0
    projected_rows: int = 0
    attended_rows: int = 0
    weight_rows: int = 0
    head_rows: int = 0
    selections: int = 0
    kept_keys: int = 0
    seen_keys: int = 0
    index_builds: int = 0

    def reset(self) -> None:
        for f in fields(self):
            setattr(self, f.name, 0)
