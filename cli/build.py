"""`deltazoo build`."""

from pathlib import Path
from typing import Annotated

import typer

from deltazoo.cli.terminal.options import AsJson, BackendName, OptionalStack, Trust
from deltazoo.cli.terminal.output import (
    PIPE_WIDTH,
    output_width,
    print_json,
    print_line,
    print_lines,
    print_note,
    print_text,
    rule,
)


def command(
    stack: OptionalStack = None,
    pattern: Annotated[
        str | None, typer.Option(help='Layer pattern, for example "3*gated_deltanet(heads=6) + sliding_window".')
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of the residual stream.")] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Number of layers.")] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Vocabulary size in tokens. With --pattern by default 256, the bytes.")
    ] = None,
    tied: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Share the weights of embedding and head.")
    ] = None,
    backend: BackendName = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Set a field by its dotted path to a YAML value, such as layers.kda.heads=8 or mlp.width=512; "
            "repeatable. A new mixer or type resets the other fields beside it.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Plot the parameters of each layer, and state and cache against context length, to this .svg, .png or "
            ".pdf file."
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the stack to this .yaml or .json file.")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Assemble a stack from a file, a preset or a pattern, and describe it layer by layer."""
    from deltazoo.backends.io.errors import count
    from deltazoo.blocks.spec.assemble import assemble

    changes = {"pattern": pattern, "width": width, "depth": depth, "vocab": vocab, "tied": tied, "backend": backend}
    spec = assemble(stack, changes, trust, settings or [])
    description = spec.describe(backend)
    if plot is not None:
        from deltazoo.blocks.inspect.plot import plot_stack

        plot_stack(spec, plot)
    if save is not None:
        replaced = save.exists()
        spec.save(save)
        if replaced:
            print_note(f"deltazoo: warning: {save} existed and was replaced, comments included")
    if as_json:
        print_json({"stack": spec, "description": description})
        return
    mlp = f", mlp {spec.mlp}" if isinstance(spec.mlp, str) else ""
    active = f", {n:,} active" if (n := description.active_parameters) < description.parameters else ""
    sizes = f"width {spec.width}, {count(spec.depth, 'layer')}, {description.parameters:,} parameters{active}"
    print_text(f"{'' if stack is None else f'{stack}, '}{spec.pattern}{mlp}: {sizes}", PIPE_WIDTH)
    print_line()
    print_lines(description.lines(output_width(), rule()))
    if plot is not None:
        print_line(f"plotted to {plot}")
    if save is not None:
        print_line(f"saved to {save}")
