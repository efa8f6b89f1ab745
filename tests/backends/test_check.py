"""Checks of operands: every error names the argument, the rule and the value."""

import math
import re

import pytest
import torch

from deltazoo import bind, update, validate
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.io.errors import DeviceError, DtypeError, InputError, OperandError, ShapeError, ValueRangeError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update import check as checks
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.check import check
from deltazoo.backends.update.spec import UpdateSpec

GDN = UpdateSpec(decay="head", beta="head")
SHAPE = Shape("small", B=2, T=3, H=2, HV=4, K=5, V=6)
PACK = SHAPE._replace(B=1, T=6, lengths=(2, 0, 4))


def make_inputs(shape=SHAPE, dtype=torch.float32, seed=0, **fields) -> tuple[UpdateSpec, UpdateInputs]:
    spec = UpdateSpec(**fields) if fields else GDN
    return spec, draw(Case(spec, shape, dtype, seed=seed))


def boundaries(*values: int, dtype=torch.int32) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": torch.tensor(values, dtype=dtype), "state": None}


F64, F16, META = torch.float64, torch.float16, torch.device("meta")
WRONG = [
    # replaced operands of a gated delta rule with q [2, 3, 2, 5] and v [2, 3, 4, 6], the exception, its message
    ({"beta": None}, OperandError, "beta is missing: this spec needs it with shape [2, 3, 4]"),
    ({"log_decay": None}, OperandError, "log_decay is missing"),
    ({"k": None}, OperandError, "k must be a tensor, got NoneType"),
    (
        {"erase": torch.ones(2, 3, 4, 5)},
        OperandError,
        "erase must be None: the operands of this spec are q, k, v, log_decay, beta",
    ),
    ({"a": torch.ones(2, 3, 4, 5)}, OperandError, "a must be None"),
    ({"state": [1.0]}, OperandError, "state must be a tensor or None, got list"),
    ({"beta": 0.5}, OperandError, "beta must be a tensor or None, got float"),
    ({"q": torch.ones(2, 3, 5)}, ShapeError, "q must have shape [B, T, H, K], got [2, 3, 5]"),
    ({"v": torch.ones(2, 3, 4)}, ShapeError, "v must have shape [B, T, HV, V] for householders=1, got [2, 3, 4]"),
    ({"k": torch.ones(2, 3, 2, 4)}, ShapeError, "k must have shape [2, 3, 2, 5], got [2, 3, 2, 4]"),
    ({"k": torch.ones(2, 4, 2, 5)}, ShapeError, "k must have shape [2, 3, 2, 5], got [2, 4, 2, 5]"),
    ({"v": torch.ones(2, 4, 4, 6)}, ShapeError, "v must have shape [2, 3, 4, 6], got [2, 4, 4, 6]"),
    ({"v": torch.ones(2, 3, 3, 6)}, ShapeError, "must be a multiple of the heads of q, got HV=3, H=2"),
    ({"v": torch.ones(2, 3, 0, 6)}, ShapeError, "must be at least 1, got H=2, K=5, HV=0, V=6"),
    ({"q": torch.ones(2, 3, 2, 0)}, ShapeError, "must be at least 1, got H=2, K=0, HV=4, V=6"),
    ({"beta": torch.ones(2, 3, 2)}, ShapeError, "beta must have shape [2, 3, 4] for beta='head', got [2, 3, 2]"),
    (
        {"log_decay": torch.zeros(2, 3, 4, 5)},
        ShapeError,
        "log_decay must have shape [2, 3, 4] for decay='head', got [2, 3, 4, 5]",
    ),
    ({"state": torch.ones(2, 4, 6, 5)}, ShapeError, "state must have shape [2, 4, 5, 6], got [2, 4, 6, 5]"),
    ({"state": torch.ones(3, 4, 5, 6)}, ShapeError, "state must have shape [2, 4, 5, 6], got [3, 4, 5, 6]"),
    (boundaries(0, 3), ShapeError, "packed sequences (cu_seqlens) need B = 1, got B = 2"),
    ({"q": torch.ones(2, 3, 2, 5, dtype=torch.int64)}, DtypeError, "q must be float64, float32, bfloat16 or float16"),
    ({"k": torch.ones(2, 3, 2, 5, dtype=F16)}, DtypeError, "k must be torch.float32 like q, got torch.float16"),
    (
        {"log_decay": torch.zeros(2, 3, 4, dtype=F16)},
        DtypeError,
        "log_decay must be torch.float32 with q in torch.float32, got torch.float16",
    ),
    ({"state": torch.ones(2, 4, 5, 6, dtype=F64)}, DtypeError, "state must be torch.float32 with q in torch.float32"),
    ({"beta": torch.ones(2, 3, 4, dtype=F64)}, DtypeError, "beta must be torch.float32 with q in"),
    ({"v": torch.ones(2, 3, 4, 6, device=META)}, DeviceError, "v must be on cpu, where q is, got meta"),
    ({"log_decay": torch.full((2, 3, 4), 0.25)}, ValueRangeError, "log_decay must be <= 0, got 0.25"),
    ({"log_decay": torch.full((2, 3, 4), -math.inf)}, ValueRangeError, "log_decay must be finite, got -inf"),
    (
        {"log_decay": torch.tensor([math.nan, 5.0, -1.0]).expand(2, 4, 3).transpose(1, 2)},
        ValueRangeError,
        "log_decay must be <= 0, got 5",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_wrong_operand_is_refused(change, error, message):
    spec, inputs = make_inputs()
    with pytest.raises(error, match=re.escape(message)):
        update(spec, inputs._replace(**change), backend="reference")


PACKS = [
    (boundaries(0, 2, 6, dtype=torch.int64), DtypeError, "cu_seqlens must be int32, got torch.int64"),
    (boundaries(0, 4, 2, 6), ValueRangeError, "cu_seqlens must rise from 0 to T = 6, got [0, 4, 2, 6]"),
    (boundaries(1, 4, 6), ValueRangeError, "cu_seqlens must rise from 0 to T = 6, got [1, 4, 6]"),
    (boundaries(0, 4, 5), ValueRangeError, "cu_seqlens must rise from 0 to T = 6, got [0, 4, 5]"),
    (boundaries(0, 4, 7), ValueRangeError, "cu_seqlens must rise from 0 to T = 6, got [0, 4, 7]"),
    (boundaries(0, *[1] * 10, 7), ValueRangeError, "got [0, 1, 1, 1, '...', 1, 1, 7]"),
    ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, ShapeError, "must have shape [N + 1], got [2, 2]"),
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ShapeError, "must have shape [N + 1], got [0]"),
    ({"state": torch.ones(1, 4, 5, 6)}, ShapeError, "state must have shape [3, 4, 5, 6], got [1, 4, 5, 6]"),
]


