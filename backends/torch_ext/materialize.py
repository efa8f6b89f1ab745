"""Compute a tensor into a buffer with a fixed layout, inside torch.compile."""

from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.custom_op import differentiate_exported, operator


def materialize(x: Tensor) -> Tensor:
    """Return a contiguous copy of x that Inductor neither inlines into its readers nor lays out differently.

    Inductor of torch 2.11 loads the bias of a linear map in a sum over tokens that reads it, which fails on CUDA
    (`mixers.parts.gates.exponential_gating`).
    """
    return _Materialize.apply(x)


class _Materialize(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _copy(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _clone(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_copy = operator("materialize(Tensor x) -> Tensor", _clone, _clone)
differentiate_exported("materialize", materialize)
