"""`deltazoo tune` and `deltazoo merge-tables`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.cli.options import AsJson, OptionalStack, Trust, split
from deltazoo.cli.output import print_json, print_table, progress, say

if TYPE_CHECKING:
    from deltazoo.backends.tuning.tune import Tuned


def command(
    stack: OptionalStack = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help='A named shape, or sizes as "B=4 T=1000 H=8 K=64"; may stand several times.'),
    ] = None,
    mixer: Annotated[str, typer.Option(help="Whose update on --shape; names with commas between.")] = "gated_deltanet",
    dtype: Annotated[str, typer.Option(help="Of the operands; names with commas between.")] = "bfloat16",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a batch of the stack.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence of the stack.")] = 4096,
    directions: Annotated[str, typer.Option(help="With commas between.")] = "forward,backward,decode",
    device: Annotated[str, typer.Option(help="cuda, cuda:1.")] = "cuda",
    effort: Annotated[str, typer.Option(help="quick: what was good somewhere; full: every combination.")] = "quick",
    budget: Annotated[float | None, typer.Option(help="Seconds, after which no other kernel is begun.")] = None,
    out: Annotated[Path | None, typer.Option(help="The table; the user's, found by itself, if none.")] = None,
    again: Annotated[bool, typer.Option(help="Measure what the table has already, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be measured.")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Measure the launches of the triton backend's kernels on this GPU; run it again to go on where it stopped."""
    from deltazoo.backends.tuning.tune import TuneConfig
    from deltazoo.blocks.inspect.tuning import plan_on, targets_of, tune_on

    config = TuneConfig(directions=split(directions), effort=effort, budget=budget, again=again)
    targets = targets_of(stack, shape or [], split(mixer) or [], split(dtype) or [], (batch, length), trust)
    if dry_run:
        planned = plan_on(device, targets, config, out)
        if as_json:
            print_json(planned)
        else:
            print_table(["kernel", "shape", "class", ">candidates", ""], [step.cells() for step in planned])
        return
    with progress() as told:
        found = tune_on(device, targets, config, out, told)
    print_json(found) if as_json else _print(found)


def merge(
    tables: Annotated[list[Path], typer.Argument(help="Of one device; the later over the earlier.")],
    out: Annotated[Path, typer.Option(help="Where the result goes.")],
    as_json: AsJson = False,
) -> None:
    """Merge launch tables of one device into one."""
    from deltazoo.backends.triton.table import merge_tables

    merged = merge_tables(tables, out)
    if as_json:
        print_json(merged)
    else:
        say(f"{len(merged.records)} records of {merged.device} in {out}")


def _print(found: "Tuned") -> None:
    from deltazoo.backends.triton.table import COLUMNS

    say(found.environment.line())
    print_table(COLUMNS, [record.cells() for record in found.records])
    for sentence in (*found.failures, *found.rejected):
        say(sentence)
    counts = f"{len(found.records)} measured in {found.seconds:.0f} s, {found.kept} kept, {found.left} left"
    say(f"{counts}; gain: the heuristic's time over the chosen launch's, the others' equal")
    say(found.last_line)
