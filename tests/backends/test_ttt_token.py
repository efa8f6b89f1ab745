"""A token of TTT-Linear by its kernels, against float64 and by parts: in Triton's interpreter, or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from triton_cases import DEVICE, needs_triton

from deltazoo import watch
from deltazoo.backends.ops.fast_weights import ttt_linear as ttt_module
from deltazoo.backends.ops.fast_weights import ttt_linear_chunks as plain
from deltazoo.backends.ops.fast_weights.ttt_linear_chunks import TTTOperands
from deltazoo.backends.triton.fast_weights.token_op import TTTTokenCall, ttt_token_
from deltazoo.mixers import TTTLinear
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.rotary import apply_rotary, rotation_at
from deltazoo.mixers.ttt_linear import OutputNorm, TTTLinearMixer

B, D, M = 2, 12, 3
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
KERNELS = ["ttt_token_kernel", "ttt_output_kernel"]
WRITTEN = ("history", "seen", "W", "G", "b", "g")


@pytest.fixture(autouse=True)
def plain_torch_by_parts(monkeypatch):
    monkeypatch.setattr(ttt_module, "_supported", lambda x: False)  # the interpreter has no "bf16x3"


def run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mixers on a CPU run the kernels."""
    for module in ("backends.ops.gemv", "mixers.ttt_linear"):
        monkeypatch.setattr(f"deltazoo.{module}.kernel_refusals", lambda *_: [])


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def case(seen: list[int], H: int, E: int, taps: int, dtype: torch.dtype) -> TTTTokenCall:
    B, D = len(seen), H * E
    products = draw(B, 3 * D + H + 1, seed=0).to(dtype)  # the rows of each operand are apart
    qk, v, raw, gate, _ = products.split([D, D, H, D, 1], 1)
    return TTTTokenCall(
        qk, v, raw, gate, draw(2 * D, taps, seed=1).to(dtype), draw(2 * D, seed=2).to(dtype),
        history=draw(B, taps - 1, 2 * D, seed=3).to(dtype), seen=torch.tensor(seen, device=DEVICE),
        place_rate=torch.tensor([0.5, -0.6, 0.2], device=DEVICE), gain=draw(H, E, seed=4), bias=draw(H, E, seed=5),
        first_W=draw(H, E, E, seed=6).to(dtype), first_b=draw(H, E, seed=7).to(dtype), W=draw(B, H, E, E, seed=8),
        G=draw(B, H, E, E, seed=9), b=draw(B, H, E, seed=10), g=draw(B, H, E, seed=11), norm_weight=draw(D, seed=12),
        norm_bias=draw(D, seed=13), scale=0.3, theta=50.0, eps=1e-6,
    )  # fmt: skip


def expected(call: TTTTokenCall) -> dict[str, Tensor]:
    """Return y and the tensors that change, in float64 by the chunks in plain torch."""
    x = call._replace(**{name: y.double() for name, y in call._asdict().items() if isinstance(y, Tensor)})
    (B, H, E, _), place = x.W.shape, call.seen % M
    inputs = torch.cat([x.history, x.qk.repeat(1, 2)[:, None]], 1)
    convolved = (inputs * x.taps.T).sum(1) + x.tap_bias
    q, k = convolved.view(B, 1, 2, H, E).unbind(2)
    q, k = (apply_rotary(y, rotation_at(place[:, None], E // 2, x.theta, torch.float64)) for y in (q, k))
    spans = torch.stack([torch.arange(B, device=DEVICE), torch.ones_like(place), place, call.seen == 0], 1).int()
    rate = (1 / torch.arange(1, M + 1, device=DEVICE) + x.place_rate).clamp(min=0)
    v, eta = x.v.reshape(B, 1, H, E), x.scale * x.raw.sigmoid()[:, None]
    o, W, G, b, g, _ = plain.forward(
        TTTOperands(q, k, v, eta, rate, x.gain, x.bias, x.first_W, x.first_b, x.W, x.G, x.b, x.g, spans), False
    )
    y = F.layer_norm(o.flatten(1), (H * E,), x.norm_weight, x.norm_bias, x.eps)
    y *= F.gelu(x.gate, approximate="tanh")
    return {"y": y, "history": inputs[:, 1:], "seen": x.seen + 1, "W": W, "G": G, "b": b, "g": g}


@needs_triton
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("seen", "H", "E", "taps"),
    [
        pytest.param([0, 3, 7, 11], 2, 6, 4, marks=pytest.mark.kernel_smoke),
        ([0, 4, 9], 1, 64, 2),
        ([0, 1], 3, 5, 3),
        ([2, 3], 2, 2, 4),
    ],
)
def test_a_token_equals_its_equations(seen, H, E, taps, dtype):
    call = case(seen, H, E, taps, dtype)
    reference = expected(call)
    for name, ours in {"y": ttt_token_(call), **{name: getattr(call, name) for name in WRITTEN}}.items():
        wide = reference[name]
        assert (ours.double() - wide).norm() <= TOLERANCES[dtype] * wide.norm(), name


@needs_triton
def test_products_of_several_tensors_are_joined():
    call, other = (case([0, 4], 2, 6, 4, torch.float32) for _ in range(2))
    apart = other._replace(v=other.v.clone(), gate=other.gate.clone())
    torch.testing.assert_close(ttt_token_(apart), ttt_token_(call))
    torch.testing.assert_close(apart.G, call.G)


@needs_triton
def test_the_operator_passes_opcheck():
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    call = case([0, 4], 2, 6, 4, torch.float32)
    torch.library.opcheck(torch.ops.deltazoo.triton_ttt_token_.default, tuple(call), test_utils=tests)


def build(**fields: object) -> TTTLinearMixer:
    torch.manual_seed(0)
    mixer = TTTLinear(**({"heads": 2, "batch": M, "conv_width": 3} | fields)).build(D, backend="triton").to(DEVICE)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape).to(DEVICE))
    return mixer


