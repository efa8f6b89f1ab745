"""bench, check and demo: results on stdout, in files and as exit codes."""

import contextlib
import itertools
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch

import deltazoo
from deltazoo.backends.measure.benchmark import Benchmark, bench
from deltazoo.backends.measure.timing import Times
from deltazoo.backends.update import registry
from deltazoo.backends.update.base import Backend, UpdateOutput
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.blocks.inspect.figure import new_figure
from deltazoo.mixers.core.config import config_class

SMALL = ("--shape", "plain", "--rounds", 3, "--seconds", 0.1, "--backends", "reference")


class SlightlyWrong(Backend):
    """The reference with outputs that are 1 % too large, without bfloat16."""

    name = "slightly_wrong"

    def unsupported(self, spec, meta):
        return ["slightly_wrong takes no bfloat16."] if meta.dtype == torch.bfloat16 else []

    def forward(self, spec, inputs):
        out = ReferenceBackend().forward(spec, inputs)
        return UpdateOutput(out.o * 1.01, out.state)


@pytest.fixture
def wrong(monkeypatch):
    """The name under which the CLI finds `SlightlyWrong`."""
    from importlib.metadata import EntryPoint

    installed = registry._entry_points
    monkeypatch.setattr("deltazoo.backends.update.registry._loaded", SimpleNamespace(slightly_wrong=SlightlyWrong()))
    plug_in = (EntryPoint("slightly_wrong", "nowhere:Nothing", registry.BACKENDS),)
    monkeypatch.setattr(
        registry, "_entry_points", lambda group: (*installed(group), *(plug_in if group == registry.BACKENDS else ()))
    )
    return "slightly_wrong"


def test_bench_has_one_row_per_backend_and_direction(ok, wrong):
    result = ok("bench", *SMALL[:-1], f"reference,{wrong}", "--baseline", wrong, "--json").json
    rows = {(row["direction"], row["backend"]): row for row in result["rows"]}
    assert len(rows) == 6
    for direction in ("forward", "backward", "decode"):
        reference, baseline = rows[direction, "reference"], rows[direction, wrong]
        assert reference["ratio"] == pytest.approx(baseline["median_ms"] / reference["median_ms"])
        assert baseline["ratio"] == 1
        assert reference["error"] < 1e-6
        assert reference["low_ms"] <= reference["median_ms"] <= reference["high_ms"]
    assert rows["forward", wrong]["error"] == pytest.approx(0.01, rel=1e-2)
    assert result["environment"]["torch"] == torch.__version__
    assert result["baseline"] == wrong


def test_bench_accepts_sizes_a_mixer_and_a_dtype(ok):
    options = ("--shape", "B=2 T=5 H=1 HV=2 K=4", "--mixer", "kda", "--dtype", "bfloat16", "--directions", "forward")
    result = ok("bench", *options, *SMALL[2:], "--json").json
    assert list(result["shapes"][0].values())[1:7] == [2, 5, 1, 2, 4, 4]
    assert result["specs"]["kda"]["decay"] == "channel"
    assert 1e-4 < result["rows"][0]["error"] < 1e-2
    without = ok("bench", *options, *SMALL[2:], "--no-errors", "--json").json
    assert without["rows"][0]["error"] is None


def test_bench_writes_a_table_and_a_plot(ok, tmp_path):
    table, plot = tmp_path / "bench.md", tmp_path / "bench.png"
    result = ok("bench", *SMALL, "--markdown", table, "--plot", plot, "--json").json
    for row in result["rows"]:
        direction = "fwd + bwd" if row["direction"] == "backward" else row["direction"]
        assert f"| {direction} | reference | {row['median_ms']:.3g} |" in table.read_text()
    assert matplotlib.image.imread(plot).std() > 0.01