@pytest.mark.parametrize(("change", "error", "message"), PACKS, ids=[message for _, _, message in PACKS])
def test_wrong_packing_is_refused(change, error, message):
    spec, inputs = make_inputs(PACK)
    with pytest.raises(error, match=re.escape(message)):
        update(spec, inputs._replace(**change), backend="reference")


FIELDS = [
    ({"decay": "fixed"}, {"log_decay": torch.zeros(2)}, "must have shape [4] or [4, 5] for decay='fixed', got [2]"),
    ({"decay": "rate"}, {"step": torch.full((2, 3, 4), -0.5)}, "step must be >= 0, got -0.5"),
    ({"decay": "rate"}, {"rate": torch.full((4, 5), 2.0)}, "rate must be <= 0, got 2"),
    ({"decay": "rate"}, {"rate": torch.zeros(4)}, "rate must have shape [4, 5] for decay='rate', got [4]"),
    (
        {"beta": "channel"},
        {"write": torch.ones(2, 3, 4, 5)},
        "write must have shape [2, 3, 4, 6] for beta='channel', got [2, 3, 4, 5]",
    ),
    (
        {"beta": "separate"},
        {"erase": torch.ones(2, 3, 4, 5)},
        "erase must have shape [2, 3, 4] for beta='separate', got [2, 3, 4, 5]",
    ),
    (
        {"beta": "separate"},
        {"beta": torch.ones(2, 3, 4)},
        "beta must be None: the operands of this spec are q, k, v, erase, write",
    ),
    (
        {"erase_key": "own"},
        {"erase_key": torch.ones(2, 3, 4, 5)},
        "erase_key must have shape [2, 3, 2, 5] for erase_key='own', got [2, 3, 4, 5]",
    ),
    (
        {"transition": "dplr"},
        {"a": torch.ones(2, 3, 2, 5)},
        "a must have shape [2, 3, 4, 5] for transition='dplr', got [2, 3, 2, 5]",
    ),
    (
        {"householders": 2},
        {"k": torch.ones(2, 3, 2, 5)},
        "k must have shape [2, 3, 2, 2, 5] for householders=2, got [2, 3, 2, 5]",
    ),
    (
        {"householders": 2},
        {"v": torch.ones(2, 3, 4, 6)},
        "v must have shape [B, T, n, HV, V] for householders=2, got [2, 3, 4, 6]",
    ),
    (
        {"householders": 3, "beta": "head"},
        {"beta": torch.ones(2, 3, 4)},
        "beta must have shape [2, 3, 3, 4] for beta='head', householders=3, got [2, 3, 4]",
    ),
]


