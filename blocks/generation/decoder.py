"""Decode one token per step on a state that is updated in place: eager, compiled, or captured in a CUDA graph.

B batch, T prompt length, L vocabulary
"""

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from deltazoo.backends.io.errors import ShapeError, StateError, UnsupportedError
from deltazoo.backends.torch_ext.compiled_call import compiled_call
from deltazoo.backends.torch_ext.cuda_graph import Call, capture
from deltazoo.blocks.generation.prompts import PromptGraphs
from deltazoo.blocks.generation.sampler import Sampler
from deltazoo.blocks.model.compilation import CompiledLayers
from deltazoo.blocks.model.interface import StackState, TokenModel, check_model
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.state import overwrite_, rollback_, snapshot

P = ParamSpec("P")
R = TypeVar("R")


class Buffers(NamedTuple):
    """What a step reads and writes: tokens [B, 1] int64, logits [B, L] float32, and the state of B rows."""

    tokens: Tensor
    logits: Tensor
    state: StackState


class Decoder:
    """Decode one token at a time. Every tensor keeps its address, so a step can be captured in a CUDA graph.

    Args:
        batch: number of rows B.
        capacity: maximum number of tokens per row, including the prompt; None: no limit, for models without attention.
        compile: compile the step with torch.compile, on CUDA layer by layer, elsewhere as one graph. `rebind` the model
            before the first step.
        buffers: the tensors of a step, such as views of the first rows of larger ones; None: new ones.

    A compiled or captured step does not see hooks that the model gets after its first step; `prefill` refuses them.
    A step reads `tokens` [B, 1] int64, updates `state` in place and writes `logits` [B, L] float32.
    """

    def __init__(
        self, model: TokenModel, batch: int, capacity: int | None, compile: bool = False, buffers: Buffers | None = None
    ) -> None:
        check_model(model)
        self.batch, self.capacity = batch, capacity
        self._reference: Callable[[], TokenModel | None] = lambda: model
        if buffers is None:
            with torch.no_grad():
                buffers = new_buffers(model, batch, model.init_state(batch, capacity))
        self.tokens, self.logits, self.state = buffers
        self.compile = compile
        self.layers, self._held = None, list[object]()
        if compile and model.device.type == "cuda":
            self.layers = CompiledLayers(model, functools.partial(_compile_and_hold, self._held))
        self._step = compiled_step(_step, model.device) if compile and self.layers is None else _step
        self._layout = _layout(model)
        self._hooks: list[int] | None = None  # of the model when the step was compiled or captured
        self._replay: Call | None = None
        self.steps = self.prefills = 0  # numbers of calls of `step` and `prefill`
        self.prompts: PromptGraphs | None = None  # only of a kept decoder, whose model is compared before each call
        self.sampler = Sampler(self.tokens, self.logits)
        self.speculators: dict[int, Any] = {}  # by the number of drafted tokens

    @property
    def captured(self) -> bool:
        """Whether `step` replays a CUDA graph."""
        return self._replay is not None

    @property
    def model(self) -> TokenModel:
        """The model that it decodes."""
        model = self._reference()
        if model is None:
            raise StateError("the model of a kept decoder must exist while it decodes, but it was freed")
        return model

    def refer_weakly(self) -> Self:
        """Do not keep the model alive."""
        self._reference = weakref.ref(self.model)
        return self

    @torch.no_grad()
    def prefill(self, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> None:
        """Reset the state and read prompts [B, T]; `logits` are those of their last tokens.

        Args:
            tokens_BT: of as many rows as the decoder has, or of the first ones. The others start without a prompt.
            mask_BT: bool, True at tokens and False at padding, which is on the left.
        """
        if tokens_BT.dim() != 2 or not 1 <= tokens_BT.shape[0] <= self.batch or not tokens_BT.shape[1]:
            raise ShapeError(
                f"a prompt must have shape [B, T] with 1 <= B <= {self.batch} and T >= 1, got {list(tokens_BT.shape)}"
            )
        if self.capacity is not None and tokens_BT.shape[1] > self.capacity:
            raise StateError(
                f"a prompt of {tokens_BT.shape[1]} tokens exceeds the decoder's capacity of {self.capacity}"
            )
        if self.compile and self._layout != _layout(self.model):
            raise StateError("the model must keep the dtypes, shapes and devices of the compiled decoder, got others")
        is_fixed = (self.compile or self.captured) and self.prompts is None  # else the model has been compared
        if is_fixed and self._hooks not in (None, _hooks(self.model)):
            raise StateError("the model must keep the hooks that it had in the first step of the decoder, got others")
        self.prefills += 1
        if self.prompts is not None and mask_BT is None:
            self.prompts.read(self._read, tokens_BT)
        else:
            self._read(tokens_BT, mask_BT)

    def _read(self, tokens_BT: Tensor, mask_BT: Tensor | None = None) -> None:
        rollback_(self.state, self.model.init_state(self.batch, self.capacity))
        rows, state = len(tokens_BT), self.state
        if rows < self.batch:
            state = self.model.init_state(rows, self.capacity)
        x_BTD, new_state = self.model.features(tokens_BT, state, Context(mask=mask_BT))
        for old, new in zip(tree_leaves(self.state), tree_leaves(new_state), strict=True):
            if new is not old:
                old[:rows].copy_(new)
        # Kernels of the head are compiled for the stride between rows, which must not depend on T.
        last_BD = x_BTD[:, -1].clone(memory_format=torch.contiguous_format)
        self.logits[:rows].copy_(self.model.logits(last_BD))

    @torch.no_grad()
    def step(self) -> None:
        """Read `tokens`, update `state` and write `logits`, without synchronisation."""
        self.steps += 1
        if self._replay is not None:
            self._replay()
        else:
            self._run()

    def _run(self) -> None:
        if self._hooks is None:
            self._hooks = _hooks(self.model)
        with nullcontext() if self.layers is None else self.layers.active():
            self._step(self.model, self.tokens, self.state, self.logits)

    @torch.no_grad()
    def warm_up(self) -> Self:
        """Run the step once, which compiles it if `compile` is set. The state does not change."""
        state_before = snapshot(self.state)
        self._run()
        rollback_(self.state, state_before)
        return self

    @torch.no_grad()
    def capture(self) -> Self:
        """Capture the step in a CUDA graph, which `step` replays from now on. The state does not change.

        Raises: UnsupportedError: the model is not on a CUDA device.
        """
        if self.tokens.device.type != "cuda":
            raise UnsupportedError(f"a CUDA graph needs the model on a CUDA device, got {self.tokens.device}")
        state_before = snapshot(self.state)
        self._replay = capture(self._run, self.tokens.device, warm_ups=3)
        self.sampler.captures = True
        rollback_(self.state, state_before)
        return self


def new_buffers(model: TokenModel, batch: int, state: StackState) -> Buffers:
    """Return the buffers of a step with this state."""
    tokens_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)
    logits_BL = torch.zeros(batch, model.spec.vocab, device=model.device)
    return Buffers(tokens_B1, logits_BL, state)


