"""Adapters to other packages: mapping of operands and results, and refusals.

The packages are replaced by fakes, which compute what the documentation of the real functions specifies.
"""

import functools
import importlib.machinery
import itertools
import json
import os
import subprocess
import sys
import types

import pytest
import torch

from deltazoo import UpdateInputs, UpdateMeta, UpdateSpec, explain
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.measure.benchmark import BenchConfig, bench
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.peers.cudnn import CudnnBackend
from deltazoo.backends.peers.fla import FlaBackend
from deltazoo.backends.peers.flash_qla import FlashQlaBackend
from deltazoo.backends.peers.flashinfer import FlashInferBackend
from deltazoo.backends.update import registry
from deltazoo.backends.update.reference import ReferenceBackend

GATED = UpdateSpec(decay="head", beta="head")
PEERS = (CudnnBackend, FlaBackend, FlashQlaBackend, FlashInferBackend)
PACKAGES = {"cudnn", "fla", "flash_qla", "flashinfer", "cutlass", "tvm_ffi"}
SCALAR_PEERS = (FlashQlaBackend, FlashInferBackend)
SPECS = {
    "gated": GATED,
    "scaled": UpdateSpec(decay="head", beta="head", scale=0.25),
    "fixed": UpdateSpec(decay="fixed", beta="head"),
    "no beta": UpdateSpec(decay="head"),
    "negative": UpdateSpec(decay="head", beta="head", negative_eigenvalues="both"),
    "efla": UpdateSpec(decay="head", beta="head", reparam="efla"),
    "delta": UpdateSpec(beta="head"),
    "mamba2": UpdateSpec(decay="head", transition="additive", beta="head"),
    "retnet": UpdateSpec(decay="fixed", transition="additive"),
    "linear": UpdateSpec(transition="additive"),
    "kda": UpdateSpec(decay="channel", beta="head"),
    "kda without beta": UpdateSpec(decay="channel", scale=0.25),
    "kda efla": UpdateSpec(decay="channel", beta="head", reparam="efla"),
    "gdn2": UpdateSpec(decay="channel", beta="channel"),
    "gla": UpdateSpec(decay="channel", transition="additive"),
    "gla with beta": UpdateSpec(decay="channel", transition="additive", beta="head"),
    "rwkv7": UpdateSpec(decay="channel", transition="dplr"),
}
SUPPORTED = {
    CudnnBackend: ["kda", "kda without beta", "kda efla"],
    FlaBackend: list(SPECS),
    FlashQlaBackend: ["gated", "scaled", "fixed", "no beta"],
    FlashInferBackend: ["gated", "scaled", "fixed", "no beta", "delta"],
}
DENSE = Shape("dense", 2, 9, 2, 2, 4, 6)
GROUPED = Shape("grouped", 2, 9, 2, 4, 4, 4)
PACK = Shape("pack", 1, 9, 2, 2, 4, 4, (4, 0, 5))


def reference(q, k, v, g, beta, scale, state, cu, transition="delta", **others):
    spec = UpdateSpec(
        decay="none" if g is None else {1: "fixed", 3: "head", 4: "channel"}[g.dim()],
        transition=transition,
        beta="channel" if "erase" in others else "none" if beta is None else "head",
        scale=scale,
    )
    inputs = UpdateInputs(q, k, v, log_decay=g, beta=beta, state=state, cu_seqlens=cu, **others)
    return ReferenceBackend().forward(spec, inputs)


