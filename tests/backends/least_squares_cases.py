"""Systems of least squares, and their solutions token by token in float64."""

import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.ops.least_squares import LeastSquares


class Case(NamedTuple):
    """Sizes and kinds of systems.

    Args:
        bounds: of packed sequences. log_decay: of all tokens; None: log sigmoid of N(0, 1).
        scale: of b. state: factor of the initial states; 0: there are none.
    """

    B: int
    T: int
    H: int
    K: int
    bounds: tuple[int, ...] = ()
    log_decay: float | None = None
    scale: float = 1.0
    state: float = 1.0


CASES = {
    "an odd length": Case(2, 70, 2, 16),
    "no initial state": Case(1, 33, 1, 16, state=0),
    "a width that is no power of two": Case(1, 66, 2, 20),
    "a pack with empty sequences": Case(1, 90, 2, 16, bounds=(0, 0, 5, 70, 70, 85)),
    "decays of 0": Case(1, 70, 1, 16, log_decay=-math.inf),
    "no decay": Case(1, 200, 1, 16, log_decay=0.0),
    "a state beyond float16": Case(1, 40, 1, 16, state=1e6),
    "one token": Case(2, 1, 2, 16),
}


def draw(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[LeastSquares, Tensor]:
    """Draw systems and right-hand sides. The keys are L2-normalised, as in the mixer."""
    B, T, H, K = case[:4]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    keys, b = F.normalize(F.silu(normal(B, T, H, K)), dim=-1), case.scale * normal(B, T, H, K)
    decay = F.logsigmoid(normal(B, T, H)) if case.log_decay is None else torch.full((B, T, H), case.log_decay)
    beta, shift = normal(B, T, H).sigmoid(), 0.25 + F.softplus(normal(H, K))
    factor = normal(len(case.bounds) - 1 if case.bounds else B, H, K, 2 * K) / K**0.5
    state = (case.state * factor @ factor.mT).to(device, wide) if case.state else None
    bounds = torch.tensor(case.bounds, dtype=torch.int32, device=device) if case.bounds else None
    gates = (x.to(device, wide) for x in (decay, beta, shift))
    return LeastSquares(keys.to(device, dtype), *gates, state, bounds), b.to(device, dtype)


def exact_solution(systems: LeastSquares, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, 0 outside of sequences, and the final H of each sequence."""
    k, log_decay, beta, shift = (x.double().cpu() for x in systems[:4])
    B, T, H, K = k.shape
    bounds = None if systems.cu_seqlens is None else systems.cu_seqlens.tolist()
    rows = [(n, range(T)) for n in range(B)]
    if bounds is not None:
        rows = [(0, range(start, end)) for start, end in itertools.pairwise(bounds)]
    x, finals = torch.zeros_like(k), []
    for n, (row, tokens) in enumerate(rows):
        matrix = k.new_zeros(H, K, K) if systems.state is None else systems.state[n].double().cpu()
        for t in tokens:
            key = k[row, t]
            write = beta[row, t, :, None, None] * key[..., None] * key[..., None, :]
            matrix = log_decay[row, t].exp()[:, None, None] * matrix + write
            x[row, t] = torch.linalg.solve(matrix + torch.diag_embed(shift), b[row, t].double().cpu())
        finals.append(matrix)
    return x, torch.stack(finals)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double().cpu() - expected).norm() / expected.norm())
