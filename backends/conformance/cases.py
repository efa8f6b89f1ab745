"""Cases of the conformance checks: a spec, a shape, a dtype, and how the inputs are drawn.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec

Regime = Literal["ordinary", "parallel", "decays"]
REGIMES: tuple[Regime, ...] = ("ordinary", "parallel", "decays")

_NEAR_BOUND = 0.995  # beta near its bound; 1.99 when doubled for negative eigenvalues
_LOG_DECAY_TO_ZERO = -1000.0  # its exp underflows to 0 in float64, and its sums stay finite


class Case(NamedTuple):
    """One comparison.

    regime: "ordinary"; "parallel": near-parallel keys, beta near its bound and no decay; "decays": log decays of
        0, -20 and -60 among ordinary ones, and one token whose decay is 0.
    layout: "strided": the last axis of every operand has stride 2, with NaN in between.
    state: whether there is an initial state.
    seed: random seed. An odd seed also draws the second form of operands that have two: a fixed decay [HV, K] instead
        of [HV], and beta, erase and write in float32 instead of the dtype of q.
    """

    spec: UpdateSpec
    shape: Shape
    dtype: torch.dtype = torch.float32
    regime: Regime = "ordinary"
    layout: Literal["contiguous", "strided"] = "contiguous"
    state: Literal["given", "none"] = "given"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.spec_text} {self.conditions}"

    @property
    def spec_text(self) -> str:
        """The fields of the spec that differ from their defaults."""
        axes = self.spec.changed_fields()
        axes.pop("erase_from" if self.spec.transition == "dplr" else "", None)
        return " ".join(f"{name}={value}" for name, value in axes.items()) or "delta"

    @property
    def conditions(self) -> str:
        """The shape, the dtype and the other conditions of the comparison."""
        rest = [self.shape.name, str(self.dtype).removeprefix("torch."), self.regime]
        rest += [self.layout] if self.layout == "strided" else []
        rest += ["no-state"] if self.state == "none" else []
        return " ".join([*rest, f"seed={self.seed}"])


def draw(case: Case, device: torch.device | str = "cpu") -> UpdateInputs:
    """Draw the operands of a case in float64 and round them to its dtypes.

    Keys have norm 1 where the explicit Euler step needs it for stability, and any norm for EFLA and Longhorn. Decays
    and strengths have the range of trained models or that of the regime. The recurrence is always stable.
    """
    spec, shape = case.spec, case.shape
    random = _Random(case, torch.device(device))
    shapes = spec.operands(*shape[1:7])
    x: dict[str, Tensor] = {"q": random.queries(shapes["q"]), "k": random.keys(shapes["k"]), "v": random(shapes["v"])}
    x |= _decay(case, random, shapes)
    x |= _strengths(case, random, shapes, x)
    if "erase_key" in shapes:  # near the write key
        x["erase_key"] = normalize(x["k"] + 0.3 * random(shapes["k"]) / shape.K**0.5, dim=-1)
    if "a" in shapes:  # RWKV-7: a removal key and an in-context learning rate
        kappa = random.units(shapes["a"])
        rate = random(shapes["b"]).sigmoid() if case.regime == "ordinary" else torch.full_like(kappa, _NEAR_BOUND)
        x |= {"a": -kappa, "b": kappa * rate}
    if case.state == "given":
        x["state"] = random((shape.sequences, shape.HV, shape.K, shape.V))
    rounded = {name: tensor.to(_dtype_of(name, case)) for name, tensor in x.items()}
    if case.layout == "strided":
        rounded = {name: _strided(tensor) for name, tensor in rounded.items()}
    if shape.lengths:
        bounds = [0, *accumulate(shape.lengths)]
        rounded["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    return UpdateInputs(**rounded)


def dense(case: Case) -> Case:
    """Return the case without packing: one sequence per row."""
    return case._replace(shape=case.shape._replace(lengths=()))


class _Random:
    """Standard normal numbers in float64 from the case's seed, and keys drawn with them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.generator = torch.Generator(device).manual_seed(case.seed)

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64, device=self.generator.device)

    def choice(self, shape: tuple[int, ...], values: list[float]) -> Tensor:
        """Choose one of the values for each element."""
        device = self.generator.device
        index = torch.randint(len(values), shape, generator=self.generator, device=device)
        return torch.tensor(values, dtype=torch.float64, device=device)[index]

    def directions(self, shape: tuple[int, ...]) -> Tensor:
        """Draw normal vectors; in the regime "parallel" nearly the same vector for all tokens of a row and head."""
        if self.case.regime != "parallel":
            return self(shape)
        B, _, *rest = shape
        return self((B, 1, *rest)) + 0.03 * self(shape)

    def queries(self, shape: tuple[int, ...]) -> Tensor:
        return normalize(self(shape), dim=-1) if self.is_euler else self(shape)

    def units(self, shape: tuple[int, ...]) -> Tensor:
        """Draw vectors of norm 1, or of norm below 0.2 for width 1.

        In width 1 a key of norm 1 erases nearly the whole state at every token. Only the rounding error of 1 - b would
        be left to compare.
        """
        directions = self.directions(shape)
        return 0.2 * directions.sigmoid() if shape[-1] == 1 else normalize(directions, dim=-1)

    def keys(self, shape: tuple[int, ...]) -> Tensor:
        spec = self.case.spec
        if spec.transition != "delta":
            return self.directions(shape)
        keys = self.units(shape)
        if spec.reparam == "none":
            return keys
        # Beyond |k| = 4 and beta = 10, the strengths of EFLA and Longhorn equal 1 / |k|^2 up to rounding, and so the
        # gradient of beta is rounding error. Norms of 0 and 1e-3 are the limit in which both equal the Euler step.
        norms = [0.5, 1.0, 2.0] if self.case.regime == "ordinary" else [0.0, 1e-3, 1.0, 4.0]
        return keys * self.choice((*shape[:-1], 1), norms)

    @property
    def is_euler(self) -> bool:
        """Whether the step is explicit Euler, which is stable only for keys of norm at most 1."""
        return self.case.spec.transition == "delta" and self.case.spec.reparam == "none"


