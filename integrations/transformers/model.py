"""register: a stack of ours as AutoModelForCausalLM of transformers, with `model_type: deltazoo`.

config.json holds the stack under "stack", and the weights have the names of our model below "model.".

B batch, T time, L vocabulary
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from deltazoo.backends.io.errors import StateError, UnsupportedError
from deltazoo.backends.ops.cross_entropy import IGNORE_INDEX
from deltazoo.backends.update.base import state_dtype
from deltazoo.blocks.model.interface import StackState
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.spec.trust import refuse_untrusted
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.state import batch, reorder

_MIN_CAPACITY = 1024
# The name of the argument and of the output since transformers 5.24, and before
_CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


class DeltazooConfig(PreTrainedConfig):
    """The config of a stack. Args: stack: a `StackSpec`, or the plain data of one, as config.json holds it.

    Raises: ConfigError: the data names a class of another package as "module:Class"; build the stack from it in Python.
    """

    model_type = "deltazoo"

    def __init__(self, stack: StackSpec | Mapping[str, Any] | None = None, **fields: Any) -> None:
        if isinstance(stack, StackSpec):
            stack = stack.model_dump(mode="json")
        self.stack: dict[str, Any] = dict(stack or {})
        if self.stack:
            spec = self.spec()
            self.vocab_size, self.hidden_size, self.num_hidden_layers = spec.vocab, spec.width, spec.depth
            fields["tie_word_embeddings"] = False  # a tied model of ours has no second name for the embedding
        self.use_cache = fields.pop("use_cache", True)
        super().__init__(**fields)

    def spec(self) -> StackSpec:
        """Return the stack."""
        refuse_untrusted(self.stack, "config.stack")
        return StackSpec(**self.stack)


class StackCache(Cache):
    """The state of a stack in the place of a cache of transformers.

    Args: capacity: maximum number of tokens per row, which layers with attention allocate at the first call.
    """

    is_compileable = False

    def __init__(self, model: LanguageModel, capacity: int) -> None:
        super().__init__(layers=[])
        self.model, self.capacity = model, capacity
        self.state: StackState | None = None
        self.tokens = 0

    def for_batch(self, batch: int) -> StackState:
        """Return the state, which begins with the first call."""
        if self.state is None:
            self.state = self.model.init_state(batch, self.capacity)
        return self.state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the state has seen, padding included."""
        return self.tokens

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.capacity

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the beams that continue."""
        if self.state is not None:
            self.state = reorder(self.state, beam_idx.to(self.model.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.reorder_cache(torch.arange(batch(self.state)).repeat_interleave(repeats))

    def reset(self) -> None:
        self.state, self.tokens = None, 0

    def crop(self, max_length: int) -> None:
        raise UnsupportedError("a recurrent state cannot be cropped: assisted decoding needs `deltazoo.blocks`' own")


class DeltazooForCausalLM(PreTrainedModel, GenerationMixin):
    """A stack with the interface of transformers; `model` is our `LanguageModel`."""

    config_class = DeltazooConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _is_stateful = True
    _supports_sdpa = _supports_flash_attn = True  # the layers choose their own attention

    def __init__(self, config: DeltazooConfig) -> None:
        super().__init__(config)
        self.model = config.spec().build()
        if self.model.embedding.weight.device.type != "meta":
            for module in self.model.modules():
                module._is_hf_initialized = True  # `build` has drawn the weights
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel) -> Self:
        """Return a model of transformers that holds a language model of ours, which a `StackSpec` has built."""
        assert isinstance(model.spec, StackSpec)
        with torch.device("meta"):
            held = cls(DeltazooConfig(stack=model.spec))
        held.model = model
        return held.train(model.training)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module whose weights a folder lacks."""
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and not isinstance(module, LanguageModel):
            reset()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """Recompute the layers in the backward; see `LanguageModel.checkpoint_layers`."""
        self.model.checkpoint_layers("full")

    def gradient_checkpointing_disable(self) -> None:
        self.model.checkpoint_layers("none")

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(layer.checkpointing != "none" for layer in self.model.stack.layers)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: StackCache | None = None,
        labels: Tensor | None = None, use_cache: bool | None = None, logits_to_keep: int | Tensor = 0, **options: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """Compute logits, and with labels the loss.

        Args:
            input_ids: [B, T]; labels: [B, T] as in transformers, shifted here, -100 is ignored.
            attention_mask: [B, T], or [B, all tokens so far]; 0 at padding, left or right of a row's tokens.
            past_key_values: a `StackCache`, updated; `cache` is another name of it. With use_cache=True and none, one
                of at least 1024 tokens begins.
            logits_to_keep: number of last tokens that get logits; 0: all.
            options: `cu_seq_lens_q` [N + 1] for packed sequences, `num_items_in_batch` of the Trainer.
        Returns: logits [B, T, L]. In training with labels there are none: the loss does not store them.
        Raises: UnsupportedError: inputs_embeds are given.
        """
        if options.get("inputs_embeds") is not None:
            raise UnsupportedError("DeltazooForCausalLM takes input_ids, not inputs_embeds")
        cache: StackCache | None = options.get("cache") if past_key_values is None else past_key_values
        context = self._context(input_ids, attention_mask, cache, options.get("cu_seq_lens_q"))
        if labels is not None and self.training and cache is None:
            return CausalLMOutputWithPast(loss=self._training_loss(input_ids, labels, context, options))
        if cache is None and use_cache:
            cache = StackCache(self.model, max(_MIN_CAPACITY, 2 * input_ids.shape[1]))
        state = None if cache is None else cache.for_batch(input_ids.shape[0])
        x_BTD, state = self.model.features(input_ids, state, context)
        if cache is not None:
            cache.state = state
            cache.tokens += input_ids.shape[1]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(x_BTD[:, kept])
        loss = None if labels is None else _cross_entropy(logits, _shifted(labels), options.get("num_items_in_batch"))
        output: dict[str, Any] = {"loss": loss, "logits": logits, _CACHE: cache}
        return CausalLMOutputWithPast(**output)

    def _training_loss(self, tokens: Tensor, labels: Tensor, context: Context, options: Mapping[str, Any]) -> Tensor:
        """The cross entropy over the number of targets of all micro-batches, and the auxiliary losses."""
        targets = _shifted(labels)
        losses = self.model.losses(tokens, targets, context)
        items = options.get("num_items_in_batch")
        if items is None:
            return losses.total
        share = (targets != IGNORE_INDEX).sum() / items
        return losses.total + losses.cross_entropy * (share - 1)

    def _context(
        self, tokens: Tensor, attention_mask: Tensor | None, cache: StackCache | None, bounds: Tensor | None
    ) -> Context:
        T = tokens.shape[1]
        if cache is not None and not isinstance(cache, StackCache):
            raise StateError(f"past_key_values must be a StackCache, got {type(cache).__name__}")
        if bounds is not None:
            return Context(cu_seqlens=bounds.to(torch.int32))
        if attention_mask is None or (cache is not None and cache.tokens and T == 1):  # a decoded token is no padding
            return Context()
        if attention_mask.dim() != 2:
            raise UnsupportedError(f"attention_mask must have shape [B, T], got {list(attention_mask.shape)}")
        mask = attention_mask[:, -T:].bool()
        if not torch.compiler.is_compiling() and bool(mask.all()):
            return Context()
        return Context(mask=mask)

    def _prepare_cache_for_generation(  # type: ignore[override]  # transformers returns None, too
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> None:  # fmt: skip
        if model_kwargs.get(_CACHE) is None and generation_config.use_cache is not False:
            model_kwargs[_CACHE] = StackCache(self.model, max_cache_length + 1)


def register() -> None:
    """Make `AutoConfig` and `AutoModelForCausalLM` of transformers read and build stacks of ours.

        register()
        model = AutoModelForCausalLM.from_config(DeltazooConfig(stack=StackSpec.load("stack.yaml")))
        model.save_pretrained("folder")
        model = AutoModelForCausalLM.from_pretrained("folder")

    A second call has no effect.
    """
    AutoConfig.register("deltazoo", DeltazooConfig, exist_ok=True)
    AutoModelForCausalLM.register(DeltazooConfig, DeltazooForCausalLM, exist_ok=True)


def _shifted(labels: Tensor) -> Tensor:
    """The target of each token: the label of the next one, and none for the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def _cross_entropy(logits: Tensor, targets: Tensor, items: Tensor | int | None) -> Tensor:
    wide = logits.to(state_dtype(logits.dtype)).flatten(0, 1)
    total = F.cross_entropy(wide, targets[:, -logits.shape[1] :].flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / ((targets != IGNORE_INDEX).sum().clamp(min=1) if items is None else items)
