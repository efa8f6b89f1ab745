"""FlaBackend: flash-linear-attention's kernels.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

import inspect
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.peers.common import decay_of, missing, ones, refused, strength, unusual
from deltazoo.backends.spec import UpdateSpec


class FlaBackend(Backend):
    """Compute the update with flash-linear-attention's Triton kernels, where that package is installed.

    `chunk_gated_delta_rule` with a decay, `chunk_delta_rule` without, `chunk_simple_gla` for additive updates;
    decode by `fused_recurrent_*` and a copy into the states. Graphs break at its functions. It tunes at the first call
    of a shape. On Hopper its gated backward needs Triton >= 3.7.1, or TileLang and nvcc, and else raises. Where
    FlashQLA is installed the package hands it whole calls in silence; here the functions' own code runs.

    Source: https://github.com/fla-org/flash-linear-attention, 0.6.0.
    """

    name = "fla"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        grouped = meta.HV != meta.H and (spec.transition == "additive" or spec.decay == "none")
        rules = {
            f"K must be at most 256, got {meta.K}.": meta.K > 256,
            f"without a decay, or additive, HV must be H, got HV={meta.HV}, H={meta.H}.": grouped,
            f"scale must be above 0, got {spec.scale}.": spec.scale is not None and spec.scale <= 0,
        }
        return missing({"fla": "fla-core"}) + unusual(spec, meta) + refused(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        q, k, v, cu = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
        beta, scale = strength(spec, inputs), spec.scale_of(inputs.q.shape[-1])
        rest = {"scale": scale, "initial_state": inputs.state, "output_final_state": True, "cu_seqlens": cu}
        if spec.transition == "additive":
            run = _own("simple_gla", "chunk_simple_gla")
            return UpdateOutput(*run(q, k, _written(v, beta), **_decay(spec, inputs), **rest))
        beta = ones(inputs) if beta is None else beta
        if spec.decay == "none":
            return UpdateOutput(*_own("delta_rule", "chunk_delta_rule")(q, k, v, beta, **rest))
        run = _own("gated_delta_rule", "chunk_gated_delta_rule")
        return UpdateOutput(*run(q, k, v, decay_of(spec, inputs), beta, **rest))

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        with torch.no_grad():
            q, k, v, beta = inputs.q, inputs.k, inputs.v, strength(spec, inputs)
            state = states if slots is None else states.index_select(0, slots)
            rest = {"scale": spec.scale_of(inputs.q.shape[-1]), "initial_state": state, "output_final_state": True}
            if spec.transition == "additive":
                run = _own("simple_gla", "fused_recurrent_simple_gla")
                o, after = run(q, k, _written(v, beta), **_decay(spec, inputs), **rest)
            else:
                run = _own("gated_delta_rule", "fused_recurrent_gated_delta_rule")
                beta = ones(inputs) if beta is None else beta
                o, after = run(q, k, v, g=decay_of(spec, inputs), beta=beta, **rest)
            if slots is None:
                states.copy_(after)
            else:
                states.index_copy_(0, slots, after)
        return o


_functions: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {}


def _own(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of the package without the wrapper that may hand its calls to another package."""
    if name not in _functions:
        found = inspect.unwrap(getattr(import_module(f"fla.ops.{module}"), name))
        _functions[name] = torch.compiler.disable(found)
    return _functions[name]


def _written(v: Tensor, strength: Tensor | None) -> Tensor:
    """The values as an additive update writes them: it has no strength of its own."""
    return v if strength is None else (v * strength.unsqueeze(-1)).to(v.dtype)


def _decay(spec: UpdateSpec, inputs: UpdateInputs) -> dict[str, Tensor | None]:
    """g [B, T, H], or a fixed decay as g_gamma [H], which has no gradient there."""
    if spec.decay == "fixed" and inputs.log_decay is not None and not inputs.log_decay.requires_grad:
        return {"g_gamma": inputs.log_decay}
    return {"g": decay_of(spec, inputs)}
