"""The benchmark: figures, ratios, errors, refusals and the printed table."""

import json
import time

import pytest
import torch

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import ConfigError, UnknownNameError
from deltazoo.backends.measure.benchmark import BenchConfig, Benchmark, bench
from deltazoo.backends.measure.compare import Earlier, read_earlier
from deltazoo.backends.measure.shapes import TINY, Shape
from deltazoo.backends.measure.table import spread
from deltazoo.backends.measure.timing import MAX_LEAD, time_interleaved
from deltazoo.backends.update.base import Backend, UpdateOutput
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.spec import UpdateSpec

GATED = UpdateSpec(decay="head", beta="head")
PLAIN = TINY[0]
QUICK = BenchConfig(rounds=3, seconds=0.1)


class Slow(Backend):
    """The reference with a delay of 0.1 s and a relative error of 1e-3; refuses packed sequences."""

    name = "slow"

    def __init__(self):
        self.calls = 0

    def unsupported(self, spec, meta):
        return ["slow takes no packed sequences."] if meta.packed else []

    def forward(self, spec, inputs):
        self.calls += 1
        time.sleep(0.1)
        out = ReferenceBackend().forward(spec, inputs)
        return UpdateOutput(out.o * 1.001, out.state * 1.001)


class Broken(Backend):
    name = "broken"

    def unsupported(self, spec, meta):
        return []

    def forward(self, spec, inputs):
        raise RuntimeError("no such kernel\nmore details")


class Nan(ReferenceBackend):
    name = "nan"

    def forward(self, spec, inputs):
        return UpdateOutput(*(x * float("nan") for x in super().forward(spec, inputs)))


def test_percentiles_are_printed_by_their_distance_from_the_median():
    assert spread(0.0979, 0.1, 0.3) == "-2 +200"
    assert spread(5.0, 5.0, 5.0) == "+0 +0"


def test_ratio_is_the_median_of_the_baseline_over_that_of_the_row():
    slow = Slow()
    result = bench(GATED, [PLAIN], ["reference", slow], QUICK)
    assert len(result.rows) == 6
    for ours, theirs in zip(result.rows[::2], result.rows[1::2], strict=True):
        assert (ours.backend, theirs.backend) == ("reference", "slow")
        assert ours.ratio == 1.0
        assert theirs.ratio == pytest.approx(ours.median_ms / theirs.median_ms)
        assert theirs.low_ms <= theirs.median_ms <= theirs.high_ms
        assert 50 <= theirs.median_ms < 500
        assert theirs.rounds == 3
        assert theirs.host_ms is None
    # per direction: the first call, one untimed call, three timed calls
    assert slow.calls == 15


def test_ratio_of_the_configured_baseline_is_1():
    result = bench(GATED, [PLAIN], ["reference", Slow()], QUICK.model_copy(update={"baseline": "slow"}))
    assert [row.ratio for row in result.rows[1::2]] == [1.0, 1.0, 1.0]
    assert all(row.ratio > 2 for row in result.rows[:4:2])


def test_error_is_relative_to_the_float64_reference():
    result = bench(GATED, [PLAIN], ["reference", Slow()], QUICK)
    for ours, theirs in zip(result.rows[::2], result.rows[1::2], strict=True):
        assert 1e-9 < ours.error < 1e-6
        assert theirs.error == pytest.approx(1e-3, rel=1e-2)
    coarse = bench(GATED, [PLAIN], ["reference"], QUICK.model_copy(update={"dtype": "bfloat16"}))
    assert all(1e-4 < row.error < 1e-2 for row in coarse.rows[:2])


@pytest.mark.parametrize(
    "spec",
    [
        UpdateSpec(decay="fixed", beta="channel", householders=2),
        UpdateSpec(decay="rate", transition="additive"),
        UpdateSpec(decay="channel", transition="dplr"),
        UpdateSpec(decay="channel", beta="head", erase_key="own"),
        UpdateSpec(decay="head", beta="separate"),
    ],
    ids=lambda spec: f"{spec.decay}-{spec.transition}-{spec.beta}",
)
@pytest.mark.parametrize("shape", [TINY[1], TINY[-1]], ids=lambda shape: shape.name)
def test_error_of_the_float64_reference_is_0(spec, shape):
    config = QUICK.model_copy(update={"dtype": "float64"})
    result = bench(spec, [shape], ["reference"], config)
    assert all(row.error < 1e-13 for row in result.rows)


