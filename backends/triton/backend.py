"""TritonBackend: the specs and devices that it supports, and the operands of its kernels."""

import importlib.util
import os

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput, refuse_forward_mode
from deltazoo.backends.decode_step import FusedDecodeInputs, FusedDecodeStep
from deltazoo.backends.devices import DeviceSpec
from deltazoo.backends.lowering import strengths
from deltazoo.backends.shapes import Shape
from deltazoo.backends.short_conv import ConvInputs, ConvMeta, ConvPart
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.triton import decode_step as fused
from deltazoo.backends.triton import short_conv as conv
from deltazoo.backends.triton.config import LaunchConfig
from deltazoo.backends.triton.limits import current_limits, limits_of, size_refusals
from deltazoo.backends.triton.op import chunk_scan, step_
from deltazoo.backends.triton.operands import ScanKind, ScanOperands
from deltazoo.backends.triton.show import explain_plan

_MAX_KEY_WIDTH = 256


class TritonBackend(Backend):
    """Compute the update with chunked Triton kernels, forward, backward and decode, on NVIDIA GPUs.

    Supports decay "none", "fixed" or "head" with transition "additive" or "delta", any beta per head, erase key,
    reparametrisation and number of householders, in float32, bfloat16 and float16. Accumulates in float32; products of
    float32 operands use tf32 only if `torch.set_float32_matmul_precision` allows it. Deterministic, without host
    synchronisation, CUDA-graph safe. Nothing is tuned at the first call: launch configs come from a table, else from a
    heuristic.

    Some specs keep rounding errors in the state: negative eigenvalues, an erase key other than k, several householders,
    and a delta rule with up to 16 keys without decay or beta (32 without both). There bfloat16 values that feed back
    into the state are split into two terms (hi + lo), and float16 is computed in float32.

    On Hopper GPUs 16-bit operands use kernels in Gluon, which Triton's interpreter does not run; `plan` says which
    kernels run. A decode step of a mixer with its convolution, norms and gates is one kernel
    (`backends/decode_step.py`), two if value heads share the key heads of a convolution. The short convolution has
    kernels for up to 8 taps and heads of 1024 channels; for a single token plain torch computes it, which Inductor
    fuses with neighbouring operations.

    Args:
        config: a launch config for every update; None: that of the table, else of the heuristic.
    Source: Gated DeltaNet 2412.06464 section 3.3 (the chunked form); docs/kernels.md; README.md (kernels).
    """

    name = "triton"

    def __init__(self, config: LaunchConfig | None = None) -> None:
        self.config = "" if config is None else config.model_dump_json()
        self._installed = importlib.util.find_spec("triton") is not None
        self._interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        return self.unsupported_on(spec, meta, None)

    def unsupported_on(self, spec: UpdateSpec, meta: UpdateMeta, device: DeviceSpec | None) -> list[str]:
        """Like `unsupported`, on a given device; None: the current GPU, if there is one."""
        interpreted = self._interpreted and device is None
        reasons = self._tensors_unsupported(meta.device, meta.dtype, interpreted, self._installed or device is not None)
        if spec.decay in ("channel", "rate"):
            reasons.append(f"decay must be 'none', 'fixed' or 'head', got '{spec.decay}'.")
        if meta.decay_channels:
            reasons.append("a fixed decay must be one number per head, log_decay [HV], got [HV, K].")
        if spec.transition == "dplr":
            reasons.append("transition must be 'additive' or 'delta', got 'dplr'.")
        if spec.beta == "channel":
            reasons.append("beta must be 'none' or 'head', got 'channel'.")
        if meta.K > _MAX_KEY_WIDTH:
            reasons.append(f"K must be at most {_MAX_KEY_WIDTH}, got {meta.K}.")
        if reasons or interpreted or meta.device != "cuda":
            return reasons
        split_terms = _splits_terms(spec, meta.K, meta.dtype)
        dtype = torch.float32 if split_terms and meta.dtype == torch.float16 else meta.dtype
        unsupported, name, memory = current_limits(meta.grad) if device is None else limits_of(device, meta.grad)
        own = spec.erase_key == "own"
        return [*unsupported, *size_refusals(name, memory, dtype, meta.K, meta.V, meta.grad, split_terms, own)]

    def plan(self, spec: UpdateSpec, meta: UpdateMeta, shape: Shape | None, device: DeviceSpec | None) -> str | None:
        return explain_plan(spec, meta, shape, device, self.config, _splits_terms(spec, meta.K, meta.dtype))

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        refuse_forward_mode(self.name, inputs)
        n, T, V, dtype = spec.householders, inputs.q.shape[1], inputs.v.shape[-1], inputs.v.dtype
        if _keeps_rounding_errors(spec) and dtype == torch.float16:
            # the low term would underflow in float16
            wide = {name: getattr(inputs, name).float() for name in ("q", "k", "v")}
            wide["erase_key"] = None if inputs.erase_key is None else inputs.erase_key.float()
            inputs = inputs._replace(**wide)
        x, kind = self._operands(spec, inputs)
        if T == 1 and inputs.cu_seqlens is None and not UpdateMeta.of(inputs).grad:
            shape = (inputs.q.shape[0], inputs.v.shape[-2], x.q.shape[-1], x.v.shape[-1])
            state = x.q.new_zeros(shape, dtype=torch.float32) if x.state is None else x.state.clone()
            o = step_(x._replace(state=None), state, None, kind)
            return UpdateOutput(_crop(o, V).to(dtype), _crop(state, V, inputs.q.shape[-1]))
        if n > 1:
            x = _by_micro_steps(spec, x, n)
        o, state = chunk_scan(x, kind)
        if n > 1:
            o = o.unflatten(1, (T, n))[:, :, 0 if spec.read == "before" else n - 1]
        return UpdateOutput(_crop(o, V).to(dtype), _crop(state, V, inputs.q.shape[-1]))

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            x, kind = self._operands(spec, inputs, padded=False)
            return step_(x, states, slots, kind)

    def fused_decode_unsupported(self, step: FusedDecodeStep, dtype: torch.dtype) -> list[str]:
        return fused.unsupported(step)

    def fused_decode_step_(
        self, step: FusedDecodeStep, inputs: FusedDecodeInputs, states: Tensor, slots: Tensor | None
    ) -> Tensor:
        refuse_forward_mode(self.name, (*inputs, states))
        with torch.no_grad():
            return fused.fused_decode_step_(step, inputs, states, slots, self.config)

    def short_conv_unsupported(self, meta: ConvMeta) -> list[str]:
        reasons = self._tensors_unsupported(meta.device, meta.dtype, self._interpreted, self._installed)
        if not reasons and not self._interpreted:
            reasons += current_limits(False)[0]
        reasons += conv.too_many_taps(meta.taps)
        too_wide = [part.unit for part in meta.parts if part.unit > conv.WIDEST_UNIT]
        if too_wide:
            reasons.append(f"heads with a norm must have at most {conv.WIDEST_UNIT} channels, got {too_wide[0]}.")
        return reasons

    def short_conv(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...]:
        if inputs.x.shape[1] == 1:
            return super().short_conv(inputs, parts)  # Inductor fuses it
        refuse_forward_mode(self.name, inputs)
        return conv.short_conv(inputs, parts)

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

    def _operands(self, spec: UpdateSpec, inputs: UpdateInputs, padded: bool = True) -> tuple[ScanOperands, ScanKind]:
        """Build the kernels' operands: micro-steps are flattened into time, except for q and log_decay."""
        erase, write = strengths(spec, inputs)
        tied = write is erase and write is not None
        K, V = inputs.q.shape[-1], inputs.v.shape[-1]
        to_K, to_V = (-K % 8, -V % 8) if padded else (0, 0)

        def flat(x: Tensor | None, extra: int = 0) -> Tensor | None:
            if x is None:
                return None
            x = x.flatten(1, 2) if spec.householders > 1 else x
            return pad(x, (0, extra)) if extra else x

        k, v = flat(inputs.k, to_K), flat(inputs.v, to_V)
        assert k is not None and v is not None
        state = inputs.state
        if state is not None and (to_K or to_V):
            state = pad(state, (0, to_V, 0, to_K))
        operands = ScanOperands(
            q=pad(inputs.q, (0, to_K)) if to_K else inputs.q,
            k=k,
            v=v,
            log_decay=inputs.log_decay,
            b=flat(erase),
            w=None if tied else flat(write),
            e=flat(inputs.erase_key, to_K),
            state=state,
            cu_seqlens=inputs.cu_seqlens,
        )
        return operands, ScanKind(
            delta=spec.transition == "delta",
            erase_early=spec.erase_from == "previous",
            read_early=spec.read == "before",
            split_terms=_splits_terms(spec, K, k.dtype),
            tied=tied,
            scale=spec.scale_of(K),
            config=self.config,
        )


