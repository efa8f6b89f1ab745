"""RetNet and gated RetNet with the parameters of their authors' code: names, shapes, outputs, gradients, in float64.

The equations are those of MultiScaleRetention (microsoft/torchscale) and GateRetention (microsoft/unilm, YOCO), with
their names of the parameters. Both rotate adjacent channels, and ours the two halves of a head, so that the rows of
q_proj and k_proj are reordered.

D width, H heads, K key width, T time
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from equations import Weights, assert_same_with_gradients
from torch import Tensor

from deltazoo.mixers import GatedRetNet, MixerConfig, RetNet

D, H, T = 24, 3, 11
PAIRS = D // H // 2
# The authors' angles are 10000^(-linspace(0, 1, K / 2)), ours theta^(-i / (K / 2)).
THETA = 10000 ** (PAIRS / (PAIRS - 1))
# torchscale divides the output by a factor per token, which the norm removes except for its epsilon.
TINY_EPS = 1e-30


def rotate_adjacent(x: Tensor) -> Tensor:
    """Rotate channels 2 i and 2 i + 1 of x [B, T, H, K] by their angles at positions 0 to T - 1."""
    angle = torch.outer(torch.arange(T), 10000 ** -torch.linspace(0, 1, PAIRS, dtype=torch.float64))[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1).flatten(-2)


def project(w: Weights, x: Tensor, name: str) -> Tensor:
    return (x @ w[f"{name}.weight"].mT).unflatten(-1, (H, -1))


def rms_norm(o: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def scores(w: Weights, x: Tensor) -> Tensor:
    """Return K^(-1/2) q_t^T k_s of the rotated q and k, [B, H, T, T]."""
    q, k = (rotate_adjacent(project(w, x, name)) for name in ("q_proj", "k_proj"))
    return torch.einsum("bthk,bshk->bhts", q, k * k.shape[-1] ** -0.5)


def gated_output(w: Weights, x: Tensor, o: Tensor) -> Tensor:
    return (F.silu(x @ w["g_proj.weight"].mT) * o.flatten(2)) @ w["out_proj.weight"].mT


def multi_scale_retention(w: Weights, x: Tensor, eps: float) -> Tensor:
    decay = torch.log(1 - 2 ** (-5 - torch.arange(H, dtype=torch.float64)))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance * decay[:, None, None]).exp().tril()
    qk = scores(w, x) * (mask / mask.sum(-1, keepdim=True).sqrt())
    qk = qk / qk.detach().abs().sum(-1, keepdim=True).clamp(min=1, max=5e4)
    o = torch.einsum("bhts,bshv->bthv", qk, project(w, x, "v_proj"))
    return gated_output(w, x, rms_norm(o, w.get("group_norm.weight"), eps))


def gate_retention(w: Weights, x: Tensor, eps: float) -> Tensor:
    log_decay = (F.logsigmoid(x @ w["gt_proj.weight"].mT) / 16).mT.cumsum(-1)
    mask = (log_decay[..., :, None] - log_decay[..., None, :]).exp().tril()
    o = torch.einsum("bhts,bshv->bthv", scores(w, x) * mask, project(w, x, "v_proj"))
    return gated_output(w, x, rms_norm(o, w.get("subln.weight"), eps))


def by_our_names(w: Weights) -> Weights:
    def halves(name: str) -> Tensor:
        """Reorder the rows of each head: even channels first, then odd channels."""
        return w[name].unflatten(0, (H, -1, 2)).transpose(1, 2).flatten(0, 2)

    ours = {
        "project.to_qkv.weight": torch.cat([halves("q_proj.weight"), halves("k_proj.weight"), w["v_proj.weight"]]),
        "outputs.gate.proj.weight": w["g_proj.weight"],
        "out.weight": w["out_proj.weight"],
    }
    for theirs, name in (
        ("gt_proj.weight", "operands.decay.proj.weight"),
        ("group_norm.weight", "outputs.norm.weight"),
        ("subln.weight", "outputs.norm.weight"),
    ):
        if theirs in w:
            ours[name] = w[theirs]
    return ours


RMS = {"heads": H, "norm": "rms", "rotary_theta": THETA}
RETNET = {"q_proj": (D, D), "k_proj": (D, D), "v_proj": (2 * D, D), "g_proj": (2 * D, D), "out_proj": (D, 2 * D)}
YOCO = dict.fromkeys(RETNET, (D, D)) | {"gt_proj": (H, D)}
CASES: dict[str, tuple[MixerConfig, Callable[[Weights, Tensor, float], Tensor], dict[str, tuple[int, ...]]]] = {
    "torchscale": (RetNet(**RMS, norm_weight=False, norm_eps=TINY_EPS), multi_scale_retention, RETNET),
    "torchscale, elementwise affine": (
        RetNet(**RMS, norm_eps=TINY_EPS),
        multi_scale_retention,
        RETNET | {"group_norm": (2 * D // H,)},
    ),
    "yoco": (GatedRetNet(**RMS, norm_weight=False, norm_eps=1e-3), gate_retention, YOCO),
    "yoco, elementwise affine": (GatedRetNet(**RMS, norm_eps=1e-3), gate_retention, YOCO | {"subln": (D // H,)}),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_outputs_equal_those_of_the_authors(name: str) -> None:
    config, equation, shapes = CASES[name]
    torch.manual_seed(0)
    w = {
        f"{layer}.weight": (0.5 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
        for layer, shape in shapes.items()
    }
    mixer = config.build(D, backend="reference").double()
    ours = by_our_names(w)
    assert {name: tensor.shape for name, tensor in mixer.state_dict().items()} == {
        name: tensor.shape for name, tensor in ours.items()
    }
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    actual = torch.func.functional_call(mixer, ours, (x,))[0]
    assert_same_with_gradients(actual, equation(w, x, config.norm_eps), [x, *w.values()], 1e-10)
