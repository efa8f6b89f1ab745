"""list, show, build, schema and doctor print the results of the library."""

import re

import pytest
import torch

import deltazoo
from deltazoo import StackSpec, UpdateMeta, explain
from deltazoo.backends.update import registry
from deltazoo.blocks.spec import document, presets
from deltazoo.mixers.core.config import config_class


def flat(text: str) -> str:
    """Return the words of a text that may be wrapped."""
    return " ".join(text.split())


def test_list_contains_every_name_with_equation_source_and_owner(ok):
    result = ok("list", "--json").json
    assert [entry["name"] for entry in result["mixers"]] == registry.names(registry.MIXERS)
    assert [entry["name"] for entry in result["backends"]] == registry.names(registry.BACKENDS)
    assert [entry["name"] for entry in result["presets"]] == presets.names()
    for entry in result["mixers"]:
        kind = config_class(entry["name"])
        assert (entry["equation"], entry["source"]) == (kind().equation(), kind.source)
        assert entry["owner"] == registry.owner(registry.MIXERS, entry["name"])
        assert entry["problem"] is None
    for entry in result["presets"]:
        spec = StackSpec.load(entry["name"])
        assert (entry["width"], entry["depth"], entry["pattern"]) == (spec.width, spec.depth, str(spec.pattern))
    sources = {entry["name"]: entry["source"] for entry in result["presets"]}
    assert sources["samba"] == "Ren 2024, arXiv 2406.07522"
    assert sources["deltanet-global2"] == sources["deltanet-swa"] == "Yang 2024, arXiv 2406.06484"
    assert sources["qwen3-next"] == "Qwen Team 2025"
    assert sources["samba-tiny"] == ""
    kda = next(entry for entry in result["mixers"] if entry["name"] == "kda")
    assert kda["spec"] == "decay=channel beta=head"


def test_list_of_one_kind_contains_no_other(ok):
    assert list(ok("list", "backends", "--json").json) == ["backends"]
    printed = ok("list", "backends").out
    assert "reference" in printed
    assert "gated_deltanet" not in printed


def test_list_prints_one_line_per_entry_at_80_columns(ok, monkeypatch):
    installed = registry._entry_points
    # a plug-in would add a column
    monkeypatch.setattr(
        registry, "_entry_points", lambda group: [x for x in installed(group) if x.dist.name == "deltazoo"]
    )
    monkeypatch.setenv("COLUMNS", "80")
    lines = ok("list").out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [*registry.names(registry.MIXERS), *registry.names(registry.BACKENDS), *presets.names()]
    assert sorted(line.split()[0] for line in lines if line.split() and line.split()[0] in names) == sorted(names)
    assert [line for line in lines if line.startswith("  gated_deltanet ")] == [
        "  gated_deltanet           2024  delta rule with a decay per head"
    ]
    assert not any("deltazoo 0" in line for line in lines)
    mixers = lines[: lines.index("")]
    assert not any(line.endswith("...") for line in mixers)  # no purpose is cut
    headings = [line for line in mixers[2:] if not line.startswith("  ")]
    assert headings[:2] == ["softmax attention", "linear attention"]
    assert len(headings) == 9
    (samba,) = (line for line in lines if line.startswith("  samba "))
    assert samba.split()[1:4] == ["422M", "12", "1536"]
    assert lines[lines.index(samba) - 1] == "Ren 2024, arXiv 2406.07522"


def test_every_mixer_states_its_family_and_purpose_and_dates_its_paper(ok):
    for entry in ok("list", "mixers", "--json").json["mixers"]:
        if not registry.is_built_in(registry.MIXERS, entry["name"]):
            continue  # a plug-in may lack them
        assert entry["family"], entry["name"]
        assert 10 <= len(entry["purpose"]) <= 47, entry["name"]  # a row of 80 columns
        assert 2017 <= entry["year"] <= 2026, entry["name"]
        assert entry["about"], entry["name"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Peng 2021, arXiv 2110.02488", 2021),
        ("Beltagy 2020, arXiv 2004.05150", 2020),
        ("EFLA, arXiv 2512.12602, with the decay of arXiv 2412.06464", 2025),
        ("arXiv 2004.05150", 2020),
        ("Qwen Team 2026", 2026),
        ("", None),
        ("section 2019.3 of a book", None),
    ],
)
def test_year_of_a_source(source, expected):
    from deltazoo.blocks.inspect.catalog import year

    assert year(source) == expected


