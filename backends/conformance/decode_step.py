"""Cases of a mixer's fused decode step: steps, operands, and the reference in float64.

B batch, C channels of the projection, H key heads, HV value heads, K key width, V value width, n householders, S rows
of the states
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.conformance.cache import REFERENCES
from deltazoo.backends.conformance.cases import Case
from deltazoo.backends.conformance.compare import Report, error_report, explain_nan, refusal
from deltazoo.backends.conformance.pairwise import pairwise_with
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.ops.decode_step import FusedDecodeInputs, FusedDecodeStep, fused_decode_spec_reasons
from deltazoo.backends.ops.short_conv import ConvInputs, ConvPart, short_conv
from deltazoo.backends.update.base import Backend, UpdateInputs, state_dtype
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec

# Optional operands: convolution bias, skip, a norm weight per head and channel ("each"), norm bias, slots of the rows.
OPTIONS = ("bias", "skip", "each", "norm_bias", "slots")


class FusedOperands(NamedTuple):
    """Arguments of `BoundUpdate.fused_decode_step_` after the step."""

    inputs: FusedDecodeInputs
    states: Tensor
    slots: Tensor | None


def make_fused_step(
    spec: UpdateSpec, H: int, HV: int, K: int, V: int, silu: str = "qkv", unit: str = "qk", **fields: Any
) -> FusedDecodeStep:
    """Build a step of these sizes.

    Args:
        silu, unit: the parts with a SiLU, and those with an L2 norm, as letters of "qkv".
        fields: other fields of the step.
    """
    n = spec.householders
    sizes, widths = (H * K, n * H * K, n * HV * V), (K, K, V)
    parts = [
        ConvPart(size, name in silu, width if name in unit else 0)
        for name, size, width in zip("qkv", sizes, widths, strict=True)
    ]
    return FusedDecodeStep(spec, H, HV, K, V, tuple(parts), **fields)


# Forms of a step: its fields with `silu`, and its `OPTIONS`. Together they cover every field.
_FORMS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"taps": 4, "norm": "rms", "eps": 1e-5, "gate": "silu"}, ()),
    ({"taps": 2, "norm": "layer", "eps": 0.1, "gate": "sigmoid", "decay_bound": -5.0}, OPTIONS),
    ({"taps": 0, "gate": "gelu", "silu": "qk", "temperature": 4.0}, ("skip",)),
    (
        {"taps": 1, "norm": "rms", "eps": 0.1, "gate": "none", "gate_first": True, "silu": "v"},
        ("bias", "each", "slots"),
    ),
)
FORMS = 2 * len(_FORMS)  # each form with a gate, then each without


def typical_step(spec: UpdateSpec, shape: Shape, form: int = 0) -> FusedDecodeStep:
    """Build a step around a spec.

    Args: form: 0 is the step of Gated DeltaNet, or of Mamba-2 for an additive spec; the others cover all other fields.
    """
    is_additive, has_decay = spec.transition == "additive", spec.decay in ("head", "channel")
    fields = {"gate_first": is_additive} | _FORMS[form % len(_FORMS)][0]
    if form >= len(_FORMS):
        fields |= {"gate": "", "gate_first": False}
    if not has_decay:
        fields = {name: value for name, value in fields.items() if name not in ("decay_bound", "temperature")}
    has_dt = not {"decay_bound", "temperature"} & fields.keys()
    fields["scale_v_by_dt"] = is_additive and spec.decay == "head" and has_dt
    unit = "" if is_additive or shape.K == 1 else "q" if spec.reparam != "none" else "qk"
    return make_fused_step(spec, shape.H, shape.HV, shape.K, shape.V, unit=unit, **fields)


def draw_step(
    step: FusedDecodeStep,
    options: Collection[str] = (),
    B: int = 3,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> FusedOperands:
    """Draw the operands of a step in float64 and round them: activations to dtype, parameters to at least float32.

    beta and decay are slices of one tensor, as in a mixer with one projection for both.

    Args: options: of `OPTIONS`.
    """
    spec, n = step.spec, step.spec.householders
    S = B + 2 if "slots" in options else B
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device).to(dtype)

    parameter_dtype = torch.promote_types(dtype, torch.float32)
    C, size = step.channels, step.HV * step.V if "each" in options else step.V
    operands: dict[str, Tensor] = {"qkv": normal(B, 1, C)}
    if step.taps:
        operands |= {"weight": normal(C, step.taps, dtype=parameter_dtype), "history": normal(S, step.taps - 1, C)}
        if "bias" in options:
            operands["bias"] = normal(C, dtype=parameter_dtype)
    gates = normal(B, 1, n * step.HV + step.decays + 3)
    if spec.beta in ("head", "separate"):
        operands["beta"] = gates[..., : n * step.HV]
    if spec.decay in ("head", "channel"):
        operands["decay"] = gates[..., n * step.HV : n * step.HV + step.decays]
        if step.temperature is None:
            operands["A_log"] = normal(step.HV, dtype=parameter_dtype)
            operands["dt_bias"] = normal(step.decays, dtype=parameter_dtype)
    if spec.decay == "fixed":
        operands["log_decay"] = -normal(step.HV, dtype=parameter_dtype).exp()
    if spec.beta == "channel":
        operands |= {"erase": normal(B, 1, n * step.HV * step.K), "write": normal(B, 1, n * step.HV * step.V)}
    if spec.beta == "separate":
        operands |= {
            "feedback": normal(step.H, dtype=parameter_dtype),
            "correction": normal(step.H, dtype=parameter_dtype),
        }
    if "skip" in options and n == 1:
        operands["skip"] = normal(step.HV, dtype=parameter_dtype)
    if step.norm:
        operands["norm_weight"] = normal(size, dtype=parameter_dtype)
        if "norm_bias" in options:
            operands["norm_bias"] = normal(size, dtype=parameter_dtype)
    if step.gate:
        operands["gate"] = normal(B, 1, step.HV * step.V)
    states = normal(S, step.HV, step.K, step.V, dtype=state_dtype(dtype))
    slots = torch.randperm(S, generator=generator, device=device)[:B] if "slots" in options else None
    return FusedOperands(FusedDecodeInputs(**operands), states, slots)


def reference_step(step: FusedDecodeStep, operands: FusedOperands) -> tuple[Tensor, FusedOperands]:
    """Compute the equations of `FusedDecodeStep` in float64, with the update by the reference; modifies no operand.

    Returns: o, and the operands after the step.
    """
    present = {name: t for name, t in operands.inputs._asdict().items() if t is not None}
    x = operands.inputs._replace(**{name: t.to(torch.float64, copy=True) for name, t in present.items()})
    states, slots = operands.states.to(torch.float64, copy=True), operands.slots
    n = step.spec.householders
    q, k, v = _project(step, x, slots)
    gates, dt = _gates(step, x)
    skipped = v
    if step.scale_v_by_dt and dt is not None:
        v = v * (dt[:, :, None, :, None] if n > 1 else dt[..., None])
    if x.correction is not None:
        q = q - x.correction[:, None] * (k[:, :, -1] if n > 1 else k)
    o = ReferenceBackend().step_(step.spec, UpdateInputs(q, k, v, **gates), states, slots)
    o = o if x.skip is None else o + x.skip[:, None] * skipped
    gate = None if x.gate is None else _GATES[step.gate](x.gate.view(o.shape))
    o = o * gate if gate is not None and step.gate_first else o
    if x.norm_weight is not None:
        o = o - o.mean(-1, keepdim=True) if step.norm == "layer" else o
        o = o / (o.square().mean(-1, keepdim=True) + step.eps).sqrt() * x.norm_weight.view(-1, step.V)
        o = o if x.norm_bias is None else o + x.norm_bias.view(-1, step.V)
    o = o * gate if gate is not None and not step.gate_first else o
    return o, FusedOperands(x, states, slots)


def _gates(step: FusedDecodeStep, x: FusedDecodeInputs) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return the operands of the update beside q, k and v, and dt, the step of a decay with A_log."""
    n, by_channel = step.spec.householders, step.spec.decay == "channel"
    gates: dict[str, Tensor] = {}
    if x.beta is not None:
        beta = x.beta.sigmoid()
        gates["beta"] = torch.unflatten(beta, -1, (n, -1)) if n > 1 else beta
    if x.erase is not None and x.write is not None:
        heads = (n, step.HV, -1) if n > 1 else (step.HV, -1)
        for name in ("erase", "write"):
            gates[name] = torch.unflatten(getattr(x, name).sigmoid(), -1, heads)
    if x.feedback is not None:
        gates["write"] = gates.pop("beta")
        gates["erase"] = x.feedback.sigmoid().repeat_interleave(step.HV // step.H) * gates["write"]
    if x.log_decay is not None:
        gates["log_decay"] = x.log_decay
    if x.decay is not None and step.temperature is not None:
        raw = torch.unflatten(x.decay, -1, (step.HV, step.K)) if by_channel else x.decay
        gates["log_decay"] = F.logsigmoid(raw) / step.temperature
    if x.decay is None or x.A_log is None or x.dt_bias is None:
        return gates, None
    rate, raw = x.A_log.exp(), x.decay + x.dt_bias
    if by_channel:
        rate, raw = rate[:, None], torch.unflatten(raw, -1, (step.HV, step.K))
    dt = F.softplus(raw)
    gates["log_decay"] = -rate * dt if step.decay_bound is None else step.decay_bound * (rate * raw).sigmoid()
    return gates, dt


def fused_cases(
    backend: Backend, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], specs: Sequence[UpdateSpec]
) -> list[Case]:
    """Return a pairwise cover for `compare_step`, with forms as seeds; one case for a backend without a fused step."""
    if type(backend).fused_decode_step_ is Backend.fused_decode_step_:
        return [Case(specs[0], shapes[0], dtypes[0])]
    fusible = [spec for spec in specs if not fused_decode_spec_reasons(spec)]
    if not fusible:
        return []
    return [case._replace(seed=form) for case, form in pairwise_with(range(FORMS), shapes, dtypes, fusible)]


