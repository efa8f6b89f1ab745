"""The stack of layers, and the language model around it.

B batch, T time, D width, L vocabulary, N packed sequences
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deltazoo.backends.base import Backend
from deltazoo.backends.check import check_integer
from deltazoo.backends.dispatch import BoundUpdate, bind
from deltazoo.backends.errors import ConfigError, DeviceError, DtypeError, ShapeError, StateError, ValueRangeError
from deltazoo.blocks.head import IGNORE, cross_entropy
from deltazoo.blocks.layer import Layer, LayerSpec, LayerState
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasBackend
from deltazoo.mixers.parts.norms import RMSNorm


class ModelSpec(Protocol):
    """What a language model reads of the `StackSpec` that builds it; spec.py imports this file, not the reverse."""

    @property
    def width(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def tied(self) -> bool: ...
    def expand(self) -> Sequence[LayerSpec]: ...
    def build_layers(self, backend: str | Backend | None) -> Sequence[Layer]: ...


class StackState(NamedTuple):
    """The states of all layers; everything in `deltazoo.mixers.core.state` works on it."""

    layers: tuple[LayerState, ...]


class Stack(nn.Module):
    """Layers one after the other, then an RMS norm: x [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, layers: Sequence[Layer], norm_eps: float) -> None:
        super().__init__()
        self.layers = cast("Sequence[Layer]", nn.ModuleList(layers))
        self.norm = RMSNorm(width, norm_eps)
        self.checkpointed = False

    def forward(
        self, x_BTD: Tensor, state: StackState | None = None, context: Context | None = None
    ) -> tuple[Tensor, StackState | None]:
        """Run all layers; no state in, none out."""
        context = Context(values={}) if context is None else context._replace(values={})
        if state is None:
            for layer in self.layers:
                if self.checkpointed and torch.is_grad_enabled():
                    x_BTD, _ = checkpoint(layer, x_BTD, None, context, use_reentrant=False)
                else:
                    x_BTD, _ = layer(x_BTD, None, context)
            return self.norm(x_BTD), None
        if len(state.layers) != len(self.layers):
            raise StateError(
                f"state must have one entry for each of {len(self.layers)} layers, got {len(state.layers)}"
            )
        states = []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x_BTD, after = layer(x_BTD, layer_state, context)
            states.append(after)
        return self.norm(x_BTD), StackState(tuple(states))

    def init_state(self, batch: int, capacity: int | None = None) -> StackState:
        """The state before the first token. Raises: ValueRangeError; StateError where attention has no capacity."""
        check_integer("batch", batch, 0)
        if capacity is not None:
            check_integer("capacity", capacity)
        return StackState(tuple(layer.init_state(batch, capacity) for layer in self.layers))


