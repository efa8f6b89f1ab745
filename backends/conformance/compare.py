"""Comparison of a backend with the reference in float64: outputs, final state and every gradient."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.conformance.cache import REFERENCES
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import tf32_allowed
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput, state_dtype
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.spec import UpdateSpec

# Limits on the relative RMS error for ordinary inputs: outputs and states; gradients of q, k, v and other keys;
# gradients of gates.
LIMITS: dict[torch.dtype, tuple[float, float, float]] = {
    torch.float64: (1e-10, 1e-10, 1e-10),
    torch.float32: (1e-4, 1e-4, 1e-4),
    torch.bfloat16: (5e-3, 1e-2, 2e-2),
    torch.float16: (5e-3, 1e-2, 2e-2),
}
TF32_LIMIT = 2e-3
ADVERSARIAL = 3.0  # factor on the limits for the other regimes
FLOOR = 1e-6  # lower bound on an error's denominator, relative to the tensor's RMS on ordinary inputs
GATES = ("log_decay", "step", "rate", "beta", "erase", "write")

Cotangents = tuple[Tensor | None, Tensor | None]
Outputs = Literal["both", "o", "state"]


class Error(NamedTuple):
    """The relative RMS error of one tensor, and its limit."""

    tensor: str
    relative: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.relative <= self.limit  # False for NaN


class Report(NamedTuple):
    """The result of one check.

    errors: of each compared tensor: o, state, and the gradients d_q, d_k, ..., d_state.
    failures: sentences; [] when the backend passes or refuses.
    refused: the backend's reasons for not supporting the case; then there are no errors.
    """

    backend: str
    case: Case
    errors: list[Error]
    failures: list[str]
    refused: list[str]

    def __str__(self) -> str:
        lines = [f"{self.backend} on {self.case}"]
        lines += [f"  refused: {reason}" for reason in self.refused]
        lines += [
            f"  {error.tensor:12} {error.relative:.2e}  limit {error.limit:.0e}{'' if error.ok else '  ABOVE LIMIT'}"
            for error in self.errors
        ]
        return "\n".join([*lines, *(f"  {failure}" for failure in self.failures)])


def compare(
    backend: str | Backend,
    case: Case,
    *,
    outputs: Outputs = "both",
    grad: bool = True,
    device: torch.device | str = "cpu",
) -> Report:
    """Compare a backend with the float64 reference on the inputs of a case, rounded to the case's dtype.

    Args:
        outputs: the outputs that have a (random) cotangent: "both", "o" or "state".
        grad: compare the gradients too.
    """
    backend = resolve(backend)
    refused = refusal(backend, case, device, grad)
    if refused is not None:
        return refused
    inputs = draw(case, device)
    differentiated = outputs if grad else None
    results = run(backend, case.spec, inputs, _cotangents(case, inputs, differentiated))
    return error_report(backend, case, results, case_reference(case, differentiated, device), differentiated)


def meta_of(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", grad: bool = True) -> UpdateMeta:
    """Return the properties of a shape that `Backend.unsupported` receives."""
    _, _, _, H, HV, K, V, lengths = shape
    return UpdateMeta(torch.device(device).type, dtype, H, HV, K, V, packed=bool(lengths), grad=grad)


def refusal(backend: Backend, case: Case, device: torch.device | str = "cpu", grad: bool = True) -> Report | None:
    """Report that a backend does not support a case, or return None."""
    meta = meta_of(case.shape, case.dtype, device, grad)
    has_channels = case.spec.decay == "fixed" and case.seed % 2 == 1  # as `draw` draws a fixed decay
    reasons = backend.unsupported(case.spec, meta._replace(decay_channels=has_channels))
    return Report(backend.name, case, [], [], reasons) if reasons else None


def error_report(
    backend: Backend,
    case: Case,
    results: dict[str, Tensor],
    expected: dict[str, Tensor],
    outputs: Outputs | None = None,
) -> Report:
    """Compare results of `run` with the expected ones; an error above its limit is a failure.

    Args: outputs: the outputs that had a cotangent; None without gradients.
    """
    failures = _shape_and_dtype_errors(case, results)
    errors = []
    device = results["o"].device
    for tensor, value in expected.items():
        if results[tensor].shape != value.shape:
            continue
        error = Error(tensor, relative_error(results[tensor], value, value), limit(case, tensor, device))
        if not error.ok and case.regime != "ordinary":  # the floor needs a second reference
            ordinary = case_reference(case._replace(regime="ordinary"), outputs, device)
            error = error._replace(relative=relative_error(results[tensor], value, ordinary[tensor]))
        errors.append(error)
        if not error.ok:
            failures.append(_above_limit(error))
    report = Report(backend.name, case, errors, failures, [])
    gaps = "the gaps between the elements of strided operands, which no backend may read"
    return explain_nan(report, gaps) if case.layout == "strided" else report


def explain_nan(report: Report, place: str) -> Report:
    """If a result is not finite, add the sentence that a check puts NaN at a place on purpose."""
    if not any(math.isnan(error.relative) for error in report.errors):
        return report
    return report._replace(failures=[*report.failures, f"this check puts NaN on purpose into {place}"])


def limit(case: Case, tensor: str, device: torch.device | str = "cpu") -> float:
    """Return the tolerance of one tensor: o, state, or d_ and the operand's name."""
    outputs, keys, gates = LIMITS[case.dtype]
    tolerance = outputs if not tensor.startswith("d_") else gates if tensor[2:] in GATES else keys
    tf32 = torch.device(device).type == "cuda" and tf32_allowed()
    if case.dtype == torch.float32 and tf32:
        tolerance = TF32_LIMIT
    return tolerance if case.regime == "ordinary" else ADVERSARIAL * tolerance


