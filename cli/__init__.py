"""The command line. Every command parses its options, calls one library function and prints the result."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

from deltazoo.cli import (
    bench,
    build,
    check,
    compare,
    convert,
    data,
    demo,
    diff,
    doctor,
    evaluate,
    generate,
    plot,
    probe,
    schema,
    show,
    train,
    tune,
    zoo,
)
from deltazoo.cli import list as list_
from deltazoo.cli.terminal.errors import Debug, report_user_errors
from deltazoo.cli.terminal.streams import run

app = typer.Typer(
    name="deltazoo",
    help="A torch.compile-first layer zoo for linear-recurrent token mixers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_.command,
    "show": show.command,
    "build": build.command,
    "diff": diff.command,
    "data": data.command,
    "train": train.command,
    "plot": plot.command,
    "generate": generate.command,
    "evaluate": evaluate.command,
    "convert": convert.command,
    "compare": compare.command,
    "bench": bench.command,
    "check": check.command,
    "probe": probe.command,
    "tune": tune.command,
    "merge-tables": tune.merge,
    "doctor": doctor.command,
    "demo": demo.command,
    "schema": schema.command,
    "zoo": zoo.command,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(report_user_errors(_command))


def _print_version(requested: bool) -> None:
    if requested:
        import deltazoo
        from deltazoo.backends.io.versions import versions

        typer.echo(f"deltazoo {deltazoo.__version__}")
        for name, version in versions().items():
            typer.echo(f"{name} {version}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of user errors as well.")] = False,
) -> None:
    """Parse the options that precede the command."""
    Debug.on = debug


def main() -> None:
    """Run the `deltazoo` command."""
    sys.path.append("")  # "module:Class" may name a file of the current folder; installed packages take precedence
    sys.exit(run(app))
