"""`deltazoo probe`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltazoo.cli.terminal.options import AsJson, Device, split
from deltazoo.cli.terminal.output import (
    print_json,
    print_line,
    print_note,
    print_notes,
    print_piece,
    print_table,
    print_text,
    progress,
)
from deltazoo.cli.terminal.threads import let_idle_threads_sleep

if TYPE_CHECKING:
    from deltazoo.blocks.probes.records import Run

_NOTHING_FINISHED = 1  # exit code


def command(
    mixers: Annotated[
        str | None,
        typer.Option(
            show_default="gated_deltanet,kda,mamba2,attention",
            help="Comma-separated mixers, plug-ins or hybrid patterns, with changed fields in parentheses: "
            '"deltanet(negative_eigenvalues=both),3*kda + attention".',
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            show_default="parity,s3,mqar_short",
            help='Comma-separated tasks, see --list, with changed fields in parentheses: "mqar(length=512,pairs=64)".',
        ),
    ] = None,
    claim: Annotated[
        str | None, typer.Option(help="Make the runs that decide this claim of docs/evidence/, and print its page.")
    ] = None,
    table: Annotated[
        bool,
        typer.Option("--table", help="Make the runs of docs/evidence/: 17 mixers on 8 tasks, others on 3."),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(help="Train the mixers on this text file or folder, with equal parameters and tokens."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder of runs.jsonl. Runs that it holds are not repeated, so a second call continues."),
    ] = Path("probes"),
    budget: Annotated[float, typer.Option(min=0, help="Seconds. Runs that are not finished then are dropped.")] = 600.0,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds at the best learning rate of each mixer and task.")] = 3,
    device: Device = "cpu",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="4 per GPU, one per core on a CPU",
            help="Processes, each of which trains a mixer on a task.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a heat map and curves over length to this PNG, SVG or PDF file.")
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(help="Write the pages of docs/evidence/ from the runs in --out to this folder, and exit."),
    ] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="List the tasks and the claims, and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train small models of mixers on synthetic tasks: what each mixer can do.

    Every task states its model, schedule and learning rates. All rates run with one seed, until one solves the task,
    and the best one with more. Each finished run is a line of runs.jsonl. Prints the accuracy at the longest length.

    Exit code 1: no run is finished.
    """
    let_idle_threads_sleep()
    if list_tasks:
        _list(as_json)
        return
    if pages is not None:
        _write_pages(pages, out)
        return
    from deltazoo.backends.io.errors import ConfigError, unknown_name
    from deltazoo.backends.io.progress import silent
    from deltazoo.blocks.data.text import load_text
    from deltazoo.blocks.probes.claims import CLAIMS
    from deltazoo.blocks.probes.pages import page
    from deltazoo.blocks.probes.report import environments, position_table, score_table
    from deltazoo.blocks.probes.report import plot as draw
    from deltazoo.blocks.probes.runner import ProbeConfig, probe
    from deltazoo.blocks.probes.table import MIXERS, SHORT_TASKS, TASKS, others
    from deltazoo.blocks.training.report import check_outputs

    if text is not None:
        if tasks is not None:
            raise ConfigError("only one of --text and --tasks may be given")
        if '"' in str(text):
            raise ConfigError(f"--text must be a path without quotation marks, got {text}")
        load_text(text)  # refuses what cannot be read before any run
        tasks = f'text(path="{text}")'
    choices = {"--claim": claim is not None, "--table": table, "--mixers/--tasks": (mixers, tasks) != (None, None)}
    given = [name for name, is_given in choices.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"only one of --claim, --table and --mixers/--tasks may be given, got {' and '.join(given)}")
    if claim is not None:
        if claim not in CLAIMS:
            raise ConfigError(unknown_name("claim", claim, CLAIMS))
        chosen_claim = CLAIMS[claim]
        products = [(chosen_claim.mixers, chosen_claim.tasks)]
    elif table:
        products = [(MIXERS, TASKS), (tuple(others()), tuple(SHORT_TASKS))]
    else:
        chosen = split(mixers) or ["gated_deltanet", "kda", "mamba2", "attention"]
        products = [(tuple(chosen), tuple(split(tasks) or ["parity", "s3", "mqar_short"]))]
    check_outputs(plot=plot)
    config = ProbeConfig(budget=budget, seeds=seeds, device=device, workers=workers)
    with progress() as report_progress:
        result = probe(
            products, out, config, silent if as_json else report_progress, None if as_json or claim else _print_run
        )
    if plot is not None:
        draw(result.runs, plot)
    if as_json:
        print_json({"runs": result.runs, "problems": [{"run": name, "reason": why} for name, why in result.problems]})
    elif claim is not None and result.runs:
        print_piece(page(claim, result.runs))
    elif result.runs:
        scores = score_table(result.runs)
        print_line()
        print_table(scores.columns, scores.rows)
        if text is not None:
            print_line()
            print_table(*position_table(result.runs)[:2])
        print_line()
        print_notes(scores.notes)
        for line in environments(result.runs):
            print_text(line)
    if not as_json:
        if result.setup_seconds:
            print_note(f"models and kernels took {result.setup_seconds:.0f} s to set up, added up over the processes")
        for name, why in result.problems:
            print_note(f"{name}: {why}")
    if not result.runs:
        raise typer.Exit(_NOTHING_FINISHED)


def _print_run(run: "Run") -> None:
    lengths = ", ".join(f"{length:,}: {100 * accuracy:.1f} %" for length, accuracy in run.accuracy.items())
    end = "; diverged" if run.diverged else ""
    print_text(
        f"{run.task} {run.mixer}: rate {run.rate:g}, seed {run.seed}, {run.steps:,} steps, {lengths}; "
        f"{run.seconds:.1f} s{end}"
    )


def _write_pages(folder: Path, out: Path) -> None:
    from deltazoo.backends.io.output_path import output_folder
    from deltazoo.blocks.probes.pages import pages
    from deltazoo.blocks.probes.records import RUNS, read
    from deltazoo.blocks.probes.report import plot
    from deltazoo.blocks.probes.table import of_table

    runs = read(out / RUNS)
    shown = of_table(runs)
    output_folder(folder)
    if shown:
        plot(shown, folder / "table.png")
    for name, text in pages(runs).items():
        (folder / name).write_text(text, encoding="utf-8")
        print_line(str(folder / name))


def _list(as_json: bool) -> None:
    from deltazoo.blocks.probes.claims import CLAIMS
    from deltazoo.blocks.probes.tasks import TASKS

    if as_json:
        tasks = {
            name: {
                "about": task.about,
                "source": task.source,
                "published": task.published,
                "difference": task.difference,
                "settings": task,
            }
            for name, task in TASKS.items()
        }
        print_json({"tasks": tasks, "claims": {name: claim._asdict() for name, claim in CLAIMS.items()}})
        return
    rows = [
        (
            name,
            task.about,
            f"{task.length:,}",
            f"{task.lengths[-1]:,}",
            f"{task.depth} x {task.width}",
            f"{task.steps:,}",
        )
        for name, task in TASKS.items()
    ]
    print_table(["task", "", ">length", ">tested to", ">layers x width", ">steps"], rows, pipe_width=140)
    print_line()
    names: dict[tuple[str, str], list[str]] = {}
    for name, task in TASKS.items():
        names.setdefault((task.source, task.published), []).append(name)
    sources = [(", ".join(group), *texts) for texts, group in names.items()]
    print_table(["tasks", "source", "published"], sources, pipe_width=140)
    print_line()
    print_table(["claim", ""], [(name, claim.sentence) for name, claim in CLAIMS.items()], pipe_width=140)
