"""Operator and launches of decoding through a mixture of experts. Triton is imported when a kernel first runs.

B rows, D width, E experts, k active ones, F hidden width, S hidden width of the shared expert
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import operator
from deltazoo.backends.triton.gemv.op import Around, GemvLaunch, launch_gemv
from deltazoo.backends.triton.operands import ready
from deltazoo.backends.triton.problem import overlaps
from deltazoo.backends.triton.runtime.early import loads_early
from deltazoo.backends.triton.runtime.precompile import compiled_ahead
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, power_of_two

MAX_ROWS = 8  # from several rows on, an expert may be read more than once
MAX_HIDDEN = 4096  # of an expert, whose rows of output weights a program reads at once
_BLOCK, _RANKED, _ROUTES, _ROWS, _OUTPUT_TILE = 1024, 32, 2, 4, 4096


class ExpertCall(NamedTuple):
    """The operator's arguments.

    Args:
        x: [B, D]; norm_weight [D] and eps: of its norm. router: [E, D]; bias: [E].
        to_hidden: [E, F, D], or gated [E, 2 F, D]; out: [E, D, F].
        shared_hidden, shared_out: of the shared expert, [S, D] or gated [2 S, D], and [D, S]. shared_gate: [1, D].
    """

    x: Tensor
    norm_weight: Tensor
    eps: float
    router: Tensor
    bias: Tensor | None
    to_hidden: Tensor
    out: Tensor
    shared_hidden: Tensor | None
    shared_out: Tensor | None
    shared_gate: Tensor | None
    active: int
    sigmoid: bool
    normalize: bool
    scale: float
    activation: str
    gated: bool


def _step(*arguments: Any) -> Tensor:
    call = ExpertCall(*arguments)
    y = _fake(*arguments)
    with torch.cuda.device_of(call.x):
        _launch(call, y)
    return y


def _launch(call: ExpertCall, y: Tensor) -> None:
    from deltazoo.backends.triton.gemv.kernels.experts import (
        ExpertTraits,
        expert_hidden_kernel,
        expert_output_kernel,
        select_kernel,
    )
    from deltazoo.backends.triton.runtime.launcher import launcher

    x, (B, D), (E, _, F) = call.x.contiguous(), call.x.shape, call.out.shape
    S = 0 if call.shared_out is None else call.shared_out.shape[1]
    overlap = overlaps(x)
    routes = [call.router, *([] if call.shared_gate is None else [call.shared_gate])]
    logits = x.new_empty(B, E + len(routes) - 1, dtype=torch.float32)
    launch_gemv(x, routes, Around(call.norm_weight, call.eps), logits, GemvLaunch(rows=_ROUTES))
    tile = min(_OUTPUT_TILE, 8 * _OUTPUT_TILE // call.active)  # of each expert; all are in registers at once
    outputs = max(1, power_of_two(tile // 2 + 1) // power_of_two(max(F, S)))
    traits = ExpertTraits(
        D=D, E=E, ACTIVE=call.active, F=F, S=S, ROUTES=logits.shape[1], BE=power_of_two(E), RANKED=_RANKED, ROWS=_ROWS,
        OUTPUTS=outputs,
        BLOCK=min(_BLOCK, power_of_two(D)), BF=power_of_two(F), BS=power_of_two(max(S, 1)), BIAS=call.bias is not None,
        SIGMOID=call.sigmoid, NORMALIZE=call.normalize, SCALE=call.scale, ACTIVATION=call.activation,
        GATED=call.gated, EPS=call.eps, OVERLAP=overlap,
    )  # fmt: skip
    h = x.new_empty(B, call.active * F + S)
    expert, score = (x.new_empty(B, call.active, dtype=dtype) for dtype in (torch.int32, torch.float32))
    tensors = {
        "x": x, "norm_weight": ready(call.norm_weight), "logits": logits, "expert": expert, "score": score, "h": h,
        "bias": None if call.bias is None else ready(call.bias), "y": y,
    }  # fmt: skip
    shared_hidden, shared_out = (None if w is None else ready(w) for w in (call.shared_hidden, call.shared_out))
    hidden = tensors | {"w": ready(call.to_hidden), "shared": shared_hidden}
    output = tensors | {"w": ready(call.out), "shared": shared_out}
    options = Options(4, overlap=overlap)
    tiles = call.active * cdiv(F, _ROWS) + cdiv(S, _ROWS)
    launcher(select_kernel, tensors, {"traits": traits}, options)(B * cdiv(E, _RANKED), {})
    launcher(expert_hidden_kernel, hidden, {"traits": traits}, options)(B * tiles, {})
    launcher(expert_output_kernel, output, {"traits": traits}, options)(
        B * cdiv(D, outputs), {"early": loads_early(call.out, call.shared_out)}
    )


def _fake(*arguments: Any) -> Tensor:
    x = ExpertCall(*arguments).x
    return x.new_empty(x.shape)


expert_step = operator(
    "triton_expert_step(Tensor x, Tensor norm_weight, float eps, Tensor router, Tensor? bias, Tensor to_hidden,"
    " Tensor out, Tensor? shared_hidden, Tensor? shared_out, Tensor? shared_gate, int active, bool sigmoid,"
    " bool normalize, float scale, str activation, bool gated) -> Tensor",
    _step,
    compiled_ahead(_step, _fake),
    any_layout=True,
)
