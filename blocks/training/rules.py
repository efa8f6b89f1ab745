"""Which settings a resumed run may change: one table, from which the help, the errors and the README follow."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from deltazoo.blocks.training.nested import flat


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

_RANKS = "the rows of a step stay the same"
_NO_EFFECT = "it does not change the results"

RULES: Mapping[str, Rule] = {
    "steps": Rule(True, "--steps", "the remaining steps take the learning rates of a run with that many steps"),
    "optimizer.learning_rate": Rule(
        True, "--lr", "the remaining steps take the learning rates of a run with that peak"
    ),
    "optimizer.weight_decay": Rule(True, "--weight-decay", "the remaining steps take it"),
    "optimizer.betas": Rule(True, None, "the remaining steps take them"),
    "optimizer.eps": Rule(True, None, "the remaining steps take it"),
    "optimizer.momentum": Rule(True, None, "the remaining steps take it"),
    "optimizer.rates": Rule(True, None, "the remaining steps take them"),
    "optimizer.clip": Rule(True, "--clip", "the remaining steps take it"),
    "optimizer.skips": Rule(True, None, "the remaining steps take it"),
    "schedule.name": Rule(True, None, "the remaining steps follow it"),
    "schedule.final": Rule(True, None, "the remaining steps follow it"),
    "schedule.decay": Rule(True, None, "the remaining steps follow it"),
    "z_loss": Rule(True, None, "the remaining steps take it"),
    "evaluation.every": Rule(True, "--every", "the remaining validations and checkpoints follow it"),
    "evaluation.positions": Rule(True, None, _NO_EFFECT),
    "checkpoint.every": Rule(True, None, _NO_EFFECT),
    "checkpoint.keep": Rule(True, None, _NO_EFFECT),
    "checkpoint.best": Rule(True, None, _NO_EFFECT),
    "checkpoint.background": Rule(True, None, _NO_EFFECT),
    "checkpoint.pretrained": Rule(True, None, _NO_EFFECT),
    "logging.groups": Rule(True, None, _NO_EFFECT),
    "logging.watch": Rule(True, "--watch", _NO_EFFECT),
    "logging.tensorboard": Rule(True, None, _NO_EFFECT),
    "parallel.mode": Rule(True, "--parallel", _ROUNDING),
    "parallel.shard": Rule(True, None, _ROUNDING),
    "parallel.context": Rule(True, "--context-parallel", _ROUNDING),
    "parallel.layout": Rule(True, None, _ROUNDING),
    "parallel.timeout": Rule(True, None, _NO_EFFECT),
    "device": Rule(True, "--device", _ROUNDING),
    "precision": Rule(True, "--precision", "the remaining steps compute in it"),
    "backend": Rule(True, "--backend", _ROUNDING),
    "compile": Rule(True, "--compile", _ROUNDING),
    "checkpointing": Rule(True, "--checkpointing", _ROUNDING),
    "batch.micro_rows": Rule(True, None, _RANKS),
    "batch.rows": Rule(False, "--batch", _CROPS),
    "batch.length": Rule(False, "--length", _CROPS),
    "batch.tokens": Rule(False, None, _CROPS),
    "schedule.warmup": Rule(False, "--warmup", "the first steps have followed it"),
    "optimizer.name": Rule(False, None, "the state of the optimizer is that of the first steps"),
    "seed": Rule(False, "--seed", "it drew the weights and the crops"),
    "evaluation.batches": Rule(False, None, "the validation losses of a run must be comparable"),
    "model": Rule(False, None, "the checkpoint has the weights of one model"),
    "data.path": Rule(True, None, "the text must be equal, see its digest"),
    "data.mixture": Rule(True, None, "the remaining steps take the new shares of equal data"),
    "data.row_end": Rule(True, None, "the remaining rows follow it"),
}

RESUMABLE = tuple(name for name, rule in RULES.items() if rule.may_change)


def resumable_options() -> list[str]:
    """Return the options of `deltazoo train` that --resume takes, such as "--lr"."""
    return [rule.option for rule in RULES.values() if rule.may_change and rule.option]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each setting that differs, by its path."""
    before, after = flat(old), flat(new)
    return {name: (before.get(name), value) for name, value in after.items() if value != before.get(name)}


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
