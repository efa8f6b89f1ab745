"""The calls of a model that a benchmark times: a training step, a prefill and decoding steps.

B batch, T time
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.backends.torch_ext.cuda_graph import Call
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.sampler import Rows
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.model.checkpointing import Checkpointing
from deltazoo.blocks.model.compilation import check_updates, compile_layers
from deltazoo.blocks.spec.stack_spec import StackSpec

DECODED = 16  # tokens per row and timed call
_UNTIMED_CALLS = 6  # upper bound on the decoding calls that are not timed: first call, memory peak, warm-ups


class ModelCalls(ABC):
    """A language model on a device, as calls without arguments that can be timed.

    Args: tokens: [B, T] int64, the text to train on, to prefill, and to continue.
    """

    def __init__(self, module: nn.Module, tokens: Tensor) -> None:
        self.module, self.tokens, self.parameters = module, tokens, parameter_count(module)

    def training_step(self) -> Call:
        """Return a call that runs a forward pass, a backward pass and a step of fused AdamW."""
        self.module.train()
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            self.loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    @abstractmethod
    def loss(self) -> Tensor:
        """Return the mean cross entropy of the next tokens."""

    @abstractmethod
    def prefill(self) -> Call:
        """Return a call that computes the state after the tokens, and the logits of the next."""

    @abstractmethod
    def decoding(self, rounds: int) -> Call:
        """Return a call that decodes the next `DECODED` tokens greedily.

        Args: rounds: upper limit of timed calls, for the capacity of caches.
        """


class OurCalls(ModelCalls):
    """A model of deltazoo.

    Its layers are compiled one by one; the decoding step is one graph, and a CUDA graph on CUDA.
    """

    def __init__(
        self,
        spec: StackSpec,
        backend: str | None,
        tokens: Tensor,
        dtype: torch.dtype,
        checkpointing: Checkpointing = "none",
    ) -> None:
        with tokens.device:
            self.model = spec.build(backend).to(dtype).checkpoint_layers(checkpointing)
        check_updates(self.model, dtype)
        super().__init__(compile_layers(self.model), tokens)
        self.targets = tokens.roll(-1, 1)

    def loss(self) -> Tensor:
        return self.model.loss(self.tokens, self.targets)

    def prefill(self) -> Call:
        self.module.eval()
        decoder = Decoder(self.model, *self.tokens.shape)
        return lambda: decoder.prefill(self.tokens)

    def decoding(self, rounds: int) -> Call:
        self.module.eval()
        batch, length = self.tokens.shape
        decoder = Decoder(self.model, batch, length + DECODED * (rounds + _UNTIMED_CALLS), compile=True)
        decoder.prefill(self.tokens)
        rows = Rows.of(self.tokens)

        def decode() -> None:
            for _ in range(DECODED):
                decoder.sampler.draw()
                decoder.step()

        def first_call() -> None:
            if self.tokens.device.type == "cuda":
                decoder.capture()
            decoder.sampler.begin(Sampling(temperature=0), rows)
            decode()

        return _with_first_call(first_call, decode)


class PretrainedCalls(ModelCalls):
    """A model with the interface of transformers. It runs eagerly, with the caches and losses of its package."""

    def loss(self) -> Tensor:
        loss: Tensor = self.module(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        return loss

    def prefill(self) -> Call:
        self.module.eval()
        return lambda: self._forward(self.tokens, 0)

    def decoding(self, rounds: int) -> Call:
        self.module.eval()
        out, position = self._forward(self.tokens, 0), self.tokens.shape[1]

        def decode() -> None:
            nonlocal out, position
            for _ in range(DECODED):
                out = self._forward(out.logits[:, -1].argmax(-1, keepdim=True), position, out.past_key_values)
                position += 1

        return decode

    @torch.no_grad()
    def _forward(self, tokens: Tensor, start: int, cache: object = None) -> Any:
        """Run the model on tokens from position `start` on. Returns its output with the logits of the last token."""
        more: dict[str, Any] = {}
        if set(getattr(self.module.config, "layer_types", None) or ()) == {"linear_attention"}:
            # Without these arguments the model asks the cache for the length, which only attention layers store.
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
            more["position_ids"] = positions.expand(tokens.shape)
            more["attention_mask"] = {"full_attention": None, "linear_attention": None}
        return self.module(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, **more)


def _with_first_call(first: Callable[[], None], later: Callable[[], None]) -> Call:
    """Return a call that runs `first` once and then `later`."""
    pending = [first]
    return lambda: (pending.pop() if pending else later)()