def _step(model: TokenModel, tokens_B1: Tensor, state: StackState, logits_BL: Tensor) -> None:
    logits_B1L, new_state = model(tokens_B1, state)
    overwrite_(state, new_state)
    logits_BL.copy_(logits_B1L[:, 0])


def compiled_step(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """Compile a copy of a function as one graph, for calls with tensors of the same layout.

    On a CPU a step of a small model is mostly overhead of the host. Two options avoid it: Inductor calls its kernels
    from C++, and Dynamo checks no guards. Nothing needs them: a decoder calls its own copy of the step with the same
    tensors each time, and `prefill` checks the weights. Measured for `gated-deltanet-h1-small` (0.9 M parameters) on
    one thread, torch 2.13: 6.7 ms of CPU time per eager step, 1.29 ms compiled, 0.98 ms with calls from C++, 0.65 ms
    with both.
    """
    if device.type != "cpu":
        return compiled_call(function, dynamic=False)
    options: dict[str, Any] = {"cpp_wrapper": True, "guard_filter_fn": lambda guards: [False] * len(guards)}
    return compiled_call(function, dynamic=False, options=options)


def _compile_and_hold(held: list[object], graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., object]:
    """Compile a graph with Inductor, and hold the result.

    A CUDA graph needs its kernels, which torch unloads with the last reference, also after `torch._dynamo.reset`.
    """
    compiled: Callable[..., object] = torch._inductor.compile(graph, inputs)
    held.append(compiled)
    return compiled


def _hooks(model: TokenModel) -> list[int]:
    """Return the numbers of the hooks of the modules, which torch gives to each hook once."""
    return [number for module in model.modules() for number in (*module._forward_hooks, *module._forward_pre_hooks)]


def _layout(model: TokenModel) -> list[tuple[torch.dtype, torch.Size, torch.device]]:
    """Return what a compiled step assumes about the weights."""
    return [(x.dtype, x.shape, x.device) for x in (*model.parameters(), *model.buffers())]
