"""`deltazoo show`."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.cli.terminal.completion import complete_device_name, complete_name
from deltazoo.cli.terminal.options import AsJson, Device, Dtype, OperandDtype, Trust
from deltazoo.cli.terminal.output import (
    PIPE_WIDTH,
    output_width,
    print_json,
    print_line,
    print_lines,
    print_notes,
    print_piece,
    print_table,
    print_text,
    rule,
)

if TYPE_CHECKING:
    from deltazoo.blocks.inspect.show import BackendRow


def command(
    name: Annotated[
        str,
        typer.Argument(
            help="Mixer, backend, preset, module:Class, or a stack file (YAML or JSON).", autocompletion=complete_name
        ),
    ],
    width: Annotated[int, typer.Option(min=1, help="Layer width for the costs of a mixer.")] = 1024,
    device: Device = "cpu",
    dtype: OperandDtype = Dtype.float32,
    device_name: Annotated[
        str | None,
        typer.Option(
            help="Print the operators and kernels of a mixer or stack in training and decoding on this GPU model, such "
            'as "NVIDIA H200". Needs no GPU.',
            autocompletion=complete_device_name,
        ),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show the equation, fields and costs of a mixer, backend or stack, and which backends compute it."""
    from deltazoo.backends.io.yaml_text import dump, dump_inline
    from deltazoo.blocks.inspect.show import details

    result = details(name, width, device, dtype.torch, trust, device_name)
    if as_json:
        print_json(result)
        return
    owner = "" if result.owner == result.name else f" of {result.owner}"
    print_line(f"{result.name}, a {result.kind}{owner}\n")
    if result.stack is not None:
        for text in result.about.values():
            print_text(f"{text}\n", PIPE_WIDTH)
        print_piece(dump(result.stack, output_width() or PIPE_WIDTH))
    else:
        about = [(title, text.replace(";  ", "\n")) for title, text in result.about.items()]
        print_table(["", ""], about, pipe_width=PIPE_WIDTH)
    if result.fields:
        print_line()
        rows = [(row.name, dump_inline(row.default), row.about.replace("None: ", "null: ")) for row in result.fields]
        print_table(["field", "default", ""], rows, pipe_width=PIPE_WIDTH)
    if result.cost:
        costs = [(title, f"{figure:,}") for title, figure in result.cost.items() if figure and title != "width"]
        print_line()
        print_table([f"cost at width {width}", ">"], costs)
    if result.backends:
        _print_backends(result.backends, device_name or device)
    if result.kind == "mixer" and device_name is None:
        print_line()
        print_text(f'kernels on a GPU: deltazoo show {name} --device-name "NVIDIA H200"')
    if result.plan is not None:
        print_line()
        print_text(result.plan, PIPE_WIDTH)
    if result.runs is not None:
        print_line()
        print_text(result.runs, PIPE_WIDTH)
    if result.kind == "backend":
        _print_mixers(result.takes, device)
    if result.description is not None:
        print_line()
        print_lines(result.description.lines(output_width(), rule()))


def _print_backends(rows: "list[BackendRow]", device: str) -> None:
    chosen = [row.backend for row in rows if row.chosen]
    print_line()
    print_line(f"backend chosen on {device}: {chosen[0]}" if chosen else f"no installed backend runs it on {device}")
    print_notes(((row.backend, reason) for row in rows for reason in row.reasons), PIPE_WIDTH)


def _print_mixers(takes: dict[str, list[str]], device: str) -> None:
    """Print the mixers that a backend computes, and the reasons against the others."""
    computed = [mixer for mixer, reasons in takes.items() if not reasons]
    print_line()
    print_text(f"mixers on {device}: {', '.join(computed) or 'none'}", PIPE_WIDTH)
    notes = [(mixer, reason) for mixer, reasons in takes.items() for reason in reasons]
    counts = Counter(reason for _, reason in notes)
    named = (("every mixer" if counts[reason] == len(takes) else mixer, reason) for mixer, reason in notes)
    print_notes(named, PIPE_WIDTH)
