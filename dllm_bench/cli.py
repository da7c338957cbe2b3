"""The command line. Nothing heavier than Typer is imported before a command runs."""

from __future__ import annotations

import sys

import typer

from dllm_bench import __version__
from dllm_bench.commands.check import check
from dllm_bench.commands.fidelity import fidelity
from dllm_bench.commands.generate import generate
from dllm_bench.commands.leaderboard import leaderboard
from dllm_bench.commands.lm_eval import SETTINGS, lm_eval
from dllm_bench.commands.plot import plot
from dllm_bench.commands.run import run
from dllm_bench.commands.score import rescore, score
from dllm_bench.commands.show import list_things, show
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
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # no command at all: the help text, as it is
            print(error.format_message(), file=sys.stderr)
            sys.exit(2)
        fail(_usage(error))


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
    name = getattr(error, "option_name", None)
    if name:
        known = [o for p in context.command.params for o in getattr(p, "opts", ()) if o.startswith("--")]
        near = nearest(name, known)
        return f"unknown option '{name}'" + (
            f": did you mean '{near}'?" if near else f"; see {context.command_path} --help"
        )
    return f"{message} (see {context.command_path} --help)"
