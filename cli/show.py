"""`deltazoo show`."""

from typing import Annotated

import typer

from deltazoo.cli.options import AsJson, Device, Dtype, OperandDtype, Trust
from deltazoo.cli.output import print_json, print_layers, print_table, say


def command(
    name: Annotated[str, typer.Argument(help="A mixer, backend or preset, module:Class, or a file of a stack.")],
    width: Annotated[int, typer.Option(min=1, help="Of the layer that a mixer's figures are for.")] = 1024,
    device: Device = "cpu",
    dtype: OperandDtype = Dtype.float32,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show what a mixer, backend or preset is, what it costs, and which backends compute it."""
    from deltazoo.blocks.inspect.show import sheet

    found = sheet(name, width, device, dtype.torch, trust)
    if as_json:
        print_json(found)
        return
    say(f"{found.name}, a {found.kind} of {found.owner}\n")
    print_table(["", ""], found.about.items())
    print_table(["field", "default", ""], [row.model_dump().values() for row in found.fields])
    print_table(["cost", ">"], [(title, f"{figure:,}") for title, figure in found.cost.items()])
    verdicts = [(row.backend, "chosen" if row.chosen else " ".join(row.reasons)) for row in found.backends]
    print_table([f"backend on {device}", ""], verdicts)
    print_table([f"mixer on {device}", ""], [(mixer, " ".join(no) or "yes") for mixer, no in found.takes.items()])
    if found.description is not None:
        print_layers(found.description)
