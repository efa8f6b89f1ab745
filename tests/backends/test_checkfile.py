"""`deltazoo check`: read a check file, and compare backends on its cases."""

import pytest

from deltazoo import UpdateSpec, conformance
from deltazoo.backends.conformance import SHAPES, Case
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update.base import UpdateOutput
from deltazoo.backends.update.reference import ReferenceBackend


class Overflows(ReferenceBackend):
    """Returns a state that is not finite after a token with a log decay of -1000."""

    name = "overflows"

    def forward(self, spec, inputs):
        o, state = super().forward(spec, inputs)
        return UpdateOutput(o, state / (inputs.log_decay.amin() > -100))


CHECK = """
spec: {decay: head, beta: head}
shapes: [plain, {B: 2, T: 9, H: 2, HV: 4, K: 3, V: 5}, {H: 1, K: 4, lengths: [5, 0, 2]}]
dtypes: [float32, bfloat16]
regimes: [ordinary, decays]
"""


def test_check_file_compares_backends_on_its_shapes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(CHECK)
    check = conformance.read_check(path)
    assert [case.shape[1:] for case in check.cases()[::4]] == [
        (2, 7, 2, 2, 4, 4, ()),
        (2, 9, 2, 4, 3, 5, ()),
        (1, 7, 1, 1, 4, 4, (5, 0, 2)),
    ]
    reports = list(conformance.run_checks(check.cases(), ["reference", Overflows()]))
    assert len(reports) == 24
    assert not any(report.failures for report in reports if report.backend == "reference")
    assert {report.case.regime for report in reports if report.failures} == {"decays"}
    (tmp_path / "mine.json").write_text(check.model_dump_json())
    assert conformance.read_check(tmp_path / "mine.json").cases() == check.cases()


def test_exception_of_a_backend_is_a_failure_of_that_backend_only():
    class Raises(ReferenceBackend):
        def forward(self, spec, inputs):
            raise RuntimeError("wrong stride")

    case = Case(UpdateSpec(), SHAPES["plain"])
    first, second = conformance.run_checks([case], [Raises(), "reference"])
    assert first.failures == ["it raised RuntimeError: wrong stride"]
    assert not second.failures
    assert second.errors


WRONG_FILES = [
    (CHECK.replace("decay:", "decy:"), "spec.decy: unknown field 'decy'; did you mean 'decay'?"),
    (CHECK.replace("dtypes", "dtyps"), "dtyps: unknown field 'dtyps'; did you mean 'dtypes'?"),
    (CHECK.replace("plain", "plian"), "shapes.0: unknown shape 'plian'; did you mean 'plain'?"),
    (CHECK.replace("HV: 4", "VH: 4"), "shapes.1.VH: unknown field 'VH'; did you mean 'V'?"),
    (CHECK.replace("HV: 4", "HV: 3"), "shapes.1: HV must be a multiple of H, got HV=3, H=2"),
    (CHECK.replace("T: 9, ", ""), "a shape needs either T or the lengths of packed sequences, got T=None, lengths=()"),
    (CHECK.replace("K: 4, lengths", "K: 4, B: 2, lengths"), "packed sequences (lengths) need B = 1, got B=2"),
    (CHECK.replace("bfloat16", "bf16"), "dtypes.1 must be 'float64', 'float32', 'bfloat16' or 'float16'"),
    (CHECK.replace("head", "haed", 1), "spec.decay must be 'none', 'fixed', 'head', 'channel' or 'rate'"),
    ("spec: {transition: additive, reparam: efla}\nshapes: [plain]", "reparam='efla' needs the delta rule"),
    ("spec: {", "cannot be read"),
    ("[]", "is not a check file: it must have the keys spec and shapes, got []"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES, ids=[message for _, message in WRONG_FILES])
def test_invalid_check_file_raises_config_error(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        conformance.read_check(path)
    assert message in str(error.value)


def test_a_missing_check_file_is_named_once(tmp_path):
    path = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError) as error:
        conformance.read_check(path)
    assert str(error.value) == f"{path} cannot be read: No such file or directory"