class LanguageModel(nn.Module):
    """Tokens to the logits of the next token: embedding, stack, head. Built by `StackSpec.build`.

    Initialisation: embedding, head and the maps into the MLPs are drawn from N(0, 0.02^2), the maps that write to
    the residual (`out` of mixers and MLPs) from N(0, 0.02^2 / (2 depth)); all else of a mixer is its own.
    Source: GPT-2, Radford 2019, section 2.3.
    """

    def __init__(self, spec: ModelSpec, backend: str | Backend | None = None) -> None:
        super().__init__()
        self.spec = spec
        # `init_weights` draws in the order of definition, so construction has to draw in the same order.
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.stack = Stack(spec.width, spec.build_layers(backend), spec.norm_eps)
        self.head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)
        self.reset_parameters()

    def forward(
        self, tokens_BT: Tensor, state: StackState | None = None, context: Context | None = None
    ) -> tuple[Tensor, StackState | None]:
        """Compute the logits of the token after each token.

        Args:
            tokens_BT: [B, T] int64 in [0, vocab).
            state: from `init_state`, or from the call before; it is used up (see `Mixer`). None starts anew.
            context: packs, positions, padding.
        Returns: logits [B, T, L], and the state after the tokens (None where none came in).
        Raises: InputError or a subclass; StateError, where the state is another model's or full.
        """
        x_BTD, state = self.features(tokens_BT, state, context)
        return self.logits(x_BTD), state

    def features(
        self, tokens_BT: Tensor, state: StackState | None = None, context: Context | None = None
    ) -> tuple[Tensor, StackState | None]:
        """Compute what the head reads, [B, T, D]; arguments as for `forward`."""
        _check_tokens("tokens", tokens_BT, self.embedding)
        return self.stack(self.embedding(tokens_BT), state, context)

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Apply the head to features [..., D]: logits [..., L]."""
        return F.linear(x_BTD, self.head_weight)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, context: Context | None = None) -> Tensor:
        """Average the cross entropy of the targets, without ever holding the logits of all tokens.

        Args: targets_BT: [B, T] int64, the token that follows each token; -100 is left out.
        Returns: a float32 scalar, in nats a token; 0 where every target is left out.
        """
        _check_tokens("targets", targets_BT, self.embedding)
        if targets_BT.shape != tokens_BT.shape:
            want, got = list(tokens_BT.shape), list(targets_BT.shape)
            raise ShapeError(f"targets must have the shape of tokens, {want}, got {got}")
        x_BTD, _ = self.features(tokens_BT, None, context)
        return cross_entropy(x_BTD.flatten(0, 1), self.head_weight, targets_BT.flatten())

    def init_state(self, batch: int, capacity: int | None = None) -> StackState:
        """The state before the first token, on the model's device.

        Args: batch: rows, or the sequences of a pack; capacity: the most tokens a sequence may reach, which
            attention needs and recurrent mixers ignore.
        """
        return self.stack.init_state(batch, capacity)

    @property
    def head_weight(self) -> Tensor:
        """The head's weights [L, D]: the embedding's where tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def rebind(self, backend: str | Backend | None) -> Self:
        """Let another backend compute every mixer's update; arguments and errors as for `deltazoo.bind`."""
        for module in self.modules():
            if isinstance(module, HasBackend):
                module.rebind(backend, self.embedding.weight)
                continue
            for name, value in vars(module).items():
                if isinstance(value, BoundUpdate):
                    setattr(module, name, bind(value.spec, backend))
        return self

    def checkpoint_layers(self, on: bool = True) -> Self:
        """Keep only each layer's input for the backward, and compute the layer again there: less memory, more time."""
        self.stack.checkpointed = on
        return self

    def init_weights(self) -> Self:
        """Initialise every parameter and buffer in place, from torch's default generator.

        A model that was built on the meta device and moved by `to_empty` gets, with the same seed, bitwise the weights
        of a model built on that device.

        Raises: ConfigError: a module has parameters or buffers and no `reset_parameters`.
        """
        with torch.no_grad():
            _reset_children_first(self, "model", set())
        return self

    def reset_parameters(self) -> None:
        """Draw the weights whose scale this class sets; all others keep the initialisation of their module."""
        residual = 0.02 / (2 * len(self.stack.layers)) ** 0.5
        nn.init.normal_(self.embedding.weight, std=0.02)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)
        for layer in self.stack.layers:
            if layer.mlp is not None:
                nn.init.normal_(layer.mlp.to_hidden.weight, std=0.02)
            for part in (*layer.mixers, layer.mlp):
                out = getattr(part, "out", None)
                if isinstance(out, nn.Linear):
                    nn.init.normal_(out.weight, std=residual)


def _reset_children_first(module: nn.Module, path: str, done: set[nn.Module]) -> None:
    """Call `reset_parameters` of every module once, children before their parent, in the order of definition."""
    if module in done:
        return
    done.add(module)
    for name, child in module.named_children():
        _reset_children_first(child, f"{path}.{name}", done)
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
    elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise ConfigError(
            f"{path}: init_weights needs a method reset_parameters() that initialises the parameters and buffers of "
            f"{type(module).__name__}"
        )


def _check_tokens(name: str, tokens: Tensor, embedding: nn.Embedding) -> None:
    if tokens.dim() != 2:
        raise ShapeError(f"{name} must have shape [B, T], got {list(tokens.shape)}")
    if tokens.dtype != torch.int64:
        raise DtypeError(f"{name} must be int64, got {tokens.dtype}")
    if tokens.device != embedding.weight.device:
        raise DeviceError(f"{name} must be on {embedding.weight.device}, where the model is, got {tokens.device}")
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = (tokens < 0) | (tokens >= embedding.num_embeddings)
        if name == "targets":
            wrong &= tokens != IGNORE
        if bool(wrong.any()):
            bounds = f"[0, {embedding.num_embeddings})" + (f" or {IGNORE}" if name == "targets" else "")
            raise ValueRangeError(f"{name} must be in {bounds}, got {int(tokens[wrong][0])}")
