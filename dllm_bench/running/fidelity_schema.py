"""The schema of a fidelity row: one committing pass of a sample, beside its exact counterpart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dllm_bench.running.schema import GROUPS, Column, Kind, group

__all__ = ["FIDELITY", "FIDELITY_VERSION", "markdown"]

FIDELITY_VERSION = 1
"""Grows by one with every change that a reader must know of."""

_OWN: Mapping[str, tuple[Column, ...]] = {
    "Fidelity: row": group(
        ("key", "string!", "key of the sample, as in the result rows: the two can be joined"),
        ("schema_version", "int64!", "version of this schema"),
        (
            "started_at",
            "timestamp!",
            "UTC time at which the sample was begun; of writings with one key the last counts",
        ),
        ("status", "string!", "ok, or oom or error: one row without a pass, and a rerun tries the sample again"),
        ("error", "string", "message of the exception; null where there was none"),
    ),
    "Fidelity: sample": group(
        ("prompt_hash", "string", "hash of the prompt's ids"),
        ("prompt_tokens", "int64", "tokens of the prompt"),
        ("actual_ctx", "int64", "tokens of the prompt and of the generation budget"),
        ("passes", "int64", "committing passes of the method"),
        ("uncached_passes", "int64", "committing passes of the uncached trajectory"),
        ("tokens_compared", "int64", "response positions that one of the two trajectories filled"),
        ("tokens_agreeing", "int64", "of these, positions that hold the same token in both"),
        (
            "first_divergent_step",
            "int64",
            "first pass whose commits differ from the uncached trajectory's in its pass of that number; null if none",
        ),
        ("first_divergent_position", "int64", "leftmost position of the canvas where they differ there"),
    ),
    "Fidelity: pass": group(
        ("step", "int64", "number of the pass among the committing ones, from 0"),
        ("block", "int64", "block of the pass; 0 where the window slides"),
        ("block_step", "int64", "passes made in this block before"),
        ("kind", "string", "dense: it started over all rows of the canvas; partial"),
        ("rows", "int64", "rows that it started over"),
        ("candidates", "int64", "positions that it had logits for"),
        ("committed_positions", "list<int64>", "positions of the canvas that it filled"),
        ("committed_tokens", "list<int64>", "the tokens"),
        ("committed_agreeing", "int64", "of these, tokens that the uncached response has at their place in the end"),
        ("same_commits", "bool", "whether the uncached trajectory committed the same in its pass of this number"),
        (
            "kl_mean",
            "float64",
            "divergence of the candidates' distributions from the exact ones (KL, nats): mean over candidates",
        ),
        ("kl_max", "float64", "the largest one"),
        (
            "key_drift_prompt",
            "list<float64>",
            "per layer, after the pass: Frobenius distance of the held keys outside the response from the exact ones, "
            "relative to these; null where the memory does not hold all positions",
        ),
        ("key_drift_response", "list<float64>", "the same of the keys inside the response"),
        ("value_drift_prompt", "list<float64>", "the same of the values outside the response"),
        ("value_drift_response", "list<float64>", "the same of the values inside the response"),
        (
            "mass_kept",
            "list<float64>",
            "per layer: share of the exact attention of the candidates' rows that falls on keys that the pass could "
            "read; null where it read all",
        ),
        (
            "needles_kept",
            "list<float64>",
            "per layer: share of the needles' tokens, over the heads, that it could read; null where it read all",
        ),
    ),
}

_SPEC, _ENVIRONMENT = GROUPS["Spec"], GROUPS["Environment"]
_TAKEN = {column.name for columns in _OWN.values() for column in columns}

FIDELITY = Kind(
    name="fidelity",
    columns=(
        *_OWN["Fidelity: row"],
        *(c for c in _SPEC if c.name not in _TAKEN),
        *_OWN["Fidelity: sample"],
        *_OWN["Fidelity: pass"],
        *_ENVIRONMENT,
    ),
    version=FIDELITY_VERSION,
    prefix="fidelity-",
    mark="dllm_bench_fidelity_version",
    identity=("key", "step"),
)


def markdown(groups: Callable[[Mapping[str, tuple[Column, ...]]], list[str]]) -> list[str]:
    """Its part of docs/schema.md."""
    return [
        "# Schema of a fidelity row",
        "",
        f"Version {FIDELITY_VERSION}. One row is one committing pass of a sample of `dllm-bench fidelity`. Rows lie in",
        "files `fidelity-*.parquet` of the same folder; those of a sample are written together. Beside the columns",
        "below they have those of Spec and Environment above.",
        "",
        "In every pass the method is compared with a dense uncached pass over the ids as they stood before the pass's",
        "commit, so errors show where they arise. Commits are also compared with the uncached trajectory, decoded with",
        "the same settings from the same prompt.",
        *groups(_OWN),
    ]
