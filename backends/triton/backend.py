"""TritonBackend: the specs and devices that it supports, and the operands of its kernels."""

import importlib.util
import os

import torch
from torch import Tensor

from deltazoo.backends.context_parallel.plan import Links
from deltazoo.backends.io.errors import OperandError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.ops.short_conv import ConvInputs, ConvMeta, ConvPart, wide_short_conv
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.chunk.carried_op import carried_scan
from deltazoo.backends.triton.chunk.op import begin_scan, chunk_scan
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.conv import op as conv
from deltazoo.backends.triton.conv import step_op as conv_step
from deltazoo.backends.triton.conv.wide_op import wide_conv
from deltazoo.backends.triton.decode import fused, fused_verify
from deltazoo.backends.triton.decode.op import begin_step, commit_, decode_operands, step_, verify
from deltazoo.backends.triton.element.op import element_step_, element_update
from deltazoo.backends.triton.element.show import explain_element
from deltazoo.backends.triton.limits import current_limits, limits_of, size_refusals
from deltazoo.backends.triton.lower import computes_in_float32, lower, route_of
from deltazoo.backends.triton.show import explain_plan
from deltazoo.backends.update.base import Backend, Draft, UpdateInputs, UpdateMeta, UpdateOutput, refuse_forward_mode
from deltazoo.backends.update.spec import UpdateSpec

_MAX_KEY_WIDTH = 256