def test_nan_error_is_shown():
    result = bench(GATED, [PLAIN], [Nan()], QUICK)
    assert all(row.error != row.error for row in result.rows)
    assert json.loads(result.model_dump_json())["rows"][0]["error"] == "NaN"
    assert "| nan |" in result.markdown()


def test_refusals_and_failures_are_rows_with_reasons():
    result = bench(
        GATED, [TINY[-1]], ["reference", Slow(), Broken()], QUICK.model_copy(update={"directions": ("forward",)})
    )
    ours, slow, broken = result.rows
    assert ours.ratio == 1.0
    assert slow.refused == ["slow takes no packed sequences."]
    assert broken.refused == ["failed with RuntimeError: no such kernel"]
    assert slow.median_ms is None
    table, notes = result.markdown().split("\n\n")[1:]
    assert "slow" not in table
    assert notes == "- slow: slow takes no packed sequences.\n- broken: failed with RuntimeError: no such kernel\n"


def test_table_has_the_environment_the_shapes_and_the_figures():
    result = bench(GATED, [PLAIN], ["reference"], QUICK)
    lines = result.markdown().splitlines()
    assert result.environment.date in lines[0]
    assert f"torch {torch.__version__}" in lines[0]
    assert "plain: B=2 T=7 H=2 HV=2 K=4 V=4" in lines[0]
    row = result.rows[1]
    assert f"| fwd + bwd | reference | {row.median_ms:.3g} |" in lines[5]
    assert lines[2] == "| direction | backend | ms | 20-80 % | ratio | error | first s |"  # no MiB on a CPU


def test_benchmark_round_trips_through_json():
    result = bench(GATED, [TINY[-1]], ["reference"], QUICK)
    assert Benchmark.model_validate_json(result.model_dump_json()) == result


def test_progress_counts_cases_and_names_the_round():
    reports = []
    bench(GATED, [PLAIN], ["reference"], QUICK, lambda *report: reports.append(report))
    assert ("bench", 1, 3, "plain, fwd + bwd: first call of reference") in reports
    assert ("bench", 1, 3, "plain, fwd + bwd: round 3 of 3") in reports
    assert reports[-1][:3] == ("bench", 3, 3)


def test_every_case_is_reported_with_the_number_of_those_that_are_missing():
    parts = []
    result = bench({"a": GATED, "b": GATED}, [PLAIN], ["reference"], QUICK, report=parts.append)
    assert [(len(part.rows), part.missing) for part in parts] == [(0, 3), (1, 2), (2, 1), (3, 0)]
    assert parts[-1] == result
    assert result.same == {"a": ["b"]}


