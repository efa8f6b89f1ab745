"""The stack of residual layers and the language model around it.

B batch, T time, D width, L vocabulary, N packed sequences
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.backends.io.errors import (
    DeviceError,
    DtypeError,
    ShapeError,
    StateError,
    ValueRangeError,
)
from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX, cap_logits, linear_cross_entropy
from deltazoo.backends.ops.gemv import products, refusals
from deltazoo.backends.torch_ext.plain_module import holds_plain_weights, is_plain_linear
from deltazoo.backends.update.base import Backend, state_dtype
from deltazoo.backends.update.check import check_integer
from deltazoo.backends.update.dispatch import BoundUpdate, bind
from deltazoo.blocks.checkpoints.export import Origin, save_pretrained
from deltazoo.blocks.checkpoints.tensor_files import MAX_SHARD_BYTES
from deltazoo.blocks.data.tokenizer import Tokenizer
from deltazoo.blocks.generation.generate import Prompt, generate_tokens
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.model.checkpointing import Checkpointing
from deltazoo.blocks.model.interface import ModelSpec, StackState
from deltazoo.blocks.model.layer import Layer, LayerState
from deltazoo.blocks.model.losses import Losses, at_places, combine_losses, mean_over_ranks
from deltazoo.blocks.model.mlp import Mlp
from deltazoo.mixers.core.activations import activation_like, compute_device
from deltazoo.mixers.core.decode_maps import apply_map
from deltazoo.mixers.core.grouped_linear import GroupedLinear
from deltazoo.mixers.core.initialization import fill_normal, init_weights
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.part import HasBackend
from deltazoo.mixers.core.sequences import as_context
from deltazoo.mixers.core.side import Side, join_sides
from deltazoo.mixers.parts.norms import LayerInputNorm, layer_norm_of

if TYPE_CHECKING:
    from deltazoo.blocks.training.config import RunSettings


class StackOutput(NamedTuple):
    """The result of a stack: x [B, T, D], the new state or None, and the side outputs of all layers."""

    x: Tensor
    state: StackState | None
    side: Side | None


class Stack(nn.Module):
    """Apply the layers in order, then a norm: x [B, T, D] to [B, T, D]."""

    def __init__(self, layers: Sequence[Layer], norm: LayerInputNorm) -> None:
        super().__init__()
        self.layers = cast("Sequence[Layer]", nn.ModuleList(layers))
        self.norm = norm

    def forward(self, x_BTD: Tensor, state: StackState | None = None, context: Context | None = None) -> StackOutput:
        """Run all layers. The returned state is None if `state` is None."""
        context = as_context(context)._replace(values={})
        if state is not None:
            self._check_state(state)
        states: list[LayerState] = []
        sides: list[Side | None] = []
        for i, layer in enumerate(self.layers):
            x_BTD, layer_state, side = layer(x_BTD, None if state is None else state.layers[i], context)
            context = context.after(side)
            if layer_state is not None:
                states.append(layer_state)
            sides.append(side)
        return StackOutput(self.norm(x_BTD), None if state is None else StackState(tuple(states)), join_sides(sides))

    def _check_state(self, state: object) -> None:
        if not isinstance(state, StackState):
            raise StateError(f"state must be a StackState, which init_state returns, got {type(state).__name__}")
        if len(state.layers) != len(self.layers):
            raise StateError(
                f"state must have one entry for each of {len(self.layers)} layers, got {len(state.layers)}"
            )

    def init_state(self, batch: int, capacity: int | None = None) -> StackState:
        """Return the initial state. Raises: ValueRangeError; StateError: attention needs a capacity."""
        check_integer("batch", batch, 0)
        if capacity is not None:
            check_integer("capacity", capacity)
        return StackState(tuple(layer.init_state(batch, capacity) for layer in self.layers))


class LanguageModel(nn.Module):
    """Compute next-token logits: embedding, stack, head. `StackSpec.build` builds it.

    Initialisation: the embedding, the head and the MLPs' input projections are drawn from N(0, 0.02^2). The
    projections that write to the residual stream (`out` of mixers and MLPs) are drawn from N(0, 0.02^2 / (2 depth)),
    except those of mixers with a published scale (`Parts.output_std`: RG-LRU, LRU, S5). The biases of the MLPs are 0.
    Each mixer initialises its other weights.
    Source: GPT-2, Radford 2019, section 2.3.
    """

    def __init__(self, spec: ModelSpec, backend: str | Backend | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.run_settings: RunSettings | None = None  # set by `load`: those of the training run
        self.origin: Origin | None = None  # set by `from_pretrained`
        self.tokenizer: Tokenizer | None = None  # set by `from_pretrained`
        self.embedding_scale, self.logit_scale, self.logit_cap = spec.embedding_scale, spec.logit_scale, spec.logit_cap
        norm = (spec.norm, spec.width, spec.norm_eps, spec.norm_offset)
        # init_weights draws in the order of registration, so the constructor must draw in the same order.
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.embedding_norm = layer_norm_of(*norm) if spec.embedding_norm else None
        self.stack = Stack(spec.build_layers(backend), layer_norm_of(*norm))
        self.head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)
        self.reset_parameters()

    def forward(
        self, tokens_BT: Tensor, state: StackState | None = None, context: Context | None = None
    ) -> tuple[Tensor, StackState | None]:
        """Compute the logits of the token that follows each token.

        Args:
            tokens_BT: [B, T] int64 in [0, vocab).
            state: from `init_state` or the previous call; it may be overwritten in place (see `Mixer`). None starts
                at the beginning of the sequences and returns no state.
            context: packed sequences, positions, padding mask.
        Returns: logits [B, T, L], and the state after the tokens, or None.
        Raises: InputError or a subclass; StateError: the state belongs to another model or is full.
        """
        x_BTD, state = self.features(tokens_BT, state, context)
        return self.logits(x_BTD), state

    def features(
        self, tokens_BT: Tensor, state: StackState | None = None, context: Context | None = None
    ) -> tuple[Tensor, StackState | None]:
        """Compute the input of the head, [B, T, D]; arguments as for `forward`."""
        x_BTD, state, _ = self._run_stack(tokens_BT, state, context)
        return x_BTD, state

    def _run_stack(self, tokens_BT: Tensor, state: StackState | None, context: Context | None) -> StackOutput:
        self._check_tokens("tokens", tokens_BT)
        x_BTD = self.embedding(tokens_BT)
        if self.embedding_scale != 1:
            x_BTD = x_BTD * self.embedding_scale
        if self.embedding_norm is not None:
            x_BTD = self.embedding_norm(x_BTD)
        return StackOutput(*self.stack(x_BTD, state, context))

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Apply the head to features [..., D]; the result is [..., L]."""
        return cap_logits(self._head(self._scaled(x_BTD)), self.logit_cap)

    def _head(self, x_BTD: Tensor) -> Tensor:
        if self.head is not None:
            return apply_map(x_BTD, self.head)
        weight_LD = self._tied_weight(x_BTD)
        if self._has_plain_embedding and not refusals(x_BTD) and weight_LD.dtype == x_BTD.dtype:
            return products(x_BTD, [weight_LD])[0]
        return F.linear(x_BTD, weight_LD)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, context: Context | None = None) -> Tensor:
        """Compute the loss to minimise: the total of `losses`. Returns: a float32 scalar."""
        return self.losses(tokens_BT, targets_BT, context).total

    def losses(
        self, tokens_BT: Tensor, targets_BT: Tensor, context: Context | None = None, z_loss: float = 0.0,
        places_BA: Tensor | None = None,
    ) -> Losses:  # fmt: skip
        """Compute the mean cross entropy of the targets, the auxiliary losses by name, and their weighted sum.

        The logits of all tokens are not stored, unless an untied head is not plain (`is_plain_linear`), as with LoRA or
        quantised weights: then they are, in the dtype of the head and twice in float32. Every loss is a mean over this
        batch; with gradient accumulation, a load-balance loss is therefore one of each micro-batch.

        Args:
            targets_BT: [B, T] int64, the token that follows each token; -100 is ignored.
            z_loss: coefficient of the mean of lse^2, which the cross entropy then contains; lse is the logarithm of the
                sum of the exponentials of a token's logits.
            places_BA: [B, A] int64, indices of the tokens that the head reads; targets_BT is then [B, A]. None: all.
        Returns: float32 scalars; the cross entropy is in nats per token, and 0 if every target is ignored.
        Source: z loss: PaLM, arXiv 2204.02311, section 5.
        """
        self._check_targets(tokens_BT if places_BA is None else places_BA, targets_BT)
        x_BTD, _, side = self._run_stack(tokens_BT, None, as_context(context)._replace(losses=True))
        x_BTD = x_BTD if places_BA is None else at_places(x_BTD, places_BA)
        side = join_sides([side])
        entropy = self._cross_entropy(x_BTD.flatten(0, 1), targets_BT.flatten(), z_loss=z_loss)
        recorded = () if side is None else side.losses
        plan = None if context is None else context.parallel
        if plan is not None:
            entropy = mean_over_ranks(entropy, (targets_BT != IGNORE_INDEX).sum(), plan)
            count = torch.ones_like(targets_BT).sum()
            recorded = tuple(
                loss._replace(statistics=mean_over_ranks(loss.statistics, count, plan)) for loss in recorded
            )
        return combine_losses(entropy, recorded)

    @torch.no_grad()
    def token_losses(self, tokens_BT: Tensor, targets_BT: Tensor, context: Context | None = None) -> Tensor:
        """Compute the cross entropy of each target without gradients; arguments as for `losses`.

        Returns: [B, T] float32, in nats; 0 if the target is ignored.
        """
        self._check_targets(tokens_BT, targets_BT)
        x_BTD, _ = self.features(tokens_BT, None, context)
        losses_N = self._cross_entropy(x_BTD.flatten(0, 1), targets_BT.flatten(), "none")
        return losses_N.view(targets_BT.shape)

    def _scaled(self, x: Tensor) -> Tensor:
        """Return features times the factor of the logits, which needs no memory for logits."""
        return x if self.logit_scale == 1 else x * self.logit_scale

    def _cross_entropy(
        self, x_ND: Tensor, targets_N: Tensor, reduction: Literal["mean", "none"] = "mean", z_loss: float = 0.0
    ) -> Tensor:
        is_plain = self.head is None or (is_plain_linear(self.head) and self.head.bias is None)
        if is_plain:
            weight_LD = self._tied_weight(x_ND) if self.head is None else self.head.weight
            return linear_cross_entropy(
                self._scaled(x_ND), weight_LD, targets_N, reduction, z_loss=z_loss or None, cap=self.logit_cap
            )
        logits_NL = self.logits(x_ND)
        wide_NL = logits_NL.to(state_dtype(logits_NL.dtype))
        losses_N = F.cross_entropy(wide_NL, targets_N, ignore_index=IGNORE_INDEX, reduction="none")
        if z_loss:
            losses_N = losses_N + z_loss * wide_NL.logsumexp(-1).square() * (targets_N != IGNORE_INDEX)
        if reduction == "none":
            return losses_N
        return losses_N.sum() / (targets_N != IGNORE_INDEX).sum().clamp(min=1)

    def init_state(self, batch: int, capacity: int | None = None) -> StackState:
        """Return the initial state on the model's device.

        Args:
            batch: number of rows, or of sequences in a pack.
            capacity: maximum number of tokens in a sequence. Attention needs it; recurrent mixers ignore it.
        """
        return self.stack.init_state(batch, capacity)

    def verify(self, tokens_BT: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        """Read drafted tokens in one pass, for speculative decoding. Then call `commit_`, before any other call.

        Args:
            tokens_BT: [B, T] int64: the last sampled token of each row, and T - 1 drafted ones.
            state: from `init_state` or an earlier call. A capacity must have slots for rejected tokens, too.
        Returns: logits [B, T, L], those of T calls with one token each; the draft for `commit_`.
        Raises: as `forward`; OperandError: gradients are enabled.
        """
        logits_BTL, draft = self(tokens_BT, state, Context(verify=True))
        return logits_BTL, draft

    def commit_(self, draft: StackState, state: StackState, accepted: Tensor) -> None:
        """Advance the state in place by the first `accepted` tokens of each row, as if only they had been read.

        Args:
            draft, state: what `verify` returned and received.
            accepted: [B] int32 on the device of the model, from 0 to T; rejected tokens have no effect.
        """
        for layer, layer_draft, layer_state in zip(self.stack.layers, draft.layers, state.layers, strict=True):
            layer.commit_(layer_draft, layer_state, accepted)

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        generator: torch.Generator | None = None,
        speculate: int = 0,
    ) -> Tensor:
        """Continue prompts of tokens; see `deltazoo.blocks.generate_tokens`. Returns: the new tokens, [B, n] int64."""
        return generate_tokens(self, prompt, sampling, generator, speculate)

    def save_pretrained(
        self,
        folder: str | Path,
        format: str = "transformers",
        model_type: str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Write config.json and the weights in safetensors, in shards with an index if they are large.

        Names, shapes and dtypes are those of the published folders of the family: a model that `from_pretrained` read
        is written back byte for byte.

        Args:
            folder: new or empty.
            format: "transformers".
            model_type: the family; None: that of the folder the model was read from, or the first that expresses the
                stack.
            max_shard_bytes: size of a file, unless a single tensor is larger.
        Raises: ConfigError: no family expresses the stack, with the reason of each; the folder is not empty.
        """
        save_pretrained(self, folder, format, model_type, max_shard_bytes)

    @property
    def device(self) -> torch.device:
        """The device for tokens: where the embedding computes."""
        return activation_like(self.embedding).device

    def _tied_weight(self, x: Tensor) -> Tensor:
        """Return the weights of a tied head [L, D]: those of the embedding, without the effect of its hooks.

        If the embedding holds no plain weights (LoRA, quantised, offloaded, sharded), they are its vectors of all
        tokens, which take the memory of the weights once more. Args: x: a tensor on the device of the head.
        """
        if self._has_plain_embedding:
            return self.embedding.weight
        return self.embedding(torch.arange(self._vocabulary, device=x.device))

    @property
    def _has_plain_embedding(self) -> bool:
        return type(self.embedding) is nn.Embedding and holds_plain_weights(self.embedding)

    @property
    def _vocabulary(self) -> int:
        """The number of tokens of the embedding, also if a wrapper of the embedding does not have the attribute."""
        return int(getattr(self.embedding, "num_embeddings", self.spec.vocab))

    def rebind(self, backend: str | Backend | None) -> Self:
        """Change the backend of every mixer's update; arguments and errors as for `deltazoo.bind`."""
        for module in self.modules():
            if isinstance(module, HasBackend):
                module.rebind(backend, activation_like(self.embedding, self))
                continue
            for name, value in vars(module).items():
                if isinstance(value, BoundUpdate):
                    setattr(module, name, bind(value.spec, backend))
        return self

    def checkpoint_layers(self, mode: Checkpointing | bool = "full") -> Self:
        """Choose what the backward recomputes instead of reading it from memory.

        "full" or True: each layer, of which only the input is saved. "selective": all but matrix products, attention
        and this package's operators for updates, whose results are saved. "none" or False: nothing.

        Raises: ValueRangeError: another mode.
        """
        if isinstance(mode, bool):
            mode = "full" if mode else "none"
        if mode not in (modes := get_args(Checkpointing)):
            raise ValueRangeError(f"mode must be one of {', '.join(map(repr, modes))}, True or False, got {mode!r}")
        for layer in self.stack.layers:
            layer.checkpointing = mode
        return self

    def init_weights(self) -> Self:
        """Initialise every parameter and buffer in place, from torch's default generator.

        After `torch.device("meta")` and `to_empty`, the same seed gives bitwise the weights of a model that was built
        on the device.

        Raises: TypeError: a module has parameters or buffers but no `reset_parameters`.
        """
        init_weights(self)
        return self

    def reset_parameters(self) -> None:
        """Draw the weights whose scale this class sets. The others keep the initialisation of their module."""
        residual_std = 0.02 / (2 * len(self.stack.layers)) ** 0.5
        fill_normal(self.embedding.weight, std=0.02)
        if self.head is not None:
            fill_normal(self.head.weight, std=0.02)
        for layer in dict.fromkeys(self.stack.layers):  # a shared layer is repeated in the stack
            mlps = [] if layer.mlp is None else [m for m in layer.mlp.modules() if isinstance(m, Mlp)]
            for mlp in mlps:
                to_hidden = getattr(mlp, "to_hidden", None)
                if isinstance(to_hidden, nn.Linear | GroupedLinear):
                    fill_normal(to_hidden.weight, std=0.02)
            for module in (*layer.mixers, *mlps):
                out = getattr(module, "out", None)
                has_own_scale = getattr(module, "output_std", None) is not None
                if isinstance(out, nn.Linear | GroupedLinear) and not has_own_scale:
                    fill_normal(out.weight, std=residual_std)

    def _check_targets(self, tokens: Tensor, targets: Tensor) -> None:
        self._check_tokens("targets", targets)
        if targets.shape != tokens.shape:
            raise ShapeError(f"targets must have the shape of tokens, {list(tokens.shape)}, got {list(targets.shape)}")

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if tokens.dim() != 2:
            raise ShapeError(f"{name} must have shape [B, T], got {list(tokens.shape)}")
        if tokens.dtype != torch.int64:
            raise DtypeError(f"{name} must be int64, got {tokens.dtype}")
        weight = getattr(self.embedding, "weight", None)
        is_offloaded = isinstance(weight, Tensor) and weight.is_meta and not self._has_plain_embedding
        if isinstance(weight, Tensor) and not is_offloaded and tokens.device != (device := compute_device(weight)):
            raise DeviceError(f"{name} must be on {device}, where the model is, got {tokens.device}")
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            invalid = (tokens < 0) | (tokens >= self._vocabulary)
            if name == "targets":
                invalid &= tokens != IGNORE_INDEX
            if bool(invalid.any()):
                bounds = f"[0, {self._vocabulary})" + (f" or {IGNORE_INDEX}" if name == "targets" else "")
                raise ValueRangeError(f"{name} must be in {bounds}, got {int(tokens[invalid][0])}")
