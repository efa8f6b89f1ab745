"""Mixer with a matrix state: projection, operand parts, update, output parts, output map.

B batch, T time, D width, HV value heads, K key width, V value width, N sequences
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.io.errors import PluginError
from deltazoo.backends.ops.decode_step import FusedDecodeStep
from deltazoo.backends.ops.gemv import Norm, add_product
from deltazoo.backends.ops.rms_norm import rms_norm
from deltazoo.backends.torch_ext.devices import device_type
from deltazoo.backends.torch_ext.plain_module import is_plain, is_plain_linear
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.mixers.core.activations import activation_like
from deltazoo.mixers.core.calls import call_part
from deltazoo.mixers.core.decode_fusion import DecodeFusion, linear_output_dtype, plan_fusion
from deltazoo.mixers.core.decode_maps import apply_maps, apply_output, is_step, reads_weight
from deltazoo.mixers.core.grouped import Groupable, Rows, is_groupable
from deltazoo.mixers.core.input_maps import input_maps, mapped_classes
from deltazoo.mixers.core.mixer import CommitForm, Context, Mixer, MixerOutput
from deltazoo.mixers.core.named_tensors import NamedTensors
from deltazoo.mixers.core.part import (
    HasBackend,
    HeadShape,
    LinearPart,
    OutputArguments,
    OutputPart,
    Parts,
    Stateful,
    StatelessOutputPart,
    call_stateful,
    commit_part_,
    init_normal,
    project_jointly,
    run_part,
)
from deltazoo.mixers.core.sequences import (
    check_dtypes,
    check_names,
    check_shapes,
    check_state,
    left_align,
    undo_left_align,
)
from deltazoo.mixers.core.side import Side, side_outputs
from deltazoo.mixers.core.token_step import TokenCall, TokenOutput, TokenStep
from deltazoo.mixers.core.update import Update


class DeltaMixer(Mixer):
    """Mix with a matrix state: y = W_o outputs(update(operands(project(x)))) + skip(x).

    Args:
        shape: the sizes; spec: the recurrence; parts: the modules around the update; backend: as for `deltazoo.bind`.
        name: the mixer's name, a part of a key of the state, so that the states of other mixers do not fit.
    State: one tensor per part with a state, by the part's name; "NAME.update" is S [B, HV, K, V].
    """

    commit_form: ClassVar[CommitForm] = "writes"
    splits_routed: ClassVar[bool] = True

    def __init__(
        self,
        shape: HeadShape,
        spec: UpdateSpec,
        parts: Parts,
        backend: str | Backend | None = None,
        name: str = "mixer",
    ) -> None:
        super().__init__()
        self.update_key = f"{name}.update"
        self.width = shape.width
        self.project = parts.projection
        self.operands = nn.ModuleDict(parts.operands)
        self.update = Update(spec, parts.update_shape(shape), backend)
        self.outputs = nn.ModuleDict(parts.outputs)
        self.direct, self.shared = parts.skip, parts.shared
        self.out = nn.Linear(shape.value_heads * shape.value_width, shape.width, bias=parts.output_bias)
        self.output_std = parts.output_std
        self.reset_parameters()
        self.state_shapes = {name: tensor.shape[1:] for name, tensor in self.init_state(0).items()}
        self._rebind(backend, torch.empty(0))  # configs build the parts without a backend

    def reset_parameters(self) -> None:
        if self.output_std is not None:
            init_normal(self.out, self.output_std)

    def init_state(self, batch: int, capacity: int | None = None) -> NamedTensors:
        """Return the state before the first token. Its size does not depend on `capacity`."""
        check_integer("batch", batch, 0)
        state, like = {}, activation_like(self.out, self)
        for name, part in self._parts().items():
            if isinstance(part, Stateful | Update):
                initial = part.init_state(batch, like)
                if initial is not None:
                    if not isinstance(initial, Tensor) or initial.shape[:1] != (batch,):
                        got = list(initial.shape) if isinstance(initial, Tensor) else type(initial).__name__
                        raise PluginError(f"{type(part).__name__}.init_state must return [{batch}, ...], got {got}")
                    state[self.update_key if name == "update" else name] = initial
        return NamedTensors(state)

    def forward(
        self, x: Tensor, state: Mapping[str, Tensor] | None = None, context: Context | None = None
    ) -> MixerOutput:
        x_BTD, context, order = left_align(x, self.width, context, getattr(self.out, "weight", None))
        old: Mapping[str, Tensor] = {} if state is None else state
        new: dict[str, Any] = {}
        if context.verify and state is not None:
            self._check_state(state, x_BTD, context)
            fused = self._fused_drafts(x_BTD, state, None)
            if fused is not None:
                return MixerOutput(self._project_out(fused[0].flatten(2), x_BTD, order), fused[1])
        elif state is not None:
            self._check_state(state, x_BTD, context)
            decoded = self._decode_token_(x_BTD, None, state, context) if is_step(x_BTD, state) else None
            if decoded is not None:
                y_BTD = self._project_out(decoded.o, x_BTD, order, decoded.direct, decoded.norm)
                return MixerOutput(y_BTD, state, self._side(decoded.intermediates))
            stepped = self._fused_step_(x_BTD, state, context, None)
            if stepped is not None:
                o, remaining = stepped
                for output_part in remaining:
                    o = output_part.transform(o, x_BTD)
                return MixerOutput(self._project_out(o.flatten(2), x_BTD, order), state)
        products = self._products(x_BTD, state)
        context = context._replace(product=products.get("project"))
        inputs, new["project"], context = run_part(self.project, x_BTD, old.get("project"), context=context)
        projected = inputs
        for name, part in self.operands.items():
            context = context._replace(product=products.get(name))
            inputs, new[name], context = run_part(part, x_BTD, inputs, old.get(name), context=context)
        o, new[self.update_key] = call_part(self.update, inputs, old.get(self.update_key), context)
        arguments = OutputArguments(x_BTD, projected, inputs)
        parts = list(self.outputs.items())
        while parts:
            name, part = parts.pop(0)
            following_name, following = parts[0] if parts else ("", None)
            if isinstance(part, StatelessOutputPart) and isinstance(following, OutputPart):
                o_of_both = part.transform_with(following, o, x_BTD, products.get(following_name))
                if o_of_both is not None:
                    o = o_of_both
                    parts.pop(0)
                    continue
            context = context._replace(product=products.get(name))
            o, new[name] = call_stateful(part, o, arguments, old.get(name), context=context)
        y_BTD = self._project_out(o.flatten(2), x_BTD, order)
        return MixerOutput(y_BTD, None if state is None else _without_none(new), self._side(context.intermediates))

    def _side(self, intermediates: Mapping[str, Tensor] | None) -> Side | None:
        """Return the tensors for later layers among the intermediates."""
        given = intermediates or {}
        return side_outputs({name: given[name] for name in self.shared if name in given})

    def _products(self, x_BTD: Tensor, state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Compute linear maps of x together, by the name of their part: narrow ones, in a decode step all."""
        if is_step(x_BTD, state):
            return apply_maps(x_BTD, input_maps(self._parts(), self._mapped_classes))
        if x_BTD.shape[1] == 1:
            return {}
        linear_parts = {name: part for name, part in self.operands.items() if isinstance(part, LinearPart)}
        return project_jointly(x_BTD, input_maps(linear_parts, self._mapped_classes))

    def forward_grouped(
        self,
        mixers: Sequence["DeltaMixer"],
        rows: Rows,
        x_1AD: Tensor,
        state: Mapping[str, Tensor] | None,
        context: Context,
    ) -> tuple[Tensor, NamedTensors | None]:
        """Compute `forward` of mixers[g] at the rows of mixer g, with one update for all mixers.

        Args:
            mixers: mixers with equal configs, for which `can_group` holds; `self` is the first one.
            x_1AD: [1, A, D]; state: a row for each sequence; context: cu_seqlens, with sequences that each belong to
                one mixer.
        """
        if state is not None:
            check_dtypes(state, {self.update_key: state_dtype(x_1AD.dtype)}, x_1AD)
        old: Mapping[str, Tensor] = {} if state is None else state
        new: dict[str, Tensor | None] = {}
        parts = {name: [mixer._parts()[name] for mixer in mixers] for name in self._parts()}

        def run(name: str, *arguments: Any) -> Any:
            first = parts[name][0]
            assert isinstance(first, Groupable)  # the caller has checked it
            result, new[name] = first.forward_grouped(parts[name], rows, *arguments, old.get(name), context)
            return result

        projected = inputs = run("project", x_1AD)
        for name in self.operands:
            inputs = run(name, x_1AD, inputs)
        o, new[self.update_key] = self.update(inputs, old.get(self.update_key), context)
        for name in self.outputs:
            o = run(name, o, OutputArguments(x_1AD, projected, inputs))
        y_1AD = rows.linear(rearrange(o, "b t h v -> b t (h v)"), [mixer.out for mixer in mixers])
        return y_1AD, None if state is None else _without_none(new)

    def residual_step(self, x: Tensor, norm: Norm, state: Mapping[str, Tensor], context: Context) -> MixerOutput | None:
        if self.direct is not None or not reads_weight(self.out, x):
            return None
        x_B1D, context, _ = left_align(x, self.width, context, self.out.weight)
        self._check_state(state, x_B1D, context)
        if context.verify:
            fused = self._fused_drafts(x_B1D, state, norm)
            if fused is None:
                return None
            return MixerOutput(add_product(x_B1D, fused[0].flatten(2), self.out.weight), fused[1])
        decoded = self._decode_token_(x_B1D, norm, state, context)
        if decoded is not None:
            y_B1D = add_product(x_B1D, decoded.o, self.out.weight, decoded.norm)
            return MixerOutput(y_B1D, state, self._side(decoded.intermediates))
        stepped = self._fused_step_(x_B1D, state, context, norm)
        if stepped is None:
            return None
        o, remaining = stepped
        output_norm = remaining[-1].norm_of_all() if remaining else None
        if output_norm is not None:
            remaining.pop()
        normed_B1D = rms_norm(x_B1D, norm.weight, norm.eps) if remaining else x_B1D
        for part in remaining:
            o = part.transform(o, normed_B1D)
        return MixerOutput(add_product(x_B1D, o.flatten(2), self.out.weight, output_norm), state)

    def _decode_token_(
        self, x_B1D: Tensor, norm: Norm | None, state: Mapping[str, Tensor], context: Context
    ) -> TokenOutput | None:
        """Decode by the kernels of a `TokenStep`, if the mixer has one and they compute this call."""
        parts = self._parts()
        step = next((part for part in parts.values() if isinstance(part, TokenStep)), None)
        if step is None or context.mask is not None or context.cu_seqlens is not None:
            return None
        if not self._has_decode_kernels(x_B1D):
            return None
        states = {"update" if name == self.update_key else name: tensor for name, tensor in state.items()}
        return step.decode_token_(TokenCall(x_B1D, norm, parts, self.direct, states, context))

    def _has_decode_kernels(self, x_BTD: Tensor) -> bool:
        meta = self.update.meta(device_type(x_BTD), x_BTD.dtype)
        return is_plain(self.update) and self.update.bound.has_decode_kernels(meta)

    def _check_state(self, state: Mapping[str, Tensor], x_BTD: Tensor, context: Context) -> None:
        check_names(state, self.state_shapes)
        check_shapes(state, self.state_shapes)
        check_dtypes(state, {self.update_key: state_dtype(x_BTD.dtype)}, x_BTD)
        check_state({name: tensor.shape[0] for name, tensor in state.items()}, x_BTD, context)

    def _fused_step_(
        self, x_BTD: Tensor, state: Mapping[str, Tensor], context: Context, norm: Norm | None
    ) -> tuple[Tensor, list[StatelessOutputPart]] | None:
        """Decode one token per row by one kernel, in place. Return None if the call, parts or backend do not fuse.

        Args: norm: of x, not yet applied; None: there is none.
        Returns: o [B, 1, HV, V], and the output parts that are not in the kernel.
        """
        if context.mask is not None or context.cu_seqlens is not None or x_BTD.shape[1] != 1:
            return None
        bound, device = self.update.bound, device_type(x_BTD)
        fusion = None if torch.is_grad_enabled() or not bound.may_fuse_decode(device) else self.decode_fusion()
        if fusion is None or not bound.can_fuse_decode(fusion.step, device, linear_output_dtype(x_BTD)):
            return None
        o = fusion.decode_(bound, x_BTD, state.get("project"), state[self.update_key], norm)
        return o, fusion.remaining

    def _fused_drafts(
        self, x_BTD: Tensor, state: Mapping[str, Tensor], norm: Norm | None
    ) -> tuple[Tensor, NamedTensors] | None:
        """Read drafted tokens by few kernels. Return o and the draft, or None if parts or backend do not fuse."""
        bound, update = self.update.bound, state[self.update_key]
        fusion = self.decode_fusion() if bound.may_fuse_decode(device_type(x_BTD)) else None
        read = None if fusion is None else fusion.read_drafts(bound, x_BTD, state.get("project"), update, norm)
        if read is None:
            return None
        return read.o, NamedTensors({name: read.draft if name == self.update_key else read.qkv for name in state})

    def commit_(self, draft: Mapping[str, Any], state: Mapping[str, Tensor], accepted: Tensor) -> None:
        with torch.no_grad():
            for name, part in self._parts().items():
                if name == "update":
                    self.update.bound.commit_(draft[self.update_key], state[self.update_key], None, accepted)
                elif name in state:
                    commit_part_(part, draft[name], state[name], accepted)

    def split_refusal(self) -> str | None:
        parts = [name for name, part in self._parts().items() if isinstance(part, Stateful) and not part.splits]
        return f"has parts that do not exchange their states between ranks: {', '.join(parts)}" if parts else None

    def decode_fusion(self) -> DecodeFusion | None:
        """Return the decode step that the parts fuse into, or None if they do not fuse.

        The config decides it when the mixer is built: its parts declare whether they fuse. A part that is replaced
        afterwards is not fused until `rebind` is called. Parts that are not plain (`is_plain`) are not fused either.
        """
        return None if self._fusion_plan is None else self._fusion_plan.apply(self._unfused_step(), self._parts())

    def rebind(self, backend: str | Backend | None) -> None:
        """Bind the update and the parts to a backend, as `deltazoo.bind` does, and plan the decode fusion again."""
        self._rebind(backend, activation_like(self.out, self))

    def _rebind(self, backend: str | Backend | None, like: Tensor) -> None:
        for module in self.modules():
            if isinstance(module, HasBackend):
                module.rebind(backend, like)
        self._mapped_classes = mapped_classes(self._parts())
        self._fusion_plan = plan_fusion(self._unfused_step(), self._parts(), dict(self.outputs.items()))

    def _project_out(
        self,
        o_BTC: Tensor,
        x_BTD: Tensor,
        order: Tensor | None,
        direct_BTD: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor:
        """Apply the output map and the skip connection, and restore the token order.

        Args: direct_BTD: result of the skip connection; None: not computed. norm: of o; None: there is none.
        """
        if direct_BTD is not None and reads_weight(self.out, o_BTC):
            return add_product(direct_BTD, o_BTC, self.out.weight, norm)
        y_BTD = apply_output(o_BTC, self.out, norm)
        if self.direct is not None:
            y_BTD = y_BTD + self.direct(x_BTD).to(y_BTD.dtype)
        return undo_left_align(y_BTD, order)

    def _unfused_step(self) -> FusedDecodeStep:
        _, H, HV, K, V, _ = self.update.shape
        return FusedDecodeStep(self.update.spec, H, HV, K, V, parts=())

    def _parts(self) -> dict[str, nn.Module]:
        """All parts by name, in the order in which they run."""
        return {
            "project": self.project,
            **dict(self.operands.items()),
            "update": self.update,
            **dict(self.outputs.items()),
        }


def can_group(mixers: Sequence[nn.Module]) -> TypeGuard[Sequence[DeltaMixer]]:
    """Whether the first mixer's `forward_grouped` can compute all of them, which have equal configs."""
    return all(
        type(mixer) is DeltaMixer
        and mixer.direct is None
        and is_plain_linear(mixer.out)
        and is_plain(mixer)
        and is_plain(mixer.update)
        and all(is_groupable(part) for name, part in mixer._parts().items() if name != "update")
        for mixer in mixers
    )


def _without_none(tensors: Mapping[str, Any]) -> NamedTensors:
    return NamedTensors({name: tensor for name, tensor in tensors.items() if tensor is not None})
