"""Mixture of experts: the config and the module of an MLP that sends each token to some of several MLPs.

B batch, T time, D width, F hidden width, N = B T tokens, E experts, k active experts, A = N k assignments, G groups
"""

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from deltazoo.backends.ops import expert_step
from deltazoo.backends.ops.expert_step import Experts, Routing, SharedExpert
from deltazoo.backends.ops.gemv import Norm
from deltazoo.backends.ops.glu_linear import Activation, activate
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.update.base import state_dtype, without_autocast
from deltazoo.blocks.model.mlp import Dense, DenseMlp, HiddenWidth, Mlp, MlpOutput
from deltazoo.mixers.core.decode_maps import reads_weight
from deltazoo.mixers.core.grouped_linear import GroupedLinear, group_rows
from deltazoo.mixers.core.initialization import drawn_in_float32, fill_normal
from deltazoo.mixers.core.losses import AuxiliaryLoss
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Routed
from deltazoo.mixers.core.side import Side, join_sides, side_outputs
from deltazoo.mixers.parts.memory.routing import load_balance_loss, z_loss


class MoE(HiddenWidth):
    """y = sum over the k experts e with the largest s_e + b_e of w_e MLP_e(x), plus a shared expert's output.

    s = softmax(W x), or sigmoid(W x); w_e = scale s_e, or scale s_e / sum of s over the k experts. No token is dropped.
    Ties go to the expert with the lower index. The MLPs are SwiGLUs by default.

    Fields of published models; `width` and `shared_width` are those of the model:
        Jamba: normalize=False, scores="softmax"
        Qwen3-Next: normalize=True, scores="softmax", shared_width=..., shared_gate=True
        Kimi Linear: normalize=True, scores="sigmoid", selection_bias=True, scale=2.446, shared_width=..., balance=0
        Nemotron 3: as Kimi Linear, with activation="relu2", gated=False and, in the larger models, latent_width=...

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
        groups, active_groups: the experts are in `groups` groups of equal size, and each token uses experts of only
            `active_groups` of them, those with the largest sum of their two largest s_e + b_e (DeepSeek-V3).
        activation, gated: of every expert, as for `Dense`.
        latent_width: width of the vectors that the routed experts read and write, which one linear map makes of x and
            another one maps back; None: the experts read x.
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
    groups: int = Field(default=1, ge=1)
    active_groups: int = Field(default=1, ge=1)
    activation: Activation = "silu"
    gated: bool = True
    latent_width: int | None = Field(default=None, ge=1)
    shared_width: int | None = Field(default=None, ge=1)
    shared_gate: bool = False
    balance: float = Field(default=0.001, ge=0, allow_inf_nan=False)
    z: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.active > self.experts:
            raise ValueError(f"active must be at most experts = {self.experts}, got {self.active}")
        if self.experts % self.groups:
            raise ValueError(f"groups must divide experts = {self.experts}, got {self.groups}")
        if self.active_groups > self.groups:
            raise ValueError(f"active_groups must be at most groups = {self.groups}, got {self.active_groups}")
        if self.active > (choice := self.experts // self.groups * self.active_groups):
            raise ValueError(f"active must be at most the {choice} experts of the active groups, got {self.active}")
        if self.shared_gate and self.shared_width is None:
            raise ValueError("shared_gate needs shared_width, the hidden width of the shared expert, got none")
        return self

    def title(self, width: int) -> str:
        shared = "" if self.shared_width is None else f" + {self.shared_width}"
        return f"MoE {self.active}/{self.experts} x {self.hidden(width)}{shared}"

    def shared(self) -> Dense:
        """Return the config of the shared expert."""
        return Dense(width=self.shared_width, activation=self.activation, gated=self.gated)

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
        fill_normal(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_BTD: Tensor, context: Context) -> tuple[Tensor, Tensor, Side | None]:
        """Return the k experts of each token [B, T, k] int64, their weights [B, T, k], and the auxiliary losses."""
        dtype, config = state_dtype(x_BTD.dtype), self.config
        with without_autocast(x_BTD):
            logits = F.linear(x_BTD.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if config.scores == "softmax" else logits.sigmoid()
        selection = scores.detach() if self.bias is None else scores.detach() + self.bias
        if config.groups > 1:
            selection = self._of_active_groups(selection)
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

    def _of_active_groups(self, selection_BTE: Tensor) -> Tensor:
        """Return the scores for the selection with -inf outside the active groups."""
        groups_BTGE = torch.unflatten(selection_BTE, -1, (self.config.groups, -1))
        best_BTG = groups_BTGE.topk(min(2, groups_BTGE.shape[-1]), dim=-1).values.sum(-1)
        chosen = best_BTG.argsort(dim=-1, descending=True, stable=True)[..., : self.config.active_groups]
        is_active = torch.zeros_like(best_BTG, dtype=torch.bool).scatter(-1, chosen, True)
        return groups_BTGE.masked_fill(~is_active[..., None], float("-inf")).flatten(-2)

    def extra_repr(self) -> str:
        return f"experts={self.config.experts}, active={self.config.active}, scores={self.config.scores}"


class MoEMlp(Mlp, Routed):
    """Module of `MoE`: x [B, T, D] to [B, T, D]. Shapes do not depend on the routes.

    Initialisation: see `GroupedLinear`; a `LanguageModel` replaces it. The maps to and from the latent vectors have
        torch's initialisation.
    """

    def __init__(self, width: int, config: MoE) -> None:
        super().__init__()
        hidden = config.hidden(width)
        self.config = config
        self.router = ExpertRouter(width, config)
        latent = config.latent_width
        self.to_latent = None if latent is None else nn.Linear(width, latent, bias=False)
        self.to_hidden = GroupedLinear(config.experts, latent or width, (2 if config.gated else 1) * hidden)
        self.out = GroupedLinear(config.experts, hidden, latent or width)
        self.from_latent = None if latent is None else nn.Linear(latent, width, bias=False)
        self.shared = None if config.shared_width is None else DenseMlp(width, config.shared())
        self.shared_gate = nn.Linear(width, 1, bias=False) if config.shared_gate else None

    @property
    def unused_parameters(self) -> int:
        return (self.config.experts - self.config.active) * self._one_expert()

    @property
    def flops(self) -> int:
        gate = 0 if self.shared_gate is None else 2 * self.shared_gate.in_features  # its weight may be packed
        shared = 0 if self.shared is None else self.shared.flops
        if self.to_latent is not None:
            shared += 4 * self.to_latent.in_features * self.to_latent.out_features
        return 2 * (self.config.active * self._one_expert() + self.router.weight.numel()) + shared + gate

    def _one_expert(self) -> int:
        """Return the number of parameters of an expert."""
        return (self.to_hidden.weight.numel() + self.out.weight.numel()) // self.config.experts

    def forward(self, x_BTD: Tensor, context: Context) -> MlpOutput:
        experts, active = self.config.experts, self.config.active
        expert_BTK, weight_BTK, side = self.router(x_BTD, context)
        groups = group_rows(expert_BTK.flatten(0, 1), experts)
        x_NC = (x_BTD if self.to_latent is None else self.to_latent(x_BTD)).flatten(0, 1)
        hidden_AF = self.to_hidden(x_NC.index_select(0, groups.order // active), groups.ends)
        y_AC = self.out(self._activate(hidden_AF), groups.ends)
        y_BTKC = y_AC.index_select(0, groups.order.argsort()).view(*weight_BTK.shape, x_NC.shape[1])
        y_BTD = (weight_BTK[..., None] * y_BTKC).sum(2).to(y_AC.dtype)
        if self.from_latent is not None:
            y_BTD = self.from_latent(y_BTD)
        side = join_sides([side])
        if self.shared is None:
            return MlpOutput(y_BTD, side)
        shared_BTD = self.shared(x_BTD, context).y
        if self.shared_gate is not None:
            shared_BTD = self.shared_gate(x_BTD).sigmoid() * shared_BTD
        return MlpOutput(y_BTD + shared_BTD, side)

    def residual_step(self, x_B1D: Tensor, norm: Norm) -> Tensor | None:
        config, router, shared = self.config, self.router, self.shared
        parts = {router: ExpertRouter, self.to_hidden: GroupedLinear, self.out: GroupedLinear}
        if shared is not None:
            parts[shared] = DenseMlp
        if not all(type(part) is cls and is_plain(part) for part, cls in parts.items()):
            return None
        maps = [self.shared_gate, *(() if shared is None else (shared.to_hidden, shared.out))]
        if not all(linear is None or reads_weight(linear, x_B1D) for linear in maps):
            return None
        experts = Experts(self.to_hidden.weight, self.out.weight, config.activation, config.gated)
        of_shared = SharedExpert()
        if shared is not None:
            gate = None if self.shared_gate is None else self.shared_gate.weight
            of_shared = SharedExpert(shared.to_hidden.weight, shared.out.weight, gate)
        if self.to_latent is not None or config.groups > 1 or expert_step.refusals(x_B1D, experts, config.active):
            return None
        if any(weight.dtype != x_B1D.dtype for weight in (router.weight, *experts[:2])):
            return None
        routing = Routing(
            router.weight, router.bias, config.active, config.scores == "sigmoid", config.normalize, config.scale
        )
        return expert_step.add_experts(x_B1D, norm, routing, experts, of_shared)

    def _activate(self, hidden_AF: Tensor) -> Tensor:
        if not self.config.gated:
            return activate(hidden_AF, self.config.activation)
        gate_AF, up_AF = hidden_AF.chunk(2, dim=-1)
        return activate(gate_AF, self.config.activation) * up_AF
