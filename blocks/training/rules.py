"""Which settings a resumed run may change: one table, from which the help, the errors and the README follow."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """Whether a resumed run may change a setting.

    option: the option of `deltazoo train`; None: only Python has the setting.
    reason: what a change does to the rest of the run, or why none is possible.
    """

    may_change: bool
    option: str | None
    reason: str


_ROUNDING = "the results stay equal up to rounding"
_CROPS = "each step counts and cuts its crops by it"

RULES: Mapping[str, Rule] = {
    "steps": Rule(True, "--steps", "the remaining steps take the learning rates of a run with that many steps"),
    "learning_rate": Rule(True, "--lr", "the remaining steps take the learning rates of a run with that peak"),
    "weight_decay": Rule(True, "--weight-decay", "the remaining steps take it"),
    "clip": Rule(True, "--clip", "the remaining steps take it"),
    "every": Rule(True, "--every", "the remaining validations and checkpoints follow it"),
    "device": Rule(True, "--device", _ROUNDING),
    "dtype": Rule(True, "--dtype", "the remaining steps compute in it"),
    "backend": Rule(True, "--backend", _ROUNDING),
    "compile": Rule(True, "--compile", _ROUNDING),
    "checkpointing": Rule(True, "--checkpointing", _ROUNDING),
    "batch": Rule(False, "--batch", _CROPS),
    "length": Rule(False, "--length", _CROPS),
    "warmup": Rule(False, "--warmup", "the first steps have followed it"),
    "seed": Rule(False, "--seed", "it drew the weights and the crops"),
    "validation_batches": Rule(False, None, "the validation losses of a run must be comparable"),
}

RESUMABLE = tuple(name for name, rule in RULES.items() if rule.may_change)


def resumable_options() -> list[str]:
    """Return the options of `deltazoo train` that --resume takes, such as "--lr"."""
    return [rule.option for rule in RULES.values() if rule.may_change and rule.option]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each setting that differs."""
    return {name: (old[name], new[name]) for name in new if new[name] != old[name]}


def refused(changes: Mapping[str, tuple[Any, Any]], stack: object) -> str | None:
    """Format a sentence for the changes that a resumed run cannot make, with the command that can; None without any.

    Args:
        changes: the old and the new value of each setting.
        stack: the file of the run's stack.
    """
    fixed = {name: values for name, values in changes.items() if not RULES[name].may_change}
    if not fixed:
        return None
    sentences = [
        f"{name} must stay {old} in a resumed run, got {new}: {RULES[name].reason}"
        for name, (old, new) in fixed.items()
    ]
    options = [f"{RULES[name].option} {new}" for name, (_, new) in fixed.items() if RULES[name].option]
    command = " ".join(["deltazoo train", str(stack), *options, "--out FOLDER"])
    return f"{'; '.join(sentences)}; a new run can: {command}"
