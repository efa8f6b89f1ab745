"""A folder's model here beside transformers' model of it: logits, loss, greedy tokens, and the output of each layer."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel
from torch import Tensor, nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints.pretrained import from_pretrained
from deltazoo.blocks.generation.sampling import Sampling

TOLERANCE = 1e-4  # relative RMS error between two float32 models


class Comparison(BaseModel):
    """The differences of two models with the weights of one folder, in float32.

    Attributes:
        logits: relative RMS error of the logits.
        loss, their_loss: mean cross entropy of the tokens, in nats.
        layers: relative RMS error of each layer's output.
        tokens: greedy tokens per prompt: ours by cached decoding, theirs by a forward pass of the whole text.
        equal_tokens: length of the common beginning of the greedy tokens, the least of all prompts.
    """

    logits: float
    loss: float
    their_loss: float
    layers: list[float]
    tokens: int
    equal_tokens: int

    @property
    def first_different_layer(self) -> int | None:
        """Index of the first layer with an error above the tolerance; None: there is none."""
        return next((i for i, error in enumerate(self.layers) if error > TOLERANCE), None)

    @property
    def equal(self) -> bool:
        """Whether the logits are within the tolerance and all greedy tokens are equal."""
        return self.logits <= TOLERANCE and self.equal_tokens == self.tokens


@torch.no_grad()
def compare(folder: str | Path, prompts: Tensor | None = None, tokens: int = 16) -> Comparison:
    """Compare the folder's model with transformers' on the CPU in float32.

    Args:
        prompts: [B, T] int64; None: two random prompts of 32 tokens.
        tokens: greedy tokens to decode.
    Raises: ConfigError: as `from_pretrained`; transformers is not installed, or cannot read the folder.
    """
    ours = from_pretrained(folder, dtype=torch.float32).float()
    theirs = _their_model(folder)
    if prompts is None:
        prompts = torch.randint(ours.spec.vocab, (2, 32), generator=torch.Generator().manual_seed(0))
    base = theirs.base_model
    their_layers = base.layers if hasattr(base, "layers") else base.blocks  # xLSTM, RWKV
    per_layer = len(ours.stack.layers) // len(their_layers)  # 2 in RWKV
    with (
        _layer_outputs(ours.stack.layers[per_layer - 1 :: per_layer]) as hidden,
        _layer_outputs(their_layers) as their_hidden,
    ):
        logits = ours(prompts)[0]
        expected = theirs(prompts, use_cache=False).logits
    greedy = ours.generate(prompts, Sampling(max_tokens=tokens, temperature=0))
    # One call gives their greedy tokens, too: as long as all tokens before are equal, so are the texts.
    text = torch.cat([prompts, greedy[:, :-1]], 1)
    their_greedy = theirs(text, use_cache=False).logits[:, prompts.shape[1] - 1 :].argmax(-1)
    same = (greedy == their_greedy).long().cumprod(1).sum(1)
    return Comparison(
        logits=_error(logits, expected),
        loss=_loss(logits, prompts),
        their_loss=_loss(expected, prompts),
        layers=[_error(x, y) for x, y in zip(hidden, their_hidden, strict=True)],
        tokens=tokens,
        equal_tokens=int(same.min()),
    )


def _their_model(folder: str | Path) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("compare needs transformers: pip install 'deltazoo[hf]'") from error
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"transformers cannot read {folder}: {error}") from error
    if hasattr(model.config, "rescale_every"):
        model.config.rescale_every = 0  # in RWKV-4 it halves the layers' outputs, which does not change the logits
    return model.float().eval()


@contextmanager
def _layer_outputs(layers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list to which each call of a layer appends its output."""
    outputs: list[Tensor] = []

    def append(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    hooks = [layer.register_forward_hook(append) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def _loss(logits: Tensor, tokens: Tensor) -> float:
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
