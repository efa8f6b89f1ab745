"""Dispatch: which backend is chosen, how refusals are reported, and that there is no silent fallback."""

import copy
import logging
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deltazoo import Backend, BoundUpdate, UpdateMeta, UpdateSpec, bind, explain, update, use_backend
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.io.errors import ConfigError, PluginError, UnknownNameError, UnsupportedError
from deltazoo.backends.measure.shapes import SHAPES, Shape
from deltazoo.backends.update import refusals, registry
from deltazoo.backends.update.reference import ReferenceBackend

GDN = UpdateSpec(decay="head", beta="head")
CPU = UpdateMeta("cpu", torch.float32, H=2, HV=2, K=4, V=4)


class PowersOfTwo(ReferenceBackend):
    """Supports key widths that are powers of two; counts its calls."""

    name = "powers"

    def __init__(self):
        self.calls = 0

    def unsupported(self, spec, meta):
        return [] if meta.K & (meta.K - 1) == 0 else [f"K must be a power of two, got {meta.K}."]

    def forward(self, spec, inputs):
        self.calls += 1
        return super().forward(spec, inputs)


class Never(PowersOfTwo):
    """Supports nothing: one reason holds for every tensor, the other names the dtype."""

    name = "never"

    def unsupported(self, spec, meta):
        return ["it supports nothing.", f"dtype must not be {meta.dtype}."]


@pytest.fixture
def inputs():
    return draw(Case(GDN, Shape("two tokens", B=2, T=2, H=2, HV=2, K=4, V=4)))  # traced graphs grow with T


@pytest.fixture
def no_backend_loaded(monkeypatch):
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace())


def install(monkeypatch, *backends: Backend, order: tuple[str, ...]) -> None:
    """Make these the only installed backends, with this default order."""
    by_name = {backend.name: backend for backend in backends}
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace(**by_name))
    monkeypatch.setattr(registry, "DEFAULT_ORDER", {"": order})
    monkeypatch.setattr(registry, "names", lambda group: sorted(by_name))
    monkeypatch.setattr(refusals, "_logged", set())


def test_named_backend_runs(inputs):
    backend = PowersOfTwo()
    out = bind(GDN, backend)(inputs)
    assert backend.calls == 1
    assert torch.equal(out.o, update(GDN, inputs, backend="reference").o)


def test_named_backend_that_refuses_raises_its_reasons():
    inputs = draw(Case(GDN, SHAPES["column"]))
    with pytest.raises(UnsupportedError, match="backend 'powers' cannot compute this update: K must be"):
        bind(GDN, PowersOfTwo())(inputs)
    with pytest.raises(UnsupportedError, match="K must be a power of two, got 12"):
        bind(GDN, PowersOfTwo(), CPU._replace(K=12))
    with pytest.raises(UnsupportedError, match=r"it supports nothing. dtype must not be torch\.float32"):
        update(GDN, inputs, backend=Never())


@pytest.mark.parametrize("result", [3, None, ("o", "state")])
def test_a_backend_that_returns_no_update_output_is_named(inputs, monkeypatch, result):
    monkeypatch.setattr(PowersOfTwo, "forward", lambda self, spec, inputs: result)
    with pytest.raises(PluginError, match=re.escape(f"powers.forward must return UpdateOutput, got {result!r}")):
        update(GDN, inputs, backend=PowersOfTwo())


def test_refusal_inside_torch_compile_raises_the_reasons():
    inputs = draw(Case(GDN, SHAPES["column"]))
    bound = bind(GDN, PowersOfTwo())
    with pytest.raises(Exception, match="cannot compute this update: K must be a power of two, got 6"):
        torch.compile(bound, fullgraph=True, backend="eager")(inputs)


def test_default_order_depends_on_the_device_and_excludes_the_reference():
    bound = bind(GDN)
    assert bound.backend_for(CPU).name == "compile"
    assert bound.backend_for(CPU._replace(device="cuda")).name in ("triton", "compile")
    assert bound.backend_for(CPU._replace(device="mps")).name == "compile"
    assert all(backend.name != "reference" for device in ("cpu", "cuda", "mps") for backend in bound.candidates(device))