@pytest.mark.parametrize(("fields", "change", "message"), FIELDS, ids=[message for _, _, message in FIELDS])
def test_shape_error_names_the_field_of_the_spec(fields, change, message):
    spec, inputs = make_inputs(**fields)
    with pytest.raises(InputError, match=re.escape(message)):
        update(spec, inputs._replace(**change), backend="reference")


def test_fixed_decay_may_have_a_channel_axis():
    spec, by_head = make_inputs(decay="fixed")
    by_channel = by_head._replace(log_decay=by_head.log_decay[:, None].expand(4, 5))
    heads, channels = (update(spec, x, backend="reference") for x in (by_head, by_channel))
    assert torch.equal(heads.o, channels.o)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_beta_may_be_float32_with_half_precision_inputs(dtype):
    spec, inputs = make_inputs(dtype=dtype)
    wide = inputs._replace(beta=inputs.beta.float())
    assert torch.equal(*(update(spec, x, backend="reference").state for x in (inputs, wide)))


def test_beta_in_a_third_dtype_is_refused():
    spec, inputs = make_inputs(dtype=torch.bfloat16)
    with pytest.raises(DtypeError, match=r"beta must be torch\.bfloat16 or torch\.float32 with q"):
        update(spec, inputs._replace(beta=inputs.beta.half()), backend="reference")


def test_operand_that_would_broadcast_is_refused():
    spec, inputs = make_inputs()
    with pytest.raises(ShapeError):
        bind(spec, "reference")(inputs._replace(beta=inputs.beta[:, :, :1]))


VALUES = [
    ({"q": float("nan")}, "q must be finite, got 1 values that are not."),
    ({"state": float("inf")}, "state must be finite, got 1 values that are not."),
    ({"beta": 1.5}, "beta must be in [0, 1] (the lowering doubles it for negative eigenvalues), got values from"),
    ({"beta": -0.5}, "beta must be in [0, 1]"),
    ({"log_decay": 1.0}, "log_decay must be <= 0, got 1."),
]


@pytest.mark.parametrize(("change", "message"), VALUES, ids=[message for _, message in VALUES])
def test_validate_reports_wrong_values(change, message):
    spec, inputs = make_inputs()
    validate(spec, inputs)
    ((name, value),) = change.items()
    getattr(inputs, name).view(-1)[7] = value
    with pytest.raises(ValueRangeError, match=re.escape(message)):
        validate(spec, inputs)


def test_validate_reports_all_violations_at_once():
    spec, inputs = make_inputs()
    inputs.v[0, 0, 0, 0], inputs.beta[0, 0, 0] = float("nan"), 7.0
    with pytest.raises(ValueRangeError, match=r"v must be finite.*beta must be in \[0, 1\].*to 7"):
        validate(spec, inputs)


