"""Diagonal preconditioner of the delta rule: the written key is scaled by a bounded inverse of the keys' second moment.

B batch, T time, D width, H key heads, K key width
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.triton.decode.fused import unsupported
from deltazoo.backends.triton.decode.preconditioned_op import FactorKind, SecondMoment, preconditioned_step_
from deltazoo.backends.update.base import UpdateInputs, state_dtype, without_autocast
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.decode_fusion import DecodeFusion
from deltazoo.mixers.core.decode_maps import apply_maps, is_step
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import Fusible, HeadShape, LinearPart, OperandPart, ResizesHeads, Stateful
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.gates.beta import Beta
from deltazoo.mixers.parts.gates.decays import SoftplusDecay
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.gates.per_value_head import HeadKind
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.projections import QKVProjection

SECOND_MOMENT = UpdateSpec(decay="head", transition="additive", beta="head", scale=1.0)
EPS = 1e-6
INITIAL_CENTER = -0.2


class Preconditioner(OperandPart, ResizesHeads, Stateful, TokenStep):
    """k_t <- k_t * M_t and e_t <- k_t, the erase key, with the second moment A of the keys in each channel:

        A_t = a_t A_(t-1) + beta_t k_t^2
        M_t = bound^(-r / (1 + |r|)), r = log(A_t + 1e-6) - c

    M lies between 1 / bound and bound, and is 1 at A = exp(c). a and beta are Mamba-2's decay and a sigmoid, per head,
    from maps apart from those of the delta rule. A is an update with one key channel, whose values are k^2.

    Args:
        bound: the largest factor.
        spec: of the mixer's update.
        rates: as for `SoftplusDecay`, of a.
        per: the heads that have an A: "key", or "value", for which q and k are repeated.
    State: A, [B, H or HV, 1, K].
    Initialisation: c = -0.2 for each head; a as `SoftplusDecay`.
    Source: Preconditioned DeltaNet 2604.21100; M, its constants and initial values as in the authors' code in fla.
    """

    splits: ClassVar[bool] = True

    def __init__(
        self, shape: HeadShape, bound: float, spec: UpdateSpec, rates: tuple[float, float], per: HeadKind = "key"
    ) -> None:
        super().__init__()
        self.step_spec = _with_written_key(spec)
        self.bound, self.heads = bound, shape.heads if per == "key" else shape.value_heads
        per_head = HeadShape(shape.width, self.heads, self.heads, 1, shape.key_width)
        self.decay = SoftplusDecay(per_head, rates=rates)
        self.beta = Beta(per_head)
        self.update = Update(SECOND_MOMENT, per_head)
        self.center = nn.Parameter(torch.empty(self.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.center, INITIAL_CENTER)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        return self.update.init_state(batch, like)

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(heads=self.heads)

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        if self.heads != inputs.k.shape[2]:
            groups = self.heads // inputs.k.shape[2]
            inputs = inputs._replace(q=inputs.q.repeat_interleave(groups, 2), k=inputs.k.repeat_interleave(groups, 2))
        k = inputs.k.to(state_dtype(inputs.k.dtype))
        one = torch.ones_like(k[..., :1])
        moment = UpdateInputs(one, one, k.square())
        parts: tuple[LinearPart, ...] = (self.decay, self.beta)
        is_joint = is_step(x, state) and all(map(is_plain, parts))
        products = apply_maps(x, {str(i): part.proj for i, part in enumerate(parts)}) if is_joint else {}
        for i, part in enumerate(parts):
            moment, _ = call_part(part, x, moment, None, context._replace(product=products.get(str(i))))
        with without_autocast(x):
            A, new_state = call_part(self.update, moment, state, context)
        r = torch.log(A + EPS) - self.center.to(A.dtype)[:, None]
        factor = torch.exp(-math.log(self.bound) * r / (1 + r.abs()))
        return inputs._replace(k=(k * factor).to(inputs.k.dtype), erase_key=inputs.k), new_state

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        fusion = self._fuse(call)
        parts = (self.decay, self.beta, self.update)
        if tuple(map(type, parts)) != (SoftplusDecay, Beta, Update) or not all(map(is_plain, parts)) or fusion is None:
            return None
        maps = {"moment_decay": self.decay.proj, "moment_beta": self.beta.proj}
        read = fusion.read_convolved(call.x, call.states.get("project"), call.norm, maps)
        if read is None:
            return None
        decay, beta = (read.products[name] for name in maps)
        moment = SecondMoment(decay, beta, self.decay.A_log, self.decay.dt_bias, self.center, call.state_of(self))
        kind = FactorKind(math.log(self.bound), EPS)
        o = preconditioned_step_(read.step, read.inputs, moment, kind, call.states["update"])
        return TokenOutput(o.flatten(2))

    def _fuse(self, call: TokenCall) -> DecodeFusion | None:
        """Return the step of all parts but this one, as if it erased with the written key; None: it has no kernel."""
        gates = (QKVProjection, Beta, SoftplusDecay, Preconditioner)
        pairs, outputs = ((), (EraseAsPair,)), ((HeadNorm,), (HeadNorm, OutputGate))
        if not any(call.has_parts(*gates, *pair, Update, *output) for pair in pairs for output in outputs):
            return None
        update, project = call.part(Update), call.part(QKVProjection)
        if self.step_spec is None or project.shape.heads != self.heads:
            return None
        _, H, HV, K, V, _ = update.shape
        step: FusedDecodeStep | None = FusedDecodeStep(self.step_spec, H, HV, K, V, parts=())
        fused = {name: part for name, part in call.parts.items() if isinstance(part, Fusible)}
        for part in fused.values():
            step = None if step is None else part.fuse_into(step)
        return None if step is None or unsupported(step) else DecodeFusion(step, fused, [])

    def extra_repr(self) -> str:
        return f"bound={self.bound:g}"


def _with_written_key(spec: UpdateSpec) -> UpdateSpec | None:
    """Return the delta rule of a mixer as if it erased with the key that it writes; None: it is another update."""
    if spec == UpdateSpec(decay="channel", transition="dplr", scale=spec.scale):  # by `EraseAsPair`
        return UpdateSpec(decay="channel", beta="head", scale=spec.scale)
    return spec.model_copy(update={"erase_key": "key"}) if spec.erase_key == "own" else None


class EraseAsPair(OperandPart):
    """Write a delta rule with an erase key e as S_t = D_t S_(t-1) + b_t (a_t^T S_(t-1)) + k_t v_t^T:

        a_t = D_t e_t,  b_t = -beta_t k_t,  v_t <- beta_t v_t

    In 16 bits the kernels of this form keep the state in 16 bits. An erase key of any length would accumulate rounding
    errors there, but that of a preconditioned key is the unit key, and beta_t |k_t| is at most the bound.
    """

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        assert inputs.log_decay is not None and inputs.beta is not None and inputs.erase_key is not None
        dtype, groups = state_dtype(inputs.k.dtype), inputs.v.shape[2] // inputs.k.shape[2]
        # k, e and v keep their dtype: of operands converted to float32, the backward would save the converted copies
        key, erase = (y.repeat_interleave(groups, 2) for y in (inputs.k, inputs.erase_key))
        beta = inputs.beta.to(dtype)[..., None]
        a, b, v = inputs.log_decay.to(dtype).exp() * erase, -beta * key, beta * inputs.v
        a, b, v = (y.to(inputs.v.dtype) for y in (a, b, v))
        return inputs._replace(a=a, b=b, v=v, beta=None, erase_key=None), None
