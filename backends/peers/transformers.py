"""TransformersBackend: adapter to the gated delta rule and Kimi Delta Attention of transformers, in plain torch.

B batch, T time, HV value heads, K key width
"""

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.peers.common import missing_packages, recurrence_reasons, strength_or_ones, violations
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, UpdateOutput
from deltazoo.backends.update.lowering import log_decay
from deltazoo.backends.update.slots import step_in_slots
from deltazoo.backends.update.spec import UpdateSpec


class _Functions(NamedTuple):
    """Functions of a module of transformers.models, chunked and recurrent."""

    module: str
    chunked: str
    recurrent: str


_GATED_DELTA = _Functions(
    "qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
)
_KDA = _Functions("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")


class TransformersBackend(Backend):
    """Compute the delta rule with the torch functions of transformers, if that package is installed.

    They run on every device and compute in float32: those of Qwen3-Next without a decay or with one per head, those of
    Kimi Linear with a decay per channel. The package replaces them by kernels of other packages where it finds some;
    this adapter calls the torch functions themselves. Decoding calls the recurrent function and copies the result into
    the states.

    Source: https://github.com/huggingface/transformers, 5.23.
    """

    name = "transformers"

    def unsupported(self, spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
        grouped_channels = (spec.decay == "channel" or meta.decay_channels) and meta.HV != meta.H
        rules = {
            f"transition must be 'delta', got '{spec.transition}'.": spec.transition != "delta",
            f"beta must be 'none' or 'head', got '{spec.beta}'.": spec.beta == "channel",
            f"a decay per channel needs HV = H, got HV={meta.HV}, H={meta.H}.": grouped_channels,
            "it does not keep packed sequences apart.": meta.packed,
            "it computes in float32, got float64.": meta.dtype == torch.float64,
        }
        return missing_packages({"transformers": "transformers"}) + recurrence_reasons(spec) + violations(rules)

    def forward(self, spec: UpdateSpec, inputs: UpdateInputs) -> UpdateOutput:
        return _run(spec, inputs, inputs.state, recurrent=False)

    def step_(self, spec: UpdateSpec, inputs: UpdateInputs, states: Tensor, slots: Tensor | None) -> Tensor:
        with torch.no_grad():
            return step_in_slots(lambda state: _run(spec, inputs, state, recurrent=True), states, slots)


def _run(spec: UpdateSpec, inputs: UpdateInputs, state: Tensor | None, recurrent: bool) -> UpdateOutput:
    q, k, v = inputs.q, inputs.k, inputs.v
    decay, K = log_decay(spec, inputs), q.shape[-1]
    if decay is None:
        decay = v.new_zeros(v.shape[:-1], dtype=torch.float32)
    package = _KDA if decay.dim() == 4 else _GATED_DELTA
    run = _unwrapped(package.module, package.recurrent if recurrent else package.chunked)
    scale = spec.scale_of(K) * K**0.5  # the functions multiply q by K ** -0.5
    o, new_state = run(
        q if scale == 1 else q * scale, k, v, decay, strength_or_ones(spec, inputs),
        initial_state=state, output_final_state=True,
    )  # fmt: skip
    return UpdateOutput(o, new_state)


@functools.cache
def _unwrapped(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function of the package, without the wrapper that may replace it by another package's kernel."""
    function: Callable[..., tuple[Tensor, Tensor]] = getattr(import_module(f"transformers.models.{module}"), name)
    return inspect.unwrap(function)