def compare_step(backend: str | Backend, case: Case, device: torch.device | str = "cpu") -> Report:
    """Compare a backend's fused step with the reference in float64: o, states and history.

    Uses the spec, sizes and dtype of the case; its seed selects the form of the step.
    """
    form = case.seed % FORMS
    case = case._replace(shape=case.shape._replace(B=3, T=1, lengths=()), regime="ordinary")
    backend, options = resolve(backend), _FORMS[form % len(_FORMS)][1]
    refused = refusal(backend, case, device, grad=False)
    if refused is not None:
        return refused
    step = typical_step(case.spec, case.shape, form)
    reasons = fused_decode_spec_reasons(case.spec) or backend.fused_decode_unsupported(step, case.dtype)
    if reasons:
        return Report(backend.name, case, [], [], reasons)
    operands = draw_step(step, options, 3, case.dtype, device, case.seed)
    rows = torch.arange(3, device=device) if operands.slots is None else operands.slots
    unused = torch.ones(len(operands.states), dtype=torch.bool, device=device).index_fill(0, rows, False)
    for tensor in (operands.states, operands.inputs.history):
        if tensor is not None:
            tensor[unused] = torch.nan  # a step must neither read nor write them
    key = (step, options, case.dtype, case.seed, str(device))
    o, after = REFERENCES.get(key, partial(reference_step, step, operands))
    results = {"o": bind(case.spec, backend).fused_decode_step_(step, *operands), "state": operands.states[rows]}
    report = error_report(backend, case, results, {"o": o, "state": after.states[rows]})
    report = explain_nan(report, "the states and histories of slots that belong to no row")
    failures = []
    if not operands.states[unused].isnan().all():
        failures.append("a fused step must write only to the slots of its rows")
    for name, x in operands.inputs._asdict().items():
        if x is not None and not torch.allclose(
            x.double(), getattr(after.inputs, name), rtol=0, atol=0, equal_nan=True
        ):
            rule = "hold the last inputs of its rows, unrounded" if name == "history" else "not be modified"
            failures.append(f"{name} must {rule}")
    return report._replace(failures=report.failures + failures)


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "none": lambda x: x,
}


def _project(step: FusedDecodeStep, x: FusedDecodeInputs, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve qkv and split it into q [B, 1, H, K], k and v [B, 1, (n,) heads, width]; update the history."""
    n, rows = step.spec.householders, slice(None) if slots is None else slots
    if x.weight is None or x.history is None:
        parts = short_conv(ConvInputs(x.qkv, x.qkv.new_ones(x.qkv.shape[2], 1)), step.parts)
    else:
        parts = short_conv(ConvInputs(x.qkv, x.weight, x.bias, x.history[rows]), step.parts)
        x.history[rows] = torch.cat([x.history[rows], x.qkv], 1)[:, 1:]
    q, k, v = parts
    k, v = (torch.unflatten(y, -1, (n, h, -1) if n > 1 else (h, -1)) for y, h in ((k, step.H), (v, step.HV)))
    return torch.unflatten(q, -1, (step.H, -1)), k, v
