"""Split fused linear maps into their parts, so that LoRA may adapt q or v alone, and join them again.

    split_fused_maps(model)                # to_qkv becomes to_qkv.q, to_qkv.k and to_qkv.v
    adapted = get_peft_model(model, LoraConfig(target_modules=["to_qkv.q", "to_qkv.v"]))
    join_fused_maps(adapted.merge_and_unload())

A split map computes one product per part. A model must be joined before it is saved, because the names of its weights
are others while it is split.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deltazoo.backends.io.errors import InputError
from deltazoo.backends.torch_ext.plain_module import is_plain_linear
from deltazoo.mixers.parts.projections import QKVProjection


class SplitLinear(nn.Module):
    """The outputs of several linear maps of the same input, joined in order: y = [W_1 x, W_2 x, ...]."""

    def __init__(self, parts: dict[str, nn.Linear]) -> None:
        super().__init__()
        self.names = tuple(parts)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in self.names], -1)


def split_fused_maps(model: nn.Module) -> list[str]:
    """Replace the map to q, k and v of every mixer that has one by its parts, in place. The outputs stay the same.

    Returns: the names of the parts, for `target_modules`.
    Raises: InputError: no module has such a map.
    """
    names = []
    for path, module, sizes in list(_fused(model)):
        fused: Any = module.to_qkv
        if not is_plain_linear(fused):
            continue
        rows = dict(zip("qkv", fused.weight.detach().split(sizes), strict=True))
        biases = [None] * 3 if fused.bias is None else fused.bias.detach().split(sizes)
        parts = {
            name: _linear(weight, bias, fused)
            for (name, weight), bias in zip(rows.items(), biases, strict=True)
            if weight.shape[0]
        }
        module.to_qkv = SplitLinear(parts)
        names += [f"{path}.to_qkv.{name}".lstrip(".") for name in parts]
    if not names:
        raise InputError("model has no linear map to q, k and v that can be split")
    return names


def join_fused_maps(model: nn.Module) -> None:
    """Undo `split_fused_maps` in place, after adapters have been merged into the parts.

    Raises: InputError: a part is still adapted.
    """
    for path, module in model.named_modules():
        split = getattr(module, "to_qkv", None)
        if not isinstance(split, SplitLinear):
            continue
        parts = [getattr(split, name) for name in split.names]
        if not all(is_plain_linear(part) for part in parts):
            raise InputError(f"{path}.to_qkv must have plain parts: merge the adapters first")
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        weight = torch.cat([part.weight.detach() for part in parts])
        module.to_qkv = _linear(weight, torch.cat(biases) if biases else None, parts[0])


def _fused(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[int]]]:
    """The modules with a map to q, k and v, and its sizes."""
    for path, module in model.named_modules():
        if isinstance(module, QKVProjection):
            convolved = [] if module.conv is None else [*module.conv.parts]
            yield path, module, [part.channels for part in (*convolved, *module.unconvolved)]
        elif isinstance(getattr(module, "to_qkv", None), nn.Linear) and len(getattr(module, "sizes", ())) == 3:
            yield path, module, list(module.sizes)


def _linear(weight: Tensor, bias: Tensor | None, like: nn.Linear) -> nn.Linear:
    """A linear map with these weights, trained if `like` is."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    trained = like.weight.requires_grad
    linear.weight = nn.Parameter(weight.clone(), trained)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), trained)
    return linear.train(like.training)
