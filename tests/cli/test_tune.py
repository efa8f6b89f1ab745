"""tune and merge-tables: errors without a GPU, and output of a run on a simulated GPU."""

import importlib.util
from pathlib import Path

import pytest
import torch

from deltazoo.backends.triton.config import Launch
from deltazoo.backends.triton.runtime import table as tables
from deltazoo.backends.triton.runtime.records import OperatorKey, OperatorRecord
from deltazoo.backends.triton.runtime.table import read_table
from deltazoo.backends.tuning.operators import OperatorsTuned
from deltazoo.blocks.inspect import tuning
from deltazoo.blocks.inspect.step_tuning import ModelTuned, StepGain

_PATH = Path(__file__).parents[1] / "backends" / "test_tune.py"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A simulated GPU with fixed kernel times."""
    spec = importlib.util.spec_from_file_location("fake_gpu", _PATH)
    fake = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fake)

    class Fake(fake.FakeRunner):
        def __init__(self, device):
            super().__init__({Launch(tile=32, warps=4, stages=2): 0.2}, [Launch(tile=64, warps=4, stages=3)])
            assert device == "cuda"

        def refusals(self, target):
            return [f"decay must be 'none', got {target.spec.decay!r}."] if target.spec.decay == "channel" else []

    monkeypatch.setattr(tuning, "CudaRunner", Fake)
    monkeypatch.setattr(tables.Path, "home", lambda: tmp_path)


def test_tune_without_a_gpu_is_refused(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the machine of the test may have a GPU
    result = run("tune", "--shape", "dense_8x4096")
    assert (result.code, result.out) == (2, "")
    assert result.err == "deltazoo: tuning needs an NVIDIA GPU, and torch finds none on this machine\n"
    result = run("tune", "--shape", "dense_8x4096", "--dry-run")
    assert (result.code, result.out) == (2, "")
    assert "A plan needs none if --device-name is one of 'NVIDIA H200'," in result.err


def test_dry_run_of_a_named_device_lists_the_candidates_without_a_gpu(ok, run, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tables.Path, "home", lambda: tmp_path)
    options = ("tune", "--shape", "pack_8x4096", "--dry-run", "--directions", "forward", "--device-name")
    scan, prepare = ok(*options, "NVIDIA H200", "--json").json
    assert (scan["kernel"], prepare["kernel"], scan["done"]) == ("scan", "prepare", False)
    assert any("kernel=sm90" in candidate for candidate in scan["candidates"])
    printed = ok(*options, "NVIDIA H200").out
    assert all(f"  {candidate}\n" in printed for candidate in (*scan["candidates"], *prepare["candidates"]))
    assert max(map(len, printed.splitlines())) <= 160
    ampere = ok(*options, "NVIDIA A100-SXM4-80GB", "--json").json
    assert not any("sm90" in candidate for step in ampere for candidate in step["candidates"])
    result = run(*options, "NVIDIA H20")
    assert result.code == 2
    assert "device name must be one of 'NVIDIA H200'" in result.err
    result = run("tune", "--shape", "pack_8x4096", "--device-name", "NVIDIA H200")
    assert "--device-name needs --dry-run" in result.err


def test_tune_prints_gains_rejections_and_how_to_load_the_table(ok, gpu, tmp_path):
    out = tmp_path / "t.json"
    printed = ok("tune", "--shape", "pack_8x4096", "--directions", "forward", "--out", out).out
    assert "tile=32 warps=4 stages=2" in printed
    assert "1.05" in printed
    assert "pack_8x4096 scan tile=64 warps=4 stages=3: o has relative RMS error" in printed
    assert "2 measured in" in printed
    assert printed.splitlines()[-1] == f'from deltazoo.backends.triton import use_table; use_table("{out}")'
    assert len(read_table(out).records) == 2


def test_the_default_table_is_loaded_automatically(ok, gpu, tmp_path):
    result = ok("tune", "--shape", "decode_64", "--json").json
    assert result["records"][0]["key"]["kernel"] == "decode"
    assert ok("tune", "--shape", "decode_64", "--json").json["kept"] == 2
    assert ok("tune", "--shape", "decode_64").out.splitlines()[-1].startswith("# used from now on")


def test_tune_lists_the_kernels_of_a_stack(ok, gpu, tmp_path):
    options = ("--batch", 2, "--length", 512, "--dtype", "bfloat16,float16", "--dry-run", "--out", tmp_path / "t.json")
    listed = ok("tune", "gated-deltanet-h1", *options, "--json").json
    assert {step["shape"] for step in listed} == {"gated-deltanet-h1 2x512", "2x512"}
    assert {step["key"].split()[0] for step in listed if step["shape"] != "2x512"} == {"bfloat16", "float16"}
    beside = {step["kernel"] for step in listed if step["shape"] == "2x512"}
    assert {"rms_norm_kernel", "short_conv_kernel", "glu_kernel", "cross_entropy_kernel"} <= beside
    assert {step["kernel"] for step in listed} >= {*tables.TUNED} - {"segment_chunks"}
    assert "scan" in ok("tune", "gated-deltanet-h1", *options).out
    assert not (tmp_path / "t.json").exists()


def test_tune_of_a_stack_ends_with_its_training_and_decoding_step(ok, gpu, monkeypatch, tmp_path):
    key = OperatorKey(kernel="glu_kernel", dtypes="bfloat16", traits="F=64")
    record = OperatorRecord(
        key=key, triton="3.6.0", revision=1, warps=8, stages=1, ms=1.0, heuristic_ms=1.5, tried=4, rejected=0
    )
    operators = OperatorsTuned(records=[record], kept=2, left=0, failures=[], rejected=[])
    steps = [StepGain(step=step, heuristic_ms=3.0, tuned_ms=2.5) for step in ("training", "decoding")]
    model = ModelTuned(dtype="bfloat16", operators=operators, steps=steps)
    monkeypatch.setattr(tuning, "tune_stack_steps", lambda *_: model)
    lines = ok("tune", "transformer-pp", "--out", tmp_path / "t.json").out.splitlines()
    assert any(
        line.split() == [*["glu_kernel", "bfloat16", "F=64", "warps=8", "stages=1", "1.000", "1.50", "4", "0"]]
        for line in lines
    )
    assert [line.split() for line in lines[-2:]] == [
        ["training", "3.000", "2.500", "1.200"], ["decoding", "3.000", "2.500", "1.200"],
    ]  # fmt: skip


def test_tune_without_a_stack_or_shape_takes_the_default_shapes(ok, monkeypatch, tmp_path):
    monkeypatch.setattr(tables.Path, "home", lambda: tmp_path)
    options = ("tune", "--dry-run", "--device-name", "NVIDIA H200", "--json")
    steps = [(step["kernel"], step["shape"]) for step in ok(*options).json]
    assert {shape for _, shape in steps} == {"dense_1x2048", "decode_64"}
    assert ("scan", "dense_1x2048") in steps
    assert ("decode", "decode_64") in steps
    listed = ok(*options, "transformer-pp", "--batch", 1, "--length", 64).json
    assert {step["shape"] for step in listed} == {"1x64"}  # a stack without an update


def test_merge_tables_writes_one_table(ok, run, gpu, tmp_path):
    a, b, out = (tmp_path / f"{name}.json" for name in ("a", "b", "out"))
    ok("tune", "--shape", "pack_8x4096", "--directions", "forward", "--out", a)
    ok("tune", "--shape", "decode_64", "--out", b)
    assert ok("merge-tables", a, b, "--out", out).out == f"4 records of NVIDIA T900 in {out}\n"
    assert len(ok("merge-tables", a, b, "--out", out, "--json").json["records"]) == 4
    b.write_text('{"device": "NVIDIA B200"}')
    result = run("merge-tables", a, b, "--out", out)
    assert result.code == 2
    assert "tables of two devices do not merge: 'NVIDIA T900' and 'NVIDIA B200'" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "pack_8x4097"), "did you mean 'pack_8x4096'?"),
        (("--shape", "pack_8x4096", "--mixer", "kda"), "supports none of the shapes: decay must be"),
        (("--shape", "pack_8x4096", "--mixer", "attention"), "'attention' has no update"),
        (("--shape", "pack_8x4096", "--dtype", "float64"), "dtype must be one of"),
        (("--shape", "pack_8x4096", "--effort", "some"), "effort must be 'quick' or 'full'"),
        (("--shape", "pack_8x4096", "--budget", "0"), "budget must be greater than 0"),
    ],
)
def test_invalid_arguments_are_refused(run, gpu, arguments, message):
    result = run("tune", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