def test_parameters_of_a_preset_are_those_of_the_model(ok):
    parameters = {entry["name"]: entry["parameters"] for entry in ok("list", "presets", "--json").json["presets"]}
    for name in ("samba-tiny", "kimi-linear-tiny", "gated-deltanet-small", "transformer-pp"):
        assert parameters[name] == StackSpec.load(name).describe().parameters


def test_search_finds_words_in_any_field(ok, run):
    def found(*options: str) -> list[str]:
        (entries,) = ok("list", *options, "--json").json.values()
        return [entry["name"] for entry in entries]

    assert found("mixers", "--search", "Kimi linear") == ["kda", "mla"]
    assert found("presets", "--search", "Kimi linear") == ["kimi-linear", "kimi-linear-tiny"]
    assert "gated_deltanet" in found("mixers", "--search", "2412.06464")
    assert found("mixers", "--search", "test-time momentum") == ["titans"]
    result = run("list", "mixers", "--search", "no such words")
    assert (result.code, result.out) == (1, "no mixer contains 'no such words'\n")
    assert run("list", "backends", "--search", "no such words", "--json").json == {"backends": []}


def test_list_prints_every_equation_in_full(ok, monkeypatch):
    printed = ok("list", "mixers", "--equations").out
    for name in registry.names(registry.MIXERS):
        for line in config_class(name)().equation().splitlines():
            assert line.strip() in printed, name
    assert "grad l(W'; k_s, v_s), o_t = q_t + ln(W_t q_t + b_t)" in printed
    assert "o_t = V_t^T softmax(K_t q_t)" in printed  # of the whole mixer abc, beyond its update
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, ok("list", "mixers", "--equations").out.splitlines())) <= 80


def test_a_mixer_without_family_and_year_is_listed_last(ok, monkeypatch):
    class Mine(config_class("retnet")):
        name, family, purpose, source = "mine", "", "", "mine alone"

    installed = registry.names
    monkeypatch.setattr(
        registry, "names", lambda group: [*installed(group), *(["mine"] if group == registry.MIXERS else [])]
    )
    monkeypatch.setattr(registry, "owner", lambda group, name: "deltazoo 0.1.0")
    monkeypatch.setattr(
        "deltazoo.blocks.inspect.catalog.config_class", lambda name: Mine if name == "mine" else config_class(name)
    )
    assert ok("list", "mixers").out.splitlines()[-2:] == ["other", "  mine"]


