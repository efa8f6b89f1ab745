"""Launch the decode kernels: one token, drafted tokens, and the commit of those that are accepted.

B batch, T tokens, n micro-steps, H key heads, HV value heads, K key width, V value width
"""

import torch
from torch import Tensor

from deltazoo.backends.triton.config import Launch
from deltazoo.backends.triton.decode.kernels.step import commit_kernel, decode_kernel, verify_kernel
from deltazoo.backends.triton.decode.kernels.token import TokenTraits
from deltazoo.backends.triton.decode.operands import StepKind, StepOperands
from deltazoo.backends.triton.runtime.launcher import launcher
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two

# Drafted tokens occupy registers, so that the wide tiles of a step leave too few programs per SM. H200, 4 tokens,
# 64 rows, 32 heads of 128, us: GDN 88 with tile=64 warps=4, 63 with this launch; KDA 91, 74 (one step: 68).
_VERIFY = Launch(tile=32, warps=2, stages=1)


def step_(
    x: StepOperands,
    kind: StepKind,
    states: Tensor,
    slots: Tensor | None,
    launch: Launch,
    dtype: torch.dtype | None = None,
    overlap: bool = False,
) -> Tensor:
    """Decode one token per row (T = 1); the states change in place. Returns o [B, 1, HV, V].

    Args: dtype: of o; None: that of v. overlap: as in `Options`; not with slots.
    """
    traits = _traits(x, slots, kind, launch)._replace(OVERLAP=overlap)
    o = x.v.new_empty(x.q.shape[0], 1, traits.HV, traits.V, dtype=dtype)
    tensors = x._asdict() | {"states": states, "slots": slots, "o": o}
    options = _options(traits, launch)._replace(overlap=overlap)
    decode = launcher(decode_kernel, tensors, {"traits": traits}, options)
    decode(_programs(x, traits), {"scale": kind.scale, "pool_rows": states.shape[0]})
    return o


def verify(
    x: StepOperands,
    kind: StepKind,
    states: Tensor,
    slots: Tensor | None,
    launch: Launch,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode drafted tokens. Returns o [B, T, HV, V] and the written values [B, T, m, HV, V] float32.

    Args: dtype: of o; None: that of v.
    """
    if launch.tile > _VERIFY.tile:
        launch = _VERIFY
    traits = _traits(x, slots, kind, launch)
    B, T = x.q.shape[:2]
    o = x.v.new_empty(B, T, traits.HV, traits.V, dtype=dtype)
    values = o.new_empty(B, T, 2 if traits.DPLR else traits.STEPS, traits.HV, traits.V, dtype=torch.float32)
    tensors = x._asdict() | {"states": states, "slots": slots, "o": o, "values": values}
    run = launcher(verify_kernel, tensors, {"traits": traits}, _options(traits, launch))
    run(_programs(x, traits), {"scale": kind.scale, "pool_rows": states.shape[0], "tokens": T})
    return o, values


def commit_(
    x: StepOperands,
    kind: StepKind,
    values: Tensor,
    states: Tensor,
    slots: Tensor | None,
    accepted: Tensor,
    launch: Launch,
) -> None:
    """Advance each state in place by its row's first `accepted` tokens."""
    traits = _traits(x, slots, kind, launch)
    tensors = x._asdict() | {"values": values, "states": states, "slots": slots, "accepted": accepted}
    run = launcher(commit_kernel, tensors, {"traits": traits}, _options(traits, launch))
    run(_programs(x, traits), {"pool_rows": states.shape[0], "tokens": x.q.shape[1]})


def _traits(x: StepOperands, slots: Tensor | None, kind: StepKind, launch: Launch) -> TokenTraits:
    (H, K), (HV, V) = x.q.shape[2:], x.v.shape[-2:]
    return TokenTraits(
        H=H, HV=HV, K=K, V=V, BK=power_of_two(K), BV=min(launch.tile, power_of_two(V)), STEPS=kind.steps,
        DECAY="none" if x.log_decay is None else ("head", "channel")[1 - x.log_decay.dim() % 2],
        FIXED=x.log_decay is not None and x.log_decay.dim() < 3, DELTA=kind.delta, DPLR=x.a is not None,
        ERASE_KEY=x.e is not None, STRENGTH=_strength(x), ERASE_FACTOR=kind.erase_factor,
        WRITE_FACTOR=kind.write_factor, REPARAM=kind.reparam, ERASE_PREVIOUS=kind.erase_from == "previous",
        READ_BEFORE=kind.read == "before", SLOTS=slots is not None, OVERLAP=False,
    )  # fmt: skip


def _strength(x: StepOperands) -> str:
    """The kernels' constant STRENGTH."""
    if x.write is None:
        return "none"
    if x.write.dim() == x.v.dim():
        return "channel"
    return "head" if x.erase is None else "separate"


def _options(traits: TokenTraits, launch: Launch) -> Options:
    return Options(limit_warps(launch.warps, traits.BK * traits.BV), launch.stages)


def _programs(x: StepOperands, traits: TokenTraits) -> int:
    return x.q.shape[0] * traits.HV * cdiv(traits.V, traits.BV)
