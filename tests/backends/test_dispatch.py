"""The only dispatch: who is chosen, who refuses and why, and that nothing falls back in silence."""

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
from deltazoo.backends import dispatch, registry
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.errors import UnknownNameError, UnsupportedError
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.shapes import SHAPES, Shape

GDN = UpdateSpec(decay="head", beta="head")
CPU = UpdateMeta("cpu", torch.float32, H=2, HV=2, K=4, V=4)


class Picky(ReferenceBackend):
    """Takes widths that are powers of two; remembers what it was asked for."""

    name = "picky"

    def __init__(self):
        self.calls = 0

    def unsupported(self, spec, meta):
        return [] if meta.K & (meta.K - 1) == 0 else [f"picky wants K to be a power of two, got {meta.K}"]

    def forward(self, spec, inputs):
        self.calls += 1
        return super().forward(spec, inputs)


class Never(Picky):
    name = "never"

    def unsupported(self, spec, meta):
        return ["never takes nothing at all, by principle", f"and no {meta.dtype} either"]


@pytest.fixture
def inputs():
    return draw(Case(GDN, SHAPES["plain"]))


def test_a_named_backend_runs_and_no_other(inputs):
    picky = Picky()
    out = bind(GDN, picky)(inputs)
    assert picky.calls == 1
    assert torch.equal(out.o, update(GDN, inputs, backend="reference").o)


def test_a_named_backend_that_cannot_is_an_error_with_its_reasons_and_no_fallback():
    inputs = draw(Case(GDN, SHAPES["column"]))
    with pytest.raises(UnsupportedError, match="picky: picky wants K to be a power of two, got 6"):
        bind(GDN, Picky())(inputs)
    with pytest.raises(UnsupportedError, match="picky wants K to be a power of two, got 12"):
        bind(GDN, Picky(), CPU._replace(K=12))
    with pytest.raises(UnsupportedError, match=r"by principle and no torch\.float32 either"):
        update(GDN, inputs, backend=Never())


def test_a_refusal_is_said_under_torch_compile_too():
    inputs = draw(Case(GDN, SHAPES["column"]))
    bound = bind(GDN, Picky())
    with pytest.raises(Exception, match="picky: picky wants K to be a power of two, got 6"):
        torch.compile(bound, fullgraph=True, backend="aot_eager")(inputs)


def test_without_a_name_the_default_of_the_device_runs_and_never_the_reference():
    bound = bind(GDN)
    assert bound.backend_for(CPU).name == "compile"
    assert bound.backend_for(CPU._replace(device="cuda")).name in ("triton", "compile")
    assert bound.backend_for(CPU._replace(device="mps")).name == "compile"
    assert all(backend.name != "reference" for device in ("cpu", "cuda", "mps") for backend in bound.candidates(device))


def test_a_preferred_backend_that_is_passed_over_is_logged_with_its_reasons(monkeypatch, caplog, inputs):
    _install(monkeypatch, Never(), Picky(), order=("never", "picky"))
    with caplog.at_level(logging.WARNING, logger="deltazoo"):
        bound = bind(GDN, meta=CPU)
    assert bound.backend_for(CPU).name == "picky"
    assert "backend 'never' cannot run this spec on cpu: " in caplog.text
    assert "by principle and no torch.float32 either" in caplog.text
    assert torch.equal(bound(inputs).o, update(GDN, inputs, backend="reference").o)


def test_a_refusal_of_the_spec_is_logged_at_bind_once_in_a_process(monkeypatch, caplog):
    _install(monkeypatch, Never(), Picky(), order=("never", "picky"))
    for _ in range(3):  # as the layers of a model do
        bind(GDN)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "backend 'never' cannot run this spec on cpu: " in record.message
    assert "by principle" in record.message
    assert "float32" not in record.message, "a dtype nobody gave"
    bind(UpdateSpec(beta="head"))
    assert len(caplog.records) == 2


def test_a_refusal_of_tensors_is_logged_when_they_come_and_not_before(monkeypatch, caplog):
    _install(monkeypatch, Picky(), ReferenceBackend(), order=("picky", "reference"))
    bound = bind(GDN)
    assert not caplog.records
    inputs = draw(Case(GDN, SHAPES["column"]))
    for call in (bound, bound, lambda x: update(GDN, x)):
        call(inputs)
    (record,) = caplog.records
    assert "backend 'picky' cannot run this spec on cpu: " in record.message
    assert "picky wants K to be a power of two, got 6" in record.message


