"""`dllm-bench lm-eval`: lm-eval's own command line, with this package registered as one of its models."""

from __future__ import annotations

import sys

import typer

__all__ = ["SETTINGS", "lm_eval"]

SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Every argument is lm-eval's, --help too."""


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval with `--model dllm_bench`; all arguments, --help too, are those of lm-eval's own command."""
    from dllm_bench.lm_eval_requests import lm_eval_folder

    lm_eval_folder()

    import dllm_bench.lm_eval_model  # noqa: F401  # registers the model

    from lm_eval.__main__ import cli_evaluate  # isort: skip

    before = sys.argv
    sys.argv = ["dllm-bench lm-eval", *context.args]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
