"""`deltazoo schema`."""

from deltazoo.cli.terminal.options import AsJson
from deltazoo.cli.terminal.output import print_json


def command(as_json: AsJson = True) -> None:
    """Print the JSON Schema of stack files, with every installed mixer, for editors."""
    from deltazoo.blocks.spec.stack_spec import StackSpec

    print_json(StackSpec.json_schema())