@pytest.mark.parametrize("there", [True, False])
def test_what_the_kernels_refuse_is_logged_at_bind_where_a_gpu_is(there, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    bind(GDN)
    bind(UpdateSpec(decay="channel", transition="dplr"), "reference")
    assert "must be" not in caplog.text
    bind(UpdateSpec(decay="channel", transition="dplr"))
    said = [record.message for record in caplog.records if "transition must be" in record.message]
    assert len(said) == int(there)
    if there:
        assert said[0].startswith("backend 'triton' cannot run this spec on cuda: ")
        assert "decay must be 'none', 'fixed' or 'head', got 'channel'." in said[0]


def test_when_no_default_can_every_one_says_why(monkeypatch):
    _install(monkeypatch, Never(), Picky(), order=("never", "picky"))
    with pytest.raises(UnsupportedError) as caught:
        bind(GDN).backend_for(CPU._replace(K=5))
    assert re.search(r"never: never takes nothing.*\n.*picky: picky wants K", str(caught.value))


def test_use_backend_governs_update_and_what_is_built_inside(inputs):
    outer, inner = Picky(), Picky()
    before = bind(GDN)
    with use_backend(outer):
        built = bind(GDN)
        with use_backend(inner):
            update(GDN, inputs)
        update(GDN, inputs)
        update(GDN, inputs, backend="reference")
        assert before.backend_for(CPU).name == "compile"
    assert (outer.calls, inner.calls) == (1, 1)
    built(inputs)
    assert outer.calls == 2
    assert bind(GDN).backend_for(CPU).name == "compile"


def test_a_block_of_use_backend_that_ends_leaves_another_s_choice():
    first, second = use_backend("reference"), use_backend("compile")
    first.__enter__()
    second.__enter__()  # as in another thread
    first.__exit__(None, None, None)
    assert bind(GDN).requested == "compile"
    second.__exit__(None, None, None)
    assert bind(GDN).requested is None


@pytest.mark.parametrize(
    "backend", ["reference", "compile", CompileBackend(compiled=False)], ids=["reference", "compile", "eager"]
)
@pytest.mark.parametrize("T", [1, 40])
def test_autocast_changes_nothing(backend, T):
    x = draw(Case(GDN, Shape("short", 2, T, 1, 2, 16, 16)))
    want = bind(GDN, backend)(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = bind(GDN, backend)(x)
    torch.testing.assert_close(got, want)
    assert got.o.dtype == torch.float32


def test_a_backend_that_has_compiled_is_pickled_by_how_it_was_made(inputs):
    bound = bind(GDN, CompileBackend(chunk=16))
    want = bound(inputs)
    again = pickle.loads(pickle.dumps(bound))
    assert again.requested.chunk == 16
    torch.testing.assert_close(again(inputs), want)


def test_use_backend_ends_with_its_block_even_by_an_error():
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"), use_backend("referenc"):
        raise AssertionError("never reached")
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        raise ZeroDivisionError
    assert bind(GDN).backend_for(CPU).name == "compile"


def test_no_environment_variable_chooses_a_backend():
    code = (
        "import torch, deltazoo as d;"
        "m = d.UpdateMeta('cpu', torch.float32, 1, 1, 4, 4);"
        "print(d.bind(d.UpdateSpec()).backend_for(m).name)"
    )
    names = ("DELTAZOO_BACKEND", "DELTAZOO", "BACKEND", "DELTAZOO_DISABLE_COMPILE")
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict.fromkeys(names, "reference")
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "compile"


@pytest.mark.parametrize("backend", [None, "compile", "reference", "deltazoo.backends.compile:CompileBackend"])
def test_update_alone_is_one_graph_where_nothing_was_looked_up_before(backend, inputs, monkeypatch):
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace())
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: update(GDN, x, backend).o, fullgraph=True, backend=graphs)
    got = compiled(inputs)
    torch.testing.assert_close(got, update(GDN, inputs, backend).o)
    with use_backend("reference"):
        asked = compiled(inputs)
    torch.testing.assert_close(asked, update(GDN, inputs, backend or "reference").o)
    compiled(inputs)
    assert graphs.frame_count == (1 if backend else 2)  # none for what was loaded meanwhile


@pytest.mark.parametrize(
    "names", [("compile", None), ("reference", None), (None, "reference"), ("compile", "reference")]
)
def test_each_update_of_a_graph_takes_what_it_would_alone(names, inputs, monkeypatch):
    monkeypatch.setattr(registry, "DEFAULT_ORDER", {"": ("reference", "compile")})
    want = [update(GDN, inputs, name or "reference").o for name in names]
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace())
    compiled = torch.compile(lambda x: [update(GDN, x, name).o for name in names], fullgraph=True, backend="eager")
    for name, got, exactly in zip(names, compiled(inputs), want, strict=True):
        if name == "compile":
            torch.testing.assert_close(got, exactly)
        else:
            assert torch.equal(got, exactly)