def test_fallback_in_the_default_order_is_logged_with_reasons(monkeypatch, caplog, inputs):
    install(monkeypatch, Never(), PowersOfTwo(), order=("never", "powers"))
    with caplog.at_level(logging.WARNING, logger="deltazoo"):
        bound = bind(GDN, meta=CPU)
    assert bound.backend_for(CPU).name == "powers"
    (message,) = caplog.messages
    assert message == (
        "backend 'never' cannot run this spec on cpu: it supports nothing. dtype must not be torch.float32; "
        f"using 'powers' ({GDN!r})"
    )
    assert torch.equal(bound(inputs).o, update(GDN, inputs, backend="reference").o)


def test_refusal_of_a_spec_is_logged_by_bind_once_per_process(monkeypatch, caplog):
    install(monkeypatch, Never(), PowersOfTwo(), order=("never", "powers"))
    for _ in range(3):  # like the layers of a model
        bind(GDN)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("backend 'never' cannot run this spec on cpu: it supports nothing; using 'powers'")
    bind(UpdateSpec(beta="head"))
    assert len(caplog.records) == 2


def test_refusal_of_tensors_is_logged_by_the_first_call(monkeypatch, caplog):
    install(monkeypatch, PowersOfTwo(), ReferenceBackend(), order=("powers", "reference"))
    bound = bind(GDN)
    assert not caplog.records
    inputs = draw(Case(GDN, SHAPES["column"]))
    for call in (bound, bound, lambda x: update(GDN, x)):
        call(inputs)
    (message,) = caplog.messages
    assert "backend 'powers' cannot run this spec on cpu: K must be a power of two, got 6; using 'reference'" in message


def test_error_lists_the_reasons_of_all_candidates(monkeypatch):
    install(monkeypatch, Never(), PowersOfTwo(), order=("never", "powers"))
    with pytest.raises(UnsupportedError) as caught:
        bind(GDN).backend_for(CPU._replace(K=5))
    assert re.search(r"never: it supports nothing.*\n.*powers: K must be a power of two", str(caught.value))
    assert "no backend supports UpdateSpec(decay='head', beta='head') on UpdateMeta(" in str(caught.value)


def test_use_backend_applies_to_update_and_to_updates_bound_inside(inputs):
    outer, inner = PowersOfTwo(), PowersOfTwo()
    before = bind(GDN)
    with use_backend(outer):
        bound = bind(GDN)
        with use_backend(inner):
            update(GDN, inputs)
        update(GDN, inputs)
        update(GDN, inputs, backend="reference")
        assert before.backend_for(CPU).name == "compile"
    assert (outer.calls, inner.calls) == (1, 1)
    bound(inputs)
    assert outer.calls == 2
    assert bind(GDN).backend_for(CPU).name == "compile"


def test_use_backend_blocks_may_end_in_any_order():
    first, second = use_backend("reference"), use_backend("compile")
    first.__enter__()
    second.__enter__()  # as another thread may do
    first.__exit__(None, None, None)
    assert bind(GDN).requested == "compile"
    second.__exit__(None, None, None)
    assert bind(GDN).requested is None


def test_use_backend_ends_on_an_exception():
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"), use_backend("referenc"):
        raise AssertionError("never reached")
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        raise ZeroDivisionError
    assert bind(GDN).backend_for(CPU).name == "compile"


