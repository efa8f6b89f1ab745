"""One residual layer: mix along time, then along the width, each after a norm.

B batch, T time, D width
"""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from deltazoo.blocks.mlp import Mlp
from deltazoo.mixers.core.mixer import Context, Mixer, State
from deltazoo.mixers.parts.norms import RMSNorm

LayerState = tuple[State, ...]


class Layer(nn.Module):
    """x + sum_i mixer_i(norm(x)), then x + mlp(norm(x)).

    Args:
        mixers: one, or several side by side, which read the same normalised input and whose outputs are summed.
        mlp: the second half, or None for a layer without one (Mamba).
        norm_eps: added to the mean square inside the root of the RMS norms.
    """

    def __init__(self, width: int, mixers: Sequence[Mixer], mlp: Mlp | None, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width, norm_eps)
        self.mixers = cast("Sequence[Mixer]", nn.ModuleList(mixers))
        self.mlp_norm = None if mlp is None else RMSNorm(width, norm_eps)
        self.mlp = mlp

    def forward(
        self, x_BTD: Tensor, state: LayerState | None = None, context: Context | None = None
    ) -> tuple[Tensor, LayerState | None]:
        """Run the layer. `state` has one entry a mixer; none in, none out."""
        normed_BTD = self.norm(x_BTD)
        states = []
        for i, mixer in enumerate(self.mixers):
            y_BTD, mixer_state = mixer(normed_BTD, None if state is None else state[i], context)
            x_BTD = x_BTD + y_BTD
            states.append(mixer_state)
        if self.mlp is not None and self.mlp_norm is not None:
            x_BTD = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return x_BTD, None if state is None else tuple(states)

    def init_state(self, batch: int, capacity: int | None = None) -> LayerState:
        """The state before the first token, one entry a mixer."""
        return tuple(mixer.init_state(batch, capacity) for mixer in self.mixers)
