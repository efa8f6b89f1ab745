"""The registry: lookup by entry point or "module:Class"; a broken plug-in affects only its own name."""

import sys
from types import SimpleNamespace

import pytest
import torch

from deltazoo import UpdateMeta, UpdateSpec, explain
from deltazoo.backends.io.errors import ConfigError, DuplicateNameError, PluginError, UnknownNameError
from deltazoo.backends.update import registry
from deltazoo.backends.update.reference import ReferenceBackend

MODULE = """
from deltazoo.backends.update.reference import ReferenceBackend

class Mine(ReferenceBackend):
    name = "mine"

class Nested:
    inner = Mine

class Nameless(ReferenceBackend):
    name = None

class Failing(ReferenceBackend):
    def __init__(self):
        raise RuntimeError("init failed")

class BrokenCheck(ReferenceBackend):
    def unsupported(self, spec, meta):
        raise RuntimeError("check failed")

instance = Mine()
number = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a distribution with backend entry points, for one test."""
    (tmp_path / "zoo_plugin.py").write_text(MODULE)
    (tmp_path / "zoo_broken.py").write_text("import a_missing_module")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace())

    def write(distribution: str, **points: str) -> None:
        folder = tmp_path / f"{distribution.replace('-', '_')}-1.5.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[deltazoo.backends]", *lines]))
        registry.refresh()

    yield write
    registry.refresh()
    for module in ("zoo_plugin", "zoo_broken"):
        sys.modules.pop(module, None)


def test_built_in_backends_are_entry_points():
    assert {"reference", "compile"} <= set(registry.names(registry.BACKENDS))
    assert registry.load(registry.BACKENDS, "reference") is ReferenceBackend
    assert registry.owner(registry.BACKENDS, "reference").startswith("deltazoo ")


def test_installed_plugin_is_found_by_name(install):
    with pytest.raises(UnknownNameError):
        registry.load(registry.BACKENDS, "mine")
    install("zoo-plugin", mine="zoo_plugin:Mine", ready="zoo_plugin:instance")
    assert {"mine", "ready"} <= set(registry.names(registry.BACKENDS))
    assert "zoo_plugin" not in sys.modules  # listing names does not import
    assert registry.owner(registry.BACKENDS, "mine") == "zoo-plugin 1.5"
    assert registry.resolve("mine").name == "mine"
    assert registry.resolve("ready") is sys.modules["zoo_plugin"].instance


def test_unknown_name_error_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown backend 'referense'; did you mean 'reference'\?$"):
        registry.load(registry.BACKENDS, "referense")


def test_module_class_name_needs_no_installation(install):
    assert type(registry.resolve("zoo_plugin:Mine")).__name__ == "Mine"
    assert type(registry.resolve("zoo_plugin:Nested.inner")).__name__ == "Mine"


def test_untrusted_module_class_error_names_the_file_and_how_to_allow_it():
    registry.refuse_untrusted("mixer", "gated_deltanet", "model.yaml")
    with pytest.raises(
        ConfigError, match=r"^model.yaml: mixer 'evil:Mixer' would import .* 'evil'; .*trust=True.*--trust"
    ):
        registry.refuse_untrusted("mixer", "evil:Mixer", "model.yaml")


BROKEN = [
    ("zoo_broken:Mine", "cannot be loaded: ModuleNotFoundError: No module named 'a_missing_module'"),
    ("no_such_module:Mine", "cannot be loaded: ModuleNotFoundError"),
    ("zoo_plugin:NoSuchClass", "cannot be loaded: AttributeError"),
    ("zoo_plugin:Failing", "cannot be created: RuntimeError: init failed"),
    ("zoo_plugin:Nameless", "must have a string attribute `name`, got None"),
    ("zoo_plugin:number", "must be a deltazoo.Backend, got int"),
]


@pytest.mark.parametrize(("path", "message"), BROKEN, ids=[path for path, _ in BROKEN])
def test_broken_plugin_raises_for_its_own_name_only(install, path, message):
    install("zoo-plugin", broken=path, mine="zoo_plugin:Mine")
    for name in ("broken", path):
        with pytest.raises(PluginError, match=message):
            registry.resolve(name)
    assert registry.resolve("mine").name == "mine"
    verdicts = {verdict.backend: verdict for verdict in explanation().verdicts}
    assert verdicts["broken"].reasons[0].count(message) == 1
    assert verdicts["compile"].chosen


def test_plugin_whose_check_fails_does_not_hide_the_others(install):
    install("zoo-plugin", broken_check="zoo_plugin:BrokenCheck")
    verdicts = {verdict.backend: verdict for verdict in explanation().verdicts}
    assert verdicts["broken_check"].reasons == ["its `unsupported` failed: RuntimeError: check failed"]
    assert verdicts["compile"].chosen


def test_name_declared_by_two_distributions_raises_naming_both(install):
    install("zoo-plugin", mine="zoo_plugin:Mine", fine="zoo_plugin:Mine")
    install("zoo-rival", mine="zoo_plugin:Nested.inner")
    assert registry.conflicts(registry.BACKENDS) == [
        "backend 'mine' is claimed 2 times: zoo_plugin:Mine (zoo-plugin 1.5), zoo_plugin:Nested.inner (zoo-rival 1.5). "
        "Uninstall all but one."
    ]
    with pytest.raises(DuplicateNameError, match=r"'mine' is claimed 2 times: .*zoo-plugin.*zoo-rival"):
        registry.resolve("mine")
    assert registry.resolve("fine").name == "mine"
    verdicts = {verdict.backend: verdict for verdict in explanation().verdicts}
    assert "claimed 2 times" in verdicts["mine"].reasons[0]


def test_plugin_cannot_replace_a_built_in_backend(install):
    install("zoo-plugin", reference="zoo_plugin:Mine")
    assert type(registry.resolve("reference")) is ReferenceBackend
    assert registry.owner(registry.BACKENDS, "reference").startswith("deltazoo ")
    assert registry.conflicts(registry.BACKENDS) == [
        "backend 'reference' of zoo-plugin 1.5 is ignored, because deltazoo has a backend of this name: "
        "rename it there."
    ]


def explanation():
    return explain(UpdateSpec(), UpdateMeta("cpu", torch.float32, H=1, HV=1, K=4, V=4))
