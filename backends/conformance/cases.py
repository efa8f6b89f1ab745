"""What conformance runs on: one case is a spec, a shape, a dtype, and how its inputs are drawn.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from deltazoo.backends.base import UpdateInputs, state_dtype
from deltazoo.backends.shapes import Shape
from deltazoo.backends.spec import UpdateSpec

Regime = Literal["ordinary", "parallel", "decays"]
REGIMES: tuple[Regime, ...] = ("ordinary", "parallel", "decays")

_NEAR_BOUND = 0.995  # doubled for negative eigenvalues: 1.99
_FORGETS = -1000.0  # exp underflows to 0 even in float64, and sums of it stay finite


class Case(NamedTuple):
    """One comparison.

    regime: "ordinary"; "parallel", near-parallel keys with beta near its bound and no decay; "decays", decays of
        0, -20, -60 mixed with ordinary ones, and one token that forgets everything.
    layout: "strided" gives every operand a last axis of stride 2, with NaN in the gaps.
    state: whether an initial state is given.
    seed: of the numbers; an odd seed draws the other form of what may have two: a fixed decay [HV, K] instead of
        [HV], and beta, erase, write in float32 instead of the dtype of q.
    """

    spec: UpdateSpec
    shape: Shape
    dtype: torch.dtype = torch.float32
    regime: Regime = "ordinary"
    layout: Literal["contiguous", "strided"] = "contiguous"
    state: Literal["given", "none"] = "given"
    seed: int = 0

    def __str__(self) -> str:
        axes = {name: value for name, value in self.spec if value != UpdateSpec.model_fields[name].default}
        axes.pop("erase_from" if self.spec.transition == "dplr" else "", None)
        named = " ".join(f"{name}={value}" for name, value in axes.items()) or "delta"
        rest = [self.shape.name, str(self.dtype).removeprefix("torch."), self.regime]
        rest += [self.layout] if self.layout == "strided" else []
        rest += ["no-state"] if self.state == "none" else []
        return " ".join([named, *rest, f"seed={self.seed}"])


def draw(case: Case, device: torch.device | str = "cpu") -> UpdateInputs:
    """Draw the operands of a case in float64 and round them to its dtypes.

    Keys are of norm 1 where the Euler step wants it, of any norm for EFLA and Longhorn; decays and strengths are
    those of trained models, or as the case's regime says, and always such that the recurrence is stable.
    """
    spec, shape = case.spec, case.shape
    numbers = _Numbers(case, torch.device(device))
    want = spec.operands(*shape[1:7])
    x: dict[str, Tensor] = {"q": numbers.queries(want["q"]), "k": numbers.keys(want["k"]), "v": numbers(want["v"])}
    x |= _decay(case, numbers, want)
    x |= _strengths(case, numbers, want, x)
    if "erase_key" in want:  # near the write key, as Comba's
        x["erase_key"] = normalize(x["k"] + 0.3 * numbers(want["k"]) / shape.K**0.5, dim=-1)
    if "a" in want:  # RWKV-7: a removal key and an in-context learning rate
        kappa = numbers.units(want["a"])
        rate = numbers(want["b"]).sigmoid() if case.regime == "ordinary" else torch.full_like(kappa, _NEAR_BOUND)
        x |= {"a": -kappa, "b": kappa * rate}
    if case.state == "given":
        x["state"] = numbers((shape.sequences, shape.HV, shape.K, shape.V))
    rounded = {name: tensor.to(_dtype_of(name, case)) for name, tensor in x.items()}
    if case.layout == "strided":
        rounded = {name: _strided(tensor) for name, tensor in rounded.items()}
    if shape.lengths:
        bounds = [0, *accumulate(shape.lengths)]
        rounded["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    return UpdateInputs(**rounded)


def dense(case: Case) -> Case:
    """The case without packing: its tokens as one sequence a row."""
    return case._replace(shape=case.shape._replace(lengths=()))


class _Numbers:
    """Standard normal numbers in float64 from the case's seed, and the keys made of them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.generator = torch.Generator(device).manual_seed(case.seed)

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device=self.generator.device)

    def choice(self, shape: tuple[int, ...], values: list[float]) -> Tensor:
        """One of the values each, at random."""
        device = self.generator.device
        index = torch.randint(len(values), shape, generator=self.generator, device=device)
        return torch.tensor(values, dtype=torch.float64, device=device)[index]

    def directions(self, shape: tuple[int, ...]) -> Tensor:
        """Normal vectors, or in the regime "parallel" nearly one vector for all tokens of a row and head."""
        if self.case.regime != "parallel":
            return self(shape)
        B, _, *rest = shape
        return self((B, 1, *rest)) + 0.03 * self(shape)

    def queries(self, shape: tuple[int, ...]) -> Tensor:
        return normalize(self(shape), dim=-1) if self.euler else self(shape)

    def units(self, shape: tuple[int, ...]) -> Tensor:
        """Directions of norm 1, but shorter in width 1, where norm 1 would erase the whole state at every token and
        leave only rounding to be compared: of 1 - b a chunk keeps no more digits than of 1."""
        directions = self.directions(shape)
        return 0.2 * directions.sigmoid() if shape[-1] == 1 else normalize(directions, dim=-1)

    def keys(self, shape: tuple[int, ...]) -> Tensor:
        spec = self.case.spec
        if spec.transition != "delta":
            return self.directions(shape)
        keys = self.units(shape)
        if spec.reparam == "none":
            return keys
        # Beyond |k| = 4 and beta = 10 EFLA and Longhorn have long reached 1 / |k|^2, and what is left of a gradient
        # of beta is rounding; 0 and 1e-3 are the end where they must turn into Euler's step.
        norms = [0.5, 1.0, 2.0] if self.case.regime == "ordinary" else [0.0, 1e-3, 1.0, 4.0]
        return keys * self.choice((*shape[:-1], 1), norms)

    @property
    def euler(self) -> bool:
        """Whether the step is stable only for keys of norm 1."""
        return self.case.spec.transition == "delta" and self.case.spec.reparam == "none"