def _decay(case: Case, random: _Random, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Draw log_decay, or step and rate."""
    spec, shape = case.spec, case.shape
    if spec.decay == "none":
        return {}
    if spec.decay == "rate":
        # clamped, because larger steps amplify the rounding error of d_rate
        step = (-_log_decays(case, random, shapes["step"])).clamp(max=150)
        return {"step": step, "rate": -(0.5 + random(shapes["rate"]).sigmoid())}
    if spec.decay == "fixed":
        form = (shape.HV, shape.K) if case.seed % 2 else (shape.HV,)
        if case.regime == "ordinary":  # the decays of RetNet
            return {"log_decay": torch.log1p(-(2.0 ** (-3 - 3 * random(form).sigmoid())))}
        decays = random.choice(form, [0.0, 0.0, -20.0, -60.0] if case.regime == "decays" else [0.0])
        decays.view(-1)[0] = 0  # one head without decay: otherwise every gradient would be rounding error
        return {"log_decay": decays}
    return {"log_decay": _log_decays(case, random, shapes["log_decay"])}


def _log_decays(case: Case, random: _Random, shape: tuple[int, ...]) -> Tensor:
    """Draw log decays that vary over time: [B, T, HV] or [B, T, HV, K]."""
    ordinary = -softplus(random(shape) - 2)
    if case.regime == "ordinary":
        return ordinary
    if case.regime == "parallel":
        return torch.zeros_like(ordinary)
    decays = ordinary * random.choice(shape, [0.0, 1e-6, 1.0]) + random.choice(shape, [0.0] * 6 + [-20.0, -60.0])
    decays[:, shape[1] // 2 : shape[1] // 2 + 1] = _LOG_DECAY_TO_ZERO
    return decays


def _strengths(
    case: Case, random: _Random, shapes: dict[str, tuple[int, ...]], x: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Draw beta, or erase and write."""
    strengths: dict[str, Tensor] = {}
    for name in ("beta", "erase", "write"):
        if name not in shapes:
            continue
        shape = shapes[name]
        if case.spec.reparam != "none" and name != "write":
            strengths[name] = _step_sizes(case, random, shape)
            continue
        strength = random(shape).sigmoid()
        if case.regime != "ordinary":
            is_near = random.choice(shape, [0.0, 1.0] if case.regime == "decays" else [1.0]) > 0
            strength = torch.where(is_near, _NEAR_BOUND, strength * random.choice(shape, [0.0, 1.0]))
        strengths[name] = strength
    if case.spec.erase_from == "previous" and case.spec.negative_eigenvalues != "off":
        for name in strengths.keys() & {"beta", "erase"}:
            strengths[name] = torch.minimum(strengths[name], _max_stable_erase(case, x, strengths[name]))
    return strengths


def _step_sizes(case: Case, random: _Random, shape: tuple[int, ...]) -> Tensor:
    """Draw the step sizes of EFLA and Longhorn. Channels of a head differ by at most a factor of 2, for stability."""
    sizes = random((*shape[:-1], 1) if case.spec.beta == "channel" else shape).exp()
    if case.regime != "ordinary":
        sizes = sizes * random.choice(tuple(sizes.shape), [0.0, 1e-6, 1, 10])
    return sizes * (1 + random(shape).sigmoid()) if case.spec.beta == "channel" else sizes


def _max_stable_erase(case: Case, x: dict[str, Tensor], strength: Tensor) -> Tensor:
    """Return the largest erase b for which |d - 2 b| <= 1 at every decay d, with erase_from="previous" and doubling."""
    if case.spec.decay == "none":
        return torch.ones_like(strength)
    log_decay = x["step"][..., None] * x["rate"] if case.spec.decay == "rate" else x["log_decay"]
    if log_decay.shape[-1] == case.shape.K and log_decay.dim() in (2, 4):
        log_decay = log_decay.amin(-1)
    if log_decay.dim() == 1:
        log_decay = log_decay.expand(case.shape.B, case.shape.T, -1)
    largest = (1 + log_decay.exp()) / 2
    if case.spec.householders > 1:
        largest = torch.stack([largest] + [torch.ones_like(largest)] * (case.spec.householders - 1), dim=2)
    return largest[..., None] if strength.dim() > largest.dim() else largest


def _dtype_of(name: str, case: Case) -> torch.dtype:
    is_wide = name in ("log_decay", "step", "rate", "state")
    is_second_form = name in ("beta", "erase", "write") and case.seed % 2 == 1
    return state_dtype(case.dtype) if is_wide or is_second_form else case.dtype


def _strided(tensor: Tensor) -> Tensor:
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"))
    wide[..., ::2] = tensor
    return wide[..., ::2]