@torch.no_grad()
def decode(
    mixer: TTTLinearMixer, tokens: int = 1, context: Context | None = None, rows: int = B
) -> tuple[list[Tensor], list[str]]:
    """Return the outputs of tokens and the new state; and the kernels."""
    x = draw(tokens, rows, 1, D, seed=1)
    state = mixer.init_state(rows)
    with watch() as record:
        outputs = [mixer(x_t, state, context).y for x_t in x]
    return [*outputs, *state.values()], [run.name for run in record.runs]


def is_by_kernels(kernels: list[str]) -> bool:
    return [name for name in kernels if name in KERNELS] == KERNELS


@needs_triton
@pytest.mark.parametrize("fields", [{}, {"heads": 1, "rate": 0.5, "rotary_theta": 30.0}, {"conv_width": 1}], ids=str)
def test_steps_by_kernels_equal_steps_by_parts(fields, monkeypatch):
    mixer, tokens = build(**fields), M + 2
    with monkeypatch.context() as patched:
        patched.setattr(TTTLinearMixer, "decode_token_", lambda *_: None)
        separate, others = decode(mixer, tokens)
    run_kernels(monkeypatch)
    packed, kernels = decode(mixer, tokens)
    assert kernels.count(KERNELS[0]) == kernels.count(KERNELS[1]) == tokens and not {*KERNELS} & {*others}
    for ours, reference in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("fields", [{"conv_width": 40}, {"heads": 1}, {"batch": M + 1}], ids=str)
def test_options_without_a_kernel_decode_by_parts(fields, monkeypatch):
    monkeypatch.setattr("deltazoo.mixers.ttt_linear.MAX_WIDTH", D - 1)
    monkeypatch.setattr("deltazoo.mixers.ttt_linear.MAX_BATCH", M)
    mixer = build(**fields)
    separate, _ = decode(mixer, 2)
    run_kernels(monkeypatch)
    packed, kernels = decode(mixer, 2)
    assert not {*KERNELS} & {*kernels}
    for ours, reference in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@needs_triton
def test_modules_with_a_hook_are_called(monkeypatch):
    mixer = build()
    run_kernels(monkeypatch)
    for path in ("filters.conv", "norm", "to_qk_v", "to_rate", "to_gate", "out"):
        calls = []
        hook = mixer.get_submodule(path).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        kernels = decode(mixer)[1]
        assert calls and is_by_kernels(kernels) == (path not in ("filters.conv", "norm")), path
        hook.remove()
    assert is_by_kernels(decode(mixer)[1])


class Packed(nn.Parameter):
    """A parameter whose values a mixer must not read directly."""


class OtherConv(ShortConv):
    """A convolution that a mixer must call."""


class OtherNorm(OutputNorm):
    """A norm that a mixer must call."""


@needs_triton
def test_parameters_and_parts_of_other_classes_decode_by_parts(monkeypatch):
    run_kernels(monkeypatch)
    packed, convolved, normed = (build() for _ in range(3))
    packed.gain = Packed(packed.gain.detach())
    convolved.filters["conv"].__class__ = OtherConv
    normed.norm.__class__ = OtherNorm
    for mixer in (packed, convolved, normed):
        assert not {*KERNELS} & {*decode(mixer)[1]}


@needs_triton
@torch.no_grad()
def test_a_history_of_another_dtype_decodes_by_parts(monkeypatch):
    run_kernels(monkeypatch)
    mixer, x = build(), draw(B, 1, D, seed=1)
    state = dict(mixer.init_state(B))
    state["conv."] = state["conv."].half()
    with watch() as record:
        mixer(x, state)
    assert not {*KERNELS} & {run.name for run in record.runs}


class Mode(TorchFunctionMode):
    """Calls every function as without the mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@needs_triton
def test_modes_autocast_padding_and_packs_decode_by_parts(monkeypatch):
    mixer = build()
    run_kernels(monkeypatch)
    mask = Context(mask=torch.ones(B, 1, dtype=torch.bool, device=DEVICE))
    pack = Context(cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))
    assert not {*KERNELS} & {*decode(mixer, context=mask)[1]}
    assert not {*KERNELS} & {*decode(mixer, context=pack, rows=1)[1]}
    for manager in (Mode(), torch.autocast(DEVICE, torch.float16)):
        with manager:
            assert not {*KERNELS} & {*decode(mixer)[1]}
    x, state = draw(B, 2, D, seed=1), mixer.init_state(B)
    with torch.no_grad(), watch() as record:
        mixer(x, state)
    assert not {*KERNELS} & {run.name for run in record.runs}


@needs_triton
@torch.no_grad()
def test_a_step_is_one_graph(monkeypatch):
    torch._dynamo.reset()  # else it counts the forward methods that other tests have compiled
    run_kernels(monkeypatch)
    mixer, x = build(), draw(B, 1, D, seed=1)
    states = [mixer.init_state(B) for _ in range(2)]
    compiled = torch.compile(mixer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, states[0]).y, mixer(x, states[1]).y)
    torch.testing.assert_close(dict(states[0]), dict(states[1]))
