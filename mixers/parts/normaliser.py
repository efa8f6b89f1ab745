"""The normaliser of linear attention as an additional column of the state: o_t = S_t^T q_t / (z_t^T q_t).

B batch, T time, HV value heads, V value width
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.ops.gemv import products as products_of_few_rows
from deltazoo.backends.triton.decode.normalised_op import PAIRS, NormalisedCall, normalised_step_, takes_state
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import Decay
from deltazoo.mixers.core.decode_maps import adds_to_product
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import GateLinear, HeadShape, OperandPart, OutputArguments, OutputPart, ResizesHeads
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update
from deltazoo.mixers.parts.feature_maps import FeatureMap, RandomFourierFeatures
from deltazoo.mixers.parts.gates.decays import SigmoidDecay, TiedInputGate
from deltazoo.mixers.parts.gates.exponential_gating import ExponentialGate
from deltazoo.mixers.parts.gates.output_gates import OutputGate
from deltazoo.mixers.parts.norms import HeadNorm, SharedLayerNorm, UnitNorm
from deltazoo.mixers.parts.projections import QKVProjection


class _Step(NamedTuple):
    """What a decode step reads, by the names of `NormalisedCall`.

    maps: of the input, to raw gates and the output gate. gates: "": there are none.
    """

    gates: str
    maps: Mapping[str, nn.Module] = {}
    bias: Tensor | None = None
    largest: Tensor | None = None
    directions: Tensor | None = None
    sigma: Tensor | None = None
    norm: str = ""
    norm_weight: Tensor | None = None
    norm_eps: float = 0.0
    activation: str = ""
    feature: str = ""
    key_weight: Tensor | None = None
    key_bias: Tensor | None = None
    key_eps: float = 0.0


class NormaliserColumn(OperandPart, ResizesHeads, TokenStep):
    """v <- [v, 1], so that the last column of the state is the normaliser z, the decayed sum of the keys."""

    def forward(
        self, x: Tensor, inputs: UpdateInputs, state: Tensor | None, context: Context
    ) -> tuple[UpdateInputs, Tensor | None]:
        return inputs._replace(v=F.pad(inputs.v, (0, 1), value=1.0)), None

    def resize_heads(self, shape: HeadShape) -> HeadShape:
        return shape._replace(value_width=shape.value_width + 1)

    def decode_token_(self, call: TokenCall) -> TokenOutput | None:
        step = _plain_step(call) or _layer_norm_step(call) or _fourier_step(call) or _exponential_step(call)
        if step is None:
            return None
        project, update = call.parts["project"], call.parts["update"]
        divide = next(part for part in call.parts.values() if isinstance(part, Normalise))
        assert isinstance(project, QKVProjection) and isinstance(update, Update)
        maps = {"qkv": project.to_qkv, **step.maps}
        _, H, HV, K, V, _ = update.shape
        decay: Decay = "head" if step.gates else "none"
        if isinstance(divide.floor, str) and step.gates != "exponential":
            return None
        if not update.is_decayed_sum(decay) or not project.is_one_map() or not takes_state(len(call.x) * HV, K, V - 1):
            return None
        linears = [linear for linear in maps.values() if adds_to_product(linear, call.x)]
        if len(linears) < len(maps):
            return None
        # the bias of a `GateLinear` is added in float32, by the kernel
        biases = [None if isinstance(linear, GateLinear) else linear.bias for linear in linears]
        products = products_of_few_rows(call.x[:, 0], [x.weight for x in linears], call.norm, biases=biases)
        of = dict(zip(maps, products, strict=True))
        divisor, floor = "sum", 0.0
        if isinstance(divide.floor, str):
            divisor = "one"
        elif divide.floor is not None:
            divisor, floor = "floor", divide.floor
        o = normalised_step_(
            NormalisedCall(
                H, step.gates, divisor, of["qkv"], call.states["update"], update.spec.scale_of(K),
                divide.eps, floor, of.get("raw"), step.bias, step.largest, step.directions, step.sigma, step.norm,
                step.norm_weight, step.norm_eps, step.activation, of.get("gate"), step.feature,
                step.key_weight, step.key_bias, step.key_eps,
            )
        )  # fmt: skip
        return TokenOutput(o[:, None])


class Normalise(OutputPart):
    """o <- o_(1..V) / (o_(V+1) + eps), where the last column is z^T q.

    Args:
        floor: if given, divide by max(|z^T q|, floor) + eps, because z^T q may be small or negative. A number, or the
            name of an intermediate [B, T, HV].
    Source: Katharopoulos 2020, 2006.16236; xLSTM 2405.04517, equation 21 (floor).
    """

    def __init__(self, eps: float, floor: float | str | None = None) -> None:
        super().__init__()
        self.eps, self.floor = eps, floor

    def forward(
        self, o: Tensor, arguments: OutputArguments, state: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None]:
        if self.floor is None:
            return (o[..., :-1] / (o[..., -1:] + self.eps)).to(arguments.projected.v.dtype), None
        wide = o.to(state_dtype(o.dtype))
        if isinstance(self.floor, str):
            normaliser = torch.maximum(wide[..., -1:].abs(), context.intermediate(self.floor)[..., None])
        else:
            normaliser = wide[..., -1:].abs().clamp(min=self.floor)
        return (wide[..., :-1] / (normaliser + self.eps)).to(arguments.projected.v.dtype), None

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}, floor={self.floor!r}"


def _plain_step(call: TokenCall) -> _Step | None:
    """Return what a step of linear attention or Based reads; None: other parts, or the feature map has no kernel."""
    if not call.has_parts(QKVProjection, FeatureMap, NormaliserColumn, Update, Normalise):
        return None
    feature = call.part(FeatureMap).feature
    return _Step("", feature=feature) if feature in ("elu+1", *PAIRS) else None


def _layer_norm_step(call: TokenCall) -> _Step | None:
    """Return what a step of ReBased reads; None: the parts are others, or the feature map has no kernel."""
    if not call.has_parts(QKVProjection, SharedLayerNorm, FeatureMap, NormaliserColumn, Update, Normalise):
        return None
    norm, feature = call.part(SharedLayerNorm), call.part(FeatureMap).feature
    if feature not in PAIRS:
        return None
    return _Step("", feature=feature, key_weight=norm.weight, key_bias=norm.bias, key_eps=norm.eps)


def _fourier_step(call: TokenCall) -> _Step | None:
    """Return what a step of gated RFA reads; None: the parts are others."""
    operands = (UnitNorm, RandomFourierFeatures, NormaliserColumn, SigmoidDecay, TiedInputGate)
    if not call.has_parts(QKVProjection, *operands, Update, Normalise):
        return None
    _, unit, features, _, decay, tied, *_ = call.parts.values()
    assert isinstance(unit, UnitNorm) and isinstance(features, RandomFourierFeatures)
    assert isinstance(decay, SigmoidDecay) and isinstance(tied, TiedInputGate)
    if unit.norm != "l2" or unit.which != "qk" or tied.into != "value":
        return None
    if decay.temperature != 1 or decay.floor is not None or decay.conv is not None or decay.per != "head":
        return None
    return _Step("sigmoid", {"raw": decay.proj}, directions=features.G, sigma=features.sigma)


def _exponential_step(call: TokenCall) -> _Step | None:
    """Return what a step of mLSTM reads; None: the parts are others."""
    operands = (NormaliserColumn, ExponentialGate)
    if not call.has_parts(QKVProjection, *operands, Update, Normalise, HeadNorm, OutputGate):
        return None
    _, _, gates, _, _, norm, output_gate = call.parts.values()
    assert isinstance(gates, ExponentialGate)
    assert isinstance(norm, HeadNorm) and isinstance(output_gate, OutputGate)
    if norm.weight is None or norm.bias is not None or norm.groups != gates.heads:
        return None
    if not adds_to_product(gates.proj, call.x):
        return None
    return _Step(
        "exponential", {"raw": gates.proj, "gate": output_gate.proj}, gates.proj.bias,
        call.state_of(gates), None, None, norm.kind, norm.weight, norm.eps, output_gate.activation,
    )  # fmt: skip