def run(
    backend: str | Backend, spec: UpdateSpec, inputs: UpdateInputs, cotangents: Cotangents | None
) -> dict[str, Tensor]:
    """Compute o and state, and with cotangents (of o, of state) also d_q, d_k, ...; absent gradients are zeros."""
    return evaluate(bind(spec, backend), inputs, cotangents)


def evaluate(
    update: Callable[[UpdateInputs], UpdateOutput], inputs: UpdateInputs, cotangents: Cotangents | None
) -> dict[str, Tensor]:
    """Compute the results of `run` with any function that computes an update."""
    if cotangents is None:
        with torch.no_grad():
            return update(inputs)._asdict()
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in inputs._asdict().items()
        if tensor is not None and tensor.is_floating_point()
    }
    out = update(inputs._replace(**leaves))
    pairs = [(y, dy) for y, dy in zip(out, cotangents, strict=True) if y.requires_grad and dy is not None]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs], materialize_grads=True
    )
    results = {"o": out.o.detach(), "state": out.state.detach()}
    return results | {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def case_reference(case: Case, outputs: Outputs | None, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the results of the float64 reference on a case; do not modify them.

    They are cached in the process, because several backends and properties are checked on the same case.

    Args: outputs: the outputs that have a cotangent; None without gradients.
    """

    def compute() -> dict[str, Tensor]:
        inputs = draw(case, device)
        return reference_results(case.spec, inputs, _cotangents(case, inputs, outputs))

    return REFERENCES.get((case, outputs, str(device)), compute)


def reference_results(spec: UpdateSpec, inputs: UpdateInputs, cotangents: Cotangents | None) -> dict[str, Tensor]:
    """Compute the results of `run` by the reference in float64, on the same rounded operands."""
    operands = {name: x.double() for name, x in inputs._asdict().items() if x is not None and x.is_floating_point()}
    inputs = inputs._replace(**operands)
    if cotangents is None:
        return run(ReferenceBackend(), spec, inputs, None)
    d_o, d_state = cotangents
    d_o, d_state = None if d_o is None else d_o.double(), None if d_state is None else d_state.double()
    return run(ReferenceBackend(), spec, inputs, (d_o, d_state))


def draw_cotangents(case: Case, inputs: UpdateInputs) -> tuple[Tensor, Tensor]:
    """Draw random cotangents of o and of the final state, in their dtypes."""
    _, B, T, _, HV, K, V, _ = case.shape
    device = inputs.q.device
    generator = torch.Generator(device).manual_seed(case.seed + 1)
    d_o = torch.randn(B, T, HV, V, generator=generator, dtype=torch.float64, device=device)
    d_state = torch.randn(case.shape.sequences, HV, K, V, generator=generator, dtype=torch.float64, device=device)
    return d_o.to(case.dtype), d_state.to(state_dtype(case.dtype))


def relative_error(result: Tensor, expected: Tensor, ordinary: Tensor) -> float:
    """Return the RMS of the error, relative to the RMS of the expected tensor; NaN for a result that is not finite.

    Args: ordinary: the tensor on ordinary inputs; the denominator is at least `FLOOR` of its RMS.
    """
    if not expected.numel():
        return 0.0
    if not bool(torch.isfinite(result).all()):
        return float("nan")
    error = rms(result.double() - expected)
    size = max(rms(expected), FLOOR * rms(ordinary))
    return error / size if size else float("inf") if error else 0.0


def rms(tensor: Tensor) -> float:
    """Return the root of the mean square."""
    return float(tensor.double().square().mean().sqrt())


def _above_limit(error: Error) -> str:
    if math.isnan(error.relative):
        return f"{error.tensor} has elements that are NaN or infinite"
    return f"{error.tensor} has relative RMS error {error.relative:.2e}, above {error.limit:.0e}"


def _cotangents(case: Case, inputs: UpdateInputs, outputs: Outputs | None) -> Cotangents | None:
    if outputs is None:
        return None
    d_o, d_state = draw_cotangents(case, inputs)
    return None if outputs == "state" else d_o, None if outputs == "o" else d_state


def _shape_and_dtype_errors(case: Case, results: dict[str, Tensor]) -> list[str]:
    """Return a sentence for each output of the wrong shape or dtype; autograd checks those of the gradients."""
    _, B, T, _, HV, K, V, _ = case.shape
    expected = {
        "o": ([B, T, HV, V], case.dtype),
        "state": ([case.shape.sequences, HV, K, V], state_dtype(case.dtype)),
    }
    return [
        f"{name} must be {dtype} of shape {shape}, got {results[name].dtype} of shape {list(results[name].shape)}"
        for name, (shape, dtype) in expected.items()
        if name in results and (list(results[name].shape) != shape or results[name].dtype != dtype)
    ]