@pytest.mark.parametrize(
    ("backend", "T"),
    [
        *((backend, T) for backend in ("reference", CompileBackend(compiled=False)) for T in (1, 40)),
        pytest.param("compile", 40, marks=[pytest.mark.slow(reason="compiles with Inductor")]),
    ],
    ids=lambda x: str(getattr(x, "name", x)),
)
def test_autocast_does_not_change_results(backend, T):
    x = draw(Case(GDN, Shape("short", 2, T, 1, 2, 16, 16)))
    expected = bind(GDN, backend)(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = bind(GDN, backend)(x)
    torch.testing.assert_close(out, expected)
    assert out.o.dtype == torch.float32


def test_backend_holding_compiled_functions_can_be_pickled(inputs):
    bound = bind(GDN, CompileBackend(chunk=16))
    with torch.compiler.set_stance("force_eager"):  # torch.compile wraps the function, but does not generate code
        expected = bound(inputs)
        copied = pickle.loads(pickle.dumps(bound))
        assert copied.requested.chunk == 16
        torch.testing.assert_close(copied(inputs), expected)


def test_environment_variables_do_not_choose_a_backend():
    code = (
        "import torch, deltazoo as d;"
        "m = d.UpdateMeta('cpu', torch.float32, 1, 1, 4, 4);"
        "print(d.bind(d.UpdateSpec()).backend_for(m).name)"
    )
    names = ("DELTAZOO_BACKEND", "DELTAZOO", "BACKEND", "DELTAZOO_DISABLE_COMPILE")
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict.fromkeys(names, "reference")
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "compile"


@pytest.mark.graphs
@pytest.mark.parametrize("backend", [None, "compile", "reference", "deltazoo.backends.compile:CompileBackend"])
def test_update_traces_in_one_graph_before_any_backend_is_loaded(backend, inputs, no_backend_loaded):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: update(GDN, x, backend).o, fullgraph=True, backend=counter)
    expected = ReferenceBackend().forward(GDN, inputs).o
    torch.testing.assert_close(compiled(inputs), expected)
    with use_backend("reference"):
        overridden = compiled(inputs)
    torch.testing.assert_close(overridden, expected)
    if backend is None:
        assert torch.equal(overridden, expected)
    compiled(inputs)
    # use_backend causes one recompilation if no backend is named; backends loaded since cause none
    assert counter.frame_count == (1 if backend else 2)


@pytest.mark.graphs
@pytest.mark.parametrize(
    "names", [("compile", None), ("reference", None), (None, "reference"), ("compile", "reference")]
)
def test_updates_in_one_graph_use_their_own_backends(names, inputs, no_backend_loaded, monkeypatch):
    monkeypatch.setattr(registry, "DEFAULT_ORDER", {"": ("reference", "compile")})
    expected = ReferenceBackend().forward(GDN, inputs).o
    compiled = torch.compile(lambda x: [update(GDN, x, name).o for name in names], fullgraph=True, backend="eager")
    for name, o in zip(names, compiled(inputs), strict=True):
        if name == "compile":
            torch.testing.assert_close(o, expected)
        else:
            assert torch.equal(o, expected)


def test_use_backend_can_be_used_inside_a_graph(inputs, no_backend_loaded):
    def reference_update(x):
        with use_backend("reference"):
            return update(GDN, x).o

    o = torch.compile(reference_update, fullgraph=True, backend="eager")(inputs)
    assert torch.equal(o, update(GDN, inputs, "reference").o)


def test_unknown_backend_inside_a_graph_raises_our_message(inputs):
    compiled = torch.compile(lambda x: update(GDN, x, "nope").o, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"unknown backend 'nope'.* Known: compile"):
        compiled(inputs)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_copies_of_a_bound_update_ignore_use_backend(duplicate, backend, inputs):
    bound = bind(GDN, backend)
    with use_backend(Never()):
        twin = duplicate(bound)
    assert isinstance(twin, BoundUpdate)
    assert (twin.spec, twin.requested) == (bound.spec, bound.requested)
    assert twin.backend_for(CPU).name == bound.backend_for(CPU).name
    if backend:
        assert torch.equal(twin(inputs).o, bound(inputs).o)


def test_bound_update_traces_in_one_graph(inputs):
    bound = bind(GDN, "reference")
    counter = CompileCounterWithBackend("eager")
    out = torch.compile(bound, fullgraph=True, backend=counter)(inputs)
    torch.testing.assert_close(out.o, bound(inputs).o)
    assert counter.frame_count == 1


