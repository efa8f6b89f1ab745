"""Decoding through a mixture of experts on a GPU: y = x + MoE(norm(x)), which reads the active experts alone.

`deltazoo.blocks.model.moe` states the experts' equations. Nothing here records gradients.
"""

from typing import NamedTuple

from torch import Tensor

from deltazoo.backends.ops import gemv
from deltazoo.backends.ops.gemv import Activation, Norm
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.triton.gemv.experts_op import MAX_HIDDEN, MAX_ROWS, expert_step


class Routing(NamedTuple):
    """weight: [E, D]; bias: [E], for the selection alone; active: k. The others as in `MoE`."""

    weight: Tensor
    bias: Tensor | None
    active: int
    sigmoid: bool
    normalize: bool
    scale: float


class Experts(NamedTuple):
    """to_hidden: [E, F, D], or if gated [E, 2 F, D]; out: [E, D, F]."""

    to_hidden: Tensor
    out: Tensor
    activation: Activation
    gated: bool


class SharedExpert(NamedTuple):
    """to_hidden: [S, D], or if gated [2 S, D]; out: [D, S]; gate: [1, D], of its output. None: absent."""

    to_hidden: Tensor | None = None
    out: Tensor | None = None
    gate: Tensor | None = None


def refusals(x: Tensor, experts: Experts, active: int) -> list[str]:
    """Return why the kernels do not compute y, one sentence each; [] if they do. Args: x: [..., D]."""
    E, _, F = experts.out.shape
    most = min(MAX_ROWS, E // active)
    if not is_known(x.shape[:-1].numel() <= most):
        return [f"with more than {most} rows each expert is read once for its rows."]
    if F > MAX_HIDDEN:
        return [f"experts must have at most {MAX_HIDDEN} hidden channels, got {F}."]
    return gemv.refusals(x)


def add_experts(x: Tensor, norm: Norm, routing: Routing, experts: Experts, shared: SharedExpert) -> Tensor:
    """Compute y [..., D]. Args: x: [..., D], without `refusals`; all weights in its dtype, except for the bias."""
    y: Tensor = expert_step(
        x.flatten(0, -2), norm.weight, norm.eps, routing.weight, routing.bias, experts.to_hidden, experts.out, *shared,
        *routing[2:], experts.activation, experts.gated,
    )  # fmt: skip
    return y.view(x.shape)
