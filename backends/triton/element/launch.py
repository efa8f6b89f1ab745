"""Launch the kernels of an elementwise update in the order of its plan, and that of one token.

B batch, T time, N sequences, H key heads, HV value heads (channels), K key width, V value width
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.kernels.portable.zero_tail import zero_tail_kernel
from deltazoo.backends.triton.element.config import ElementLaunch, Tiling, checkpoint_slots
from deltazoo.backends.triton.element.kernels.backward import element_backward_kernel, element_reverse_kernel
from deltazoo.backends.triton.element.kernels.combine import element_combine_kernel
from deltazoo.backends.triton.element.kernels.scan import element_scan_kernel
from deltazoo.backends.triton.element.kernels.step import element_step_kernel
from deltazoo.backends.triton.element.kernels.tile import ElementTraits
from deltazoo.backends.triton.element.operands import ElementKind, ElementOperands, ElementStepCall, empty_gradients
from deltazoo.backends.triton.element.plan import COMBINED, ElementPlan, ElementSizes, ElementStep, element_plan
from deltazoo.backends.triton.runtime.launcher import group, launcher
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, power_of_two

_STEP_ELEMENTS = 2048  # elements of the state that a program of the decode step updates
_KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        element_scan_kernel, element_reverse_kernel, element_combine_kernel, element_backward_kernel, zero_tail_kernel,
    )
}  # fmt: skip


def plan_of(x: ElementOperands, kind: ElementKind, grad: bool) -> ElementPlan:
    """Look up the plan of the operands."""
    (B, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    processors = problems.device_spec_of(x.q).processors
    return element_plan(ElementSizes(N, T, H, HV, K, V, x.cu_seqlens is not None), kind.config, processors, grad)


def forward(x: ElementOperands, kind: ElementKind, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, the final state, and with `save` the checkpoints [slots, K, V, HV], else an empty tensor."""
    plan = plan_of(x, kind, save)
    s, x = plan.sizes, _kernel_operands(x, plan)
    o, final = x.v.new_empty(x.v.shape), _empty(x, s.N, s.HV, s.K, s.V)
    slots = checkpoint_slots(s.N, s.T, plan.config.checkpoint_tokens, s.packed)
    checkpoints = _empty(x, slots, s.K, s.V, s.HV) if save else _empty(x, 0)
    tensors = {"o": o, "final": final, "checkpoints": checkpoints if save else None, "initial": x.state}
    _execute(plan.forward, plan, x, kind, tensors, {"v": o})
    return o, final, checkpoints