def test_explain_lists_all_backends_in_order(monkeypatch):
    install(monkeypatch, Never(), PowersOfTwo(), ReferenceBackend(), order=("never", "powers"))
    explanation = explain(GDN, CPU)
    assert [(verdict.backend, verdict.chosen) for verdict in explanation.verdicts] == [
        ("never", False),
        ("powers", True),
        ("reference", False),
    ]
    assert explanation.chosen == "powers"
    assert explanation.verdicts[2].reasons == ["supported; runs only if requested by name."]
    assert "never: it supports nothing; dtype must not be torch.float32\n" in str(explanation)


def test_explain_agrees_with_bind(monkeypatch):
    install(monkeypatch, Never(), PowersOfTwo(), ReferenceBackend(), order=("powers", "reference", "never"))
    assert explain(GDN, CPU).chosen == bind(GDN).backend_for(CPU).name == "powers"
    assert explain(GDN, CPU).verdicts[1].reasons == ["supported; an earlier backend was chosen."]
    assert explain(GDN, CPU._replace(K=3)).chosen == bind(GDN).backend_for(CPU._replace(K=3)).name == "reference"
    assert explain(GDN, CPU._replace(K=3), "powers").chosen is None
    assert explain(GDN, CPU, "reference").chosen == "reference"
    assert explain(GDN, CPU, "never").chosen is None
    with use_backend("reference"):
        assert explain(GDN, CPU).chosen == bind(GDN).backend_for(CPU).name == "reference"
    assert explain(GDN, CPU, PowersOfTwo()).chosen == "powers"
    with pytest.raises(UnknownNameError):
        explain(GDN, CPU, "power")


def test_meta_describes_the_inputs(inputs):
    assert UpdateMeta.of(inputs) == CPU
    assert UpdateMeta.of(inputs._replace(beta=inputs.beta.requires_grad_())).grad
    with torch.no_grad():
        assert not UpdateMeta.of(inputs).grad
    packed = draw(Case(GDN, SHAPES["pack"], torch.bfloat16))
    assert UpdateMeta.of(packed) == UpdateMeta("cpu", torch.bfloat16, H=2, HV=4, K=5, V=9, packed=True)


def test_backend_class_instead_of_an_instance_is_refused():
    with pytest.raises(ConfigError, match=r"backend must be a name, a Backend or None, got <class .*ReferenceBackend"):
        bind(GDN, ReferenceBackend)
    with pytest.raises(ConfigError, match="backend must be a name, a Backend or None, got 3"):
        bind(GDN, 3)


def test_decoding_requires_no_gradients(inputs):
    class NoGradients(PowersOfTwo):
        def unsupported(self, spec, meta):
            return ["it has no gradients."] if meta.grad else []

    backend: Backend = NoGradients()
    token = draw(Case(GDN, SHAPES["plain"]._replace(T=1)))
    states, expected_states = token.state.clone(), token.state.clone()
    token = token._replace(state=None, beta=token.beta.requires_grad_())
    o = bind(GDN, backend).step_(token, states)
    assert torch.equal(o, bind(GDN, "reference").step_(token, expected_states))
    assert torch.equal(states, expected_states)
    with pytest.raises(UnsupportedError, match="it has no gradients"):
        bind(GDN, backend)(token)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "meta.device must be a type of torch device such as 'cuda', got 'tpu'"),
        ({"device": "cuda:0"}, "meta.device must be a type of torch device such as 'cuda', got 'cuda:0'"),
        ({"dtype": "float32"}, "meta.dtype must be torch.float64 or torch.float32 or .*, got 'float32'"),
        ({"dtype": torch.int64}, "got torch.int64"),
        ({"H": 2, "HV": 3}, "meta.HV must be a multiple of H=2, got 3"),
        ({"K": 0}, "meta.K must be an integer >= 1, got 0"),
        ({"V": 8.0}, "meta.V must be an integer >= 1, got 8.0"),
    ],
)
def test_explain_refuses_a_meta_that_no_tensors_can_have(changes, message):
    with pytest.raises(ConfigError, match=message):
        explain(GDN, CPU._replace(**changes))
    with pytest.raises(ConfigError, match=r"meta must be a deltazoo.UpdateMeta, got \('cpu',\)"):
        explain(GDN, ("cpu",))
