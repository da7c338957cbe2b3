"""The schema of a result row: one table of columns, from which the parquet schema and docs/schema.md are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "COLUMNS",
    "FAILED",
    "GROUPS",
    "PREFIXES",
    "RESULTS",
    "RETRIED",
    "SCHEMA_VERSION",
    "STATUSES",
    "Column",
    "Kind",
    "arrow_schema",
    "group",
    "markdown",
    "new_row",
]

SCHEMA_VERSION = 3
"""Grows by one with every change that a reader must know of."""

STATUSES = {
    "ok": "the sample was answered and scored",
    "masks_left": "masks were left in the answer: the score is 0",
    "oom": "the device or the host ran out of memory: no score",
    "error": "an exception, kept in `error`: no score",
}
FAILED = ("masks_left", "oom", "error")
RETRIED = ("oom", "error")
"""Statuses that a rerun computes again; masks that were left would be left again."""


@dataclass(frozen=True)
class Column:
    """One column: its parquet type (`list<…>` for lists), whether a row may lack it, and what it holds."""

    name: str
    type: str
    text: str
    nullable: bool = True


def group(*columns: tuple[str, str, str]) -> tuple[Column, ...]:
    """Columns from (name, type, text); a type that ends in `!` is never null."""
    return tuple(Column(name, kind.rstrip("!"), text, not kind.endswith("!")) for name, kind, text in columns)


GROUPS: Mapping[str, tuple[Column, ...]] = {
    "Row": group(
        ("key", "string!", "hash of everything that decides the answer (marked • below); one row per key"),
        ("schema_version", "int64!", "version of this schema"),
        (
            "started_at",
            "timestamp!",
            "UTC time at which the sample was begun; of rows with one key the last counts",
        ),
        ("status", "string!", "how the sample ended, see below"),
        ("error", "string", "message of the exception; null where there was none"),
    ),
    "Spec": group(
        ("model", "string!", "model as it was asked for"),
        ("model_revision", "string", "revision of the model on its hub; null for a local one"),
        ("model_fingerprint", "string!", "• hash of the model's config and weight files"),
        ("model_family", "string!", "family of the network"),
        ("dtype", "string!", "• data type of weights and activations"),
        ("rope_scaling", "string", "• scaling of the rotary positions, as JSON; null for none"),
        ("chat_template", "string", "chat template as it was asked for; null for none"),
        ("codec", "string!", "• hash of tokenizer and chat template"),
        ("method", "string!", "• canonical name of the cache method"),
        ("method_label", "string!", "short name of the method with the options that differ from its defaults"),
        ("method_options", "string!", "• all options of the method, defaults included, as JSON"),
        ("decode_settings", "string!", "• decode settings but the seed, as JSON"),
        ("gen_length", "int64!", "• generation budget in tokens (one of the decode settings)"),
        ("decode_seed", "int64!", "seed of this sample's decoding: a hash of seed and index"),
        ("task", "string!", "• name of the task"),
        ("task_version", "int64!", "• version of the task"),
        ("task_options", "string!", "• all options of the task, defaults included, as JSON"),
        ("task_data", "string", "• name and hash of the data that the options point to; null for none"),
        ("subset", "string!", "• subset of the task"),
        (
            "nominal_ctx",
            "int64",
            "• context length that was asked for, in tokens; null where the task has none",
        ),
        ("actual_ctx", "int64", "tokens of the prompt and of the generation budget"),
        ("beyond_max_positions", "bool", "whether actual_ctx is above the model's largest position"),
        ("seed", "int64!", "• seed of the samples"),
        ("index", "int64!", "• number of the sample"),
    ),
    "Sample and answer": group(
        ("prompt_hash", "string", "hash of the prompt's ids: rows with equal hashes answered the same question"),
        ("prompt_tokens", "int64", "tokens of the prompt"),
        ("references", "list<string>", "accepted answers or parts of the answer"),
        ("needle_depths", "list<float64>", "depth of each needle in percent; null where the task has no needles"),
        ("needle_starts", "list<int64>", "first prompt position of each needle"),
        ("needle_ends", "list<int64>", "position after the last one of each needle"),
        ("truncated", "bool", "whether the document was cut to fit; null where the task never cuts"),
        ("original_tokens", "int64", "tokens of the prompt before it was cut; null where the task never cuts"),
        ("sample_meta", "string", "further facts that the task tells of the sample, as JSON"),
        ("output_ids", "list<int64>", "ids of the whole response"),
        ("text", "string", "text that was scored: cut at the first EOS or EOT and at the first stop string"),
        ("stopped_by", "string", "what ended the text: eos, stop_string or length"),
        ("score", "float64", "score in 0..1 (the task's first metric); null where the sample has none"),
        ("scores", "string", "all metrics of the task in 0..1, as JSON"),
        ("scorer_version", "int64", "version of the task's scorer that gave them"),
        ("former_scores", "string", "what scorers of other versions gave, as JSON: version -> metrics; null if none"),
        ("masks_left", "int64", "masks left in the response"),
        (
            "choice_loglikelihoods",
            "list<float64>",
            "estimated log-likelihood of each choice in nats; null where the task asks for a text",
        ),
    ),
    "Tokens and work": group(
        ("useful_tokens", "int64", "response tokens before the first EOS or EOT"),
        ("canvas_tokens", "int64", "all response positions of the budget, also those behind an EOS"),
        ("nfe", "int64", "passes through the network"),
        ("dense_passes", "int64", "passes that started over all rows of the canvas"),
        ("row_layers", "int64", "rows x layers that went through the FFN"),
        ("projected_rows", "int64", "rows x layers for which q, k or v was computed"),
        ("attended_rows", "int64", "query rows x layers that attention ran for"),
        ("head_rows", "int64", "rows for which logits were computed"),
        ("selections", "int64", "times a memory chose a subset of its keys"),
        ("probe_rows", "int64", "rows that a pass before the first commit started with; null where none ran"),
        ("probe_row_layers", "int64", "part of row_layers in that pass"),
        (
            "preparation_rows",
            "int64",
            "rows of the state that requests share, made for this sample; null where it was there or is not needed",
        ),
        ("preparation_row_layers", "int64", "rows x layers of making it; not part of row_layers"),
        ("shared_requests", "int64", "samples of this run that used this shared state so far, with this one"),
    ),
    "Seconds": group(
        ("tokenisation_seconds", "float64", "making the sample: its text, its ids, and the fit to the context length"),
        (
            "decode_seconds",
            "float64",
            "from prompt ids to response ids, device synchronised, without warm-up",
        ),
        ("dense_seconds", "float64", "part of decode_seconds in dense passes (refreshes)"),
        ("partial_seconds", "float64", "part of decode_seconds in the other passes"),
        ("commit_seconds", "float64", "part of decode_seconds in choosing and fixing tokens"),
        ("first_commit_seconds", "float64", "from the start of decoding to the first fixed token"),
        (
            "first_block_seconds",
            "float64",
            "from the start of decoding to the first finished block; null if none",
        ),
        ("pass_seconds", "list<float64>", "seconds of each pass, in order"),
        ("pass_p50_seconds", "float64", "median of pass_seconds"),
        ("pass_p95_seconds", "float64", "95th percentile of pass_seconds"),
        ("probe_seconds", "float64", "part of decode_seconds in a pass before the first commit; null where none ran"),
        (
            "preparation_seconds",
            "float64",
            "making state that requests share, outside of decode_seconds; null where none was made for this sample",
        ),
    ),
    "Bytes": group(
        ("cache_bytes_peak", "int64", "largest number of bytes that the method's caches held at once"),
        ("cache_bytes", "string", "cache_bytes_peak by kind of cache, as JSON"),
        (
            "cache_bytes_nominal",
            "float64",
            "bytes at that moment by the formula of a method that has one (bit-packed codes); null elsewhere",
        ),
        ("shared_bytes", "int64", "bytes of the state that this sample shared with others; part of cache_bytes_peak"),
        ("memory_peak_bytes", "int64", "largest memory during decoding; null where it cannot be measured per sample"),
        ("memory_peak_kind", "string", "what memory_peak_bytes counts: cuda_allocated, or rss of the process"),
    ),
    "Environment": group(
        ("package_version", "string!", "• version of dllm-bench"),
        ("git_revision", "string", "commit of dllm-bench's checkout; null outside of one"),
        ("git_dirty", "bool", "whether code in that checkout differed from the commit"),
        ("device_type", "string!", "• cpu, cuda, …"),
        ("device_name", "string", "name of the processor or accelerator"),
        ("threads", "int64", "CPU threads that torch used"),
        ("torch_version", "string", "version of torch"),
        ("cuda_version", "string", "version of CUDA that torch was built with; null without"),
        ("python_version", "string", "version of Python"),
        ("platform", "string", "operating system and machine type"),
    ),
}

COLUMNS: tuple[Column, ...] = tuple(column for group in GROUPS.values() for column in group)


@dataclass(frozen=True)
class Kind:
    """A kind of rows with columns and versions of its own; several kinds may lie in one results folder.

    Every kind has the columns `key`, `schema_version`, `started_at` and `status`.

    Attributes:
        name: as messages say it. prefix: of the names of its files, empty for the results themselves.
        mark: the name under which parquet files keep the schema's version.
        identity: columns that tell a row from others of the same kind; the first is `key`. Rows with one key are
            written together, and of several writings the last counts.
    """

    name: str
    columns: tuple[Column, ...]
    version: int = SCHEMA_VERSION
    prefix: str = ""
    mark: str = "dllm_bench_schema_version"
    identity: tuple[str, ...] = ("key",)


RESULTS = Kind("result", COLUMNS)
PREFIXES = ("fidelity-",)
"""Of files in a results folder that hold other rows than results."""


def arrow_schema(kind: Kind = RESULTS) -> pa.Schema:
    """The parquet schema: each field carries its description, the schema its version."""
    import pyarrow as pa

    scalars = {
        "string": pa.string(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "bool": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }

    def field(column: Column) -> pa.Field:
        inner = column.type.removeprefix("list<").removesuffix(">")
        kind = pa.list_(scalars[inner]) if column.type.startswith("list<") else scalars[inner]
        return pa.field(column.name, kind, column.nullable, metadata={"description": column.text})

    return pa.schema([field(c) for c in kind.columns], metadata={kind.mark: str(kind.version)})


def new_row(values: Mapping[str, Any], kind: Kind = RESULTS) -> dict[str, Any]:
    """A row of `values` in which everything else is null.

    Raises ValueError for a column that does not exist and for a missing one that must not be null.
    """
    unknown = sorted(set(values) - {c.name for c in kind.columns})
    row = {c.name: values.get(c.name) for c in kind.columns}
    row["schema_version"] = kind.version
    missing = [c.name for c in kind.columns if not c.nullable and row[c.name] is None]
    if unknown or missing:
        raise ValueError(f"not a {kind.name} row: unknown columns {unknown}, missing columns {missing}")
    return row


def markdown() -> str:
    """The text of docs/schema.md."""
    head = [
        "# Schema of a result row",
        "",
        f"Version {SCHEMA_VERSION}. Made from `dllm_bench/running/schema.py` by `python -m dllm_bench.running.schema`.",
        "",
        "One row is one sample. Rows lie in the parquet files (`*.parquet`) of a results folder: one small file per",
        "sample during a run, one file for all after it. Files are never changed: they appear whole and are deleted",
        "when a newer file holds their rows. A row may lie in two files after a crash, so a reader keeps one row per",
        "`key`: the one with the latest `started_at`, and of equal ones that in the file whose name sorts last",
        "(scoring a row again leaves its `started_at`).",
        "",
        "A measure that is missing is null, never 0. Scores are in 0..1, times in seconds, sizes in bytes. Rates are",
        "ratios of sums over samples. Options are JSON objects with sorted names.",
        "",
        "Columns marked • decide the answer: the key is a hash of them. Time and environment do not belong to it, but",
        "for the type of the device and the package's version.",
        "",
        "## Status",
        "",
        *_table(("status", "meaning"), ((f"`{name}`", text) for name, text in STATUSES.items())),
        "",
        "A rerun computes `oom` and `error` rows again.",
    ]
    from dllm_bench.running import fidelity_schema

    lines = [*head, *_groups(GROUPS), "", *fidelity_schema.markdown(_groups)]
    return "\n".join(lines) + "\n"


def _groups(groups: Mapping[str, tuple[Column, ...]]) -> list[str]:
    lines: list[str] = []
    for title, columns in groups.items():
        rows = ((f"`{c.name}`", c.type, "yes" if c.nullable else "no", c.text) for c in columns)
        lines += ["", f"## {title}", "", *_table(("column", "type", "null", "meaning"), rows)]
    return lines


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [header, tuple("---" for _ in header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


if __name__ == "__main__":
    print(markdown(), end="")