def test_beta_of_efla_may_be_any_nonnegative_number():
    spec, inputs = make_inputs(beta="head", reparam="efla")
    validate(spec, inputs._replace(beta=100 * inputs.beta))
    with pytest.raises(ValueRangeError, match="beta must be >= 0, got values from -"):
        validate(spec, inputs._replace(beta=-inputs.beta))


def test_separate_erase_must_be_in_the_interval_of_the_spectrum_and_the_write_is_free():
    spec, inputs = make_inputs(beta="separate")
    validate(spec, inputs._replace(write=3 * inputs.write))
    with pytest.raises(ValueRangeError, match=r"erase must be in \[0, 1\] .* got values from .* to 3"):
        validate(spec, inputs._replace(erase=3 * torch.ones_like(inputs.erase)))


STEPS = [
    ({"T": 2}, {}, {}, ShapeError, "step_ decodes one token per row: q must have T = 1, got T = 2"),
    ({}, {"state": torch.zeros(2, 4, 5, 6)}, {}, OperandError, "step_ reads `states`; inputs.state must be None"),
    ({}, {}, {"states": torch.zeros(2, 4, 6, 5)}, ShapeError, "states must have shape [2, 4, 5, 6]"),
    ({}, {}, {"states": torch.zeros(9, 4, 5, 6)}, ShapeError, "states must have shape [2, 4, 5, 6]"),
    ({}, {}, {"states": torch.zeros(2, 4, 5, 6, dtype=F64)}, DtypeError, "states must be torch.float32"),
    ({}, {}, {"states": torch.zeros(2, 4, 5, 6, device=META)}, DeviceError, "states must be on cpu"),
    ({}, {}, {"slots": torch.zeros(3, dtype=torch.int64)}, ShapeError, "slots must have shape [2], got [3]"),
    ({}, {}, {"slots": torch.zeros(2, dtype=torch.int32)}, DtypeError, "slots must be int64, got torch.int32"),
    ({}, {}, {"slots": [0, 1]}, OperandError, "slots must be a tensor, got list"),
    ({}, {}, {"slots": torch.tensor([1, 1])}, ValueRangeError, "slots must be -1 or distinct rows of the 2 states"),
    ({}, {}, {"slots": torch.tensor([0, 2])}, ValueRangeError, "slots must be -1 or distinct rows of the 2 states"),
    ({}, {}, {"slots": torch.tensor([0, -2])}, ValueRangeError, "got [0, -2]"),
]


@pytest.mark.parametrize(("sizes", "change", "call", "error", "message"), STEPS, ids=[step[-1] for step in STEPS])
def test_wrong_argument_of_step_is_refused(sizes, change, call, error, message):
    spec, inputs = make_inputs(SHAPE._replace(**{"T": 1} | sizes))
    arguments = {"states": torch.zeros(2, 4, 5, 6), "slots": None} | call
    with pytest.raises(error, match=re.escape(message)):
        bind(spec, "reference").step_(inputs._replace(**{"state": None} | change), **arguments)


def test_step_refuses_packed_sequences():
    spec, inputs = make_inputs(PACK._replace(T=1, lengths=(1,)))
    with pytest.raises(OperandError, match="step_ does not take cu_seqlens: pass each sequence as a row"):
        bind(spec, "reference").step_(inputs._replace(state=None), torch.zeros(1, 4, 5, 6))


def test_a_layout_that_passed_does_not_admit_other_types_or_values():
    spec, inputs = make_inputs()
    for _ in range(2):
        check(spec, inputs)
    with pytest.raises(OperandError, match=r"must be deltazoo\.UpdateInputs, got tuple"):
        check(spec, tuple(inputs))
    with pytest.raises(ValueRangeError, match="log_decay must be <= 0"):
        check(spec, inputs._replace(log_decay=-inputs.log_decay))
    with pytest.raises(OperandError, match="beta must be None"):
        check(UpdateSpec(decay="head", beta="none"), inputs)


def test_the_number_of_known_layouts_is_limited(monkeypatch):
    monkeypatch.setattr(checks, "_MAX_CHECKED", 2)
    monkeypatch.setattr(checks, "_checked", known := set())
    for T in range(1, 6):
        check(*make_inputs(SHAPE._replace(T=T)))
        assert 1 <= len(known) <= 2
