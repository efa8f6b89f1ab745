"""One residual layer, as a config and as a module: token mixers, then an MLP, each after an RMS norm.

B batch, T time, D width
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

from pydantic import Field, field_serializer
from torch import Tensor, nn

from deltazoo.backends.base import Backend
from deltazoo.backends.errors import ConfigError
from deltazoo.blocks.mlp import Mlp, SwiGLU
from deltazoo.blocks.parsing import MlpConfig, PlainDataModel, parse_mixer, parse_mlp
from deltazoo.mixers.core import config as configs
from deltazoo.mixers.core.losses import AuxiliaryLoss
from deltazoo.mixers.core.mixer import Context, Mixer, MixerConfig, Place, State
from deltazoo.mixers.core.patterns import Term
from deltazoo.mixers.parts.norms import RMSNorm

LayerState = tuple[State, ...]


class LayerSpec(PlainDataModel, Term):
    """The config of one layer: x + mixer(norm(x)), then x + mlp(norm(x)).

    `mlp`, `norm_eps` and `backend` default to those of the stack.

    Args:
        mixer: a mixer config, or several for parallel mixers, whose outputs are summed.
        mlp: a `SwiGLU`, a `MoE`, or "none" for a layer without an MLP.
        norm_eps: epsilon of the RMS norms, added to the mean square under the root.
        backend: name of the backend that computes the mixers' updates.
    Raises: ConfigError.
    """

    mixer: MixerConfig | tuple[MixerConfig, ...]
    mlp: MlpConfig | Literal["none"] | None = None
    norm_eps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    backend: str | None = None

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """The mixer configs as a tuple, also for a single mixer."""
        return self.mixer if isinstance(self.mixer, tuple) else (self.mixer,)

    def build(self, width: int, place: Place, backend: str | Backend | None = None) -> "Layer":
        """Build the module. Fields that are None have the defaults of `StackSpec`.

        Args: backend: overrides the backend of the layer.
        Raises: ConfigError: a mixer does not fit the width.
        """
        mixer_backend = self.backend if backend is None else backend
        mlp = SwiGLU() if self.mlp is None else self.mlp
        return Layer(
            width,
            [config.build(width, place, mixer_backend) for config in self.mixers],
            None if mlp == "none" else mlp.build(width),
            1e-6 if self.norm_eps is None else self.norm_eps,
        )

    @field_serializer("mixer")
    def _dump_mixer(self, mixer: Any) -> Any:
        return [configs.dump(config) for config in mixer] if isinstance(mixer, tuple) else configs.dump(mixer)

    @staticmethod
    def _parse_fields(data: dict[str, Any]) -> dict[str, Any]:
        mixers = data.get("mixer")
        if isinstance(mixers, list | tuple):
            if not mixers:
                raise ConfigError("mixer: a layer needs at least one mixer, got an empty list")
            data["mixer"] = tuple(parse_mixer(("mixer", str(i)), mixer) for i, mixer in enumerate(mixers))
        elif mixers is not None:
            data["mixer"] = parse_mixer(("mixer",), mixers)
        if data.get("mlp") is not None:
            data["mlp"] = parse_mlp(("mlp",), data["mlp"])
        return data

    def _check(self) -> None:
        """Check nothing: the fields of a layer are independent."""


class LayerOutput(NamedTuple):
    """The result of a layer: x [B, T, D], the new state or None, and the auxiliary losses of its modules."""

    x: Tensor
    state: LayerState | None
    losses: list[AuxiliaryLoss]


class Layer(nn.Module):
    """x + sum_i mixer_i(norm(x)), then x + mlp(norm(x)).

    Args:
        mixers: one, or several parallel mixers, which read the same normalised input.
        mlp: None for a layer without an MLP, as in Mamba.
        norm_eps: epsilon of the RMS norms, added to the mean square under the root.
    """

    def __init__(self, width: int, mixers: Sequence[Mixer], mlp: Mlp | None, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width, norm_eps)
        self.mixers = cast("Sequence[Mixer]", nn.ModuleList(mixers))
        self.mlp_norm = None if mlp is None else RMSNorm(width, norm_eps)
        self.mlp = mlp

    def forward(self, x_BTD: Tensor, state: LayerState | None = None, context: Context | None = None) -> LayerOutput:
        """Run the layer. `state` has one entry per mixer; the returned state is None if `state` is None.

        The auxiliary losses are returned, and only if `context.losses` is a list: FSDP2 copies the lists among the
        arguments, and activation checkpointing runs the layer twice, so that appending to `context.losses` would lose
        the losses or count them twice.
        """
        losses: list[AuxiliaryLoss] = []
        context = context or Context()
        if context.losses is not None:
            context = context._replace(losses=losses)
        normed_BTD = self.norm(x_BTD)
        states = []
        for i, mixer in enumerate(self.mixers):
            y_BTD, mixer_state = mixer(normed_BTD, None if state is None else state[i], context)
            x_BTD = x_BTD + y_BTD
            states.append(mixer_state)
        if self.mlp is not None and self.mlp_norm is not None:
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD), context)
        return LayerOutput(x_BTD, None if state is None else tuple(states), losses)

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """Return the initial state, one entry per mixer."""
        return tuple(mixer.init_state(batch, capacity) for mixer in self.mixers)
