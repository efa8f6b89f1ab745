"""The one mixer of all matrix-state variants: project, prepare the operands, update, shape the output, project back.

B batch, T time, D width, HV value heads, K key width, V value width, N sequences
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import Backend, UpdateInputs, UpdateMeta, state_dtype
from deltazoo.backends.decode_step import FusedDecodeStep
from deltazoo.backends.dispatch import BoundUpdate, bind
from deltazoo.backends.errors import StateError
from deltazoo.backends.spec import UpdateSpec
from deltazoo.mixers.core.decode_fusion import Fusion, fusion, mapped_dtype
from deltazoo.mixers.core.mixer import Context, Mixer
from deltazoo.mixers.core.part import (
    HasBackend,
    HeadShape,
    LinearPart,
    OutputArguments,
    Parts,
    ResizesHeads,
    Stateful,
    is_unmodified,
    together,
)
from deltazoo.mixers.core.sequences import check_state, left_align, undo_left_align
from deltazoo.mixers.core.state import write_back


class Update(nn.Module, HasBackend):
    """The update of a spec inside a module: bound to its backends, hiding padded tokens, carrying the state.

    State: [B, HV, K, V], float32 (float64 in float64).
    """

    def __init__(self, spec: UpdateSpec, shape: HeadShape, backend: str | Backend | None = None) -> None:
        super().__init__()
        self.spec, self.shape = spec, shape
        self.rebind(backend, torch.empty(0))

    def rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        # A model is often built on the CPU, or on no device, before it moves: those do not tell where it will run.
        known = like.device.type not in ("cpu", "meta")
        self.bound = bind(self.spec, backend, self.meta(like.device.type, like.dtype) if known else None)
        # A decay that is constant in time cannot spare padded tokens: with a mask it is given token by token.
        self.bound_fixed: dict[int, BoundUpdate] = {}
        if self.spec.decay == "fixed":
            self.bound_fixed = {
                dim: self.bound.for_spec(self.spec.model_copy(update={"decay": decay}))
                for dim, decay in ((3, "head"), (4, "channel"))
            }

    def meta(self, device: str, dtype: torch.dtype, grad: bool = False) -> UpdateMeta:
        """What a backend may know of the tensors on such a device."""
        _, H, HV, K, V, _ = self.shape
        return UpdateMeta(device, dtype, H, HV, K, V, grad=grad)

    def init_state(self, batch: int, like: Tensor) -> Tensor:
        """The state before the first token, on the device of `like`."""
        _, _, HV, K, V, _ = self.shape
        return like.new_zeros(batch, HV, K, V, dtype=state_dtype(like.dtype))

    def forward(self, inputs: UpdateInputs, state: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return o [B, T, HV, V] and the state after; one token without gradients updates the state in place."""
        bound = self.bound
        if context.mask is not None:
            inputs = mask_padding(inputs, context.mask)
            if self.bound_fixed and inputs.log_decay is not None:
                bound = self.bound_fixed[inputs.log_decay.dim()]
        one = inputs.q.shape[1] == 1 and context.cu_seqlens is None
        if state is not None and one and not torch.is_grad_enabled():
            return bound.step_(inputs, state), state
        out = bound(inputs._replace(state=state, cu_seqlens=context.cu_seqlens))
        return out.o, None if state is None else write_back(state, out.state)

    def extra_repr(self) -> str:
        return repr(self.spec)