def test_labels_of_the_plot_name_the_mixer_and_do_not_overlap(ok, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        "deltazoo.blocks.training.report.new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1]
    )
    mixers = (
        "--mixer",
        "kda",
        "--mixer",
        "gated_deltanet(negative_eigenvalues=both)",
        "--shape",
        "row",
        "--shape",
        "B=1 T=9 H=2 K=4",
    )
    ok("bench", *SMALL[2:], *mixers, "--plot", tmp_path / "bench.png")
    figure = figures[-1]
    figure.draw_without_rendering()
    labels = figure.axes[0].get_yticklabels()
    assert len(labels) == 12
    assert labels[0].get_text() == "kda, row, forward"
    boxes = [label.get_window_extent() for label in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.axes[0].bbox.x0 for box in boxes)


def test_a_wide_case_fits_80_columns_and_is_printed_once(ok, wrong, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    mixers = ("--mixer", "kda(heads=1)", "--mixer", "gated_deltanet(negative_eigenvalues=both)")
    shapes = ("--shape", "B=1 T=100 H=2 HV=4 K=16", "--shape", "B=1 T=50 H=2 HV=4 K=16")
    options = (*mixers, *shapes, "--directions", "decode", "--rounds", 3, "--seconds", 0.1)
    backends = ("--backends", f"reference,{wrong}")
    lines = ok("bench", *options, *backends).out.splitlines()
    assert max(map(len, lines)) <= 80
    head = next(n for n, line in enumerate(lines) if line.startswith("mixer, shape"))
    assert lines[head].split() == ["mixer,", "shape", "backend", "ms", "20-80", "%", "ratio", "error", "first", "s"]
    assert lines[head + 2].split()[:3] == ["kda(heads=1),", "T=100", "reference"]
    assert lines[head + 3].split()[0] == wrong
    assert lines[head + 6].split()[:2] == ["gated_deltanet", "reference"]
    assert lines[head + 7].split()[0].startswith("(negative_eigenval")
    assert sum("kda(heads=1)" in line for line in lines[head:]) == 2  # once for each shape
    wide = ok("bench", *options, *backends, "--matrix").out.splitlines()
    assert max(map(len, wide)) <= 80


def test_equal_updates_are_timed_once_and_named(ok):
    options = (
        *SMALL,
        "--directions",
        "decode",
        "--mixer",
        "retnet",
        "--mixer",
        "kda",
        "--mixer",
        "lightning_attention(scale=null)",
    )
    printed = ok("bench", *options).out
    assert "equal updates are timed once: retnet (also lightning_attention(scale=null))" in printed
    result = ok("bench", *options, "--json").json
    assert [row["mixer"] for row in result["rows"]] == ["retnet", "kda"]
    assert result["same"] == {"retnet": ["lightning_attention(scale=null)"]}


def test_backends_that_support_nothing_are_one_line_unless_named(ok, monkeypatch):
    names = ["cudnn", "fla", "flash_qla", "flashinfer", "reference"]
    monkeypatch.setattr("deltazoo.backends.update.registry.names", lambda group: names)
    lines = ok("bench", *SMALL[:-2], "--directions", "decode").out.splitlines()
    assert lines[-2:] == [
        "",
        "cudnn, fla, flash_qla, flashinfer: no support for any of these cases; --backends NAME prints the reasons",
    ]
    assert not any("it needs" in line for line in lines)
    assert "it needs the package fla" in ok("bench", *SMALL[:-1], "reference,fla", "--directions", "decode").out


class Interrupted(Backend):
    """The reference, whose third case sends a signal to this process."""

    name = "interrupted"
    signum, calls = signal.SIGINT, 0

    def unsupported(self, spec, meta):
        return []

    def forward(self, spec, inputs):
        return ReferenceBackend().forward(spec, inputs)

    def step_(self, spec, inputs, states, slots=None):
        signal.raise_signal(type(self).signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_keeps_what_was_measured(run, tmp_path, monkeypatch, signum):
    monkeypatch.setattr(Interrupted, "signum", signum)
    options = (*SMALL[:-1], f"{__name__}:Interrupted", "--matrix", "--mixer", "kda", "--mixer", "gla")
    table, plot = tmp_path / "part.md", tmp_path / "part.png"
    result = run("bench", *options, "--markdown", table, "--plot", plot)
    assert result.code == 128 + signum
    assert "partial: 2 of 6 cases were measured" in result.out
    lines = [line.split()[:2] for line in result.out.splitlines() if line.startswith("kda")]
    assert lines == [["kda,", "forward"], ["kda,", "fwd"]]
    assert result.err.splitlines()[-1] == "deltazoo: interrupted"
    assert "partial: 2 of 6 cases were measured" in table.read_text()
    assert "| kda, fwd + bwd |" in table.read_text()
    assert plot.exists()
    part = run("bench", *options, "--json")
    assert (part.code, len(part.json["rows"]), part.json["missing"]) == (128 + signum, 2, 4)
    (tmp_path / "part.json").write_text(part.out)
    compared = run("bench", *SMALL, "--mixer", "kda", "--compare", tmp_path / "part.json")
    assert "has no case with the update" in compared.err  # another backend: the part was read


def test_rows_are_printed_as_they_are_measured(ok, monkeypatch):
    printed: list[str] = []
    reports = []

    def remember(task, done, total, note=""):
        reports.append((task, done, total, note, [line.split()[0] for line in printed if "reference" in line]))

    monkeypatch.setattr("deltazoo.cli.bench.progress", lambda: contextlib.nullcontext(remember))
    monkeypatch.setattr("deltazoo.cli.terminal.output.print_line", lambda text="": printed.append(text))
    ok("bench", *SMALL, "--directions", "forward,decode", "--mixer", "kda", "--mixer", "gla")
    assert {(task, total) for task, _, total, *_ in reports} == {("bench", 4)}
    before_last = next(rows for *_, note, rows in reports if note.startswith("gla, plain, decode"))
    assert before_last == ["kda,", "kda,", "gla,"]
    assert reports[-1][:3] == ("bench", 4, 4)


def test_the_page_of_benchmarks_has_the_columns_of_the_command(ok):
    page = (Path(deltazoo.__file__).parent / "docs" / "benchmarks.md").read_text()
    table = page.partition("<!-- deltazoo bench -->")[2].partition("<!-- /deltazoo bench -->")[0]
    result = ok("bench", *SMALL, "--json").json
    written = Benchmark.model_validate(result, strict=False).markdown()
    heads = [[line for line in text.splitlines() if line.startswith("| ")][:2] for text in (table, written)]
    assert heads[0] == heads[1]
    legend = written.split("ms: median", 1)[1].splitlines()[0]
    assert legend in " ".join(table.replace("compile", "reference").split())  # the page wraps


def test_bench_prints_the_environment_and_the_figures(ok):
    printed = ok("bench", *SMALL, "--directions", "decode").out
    assert f"torch {torch.__version__}" in printed
    assert "plain: B=2 T=7 H=2 HV=2 K=4 V=4" in printed
    assert "gated_deltanet; float32; seed 0" in printed
    assert "1.00" in printed


def test_refusals_are_below_a_table_without_empty_columns(ok, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = ok("bench", *SMALL[:-1], "reference,fla,cudnn").out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("direction "))
    assert lines[head].split() == ["direction", "backend", "ms", "20-80", "%", "ratio", "error", "first", "s"]
    assert len(lines[head + 2 : lines.index("", head + 2)]) == 3 + 2  # the rows of the reference, and the legend
    refusals = lines[lines.index("", head + 2) :]
    assert any(line.startswith("fla: it needs the package fla, which is not installed") for line in refusals)
    assert sum("it needs tensors on 'cuda', got 'cpu'." in line for line in refusals) == 1
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("more", [(), ("--json",), ("--plot", "bench.png")])
def test_bench_fails_if_no_backend_ran(run, tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    result = run("bench", *SMALL[:-1], "fla", *more)
    assert result.code == 1
    assert "it needs tensors on 'cuda', got 'cpu'." in result.out
    assert ("nothing ran" in result.out) == ("--json" not in more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--markdown", "folder"), "folder is a folder: give the path of a file to write"),
        (("--markdown", "other.md"), "other.md exists and must contain the markers"),
        (("--markdown", "other.md/table.md"), "other.md/table.md cannot be written: other.md is not a folder"),
        (("--plot", "folder"), "folder is a folder: give the path of a file to write"),
        (("--plot", "bench.xyz"), "bench.xyz must end in one of ."),
        (("--compare", "other.md"), "other.md must contain the output of `deltazoo bench --json`"),
        (("--compare", "missing.json"), "missing.json: No such file or directory"),
        (("--mixer", "gated_deltanet(haeds=3)"), "gated_deltanet.haeds: unknown key; did you mean 'heads'?"),
        (("--mixer", "gated_deltanet + kda"), "a mixer must be one name"),
        (("--mixer", "gated_deltanett"), "did you mean 'gated_deltanet'?"),
        (("--mixer", "attention"), "'attention' has no update"),
    ],
)
def test_outputs_and_arguments_are_checked_before_the_work(run, tmp_path, monkeypatch, options, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.md").write_text("no markers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("deltazoo.blocks.inspect.benchmark.bench", lambda *args: pytest.fail("the work began"))
    result = run("bench", *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_missing_matplotlib_is_reported_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("deltazoo.blocks.inspect.benchmark.bench", lambda *args: pytest.fail("the work began"))
    result = run("bench", "--plot", tmp_path / "bench.png")
    assert (result.code, result.out) == (2, "")
    assert result.err == "deltazoo: plots need matplotlib: pip install 'deltazoo[plot]'\n"


def test_bench_times_a_mixer_with_changed_fields(ok):
    name = "gated_deltanet(negative_eigenvalues=both)"
    result = ok("bench", *SMALL, "--mixer", name, "--directions", "forward", "--json").json
    assert result["specs"][name]["negative_eigenvalues"] == "both"
    assert result["rows"][0]["mixer"] == name
    assert result["rows"][0]["error"] < 1e-6


def test_matrix_has_a_row_per_case_and_a_column_per_backend(ok, tmp_path):
    options = ("--shape", "plain", "--shape", "row", "--mixer", "kda", "--mixer", "gla(heads=1)", "--matrix")
    markdown = tmp_path / "matrix.md"
    directions = ("--directions", "forward,decode", "--backends", "reference,fla", "--rounds", 3, "--seconds", 0.1)
    printed = ok("bench", *options, *directions, "--markdown", markdown).out.splitlines()
    head = next(n for n, line in enumerate(printed) if line.startswith("mixer,"))
    assert printed[head].split() == ["mixer,", "shape,", "direction", "reference", "fla"]
    cells = [line.split() for line in printed[head + 2 : head + 10]]
    assert [row[:3] for row in cells] == [
        [f"{mixer},", f"{shape},", direction]
        for mixer in ("kda", "gla(heads=1)") for shape in ("plain", "row") for direction in ("forward", "decode")
    ]  # fmt: skip
    assert all(float(reference) > 0 and fla == "-" for *_, reference, fla in cells)
    assert "| gla(heads=1), row, decode |" in markdown.read_text()


def test_matrix_times_every_distinct_update_by_default(ok, monkeypatch):
    asked = {}

    def remember(specs, *others):
        asked.update(specs)
        return bench({"kda": specs["kda"]}, *others)

    monkeypatch.setattr("deltazoo.blocks.inspect.benchmark.bench", remember)
    ok("bench", *SMALL, "--directions", "decode", "--matrix")
    assert asked == {name: spec for name in registry.names(registry.MIXERS) if (spec := config_class(name)().spec())}


def test_compare_reports_regressions(ok, run, tmp_path, monkeypatch):
    measured = "deltazoo.backends.measure.benchmark.time_interleaved"
    monkeypatch.setattr(measured, lambda calls, *_: {name: Times([0.9e-3, 1e-3, 1.1e-3], []) for name in calls})
    options = ("bench", *SMALL, "--directions", "forward,decode")
    old = tmp_path / "old.json"
    old.write_text(ok(*options, "--json").out)
    earlier = json.loads(old.read_text())
    slower, faster = earlier["rows"]
    for key in ("median_ms", "low_ms", "high_ms"):
        slower[key], faster[key] = 1e-4 * slower[key], 1e4 * faster[key]
    old.write_text(json.dumps(earlier))
    result = run(*options, "--compare", old)
    assert result.code == 1
    assert "forward, reference: " in result.out
    assert result.out.splitlines()[-1] == "1 regression in 2 cases"
    compared = run(*options, "--compare", old, "--json").json
    assert [len(change["regressions"]) for change in compared["comparison"]["changes"]] == [1, 0]
    old.write_text(json.dumps(compared))
    assert run(*options, "--compare", old).out.splitlines()[-1].endswith(" in 2 cases")
    result = run(*options, "--compare", old, "--dtype", "float64")
    assert result.code == 2
    assert "was measured with dtype float32, which does not compare with float64" in result.err
    result = run(*options, "--compare", old, "--mixer", "kda")
    assert result.code == 2
    assert "has no case with the update, sizes, direction and backend of one" in result.err


def test_bench_of_a_model_prints_and_writes_its_figures(ok, stack_file, tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5.23")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)  # a long path cannot be wrapped
    stack, table = Path("gdn.yaml"), Path("model.md")
    stack.write_text("{width: 16, depth: 1, vocab: 64, pattern: 'gated_deltanet(heads=1)', mlp: {width: 16}}")
    options = ("--model", stack, "--shape", "B=2 T=8", "--rounds", 3, "--seconds", 0.1)
    options += ("--backends", "transformers_model,fla_model", "--directions", "forward,backward")
    lines = ok("bench", *options, "--markdown", table).out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("model "))
    assert lines[head].split() == ["model", "phase", "tokens/s", "ms", "20-80", "%", "6N", "all", "first", "s"]
    assert lines[head + 2].split()[:2] == ["transformers", "training"]
    assert lines[head + 3].split()[0] == "prefill"
    assert lines[-1] == "fla: it needs a CUDA device, got 'cpu'."
    assert max(map(len, lines)) <= 80
    assert "| transformers | training |" in table.read_text()
    result = ok("bench", *options, "--json").json
    assert (result["stack"]["width"], result["config"]["length"]) == (16, 8)
    assert result["rows"][0]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--matrix", "--plot", "bench.png"), "--model does not take --matrix, --plot"),
        (("--shape", "cpu"), "the shape of a model must be one such as 'B=4 T=1000', got cpu"),
        (("--shape", "B=1 T=1"), "length must be at least 2, got 1"),
        (("--dtype", "float64"), "dtype must be 'float32', 'bfloat16' or 'float16'"),
        (("--backends", "fla_modell"), "did you mean 'fla_model'?"),
    ],
)
def test_bench_of_a_model_refuses_other_arguments(run, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = run("bench", "--model", "gated-deltanet-small", *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_bench_of_a_model_fails_if_nothing_ran(run):
    result = run("bench", "--model", "gated-deltanet-small", "--backends", "fla_model")
    assert result.code == 1
    assert "nothing ran" in result.out
    assert run("bench", "--model", "gated-deltanet-smal").err.startswith("deltazoo: unknown preset")


@pytest.fixture
def check_file(tmp_path):
    path = tmp_path / "check.yaml"
    path.write_text(
        "spec: {decay: head, beta: head}\nshapes: [{B: 2, T: 9, H: 1, HV: 2, K: 4}]\n"
        "dtypes: [float32, bfloat16]\nregimes: [ordinary]\n"
    )
    return path


def test_check_accepts_a_correct_backend_and_rejects_a_wrong_one(ok, run, wrong, check_file):
    right = ok("check", check_file, "--backends", "reference", "--json").json
    assert right["failures"] == []
    assert {row["tensor"] for row in right["rows"]} >= {"o", "state", "d_q", "d_beta", "d_state"}
    assert all(row["error"] <= row["limit"] for row in right["rows"])
    result = run("check", check_file, "--backends", f"reference,{wrong}", "--json")
    assert result.code == 1
    rows = {(row["backend"], row["tensor"]): row for row in result.json["rows"] if "float32" in row["case"]}
    assert rows[wrong, "o"]["error"] == pytest.approx(0.01, rel=1e-2)
    assert rows[wrong, "o"]["ok"] is False
    assert rows["reference", "o"]["ok"] is True
    assert any("o has relative RMS error" in failure for failure in result.json["failures"])
    refused = [row for row in result.json["rows"] if row["refused"]]
    assert [row["refused"] for row in refused] == [["slightly_wrong takes no bfloat16."]]


def test_check_fails_if_a_named_backend_refuses_every_case(ok, run, check_file, monkeypatch):
    result = run("check", check_file, "--backends", "fla,reference")
    assert result.code == 1
    assert "fla refused every case, so it was not checked" in result.out
    assert "1 failure on 2 cases of fla, reference, 2 refused" in result.out
    monkeypatch.setattr(registry, "names", lambda group: ["fla", "reference"])
    result = ok("check", check_file)
    assert "0 failures on 2 cases of fla, reference, 2 refused" in result.out
    assert result.out.count("fla: no support for any of these cases; --verbose prints the reasons") == 1
    assert "it needs" not in result.out
    assert "fla: it needs the package fla" in ok("check", check_file, "--verbose").out


def test_check_prints_the_worst_row_of_each_backend(run, wrong, check_file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = run("check", check_file, "--backends", f"reference,{wrong}")
    assert result.code == 1
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(">" in line for line in lines)
    (row,) = (line for line in lines if line.startswith(f"{wrong}  "))
    assert row.split()[1] == "1/2"
    rows = run("check", check_file, "--backends", f"reference,{wrong}", "--json").json["rows"]
    worst = max(
        (row for row in rows if row["backend"] == wrong and not row["refused"]), key=lambda r: r["error"] / r["limit"]
    )
    assert row.split()[2:4] == [worst["tensor"], f"{worst['error']:.1e}"]
    assert "ABOVE LIMIT" in row
    assert "more failures: --verbose prints them" in result.out
    assert "failures on 2 cases of reference, slightly_wrong, 1 refused" in lines[-1]


def test_check_prints_every_row_and_failure_if_verbose(run, wrong, check_file):
    result = run("check", check_file, "--backends", wrong, "--verbose")
    data = run("check", check_file, "--backends", wrong, "--json").json
    table = [line for line in result.out.splitlines() if line.startswith(f"{wrong}  ")]
    assert len(table) == len(data["rows"])
    for row, line in zip(data["rows"], table, strict=True):
        assert ("refused" if row["refused"] else f" {row['tensor']} ") in line
    assert all(failure in result.out for failure in data["failures"])


def test_check_counts_a_backend_that_raises_as_failed_not_as_refusing(run, wrong, check_file, monkeypatch):
    def fail(self, spec, inputs):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(SlightlyWrong, "forward", fail)
    result = run("check", check_file, "--backends", wrong)
    assert result.code == 1
    assert "raised an error" in result.out
    assert "out of registers" in result.out
    assert "refused every case" not in result.out


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ("[gpu]", "shapes.0: unknown shape 'gpu'; did you mean 'cpu'?"),
        ("[cpu, {H: 1, K: 2, T: -1}]", "shapes.1.T must be at least 0"),
        ("[7]", "shapes.0 must be a mapping"),
        ("[]", "shapes must have at least 1 item"),
    ],
)
def test_check_names_each_fault_of_a_file_once(run, tmp_path, shapes, sentence):
    path = tmp_path / "check.yaml"
    path.write_text(f"spec: {{decay: head}}\nshapes: {shapes}\n")
    assert run("check", path).err == f"deltazoo: {path} is not a valid check file: {sentence}\n"


def test_demo_prints_the_results_of_its_report(ok, text_file, tmp_path, monkeypatch):
    from deltazoo.blocks.training import demo as demo_module
    from deltazoo.blocks.training.config import TrainConfig

    small = demo_module.DemoConfig(
        stacks=("gated-deltanet-h1-small",),
        train=TrainConfig(batch={"rows": 1, "length": 4}, evaluation={"batches": 1}, compile=False),
        sampling=demo_module.Sampling(max_tokens=5),
        bench=demo_module.BenchConfig(rounds=3, seconds=0.1),
    )
    monkeypatch.setattr(demo_module, "DemoConfig", lambda: small)
    monkeypatch.setattr(demo_module, "BACKENDS", ("reference",))
    options = ("--text", text_file, "--out", tmp_path, "--steps", 2, "--backend", "reference", "--seed", 4)
    result = ok("demo", *options, "--json").json
    assert result == json.loads((tmp_path / "report.json").read_text())
    assert (result["config"]["train"]["steps"], result["config"]["sampling"]["seed"]) == (2, 4)
    training = result["trainings"]["gated-deltanet-h1-small"]
    printed = ok("demo", *options).out
    assert f"{training['points'][-1]['validation_bits']:.3f} bits per token" in printed
    title, head, _, *rows = printed.splitlines()[: 3 + len(training["points"])]
    assert (title, head.split()[:2]) == ("gated-deltanet-h1-small", ["step", "train"])
    last = [f"{point['validation_bits']:.3f}" for point in training["points"]]
    assert [row.split()[0] for row in rows] == [str(point["step"]) for point in training["points"]]
    assert [bits in row for row, bits in zip(rows, last, strict=True)] == [True] * len(rows)


def test_bench_of_layers_times_each_direction(ok, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    table = tmp_path / "bench.md"
    options = (
        "bench",
        "--layer",
        "gla(heads=1)",
        "--layer",
        "lru",
        "--peer",
        "fla",
        "--shape",
        "B=2 T=8",
        "--width",
        "16",
    )
    result = ok(*options, "--rounds", "3", "--seconds", "0.1", "--markdown", table)
    lines = [line.split() for line in result.out.splitlines()]
    rows = [line[:3] for line in lines if line[1:2] == ["deltazoo"]]
    assert rows == [
        [name, "deltazoo", kind] for name in ("gla(heads=1)", "lru") for kind in ("backward", "forward", "decode")
    ]
    assert "fla (lru): it has no such layer." in result.out
    assert "| gla(heads=1) | deltazoo | decode |" in table.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layer", "gla", "--matrix"), "--layer does not take --matrix"),
        (("--layer", "gloa"), "did you mean 'gla'?"),
        (("--layer", "gla", "--shape", "cpu"), "'B=4 T=1000', got cpu"),
        (("--layer", "gla", "--width", "0"), "width must be at least 1, got 0"),
        (("--peer", "fla"), "without --layer, bench does not take --peer"),
        (("--speculate", 2), "--serve, --loads and --speculate need --model"),
        (("--model", "hybrid-tiny", "--speculate", 2), "without --serve, bench does not take --speculate"),
        (("--model", "gated-deltanet-small", "--layer", "gla"), "--model does not take --layer"),
    ],
)
def test_bench_of_layers_refuses_other_arguments(run, options, message):
    result = run("bench", *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
