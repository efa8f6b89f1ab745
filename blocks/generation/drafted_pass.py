"""A pass that verifies drafts: the texts of its rows, the tensors that it reads and writes, and its two calls.

B rows, C tokens of the history, T tokens of a pass: the last drawn one and n drafted ones, L vocabulary
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from deltazoo.backends.ops.prompt_lookup import LONGEST_MATCH, NO_TOKEN, Text, draft_
from deltazoo.backends.torch_ext.cuda_graph import Call, capture, eager_if_refused
from deltazoo.blocks.generation.decoder import compiled_step
from deltazoo.blocks.model.compilation import CompiledLayers
from deltazoo.blocks.model.interface import StackState, TokenModel

MOST_LOOKED_UP = 4096  # last tokens of a text in which drafts are looked up


def empty_texts(rows: int, capacity: int | None, device: torch.device) -> Text:
    """Return the texts of rows without a prompt: their tokens are valid, and no token may be sampled.

    The host does not know yet how many drafts were accepted, so a text and its lengths are on the device.
    """
    length = MOST_LOOKED_UP if capacity is None else min(capacity, MOST_LOOKED_UP)
    history = torch.zeros(rows, LONGEST_MATCH + length, dtype=torch.int64, device=device)
    return Text(history, *(torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)))


def start_text(texts: Text, row: int, prompt: Tensor, limit: int) -> None:
    """Start a row after a prompt [T] on the CPU, which `limit` tokens may follow."""
    last = prompt[-(texts.history.shape[1] - LONGEST_MATCH) :]
    texts.history[row].fill_(NO_TOKEN)
    texts.history[row, -len(last) :] = last.to(texts.history.device, non_blocking=True)
    texts.drawn[row].zero_()
    texts.left[row].fill_(limit)


class PassBuffers(NamedTuple):
    """Tensors that a pass reads and writes.

    tokens: [B, 1], the last sampled ones. history: [B, C]. read: [B, T], the tokens of the pass. logits: [B, T, L].
    accepted: [B] int32, how many tokens of the pass are accepted, set between `verify` and `commit`.
    """

    tokens: Tensor
    history: Tensor
    read: Tensor
    logits: Tensor
    accepted: Tensor
    state: StackState


class Pass:
    """A pass of a fixed number of rows: `verify` drafts, choose tokens and set the counts, then `commit`.

    Args:
        model: returns the model. compile: compile both calls, each as one graph. layers: compiled layers that the
            calls use instead.
    """

    def __init__(
        self,
        model: Callable[[], TokenModel],
        buffers: PassBuffers,
        compile: bool = False,
        layers: CompiledLayers | None = None,
    ) -> None:
        self._model, self._buffers, self._layers = model, buffers, layers
        self._read, self._keep = verify_drafts, commit_drafts
        if compile and layers is None:
            device = buffers.tokens.device
            self._read, self._keep = compiled_step(verify_drafts, device), compiled_step(commit_drafts, device)
        self._draft: StackState | None = None  # of the last call of `verify`
        self.verify: Call = self._verify
        self.commit: Call = self._commit

    def capture(self, memory: Any) -> Self:
        """Capture both calls in CUDA graphs, with counts of 0 to keep the state. Args: memory: pool of the graphs."""
        device = self._buffers.tokens.device
        self._buffers.accepted.zero_()
        with eager_if_refused("the pass with drafts"):
            verify = capture(self._verify, device, memory, warm_ups=3)
            verify()  # writes the draft that the warm-up of `commit` reads
            self.commit = capture(self._commit, device, memory)
            self.verify = verify
        return self

    def warm_up(self) -> Self:
        """Compile both calls. The state does not change."""
        self._buffers.accepted.zero_()
        self._verify()
        self._commit()
        return self

    def _verify(self) -> None:
        buffers = self._buffers
        draft_(buffers.read, buffers.tokens, buffers.history)
        with nullcontext() if self._layers is None else self._layers.active():
            self._draft = self._read(self._model(), buffers.read, buffers.state, buffers.logits)

    def _commit(self) -> None:
        assert self._draft is not None  # of `verify`
        self._keep(self._model(), self._draft, self._buffers.state, self._buffers.accepted)


def verify_drafts(model: TokenModel, tokens_BT: Tensor, state: StackState, logits_BTL: Tensor) -> StackState:
    """Read the tokens of a pass, write their logits, and return the draft for `commit_drafts`."""
    verified_BTL, draft = model.verify(tokens_BT, state)
    logits_BTL.copy_(verified_BTL)
    return draft


def commit_drafts(model: TokenModel, draft: StackState, state: StackState, count_B: Tensor) -> None:
    """Advance the state by the first `count` tokens of the pass."""
    model.commit_(draft, state, count_B)
