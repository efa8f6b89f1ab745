"""The tasks by name. A name with fields in parentheses changes them: "mqar(length=1024, pairs=128)"."""

from typing import Any

from pydantic import ValidationError

from deltazoo.backends.io.errors import ConfigError, PatternError, unknown_name
from deltazoo.backends.io.frozen_config import describe_errors
from deltazoo.blocks.probes.task import Task
from deltazoo.blocks.probes.tasks.bracket_arithmetic import BracketArithmetic
from deltazoo.blocks.probes.tasks.capacity import Capacity
from deltazoo.blocks.probes.tasks.compression import Compression
from deltazoo.blocks.probes.tasks.digits import Digits
from deltazoo.blocks.probes.tasks.forgetting_mqar import ForgettingMQAR
from deltazoo.blocks.probes.tasks.fuzzy_recall import FuzzyRecall
from deltazoo.blocks.probes.tasks.induction import InductionHeads
from deltazoo.blocks.probes.tasks.memorization import Memorization
from deltazoo.blocks.probes.tasks.modular_arithmetic import ModularArithmetic
from deltazoo.blocks.probes.tasks.mqar import MQAR, ShortMQAR
from deltazoo.blocks.probes.tasks.needle import Needle
from deltazoo.blocks.probes.tasks.palindrome import Palindrome
from deltazoo.blocks.probes.tasks.parity import Parity
from deltazoo.blocks.probes.tasks.recall import Recall
from deltazoo.blocks.probes.tasks.regression import Regression
from deltazoo.blocks.probes.tasks.selective_copying import SelectiveCopying
from deltazoo.blocks.probes.tasks.stacks import Stacks
from deltazoo.blocks.probes.tasks.text import TextTask
from deltazoo.blocks.probes.tasks.word_problem import WordProblem
from deltazoo.blocks.spec.pattern import parse
from deltazoo.mixers.core.patterns import Name

TASKS: dict[str, Task] = {
    "mqar": MQAR(),
    "mqar_short": ShortMQAR(),
    "mqar_long": MQAR(length=256, lengths=(256,), pairs=64, tokens=512, steps=20_000, batch=64, rates=(1e-3,)),
    "mqar_small": MQAR(length=64, lengths=(64,), pairs=12, tokens=64, width=32, heads=1, steps=800, batch=32,
                       rates=(1e-2,), evaluation_tokens=8192),
    "mqar_kimi": MQAR(length=1024, lengths=(1024,), pairs=64, tokens=8192, width=256, heads=2, steps=20_000, batch=64,
                      rates=(5e-5, 1e-4, 5e-4, 1e-3)),
    "forgetting_mqar": ForgettingMQAR(),
    "capacity": Capacity(),
    "capacity_long": Capacity(steps=12_000),
    "capacity_large": Capacity(length=512, lengths=(64, 128, 256, 512), tokens=1024, steps=10_000, rates=(1e-3, 3e-3)),
    "induction": InductionHeads(),
    "induction_long": InductionHeads(lengths=(256, 4096, 2**16, 2**20), steps=10_000, evaluation_tokens=2**24),
    "induction_published": InductionHeads(lengths=(256, 4096, 2**16, 2**20), steps=204_800, batch=8, rates=(1e-3,),
                                          evaluation_tokens=2**24),
    "selective_copying": SelectiveCopying(),
    "selective_copying_long": SelectiveCopying(lengths=(256,), steps=20_000, rates=(1e-3, 3e-3)),
    "parity": Parity(),
    "parity_small": Parity(length=80, lengths=(80, 160), width=32, steps=200, batch=32, rates=(1e-2,),
                           evaluation_tokens=16384),
    "parity_curriculum": Parity(curriculum=40, steps=10_000, batch=256, rates=(3e-4, 1e-3, 3e-3, 1e-2)),
    "s3": WordProblem(),
    "s3_small": WordProblem(length=12, lengths=(12, 24), width=64, steps=200, batch=64, rates=(5e-3,),
                            evaluation_tokens=16384),
    "s3_published": WordProblem(length=128, lengths=(128, 512), heads=8, mlp=4.0, steps=4900, batch=2048,
                                rates=(1e-3,), dtype="bfloat16"),
    "s4": WordProblem(group="S4"),
    "a5": WordProblem(group="A5"),
    "s5": WordProblem(group="S5"),
    "modular_arithmetic": ModularArithmetic(),
    "arithmetic_curriculum": ModularArithmetic(curriculum=39, length=159, lengths=(159, 255), steps=10_000,
                                               rates=(3e-4, 1e-3, 3e-3)),
    "bracket_arithmetic": BracketArithmetic(),
    "brackets_curriculum": BracketArithmetic(curriculum=39, length=159, lengths=(159, 255), steps=10_000),
    "palindrome": Palindrome(),
    "stacks": Stacks(),
    "needle1": Needle(haystack="repeated"),
    "needle1_long": Needle(haystack="repeated", lengths=(256, 4096, 2**16, 2**18), steps=5000,
                           evaluation_tokens=2**24),
    "needle2": Needle(),
    "needle2_long": Needle(lengths=(256, 4096, 2**16, 2**18), steps=5000, evaluation_tokens=2**24),
    "needle3": Needle(value_tokens=8),
    "recall": Recall(),
    "noisy_recall": Recall(noise=0.2, noise_tokens=16),
    "fuzzy_recall": FuzzyRecall(),
    "memorization": Memorization(),
    "compression": Compression(),
    "regression": Regression(),
    "digits": Digits(),
    "digits_dropped": Digits(dropped=0.3),
    "digits_scaled": Digits(factor=0.5),
    "digits_noisy": Digits(noise=4.0),
    "text": TextTask(),
}  # fmt: skip


def task(text: str) -> Task:
    """Return the task of a name, with the fields that are changed in parentheses.

    A `length` without `lengths` is also the length of the evaluation.

    Raises: ConfigError: an unknown task or field, or an invalid value.
    """
    try:
        term = parse(text)
    except PatternError as error:
        raise ConfigError(f"task {text!r} must be a name with fields in parentheses: {error}") from None
    if not isinstance(term, Name):
        raise ConfigError(f"task must be a name with fields in parentheses, got {text!r}")
    if term.name not in TASKS:
        raise ConfigError(unknown_name("task", term.name, TASKS))
    base = TASKS[term.name]
    changes: dict[str, Any] = dict(term.fields)
    if "length" in changes:
        changes = {"lengths": (changes["length"],), **changes}
    data = {**dict(base), **changes}
    try:
        return type(base).model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe_errors((term.name,), error, type(base))) from None