def test_two_backends_with_the_same_name_are_refused():
    twice = [CompileBackend(16, compiled=False), CompileBackend(64, compiled=False)]
    with pytest.raises(ConfigError, match="backends must have different names, got compile, compile"):
        bench(GATED, [PLAIN], twice, QUICK)


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match=r"baseline must be one of the backends reference, got 'fla'"):
        bench(GATED, [PLAIN], ["reference"], BenchConfig(baseline="fla"))
    with pytest.raises(ConfigError, match=r"device must be available to torch \(cpu.*\), got 'xpu:7'"):
        bench(GATED, [PLAIN], ["reference"], BenchConfig(device="xpu:7"))
    with pytest.raises(ConfigError, match="graphs needs a CUDA device, got 'cpu'"):
        bench(GATED, [PLAIN], ["reference"], BenchConfig(graphs=True))
    with pytest.raises(ConfigError, match="bench needs a shape and a backend, got 0 shapes and 1 backends"):
        bench(GATED, [], ["reference"])
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        bench(GATED, [PLAIN], ["referense"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_time_excludes_host_time_up_to_the_lead():
    x = torch.zeros(1000, device="cuda")

    def slow_to_issue(seconds):
        def call():
            time.sleep(seconds)
            x.add_(1)

        return call

    calls = {"fast": x.neg_, "slow": slow_to_issue(0.004), "very slow": slow_to_issue(0.03)}
    times = time_interleaved(calls, torch.device("cuda"), 15, 5.0, lambda done, total, note: None)
    device, host = ({name: min(columns[i]) for name, columns in times.items()} for i in range(2))
    assert device["fast"] < 1e-4
    assert device["slow"] < 1e-3 < 4e-3 <= host["slow"]
    # max: work of other processes on the device lengthens the lead
    assert max(times["very slow"][0]) > 0.03 - 2 * MAX_LEAD


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("graphs", [False, True])
def test_device_that_is_not_current_is_timed_correctly(graphs):
    shape = Shape("long", B=4, T=2048, H=8, HV=8, K=128, V=128)
    first, second = (
        bench(UpdateSpec(decay="head", beta="head"), [shape], ["triton"], config).rows[0].median_ms
        for config in (
            BenchConfig(directions=("forward",), device=device, dtype="bfloat16", graphs=graphs, errors=False)
            for device in ("cuda:0", "cuda:1")
        )
    )
    assert 0.5 < first / second < 2


def test_comparison_names_what_became_worse(tmp_path):
    path = tmp_path / "old.json"
    with torch.compiler.set_stance("force_eager"):
        before = bench(GATED, [PLAIN], ["reference", "compile"], QUICK.model_copy(update={"directions": ("forward",)}))
    path.write_text(before.model_dump_json())
    reference, other = before.rows
    time = {"median_ms": 10.0, "low_ms": 9.0, "high_ms": 11.0}
    old = before.model_copy(update={"rows": [reference.model_copy(update=time | {"peak_mib": 100.0, "error": 1e-7})]})

    def regressions(**figures):
        now = before.model_copy(update={"rows": [reference.model_copy(update=time | figures), other]})
        (change,) = Earlier(path, old).compare(now).changes
        return change.regressions

    assert regressions(peak_mib=100.0, error=1.9e-7) == []
    assert regressions(median_ms=10.4, low_ms=11.1, high_ms=12.0) == []
    assert regressions(median_ms=12.0, low_ms=10.9, high_ms=13.0) == []  # the ranges overlap
    assert regressions(median_ms=12.0, low_ms=11.1, high_ms=13.0) == []  # the ranges are 2 and 1.9 ms wide
    assert regressions(median_ms=12.0, low_ms=11.9, high_ms=12.1) == []
    assert regressions(median_ms=12.3, low_ms=12.2, high_ms=12.4) == ["10 ms became 12.3 ms"]
    assert regressions(peak_mib=106.0) == ["100 MiB became 106 MiB"]
    assert regressions(error=2.1e-7) == ["the error 1.0e-07 became 2.1e-07"]
    assert regressions(error=float("nan")) == ["the error 1.0e-07 became nan"]
    assert regressions(median_ms=None, refused=["no."]) == ["it ran before; now: no."]
    assert read_earlier(path).compare(before).line() == "0 regressions in 2 cases"
    assert Earlier(path, before).compare(old).unmatched == 1
    with pytest.raises(ConfigError, match="has no case with the update, sizes, direction and backend of one"):
        read_earlier(path).compare(bench(GATED, [TINY[3]], ["reference"], QUICK))
    with pytest.raises(ConfigError, match=r"measured with device .*, which does not compare with H100"):
        read_earlier(path).check(before.config, before.environment.model_copy(update={"device": "H100"}))


def test_a_pack_has_a_row_of_its_own_beside_rows_of_equal_sizes():
    shapes = [Shape("rows", 1, 8, 1, 1, 4, 4), Shape("pack", 1, 8, 1, 1, 4, 4, lengths=(3, 5))]
    config = QUICK.model_copy(update={"directions": ("forward",)})
    assert len(bench(GATED, shapes, ["reference"], config).matrix().rows) == 2
    with pytest.raises(ValueError, match="directions"):
        BenchConfig(directions=())
