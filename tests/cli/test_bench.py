"""bench, check and demo: figures of real runs, on stdout, in files, and as exit codes."""

import json
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch

from deltazoo.backends import registry
from deltazoo.backends.base import Backend, UpdateOutput
from deltazoo.backends.reference import ReferenceBackend

SMALL = ("--shape", "plain", "--rounds", 3, "--seconds", 0.1, "--backends", "reference")
SLIGHTLY_WRONG = f"{__name__}:SlightlyWrong"


class SlightlyWrong(Backend):
    """The reference, a hundredth too large; no bfloat16."""

    name = "slightly_wrong"

    def unsupported(self, spec, meta):
        return ["slightly_wrong takes no bfloat16."] if meta.dtype == torch.bfloat16 else []

    def forward(self, spec, inputs):
        out = ReferenceBackend().forward(spec, inputs)
        return UpdateOutput(out.o * 1.01, out.state)


@pytest.fixture
def wrong(monkeypatch):
    """A name under which the CLI finds `SlightlyWrong`."""
    from importlib.metadata import EntryPoint

    found = registry._entry_points
    monkeypatch.setattr("deltazoo.backends.registry._loaded", SimpleNamespace(slightly_wrong=SlightlyWrong()))
    more = (EntryPoint("slightly_wrong", "nowhere:Nothing", registry.BACKENDS),)
    monkeypatch.setattr(
        registry, "_entry_points", lambda group: (*found(group), *(more if group == registry.BACKENDS else ()))
    )
    return "slightly_wrong"


def test_bench_has_a_row_for_each_backend_and_direction(ok, wrong):
    found = ok("bench", *SMALL[:-1], f"reference,{wrong}", "--baseline", wrong, "--json").json
    rows = {(row["direction"], row["backend"]): row for row in found["rows"]}
    assert len(rows) == 6
    for direction in ("forward", "backward", "decode"):
        ours, theirs = rows[direction, "reference"], rows[direction, wrong]
        assert ours["ratio"] == pytest.approx(theirs["median_ms"] / ours["median_ms"])
        assert theirs["ratio"] == 1
        assert ours["error"] < 1e-6
        assert ours["low_ms"] <= ours["median_ms"] <= ours["high_ms"]
    assert rows["forward", wrong]["error"] == pytest.approx(0.01, rel=1e-2)
    assert found["environment"]["torch"] == torch.__version__
    assert found["baseline"] == wrong


def test_bench_takes_sizes_a_mixer_and_a_dtype(ok):
    options = ("--shape", "B=2 T=5 H=1 HV=2 K=4", "--mixer", "kda", "--dtype", "bfloat16", "--directions", "forward")
    found = ok("bench", *options, *SMALL[2:], "--json").json
    assert list(found["shapes"][0].values())[1:7] == [2, 5, 1, 2, 4, 4]
    assert found["spec"]["decay"] == "channel"
    assert 1e-4 < found["rows"][0]["error"] < 1e-2
    without = ok("bench", *options, *SMALL[2:], "--no-errors", "--json").json
    assert without["rows"][0]["error"] is None


def test_bench_writes_its_table_and_its_plot(ok, tmp_path):
    table, plot = tmp_path / "bench.md", tmp_path / "bench.png"
    found = ok("bench", *SMALL, "--markdown", table, "--plot", plot, "--json").json
    for row in found["rows"]:
        direction = "fwd + bwd" if row["direction"] == "backward" else row["direction"]
        assert f"| plain | {direction} | reference | {row['median_ms']:.3g} |" in table.read_text()
    assert matplotlib.image.imread(plot).std() > 0.01


def test_bench_prints_header_and_figures(ok):
    printed = ok("bench", *SMALL, "--directions", "decode").out
    assert f"torch {torch.__version__}" in printed
    assert "plain: B=2 T=7 H=2 HV=2 K=4 V=4" in printed
    assert "1.00" in printed


@pytest.fixture
def check_file(tmp_path):
    path = tmp_path / "check.yaml"
    path.write_text(
        "spec: {decay: head, beta: head}\nshapes: [{B: 2, T: 9, H: 1, HV: 2, K: 4}]\n"
        "dtypes: [float32, bfloat16]\nregimes: [ordinary]\n"
    )
    return path


def test_check_passes_what_is_right_and_fails_what_is_wrong(ok, run, wrong, check_file):
    right = ok("check", check_file, "--backends", "reference", "--json").json
    assert right["failures"] == []
    assert {row["tensor"] for row in right["rows"]} >= {"o", "state", "d_q", "d_beta", "d_state"}
    assert all(row["error"] <= row["limit"] for row in right["rows"])
    said = run("check", check_file, "--backends", f"reference,{wrong}", "--json")
    assert said.code == 1
    rows = {(row["backend"], row["tensor"]): row for row in said.json["rows"] if "float32" in row["case"]}
    assert rows[wrong, "o"]["error"] == pytest.approx(0.01, rel=1e-2)
    assert rows[wrong, "o"]["ok"] is False
    assert rows["reference", "o"]["ok"] is True
    assert any("o has relative RMS error" in failure for failure in said.json["failures"])
    refused = [row for row in said.json["rows"] if row["refused"]]
    assert [row["refused"] for row in refused] == ["slightly_wrong takes no bfloat16."]


def test_check_of_a_backend_that_takes_nothing_does_not_pass(run, check_file):
    said = run("check", check_file, "--backends", "fla,reference")
    assert said.code == 1
    assert said.out.splitlines()[-1] == "fla takes none of them, so nothing is known of it"
    assert "0 failures on 2 cases of fla, reference, 2 refused" in said.out


def test_check_prints_the_errors_and_a_last_line(run, wrong, check_file):
    said = run("check", check_file, "--backends", wrong)
    assert said.code == 1
    assert "TOO MUCH" in said.out
    assert "failures on 2 cases of slightly_wrong" in said.out.splitlines()[-1]


def test_demo_prints_the_report_of_its_run(ok, text_file, tmp_path, monkeypatch):
    from deltazoo.blocks.training import demo as demo_module
    from deltazoo.blocks.training.train import TrainConfig

    small = demo_module.DemoConfig(
        stacks=("gated-deltanet-h1-small",),
        train=TrainConfig(batch=1, length=4, validation_batches=1, compile=False),
        bench=demo_module.BenchConfig(rounds=3, seconds=0.1),
    )
    monkeypatch.setattr(demo_module, "DemoConfig", lambda: small)
    monkeypatch.setattr(demo_module, "BACKENDS", ("reference",))
    options = ("--text", text_file, "--out", tmp_path, "--steps", 2, "--backend", "reference", "--seed", 4)
    found = ok("demo", *options, "--json").json
    assert found == json.loads((tmp_path / "report.json").read_text())
    assert (found["config"]["train"]["steps"], found["config"]["sampling"]["seed"]) == (2, 4)
    training = found["trainings"]["gated-deltanet-h1-small"]
    assert f"{training['points'][-1]['validation_bits']:.3f} bits per byte" in ok("demo", *options).out