def test_list_names_the_package_and_the_problem_of_a_plug_in(ok, broken_plug_in, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = ok("list", "backends").out.splitlines()
    assert any(line.startswith("broken ") and "PROBLEM, see below" in line for line in lines)
    assert ok("list", "--search", "broken").out.count("PROBLEM") == 1
    assert any(
        line.startswith("broken of ") and "no_such_module" in " ".join(lines[i : i + 3]) for i, line in enumerate(lines)
    )


def test_a_broken_plug_in_is_listed_with_its_problem(ok, run, broken_plug_in):
    result = ok("list", "--json").json
    entries = {entry["name"]: entry for entry in result["backends"]}
    assert "no_such_module" in entries["broken"]["problem"]
    assert entries["reference"]["problem"] is None
    assert "PROBLEM" in ok("list").out
    doctor = run("doctor", "--json")
    assert doctor.code == 1
    assert any("broken" in problem and "no_such_module" in problem for problem in doctor.json["problems"])
    assert run("doctor").out.count("backend 'broken' (no_such_module:Nothing) cannot be loaded") == 1


@pytest.fixture
def broken_plug_in(monkeypatch):
    from importlib.metadata import EntryPoint

    installed = registry._entry_points

    def with_broken(group):
        plug_in = (EntryPoint("broken", "no_such_module:Nothing", group),) if group == registry.BACKENDS else ()
        return (*installed(group), *plug_in)

    monkeypatch.setattr(registry, "_entry_points", with_broken)


@pytest.mark.parametrize("name", ["gated_deltanet", "mamba2", "attention"])
def test_show_counts_the_parameters_and_state_bytes_of_a_mixer(ok, name):
    result = ok("show", name, "--width", 256, "--json").json
    config = config_class(name)()
    module = config.build(256)
    cost = config.cost(256)
    assert result["cost"]["parameters"] == sum(weight.numel() for weight in module.parameters())
    assert result["cost"]["state, bytes per sequence"] == cost.state_bytes
    assert result["cost"]["FLOPs per token, forward"] == cost.flops
    assert {field["name"]: field["default"] for field in result["fields"]} == config.model_dump(mode="json")
    assert all(field["about"] for field in result["fields"])
    assert result["about"]["equation"] == config.equation()


@pytest.mark.parametrize("name", ["kda", "preconditioned_kda"])  # a part of the second has its own update
def test_show_lists_the_verdicts_of_explain(ok, name):
    result = ok("show", name, "--width", 256, "--device", "cuda", "--dtype", "bfloat16", "--json").json
    meta = UpdateMeta("cuda", torch.bfloat16, H=2, HV=2, K=128, V=128, grad=True)
    expected = explain(config_class(name)().spec(), meta).verdicts
    assert [(v["backend"], v["chosen"], v["reasons"]) for v in result["backends"]] == [tuple(v) for v in expected]
    assert "chosen" in ok("show", name).out


@pytest.mark.parametrize("name", ["gated_deltanet", "rwkv7", "mla", "minimax-01", "cudnn", "nemotron-h"])
def test_show_fits_80_columns_without_an_update_spec_in_python(ok, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    printed = ok("show", name, "--width", 256).out
    assert max(map(len, printed.splitlines())) <= 80
    assert "UpdateSpec(" not in printed
    assert "version" not in printed


def test_show_prints_the_recurrence_uses_and_costs_of_a_mixer(ok, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    config = config_class("gated_deltanet")()
    printed = ok("show", "gated_deltanet").out
    recurrence, output = config.equation().split(";  ")
    for text in (recurrence, output, config.source, "decay=head beta=head", "Gated DeltaNet (Yang 2024, 2412.06464)"):
        assert text in printed
    presets_line = printed.partition("presets")[2].partition("spec ")[0].replace("\n", " ").split()
    assert {"qwen3-next,", "olmo-hybrid,"} <= {*presets_line}
    assert not any("tiny" in name for name in presets_line)
    cost = config.cost(1024)
    for figure in (cost.state_bytes, cost.flops):
        assert f" {figure:,}\n" in printed
    assert cost.cache_bytes == 0
    assert "cache" not in printed


def test_show_prints_null_for_a_field_without_a_value(ok):
    printed = ok("show", "kda").out
    assert re.search(r"^heads +null +.*; null: width // 128", printed, re.MULTILINE)
    assert "None" not in printed
    assert ok("show", "kda", "--json").json["fields"][0]["default"] is None


def test_show_prints_each_refusal_once(ok):
    printed = flat(ok("show", "gated_deltanet").out)
    result = ok("show", "gated_deltanet", "--json").json
    reasons = {flat(reason) for row in result["backends"] for reason in row["reasons"]}
    assert {printed.count(reason) for reason in reasons} == {1}
    assert "backend chosen on cpu: compile" in printed
    flashinfer = ok("show", "flashinfer", "--json").json["takes"]
    every = set.intersection(*(set(reasons) for reasons in flashinfer.values()))
    printed = flat(ok("show", "flashinfer").out)
    assert every
    assert all(printed.count(f"every mixer: {reason}") == 1 for reason in every)


def test_show_prints_the_kernel_plan_for_a_named_gpu(ok, run):
    options = ("show", "gated_deltanet", "--dtype", "bfloat16", "--device-name", "NVIDIA H200")
    update = config_class("gated_deltanet")().build(1024).update
    expected = explain(update.spec, update.meta("cuda", torch.bfloat16, grad=True), device="NVIDIA H200").plan
    assert expected
    assert ok(*options, "--json").json["plan"] == expected
    assert flat(expected) in flat(ok(*options).out)
    assert "--device-name" not in ok(*options).out
    assert 'kernels on a GPU: deltazoo show gated_deltanet --device-name "NVIDIA H200"' in ok(*options[:2]).out
    assert run(*options[:-1], "NVIDIA H300").code == 2


def test_show_names_the_implementation_of_the_short_convolution(ok):
    def convolution(name: str, *options: str) -> str | None:
        return ok("show", name, *options, "--json").json["about"].get("short convolution")

    assert convolution("kda", "--device", "cuda") == "4 taps, by backend 'triton' on 'cuda'"
    assert convolution("kda", "--device", "cuda", "--dtype", "float64") == "4 taps, by plain torch on 'cuda'"
    assert convolution("kda", "--device", "mps") == "4 taps, by plain torch on 'mps'"
    assert convolution("retnet") is None


def test_show_lists_the_fused_parts_of_a_decode_step(ok):
    def decode_step(name: str, *options: str) -> str | None:
        return ok("show", name, *options, "--json").json["about"].get("decode step")

    fused = (
        "QKVProjection, Beta, SoftplusDecay, HeadNorm, OutputGate and the update fused, by backend 'triton' on 'cuda'"
    )
    assert decode_step("gated_deltanet", "--device", "cuda", "--dtype", "bfloat16") == fused
    assert decode_step("mamba2", "--device", "cuda") == (
        "QKVProjection, SoftplusDecay, Skip, OutputGate and the update fused, by backend 'triton' on 'cuda'"
    )
    assert decode_step("gated_deltanet") == "not fused, the update by backend 'compile' on 'cpu'"
    assert decode_step("retnet", "--device", "cuda") == "not fused, the update by backend 'triton' on 'cuda'"
    assert decode_step("attention") is None


def test_show_lists_the_mixers_that_a_backend_can_compute(ok):
    takes = ok("show", "reference", "--json").json["takes"]
    assert takes.keys() == {n for n in registry.names(registry.MIXERS) if config_class(n)().spec() is not None}
    assert all(reasons == [] for reasons in takes.values())


def test_show_describes_the_layers_of_a_preset(ok):
    result = ok("show", "gated-deltanet-h1-small", "--json").json
    spec = StackSpec.load("gated-deltanet-h1-small")
    assert result["description"] == spec.describe().model_dump(mode="json")
    printed = ok("show", "gated-deltanet-h1-small").out
    assert f"{spec.describe().parameters:,}" in printed


@pytest.mark.parametrize(
    ("name", "columns"), [("jamba-tiny", None), ("kimi-linear-tiny", "80"), ("nemotron-h-tiny", "80")]
)
def test_show_prints_the_yaml_of_a_stack(ok, monkeypatch, name, columns):
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    printed = ok("show", name).out
    text = printed[printed.index("width: ") :].partition("\n\n")[0]
    assert max(map(len, text.splitlines())) <= int(columns or 100)
    assert StackSpec(**document.parse(text, ".yaml", name)).model_dump() == StackSpec.load(name).model_dump()
    assert "None" not in printed
    assert "'" not in printed


def test_show_lists_the_fields_of_a_file_that_differ_from_their_defaults(ok, tmp_path):
    path = tmp_path / "mine.yaml"
    layers = "layers: {gdn: {mixer: gated_deltanet, heads: 2, conv_width: 4}, swa: {mixer: sliding_window, window: 8}}"
    path.write_text(f"width: 32\ndepth: 2\nvocab: 100\npattern: gdn\nmlp: {{width: 48}}\n{layers}\n")
    result = ok("show", path, "--json")
    assert "layers.swa is not in the pattern 'gdn'" in result.err
    stack = result.json["stack"]
    assert stack["layers"] == {
        "gdn": {"mixer": "gated_deltanet", "heads": 2},
        "swa": {"mixer": "sliding_window", "window": 8},
    }
    assert stack["mlp"] == {"width": 48}


def test_show_prints_defaults_that_are_mixers_as_yaml(ok):
    printed = ok("show", "mom").out
    assert re.search(r"^memory +\{mixer: gated_deltanet\} ", printed, re.MULTILINE)
    assert "{'" not in printed


def test_saved_stacks_hold_the_fields_that_were_given(ok, tmp_path):
    given, saved = tmp_path / "given.yaml", tmp_path / "saved.yaml"
    given.write_text(presets.text("jamba-tiny"))
    ok("build", given, "--save", saved)
    lines = [line for line in given.read_text().splitlines() if not line.startswith("#")]
    assert len(saved.read_text().splitlines()) == len(lines) == 12
    assert StackSpec.load(saved).model_dump() == StackSpec.load(given).model_dump()
    ok("build", given, "--set", "mlps.moe.experts=6", "--set", "norm_eps=1e-6", "--save", saved)
    assert document.read(saved)["mlps"]["moe"]["experts"] == 6
    assert "norm_eps" not in document.read(saved)


def test_lines_on_a_pipe_have_a_reasonable_width(ok):
    commands = [
        ("show", "gated_deltanet", "--device-name", "NVIDIA H200"),
        ("show", "cudnn"),
        ("diff", "mamba2-hybrid", "nemotron-h"),
        ("build", "mamba2-hybrid"),
    ]
    for command in commands:
        lines = ok(*command).out.splitlines()
        assert max(map(len, lines)) <= 120, command


def test_build_describes_and_saves_the_stack(ok, tmp_path):
    path = tmp_path / "mine.yaml"
    pattern = "3*gated_deltanet(heads=2) + sliding_window(heads=2, window=8)"
    options = ("--pattern", pattern, "--width", 32, "--depth", 4)
    result = ok("build", *options, "--save", path, "--json").json
    model = StackSpec(width=32, depth=4, vocab=256, pattern=pattern).build()
    assert result["description"]["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert [layer["mixer"] for layer in result["description"]["layers"]] == ["gated_deltanet"] * 3 + ["sliding_window"]
    assert StackSpec.load(path) == model.spec == StackSpec(**result["stack"])
    again = ok("build", path, "--set", "width=64", "--save", path)
    assert again.err == f"deltazoo: warning: {path} existed and was replaced, comments included\n"
    assert ok("build", path, "--save", tmp_path / "new.yaml").err == ""


@pytest.mark.parametrize(
    ("name", "count"), [("minimax-01", 20), ("kimi-linear", 15), ("nemotron-h", 52), ("gated-deltanet-h1-small", 4)]
)
def test_build_lists_runs_of_equal_layers_in_order_at_80_columns(ok, monkeypatch, name, count):
    monkeypatch.setenv("COLUMNS", "80")
    printed, spec = ok("build", name).out, StackSpec.load(name)
    assert max(map(len, printed.splitlines())) <= 80
    assert "\n".join(spec.describe().lines(80, "─")) in printed
    runs = re.findall(r"^(\d+)(?:-(\d+))? ", printed, re.MULTILINE)
    assert [i for first, last in runs for i in range(int(first), int(last or first) + 1)] == [*range(spec.depth)]
    assert len(runs) == count
    assert printed.startswith(f"{name}, {spec.pattern}"[:70].rstrip())


def test_build_prints_the_pattern_of_mlps_and_active_parameters(ok, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    description = StackSpec.load("jamba-tiny").describe()
    first, _, *table = ok("build", "jamba-tiny").out.splitlines()
    assert first == (
        "jamba-tiny, 2*mamba + attention + mamba, mlp dense + moe: width 64, 4 layers, "
        f"{description.parameters:,} parameters, {description.active_parameters:,} active"
    )
    assert table == description.lines(120, "─")


def test_build_omits_the_columns_of_a_model_without_a_cache(ok, stack_file):
    printed = ok("build", stack_file).out
    assert "state" in printed.split("─")[0]
    assert "cache" not in printed.split("─")[0]


def test_build_changes_only_the_given_fields_of_a_file(ok, stack_file):
    result = ok("build", stack_file, "--depth", 5, "--untied", "--json").json
    assert result["stack"]["depth"] == len(result["description"]["layers"]) == 5
    assert result["stack"]["tied"] is False
    assert result["stack"]["width"] == StackSpec.load(stack_file).width


def test_build_sets_fields_by_path_and_plots(ok, tmp_path):
    settings = ("--set", "layers.sliding_window.window=1024", "--set", "mlp.width=96")
    result = ok("build", "deltanet-swa-tiny", *settings, "--depth", 12, "--plot", tmp_path / "stack.svg", "--json").json
    assert result["stack"]["layers"]["sliding_window"]["window"] == 1024
    assert (result["stack"]["mlp"]["width"], result["stack"]["depth"]) == (96, 12)
    assert (tmp_path / "stack.svg").read_text().lstrip().startswith("<?xml")


def test_diff_lists_the_differing_fields(ok):
    rows = ok("diff", "samba-tiny", "deltanet-swa-tiny", "--json").json
    assert rows["same_model"] is False
    assert {"path": "pattern", "a": "mamba + sliding_window", "b": "deltanet + sliding_window"} in rows["differences"]
    assert {row["path"] for row in rows["differences"]} == {
        "pattern",
        "layers.mamba.mixer",
        "layers.mamba.state_size",
        "layers.deltanet.mixer",
        "layers.deltanet.heads",
    }
    printed = ok("diff", "samba-tiny", "deltanet-swa-tiny").out
    assert re.search(r"^layers\.mamba\.state_size +8$", printed, re.MULTILINE)
    assert ok("diff", "samba", "samba").out == "the stacks describe the same model\n"


def test_schema_prints_the_schema_of_the_library(ok):
    assert ok("schema").json == ok("schema", "--json").json == StackSpec.json_schema()


def test_doctor_lists_versions_devices_and_backends(ok):
    result = ok("doctor", "--json").json
    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["deltazoo"] == deltazoo.__version__
    assert result["devices"][0] == "cpu"
    rows = {(row["device"], row["dtype"], row["backend"]): row for row in result["backends"]}
    assert rows["cpu", "float32", "compile"]["chosen"] is True
    assert rows["cpu", "bfloat16", "reference"]["chosen"] is False
    assert "requested by name" in rows["cpu", "bfloat16", "reference"]["reasons"][0]
    assert "No problems found." in ok("doctor").out


def test_doctor_prints_each_refusal_once_at_80_columns(ok, monkeypatch):
    reasons = {reason for row in ok("doctor", "--json").json["backends"] for reason in row["reasons"]}
    printed = ok("doctor").out
    assert {printed.count(reason) for reason in reasons} == {1}
    monkeypatch.setenv("COLUMNS", "80")
    lines = ok("doctor").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split() == ["compile", "chosen", "chosen"] for line in lines if line.startswith("compile"))
    assert any(line.startswith("flashinfer ") and "refuses" in line for line in lines)


def test_doctor_reports_a_missing_compiler(run, monkeypatch):
    monkeypatch.setattr("deltazoo.backends.torch_ext.devices.shutil.which", lambda name: None)
    result = run("doctor", "--json")
    assert result.code == 1
    assert result.json["environment"]["compiler"] is None
    assert "No C++ compiler" in result.json["problems"][0]
