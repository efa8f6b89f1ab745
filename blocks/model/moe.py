"""Mixture of experts: the config and the module of an MLP that sends each token to some of several SwiGLUs.

B batch, T time, D width, F hidden width, N = B T tokens, E experts, k active experts, A = N k assignments
"""

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from deltazoo.backends.update.base import state_dtype, without_autocast
from deltazoo.blocks.model.mlp import Dense, DenseMlp, HiddenWidth, Mlp, MlpOutput
from deltazoo.mixers.core.grouped_linear import GroupedLinear, group_rows
from deltazoo.mixers.core.initialization import drawn_in_float32
from deltazoo.mixers.core.losses import AuxiliaryLoss
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Routed
from deltazoo.mixers.core.side import Side, join_sides, side_outputs
from deltazoo.mixers.parts.memory.routing import load_balance_loss, z_loss


class MoE(HiddenWidth):
    """y = sum over the k experts e with the largest s_e + b_e of w_e SwiGLU_e(x), plus a shared expert's output.

    s = softmax(W x), or sigmoid(W x); w_e = scale s_e, or scale s_e / sum of s over the k experts. No token is dropped.
    Ties go to the expert with the lower index.

    Fields of published models; `width` and `shared_width` are those of the model:
        Jamba: normalize=False, scores="softmax"
        Qwen3-Next: normalize=True, scores="softmax", shared_width=..., shared_gate=True
        Kimi Linear: normalize=True, scores="sigmoid", selection_bias=True, scale=2.446, shared_width=..., balance=0

    Auxiliary losses: "moe_balance" and "moe_z", see `deltazoo.mixers.parts.memory.routing`.

    Args:
        width, ratio: hidden width of each expert, as for `Dense`.
        experts: E.
        active: k, experts per token.
        scores: function of the router's logits.
        normalize: divide the scores of the active experts by their sum.
        selection_bias: add a bias b, a buffer, to the scores when experts are chosen, not to their weights. It has no
            gradient; DeepSeek-V3 changes it after each step by the experts' loads, which is left to the training loop.
        scale: factor on the weights.
        shared_width: hidden width of an additional expert that every token uses; None: no such expert.
        shared_gate: multiply the output of the shared expert by sigmoid(w x).
        balance: coefficient of the load-balance loss.
        z: coefficient of the z-loss, the mean square of logsumexp(W x).
    Source: Switch 2101.03961; Jamba 2403.19887; DeepSeek-V3 2412.19437, section 2.1.2; transformers' modelling code.
    """

    type: Literal["moe"] = "moe"
    experts: int = Field(default=8, ge=1)
    active: int = Field(default=2, ge=1)
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    selection_bias: bool = False
    scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    shared_width: int | None = Field(default=None, ge=1)
    shared_gate: bool = False
    balance: float = Field(default=0.001, ge=0, allow_inf_nan=False)
    z: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.active > self.experts:
            raise ValueError(f"active must be at most experts = {self.experts}, got {self.active}")
        if self.shared_gate and self.shared_width is None:
            raise ValueError("shared_gate needs shared_width, the hidden width of the shared expert, got none")
        return self

    def title(self, width: int) -> str:
        shared = "" if self.shared_width is None else f" + {self.shared_width}"
        return f"MoE {self.active}/{self.experts} x {self.hidden(width)}{shared}"

    @drawn_in_float32
    def build(self, width: int) -> "MoEMlp":
        """Build the module for a layer of this width."""
        return MoEMlp(width, self)


class ExpertRouter(nn.Module):
    """Choose k experts for each token, in float32.

    Initialisation: N(0, 0.02^2); the selection bias is 0.
    """

    def __init__(self, width: int, config: MoE) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, width))
        self.bias: Tensor | None
        self.register_buffer("bias", torch.empty(config.experts) if config.selection_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_BTD: Tensor, context: Context) -> tuple[Tensor, Tensor, Side | None]:
        """Return the k experts of each token [B, T, k] int64, their weights [B, T, k], and the auxiliary losses."""
        dtype, config = state_dtype(x_BTD.dtype), self.config
        with without_autocast(x_BTD):
            logits = F.linear(x_BTD.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        selection = scores.detach() if self.bias is None else scores.detach() + self.bias
        expert_BTK = selection.argsort(dim=-1, descending=True, stable=True)[..., : config.active]
        weight = scores.gather(-1, expert_BTK)
        if config.normalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        losses: tuple[AuxiliaryLoss, ...] = ()
        if context.losses:
            chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, expert_BTK, True)
            p = scores if config.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
            balance = load_balance_loss("moe_balance", config.balance, p, chosen, context)
            losses = *balance, *z_loss("moe_z", config.z, logits, context)
        return expert_BTK, config.scale * weight, side_outputs(losses=losses)

    def extra_repr(self) -> str:
        return f"experts={self.config.experts}, active={self.config.active}, scores={self.config.scores}"


class MoEMlp(Mlp, Routed):
    """Module of `MoE`: x [B, T, D] to [B, T, D]. Shapes do not depend on the routes.

    Initialisation: see `GroupedLinear`; a `LanguageModel` replaces it.
    """

    def __init__(self, width: int, config: MoE) -> None:
        super().__init__()
        hidden = config.hidden(width)
        self.config = config
        self.router = ExpertRouter(width, config)
        self.to_hidden = GroupedLinear(config.experts, width, 2 * hidden)
        self.out = GroupedLinear(config.experts, hidden, width)
        self.shared = None if config.shared_width is None else DenseMlp(width, Dense(width=config.shared_width))
        self.shared_gate = nn.Linear(width, 1, bias=False) if config.shared_gate else None

    @property
    def unused_parameters(self) -> int:
        return (self.config.experts - self.config.active) * self._one_expert()

    @property
    def flops(self) -> int:
        gate = 0 if self.shared_gate is None else 2 * self.shared_gate.in_features  # its weight may be packed
        shared = 0 if self.shared is None else self.shared.flops
        return 2 * (self.config.active * self._one_expert() + self.router.weight.numel()) + shared + gate

    def _one_expert(self) -> int:
        """Return the number of parameters of an expert."""
        return (self.to_hidden.weight.numel() + self.out.weight.numel()) // self.config.experts

    def forward(self, x_BTD: Tensor, context: Context) -> MlpOutput:
        experts, active = self.config.experts, self.config.active
        expert_BTK, weight_BTK, side = self.router(x_BTD, context)
        groups = group_rows(expert_BTK.flatten(0, 1), experts)
        x_ND = x_BTD.flatten(0, 1)
        gate_AF, up_AF = self.to_hidden(x_ND.index_select(0, groups.order // active), groups.ends).chunk(2, dim=-1)
        y_AD = self.out(F.silu(gate_AF) * up_AF, groups.ends)
        y_BTKD = y_AD.index_select(0, groups.order.argsort()).view(*weight_BTK.shape, x_BTD.shape[2])
        y_BTD = (weight_BTK[..., None] * y_BTKD).sum(2).to(y_AD.dtype)
        side = join_sides([side])
        if self.shared is None:
            return MlpOutput(y_BTD, side)
        shared_BTD = self.shared(x_BTD, context).y
        if self.shared_gate is not None:
            shared_BTD = self.shared_gate(x_BTD).sigmoid() * shared_BTD
        return MlpOutput(y_BTD + shared_BTD, side)