def _decay(case: Case, numbers: _Numbers, want: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """log_decay, or step and rate."""
    spec, shape = case.spec, case.shape
    if spec.decay == "none":
        return {}
    if spec.decay == "rate":
        step = (-_log_decays(case, numbers, want["step"])).clamp(max=150)  # more would only magnify d_rate's rounding
        return {"step": step, "rate": -(0.5 + numbers(want["rate"]).sigmoid())}
    if spec.decay == "fixed":
        form = (shape.HV, shape.K) if case.seed % 2 else (shape.HV,)
        if case.regime == "ordinary":  # RetNet's heads
            return {"log_decay": torch.log1p(-(2.0 ** (-3 - 3 * numbers(form).sigmoid())))}
        decays = numbers.choice(form, [0.0, 0.0, -20.0, -60.0] if case.regime == "decays" else [0.0])
        decays.view(-1)[0] = 0  # or nothing would be remembered, and every gradient would be rounding
        return {"log_decay": decays}
    return {"log_decay": _log_decays(case, numbers, want["log_decay"])}


def _log_decays(case: Case, numbers: _Numbers, shape: tuple[int, ...]) -> Tensor:
    """Decays that change in time: [B, T, HV] or [B, T, HV, K]."""
    ordinary = -softplus(numbers(shape) - 2)
    if case.regime == "ordinary":
        return ordinary
    if case.regime == "parallel":
        return torch.zeros_like(ordinary)
    decays = ordinary * numbers.choice(shape, [0.0, 1e-6, 1.0]) + numbers.choice(shape, [0.0] * 6 + [-20.0, -60.0])
    decays[:, shape[1] // 2 : shape[1] // 2 + 1] = _FORGETS
    return decays


def _strengths(
    case: Case, numbers: _Numbers, want: dict[str, tuple[int, ...]], x: dict[str, Tensor]
) -> dict[str, Tensor]:
    """beta, or erase and write."""
    strengths: dict[str, Tensor] = {}
    for name in ("beta", "erase", "write"):
        if name not in want:
            continue
        shape = want[name]
        if case.spec.reparam != "none" and name != "write":
            strengths[name] = _times(case, numbers, shape)
            continue
        strength = numbers(shape).sigmoid()
        if case.regime != "ordinary":
            near = torch.full_like(strength, _NEAR_BOUND)
            hard = numbers.choice(shape, [0.0, 1.0] if case.regime == "decays" else [1.0])
            strength = torch.where(hard > 0, near, strength * numbers.choice(shape, [0.0, 1.0]))
        strengths[name] = strength
    if case.spec.erase_from == "previous" and case.spec.negative_eigenvalues != "off":
        for name in strengths.keys() & {"beta", "erase"}:
            strengths[name] = torch.minimum(strengths[name], _stable(case, x, strengths[name]))
    return strengths


def _times(case: Case, numbers: _Numbers, shape: tuple[int, ...]) -> Tensor:
    """Any time > 0 for each head; over channels it may vary by a factor of two, as far as the step is stable."""
    times = numbers((*shape[:-1], 1) if case.spec.beta == "channel" else shape).exp()
    if case.regime != "ordinary":
        times = times * numbers.choice(tuple(times.shape), [0.0, 1e-6, 1, 10])
    return times * (1 + numbers(shape).sigmoid()) if case.spec.beta == "channel" else times


def _stable(case: Case, x: dict[str, Tensor], strength: Tensor) -> Tensor:
    """The strongest doubled erase from the undecayed state that keeps |d - 2 b| <= 1 at every decay d."""
    if case.spec.decay == "none":
        return torch.ones_like(strength)
    log_decay = x["step"][..., None] * x["rate"] if case.spec.decay == "rate" else x["log_decay"]
    if log_decay.shape[-1] == case.shape.K and log_decay.dim() in (2, 4):
        log_decay = log_decay.amin(-1)
    if log_decay.dim() == 1:
        log_decay = log_decay.expand(case.shape.B, case.shape.T, -1)
    most = (1 + log_decay.exp()) / 2
    if case.spec.householders > 1:
        most = torch.stack([most] + [torch.ones_like(most)] * (case.spec.householders - 1), dim=2)
    return most[..., None] if strength.dim() > most.dim() else most


def _dtype_of(name: str, case: Case) -> torch.dtype:
    state_like = name in ("log_decay", "step", "rate", "state")
    other_form = name in ("beta", "erase", "write") and case.seed % 2 == 1
    return state_dtype(case.dtype) if state_like or other_form else case.dtype


def _strided(tensor: Tensor) -> Tensor:
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"))
    wide[..., ::2] = tensor
    return wide[..., ::2]
