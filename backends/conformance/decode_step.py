"""What a backend that takes a decode step of a mixer in one is checked on: the steps, their operands, what is right.

B batch, C channels of the projection, H key heads, HV value heads, K key width, V value width, n householders, S rows
of the states
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.base import Backend, UpdateInputs, state_dtype
from deltazoo.backends.conformance.cases import Case
from deltazoo.backends.conformance.compare import Report, judged, refusal
from deltazoo.backends.conformance.pairwise import pairwise_cases
from deltazoo.backends.decode_step import FusedDecodeInputs, FusedDecodeStep, beyond
from deltazoo.backends.dispatch import bind
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.registry import resolve
from deltazoo.backends.shapes import Shape
from deltazoo.backends.short_conv import ConvInputs, ConvPart, short_conv
from deltazoo.backends.spec import UpdateSpec

# of what may be there or not: biases, the skip, a norm's weight of each head and its bias, rows that name their slots
OPTIONS = ("bias", "skip", "each", "norm_bias", "slots")


class FusedOperands(NamedTuple):
    """What `BoundUpdate.fused_decode_step_` takes beside the step."""

    inputs: FusedDecodeInputs
    states: Tensor
    slots: Tensor | None


def make_fused_step(
    spec: UpdateSpec, H: int, HV: int, K: int, V: int, silu: str = "qkv", unit: str = "qk", **fields: Any
) -> FusedDecodeStep:
    """A step of these sizes. Args: silu, unit: the letters of those of q, k and v that have it; fields: the step's."""
    n = spec.householders
    sizes, widths = (H * K, n * H * K, n * HV * V), (K, K, V)
    parts = [
        ConvPart(size, name in silu, width if name in unit else 0)
        for name, size, width in zip("qkv", sizes, widths, strict=True)
    ]
    return FusedDecodeStep(spec, H, HV, K, V, tuple(parts), **fields)


# What stands around an update, form by form: the step's fields with `silu`, and which of `OPTIONS` are there.
_FORMS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"taps": 4, "norm": "rms", "eps": 1e-5, "gate": "silu"}, ()),
    ({"taps": 2, "norm": "layer", "eps": 0.1, "gate": "sigmoid", "bound": -5.0}, OPTIONS),
    ({"taps": 0, "gate": "gelu", "top": 0.5, "silu": "qk"}, ("skip",)),
    (
        {"taps": 1, "norm": "rms", "eps": 0.1, "gate": "none", "gate_first": True, "silu": "v"},
        ("bias", "each", "slots"),
    ),
)
FORMS = 2 * len(_FORMS)  # each with its gate, then each without


def typical_step(spec: UpdateSpec, shape: Shape, form: int = 0) -> FusedDecodeStep:
    """A step around a spec: form 0 as mixers have it, Gated DeltaNet or, where nothing is erased, Mamba-2; the others
    with all else that a step may have."""
    additive, decayed = spec.transition == "additive", spec.decay == "head"
    fields = {"gate_first": additive} | _FORMS[form % len(_FORMS)][0]
    if form >= len(_FORMS):
        fields |= {"gate": "", "gate_first": False}
    if not decayed:
        fields.pop("bound", None)
    fields["writes"] = additive and decayed and "bound" not in fields
    unit = "" if additive or shape.K == 1 else "q" if spec.reparam != "none" else "qk"
    return make_fused_step(spec, shape.H, shape.HV, shape.K, shape.V, unit=unit, **fields)


def draw_step(
    step: FusedDecodeStep,
    options: Collection[str] = (),
    B: int = 3,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> FusedOperands:
    """Draw the operands of a step in float64 and round them: what a token brings to dtype, parameters to float32.

    beta and decay are slices of one product, as a mixer's maps leave them. Args: options: of `OPTIONS`.
    """
    spec, n = step.spec, step.spec.householders
    S = B + 2 if "slots" in options else B
    generator = torch.Generator(device).manual_seed(seed)

    def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device).to(dtype)

    wide = torch.promote_types(dtype, torch.float32)
    C, size = step.channels, step.HV * step.V if "each" in options else step.V
    given: dict[str, Tensor] = {"qkv": new(B, 1, C)}
    if step.taps:
        given |= {"weight": new(C, step.taps, dtype=wide), "history": new(S, step.taps - 1, C)}
        if "bias" in options:
            given["bias"] = new(C, dtype=wide)
    narrow = new(B, 1, n * step.HV + step.HV + 3)
    if spec.beta == "head":
        given["beta"] = narrow[..., : n * step.HV]
    if spec.decay == "head":
        given["decay"] = narrow[..., n * step.HV : (n + 1) * step.HV]
        given |= {"A_log": new(step.HV, dtype=wide), "dt_bias": new(step.HV, dtype=wide)}
    if spec.erase_key == "own":
        given |= {"feedback": new(step.H, dtype=wide), "correction": new(step.H, dtype=wide)}
    if "skip" in options and n == 1:
        given["skip"] = new(step.HV, dtype=wide)
    if step.norm:
        given["norm_weight"] = new(size, dtype=wide)
        if "norm_bias" in options:
            given["norm_bias"] = new(size, dtype=wide)
    if step.gate:
        given["gate"] = new(B, 1, step.HV * step.V)
    states = new(S, step.HV, step.K, step.V, dtype=state_dtype(dtype))
    slots = torch.randperm(S, generator=generator, device=device)[:B] if "slots" in options else None
    return FusedOperands(FusedDecodeInputs(**given), states, slots)


