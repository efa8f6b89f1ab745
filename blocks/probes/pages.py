"""The pages of docs/evidence/, as Markdown from runs: the tables, a page per claim, and the comparison on a text."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deltazoo.backends.io.markdown_text import wrap_prose
from deltazoo.backends.measure.table import Table
from deltazoo.blocks.probes import table
from deltazoo.blocks.probes.claims import CLAIMS, Claim
from deltazoo.blocks.probes.records import Run, cells
from deltazoo.blocks.probes.report import (
    capacity_table,
    environments,
    length_table,
    position_table,
    run_table,
    score_table,
    source_line,
    task_line,
)
from deltazoo.blocks.probes.tasks import task as task_of
from deltazoo.blocks.probes.tasks.capacity import Capacity
from deltazoo.blocks.probes.verdicts import outcome, verdict

_FOLDER = "blocks/probes/results"
_FEW_LENGTHS = 2  # which the table of the runs shows
_CELL = (
    "A cell is the accuracy in percent on the longest sequences of the task, up to 16 times as long as those of the "
    "training: the mean over the seeds at the best learning rate, and in parentheses the lowest and the highest seed. "
    "A cell without parentheses has one seed. A low figure means that the model has not learned the task, or has "
    "learned it and fails on longer sequences: the curves over length, below, show which. "
)


class _Section(NamedTuple):
    """A table with its heading and a paragraph, "" for none."""

    heading: str
    paragraph: str
    table: Table


def pages(runs: Sequence[Run]) -> dict[str, str]:
    """Return the pages by file name: the tables, and each claim with a finished run."""
    if not runs:
        return {"index.md": "# Evidence\n\nThis version has no runs. `deltazoo probe` makes them.\n"}
    done = {(run.task, run.mixer) for run in runs}
    begun = [
        name
        for name, claim in CLAIMS.items()
        if any((task, mixer) in done for task in claim.tasks for mixer in claim.mixers)
    ]
    text = [run for run in runs if run.task == "text"]
    others = ["text"] if text else []
    paragraphs = [
        f"Small models of each mixer, trained on synthetic tasks. {_CELL}Each mixer has its default fields: GLA, for "
        f"instance, has no short convolution, attention has rotary embeddings, and DeltaProduct has eigenvalues in "
        f"[-1, 1]. Parameters and states of the mixers differ.",
        "Claims, most of them of papers, checked in these settings:",
        "\n".join(
            f"- [{claim.title}]({name}.md): {outcome(claim, runs)}" if name in begun else f"- {claim.title}: not run"
            for name, claim in CLAIMS.items()
        ),
        *(["[Models of a text](text.md) with equal parameters and tokens, in bits per byte."] if text else []),
        "![Heat map of the table, and accuracy over the sequence length](table.png)",
        f"```{{toctree}}\n:hidden:\n\n{chr(10).join([*begun, *others])}\n```",
    ]
    commands = ["--table", *(f"--claim {name}" for name in begun)]
    return {
        "index.md": _page("Evidence", paragraphs, runs, _sections(runs), commands),
        **{f"{name}.md": page(name, runs) for name in begun},
        **({"text.md": _text_page(text)} if text else {}),
    }


def page(name: str, runs: Sequence[Run]) -> str:
    """Format the page of a claim, from runs of its mixers and tasks."""
    claim = CLAIMS[name]
    used = [run for run in runs if run.task in claim.tasks and run.mixer in claim.mixers]
    used.sort(key=lambda run: (claim.tasks.index(run.task), claim.mixers.index(run.mixer)))
    paragraphs = [
        f"{claim.sentence} Source: {claim.source}.",
        *(sentence for task in claim.tasks for sentence in verdict(claim, task, used).sentences),
        *([f"The source reports: {claim.reported}"] if claim.reported else []),
        *([f"The runs differ from the source's: {claim.difference}"] if claim.difference else []),
        *([claim.remark] if claim.remark else []),
    ]
    sections = [_Section("", "", run_table(used))]
    if claim.published:
        about = "Accuracies scaled so that guessing has 0 and perfect answers have 100."
        sections.append(_Section("Published figures", about, _published(claim, used)))
    for task in claim.tasks:
        of_task = [run for run in used if run.task == task]
        if of_task and isinstance(task_of(task), Capacity):
            sections.append(_Section(f"Recall over the number of pairs, {task}", "", capacity_table(of_task)))
        elif of_task and len(task_of(task).lengths) > _FEW_LENGTHS:
            sections.append(_Section(f"Accuracy over the length, {task}", "", length_table(of_task)))
    return _page(claim.title, paragraphs, used, sections, [f"--claim {name}"])


def _sections(runs: Sequence[Run]) -> list[_Section]:
    """Return the tables of the index: the main one, short rows, groups of tasks, and what belongs to none."""
    main, (on_cpu, on_gpu) = table.of_table(runs), table.of_short_rows(runs)
    empty, cells_of_tables = table.missing(runs), len(table.wanted())
    absent = (
        f"An empty cell has not been run. Of {cells_of_tables} cells of this table and of the short rows below, which "
        f"are run on a CPU or on a GPU, {empty} are empty."
    )
    sections = [_Section("The table", absent if empty else "", _scores(main))]
    shown = [*main, *on_cpu, *on_gpu]
    small = (
        "Small models, one learning rate and one seed, on a CPU: the sizes of `make test-evidence`. A task is run on a "
        "CPU or on a GPU: the other table has the cells that are empty in this one."
    )
    if on_cpu:
        sections.append(_Section("Other mixers on a CPU, small sizes", small, _scores(on_cpu)))
    if on_gpu:
        sections.append(_Section("Other mixers on a GPU, shortened settings", "", _scores(on_gpu)))
    for heading, tasks in table.GROUPS.items():
        group = table.of_group(runs, tasks)
        if group:
            sections.append(_Section(heading, "", _scores(group)))
            shown += group
    capacity = [run for run in runs if run.task == "capacity"]
    if capacity:
        about = "Two layers with 2 heads of 32 were trained on 16 pairs. Accuracy in percent over the number of pairs."
        sections.append(_Section("State capacity", about, capacity_table(capacity)))
    claimed = {(task, mixer) for claim in CLAIMS.values() for task in claim.tasks for mixer in claim.mixers}
    used = {(run.task, run.mixer) for run in [*shown, *capacity]} | claimed
    rest = [run for run in runs if (run.task, run.mixer) not in used and run.task != "text"]
    about = "Runs of other settings and mixers, which no table above uses. Most have one seed."
    return [*sections, *([_Section("Other runs", about, run_table(rest))] if rest else [])]


def _scores(runs: Sequence[Run]) -> Table:
    return score_table(runs)._replace(notes=())


def _published(claim: Claim, runs: Sequence[Run]) -> Table:
    """Return a row per published figure, with ours."""
    found = cells(runs)
    rows = []
    for task, figures in (claim.published or {}).items():
        chance = task_of(task).chance
        for mixer, figure in figures.items():
            cell = found.get((task, mixer))
            ours = ["", "", ""]
            if cell is not None:
                ours = [str(len(cell.runs)), _scaled(cell.score, chance), _scaled(cell.best, chance)]
            rows.append([task, mixer, f"{figure:.2f}", *ours])
    return Table(["task", "mixer", ">published", ">seeds here", ">mean", ">best seed"], rows)


def _scaled(accuracy: float, chance: float) -> str:
    return f"{100 * (accuracy - chance) / (1 - chance):.2f}"


def _with_and_without_gates(runs: Sequence[Run]) -> list[str]:
    """Compare each delta rule with its gated form at the training length and at the longest one."""
    found = {mixer: cell for (_, mixer), cell in cells(runs).items()}
    sentences = []
    for plain, gated in (("deltanet", "gated_deltanet"), ("efla", "gated_efla")):
        if plain in found and gated in found:
            at = (
                f"{found[plain].bits(length):.3f} and {found[gated].bits(length):.3f} bits at {length:,} bytes"
                for length in (runs[0].settings["length"], max(runs[0].bits))
            )
            sentences.append(f"`{plain}` and `{gated}`, which adds a decay, have {' and '.join(at)}.")
    return [" ".join(sentences)] if sentences else []


def _text_page(runs: Sequence[Run]) -> str:
    paragraphs = [
        "Models of bytes with equal parameters, by the width of their MLPs, and equal training tokens. A cell is the "
        "mean cross entropy in bits per byte of the second half of windows of this length, which are parts of the text "
        "that were not trained on. Longer windows than the training length show how a mixer extrapolates. The windows "
        "of each length are other parts of the text, so that cells compare down a column. In parentheses are the "
        "lowest and the highest seed at the training length.",
        *_with_and_without_gates(runs),
        "The text is the sources of Python's standard library, of the version below, about 11 MB: the training passes "
        "over it three times. Runs that shared a GPU have equal shares of the time, so that seconds compare only "
        "roughly. MoM is missing, because its memories alone have more parameters than the others.",
    ]
    sections = [_Section("", "", position_table(table.of_group(runs, ("text",))))]
    return _page("Models of a text", paragraphs, runs, sections, ["--tasks text --mixers NAMES"])


def _page(
    title: str, paragraphs: Iterable[str], runs: Sequence[Run], sections: Iterable[_Section], commands: Sequence[str]
) -> str:
    """Format a page: text, tables, settings of the tasks, environments and commands."""
    tables = [
        "\n\n".join(part for part in (f"## {heading}" if heading else "", wrap_prose(about), body) if part)
        for heading, about, body in ((each[0], each[1], each[2].markdown([]).strip()) for each in sections)
    ]
    tasks = dict.fromkeys(run.task for run in runs)
    settings = "\n".join(wrap_prose(f"- {task}: {task_line(task)}. {source_line(task, tasks)}.") for task in tasks)
    how = wrap_prose(
        "The learning rate is the best of the task's rates with seed 0, by the mean accuracy over the lengths; for a "
        "text, by the accuracy at the training length. A run ends early if it solves the task at every length, and so "
        "does the search for the rate. The sequences that choose the rate are those that are reported; where seed 0 "
        "has learned nothing at any rate, the choice is noise. The optimizer is AdamW with betas of 0.9 and 0.95 and "
        "gradients clipped to a norm of 1; the rate rises for 5 % of the steps and falls to 0 as a cosine. Runs shared "
        "a GPU, so that seconds compare only roughly. The runs, with every rate and their curves, are in "
        f"`{_FOLDER}/runs.jsonl`. They were made on:"
    )
    made = "\n".join(wrap_prose(f"- {line}") for line in environments(runs))
    shell = "\n".join(f"deltazoo probe {each} --out {_FOLDER} --device cuda" for each in commands)
    parts = [
        f"# {title}",
        "\n\n".join(map(wrap_prose, paragraphs)),
        *tables,
        "## Settings",
        settings,
        how,
        made,
        f"```bash\n{shell}\n```",
        f"This page is generated: `deltazoo probe --pages docs/evidence --out {_FOLDER}`.",
    ]
    return "\n\n".join(parts) + "\n"
