"""The command line: parse, call one function of the core, hand the result to the screen."""

from __future__ import annotations

import os
import sys
from typing import Annotated

# pydantic, which typer uses, would read the metadata of every installed package to look for plugins of its own.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import typer

from certtool.cli.lazy import LazyGroup, add_lazily
from certtool.errors import CertToolError, Exit, translated
from certtool.version import __version__

LEADER_SPEAKS_WITHIN = 15.0  # seconds
COMMANDS = {
    "train": "Train a network whose predictions can be proven robust."
    " Ctrl-C saves; --resume goes on to the same result.",
    "verify": "Prove how many test images keep their label under every perturbation of size EPS.",
    "inspect": "Show per layer how bounds widen (difference gain, growth, width)"
    " and which ReLUs are active, unstable or dead.",
    "doctor": "Versions, engines, devices, data sets found, and how to get what is missing.",
    "zoo": "Find, fetch, check and publish certified models.",
    "recipe": "Find, read, check and copy recipes.",
    "runs": "What has been trained here.",
}

app = typer.Typer(
    name="certtool",
    cls=LazyGroup,
    help="Certified robust training: train, prove, inspect and share image classifiers.",
    epilog="Start with: certtool train tiny_cnn7",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _line in COMMANDS.items():
    add_lazily(app, _name, _line)


def _version(asked: bool) -> None:
    if asked:
        print(f"certtool {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Certified robust training: train, prove, inspect and share image classifiers."""


def main() -> None:
    """Run a command; what goes wrong becomes a sentence, a hint and an exit code."""
    try:
        app()
    except CertToolError as error:
        _report(error)
    except KeyboardInterrupt:
        _report(_interrupted())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing more to say
        sys.exit(Exit.DONE)
    except Exception as error:
        _report(translated(error), error)


def _report(error: CertToolError, cause: BaseException | None = None) -> None:
    from certtool.report.screen import Screen

    if os.environ.get("CERTTOOL_DEBUG"):
        import traceback

        traceback.print_exception(cause or error)
    if os.environ.get("RANK", "0") != "0" and cause is None:
        _let_the_leader_speak(error)
    Screen(json="--json" in sys.argv).error(error)
    sys.exit(error.exit_code)


def _let_the_leader_speak(error: CertToolError) -> None:
    """Of several processes that meet the same error the first one says it, then torchrun ends the others.

    A process that left at once could end the leader before it has spoken. One that is still here after a while met an
    error of its own, and says it.
    """
    if error.exit_code == Exit.INTERRUPTED:
        sys.exit(error.exit_code)
    import time

    time.sleep(LEADER_SPEAKS_WITHIN)


def _interrupted() -> CertToolError:
    error = CertToolError("by Ctrl-C")
    error.exit_code = Exit.INTERRUPTED
    return error