class DeltaMixer(Mixer):
    """Mix with a matrix state: y = W_o outputs(update(operands(project(x)))) + direct(x).

    Args:
        shape: the sizes; spec: the recurrence; parts: what stands around it; backend: as for `deltazoo.bind`.
    State: one tensor for each part that remembers, by the part's name; "update" is S [B, HV, K, V].
    """

    def __init__(self, shape: HeadShape, spec: UpdateSpec, parts: Parts, backend: str | Backend | None = None) -> None:
        super().__init__()
        self.width = shape.width
        self.project = parts.project
        self.operands = nn.ModuleDict(parts.operands)
        self.update = Update(spec, _resized(shape, parts), backend)
        self.outputs = nn.ModuleDict(parts.outputs)
        self.out = nn.Linear(shape.value_heads * shape.value_width, shape.width, bias=False)
        if parts.out_std is not None:
            nn.init.normal_(self.out.weight, std=parts.out_std)
        self.direct = parts.direct
        self.state_names = tuple(self.init_state(0))
        self._rebind(backend, torch.empty(0))  # what is bound inside the parts is made without the backend

    def init_state(self, batch: int, capacity: int | None = None) -> dict[str, Tensor]:
        """The state before the first token; its size does not depend on `capacity`."""
        state = {}
        for name, part in self._stages():
            if isinstance(part, Stateful | Update):
                before = part.init_state(batch, self.out.weight)
                if before is not None:
                    state[name] = before
        return state

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None, context: Context | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        x_BTD, context, order = left_align(x, self.width, context)
        context = context._replace(intermediates={})
        before = {} if state is None else state
        after: dict[str, Tensor | None] = {}
        if state is not None:
            if tuple(state) != self.state_names:
                raise StateError(f"the state must have the tensors {self.state_names}, got {tuple(state)}")
            check_state({name: tensor.shape[0] for name, tensor in state.items()}, x_BTD, context)
            fused = self._fused_step_(x_BTD, state, context)
            if fused is not None:
                return self._mapped(fused, x_BTD, order), state
        inputs, after["project"] = self.project(x_BTD, before.get("project"), context)
        projected = inputs
        narrow = {
            n: part.proj for n, part in self.operands.items() if isinstance(part, LinearPart) and is_unmodified(part)
        }
        raw = together(x_BTD, narrow)
        for name, part in self.operands.items():
            if isinstance(part, LinearPart) and name in raw:
                inputs = part.prepare(raw[name], inputs)
            else:
                inputs, after[name] = part(x_BTD, inputs, before.get(name), context)
        o, after["update"] = self.update(inputs, before.get("update"), context)
        flow = OutputArguments(x_BTD, projected, inputs)
        for name, part in self.outputs.items():
            o, after[name] = part(o, flow, before.get(name), context)
        y_BTD = self._mapped(o, x_BTD, order)
        if state is None:
            return y_BTD, None
        return y_BTD, {name: tensor for name, tensor in after.items() if tensor is not None}

    def _fused_step_(self, x_BTD: Tensor, state: dict[str, Tensor], context: Context) -> Tensor | None:
        """One token a row, in place, with most of what stands around the update in the backend's kernel; None where
        parts or backend do not allow it."""
        plain = context.mask is None and context.cu_seqlens is None and x_BTD.shape[1] == 1
        bound, device = self.update.bound, x_BTD.device.type
        fused = self.fusion() if plain and not torch.is_grad_enabled() and bound.may_fuse_decode(device) else None
        if fused is None or not bound.can_fuse_decode(fused.step, device, mapped_dtype(x_BTD)):
            return None
        o = bound.fused_decode_step_(fused.step, fused.inputs(x_BTD, state.get("project")), state["update"])
        for part in fused.after:
            o = part.transform(o, x_BTD)
        return o

    def fusion(self) -> Fusion | None:
        """How a backend may take a decode step in one, see `Fusion`; None where the parts, as they are, do not fuse."""
        if type(self.update) is not Update or not is_unmodified(self.update):
            return None
        _, H, HV, K, V, _ = self.update.shape
        step = FusedDecodeStep(self.update.spec, H, HV, K, V, parts=())
        return fusion(step, {"project": self.project, **dict(self.operands.items())}, dict(self.outputs.items()))

    def _mapped(self, o: Tensor, x_BTD: Tensor, order: Tensor | None) -> Tensor:
        """What the mixer returns."""
        y_BTD = self.out(rearrange(o, "b t h v -> b t (h v)"))
        if self.direct is not None:
            y_BTD = y_BTD + self.direct(x_BTD).to(y_BTD.dtype)
        return undo_left_align(y_BTD, order)

    def rebind(self, backend: str | Backend | None) -> None:
        """Choose the backend anew, as `deltazoo.bind` does."""
        self._rebind(backend, self.out.weight)

    def _rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        for module in self.modules():
            if isinstance(module, HasBackend):
                module.rebind(backend, like)

    def _stages(self) -> list[tuple[str, nn.Module]]:
        return [
            ("project", self.project),
            *self.operands.items(),
            ("update", self.update),
            *self.outputs.items(),
        ]


def mask_padding(inputs: UpdateInputs, mask_BT: Tensor) -> UpdateInputs:
    """Make the update the identity at padded tokens: nothing decays, nothing is erased or written."""

    def zeroed(tensor: Tensor) -> Tensor:
        return torch.where(mask_BT.view(*mask_BT.shape, *[1] * (tensor.dim() - 2)), tensor, 0.0)

    changed = {"k": zeroed(inputs.k)}
    if inputs.log_decay is not None:
        constant = inputs.log_decay.dim() < 3
        each = inputs.log_decay.expand(*mask_BT.shape, *inputs.log_decay.shape) if constant else inputs.log_decay
        changed["log_decay"] = zeroed(each)
    for name in ("b", "step"):
        operand = getattr(inputs, name)
        if operand is not None:
            changed[name] = zeroed(operand)
    return UpdateInputs(**{**inputs._asdict(), **changed})


def _resized(shape: HeadShape, parts: Parts) -> HeadShape:
    """The sizes of the update, after the parts before it."""
    for part in parts.operands.values():
        if isinstance(part, ResizesHeads):
            shape = part.resize_heads(shape)
    return shape