def gated(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state
    assert scale is not None
    assert g is None or (g.shape == v.shape[:3] and g.dtype == torch.float32)
    assert beta.shape == v.shape[:3]
    return tuple(reference(q, k, v, g, beta, scale, initial_state, cu_seqlens))


def delta(q, k, v, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    return gated(q, k, v, None, beta, scale, initial_state, output_final_state, cu_seqlens)


def simple(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state
    assert g is None or g_gamma is None
    decay = g if g_gamma is None else g_gamma
    return tuple(reference(q, k, v, decay, None, scale, initial_state, cu_seqlens, "additive"))


def kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert g.shape == (*v.shape[:3], q.shape[-1])
    assert g.dtype == torch.float32
    assert beta.shape == v.shape[:3]
    return tuple(reference(q, k, v, g, beta, scale, initial_state, cu_seqlens))


def gdn2(q, k, v, g, b, w, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert g.shape == b.shape == q.shape
    assert w.shape == v.shape
    return tuple(reference(q, k, v, g, None, scale, initial_state, cu_seqlens, erase=b, write=w))


def gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert g.shape == q.shape
    return tuple(reference(q, k, v, g, None, scale, initial_state, cu_seqlens, "additive"))


def recurrent_gla(q, k, v, gk=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    return gla(q, k, v, gk, scale, initial_state, output_final_state, cu_seqlens)


def dplr(q, k, v, a, b, gk, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert gk.shape == a.shape == b.shape == q.shape
    return tuple(reference(q, k, v, gk, None, scale, initial_state, cu_seqlens, "dplr", a=a, b=b))


def cudnn_kda(q, k, v, g, beta, cu_seqlens, scale=None, initial_state=None, output_final_state=False):
    """Packed, states [N, HV, V, K]."""
    assert q.dim() == 3
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state) if x is not None)
    assert g.dtype == beta.dtype == torch.float32
    state = None if initial_state is None else initial_state.mT
    o, after = reference(q[None], k[None], v[None], g[None], beta[None], scale, state, cu_seqlens)
    return o[0], after.mT.contiguous()


def prefill(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
    output_state=None, max_seqlen=None,
):  # fmt: skip
    """Packed, gates as factors, states [N, HV, V, K]."""
    assert q.dim() == 3
    assert all(x.is_contiguous() for x in (q, k, v, g, beta, initial_state) if x is not None)
    beta = torch.ones(v.shape[:2]) if beta is None else beta
    state = None if initial_state is None else initial_state.mT
    lengths = cu_seqlens.diff()
    assert max_seqlen is None or max_seqlen == int(lengths.max())
    o, after = reference(
        q[None], k[None], v[None], None if g is None else g.log()[None], beta[None], scale, state, cu_seqlens
    )
    return o[0], output_state.copy_(after.mT)


def forwarding(function):
    """Wrap a function as flash-linear-attention does to forward calls to FlashQLA if that is installed."""

    @functools.wraps(function)
    def dispatch(*args, **kwargs):
        pytest.fail(f"{function.__name__} was forwarded to another package")

    return dispatch


@pytest.fixture
def installed(monkeypatch):
    """Fakes of the packages in sys.modules."""
    modules = {
        "fla": {}, "fla.ops": {}, "flash_qla": {"chunk_gated_delta_rule": gated}, "flashinfer": {}, "cutlass": {},
        "fla.ops.gated_delta_rule": {
            "chunk_gated_delta_rule": gated, "fused_recurrent_gated_delta_rule": gated,
        },
        "fla.ops.delta_rule": {"chunk_delta_rule": delta},
        "fla.ops.simple_gla": {"chunk_simple_gla": simple, "fused_recurrent_simple_gla": simple},
        "fla.ops.kda": {"chunk_kda": kda, "fused_recurrent_kda": kda},
        "fla.ops.gdn2": {"chunk_gdn2": gdn2, "fused_recurrent_gdn2": gdn2},
        "fla.ops.gla": {"chunk_gla": gla, "fused_recurrent_gla": recurrent_gla},
        "fla.ops.generalized_delta_rule": {"chunk_dplr_delta_rule": dplr, "fused_recurrent_dplr_delta_rule": dplr},
        "cudnn": {}, "cudnn.linear_attention": {}, "tvm_ffi": {},
        "cudnn.linear_attention.ops": {"kimi_delta_attention": cudnn_kda},
        "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": prefill},
    }  # fmt: skip
    monkeypatch.setattr("deltazoo.backends.peers.fla._functions", {})
    for name, functions in modules.items():
        if name.startswith("fla."):
            functions = {function_name: forwarding(function) for function_name, function in functions.items()}
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


def supports(peer, spec, shape, grad=False):
    """Whether the adapter supports the spec at K = V = 128 on a GPU."""
    meta = UpdateMeta("cuda", torch.bfloat16, shape.H, shape.HV, 128, 128, bool(shape.lengths), grad)
    return not peer.unsupported(spec, meta)


@pytest.mark.parametrize(
    ("peer", "spec"),
    [(peer, spec) for peer, names in SUPPORTED.items() for spec in names],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_adapter_computes_the_spec(installed, peer, spec):
    backend = peer()
    shapes = [shape for shape in (DENSE, GROUPED, PACK) if supports(backend, SPECS[spec], shape)]
    assert DENSE in shapes
    for shape, state in itertools.product(shapes, ("given", "none")):
        inputs = draw(Case(SPECS[spec], shape._replace(V=4 if peer is FlashInferBackend else shape.V), state=state))
        out, expected = backend.forward(SPECS[spec], inputs), ReferenceBackend().forward(SPECS[spec], inputs)
        torch.testing.assert_close(out.o, expected.o, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out.state, expected.state, rtol=1e-5, atol=1e-6)


def test_adapter_refuses_the_other_specs(installed):
    supported = {peer: [name for name, spec in SPECS.items() if supports(peer(), spec, DENSE)] for peer in PEERS}
    assert supported == SUPPORTED
    assert supports(FlaBackend(), GATED, GROUPED, grad=True)
    assert supports(FlashQlaBackend(), GATED, PACK, grad=True)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradients_pass_through_the_adapter(installed, spec):
    inputs = draw(Case(spec, DENSE))
    leaves = [x.requires_grad_() for x in inputs if x is not None]

    def gradients(backend):
        out = backend.forward(spec, inputs)
        return torch.autograd.grad(out.o.square().sum() + out.state.sum(), leaves)

    for grad, expected in zip(gradients(FlaBackend()), gradients(ReferenceBackend()), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots", [None, torch.tensor([2, 0])], ids=["rows", "slots"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_fla_decodes_in_place(installed, spec, slots):
    inputs = draw(Case(spec, DENSE._replace(T=1)))
    states = inputs.state if slots is None else torch.cat([inputs.state, inputs.state])[:3].clone()
    expected_states = states.clone()
    token = inputs._replace(state=None)
    expected = ReferenceBackend().step_(spec, token, expected_states, slots)
    o = FlaBackend().step_(spec, token, states, slots)
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-6)


REFUSALS = {
    ("fla", "K must be at most 256, got 512."): (GATED, {"K": 512}),
    ("fla", "chunk_delta_rule needs HV = H, got HV=4, H=2."): (SPECS["delta"], {"HV": 4}),
    ("fla", "chunk_gla needs HV = H, got HV=4, H=2."): (SPECS["gla"], {"HV": 4}),
    ("cudnn", "decay must be per channel, got 'head'."): (GATED, {}),
    ("cudnn", "transition must be 'delta', got 'dplr'."): (SPECS["rwkv7"], {}),
    ("cudnn", "beta must be 'none' or 'head', got 'channel'."): (SPECS["gdn2"], {}),
    ("cudnn", "K and V must be 128, got K=64, V=128."): (SPECS["kda"], {"K": 64}),
    ("fla", "scale must be above 0, got 0.0."): (UpdateSpec(decay="head", beta="head", scale=0), {}),
    ("flash_qla", "decay must be 'fixed' or 'head', got 'none'."): (SPECS["delta"], {}),
    ("flash_qla", "negative_eigenvalues must be 'off', got 'both'."): (SPECS["negative"], {}),
    ("flash_qla", "reparam must be 'none', got 'efla'."): (SPECS["efla"], {}),
    ("flash_qla", "transition must be 'delta', got 'additive'."): (SPECS["retnet"], {}),
    ("flash_qla", "K and V must be 128, got K=64, V=128."): (GATED, {"K": 64}),
    ("flashinfer", "it has no backward, and a gradient is required."): (GATED, {"grad": True}),
    ("flashinfer", "K and V must be 128, got K=128, V=256."): (GATED, {"V": 256}),
}
COMMON = {
    "it needs tensors on 'cuda', got 'cpu'.": (GATED, {"device": "cpu"}),
    "got float32.": (GATED, {"dtype": torch.float32}),
    "erase_key must be 'key', got 'own'.": (UpdateSpec(decay="head", erase_key="own"), {}),
    "erase_from must be 'decayed', got 'previous'.": (UpdateSpec(decay="head", erase_from="previous"), {}),
    "beta='separate' needs an erase and a write strength per head; it has one": (UpdateSpec(beta="separate"), {}),
    "needs separate erase and write strengths": (UpdateSpec(beta="head", negative_eigenvalues="erase"), {}),
    "householders must be 1, got 3.": (UpdateSpec(decay="head", householders=3), {}),
    "read must be 'after', got 'before'.": (UpdateSpec(decay="head", read="before"), {}),
}
SCALAR = {
    "decay must be 'none', 'fixed' or 'head', got 'channel'.": (UpdateSpec(decay="channel"), {}),
    "a fixed decay must have one value per head": (SPECS["fixed"], {"decay_channels": True}),
    "transition must be 'additive' or 'delta', got 'dplr'.": (UpdateSpec(transition="dplr"), {}),
    "beta must be 'none' or 'head', got 'channel'.": (UpdateSpec(beta="channel"), {}),
}
ALL = {
    **REFUSALS,
    **{(peer.name, message): case for peer in PEERS for message, case in COMMON.items()},
    **{(peer.name, message): case for peer in SCALAR_PEERS for message, case in SCALAR.items()},
}


@pytest.mark.parametrize(("expected", "case"), ALL.items(), ids=[f"{name}-{message[:30]}" for name, message in ALL])
def test_refusal_states_the_reason(installed, expected, case):
    (name, message), (spec, change) = expected, case
    meta = UpdateMeta("cuda", torch.bfloat16, 2, 2, 128, 128)._replace(**change)
    reasons = registry.resolve(name).unsupported(spec, meta)
    assert any(message in reason for reason in reasons), reasons
    assert all(reason.endswith(".") for reason in reasons)


def test_missing_package_is_reported_with_the_install_command():
    meta = UpdateMeta("cuda", torch.bfloat16, 2, 2, 128, 128)
    packages = {
        "cudnn": "nvidia-cudnn-frontend", "fla": "fla-core",
        "flash_qla": "flash-qla", "flashinfer": "flashinfer-python",
    }  # fmt: skip
    for name, package in packages.items():
        reasons = registry.resolve(name).unsupported(GATED, meta)
        assert reasons[0] == f"it needs the package {name}, which is not installed: pip install {package}."


def test_adapters_are_not_in_the_default_order(installed):
    assert {"cudnn", "fla", "flash_qla", "flashinfer"} <= set(registry.names(registry.BACKENDS))
    for order in registry.DEFAULT_ORDER.values():
        assert not {"cudnn", "fla", "flash_qla", "flashinfer"} & set(order)
    verdicts = {v.backend: v for v in explain(GATED, UpdateMeta("cuda", torch.bfloat16, 2, 2, 128, 128)).verdicts}
    for name in ("fla", "flash_qla", "flashinfer"):
        assert not verdicts[name].chosen
        assert verdicts[name].reasons == ["supported; runs only if requested by name."]


def test_benchmark_row_reports_a_missing_package():
    result = bench(GATED, [DENSE], ["reference", "fla"], BenchConfig(rounds=3, seconds=0.1, directions=("forward",)))
    assert result.rows[0].median_ms is not None
    assert "it needs the package fla" in result.rows[1].refused[0]


def test_listing_and_explaining_do_not_import_the_packages_nor_the_compiler(tmp_path):
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
    code = (
        "import json, sys, torch, deltazoo; from deltazoo.blocks.inspect.catalog import catalog; "
        "from deltazoo.backends.update import registry; from deltazoo.mixers.core.config import parse; "
        "torch.set_default_device('meta'); "
        "[parse({'mixer': name}).build(128) for name in registry.names(registry.MIXERS)]; "
        "meta = deltazoo.UpdateMeta('cuda', torch.bfloat16, 2, 2, 128, 128); "
        "verdicts = deltazoo.explain(deltazoo.UpdateSpec(decay='head', beta='head'), meta).verdicts; "
        "rows = [[v.backend, v.reasons] for v in verdicts] + [[e.name, e.problem] for e in catalog().backends]; "
        f"print(json.dumps([*rows, sorted({{*sys.modules}} & {{'torch._dynamo', *{PACKAGES}}})]))"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path}, check=False
    )
    assert process.returncode == 0, process.stderr
    *reasons, imported = json.loads(process.stdout)
    assert imported == []
    assert ["fla", ["supported; runs only if requested by name."]] in reasons
    assert ["flashinfer", None] in reasons