class TritonBackend(Backend):
    """Compute the update with chunked Triton kernels, forward, backward and decode, on NVIDIA GPUs.

    Supports every spec, in float32, bfloat16 and float16. Additive specs with values of width 1 or 2, or with a
    rate, use elementwise kernels (element/). Accumulates in float32; products of float32 operands use tf32 only if
    `torch.set_float32_matmul_precision` allows it. Deterministic, without host synchronisation, CUDA-graph safe.
    Nothing is tuned at the first call: launch configs come from a table, else from a heuristic.

    Some specs keep rounding errors in the state: negative eigenvalues, an erase key other than k, several householders,
    and a delta rule with up to 16 keys without decay or beta (32 without both). There bfloat16 values that feed back
    into the state are split into two terms (hi + lo), and float16 is computed in float32. The kernels for Hopper GPUs
    split terms for 64 < K <= 128 and values up to 128 or a multiple of it, unless the erase key differs from k.

    On Hopper GPUs 16-bit operands use kernels in Gluon, which Triton's interpreter does not run; `plan` says which
    kernels run. A decode step of a mixer with its convolution, norms and gates is one kernel
    (`backends/ops/decode_step.py`), two if value heads share the key heads of a convolution. The short convolution has
    kernels for heads of up to 1024 channels, and for more than 8 taps kernels without the activation and norm, and none
    with weights per group; for a single token plain torch computes it, which Inductor fuses with neighbouring
    operations.

    Args:
        config: a launch config for every update; None: that of the table, else of the heuristic.
    Source: Gated DeltaNet 2412.06464 section 3.3 (the chunked form); docs/kernels.md; README.md (kernels).
    """

    name = "triton"

    def __init__(self, config: LaunchConfig | None = None) -> None:
        self.config = "" if config is None else config.model_dump_json()
        self.element = "" if config is None or config.element is None else config.element.model_dump_json()
        self._installed = importlib.util.find_spec("triton") is not None
        self._interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        return self.unsupported_on(spec, meta, None)

    def unsupported_on(self, spec: UpdateSpec, meta: UpdateMeta, device: DeviceSpec | None) -> list[str]:
        """Like `unsupported`, on a given device; None: the current GPU, if there is one."""
        interpreted = self._interpreted and device is None
        reasons = self._tensors_unsupported(meta.device, meta.dtype, interpreted, self._installed or device is not None)
        if meta.K > _MAX_KEY_WIDTH:
            reasons.append(f"K must be at most {_MAX_KEY_WIDTH}, got {meta.K}.")
        if reasons or interpreted or meta.device != "cuda":
            return reasons
        if route_of(spec, meta.V) == "elements":
            return [*(current_limits(False) if device is None else limits_of(device, False))[0]]
        channel = spec.decay in ("channel", "rate") or meta.decay_channels
        dtype = torch.float32 if computes_in_float32(spec, meta.K, meta.dtype, channel) else meta.dtype
        unsupported, name, memory = (
            current_limits(meta.grad, channel) if device is None else limits_of(device, meta.grad, channel)
        )
        return list(unsupported) or size_refusals(name, memory, dtype, meta.K, meta.V, meta.grad)

    def plan(self, spec: UpdateSpec, meta: UpdateMeta, shape: Shape | None, device: DeviceSpec | None) -> str | None:
        T = None if shape is None else shape.T
        route = route_of(spec, meta.V, T, packed=meta.packed or bool(shape and shape.lengths), grad=meta.grad)
        if route in ("elements", "element step"):
            return explain_element(spec, meta, shape, device, self.element)
        return explain_plan(spec, meta, shape, device, self.config)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        refuse_forward_mode(self.name, inputs)
        (B, T, _, K), (HV, V) = inputs.q.shape, inputs.v.shape[-2:]
        grad = T != 1 or UpdateMeta.of(inputs).grad  # of more than one token the route does not depend on it
        route = route_of(spec, V, T, packed=inputs.cu_seqlens is not None, grad=grad)
        if route in ("step", "element step"):
            shape = (B, HV, K, V)
            state = inputs.q.new_zeros(shape, dtype=torch.float32) if inputs.state is None else inputs.state.clone()
            return UpdateOutput(self.step_(spec, inputs, state, None), state)
        if route == "elements":
            return element_update(spec, inputs, self.element)
        lowered = lower(spec, inputs, self.config)
        return lowered.restore(*chunk_scan(lowered.operands, lowered.kind))

    def carried_unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        if route_of(spec, meta.V) == "elements":
            return ["the elementwise kernels have no segments that ranks could exchange."]
        return []

    def carried(self, spec: UpdateSpec, inputs: UpdateInputs, links: Links) -> UpdateOutput:
        refuse_forward_mode(self.name, inputs)
        lowered = lower(spec, inputs, self.config)
        return lowered.restore(*carried_scan(lowered.operands, lowered.kind, links))

    def compile_in_threads(self, spec: UpdateSpec, inputs: UpdateInputs) -> None:
        """Start to compile the kernels of an update in threads: forward and backward, or for T = 1 the decode step."""
        if route_of(spec, inputs.v.shape[-1]) == "elements":
            return  # two small kernels
        if inputs.q.shape[1] == 1 and inputs.cu_seqlens is None:
            assert inputs.state is not None
            begin_step(*decode_operands(spec, inputs, self.config), inputs.state)
        else:
            lowered = lower(spec, inputs, self.config)
            begin_scan(lowered.operands, lowered.kind)

    def compile_fused_step_in_threads(
        self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None
    ) -> None:
        """Start to compile the kernels of a fused decode step in threads."""
        fused.begin_fused_step(step, inputs, states, slots, self.config)

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            if route_of(spec, inputs.v.shape[-1], T=1, grad=False) == "element step":
                return element_step_(spec, inputs, states, slots)
            if torch.compiler.is_compiling():  # Inductor fuses these copies; in the operator each is a launch
                copied = {name: x.contiguous() for name, x in inputs._asdict().items() if x is not None}
                inputs = UpdateInputs(**copied)
            return step_(*decode_operands(spec, inputs, self.config), states, slots)

    def verify_(
        self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None
    ) -> tuple[Tensor, Draft]:
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            o, values = verify(*decode_operands(spec, inputs, self.config), states, slots)
            return o, Draft(inputs, values)

    def commit_(self, spec: UpdateSpec, draft: Draft, states: Tensor, slots: Tensor | None, accepted: Tensor) -> None:
        inputs, values = draft
        if values is None:
            raise OperandError("draft.values is missing: backend 'triton' must have made the draft")
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            commit_(*decode_operands(spec, inputs, self.config), values, states, slots, accepted)

    def fused_decode_unsupported(self, step: FusedDecodeStep, dtype: torch.dtype) -> list[str]:
        return fused.unsupported(step)

    def fused_decode_step_(
        self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None
    ) -> Tensor:
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            return fused.fused_decode_step_(step, inputs, states, slots, self.config)

    def fused_verify_unsupported(self, step: FusedDecodeStep, dtype: torch.dtype) -> list[str]:
        return fused_verify.unsupported(step)

    def fused_verify_(self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor) -> tuple[Tensor, Draft]:
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            return fused_verify.fused_verify(step, inputs, states)

    def short_conv_unsupported(self, meta: ConvMeta) -> list[str]:
        reasons = self._tensors_unsupported(meta.device, meta.dtype, self._interpreted, self._installed)
        if not reasons and not self._interpreted:
            reasons += current_limits(False)[0]
        too_wide = [part.unit for part in meta.parts if part.unit > conv.WIDEST_UNIT]
        if too_wide:
            reasons.append(f"heads with a norm must have at most {conv.WIDEST_UNIT} channels, got {too_wide[0]}.")
        if meta.single:
            reasons.append("Inductor fuses the convolution of a single token with neighbouring operations.")
        return reasons

    def short_conv(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...]:
        refuse_forward_mode(self.name, inputs)
        if inputs.weight.shape[-1] <= conv.MAX_TAPS:
            return conv.short_conv(inputs, parts)
        if inputs.ends is not None:
            return super().short_conv(inputs, parts)
        return wide_short_conv(inputs, parts, wide_conv)

    def short_conv_step_(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...] | None:
        refuse_forward_mode(self.name, inputs)
        return conv_step.conv_step_(inputs, parts) if conv_step.computes_step(inputs, parts) else None

    @staticmethod
    def _tensors_unsupported(device: str, dtype: torch.dtype, interpreted: bool, installed: bool) -> list[str]:
        reasons = []
        if not installed:
            reasons.append("it needs the package triton, which is not installed.")
        if device != ("cpu" if interpreted else "cuda"):
            reasons.append(f"it needs tensors on 'cuda', got '{device}'.")
        if dtype == torch.float64 or (interpreted and dtype == torch.bfloat16):
            takes = "float32 or float16 under Triton's interpreter" if interpreted else "float32, bfloat16 or float16"
            reasons.append(f"it computes in {takes}, got {str(dtype).removeprefix('torch.')}.")
        return reasons
