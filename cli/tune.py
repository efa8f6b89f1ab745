"""`deltazoo tune` and `deltazoo merge-tables`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.cli.terminal.completion import complete_device_name, complete_mixers
from deltazoo.cli.terminal.options import AsJson, Directions, OptionalStack, Trust, split
from deltazoo.cli.terminal.output import print_json, print_line, print_table, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltazoo.backends.tuning.tune import Planned, Tuned
    from deltazoo.blocks.inspect.step_tuning import ModelTuned


def command(
    stack: OptionalStack = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help='Named shape, or sizes such as "B=4 T=1000 H=8 K=64"; repeatable. Default without a stack: '
            "dense_1x2048 and decode_64."
        ),
    ] = None,
    mixer: Annotated[
        str,
        typer.Option(
            help="Comma-separated mixers, with fields if any, whose updates are tuned on --shape.",
            autocompletion=complete_mixers,
        ),
    ] = "gated_deltanet",
    dtype: Annotated[str, typer.Option(help="Comma-separated dtypes of the operands.")] = "bfloat16",
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the stack, in sequences.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Sequence length of the stack, in tokens.")] = 4096,
    directions: Directions = "forward,backward,decode",
    device: Annotated[str, typer.Option(help="Device: cuda or cuda:1.")] = "cuda",
    effort: Annotated[
        str,
        typer.Option(
            help="quick: the candidates that were close to the fastest on earlier problems; full: every candidate."
        ),
    ] = "quick",
    budget: Annotated[float | None, typer.Option(help="Time budget in seconds; no kernel is started after it.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Launch table to write. Default: the user's table, which is loaded automatically."),
    ] = None,
    again: Annotated[bool, typer.Option(help="Re-measure kernels that are already in the table.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the measurements without running them.")] = False,
    device_name: Annotated[
        str | None,
        typer.Option(
            help='With --dry-run: list those of this GPU, such as "NVIDIA H200"; this machine needs no GPU.',
            autocompletion=complete_device_name,
        ),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Measure launch configs of the triton backend's kernels on this GPU. A second run continues an unfinished one.

    Of a stack all kernels are measured, those of the updates and those beside them, and at the end a whole training
    step and a whole decoding step, without and with the tables.
    """
    from deltazoo.backends.io.errors import ConfigError
    from deltazoo.backends.torch_ext.devices import DeviceSpec
    from deltazoo.backends.tuning.tune import TuneConfig
    from deltazoo.blocks.inspect.tuning import (
        build_targets,
        plan_stack_operators,
        plan_targets,
        tune_stack_steps,
        tune_targets,
    )

    if device_name is not None and not dry_run:
        raise ConfigError("--device-name needs --dry-run: launches are measured on a GPU of this machine")
    config = TuneConfig(directions=split(directions), effort=effort, budget=budget, again=again)
    targets = build_targets(stack, shape or [], split(mixer) or [], split(dtype) or [], (batch, length), trust)
    if dry_run:
        where = device if device_name is None else DeviceSpec.named(device_name)
        planned = plan_targets(where, targets, config, out) if targets else []
        if stack is not None:
            planned += plan_stack_operators(stack, (batch, length), split(dtype) or [], where, config, trust)
        print_json(planned) if as_json else _print_plan(planned)
        return
    with progress() as report_progress:
        tuned = tune_targets(device, targets, config, out, report_progress) if targets else None
        model = None
        if stack is not None:
            size = (batch, length)
            model = tune_stack_steps(stack, size, split(dtype) or [], device, config, out, report_progress, trust)
    if as_json:
        print_json(tuned if model is None else {"updates": tuned, "model": model})
        return
    if tuned is not None:
        _print(tuned)
    if model is not None:
        _print_model(model)


def merge(
    tables: Annotated[list[Path], typer.Argument(help="Tables of one device; later ones take precedence.")],
    out: Annotated[Path, typer.Option(help="Launch table to write.")],
    as_json: AsJson = False,
) -> None:
    """Merge launch tables of one device."""
    from deltazoo.backends.triton.runtime.table import merge_tables

    merged = merge_tables(tables, out)
    if as_json:
        print_json(merged)
    else:
        print_line(f"{len(merged.records)} records of {merged.device} in {out}")


def _print_plan(planned: "Sequence[Planned]") -> None:
    print_table(["kernel", "shape", ">candidates", ""], [step.cells() for step in planned])
    for step in planned:
        print_line(f"\n{step.kernel}, {step.shape}")
        print_line(f"  class: {step.key}")
        for candidate in step.candidates:
            print_line(f"  {candidate}")


def _print_model(tuned: "ModelTuned") -> None:
    from deltazoo.backends.triton.runtime.records import OPERATOR_COLUMNS

    operators = tuned.operators
    print_line(f"\nkernels beside the updates, {tuned.dtype}:")
    print_table(OPERATOR_COLUMNS, [record.cells() for record in operators.records])
    for sentence in (*operators.failures, *operators.rejected):
        print_line(sentence)
    counts = f"{operators.kept} already in the table, {operators.left} not reached"
    print_line(f"{len(operators.records)} measured, {counts}")
    print_table(["whole step", ">heuristic ms", ">tuned ms", ">gain"], [gain.cells() for gain in tuned.steps])


def _print(tuned: "Tuned") -> None:
    from deltazoo.backends.triton.runtime.records import COLUMNS

    print_line(tuned.environment.line())
    print_table(COLUMNS, [record.cells() for record in tuned.records])
    if tuned.gains:
        print_table(
            ["shape", "direction", ">heuristic ms", ">tuned ms", ">gain"], [gain.cells() for gain in tuned.gains]
        )
    for sentence in (*tuned.failures, *tuned.rejected):
        print_line(sentence)
    measured = f"{len(tuned.records)} measured in {tuned.seconds:.0f} s"
    counts = f"{measured}, {tuned.kept} already in the table, {tuned.left} not reached"
    print_line(f"{counts}; gain: time with the heuristic's launch / time with the chosen launch, other launches equal")
    print_line(tuned.last_line)
