"""`explain` of a module lists what runs on a GPU: compared with plans, with real launches, and by its reasons."""

import re
import sys
from collections import Counter

import pytest
import torch
from small_configs import OURS, small
from torch import nn

from deltazoo import UpdateMeta, UpdateSpec, explain, watch
from deltazoo.backends.io.errors import ConfigError, UnsupportedError, ValueRangeError
from deltazoo.backends.torch_ext.devices import DeviceSpec, simulated_device
from deltazoo.backends.update import registry
from deltazoo.backends.update.watch import RunRecord
from deltazoo.blocks.inspect.explain_module import ModuleExplanation
from deltazoo.blocks.model.layer import Layer, LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import DeltaNet, FoX, GatedDeltaNet, Mamba2, Mamba3, PathAttention
from deltazoo.mixers.core.config import parse
from deltazoo.mixers.core.mixer import Mixer, MixerConfig, Place

pytest.importorskip("triton", reason="the launches need the package triton")
from triton_cases import INTERPRETED, needs_triton

H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"


def layer(mixer: MixerConfig, width: int = 48) -> Layer:
    return LayerSpec(mixer=mixer, mlp=Dense(width=32)).build(width, Place(0, 1))


def names(runs: list[RunRecord]) -> Counter[str]:
    return Counter(run.name for run in runs)


def run_as_explained(module: Mixer | Layer, x: torch.Tensor) -> list[list[RunRecord]]:
    """Return the records of training, of a prompt and of decoding."""
    logs = []
    with watch() as log:
        module.train()
        y = module(x.clone().requires_grad_())[0]
        y.backward(torch.ones_like(y))
    logs.append(log.runs)
    module.eval()
    for tokens in (x, x[:, :1]):
        with watch() as log, torch.no_grad():
            module(tokens, module.init_state(x.shape[0], x.shape[1] + 1))
        logs.append(log.runs)
    return logs


def test_a_layer_lists_its_operators_and_the_kernels_of_its_update() -> None:
    mixer = GatedDeltaNet(heads=2, key_width=64, value_width=64)
    explained = explain(layer(mixer, 128).bfloat16(), shape=(2, 300), device=H200)
    operators = names(explained.of("training").operators)
    assert operators == {"rms norm": 3, "short conv": 1, "update": 1, "gated MLP": 1}
    assert all(run.backend == "triton" for run in explained.of("training").operators)
    meta = UpdateMeta("cuda", torch.bfloat16, H=2, HV=2, K=64, V=64, grad=True)
    plan = explain(mixer.spec(), meta, shape=(2, 300), device=H200).plan
    assert plan is not None
    launched = names(explained.of("training").launches)
    planned = [line.split(": ", 1)[1] for line in plan.splitlines() if "->" in line]
    for name, count in Counter(" -> ".join(planned).replace(" ", "").split("->")).items():
        assert launched[name] == count
    beside = {"rms_norm_kernel": 3, "rms_norm_backward_kernel": 3, "glu_kernel": 1, "glu_backward_kernel": 1}
    assert beside.items() <= launched.items()
    decoding = names(explained.of("decoding").launches)
    assert sum(n for name, n in decoding.items() if re.fullmatch(r"few_rows(_sm90)?_kernel", name)) == 4
    assert decoding["fused_step_kernel"] == 1


def test_reasons_name_the_device_the_dtype_and_the_hook() -> None:
    path = explain(PathAttention(heads=2).build(32), shape=(1, 70), device=A100)
    assert "needs a Hopper GPU" in {run.name: run.reason for run in path.of("training").operators}["PaTH attention"]
    amd = explain(FoX(heads=2).build(32), shape=(1, 70), device="AMD Instinct MI300X")
    assert "is an AMD GPU" in amd.of("training").operators[0].reason
    double = explain(layer(Mamba2(value_heads=2)).double(), shape=(1, 70), device=H200)
    assert all(run.backend != "triton" and "float64" in run.reason for run in double.of("training").operators)
    assert not double.of("training").launches
    hooked = layer(Mamba2(value_heads=2))
    assert hooked.mlp is not None
    hooked.mlp.out.register_forward_hook(lambda *_: None)
    reasons = {run.name: run.reason for run in explain(hooked, shape=(1, 70), device=H200).of("training").operators}
    assert "plain nn.Linear" in reasons["gated MLP"]
    assert "gated MLP by plain torch: it needs an output map" in str(explain(hooked, shape=(1, 70), device=H200))


