"""Result rows with made-up numbers, for the tests of the store and of what reads it."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from typing import Any


def make_row(**changes: Any) -> dict[str, Any]:
    """A whole row; `changes` replaces columns. The key follows from the columns that tell rows apart."""
    row: dict[str, Any] = {
        "started_at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "status": "ok",
        "model": "toy",
        "model_fingerprint": "f00d",
        "model_family": "llada",
        "dtype": "float32",
        "codec": "c0dec",
        "method": "baseline",
        "method_label": "baseline",
        "method_options": "{}",
        "decode_settings": json.dumps({"block_length": 32, "gen_length": 64, "threshold": 0.9}),
        "gen_length": 64,
        "decode_seed": 1,
        "task": "toy_task",
        "task_version": 1,
        "task_options": "{}",
        "task_data": None,
        "subset": "single",
        "nominal_ctx": 512,
        "actual_ctx": 500,
        "beyond_max_positions": False,
        "seed": 0,
        "index": 0,
        "score": 1.0,
        "scores": '{"score": 1.0}',
        "scorer_version": 1,
        "masks_left": 0,
        "useful_tokens": 10,
        "canvas_tokens": 64,
        "nfe": 12,
        "dense_passes": 2,
        "row_layers": 4000,
        "decode_seconds": 2.0,
        "pass_seconds": [0.1, 0.2, 0.1],
        "tokenisation_seconds": 0.5,
        "dense_seconds": 1.0,
        "partial_seconds": 0.75,
        "commit_seconds": 0.25,
        "first_commit_seconds": 0.2,
        "cache_bytes_peak": 3_000_000,
        "cache_bytes_nominal": None,
        "shared_bytes": None,
        "shared_requests": None,
        "preparation_seconds": None,
        "preparation_row_layers": None,
        "probe_seconds": None,
        "probe_row_layers": None,
        "package_version": "0.1.0",
        "device_type": "cpu",
        "device_name": "Toy CPU",
        "threads": 2,
    }
    row.update(changes)
    row.setdefault("prompt_hash", f"{row['task']}/{row['subset']}/{row['nominal_ctx']}/{row['seed']}/{row['index']}")
    names = ("method", "method_options", "decode_settings", "subset", "nominal_ctx", "seed", "index", "device_type")
    told = json.dumps([row[name] for name in (*names, "dtype", "model_fingerprint", "package_version")])
    row.setdefault("key", hashlib.sha256(told.encode()).hexdigest()[:32])
    return row
