"""`deltazoo diff`."""

from typing import Annotated

import typer

from deltazoo.cli.terminal.completion import complete_stack
from deltazoo.cli.terminal.options import AsJson, Trust
from deltazoo.cli.terminal.output import PIPE_WIDTH, print_json, print_line, print_table


def command(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="Stack file (YAML or JSON), or the name of a preset.", autocompletion=complete_stack
        ),
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Stack that A is compared with.", autocompletion=complete_stack)
    ],
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """List the fields in which two stacks differ; layers are compared by name."""
    from deltazoo.blocks.inspect.diff import diff
    from deltazoo.blocks.spec.stack_spec import StackSpec

    result = diff(StackSpec.load(a, trust), StackSpec.load(b, trust))
    if as_json:
        print_json(result.model_dump(mode="json", exclude_unset=True))
        return
    print_table(["field", a, b], [row.cells() for row in result.differences], pipe_width=PIPE_WIDTH)
    if result.same_model:
        print_line("the stacks describe the same model")