def test_a_model_lists_its_loss_and_keeps_its_weights() -> None:
    model = StackSpec(width=32, depth=2, vocab=300, pattern="mamba2").build()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.device("cpu"):  # a torch function mode, under which torch dispatches the operators
        explained = explain(model, shape=(2, 65), device=H200)
    assert str(explained) == str(explain(model, shape=(2, 65), device=H200))
    assert explained.of("training").operators[-1] == RunRecord("triton", "cross entropy")
    assert names(explained.of("training").launches)["cross_entropy_kernel"] == 1
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("subject", "arguments", "sentence"),
    [
        (Mamba2().build(32), {"shape": (2,), "device": H200}, r"shape must be \(B, T\)"),
        (Mamba2().build(32), {"shape": (2, 0), "device": H200}, "T must be an integer >= 1"),
        (Mamba2().build(32), {"shape": (2, 3), "device": "NVIDIA H2000"}, "device name must be one of"),
        (nn.Linear(2, 2), {"shape": (2, 3), "device": H200}, "takes an UpdateSpec, or a built mixer, layer or model"),
        (UpdateSpec(), {}, "meta must be a deltazoo.UpdateMeta"),
    ],
)
def test_impossible_questions_are_refused(subject: nn.Module, arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises((ConfigError, ValueRangeError), match=sentence):
        explain(subject, **arguments)


def test_packed_weights_are_refused() -> None:
    module = Mamba2().build(32)

    class Packed(nn.Parameter):
        pass

    module.out.weight = Packed(module.out.weight.data)
    with pytest.raises(UnsupportedError, match=r"plain weights, got out.weight of class Packed"):
        explain(module, shape=(1, 2), device=H200)


@pytest.mark.kernels
@needs_triton
@pytest.mark.parametrize(
    "module",
    [
        FoX(heads=2).build(32),
        Mamba3(value_heads=2, key_width=16, value_width=16).build(32),
        DeltaNet(heads=1, key_width=16, value_width=16).build(32),
    ],
    ids=["fox", "mamba3", "deltanet"],
)
def test_the_interpreter_launches_what_is_explained(module: Mixer, monkeypatch: pytest.MonkeyPatch) -> None:
    if not INTERPRETED:
        pytest.skip("the next test compares launches on a GPU")
    monkeypatch.setattr(registry.resolve("triton"), "_interpreted", False)
    explained = explain(module, shape=(1, 40), device=A100)
    for other in [m for name, m in sys.modules.items() if name.startswith("deltazoo.") and hasattr(m, "device_type")]:
        monkeypatch.setattr(other, "device_type", lambda x: "cuda")
    with simulated_device(DeviceSpec.named(A100)):
        logs = run_as_explained(module, torch.randn(1, 40, 32))
    for runs, log in zip(explained.phases, logs, strict=True):
        assert list(runs.runs) == log


@pytest.mark.cuda
@pytest.mark.parametrize("name", OURS)
def test_the_gpu_launches_what_is_explained(name: str) -> None:
    for config, width in ((small(name), 24), (parse({"mixer": name}), 256)):
        module = LayerSpec(mixer=config, mlp=Dense(width=64)).build(width, Place(0, 1)).to("cuda", torch.bfloat16)
        explained: ModuleExplanation = explain(module, shape=(2, 150))
        logs = run_as_explained(module, torch.randn(2, 150, width, device="cuda", dtype=torch.bfloat16))
        for runs, log in zip(explained.phases, logs, strict=True):
            assert Counter(runs.runs) == Counter(log)
