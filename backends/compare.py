"""Compare a backend with the reference in float64: outputs, final state and every gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, state_dtype
from deltazoo.backends.cases import Case, draw
from deltazoo.backends.dispatch import bind, explain
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.spec import UpdateSpec

# Relative RMS error on ordinary inputs: outputs and states, gradients of q k v and what is like them, of gates.
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


class Error(NamedTuple):
    """The relative RMS error of one tensor, and its limit."""

    tensor: str
    relative: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.relative <= self.limit  # a NaN is not


class Report(NamedTuple):
    """What a comparison found.

    errors: one for each of o, state and the gradients d_q, d_k, ..., d_state.
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


def compare(backend: str | Backend, case: Case, grad: bool = True, device: torch.device | str = "cpu") -> Report:
    """Compare a backend with the float64 reference on the inputs of a case, rounded to the case's dtype.

    Args: grad: compare the gradients too, with random cotangents on both o and the final state.
    """
    inputs = draw(case, device)
    meta = UpdateMeta.of(inputs)._replace(grad=grad)
    verdict = explain(case.spec, meta, backend).verdicts[0]
    if verdict.reasons:
        return Report(verdict.backend, case, [], [], verdict.reasons)
    cotangents = draw_cotangents(case, inputs) if grad else None
    got = run(backend, case.spec, inputs, cotangents)
    want = oracle(case.spec, inputs, cotangents)
    usual = want
    if case.regime != "ordinary":
        easy = draw(case._replace(regime="ordinary"), device)
        usual = oracle(case.spec, easy, cotangents)
    failures = _wrong_forms(got, inputs)
    errors = []
    for tensor in want:
        if failures and got[tensor].shape != want[tensor].shape:
            continue
        error = Error(tensor, relative_error(got[tensor], want[tensor], usual[tensor]), limit(case, tensor, device))
        errors.append(error)
        if not error.ok:
            failures.append(f"{tensor} has relative RMS error {error.relative:.2e}, above {error.limit:.0e}, on {case}")
    return Report(verdict.backend, case, errors, failures, [])


def limit(case: Case, tensor: str, device: torch.device | str = "cpu") -> float:
    """The tolerance of one tensor: o, state, or d_ and the operand's name."""
    outputs, keys, gates = LIMITS[case.dtype]
    found = outputs if not tensor.startswith("d_") else gates if tensor[2:] in GATES else keys
    tf32 = torch.device(device).type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    if case.dtype == torch.float32 and tf32:
        found = TF32_LIMIT
    return found if case.regime == "ordinary" else ADVERSARIAL * found


def run(
    backend: str | Backend, spec: UpdateSpec, inputs: UpdateInputs, cotangents: tuple[Tensor, Tensor] | None
) -> dict[str, Tensor]:
    """Compute o and state, and with cotangents (of o, of state) d_q, d_k, ...; zeros where no gradient comes back."""
    if cotangents is None:
        with torch.no_grad():
            out = bind(spec, backend)(inputs)
        return out._asdict()
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in inputs._asdict().items()
        if tensor is not None and tensor.is_floating_point()
    }
    out = bind(spec, backend)(inputs._replace(**leaves))
    pairs = [(y, dy) for y, dy in zip(out, cotangents, strict=True) if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs], materialize_grads=True
    )
    found = {"o": out.o.detach(), "state": out.state.detach()}
    return found | {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def oracle(spec: UpdateSpec, inputs: UpdateInputs, cotangents: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """What `run` should have found: the reference in float64 on the same, rounded numbers."""
    exact = {
        name: tensor.double()
        for name, tensor in inputs._asdict().items()
        if tensor is not None and name != "cu_seqlens"
    }
    exact_cotangents = None if cotangents is None else (cotangents[0].double(), cotangents[1].double())
    return run(ReferenceBackend(), spec, inputs._replace(**exact), exact_cotangents)


def draw_cotangents(case: Case, inputs: UpdateInputs) -> tuple[Tensor, Tensor]:
    """Random cotangents of o and of the final state, in their dtypes."""
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
    error = _rms(got.double() - want)
    size = max(_rms(want), FLOOR * _rms(usual))
    return error / size if size else float("inf") if error else 0.0


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _wrong_forms(got: dict[str, Tensor], inputs: UpdateInputs) -> list[str]:
    """Sentences on outputs and gradients of the wrong shape or dtype."""
    HV, K, V = inputs.v.shape[-2], inputs.q.shape[3], inputs.v.shape[-1]
    B, T = inputs.q.shape[:2]
    sequences = B if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    forms = {
        "o": ((B, T, HV, V), inputs.v.dtype),
        "state": ((sequences, HV, K, V), state_dtype(inputs.q.dtype)),
    }
    return [
        f"{name} must be {dtype} of shape {list(shape)}, got {got[name].dtype} of shape {list(got[name].shape)}"
        for name, (shape, dtype) in forms.items()
        if got[name].shape != shape or got[name].dtype != dtype
    ]
