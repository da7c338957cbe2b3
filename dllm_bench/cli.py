"""The command line. Nothing heavier than Typer is imported before a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from dllm_bench import __version__
from dllm_bench.commands.check import check
from dllm_bench.commands.fidelity import fidelity
from dllm_bench.commands.generate import generate
from dllm_bench.commands.leaderboard import leaderboard
from dllm_bench.commands.lm_eval import SETTINGS, lm_eval
from dllm_bench.commands.plot import plot
from dllm_bench.commands.prepare import prepare
from dllm_bench.commands.run import run
from dllm_bench.commands.score import rescore, score
from dllm_bench.commands.show import list_things, show
from dllm_bench.commands.show_prompt import show_prompt
from dllm_bench.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="dllm-bench",
    help="Benchmark caching methods of diffusion language models: right, fast, comparable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dllm-bench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Benchmark caching methods of diffusion language models: right, fast, comparable."""


app.command("run")(run)
app.command("leaderboard")(leaderboard)
app.command("plot")(plot)
app.command("prepare")(prepare)
app.command("show-prompt")(show_prompt)
app.command("generate")(generate)
app.command("fidelity")(fidelity)
app.command("score")(score)
app.command("rescore")(rescore)
app.command("check")(check)
app.command("lm-eval", context_settings=SETTINGS)(lm_eval)
app.command("list")(list_things)
app.command("show")(show)


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)  # an Exit inside a command, and Ctrl-C, come back as a number
        sys.stdout.flush()
        if isinstance(code, int) and code:
            sys.exit(code)
    except UserError as error:
        fail(str(error))
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as stop:
        # Typer and rich answer a reader that has gone away, such as head, with an exit of their own
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        _leave_quietly()
    except BrokenPipeError:
        _leave_quietly()
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # no command at all: the help text, as it is
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        fail(_usage(error))


def _leave_quietly() -> None:
    """Ends with code 0 where nobody reads on; what is still buffered for standard output goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def fail(message: str) -> None:
    """Prints one line on stderr and leaves with code 2."""
    print(f"dllm-bench: {message}", file=sys.stderr)
    sys.exit(2)


def _usage(error: Exception) -> str:
    """A parser's complaint as one line that names the nearest valid option or command."""
    from dllm_bench.errors import nearest

    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    number = _number(error, message)
    if number:
        return number
    name = getattr(error, "option_name", None)
    if name:
        known = [o for p in context.command.params for o in getattr(p, "opts", ()) if o.startswith("--")]
        near = nearest(name, known)
        return f"unknown option '{name}'" + (
            f": did you mean '{near}'?" if near else f"; see {context.command_path} --help"
        )
    return f"{message} (see {context.command_path} --help)"


def _number(error: Exception, message: str) -> str | None:
    """The line for an option that wants a number and got something else; None for any other complaint."""
    from dataclasses import fields

    from dllm_bench.decoding.settings import DecodeSettings
    from dllm_bench.errors import nearest_number

    param: Any = getattr(error, "param", None)
    whole = "valid integer" in message
    flags = [flag for flag in getattr(param, "opts", ()) if flag.startswith("-")]
    if not flags or not (whole or "valid number" in message or "valid float" in message):
        return None
    ranges: Mapping[str, Any] = {f.name: f.metadata for f in fields(DecodeSettings)}.get(param.name, {})
    usual = param.default if type(param.default) in (int, float) else None
    low = ranges.get("low", 0 if usual == 0 else 1 if whole else None)
    text = _given(flags)
    near = nearest_number(text, whole=whole, low=low, high=ranges.get("high"), otherwise=usual)
    kind = "a whole number" if whole else "a number"
    return f"{max(flags, key=len)} must be {kind} (nearest valid: {near:g}), got '{text}'"


def _given(flags: Sequence[str]) -> str:
    """What the command line says behind one of these flags."""
    found = ""
    for this, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, equals, value = this.partition("=")
        if name in flags:
            found = value if equals else following
    return found