def test_use_backend_may_stand_in_a_graph(inputs, monkeypatch):
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace())

    def by_the_reference(x):
        with use_backend("reference"):
            return update(GDN, x).o

    got = torch.compile(by_the_reference, fullgraph=True, backend="eager")(inputs)
    assert torch.equal(got, update(GDN, inputs, "reference").o)


def test_an_unknown_backend_in_a_graph_is_a_sentence(inputs):
    compiled = torch.compile(lambda x: update(GDN, x, "nope").o, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"unknown backend 'nope'.* Known: compile"):
        compiled(inputs)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("asked", [None, "reference"])
def test_a_bound_update_survives_copying_and_pickling_as_it_was(again, asked, inputs):
    bound = bind(GDN, asked)
    with use_backend(Never()):
        twin = again(bound)
    assert isinstance(twin, BoundUpdate)
    assert (twin.spec, twin.requested) == (bound.spec, bound.requested)
    assert twin.backend_for(CPU).name == bound.backend_for(CPU).name
    if asked:
        assert torch.equal(twin(inputs).o, bound(inputs).o)


def test_a_bound_update_traces_in_one_graph(inputs):
    bound = bind(GDN, "reference")
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    out = torch.compile(bound, fullgraph=True, backend=keep)(inputs)
    torch.testing.assert_close(out.o, bound(inputs).o)
    assert len(graphs) == 1


def test_explain_tells_of_every_backend_in_order(monkeypatch):
    _install(monkeypatch, Never(), Picky(), ReferenceBackend(), order=("never", "picky"))
    told = explain(GDN, CPU)
    assert [(verdict.backend, verdict.chosen) for verdict in told.verdicts] == [
        ("never", False),
        ("picky", True),
        ("reference", False),
    ]
    assert told.chosen == "picky"
    assert told.verdicts[2].reasons == ["supported; runs when requested by name."]
    assert "never: never takes nothing at all, by principle" in str(told)


def test_explain_agrees_with_what_bind_does(monkeypatch):
    _install(monkeypatch, Never(), Picky(), ReferenceBackend(), order=("picky", "never"))
    assert explain(GDN, CPU).chosen == bind(GDN).backend_for(CPU).name == "picky"
    assert explain(GDN, CPU._replace(K=3)).chosen is None
    assert explain(GDN, CPU, "reference").chosen == "reference"
    assert explain(GDN, CPU, "never").chosen is None
    with use_backend("reference"):
        assert explain(GDN, CPU).chosen == bind(GDN).backend_for(CPU).name == "reference"
    mine = Picky()
    assert explain(GDN, CPU, mine).chosen == "picky"
    with pytest.raises(UnknownNameError):
        explain(GDN, CPU, "piky")


def test_meta_is_read_off_the_inputs(inputs):
    assert UpdateMeta.of(inputs) == CPU
    assert UpdateMeta.of(inputs._replace(beta=inputs.beta.requires_grad_())).grad
    with torch.no_grad():
        assert not UpdateMeta.of(inputs).grad
    packed = draw(Case(GDN, SHAPES["pack"], torch.bfloat16))
    assert UpdateMeta.of(packed) == UpdateMeta("cpu", torch.bfloat16, H=2, HV=4, K=5, V=9, packed=True)


def test_a_backend_that_is_no_backend_is_refused_in_words():
    with pytest.raises(TypeError, match=r"backend must be a name, a Backend or None, got <class .*ReferenceBackend"):
        bind(GDN, ReferenceBackend)


def test_decoding_asks_for_no_gradients(inputs):
    class NoGrad(Picky):
        def unsupported(self, spec, meta):
            return ["it has no gradients, and they were asked for"] if meta.grad else []

    backend: Backend = NoGrad()
    token = draw(Case(GDN, SHAPES["plain"]._replace(T=1)))
    states, twin = token.state.clone(), token.state.clone()
    token = token._replace(state=None, beta=token.beta.requires_grad_())
    o = bind(GDN, backend).step_(token, states)
    want = bind(GDN, "reference").step_(token, twin)
    assert torch.equal(o, want)
    assert torch.equal(states, twin)
    with pytest.raises(UnsupportedError, match="they were asked for"):
        bind(GDN, backend)(token)


def _install(monkeypatch, *backends: Backend, order: tuple[str, ...]) -> None:
    """Let these be all the backends there are, with this order of preference."""
    found = {backend.name: backend for backend in backends}
    monkeypatch.setattr(registry, "_loaded", SimpleNamespace(**found))
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(registry, "DEFAULT_ORDER", {"": order})
    monkeypatch.setattr(registry, "names", lambda group: sorted(found))
