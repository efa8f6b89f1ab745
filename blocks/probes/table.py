"""The table of docs/evidence/: its mixers and tasks, the short rows of all others, and the runs that belong to them."""

from collections.abc import Sequence

from deltazoo.backends.update import registry
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

SHORT_TASKS = {  # of every other mixer: in minutes on a CPU, and on a GPU
    "parity_small": "parity(heads=2,steps=1000,rates=[1e-2])",
    "s3_small": "s3(width=64,heads=2,steps=2000,rates=[3e-3])",
    "mqar_small": "mqar_short(rates=[3e-3],dtype=float32)",
}
GROUPS = {
    "Tasks of MAD": ("recall", "noisy_recall", "fuzzy_recall", "memorization", "compression"),
    "Digits": ("digits", "digits_dropped", "digits_scaled", "digits_noisy"),
    "Regression in context": ("regression",),
}


def others() -> list[str]:
    """Return the built-in mixers that have short rows."""
    names = (name for name in registry.names(registry.MIXERS) if registry.is_built_in(registry.MIXERS, name))
    return [name for name in names if name not in MIXERS]


def of_table(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the table by column and row."""
    return _sorted(runs, TASKS, MIXERS)


def of_short_rows(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs of the other mixers on a CPU and on a GPU by column and row."""
    return _sorted(runs, [*SHORT_TASKS], others()), _sorted(runs, [*SHORT_TASKS.values()], others())


def of_group(runs: Sequence[Run], tasks: Sequence[str]) -> list[Run]:
    """Return the runs of these tasks by column and row; the mixers of the table come first, in its order."""
    return _sorted(runs, tasks, [*dict.fromkeys([*MIXERS, *(run.mixer for run in runs)])])


def _sorted(runs: Sequence[Run], tasks: Sequence[str], mixers: Sequence[str]) -> list[Run]:
    chosen = [run for run in runs if run.task in tasks and run.mixer in mixers]
    return sorted(chosen, key=lambda run: (tasks.index(run.task), mixers.index(run.mixer)))


def missing(runs: Sequence[Run]) -> int:
    """Count the cells of the table without a run, those of short rows included, which are on a CPU or on a GPU."""
    done = {(run.task, run.mixer) for run in runs}
    return sum((task, mixer) not in done and (SHORT_TASKS.get(task), mixer) not in done for task, mixer in wanted())


def wanted() -> list[tuple[str, str]]:
    """Return all cells of the table, (task, mixer)."""
    table = [(task, mixer) for task in TASKS for mixer in MIXERS]
    return [*table, *((task, mixer) for task in SHORT_TASKS for mixer in others())]
