"""One residual layer, as a config and as a module: token mixers and an MLP, each with an RMS norm.

B batch, T time, D width
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
from pydantic import Field, field_serializer
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.io.frozen_config import changed_fields
from deltazoo.backends.ops.gemv import Norm, refusals
from deltazoo.backends.torch_ext.einops_nodes import record_einops_calls
from deltazoo.backends.torch_ext.plain_module import is_plain
from deltazoo.backends.torch_ext.symbolic_sizes import is_known
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.registry import resolve
from deltazoo.backends.update.watch import runs_by_kernel
from deltazoo.blocks.model.checkpointing import Checkpointing, run_layer
from deltazoo.blocks.model.mlp import Dense, Mlp
from deltazoo.blocks.spec.parsing import MlpConfig, PlainDataModel, changed_mlp_fields, parse_mixer, parse_mlp
from deltazoo.mixers.core import config as configs
from deltazoo.mixers.core.initialization import drawn_in_float32
from deltazoo.mixers.core.mixer import Context, Mixer, MixerConfig, MixerOutput, PageTable, Place, State
from deltazoo.mixers.core.patterns import Term
from deltazoo.mixers.core.side import Side, join_sides
from deltazoo.mixers.parts.norms import (
    LayerInputNorm,
    NormKind,
    add_and_normalize,
    layer_norm_of,
    norm_before_product,
)

LayerState = tuple[State, ...]
NormPosition = Literal["pre", "output", "post"]


class LayerSpec(PlainDataModel, Term):
    """The config of one layer: a residual branch with token mixers, then one with an MLP; either may be absent.

    A branch f with the norm n computes, depending on `norm_position`,

        pre      x + f(n(x))
        output   x + n(f(x))                  OLMo 2, arXiv 2501.00656
        post     residual_scale n(x) + f(n(x))     MiniMax-01, arXiv 2501.08313: DeepNorm (2203.00555) from norm to norm

    and `branch_scale` is a factor of f, or of n(f(x)) for "output".

    All fields but `mixer`, `mixer_scales` and `share` default to those of the stack.

    Args:
        mixer: a mixer config, several for parallel mixers, whose outputs are summed, or "none" for a layer that is only
            an MLP.
        mlp: a `Dense` MLP, a `MoE`, or "none" for a layer without an MLP.
        norm: "rms", or "layer", which subtracts the mean first and adds a bias (RWKV).
        norm_eps: epsilon of the norms, added to the mean square under the root.
        norm_offset: added to the weights of the RMS norms.
        norm_position: where the norms are, see above.
        residual_scale: factor of the residual connection; needs the position "post".
        branch_scale: factor of what the branches add (Granite's residual_multiplier).
        mixer_scales: factors of the outputs of the mixers, one each (Falcon-H1); None: 1.
        share: a label; the layers with the same label are one module, with one set of weights and a state for each
            place (Zamba, arXiv 2405.16712). `model.stack.layers` repeats the module: for FSDP2 call `fully_shard` on
            `dict.fromkeys(model.stack.layers)`.
        backend: name of the backend that computes the mixers' updates.
    Raises: ConfigError.
    """

    mixer: MixerConfig | tuple[MixerConfig, ...] | Literal["none"]
    mlp: MlpConfig | Literal["none"] | None = None
    norm: NormKind | None = None
    norm_eps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    norm_offset: float | None = Field(default=None, allow_inf_nan=False)
    norm_position: NormPosition | None = None
    residual_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    branch_scale: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    mixer_scales: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] | None = None
    share: str | None = None
    backend: str | None = None

    def changed_fields(self) -> dict[str, Any]:
        """Return the plain data of the fields that differ from their defaults."""
        data = {**self.model_dump(mode="json", include={*changed_fields(self)}), "mixer": "none"}
        if isinstance(self.mlp, MlpConfig):
            data["mlp"] = changed_mlp_fields(self.mlp)
        mixers = [configs.dump_changed(config) for config in self.mixers]
        if mixers:
            data["mixer"] = mixers if isinstance(self.mixer, tuple) else mixers[0]
        return data

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The mixer configs as a tuple, also for a single mixer; () without a mixer."""
        if self.mixer == "none":
            return ()
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    @property
    def is_scaled(self) -> bool:
        """Whether outputs of mixers or branches have factors other than 1."""
        return self.branch_scale not in (None, 1.0) or any(scale != 1.0 for scale in self.mixer_scales or ())

    @property
    def title(self) -> str:
        """The names of the mixers, or "mlp" for a layer that is only an MLP."""
        return " | ".join(config.name for config in self.mixers) or "mlp"

    @drawn_in_float32
    def build(self, width: int, place: Place, backend: str | Backend | None = None) -> "Layer":
        """Build the module. Fields that are None have the defaults of `StackSpec`.

        Args: backend: overrides the backend of the layer.
        Raises: ConfigError: a mixer does not fit the width; UnknownNameError: unknown backend.
        """
        mixer_backend = self.backend if backend is None else backend
        if mixer_backend is not None:
            resolve(mixer_backend)  # mixers without an update do not look it up
        mlp = Dense() if self.mlp is None else self.mlp
        mixers = [config.build(width, place, mixer_backend) for config in self.mixers]
        return Layer(self, width, mixers, None if mlp == "none" else mlp.build(width))

    @field_serializer("mixer")
    def _dump_mixer(self, mixer: Any) -> Any:
        if mixer == "none":
            return mixer
        return [configs.dump(config) for config in mixer] if isinstance(mixer, tuple) else configs.dump(mixer)

    @staticmethod
    def _parse_fields(data: dict[str, Any]) -> dict[str, Any]:
        mixers = data.get("mixer")
        if isinstance(mixers, list | tuple):
            if not mixers:
                raise ConfigError("mixer: a layer needs at least one mixer, or 'none', got an empty list")
            data["mixer"] = tuple(parse_mixer(("mixer", str(i)), mixer) for i, mixer in enumerate(mixers))
        elif mixers is not None and mixers != "none":
            data["mixer"] = parse_mixer(("mixer",), mixers)
        if data.get("mlp") is not None:
            data["mlp"] = parse_mlp(("mlp",), data["mlp"])
        return data

    def _check(self) -> None:
        if self.mixer == "none" and self.mlp == "none":
            raise ConfigError("mixer: a layer needs a mixer or an MLP, got 'none' for both")
        if self.mixer_scales is not None and len(self.mixer_scales) != len(self.mixers):
            raise ConfigError(
                f"mixer_scales: must have one factor for each of {len(self.mixers)} mixers, got {self.mixer_scales}"
            )
        if self.norm_position is not None:
            self.check_residual_scale(self.norm_position)

    def check_residual_scale(self, norm_position: NormPosition) -> None:
        """Refuse a factor without effect. Args: norm_position: that of the layer. Raises: ConfigError."""
        if self.residual_scale not in (None, 1.0) and norm_position != "post":
            raise ConfigError(unused_residual_scale(self.residual_scale, norm_position))


def unused_residual_scale(scale: float | None, norm_position: NormPosition) -> str:
    """Return the sentence about a factor that only the position "post" uses."""
    return f'residual_scale needs norm_position="post", got {scale} with norm_position="{norm_position}"'


class LayerOutput(NamedTuple):
    """The result of a layer: x [B, T, D], the new state or None, and the side outputs of its modules."""

    x: Tensor
    state: LayerState | None
    side: Side | None


class Branch(NamedTuple):
    """A residual branch.

    Args:
        norm: its norm. function: f, of the normed input in the position "pre".
        step: computes x + f(norm(x)) by the kernels of a decode step, or returns None.
    """

    norm: LayerInputNorm
    function: Callable[[Tensor], Tensor]
    step: Callable[[Tensor, Norm], Tensor | None]


class Layer(nn.Module):
    """Apply the mixers' branch, then the MLP's branch, as in the docstring of `LayerSpec`.

    Args:
        spec: the norms' epsilon and position, and the residual scale.
        mixers: one, several parallel mixers, which read the same input, or none.
        mlp: None for a layer without an MLP, as in Mamba.
    """

    def __init__(self, spec: LayerSpec, width: int, mixers: Sequence[Mixer], mlp: Mlp | None) -> None:
        super().__init__()
        eps = 1e-6 if spec.norm_eps is None else spec.norm_eps
        kind, offset = spec.norm or "rms", spec.norm_offset or 0.0
        self.norm_position = spec.norm_position or "pre"
        self.residual_scale = 1.0 if spec.residual_scale is None else spec.residual_scale
        self.branch_scale = 1.0 if spec.branch_scale is None else spec.branch_scale
        self.mixer_scales = spec.mixer_scales or (1.0,) * len(mixers)
        self.norm = layer_norm_of(kind, width, eps, offset) if mixers else None
        self.mixers = cast("Sequence[Mixer]", nn.ModuleList(mixers))
        self.mlp_norm = None if mlp is None else layer_norm_of(kind, width, eps, offset)
        self.mlp = mlp
        self.checkpointing: Checkpointing = "none"

    def forward(self, x_BTD: Tensor, state: LayerState | None = None, context: Context | None = None) -> LayerOutput:
        """Run the layer. `state` has one entry per mixer; the returned state is None if `state` is None."""
        if state is not None:
            return self._run(x_BTD, state, context)
        output: LayerOutput = run_layer(self._run, self.checkpointing, x_BTD, None, context)
        return output

    def _run(self, x_BTD: Tensor, state: LayerState | None, context: Context | None) -> LayerOutput:
        context, mlp = context or Context(), self.mlp
        states: list[State] = []
        sides: list[Side | None] = []

        def mix(x_BTD: Tensor) -> Tensor:
            outputs, inner = [], context
            for i, mixer in enumerate(self.mixers):
                # after a reentrant checkpoint the output is a plain tuple
                y_BTD, mixer_state, side = MixerOutput(*mixer(x_BTD, None if state is None else state[i], inner))
                outputs.append(scaled(y_BTD, self.mixer_scales[i]))
                states.append(mixer_state)
                sides.append(side)
                inner = inner.after(side)
            return sum(outputs[1:], start=outputs[0])

        def mix_step(x_B1D: Tensor, norm: Norm) -> Tensor | None:
            if state is None or context.parallel is not None or len(self.mixers) > 1 or not is_plain(self.mixers[0]):
                return None
            if torch.compiler.is_compiling():
                record_einops_calls()
            output = self.mixers[0].residual_step(x_B1D, norm, state[0], context)
            if output is None:
                return None
            states.append(output.state)
            sides.append(output.side)
            return output.y

        def apply_mlp(x_BTD: Tensor) -> Tensor:
            assert mlp is not None
            y_BTD, side = mlp(x_BTD, context)
            sides.append(side)
            return y_BTD

        def apply_mlp_step(x_B1D: Tensor, norm: Norm) -> Tensor | None:
            if mlp is None or not is_plain(mlp) or context.losses:
                return None
            return mlp.residual_step(x_B1D, norm)

        branches: list[Branch] = []
        if self.norm is not None:
            branches.append(Branch(self.norm, mix, mix_step))
        if mlp is not None and self.mlp_norm is not None:
            branches.append(Branch(self.mlp_norm, apply_mlp, apply_mlp_step))
        x_BTD = self._add_branches(x_BTD, branches, context.verify)
        return LayerOutput(x_BTD, None if state is None else tuple(states), join_sides(sides))

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """Return the initial state, one entry per mixer."""
        return tuple(mixer.init_state(batch, capacity) for mixer in self.mixers)

    def init_paged_state(self, capacity: int, pages: PageTable) -> LayerState:
        """Return the initial state with paged caches; see `Mixer.init_paged_state`."""
        return tuple(mixer.init_paged_state(capacity, pages) for mixer in self.mixers)

    def commit_(self, draft: LayerState, state: LayerState, accepted: Tensor) -> None:
        """Advance the state by the accepted drafted tokens; see `Mixer.commit_`."""
        for mixer, mixer_draft, mixer_state in zip(self.mixers, draft, state, strict=True):
            mixer.commit_(mixer_draft, mixer_state, accepted)

    def extra_repr(self) -> str:
        return "" if self.norm_position == "pre" else f"norm_position={self.norm_position!r}"

    def _add_branches(self, x_BTD: Tensor, branches: Sequence["Branch"], verify: bool) -> Tensor:
        """Add the branches to x. Args: verify: whether the tokens are drafted, which the kernels of a step take."""
        scale = self.branch_scale
        y_BTD: Tensor | None = None  # output of the branch before, which the norm of the next one adds to x
        is_token = x_BTD.dim() == 3 and (verify or is_known(x_BTD.shape[1] == 1))
        is_token = is_token and self.norm_position == "pre" and scale == 1
        has_steps = is_token and runs_by_kernel("products of few rows", refusals(x_BTD))
        for norm, branch, step in branches:
            if has_steps and (before := norm_before_product(norm)) is not None:
                x_BTD, y_BTD = x_BTD if y_BTD is None else x_BTD + y_BTD, None
                if (x_after := step(x_BTD, before)) is not None:
                    x_BTD = x_after
                    continue
            if self.norm_position == "pre":
                x_BTD, normed_BTD = add_and_normalize(norm, x_BTD, y_BTD)
                y_BTD = scaled(branch(normed_BTD), scale)
            elif self.norm_position == "output":
                x_BTD = x_BTD + scaled(norm(branch(x_BTD)), scale)
            else:
                normed_BTD = norm(x_BTD)
                x_BTD = self.residual_scale * normed_BTD + scaled(branch(normed_BTD), scale)
        return x_BTD if y_BTD is None else x_BTD + y_BTD


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor."""
    return x if factor == 1 else x * factor