def reference_step(step: FusedDecodeStep, given: FusedOperands) -> tuple[Tensor, FusedOperands]:
    """The lines of `FusedDecodeStep` one by one in float64, the update by the reference: o, and the operands as they are
    after it. `given` is left alone."""
    operands = {name: t for name, t in given.inputs._asdict().items() if t is not None}
    x = given.inputs._replace(**{name: t.to(torch.float64, copy=True) for name, t in operands.items()})
    states, slots = given.states.to(torch.float64, copy=True), given.slots
    n = step.spec.householders
    q, k, v = _streams(step, x, slots)
    more: dict[str, Tensor] = {}
    plain = v
    if x.beta is not None:
        beta = x.beta.sigmoid().clamp(max=step.top)
        more["beta"] = beta.unflatten(-1, (n, -1)) if n > 1 else beta
    if x.decay is not None and x.A_log is not None and x.dt_bias is not None:
        rate, raw = x.A_log.exp(), x.decay + x.dt_bias
        dt = F.softplus(raw)
        more["log_decay"] = -rate * dt if step.bound is None else step.bound * (rate * raw).sigmoid()
        if step.writes:
            v = v * (dt[:, :, None, :, None] if n > 1 else dt[..., None])
    if x.feedback is not None and x.correction is not None:
        more["erase_key"] = x.feedback.sigmoid()[:, None] * k
        q = q - x.correction[:, None] * (k[:, :, -1] if n > 1 else k)
    o = ReferenceBackend().step_(step.spec, UpdateInputs(q, k, v, **more), states, slots)
    o = o if x.skip is None else o + x.skip[:, None] * plain
    gate = None if x.gate is None else _GATES[step.gate](x.gate.view(o.shape))
    o = o * gate if gate is not None and step.gate_first else o
    if x.norm_weight is not None:
        o = o - o.mean(-1, keepdim=True) if step.norm == "layer" else o
        o = o / (o.square().mean(-1, keepdim=True) + step.eps).sqrt() * x.norm_weight.view(-1, step.V)
        o = o if x.norm_bias is None else o + x.norm_bias.view(-1, step.V)
    o = o * gate if gate is not None and not step.gate_first else o
    return o, FusedOperands(x, states, slots)


def fused_cases(
    backend: Backend, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], specs: Sequence[UpdateSpec]
) -> list[Case]:
    """Choose few cases for `compare_step`, as `pairwise_cases` does: one where a backend takes no step in one."""
    if type(backend).fused_decode_step_ is Backend.fused_decode_step_:
        return [Case(specs[0], shapes[0], dtypes[0])]
    around = [spec for spec in specs if not beyond(spec)]
    return pairwise_cases(shapes, dtypes, around) if around else []


def compare_step(backend: str | Backend, case: Case, device: torch.device | str = "cpu") -> Report:
    """Compare the step around a case's spec that a backend takes in one with float64: o, the states, the history.

    Of a case its spec, sizes and dtype. Its seed, layout and state say which form the step has.
    """
    form = case.seed % 2 + 2 * (case.layout == "strided") + 4 * (case.state == "none")
    case = case._replace(shape=case.shape._replace(B=3, T=1, lengths=()), regime="ordinary")
    backend, options = resolve(backend), _FORMS[form % len(_FORMS)][1]
    refused = refusal(backend, case, device, grad=False)
    if refused is not None:
        return refused
    step = typical_step(case.spec, case.shape, form)
    reasons = beyond(case.spec) or backend.fused_decode_unsupported(step, case.dtype)
    if reasons:
        return Report(backend.name, case, [], [], reasons)
    given = draw_step(step, options, 3, case.dtype, device, case.seed)
    rows = torch.arange(3, device=device) if given.slots is None else given.slots
    others = torch.ones(len(given.states), dtype=torch.bool, device=device).index_fill(0, rows, False)
    for tensor in (given.states, given.inputs.history):
        if tensor is not None:
            tensor[others] = torch.nan  # what no row may read, nor write
    want, after = reference_step(step, given)
    o = bind(case.spec, backend).fused_decode_step_(step, *given)
    got = {"o": o, "state": given.states[rows]}
    report = judged(backend, case, got, {"o": want, "state": after.states[rows]}, None)
    wrong = []
    if not given.states[others].isnan().all():
        wrong.append("a fused step must write to the slots of its rows only, and wrote to another")
    for name, x in given.inputs._asdict().items():
        if x is not None and not torch.allclose(
            x.double(), getattr(after.inputs, name), rtol=0, atol=0, equal_nan=True
        ):
            must = "be the last tokens of its rows, each as it came" if name == "history" else "be left alone"
            wrong.append(f"{name} must {must}")
    return report._replace(failures=report.failures + wrong)


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "none": lambda x: x,
}


def _streams(step: FusedDecodeStep, x: FusedDecodeInputs, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 1, H, K], k and v with their heads, of n > 1 by micro-steps; the history of x goes on in place."""
    n, rows = step.spec.householders, slice(None) if slots is None else slots
    if x.weight is None or x.history is None:
        streams = short_conv(ConvInputs(x.qkv, x.qkv.new_ones(x.qkv.shape[2], 1)), step.parts)
    else:
        streams = short_conv(ConvInputs(x.qkv, x.weight, x.bias, x.history[rows]), step.parts)
        x.history[rows] = torch.cat([x.history[rows], x.qkv], 1)[:, 1:]
    q, k, v = streams
    k, v = (y.unflatten(-1, (n, h, -1) if n > 1 else (h, -1)) for y, h in ((k, step.H), (v, step.HV)))
    return q.unflatten(-1, (step.H, -1)), k, v
