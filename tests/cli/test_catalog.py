"""list, show, build, schema, doctor: what they print is what the library says."""

import jsonschema
import pytest
import torch

import deltazoo
from deltazoo import StackSpec, UpdateMeta, explain
from deltazoo.backends import registry
from deltazoo.blocks import presets
from deltazoo.mixers.core.config import config_class


def test_list_has_every_name_with_equation_source_and_owner(ok):
    found = ok("list", "--json").json
    assert [entry["name"] for entry in found["mixers"]] == registry.names(registry.MIXERS)
    assert [entry["name"] for entry in found["backends"]] == registry.names(registry.BACKENDS)
    assert [entry["name"] for entry in found["presets"]] == presets.names()
    for entry in found["mixers"]:
        kind = config_class(entry["name"])
        assert (entry["equation"], entry["source"]) == (kind().equation(), kind.source)
        assert entry["owner"] == registry.owner(registry.MIXERS, entry["name"])
        assert entry["problem"] is None
    for entry in found["presets"]:
        spec = StackSpec.load(entry["name"])
        assert (entry["width"], entry["depth"], entry["pattern"]) == (spec.width, spec.depth, str(spec.pattern))
    kda = next(entry for entry in found["mixers"] if entry["name"] == "kda")
    assert kda["spec"] == "decay=channel beta=head"


def test_list_of_one_kind_has_no_other(ok):
    assert list(ok("list", "backends", "--json").json) == ["backends"]
    printed = ok("list", "backends").out
    assert "reference" in printed
    assert "gated_deltanet" not in printed


def test_a_broken_plug_in_is_listed_with_its_problem_beside_the_others(ok, run, broken_plug_in):
    found = ok("list", "--json").json
    entries = {entry["name"]: entry for entry in found["backends"]}
    assert "no_such_module" in entries["broken"]["problem"]
    assert entries["reference"]["problem"] is None
    assert "PROBLEM" in ok("list").out
    doctor = run("doctor", "--json")
    assert doctor.code == 1
    assert any("broken" in problem and "no_such_module" in problem for problem in doctor.json["problems"])


@pytest.fixture
def broken_plug_in(monkeypatch):
    from importlib.metadata import EntryPoint

    found = registry._entry_points

    def with_broken(group):
        more = (EntryPoint("broken", "no_such_module:Nothing", group),) if group == registry.BACKENDS else ()
        return (*found(group), *more)

    monkeypatch.setattr(registry, "_entry_points", with_broken)


@pytest.mark.parametrize("name", ["gated_deltanet", "mamba2", "attention"])
def test_show_a_mixer_counts_what_its_module_has(ok, name):
    sheet = ok("show", name, "--width", 256, "--json").json
    config = config_class(name)()
    module = config.build(256)
    cost = config.cost(256)
    assert sheet["cost"]["parameters"] == sum(weight.numel() for weight in module.parameters())
    assert sheet["cost"]["state, bytes a sequence"] == cost.state_bytes
    assert sheet["cost"]["FLOPs a token, forward"] == cost.flops
    assert {field["name"]: field["default"] for field in sheet["fields"]} == config.model_dump(mode="json")
    assert all(field["about"] for field in sheet["fields"])
    assert sheet["about"]["equation"] == config.equation()


def test_show_a_mixer_says_what_explain_says(ok):
    sheet = ok("show", "kda", "--width", 256, "--device", "cuda", "--dtype", "bfloat16", "--json").json
    meta = UpdateMeta("cuda", torch.bfloat16, H=2, HV=2, K=128, V=128, grad=True)
    want = explain(config_class("kda")().spec(), meta).verdicts
    assert [(v["backend"], v["chosen"], v["reasons"]) for v in sheet["backends"]] == [tuple(v) for v in want]
    assert "chosen" in ok("show", "kda").out


def test_show_a_mixer_says_who_computes_its_short_convolution(ok):
    def computed(name: str, *options: str) -> str | None:
        return ok("show", name, *options, "--json").json["about"].get("short convolution")

    assert computed("kda", "--device", "cuda") == "4 taps, by backend 'triton' on 'cuda'"
    assert computed("kda", "--device", "cuda", "--dtype", "float64") == "4 taps, by plain torch on 'cuda'"
    assert computed("kda", "--device", "mps") == "4 taps, by plain torch on 'mps'"
    assert computed("retnet") is None


