"""The table of docs/evidence/: its mixers and tasks, and the runs that belong to it."""

from collections.abc import Sequence

from deltazoo.blocks.probes.records import Run

MIXERS = (
    "deltanet",
    "deltanet(negative_eigenvalues=both)",
    "gated_deltanet",
    "gated_deltanet(negative_eigenvalues=both)",
    "efla",
    "gated_efla",
    "kda",
    "gated_deltanet2",
    "rwkv7",
    "mamba2",
    "mamba3",
    "gla",
    "deltaproduct",
    "mom",
    "log_linear_gdn",
    "s4d",
    "attention",
)
TASKS = ("parity", "s3", "mqar_short", "forgetting_mqar", "induction", "needle2", "stacks", "selective_copying")


def of_table(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the table by column and row. Other mixers have a row if no field of theirs is changed."""
    chosen = [run for run in runs if run.task in TASKS and (run.mixer in MIXERS or "(" not in run.mixer)]
    rows = [*MIXERS, *dict.fromkeys(run.mixer for run in chosen if run.mixer not in MIXERS)]
    return sorted(chosen, key=lambda run: (TASKS.index(run.task), rows.index(run.mixer)))


def missing(runs: Sequence[Run]) -> int:
    """Count the cells of the table without a run."""
    done = {(run.task, run.mixer) for run in runs}
    return sum((task, mixer) not in done for task in TASKS for mixer in MIXERS)
