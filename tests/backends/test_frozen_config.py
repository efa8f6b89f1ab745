"""Invalid configs and specs built in Python raise ConfigError with one sentence per field."""

import pickle
import re

import pytest
from pydantic import ValidationError

from deltazoo import DeltazooError, Sampling, UpdateSpec
from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import OptimizerConfig, TrainConfig
from deltazoo.mixers import KDA, GatedDeltaNet, MoM, parse

CASES = {
    "unknown field of a mixer": (lambda: GatedDeltaNet(haeds=2), "GatedDeltaNet: haeds: unknown field; did you mean"),
    "unknown choice": (
        lambda: UpdateSpec(decay="heads"),
        "UpdateSpec: decay must be 'none', 'fixed', 'head', 'channel' or 'rate', got 'heads'; did you mean 'head'?",
    ),
    "unknown field of a spec": (lambda: UpdateSpec(decays="head"), "decays: unknown field; did you mean 'decay'?"),
    "a value in place of a field": (
        lambda: UpdateSpec(efla=True),
        "UpdateSpec: efla: unknown field; did you mean reparam='efla'?",
    ),
    "the initials of a field": (lambda: OptimizerConfig(lr=1), "lr: unknown field; did you mean 'learning_rate'?"),
    "an empty text": (
        lambda: Sampling(stop=""),
        "Sampling: stop must be texts, tokens or sequences of tokens, none of them empty, got ''",
    ),
    "combination": (
        lambda: UpdateSpec(transition="additive", reparam="efla"),
        "UpdateSpec: reparam='efla' needs the delta rule; transition='additive' has no erase term",
    ),
    "two fields": (lambda: GatedDeltaNet(heads=0, key_width="x"), "heads must be at least 1, got 0; key_width must"),
    "unknown field of an MLP": (lambda: Dense(widht=3), "Dense: widht: unknown field; did you mean 'width'?"),
    "unknown field of settings": (lambda: TrainConfig(step=3), "TrainConfig: step: unknown field; did you mean"),
    "unknown field of nested settings": (
        lambda: TrainConfig(batch={"row": 3}),
        "TrainConfig: batch.row: unknown field; did you mean 'rows'?",
    ),
    "true as an integer": (lambda: GatedDeltaNet(heads=True), "GatedDeltaNet: heads must be an integer, got True"),
    "true as a number": (lambda: Dense(ratio=True), "Dense: ratio must be a number, got True"),
    "true as a width": (lambda: StackSpec(width=True, depth=1, vocab=9, pattern="kda"), "width must be an integer"),
    "none as an integer": (lambda: KDA(heads="none"), "KDA: heads must be an integer or null (None in Python), got"),
    "None in a pattern": (
        lambda: StackSpec(width=64, depth=1, vocab=9, pattern="kda(heads=None)"),
        "kda.heads must be an integer or null (None in Python), got 'None'",
    ),
    "a sentence of a validator": (
        lambda: StackSpec(width=64, depth=1, vocab=9, pattern="mom(memory=kda)"),
        "mom.memory: a mixer must be a mapping such as {mixer: gated_deltanet, heads: 6}, got 'kda'\n    mom(memory",
    ),
    "a sentence of a nested config": (
        lambda: MoM(memory={"mixer": "mom", "active": 9}),
        "MoM: memory: mixer 'mom': active must be at most memories = 4, got 9",
    ),
    "true in a file": (lambda: parse({"mixer": "kda", "heads": True}), "'kda': heads must be an integer, got True"),
}


@pytest.mark.parametrize(("build", "message"), CASES.values(), ids=CASES)
def test_an_invalid_config_raises_a_deltazoo_error_with_the_reason(build, message):
    with pytest.raises(DeltazooError) as raised:
        build()
    assert message in str(raised.value)
    assert not re.search(r"(, got [^;\n]*), got", str(raised.value))
    assert isinstance(raised.value, ValueError)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), str(copy)) == (type(raised.value), str(raised.value))


def test_the_error_of_pydantic_is_the_cause():
    with pytest.raises(ConfigError) as raised:
        UpdateSpec(decay="heads")
    assert isinstance(raised.value.__cause__, ValidationError)
    assert raised.value.__cause__.errors()[0]["loc"] == ("decay",)


def test_boolean_fields_still_take_booleans():
    assert GatedDeltaNet(gate=False).gate is False


def test_long_values_are_cut():
    with pytest.raises(ConfigError) as raised:
        UpdateSpec(decay="head" * 10_000)
    assert len(str(raised.value)) < 500
    assert len(cut([[[["x" * 1000] * 1000] * 1000] * 1000] * 1000)) < 220
    assert cut(10**6000) == "an integer of 19932 bits"
