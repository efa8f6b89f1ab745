"""Selective state spaces: operands and step size of each channel computed from the convolved input (Mamba, Longhorn).

B batch, T time, C channels (= HV, each a head with V = 1), N state size (= K), R rank of the step size
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.gemv import products as products_of_few_rows
from deltazoo.backends.ops.selective_step import MAX_STATES, SelectiveCall, selective_step_
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.mixers.core.decode_maps import adds_to_product, apply_maps, reads_weight
from deltazoo.mixers.core.initialization import fill_log_range
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import GateLinear, HeadShape, OperandPart
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.gates.decays import init_dt_bias, softplus
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import RMSNorm
from deltazoo.mixers.parts.projections import ChannelProjection
from deltazoo.mixers.parts.skips import Skip

InnerNorm = Literal["plain", "weighted"]


class SelectiveOperands(OperandPart, TokenStep):
    """q, k and a step size per channel from the projected v: [r, k, q] = W v, step = activation(W_dt r + dt_bias).

    kind "mamba": softplus; log_decay = step rate, rate = -exp(A_log) [C, N], not materialised over time; v <- step v.
    kind "longhorn": sigmoid; log_decay = log(1 - d k^2) with d = step / (1 + step |k|^2); v <- d v.

    Args:
        rank: R.
        norm: RMS norms of r, k and q, "plain" without weights (Falcon Mamba), or "weighted" (Jamba); None: no norms.
        norm_eps: epsilon of these norms.
    Initialisation: A_log = log(1..N) (S4D-Real); W_dt uniform in +-R^(-1/2); dt_bias as `init_dt_bias`, for longhorn 0.
    Source: Mamba 2312.00752, section 3.2, algorithm 2 and section 3.6; Longhorn 2407.14207, algorithm 1.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("A_log",)

    def __init__(
        self,
        shape: HeadShape,
        rank: int,
        kind: Literal["mamba", "longhorn"],
        norm: InnerNorm | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        channels, size = shape.value_heads, shape.key_width
        self.kind, self.sizes = kind, [rank, size, size]
        self.proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.to_step = GateLinear(rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, size)) if kind == "mamba" else None
        self.norms = None
        if norm is not None:
            self.norms = nn.ModuleList(RMSNorm(size, norm_eps, norm == "weighted") for size in self.sizes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set A_log, and override torch's initialisation of the map to the step size."""
        bound = self.sizes[0] ** -0.5
        nn.init.uniform_(self.to_step.weight, -bound, bound)
        if self.A_log is None:
            self.to_step.bias.zero_()
        else:
            init_dt_bias(self.to_step.bias)
            fill_log_range(self.A_log)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        streams: tuple[Tensor, ...] = self.proj(inputs.v.squeeze(-1)).split(self.sizes, dim=-1)
        if self.norms is not None:
            streams = tuple(norm(stream) for norm, stream in zip(self.norms, streams, strict=True))
        r, k, q = streams
        dtype = state_dtype(q.dtype)
        raw = self.to_step(r).to(dtype)
        inputs = inputs._replace(q=q[:, :, None], k=k[:, :, None], v=inputs.v.to(q.dtype))
        if self.A_log is not None:
            step = softplus(raw)
            v = (inputs.v * step[..., None]).to(q.dtype)
            return inputs._replace(v=v, step=step, rate=-self.A_log.to(dtype).exp()), None
        k_square = k.to(dtype).square()
        step = raw.sigmoid()
        d = step / (1 + step * k_square.sum(-1, keepdim=True))
        log_decay = torch.log1p(-d[..., None] * k_square[:, :, None])
        return inputs._replace(v=(inputs.v * d[..., None]).to(q.dtype), log_decay=log_decay), None

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        if not call.has_parts(ChannelProjection, SelectiveOperands, Update, Skip, OutputGate) or self.norms is not None:
            return None
        project, _, _, skip, output_gate = call.parts.values()
        assert isinstance(skip, Skip) and isinstance(output_gate, OutputGate) and isinstance(project, ChannelProjection)
        states, step, x = call.states["update"][..., 0], self.to_step, call.x
        if output_gate.activation != "silu" or states.shape[2] > MAX_STATES:
            return None
        if not reads_weight(self.proj, x) or not adds_to_product(step, x):
            return None
        if not project.convolves_plainly():
            return None
        convolution = project.convolution(x, call.states.get("project"))
        products = apply_maps(x, {"project": project.to_v, "gate": output_gate.proj}, call.norm, convolution)
        v = products["project"]
        if convolution is None:
            v, _ = project.convolve(v, call.states.get("project"), call.context)
        v = v[:, 0]
        gate = products["gate"][:, 0]
        streams = products_of_few_rows(v, [self.proj.weight])[0]
        o = selective_step_(SelectiveCall(v, streams, gate, step.weight, step.bias, self.A_log, skip.D, states))
        return TokenOutput(o[:, None])

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"