def _splits_terms(spec: UpdateSpec, K: int, dtype: torch.dtype) -> bool:
    """Whether values that feed back into the state are split into two terms."""
    return _keeps_rounding_errors(spec) or (dtype == torch.bfloat16 and _erases_most_of_the_state(spec, K))


def _keeps_rounding_errors(spec: UpdateSpec) -> bool:
    """Whether the erase may rotate or lengthen the state, or acts several times per token: errors then accumulate."""
    unbounded = spec.negative_eigenvalues != "off" or spec.erase_key == "own"
    return spec.transition == "delta" and (unbounded or spec.householders > 1)


def _erases_most_of_the_state(spec: UpdateSpec, K: int) -> bool:
    """Whether one erase removes a large part of the state: one of at most 16 directions without beta or without decay.

    In bfloat16 the rounding of the operands alone then costs o more than 5e-3. Up to 32 directions without both.
    """
    directions = 16 * (spec.beta, spec.decay).count("none")
    return spec.transition == "delta" and directions >= K


def _by_micro_steps(spec: UpdateSpec, x: ScanOperands, n: int) -> ScanOperands:
    """Spread q and log_decay over the n micro-steps of a token: the decay on the first, the read on the last.

    A read before the update is on the first micro-step.
    """
    B, T = x.q.shape[:2]

    def spread(y: Tensor, at: int) -> Tensor:
        """[B, T, ...] -> [B, T n, ...], zero except at micro-step `at`."""
        return pad(y.unsqueeze(2), (0, 0) * (y.dim() - 2) + (at, n - 1 - at)).flatten(1, 2)

    decay = x.log_decay
    if decay is not None:
        decay = spread(decay.expand(B, T, -1) if decay.dim() == 1 else decay, 0)
    cu = None if x.cu_seqlens is None else x.cu_seqlens * n
    return x._replace(q=spread(x.q, 0 if spec.read == "before" else n - 1), log_decay=decay, cu_seqlens=cu)


def _crop(x: Tensor, columns: int, rows: int | None = None) -> Tensor:
    """Remove the padding of the widths."""
    if rows is not None and x.shape[-2] != rows:
        x = x[..., :rows, :]
    return x if x.shape[-1] == columns else x[..., :columns]
