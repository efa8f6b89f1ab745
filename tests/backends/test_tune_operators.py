"""Warps and stages of kernels beside the update: classes of launches, candidates, records and their use."""

import pytest
import torch
from tune_cases import FORWARD, T900

from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.runtime import options as lookups
from deltazoo.backends.triton.runtime.options import options_of
from deltazoo.backends.triton.runtime.records import OperatorKey
from deltazoo.backends.triton.runtime.table import clear_caches, read_table, use_table, without_tables
from deltazoo.backends.triton.support import Options
from deltazoo.backends.tuning.operators import (
    OperatorCall,
    OperatorRunner,
    Tunable,
    candidates,
    difference,
    tune_operators,
)
from deltazoo.blocks.inspect.step_tuning import StepGain, plan_model_operators, step_gains
from deltazoo.blocks.spec.stack_spec import StackSpec

KEY = OperatorKey(kernel="rms_norm_kernel", dtypes="bfloat16", traits="D=64 TILE=16")
OWN, FAST, WRONG = Options(4, 2), Options(8, 2), Options(2, 2)
TUNABLE = Tunable(KEY, OWN, OperatorCall("triton_rms_norm", lambda: None, ()))


class FakeRunner(OperatorRunner):
    """A device on which 8 warps are faster, and 2 warps change the results."""

    device = T900

    def __init__(self):
        self.timed = []

    def check(self, tunable, options):
        return "result 0 differs by 1.0e+00 (relative RMS)" if options == WRONG else ""

    def time(self, tunable, options, rounds):
        self.timed += options
        return [1e-3 if x == FAST else 2e-3 for x in options]


@pytest.fixture(autouse=True)
def no_tables(monkeypatch, tmp_path):
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path)
    clear_caches()
    yield
    use_table(None)


class Kernel:
    """Replaces a compiled norm kernel in these tests."""

    __name__ = "rms_norm_kernel"

    class fn:  # noqa: N801
        __module__ = "deltazoo.backends.triton.norm.kernels"


def launched(monkeypatch):
    """The options of a launch of `KEY` on the device of the runner."""
    monkeypatch.setattr(DeviceSpec, "current", staticmethod(lambda index=None: T900))
    monkeypatch.setattr(lookups, "_key", lambda *_: KEY)
    return options_of(Kernel, ("D=64", "TILE=16"), (torch.bfloat16, True), OWN, 0)


def test_the_fastest_correct_options_are_stored_and_used(tmp_path, monkeypatch):
    runner, path = FakeRunner(), tmp_path / "t.json"
    result = tune_operators([TUNABLE], runner, FORWARD, path)
    (record,) = result.records
    assert (record.warps, record.stages, record.gain) == (8, 2, pytest.approx(2.0))
    assert WRONG not in runner.timed
    assert result.rejected == ["rms_norm_kernel warps=2 stages=2: result 0 differs by 1.0e+00 (relative RMS)"]
    assert read_table(path).operators == (record,)
    assert launched(monkeypatch) == OWN
    use_table(path)
    assert launched(monkeypatch) == FAST
    with without_tables():
        assert launched(monkeypatch) == OWN
    again = tune_operators([TUNABLE], runner, FORWARD, path)
    assert (again.records, again.kept) == ([], 1)


def test_a_record_of_another_revision_is_not_used(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    tune_operators([TUNABLE], FakeRunner(), FORWARD, path)
    monkeypatch.setattr("deltazoo.backends.triton.runtime.table.revision_of", lambda kernel: 2)
    use_table(path)
    assert launched(monkeypatch) == OWN


def test_candidates_are_neighbours_or_all_combinations():
    assert candidates(OWN) == [OWN, WRONG, FAST, Options(4, 1), Options(4, 3)]
    assert len(candidates(OWN, "full")) == 25
    assert candidates(Options(16, 1, 128))[0] == Options(16, 1, 128)


def test_difference_sees_a_wrong_number_and_a_new_nan():
    x = torch.randn(64)
    assert difference([x * (1 + 1e-6)], [x]) == ""
    assert "differs by" in difference([x + 0.1], [x])
    assert "finite elsewhere" in difference([x.masked_fill(x > 1, torch.nan)], [x])
    assert difference([torch.zeros(3)], [torch.zeros(3)]) == ""


def test_every_kernel_of_a_model_is_planned_without_a_gpu():
    spec = StackSpec(width=64, depth=2, vocab=300, pattern="fox")
    planned = plan_model_operators(spec, (2, 128), torch.bfloat16, DeviceSpec.named("NVIDIA H200"), FORWARD)
    kernels = {step.kernel for step in planned}
    assert {
        "rms_norm_kernel", "rms_norm_backward_kernel", "glu_kernel", "glu_backward_kernel", "cross_entropy_kernel",
        "forgetting_attention_kernel", "query_gradients_kernel", "key_gradients_kernel", "decode_attention_kernel",
    } <= kernels  # fmt: skip
    assert all(step.candidates[0].startswith("warps=") for step in planned)


def test_step_gains_compare_a_model_without_and_with_tables(monkeypatch):
    from deltazoo.backends.triton.runtime import table

    spec = StackSpec(width=16, depth=1, vocab=20, pattern="mamba2")
    monkeypatch.setattr(
        "deltazoo.blocks.inspect.step_tuning.OurCalls", lambda *_: type("Calls", (), {
            "training_step": lambda self: "training", "decoding": lambda self, rounds: "decoding",
        })(),
    )  # fmt: skip
    seconds = lambda call: 0.032 * (2 if table._ignored else 1)  # noqa: E731
    training, decoding = step_gains(spec, (1, 4), torch.float32, "cpu", seconds)
    assert training == StepGain(step="training", heuristic_ms=64.0, tuned_ms=32.0)
    assert decoding.cells() == ["decoding", "4.000", "2.000", "2.000"]
