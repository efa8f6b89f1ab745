"""The functions that layers of transformers call, by their names in its modelling files, on our operators.

Arguments and results are those of transformers 5.17 to 5.24; layouts of its convolutions are [B, C, T], and states of
Mamba [B, ..., P, N]. A function takes the packed sequences of the layer's call from `cu_seqlens` or `cu_seq_lens_q`.

B batch, T time, C channels, W taps, H key heads, HV value heads, K key width, V value width, G groups, N state size,
P value width of Mamba-2
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.io.errors import UnsupportedError
from deltazoo.backends.ops.short_conv import ConvInputs, ConvPart
from deltazoo.backends.update.base import UpdateInputs, state_dtype
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.integrations.operators import (
    Sequences,
    bound_update,
    convolve,
    convolve_step_,
    has_silu,
    l2_normalize,
    run_update,
)

GATED_DELTA = UpdateSpec(decay="head", beta="head")
_KDA = UpdateSpec(decay="channel", beta="head")
_MAMBA2 = UpdateSpec(decay="head", transition="additive", scale=1.0)
_MAMBA = UpdateSpec(decay="rate", transition="additive", scale=1.0)

Result = tuple[Tensor, Tensor | None]
NO_LIMIT = 0.0, float("inf")


class Call(NamedTuple):
    """What a layer was called with: its tokens, the bounds of packed sequences, and its limits of the step size."""

    tokens: int | None = None
    bounds: Tensor | None = None
    step_limit: tuple[float, float] = NO_LIMIT


class LayerFunctions:
    """The functions of the layers of one modelling file, with what transformers does not pass to them.

    Its scan of Mamba receives neither the packed sequences nor the state, its decode step of Mamba-2 no limits of the
    step size, and a convolution does not see how many tokens the call has. `begin` sets these at the start of a layer's
    forward, `end` removes them.
    """

    def __init__(self) -> None:
        self.call = Call()
        self.states: list[Tensor] = []

    def begin(self, call: Call, state: Tensor | None) -> None:
        """Args: state: [B, C, N], or [B, heads, C, N] for the heads of Zamba, which scans one after the other."""
        self.call = call
        self.states = [] if state is None else list(state.unbind(1)) if state.dim() == 4 else [state]

    def end(self) -> None:
        self.call, self.states = Call(), []

    def names(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by the names that modelling files give them."""
        return {
            "causal_conv1d_fn": self.causal_conv1d_fn,
            "causal_conv1d_update": self.causal_conv1d_update,
            "torch_chunk_gated_delta_rule": self.gated_delta_rule,
            "torch_recurrent_gated_delta_rule": self.gated_delta_rule,
            "chunk_kimi_delta_attention": self.kimi_delta_attention,
            "recurrent_kimi_delta_attention": self.kimi_delta_attention,
            "mamba2_chunk_scan": self.mamba2_chunk_scan,
            "mamba2_selective_state_update": self.mamba2_selective_state_update,
            "mamba2_split_conv1d_scan_combined": self.no_combined_function,
            "mamba_inner_fn": self.no_combined_function,
            "mamba_selective_scan": self.mamba_selective_scan,
            "mamba_selective_state_update": self.mamba_selective_state_update,
        }

    def no_combined_function(self, *arguments: Any, **options: Any) -> None:
        """Return None: the layer then calls the convolution and the scan."""

    def causal_conv1d_fn(
        self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Compute the short causal convolution of [B, C, T] with an optional SiLU."""
        bounds = self._bounds(options)
        x = hidden_states.transpose(1, 2)
        if bounds is not None and x.shape[1] != self.call.tokens:  # the cache has put its inputs, or zeros, before them
            raise UnsupportedError("packed sequences cannot continue a cache: call the model with use_cache=False")
        parts = (ConvPart(x.shape[2], has_silu(activation, "causal_conv1d_fn")),)
        (y,) = convolve(ConvInputs(x, weight, bias, None, bounds), parts)
        return y.transpose(1, 2)

    def causal_conv1d_update(
        self, hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Convolve one token [B, C, 1] after the cached inputs [B, C, W], which are updated in place."""
        silu = has_silu(activation, "causal_conv1d_update")
        return convolve_step_(hidden_states[..., 0], conv_state, weight, bias, silu)[..., None]

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **options: Any,
    ) -> Result:  # fmt: skip
        """Compute the gated delta rule, chunked or recurrent."""
        inputs = UpdateInputs(q=query, k=key, v=value, log_decay=g, beta=beta)
        return self._delta(GATED_DELTA, inputs, initial_state, use_qk_l2norm_in_kernel, output_final_state, options)

    def kimi_delta_attention(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, **options: Any,
    ) -> Result:  # fmt: skip
        """Compute Kimi Delta Attention, chunked or recurrent. Args: g: [B, T, HV, K]."""
        inputs = UpdateInputs(q=query, k=key, v=value, log_decay=g, beta=beta)
        return self._delta(_KDA, inputs, initial_state, use_qk_l2norm_in_kernel, output_final_state, options)

    def mamba2_chunk_scan(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
        D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] = NO_LIMIT,
        return_final_states: bool = False, **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Compute S_t = exp(dt_t A) S_(t-1) + dt_t B_t x_t^T and y_t = S_t^T C_t + D x_t per head.

        Args: hidden_states: [B, T, HV, P]; dt: [B, T, HV]; A, D, dt_bias: [HV]; B, C: [B, T, G, N].
        Returns: y [B, T, HV, P] in float32 (float64), and with `return_final_states` the states [B, HV, P, N].
        """
        dtype = state_dtype(hidden_states.dtype)
        step = _step(dt, dt_bias, dt_softplus, dt_limit)
        x = hidden_states
        v = x.to(dtype) * step.unsqueeze(-1)
        inputs = UpdateInputs(q=C, k=B, v=v.to(C.dtype), log_decay=step * A.to(dtype))
        sequences = Sequences(initial_states, self._bounds(options), v_first=True)
        o, state = run_update(_MAMBA2, inputs, sequences)
        y = o.to(dtype)
        if D is not None:
            y = y + D.to(dtype).unsqueeze(-1) * x.to(dtype)
        return (y, state) if return_final_states else y

    def mamba2_selective_state_update(
        self, state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Advance the states [B, HV, P, N] by one token, in place; returns y [B, HV, P].

        Args: hidden_states, dt: [B, HV, P]; A: [HV, P, N]; B, C: [B, G, N]; D, dt_bias: [HV, P]. dt, A, D and dt_bias
            are the same for all P and N.
        """
        dtype = state_dtype(hidden_states.dtype)
        step = _step(dt[..., 0], None if dt_bias is None else dt_bias[:, 0], dt_softplus, self.call.step_limit)
        x = hidden_states
        inputs = UpdateInputs(
            q=C[:, None], k=B[:, None], v=(x.to(dtype) * step.unsqueeze(-1)).to(C.dtype)[:, None],
            log_decay=(step * A[:, 0, 0].to(dtype))[:, None],
        )  # fmt: skip
        o, new_state = run_update(_MAMBA2, inputs, Sequences(state, None, v_first=True))
        state.copy_(new_state)
        y = o[:, 0].to(dtype)
        if D is not None:
            y = y + D.to(dtype) * x.to(dtype)
        return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype)

    def mamba_selective_scan(
        self, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
        return_last_state: bool = False, **options: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Compute h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t and y_t = C_t^T h_t + D x_t per channel, times SiLU(z).

        Args: hidden_states, dt, z: [B, C, T]; A: [C, N]; B, C: [B, N, T]; D, delta_bias: [C].
        Returns: y [B, C, T], and with `return_last_state` the states [B, C, N].
        """
        dtype = state_dtype(hidden_states.dtype)
        x = hidden_states.transpose(1, 2)
        step = _step(dt.transpose(1, 2), delta_bias, delta_softplus, NO_LIMIT)
        v = (x.to(dtype) * step).to(C.dtype)
        inputs = UpdateInputs(
            q=C.transpose(1, 2).unsqueeze(2), k=B.transpose(1, 2).unsqueeze(2), v=v.unsqueeze(-1), step=step,
            rate=A.to(dtype),
        )  # fmt: skip
        state = self.states.pop(0).unsqueeze(-1) if self.states else None
        o, last = run_update(_MAMBA, inputs, Sequences(state, self.call.bounds))
        y = o.squeeze(-1).to(dtype)
        if D is not None:
            y = y + D.to(dtype) * x.to(dtype)
        y = y.transpose(1, 2)
        if z is not None:
            y = y * F.silu(z.to(dtype))
        return (y, last.squeeze(-1)) if return_last_state else y

    def mamba_selective_state_update(
        self, state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Advance the states [B, C, N] by one token, in place; returns y [B, C]. Args: B, C: [B, N]."""
        dtype = state_dtype(hidden_states.dtype)
        x = hidden_states.to(dtype)
        step = _step(dt, dt_bias, dt_softplus, NO_LIMIT)
        inputs = UpdateInputs(
            q=C[:, None, None], k=B[:, None, None], v=(x * step).to(C.dtype)[:, None, :, None], step=step[:, None],
            rate=A.to(dtype),
        )  # fmt: skip
        o, new_state = run_update(_MAMBA, inputs, Sequences(state.unsqueeze(-1)))
        state.copy_(new_state.squeeze(-1))
        y = o[:, 0, :, 0].to(dtype)
        if D is not None:
            y = y + D.to(dtype) * x
        return (y if z is None else y * F.silu(z.to(dtype))).to(hidden_states.dtype)

    def _delta(
        self, spec: UpdateSpec, inputs: UpdateInputs, state: Tensor | None, unit: bool, final: bool,
        options: dict[str, Any],
    ) -> Result:  # fmt: skip
        """Run a delta rule; one token without gradients updates the cached state in place."""
        bounds = self._bounds(options)
        if unit:
            inputs = inputs._replace(q=l2_normalize(inputs.q), k=l2_normalize(inputs.k))
        dtype = state_dtype(inputs.q.dtype)
        decodes = state is not None and inputs.q.shape[1] == 1 and not torch.is_grad_enabled()
        if decodes and bounds is None and state is not None and state.dtype == dtype and state.is_contiguous():
            assert inputs.log_decay is not None
            step = inputs._replace(log_decay=inputs.log_decay.to(dtype))
            return bound_update(spec).step_(step, state), state
        o, new_state = run_update(spec, inputs, Sequences(state, bounds))
        return o, new_state if final else None

    def _bounds(self, options: dict[str, Any]) -> Tensor | None:
        """The packed sequences of a call."""
        bounds = options.get("cu_seqlens")
        bounds = options.get("cu_seq_lens_q") if bounds is None else bounds
        bounds = self.call.bounds if bounds is None else bounds
        if bounds is None and options.get("seq_idx") is not None:
            raise UnsupportedError("packed sequences need cu_seq_lens_q; seq_idx alone does not say where they end")
        return bounds


def _step(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """The step size in float32 (float64), in the limits."""
    dtype = state_dtype(dt.dtype)
    step = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
    if softplus:
        step = F.softplus(step)
    low, high = limit
    return step if low <= 0 and high == float("inf") else step.clamp(low, high)
