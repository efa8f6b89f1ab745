"""`deltazoo show`."""

from typing import Annotated

import typer

from deltazoo.cli.completion import complete_name
from deltazoo.cli.options import AsJson, Device, Dtype, OperandDtype, Trust
from deltazoo.cli.output import print_json, print_layers, print_line, print_table


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
        typer.Option(help='Print the kernel plan of a mixer for this GPU model, such as "NVIDIA H200". Needs no GPU.'),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show the equation, fields and costs of a mixer, backend or stack, and which backends compute it."""
    from deltazoo.blocks.inspect.show import details

    result = details(name, width, device, dtype.torch, trust, device_name)
    if as_json:
        print_json(result)
        return
    print_line(f"{result.name}, a {result.kind} of {result.owner}\n")
    print_table(["", ""], result.about.items())
    print_table(["field", "default", ""], [row.model_dump().values() for row in result.fields])
    print_table(["cost", ">"], [(title, f"{figure:,}") for title, figure in result.cost.items()])
    verdicts = [(row.backend, "chosen" if row.chosen else " ".join(row.reasons)) for row in result.backends]
    print_table([f"backend on {device_name or device}", ""], verdicts)
    if result.plan is not None:
        print_line(result.plan)
    supported = [(mixer, " ".join(reasons) or "yes") for mixer, reasons in result.takes.items()]
    print_table([f"mixer on {device}", ""], supported)
    if result.description is not None:
        print_layers(result.description)