def backward(
    x: ElementOperands, kind: ElementKind, checkpoints: Tensor, d_o: Tensor, d_final: Tensor | None, key_gradients: bool
) -> list[Tensor]:
    """Return the gradients that `empty_gradients` lists."""
    plan = plan_of(x, kind, True)
    grads = empty_gradients(x, key_gradients)
    key_dtype = x.q.dtype
    s, tile, x = plan.sizes, plan.backward_tile, _kernel_operands(x, plan)
    rows = x.q.shape[0] * s.T
    d_q = d_k = d_rate = scratch = None
    if key_gradients:
        # the gradient of a key head from each block of channels, or from each channel; summed below
        shape = (tile.BLOCKS // s.H, rows, s.H, s.K) if tile.SHARED else (rows, s.H, s.HV // s.H, s.K)
        d_q, d_k = _empty(x, *shape), _empty(x, *shape)
        if tile.SHARED:
            programs = s.N * plan.segments * tile.BLOCKS
            scratch = _empty(x, programs, 2, tile.W, plan.config.checkpoint_tokens, 2, tile.RN * tile.TN)
    fixed = x.decay.startswith("fixed")
    decay_name = "step" if x.step is not None else "log_decay"
    if x.decay == "rate" or fixed:
        decay = x.rate if x.rate is not None else x.log_decay
        assert decay is not None
        d_rate = _empty(x, s.N * plan.segments, *decay.shape)
    tensors = {
        "d_o": d_o, "d_final": d_final, "initial": d_final, "checkpoints": checkpoints, "scratch": scratch, "d_q": d_q,
        "d_k": d_k, "d_v": grads["v"], "d_decay": None if fixed else grads.get(decay_name), "d_rate": d_rate,
        "d_initial": grads.get("state"),
    }  # fmt: skip
    tail = {"v": grads["v"], "q": grads.get("q"), "k": grads.get("k"), "b": grads.get("step")}
    after = {"log_decay": None if fixed else grads.get("log_decay")}
    backward_steps = [step for step in plan.backward if step.step != "tail"]
    _execute(backward_steps, plan, x, kind, tensors, tail, key_gradients)
    if d_q is not None and d_k is not None:
        axis = 0 if tile.SHARED else 2
        for name, partial in (("q", d_q), ("k", d_k)):
            total = partial.sum(axis) if partial.shape[axis] > 1 else partial
            tail[name] = grads[name] = total.view(x.q.shape).to(key_dtype)
    if d_rate is not None:
        name = "rate" if x.rate is not None else "log_decay"
        total = d_rate.sum(0)
        grads[name] = total.t().contiguous() if total.dim() == 2 else total
    _execute(plan.backward[len(backward_steps) :], plan, x, kind, tensors, tail | after, key_gradients)
    return list(grads.values())


def _execute(
    steps: Sequence[ElementStep], plan: ElementPlan, x: ElementOperands, kind: ElementKind, tensors: dict[str, Any],
    tail: dict[str, Tensor | None], key_gradients: bool = False,
) -> None:  # fmt: skip
    """Launch kernels in order.

    Args: tensors: by the names of the kernels' parameters. tail: the results whose tail is zeroed, by the names of the
        operands of their shapes.
    """
    s = plan.sizes
    tensors = {
        "q": x.q, "k": x.k, "v": x.v, "log_decay": x.log_decay, "step": x.step, "rate": x.rate, "cu": x.cu_seqlens,
        "starts": None, "ends": None, "maps": None, "o": None, "final": None,
    } | tensors  # fmt: skip
    if plan.segment_tokens:  # states at the start of segments, what segments produce, and their maps
        shape = (s.N * plan.segments, s.K, s.V, s.HV)
        tensors |= {name: _empty(x, *shape) for name in ("starts", "ends", "maps")}
    for launch in steps:
        named, save = _tensors_of(launch.step, plan, x, tensors), int(tensors["checkpoints"] is not None)
        if launch.step == "tail":
            named = dict.fromkeys(("v", "q", "k", "e", "log_decay", "b", "w")) | tail | {"cu": x.cu_seqlens}
        numbers = {
            "scale": kind.scale, "T": s.T, "N": s.N, "segments": plan.segments, "rows": x.q.shape[0] * s.T,
            "save": save if launch.step == "scan" else 0,
        }  # fmt: skip
        kernel, traits = _KERNELS[launch.kernel], _traits_of(launch.step, plan, x, kind, key_gradients)
        if launch.step == "tail":
            named["gmem"], traits["traits"] = group(kernel, named, traits)
        launcher(kernel, named, traits, Options(launch.warps))(launch.programs, numbers)


def _tensors_of(step: str, plan: ElementPlan, x: ElementOperands, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a step; a scan without checkpoints gets another tensor for them, and does not write it."""
    if step == "segment ends":
        others = {"initial": None, "o": None, "final": None, "starts": None, "checkpoints": tensors["ends"]}
        return tensors | others
    if step != "scan":
        return tensors
    checkpoints = tensors["final"] if tensors["checkpoints"] is None else tensors["checkpoints"]
    initial = None if plan.segment_tokens else x.state
    return tensors | {"initial": initial, "ends": None, "maps": None, "checkpoints": checkpoints}


def _traits_of(
    step: str, plan: ElementPlan, x: ElementOperands, kind: ElementKind, key_gradients: bool
) -> dict[str, Any]:
    s, config = plan.sizes, plan.config
    if step == "tail":
        decays = s.HV * s.K if x.decay == "channel" else s.HV
        return {"HK": s.H * s.K, "HV": s.HV, "V": s.V, "DECAYS": decays, "BLOCK": 1024}
    if step.startswith("combine"):
        return {
            "HV": s.HV, "STATE": s.K * s.V, "BLOCK": COMBINED, "SEGMENT_TOKENS": plan.segment_tokens,
            "PACKED": s.packed, "REVERSE": step == "combine backward",
        }  # fmt: skip
    if step != "backward":
        distance = 0 if step == "segment gradients" else config.checkpoint_tokens
        return {
            "traits": _traits(x, kind, plan, plan.forward_tile, config.forward)._replace(CHECKPOINT_TOKENS=distance)
        }
    traits = _traits(x, kind, plan, plan.backward_tile, config.backward)
    traits = traits._replace(KEY_GRADIENTS=key_gradients, LOADED_BY_ALL=True)
    return {"traits": traits, "token_traits": traits._replace(CHECKPOINT_TOKENS=1, GROUP=1)}


def _traits(
    x: ElementOperands, kind: ElementKind, plan: ElementPlan, tile: Tiling, launch: ElementLaunch
) -> ElementTraits:
    s = plan.sizes
    channels = s.HV // s.H if tile.SHARED else s.HV
    return ElementTraits(
        H=s.H, HV=s.HV, K=s.K, V=s.V, **tile._asdict(), DECAY=x.decay, READ_BEFORE=kind.read == "before",
        PACKED=s.packed, CHECKPOINT_TOKENS=plan.config.checkpoint_tokens,
        SEGMENT_TOKENS=plan.segment_tokens, GROUP=launch.group,
        KEYS=tile.RN if s.K % tile.RN == 0 else 1,
        CHANNELS=tile.RC if s.V == 1 and channels % tile.RC == 0 else 1,
        PREFETCH=problems.device_spec_of(x.q).platform == "cuda",
    )  # fmt: skip


def step_(call: ElementStepCall) -> Tensor:
    """Decode one token per row, updating the states in place. Returns o [B, 1, HV, V]."""
    (B, _, H, K), (HV, V) = call.q.shape, call.v.shape[2:]
    decay = ElementOperands(call.q, call.k, call.v, call.log_decay, call.step, call.rate).decay
    KP, VP = power_of_two(K), power_of_two(V)
    BC = min(power_of_two(HV), max(1, _STEP_ELEMENTS // (KP * VP)))
    while BC > 32 and B * cdiv(HV, BC) < 256:
        BC //= 2
    o = call.v.new_empty(call.v.shape)
    tensors = {
        "q": call.q, "k": call.k, "v": call.v, "log_decay": call.log_decay, "step": call.step, "rate": call.rate,
        "states": call.states, "slots": call.slots, "o": o,
    }  # fmt: skip
    traits = {
        "H": H, "HV": HV, "K": K, "V": V, "KP": KP, "VP": VP, "BC": BC, "DECAY": decay,
        "READ_BEFORE": call.read == "before", "SLOTS": call.slots is not None,
    }  # fmt: skip
    run = launcher(element_step_kernel, tensors, traits, Options(limit_warps(4, KP * VP * BC)))
    run(B * cdiv(HV, BC), {"scale": call.scale, "pool_rows": call.states.shape[0]})
    return o


def _kernel_operands(x: ElementOperands, plan: ElementPlan) -> ElementOperands:
    """Convert the operands to the layouts and dtypes that the kernels read.

    The rate and a fixed decay per channel become [K, HV], so that lanes read adjacent channels. q and k become float32
    if the channels of a program share them: they are small then, and every program would convert them again, which
    takes as many instructions as the update of the state.
    """
    if x.rate is not None:
        x = x._replace(rate=x.rate.t().contiguous())
    elif x.decay == "fixed_channel":
        assert x.log_decay is not None
        x = x._replace(log_decay=x.log_decay.t().contiguous())
    return x._replace(q=x.q.float(), k=x.k.float()) if plan.forward_tile.SHARED else x


def _empty(x: ElementOperands, *shape: int) -> Tensor:
    return torch.empty(shape, device=x.q.device, dtype=torch.float32)
