"""Momentum DeltaNet: a delta rule whose writes pass through a second state, their momentum.

B batch, T time, D width, H key heads, HV value heads, K key width, V value width
"""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from deltazoo.backends.context_parallel.heads import HeadShare
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.decode_maps import apply_maps, apply_output, is_step
from deltazoo.mixers.core.initialization import fill_log_uniform
from deltazoo.mixers.core.input_maps import input_maps, mapped_classes
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context, Place
from deltazoo.mixers.core.part import HasBackend, HeadShape, MapsInput, OutputArguments
from deltazoo.mixers.core.state import write_back
from deltazoo.mixers.families.filter import FilterConfig, FilterMixer
from deltazoo.mixers.parts.gates.decays import init_dt_bias, softplus
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.memory.momentum import MomentumInputs, momentum_delta_rule
from deltazoo.mixers.parts.norms import HeadNorm, unit_norm
from deltazoo.mixers.parts.projections import QKVProjection


class MomentumDeltaNet(FilterConfig):
    """S_t = alpha_t S_(t-1) + beta_t N_t with N_t = mu_t N_(t-1) + eta_t k_t (v_t - alpha_t S_(t-1)^T k_t)^T.

    N is the momentum of the writes. eta = 1 + tanh(W_e x / sqrt(D)), and y = f eta, with a learned f per head, splits
    the state: alpha = exp(-A softplus(W_a x + b_a)) / (1 + y^2), beta = sigmoid(W_b x) y^2 / (1 + y^2). log mu =
    -A_mu softplus(W_m x + b_m), at least `min_log_mu`. The query is the L2-normalised q_t - d k_t, with a learned d
    per head.
    """

    name: ClassVar[str] = "momentum_deltanet"
    family: ClassVar[str] = "delta rule"
    purpose: ClassVar[str] = "delta rule with momentum, a second state"
    source: ClassVar[str] = "Momentum DeltaNet 2026, arXiv 2605.05838"
    oracle: ClassVar[str] = "its equation, token by token in float64"
    heads: int | None = Field(default=None, ge=1, description="key heads; None: width // 256, at least 1")
    value_heads: int | None = Field(default=None, ge=1, description="value heads, a multiple of heads; None: heads")
    key_width: int | None = Field(default=None, ge=1, description="K per head; None: width / heads")
    value_width: int | None = Field(default=None, ge=1, description="V per head; None: 2 width / heads")
    conv_width: int = Field(default=4, ge=0, description="taps of the short convolution of q, k and v; 0: none")
    gate: bool = Field(default=True, description="output gate after the norm: o <- o * silu(W x)")
    correction: bool = Field(default=True, description="subtract d k from q; False: q as it is")
    double_beta: bool = Field(default=False, description="double beta, for negative eigenvalues")
    min_log_mu: float | None = Field(default=-2.0, le=0, description="lower bound of log mu; None: none")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the output norm")

    def equation(self) -> str:
        return (
            "N_t = mu_t N_(t-1) + eta_t k_t (v_t - alpha_t S_(t-1)^T k_t)^T, "
            "S_t = alpha_t S_(t-1) + beta_t N_t;  o_t = K^-1/2 S_t^T q_t"
        )

    def shape(self, width: int) -> HeadShape:
        """Return the sizes of the heads at this width."""
        heads = self.heads or max(1, width // 256)
        K, V = self.key_width or width // heads, self.value_width or 2 * width // heads
        return HeadShape(width, heads, self.value_heads or heads, K, V)

    def build(
        self, width: int, place: Place = FIRST_PLACE, backend: str | Backend | None = None
    ) -> "MomentumDeltaNetMixer":
        return MomentumDeltaNetMixer(self, width, backend)

    def recurrence_flops(self, width: int) -> int:
        _, _, HV, K, V, _ = self.shape(width)
        return 11 * HV * K * V  # the read and the error: 4; N: 3; S: 3; the decay of S in the error: 1


class MomentumDeltaNetMixer(FilterMixer):
    """Module of `MomentumDeltaNet`. State: "project", that of the convolution; "S" and "N", [B, HV, K, V]."""

    def __init__(self, config: MomentumDeltaNet, width: int, backend: str | Backend | None) -> None:
        super().__init__(width)
        self.shape = config.shape(width).validated()
        self.project = QKVProjection(self.shape, config.conv_width, silu="qkv")
        self.gates = MomentumGates(self.shape, config)
        self.outputs = nn.ModuleDict({"norm": HeadNorm(self.shape, config.norm_eps)})
        if config.gate:
            self.outputs["gate"] = OutputGate(self.shape)
        self.out = nn.Linear(self.shape.value_heads * self.shape.value_width, width, bias=False)
        for module in self.modules():
            if isinstance(module, HasBackend):
                module.rebind(backend, activation_like(self.out, self))
        self._mapped_classes = mapped_classes(self._parts())

    def _parts(self) -> dict[str, nn.Module]:
        return {"project": self.project, "gates": self.gates, **dict(self.outputs.items())}

    def split_refusal(self) -> None:
        return None

    def initial_state(self, batch: int, capacity: int | None, like: Tensor) -> dict[str, Tensor]:
        _, _, HV, K, V, _ = self.shape
        history = self.project.init_state(batch, like)
        states = {name: like.new_zeros(batch, HV, K, V, dtype=state_dtype(like.dtype)) for name in "SN"}
        return states if history is None else {"project": history} | states

    def mix(self, x: Tensor, state: dict[str, Tensor] | None, new: dict[str, Tensor], context: Context) -> Tensor:
        old = state or {}
        maps = input_maps(self._parts(), self._mapped_classes) if is_step(x, state) else {}
        products = apply_maps(x, maps)

        def context_of(name: str) -> Context:
            return context._replace(product=products.get(name))

        projected, history = call_part(self.project, x, old.get("project"), context_of("project"))
        inputs = self.gates(x, projected.q, projected.k, projected.v, context_of("gates"))
        share = HeadShare(self.shape.value_heads, context.parallel)
        states = [share.own(old[name], 1) for name in "SN"] if old else None
        o, states = momentum_delta_rule(MomentumInputs(*share.scatter(inputs)), states, context.of_line())
        o = share.gather(o)
        if state is not None:
            new |= {name: write_back(old[name], share.all(y, 1)) for name, y in zip("SN", states, strict=True)}
            new |= {} if history is None else {"project": history}
        arguments = OutputArguments(x, projected, projected)
        for name, part in self.outputs.items():
            o, _ = call_part(part, o, arguments, None, context_of(name))
        return apply_output(o.flatten(2), self.out)


class MomentumGates(nn.Module, MapsInput):
    """The operands of the recurrence from q, k, v and x, with q and k normalised, and per value head.

    Initialisation: A and A_mu uniform in [0, 16], b_a and b_m as `init_dt_bias`, f uniform in [0, 4], d in [0, 1].
    """

    def __init__(self, shape: HeadShape, config: MomentumDeltaNet) -> None:
        super().__init__()
        self.value_heads, self.min_log_mu = shape.value_heads, config.min_log_mu
        self.strength = 2.0 if config.double_beta else 1.0
        self.proj = nn.Linear(shape.width, 4 * shape.value_heads, bias=False)
        self.alpha_bias, self.mu_bias = (nn.Parameter(torch.empty(shape.value_heads)) for _ in range(2))
        self.A_log, self.A_mu_log, self.f_log = (nn.Parameter(torch.empty(shape.heads)) for _ in range(3))
        self.d_log = nn.Parameter(torch.empty(shape.heads)) if config.correction else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for parameter, high in ((self.A_log, 16.0), (self.A_mu_log, 16.0), (self.f_log, 4.0), (self.d_log, 1.0)):
            if parameter is not None:
                fill_log_uniform(parameter, 0.0, high)
        init_dt_bias(self.alpha_bias)
        init_dt_bias(self.mu_bias)

    def input_map(self) -> nn.Module:
        return self.proj

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> MomentumInputs:
        """Return the operands. Args: x: [B, T, D]; q, k: [B, T, H, K]; v: [B, T, HV, V]."""
        raw, dtype = context.apply(self.proj, x), state_dtype(v.dtype)
        groups = self.value_heads // k.shape[2]
        q, k = q.to(dtype), k.to(dtype)
        if self.d_log is not None:
            q = q - self.d_log.to(dtype).exp()[:, None] * k
        q, k = (unit_norm(y).repeat_interleave(groups, 2) for y in (q, k))
        raw_alpha, raw_beta, raw_mu, raw_eta = raw.to(dtype).chunk(4, -1)
        rate, mu_rate, f = (
            p.to(dtype).exp().repeat_interleave(groups) for p in (self.A_log, self.A_mu_log, self.f_log)
        )
        eta = 1 + torch.tanh(raw_eta * x.shape[-1] ** -0.5)
        square = (f * eta).square()
        log_alpha = -torch.log1p(square) - rate * softplus(raw_alpha + self.alpha_bias.to(dtype))
        log_mu = -mu_rate * softplus(raw_mu + self.mu_bias.to(dtype))
        if self.min_log_mu is not None:
            log_mu = log_mu.clamp(min=self.min_log_mu)
        beta = self.strength * raw_beta.sigmoid() * square / (1 + square)
        q = q * k.shape[-1] ** -0.5
        return MomentumInputs(q.to(v.dtype), k.to(v.dtype), log_alpha, log_mu, beta, eta, v)
