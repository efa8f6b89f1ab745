"""Update of a spec as a module of a mixer.

B batch, T time, H key heads, HV value heads, K key width, V value width
"""

from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.backends.context_parallel.exchange import states_of_documents
from deltazoo.backends.context_parallel.update import carried_update
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateMeta, state_dtype
from deltazoo.backends.update.dispatch import BoundUpdate, bind
from deltazoo.backends.update.spec import Decay, UpdateSpec
from deltazoo.mixers.core.decode_fusion import linear_output_dtype
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasBackend, HeadShape
from deltazoo.mixers.core.sequences import mask_padding
from deltazoo.mixers.core.state import write_back


class Update(nn.Module, HasBackend):
    """Update of a spec as a module: bound to a backend, masking padded tokens, carrying the state.

    State: [B, HV, K, V], float32 (float64 in float64).
    """

    def __init__(self, spec: UpdateSpec, shape: HeadShape, backend: str | Backend | None = None) -> None:
        super().__init__()
        self.spec, self.shape = spec, shape
        self.rebind(backend, torch.empty(0))

    def rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        # A model is often built on the CPU or the meta device and then moved, so these do not say where it will run.
        device_known = like.device.type not in ("cpu", "meta")
        self.bound = bind(self.spec, backend, self.meta(like.device.type, like.dtype) if device_known else None)
        # A decay that is constant in time would also decay the state at padded tokens. With a mask the decay is passed
        # per token, which needs a spec with a "head" or "channel" decay, by the dimension of log_decay.
        self.bound_with_mask: dict[int, BoundUpdate] = {}
        if self.spec.decay == "fixed":
            self.bound_with_mask = {
                dim: self.bound.for_spec(self.spec.model_copy(update={"decay": decay}))
                for dim, decay in ((3, "head"), (4, "channel"))
            }

    def meta(self, device: str, dtype: torch.dtype, grad: bool = False) -> UpdateMeta:
        """Describe the inputs of this update on a device, for a backend's capability check."""
        _, H, HV, K, V, _ = self.shape
        return UpdateMeta(device, dtype, H, HV, K, V, grad=grad)

    def is_decayed_sum(self, decay: Decay) -> bool:
        """Whether the state is decayed so, one write of each token is added, and the output is read after that."""
        spec = self.spec
        return (spec.transition, spec.beta, spec.read, spec.householders, spec.decay) == (
            "additive", "none", "after", 1, decay,
        )  # fmt: skip

    def takes_packs(self, x: Tensor) -> bool:
        """Whether the backend for rows of x also computes packed sequences. Args: x: input of the mixer."""
        meta = self.meta(device_type(x), linear_output_dtype(x), grad=torch.is_grad_enabled())
        return not self.bound.backend_for(meta).unsupported(self.spec, meta._replace(packed=True))

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        """Return the state before the first token, on the device of `like`."""
        _, _, HV, K, V, _ = self.shape
        return like.new_zeros(batch, HV, K, V, dtype=state_dtype(like.dtype))

    def forward(self, inputs: UpdateInputs, state: Tensor | None, context: Context) -> tuple[Tensor, Any]:
        """Return o [B, T, HV, V] and the new state. A single token without gradients updates the state in place.

        For drafted tokens return o and the `Draft`.
        """
        bound = self.bound
        if context.verify and state is not None:
            o, draft = bound.verify_(inputs, state)
            return o, draft
        if context.parallel is not None:
            out = carried_update(bound, inputs._replace(state=state), context.parallel)
            if state is None:
                return out.o, None
            return out.o, write_back(state, states_of_documents(out.state, context.parallel))
        if context.mask is not None:
            inputs = mask_padding(inputs, context.mask)
            if self.bound_with_mask and inputs.log_decay is not None:
                bound = self.bound_with_mask[inputs.log_decay.dim()]
        single_token = inputs.q.shape[1] == 1 and context.cu_seqlens is None
        if state is not None and single_token and not torch.is_grad_enabled():
            return bound.step_(inputs, state), state
        out = bound(inputs._replace(state=state, cu_seqlens=context.cu_seqlens))
        return out.o, None if state is None else write_back(state, out.state)

    def extra_repr(self) -> str:
        return repr(self.spec)
