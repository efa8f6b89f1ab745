"""The small model of a mixer for a task: every mixer gets the same depth, width and heads."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.probes.task import Task
from deltazoo.blocks.spec.pattern import names, parse, unreached
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.mixer import MixerConfig

_MAX_DEPTH = 64
_ONE_HOT_VOCAB = 256
_STATE_SPACE_VALUES = 64  # Mamba-2's width of a value head
_MLP_MAPS, _MLP_STEP = 3, 8  # matrices of an MLP with a gate; its width is a multiple for the sake of tensor cores


def probe_stack(pattern: str, task: Task) -> StackSpec:
    """Return the model of a mixer, or a hybrid pattern, for a task.

    The depth is the task's, or the smallest that contains every layer of the pattern. Fields in the pattern take
    precedence over the task's sizes: "deltanet(heads=4, negative_eigenvalues=both)".

    Raises: UnknownNameError; PatternError: an unknown field; ConfigError: a mixer does not fit the width.
    """
    term = parse(pattern)
    depths = range(task.depth, _MAX_DEPTH + 1)
    depth = next((depth for depth in depths if not unreached(term, depth)), None)
    if depth is None:
        raise ConfigError(f"mixer pattern must have at most {_MAX_DEPTH} layers, got {pattern}")
    spec = StackSpec(
        width=task.width,
        depth=depth,
        vocab=task.vocab,
        pattern=pattern,
        layers={name.name: sized(config_class(name.name)(), task) for name in names(term)},
        mlp=Dense(width=int(task.mlp * task.width)) if task.mlp else "none",
        tied=False,
    )
    if not task.equal_parameters or pattern == "attention":
        return spec
    wanted, present = (each.describe().parameters for each in (probe_stack("attention", task), spec))
    channels = int(task.mlp * task.width) + (wanted - present) / (_MLP_MAPS * task.width * depth)
    width = _MLP_STEP * round(channels / _MLP_STEP)
    if width < 1:
        raise ConfigError(
            f"{pattern} has {present:,} parameters, attention {wanted:,}: no width of the MLPs makes them equal"
        )
    return spec.model_copy(update={"mlp": Dense(width=width)})


class Decoder(nn.Module):
    """The logits of n answers from equal vectors: an MLP of a vector plus one that is learned for each answer."""

    def __init__(self, width: int, answers: int, vocab: int) -> None:
        super().__init__()
        self.index_AD = nn.Parameter(0.02 * torch.randn(answers, width))
        self.hidden, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, vocab)

    @classmethod
    def replace_head(cls, model: LanguageModel, task: Task) -> None:
        """Replace the head of a model, if the task reads several answers from one vector."""
        if task.decoded:
            model.head = cls(task.width, task.decoded, task.vocab)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Decode vectors, [B, A, D] or [B A, D]."""
        x_BAD = x.reshape(-1, *self.index_AD.shape) + self.index_AD
        return self.out(functional.silu(self.hidden(x_BAD))).reshape(*x.shape[:-1], -1)


class OneHotEmbedding(nn.Module):
    """An embedding as a product of matrices, whose gradient on a GPU needs no sort to add in a fixed order."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    @classmethod
    def replace_in(cls, model: LanguageModel) -> None:
        """Replace the embedding of a model, unless its vocabulary is large."""
        if model.spec.vocab <= _ONE_HOT_VOCAB:
            model.add_module("embedding", cls(model.embedding))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        tokens_L = torch.arange(self.weight.shape[0], device=tokens_BT.device)
        with torch.autocast(tokens_BT.device.type, enabled=False):
            return (tokens_BT[..., None] == tokens_L).to(self.weight.dtype) @ self.weight


def sized(config: MixerConfig, task: Task) -> MixerConfig:
    """Return a mixer with the task's heads, K = width / heads.

    Mamba-2 and its relatives have one group of keys and value heads of 64 channels or K, whichever is smaller. A mixer
    without heads keeps its fields; mixers inside a mixer are sized, too.
    """
    fields = type(config).model_fields
    key_width = max(1, task.width // task.heads)
    sizes: dict[str, object] = {
        name: sized(value, task) for name, value in dict(config).items() if isinstance(value, MixerConfig)
    }
    if "heads" in fields and fields["heads"].default is None:
        sizes["heads"] = task.heads
    elif "heads" in fields and "key_width" in fields:
        sizes |= {"key_width": key_width, "value_width": min(_STATE_SPACE_VALUES, key_width)}
    return type(config).model_validate({**dict(config), **sizes}) if sizes else config