def test_show_a_mixer_says_what_of_a_decode_step_is_one(ok):
    def said(name: str, *options: str) -> str | None:
        return ok("show", name, *options, "--json").json["about"].get("decode step")

    whole = (
        "QKVProjection, Beta, SoftplusDecay, HeadNorm, OutputGate and the update in one, by backend 'triton' on 'cuda'"
    )
    assert said("gated_deltanet", "--device", "cuda", "--dtype", "bfloat16") == whole
    assert said("mamba2", "--device", "cuda") == (
        "QKVProjection, SoftplusDecay, Skip, OutputGate and the update in one, by backend 'triton' on 'cuda'"
    )
    assert said("gated_deltanet") == "part by part, the update by backend 'compile' on 'cpu'"
    assert said("retnet", "--device", "cuda") == "part by part, the update by backend 'triton' on 'cuda'"
    assert said("attention") is None


def test_show_a_backend_says_which_mixers_it_takes(ok):
    takes = ok("show", "reference", "--json").json["takes"]
    assert takes.keys() == {n for n in registry.names(registry.MIXERS) if config_class(n)().spec() is not None}
    assert all(reasons == [] for reasons in takes.values())


def test_show_a_preset_describes_its_layers(ok):
    sheet = ok("show", "gated-deltanet-h1-small", "--json").json
    spec = StackSpec.load("gated-deltanet-h1-small")
    assert sheet["description"] == spec.describe().model_dump(mode="json")
    printed = ok("show", "gated-deltanet-h1-small").out
    assert f"{spec.describe().parameters:,}" in printed


def test_build_counts_and_saves_what_it_built(ok, tmp_path):
    path = tmp_path / "mine.yaml"
    pattern = "3*gated_deltanet(heads=2) + sliding_window(heads=2, window=8)"
    options = ("--pattern", pattern, "--width", 32, "--depth", 4, "--vocab", 100)
    found = ok("build", *options, "--save", path, "--json").json
    model = StackSpec(width=32, depth=4, vocab=100, pattern=pattern).build()
    assert found["description"]["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert [layer["mixer"] for layer in found["description"]["layers"]] == ["gated_deltanet"] * 3 + ["sliding_window"]
    assert StackSpec.load(path) == model.spec == StackSpec(**found["stack"])


def test_build_changes_fields_of_a_file_and_leaves_the_rest(ok, stack_file):
    found = ok("build", stack_file, "--depth", 5, "--untied", "--json").json
    assert found["stack"]["depth"] == len(found["description"]["layers"]) == 5
    assert found["stack"]["tied"] is False
    assert found["stack"]["width"] == StackSpec.load(stack_file).width


def test_the_schema_takes_the_presets_and_refuses_a_slip(ok):
    schema = ok("schema").json
    assert schema == ok("schema", "--json").json
    for name in presets.names():
        jsonschema.validate(presets.read(name), schema)
    data = presets.read("gated-deltanet-h1")
    with pytest.raises(jsonschema.ValidationError, match="dpeth"):
        jsonschema.validate(data | {"dpeth": 3}, schema)


def test_doctor_names_versions_and_who_computes(ok):
    found = ok("doctor", "--json").json
    assert found["environment"]["torch"] == torch.__version__
    assert found["environment"]["deltazoo"] == deltazoo.__version__
    assert found["devices"][0] == "cpu"
    verdicts = {(row["device"], row["dtype"], row["backend"]): row["verdict"] for row in found["backends"]}
    assert verdicts["cpu", "float32", "compile"] == "chosen"
    assert "asked for by name" in verdicts["cpu", "bfloat16", "reference"]
    assert "No problems found." in ok("doctor").out


def test_doctor_misses_a_compiler(run, monkeypatch):
    monkeypatch.setattr("deltazoo.backends.devices.shutil.which", lambda name: None)
    said = run("doctor", "--json")
    assert said.code == 1
    assert said.json["environment"]["compiler"] is None
    assert "No C++ compiler" in said.json["problems"][0]
