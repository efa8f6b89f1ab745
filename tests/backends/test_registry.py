"""Names become objects by entry points; a plug-in that is broken or clashes hurts only its own name."""

import sys
from types import SimpleNamespace

import pytest
import torch

from deltazoo import UpdateMeta, UpdateSpec, explain
from deltazoo.backends import registry
from deltazoo.backends.errors import ConfigError, DuplicateNameError, PluginError, UnknownNameError
from deltazoo.backends.reference import ReferenceBackend

MODULE = """
from deltazoo.backends.reference import ReferenceBackend

class Mine(ReferenceBackend):
    name = "mine"

class Nested:
    inner = Mine

class Nameless(ReferenceBackend):
    name = None

class Failing(ReferenceBackend):
    def __init__(self):
        raise RuntimeError("no luck")

class Speechless(ReferenceBackend):
    def unsupported(self, spec, meta):
        raise RuntimeError("no words")

made = Mine()
number = 3
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install distributions that declare backends, for one test."""
    (tmp_path / "zoo_plugin.py").write_text(MODULE)
    (tmp_path / "zoo_broken.py").write_text("import a_module_that_is_not_there")
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


def test_our_own_backends_enter_by_the_door_of_plugins():
    assert {"reference", "compile"} <= set(registry.names(registry.BACKENDS))
    assert registry.load(registry.BACKENDS, "reference") is ReferenceBackend
    assert registry.owner(registry.BACKENDS, "reference").startswith("deltazoo ")


def test_a_plugin_is_found_by_its_name_once_installed(install):
    with pytest.raises(UnknownNameError):
        registry.load(registry.BACKENDS, "mine")
    install("zoo-plugin", mine="zoo_plugin:Mine", ready="zoo_plugin:made")
    assert {"mine", "ready"} <= set(registry.names(registry.BACKENDS))
    assert "zoo_plugin" not in sys.modules  # listing imports nothing
    assert registry.owner(registry.BACKENDS, "mine") == "zoo-plugin 1.5"
    assert registry.resolve("mine").name == "mine"
    assert registry.resolve("ready") is sys.modules["zoo_plugin"].made


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    with pytest.raises(
        UnknownNameError, match=r"unknown backend 'referense'; did you mean 'reference'\? Known: .*comp"
    ):
        registry.load(registry.BACKENDS, "referense")


def test_module_and_class_name_a_backend_without_installing(install):
    assert type(registry.resolve("zoo_plugin:Mine")).__name__ == "Mine"
    assert type(registry.resolve("zoo_plugin:Nested.inner")).__name__ == "Mine"


def test_an_untrusted_module_and_class_is_refused_with_the_file_and_the_remedy():
    registry.refuse_untrusted("mixer", "gated_deltanet", "model.yaml")
    with pytest.raises(
        ConfigError, match=r"^model.yaml: mixer 'evil:Mixer' would import .* 'evil'; .*trust=True.*--trust"
    ):
        registry.refuse_untrusted("mixer", "evil:Mixer", "model.yaml")


BROKEN = [
    ("zoo_broken:Mine", "cannot be loaded: ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
    ("no_such_module:Mine", "cannot be loaded: ModuleNotFoundError"),
    ("zoo_plugin:NoSuchClass", "cannot be loaded: AttributeError"),
    ("zoo_plugin:Failing", "cannot be created: RuntimeError: no luck"),
    ("zoo_plugin:Nameless", "must have a string attribute `name`, got None"),
    ("zoo_plugin:number", "must be a deltazoo.Backend, got int"),
]


@pytest.mark.parametrize(("path", "words"), BROKEN, ids=[path for path, _ in BROKEN])
def test_a_broken_plugin_is_an_error_in_words_for_its_own_name(install, path, words):
    install("zoo-plugin", broken=path, mine="zoo_plugin:Mine")
    for name in ("broken", path):
        with pytest.raises(PluginError, match=words):
            registry.resolve(name)
    assert registry.resolve("mine").name == "mine"
    told = {verdict.backend: verdict for verdict in _explained().verdicts}
    assert told["broken"].reasons[0].find(words) > 0
    assert told["compile"].chosen


def test_a_plugin_that_cannot_say_whether_it_can_does_not_silence_the_others(install):
    install("zoo-plugin", mute="zoo_plugin:Speechless")
    told = {verdict.backend: verdict for verdict in _explained().verdicts}
    assert told["mute"].reasons == ["its `unsupported` failed: RuntimeError: no words"]
    assert told["compile"].chosen


def test_a_name_that_two_distributions_claim_is_an_error_naming_both(install):
    install("zoo-plugin", mine="zoo_plugin:Mine", fine="zoo_plugin:Mine")
    install("zoo-rival", mine="zoo_plugin:Nested.inner")
    assert registry.duplicates(registry.BACKENDS) == ["mine"]
    with pytest.raises(DuplicateNameError, match=r"'mine' is claimed 2 times: .*zoo-plugin.*zoo-rival"):
        registry.resolve("mine")
    assert registry.resolve("fine").name == "mine"
    told = {verdict.backend: verdict for verdict in _explained().verdicts}
    assert "claimed 2 times" in told["mine"].reasons[0]


def test_one_plugin_may_not_take_the_name_of_ours(install):
    install("zoo-plugin", reference="zoo_plugin:Mine")
    with pytest.raises(DuplicateNameError, match=r"'reference' is claimed 2 times: .*deltazoo.*zoo-plugin"):
        registry.resolve("reference")


def _explained():
    return explain(UpdateSpec(), UpdateMeta("cpu", torch.float32, H=1, HV=1, K=4, V=4))
