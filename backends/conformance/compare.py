"""Compare a backend with the reference in float64: outputs, final state and every gradient."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, state_dtype
from deltazoo.backends.conformance.cases import Case, draw
from deltazoo.backends.devices import tf32_allowed
from deltazoo.backends.dispatch import bind
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.registry import resolve
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec

# Relative RMS error on ordinary inputs: of outputs and states, of gradients of q, k, v and their like, of gates.
LIMITS: dict[torch.dtype, tuple[float, float, float]] = {
    torch.float64: (1e-10, 1e-10, 1e-10),
    torch.float32: (1e-4, 1e-4, 1e-4),
    torch.bfloat16: (5e-3, 1e-2, 2e-2),
    torch.float16: (5e-3, 1e-2, 2e-2),
}
TF32_LIMIT = 2e-3
ADVERSARIAL = 3.0  # the factor on the limits for inputs that are not ordinary
FLOOR = 1e-6  # of a tensor's RMS on ordinary inputs: the least that an error is divided by
GATES = ("log_decay", "step", "rate", "beta", "erase", "write")

Cotangents = tuple[Tensor | None, Tensor | None]


class Error(NamedTuple):
    """The relative RMS error of one tensor, and its limit."""

    tensor: str
    relative: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.relative <= self.limit  # a NaN is not


class Report(NamedTuple):
    """What a check found.

    errors: one for each tensor compared: o, state, and the gradients d_q, d_k, ..., d_state.
    failures: sentences; [] when the backend is right, or refuses.
    refused: the backend's reasons for not taking the case; then there are no errors.
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
            f"  {error.tensor:12} {error.relative:.2e}  limit {error.limit:.0e}{'' if error.ok else '  TOO MUCH'}"
            for error in self.errors
        ]
        return "\n".join([*lines, *(f"  {failure}" for failure in self.failures)])


def compare(
    backend: str | Backend,
    case: Case,
    *,
    outputs: Literal["both", "o", "state"] = "both",
    grad: bool = True,
    device: torch.device | str = "cpu",
) -> Report:
    """Compare a backend with the float64 reference on the inputs of a case, rounded to the case's dtype.

    Args:
        outputs: which of the outputs have a (random) cotangent: "both", "o" or "state".
        grad: compare the gradients too.
    """
    backend = resolve(backend)
    inputs = draw(case, device)
    refused = refusal(backend, case, device, grad)
    if refused is not None:
        return refused
    d_o, d_state = draw_cotangents(case, inputs)
    cotangents = (None if outputs == "state" else d_o, None if outputs == "o" else d_state) if grad else None
    got = run(backend, case.spec, inputs, cotangents)
    want = reference_results(case.spec, inputs, cotangents)
    return judged(backend, case, got, want, cotangents)


def meta_of(shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu", grad: bool = True) -> UpdateMeta:
    """What a backend may know of a shape before it says whether it can."""
    _, _, _, H, HV, K, V, lengths = shape
    return UpdateMeta(torch.device(device).type, dtype, H, HV, K, V, packed=bool(lengths), grad=grad)


def refusal(backend: Backend, case: Case, device: torch.device | str = "cpu", grad: bool = True) -> Report | None:
    """Report that a backend refuses a case, or return None."""
    meta = meta_of(case.shape, case.dtype, device, grad)
    channels = case.spec.decay == "fixed" and case.seed % 2 == 1  # as `draw` draws them
    reasons = backend.unsupported(case.spec, meta._replace(decay_channels=channels))
    return Report(backend.name, case, [], [], reasons) if reasons else None


def judged(
    backend: Backend, case: Case, got: dict[str, Tensor], want: dict[str, Tensor], cotangents: Cotangents | None
) -> Report:
    """Report the errors of what `run` found with a backend, each within its limit or a failure."""
    usual = want
    if case.regime != "ordinary":
        usual = reference_results(case.spec, draw(case._replace(regime="ordinary"), got["o"].device), cotangents)
    failures = _wrong_forms(case, got)
    errors = []
    for tensor in [name for name in want if got[name].shape == want[name].shape]:
        relative = relative_error(got[tensor], want[tensor], usual[tensor])
        error = Error(tensor, relative, limit(case, tensor, got[tensor].device))
        errors.append(error)
        if not error.ok:
            failures.append(f"{tensor} has relative RMS error {relative:.2e}, above {error.limit:.0e}")
    return Report(backend.name, case, errors, failures, [])


def limit(case: Case, tensor: str, device: torch.device | str = "cpu") -> float:
    """The tolerance of one tensor: o, state, or d_ and the operand's name."""
    outputs, keys, gates = LIMITS[case.dtype]
    found = outputs if not tensor.startswith("d_") else gates if tensor[2:] in GATES else keys
    tf32 = torch.device(device).type == "cuda" and tf32_allowed()
    if case.dtype == torch.float32 and tf32:
        found = TF32_LIMIT
    return found if case.regime == "ordinary" else ADVERSARIAL * found


def run(
    backend: str | Backend, spec: UpdateSpec, inputs: UpdateInputs, cotangents: Cotangents | None
) -> dict[str, Tensor]:
    """Compute o and state, and with cotangents (of o, of state) d_q, d_k, ...; zeros where no gradient comes back."""
    if cotangents is None:
        with torch.no_grad():
            return bind(spec, backend)(inputs)._asdict()
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in inputs._asdict().items()
        if tensor is not None and tensor.is_floating_point()
    }
    out = bind(spec, backend)(inputs._replace(**leaves))
    pairs = [(y, dy) for y, dy in zip(out, cotangents, strict=True) if y.requires_grad and dy is not None]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs], materialize_grads=True
    )
    found = {"o": out.o.detach(), "state": out.state.detach()}
    return found | {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def reference_results(spec: UpdateSpec, inputs: UpdateInputs, cotangents: Cotangents | None) -> dict[str, Tensor]:
    """What `run` should have found: the reference in float64 on the same, rounded numbers."""
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


def relative_error(got: Tensor, want: Tensor, usual: Tensor) -> float:
    """The RMS of the error over the larger of the tensor's RMS and `FLOOR` of its RMS on ordinary inputs."""
    if not want.numel():
        return 0.0
    if not bool(torch.isfinite(got).all()):
        return float("nan")
    error = rms(got.double() - want)
    size = max(rms(want), FLOOR * rms(usual))
    return error / size if size else float("inf") if error else 0.0


def rms(tensor: Tensor) -> float:
    """The root of the mean square."""
    return float(tensor.double().square().mean().sqrt())


def _wrong_forms(case: Case, got: dict[str, Tensor]) -> list[str]:
    """Sentences on outputs of the wrong shape or dtype; autograd itself sees to the gradients'."""
    _, B, T, _, HV, K, V, _ = case.shape
    forms = {
        "o": ([B, T, HV, V], case.dtype),
        "state": ([case.shape.sequences, HV, K, V], state_dtype(case.dtype)),
    }
    return [
        f"{name} must be {dtype} of shape {shape}, got {got[name].dtype} of shape {list(got[name].shape)}"
        for name, (shape, dtype) in forms.items()
        if name in got and (list(got[name].shape) != shape or got[name].dtype != dtype)
    ]
