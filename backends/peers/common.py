"""Refusals and operands that the adapters share. The other packages implement variants of the gated delta rule.

B batch, T time, HV value heads
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltazoo.backends.update.base import UpdateInputs, UpdateMeta
from deltazoo.backends.update.lowering import strengths
from deltazoo.backends.update.spec import UpdateSpec

HALF_DTYPES = (torch.bfloat16, torch.float16)


def violations(rules: Mapping[str, bool]) -> list[str]:
    """Return the sentences whose condition is True."""
    return [sentence for sentence, violated in rules.items() if violated]


def missing_packages(packages: Mapping[str, str]) -> list[str]:
    """Return a sentence for each module that is not installed. Nothing is imported.

    Args: packages: module -> name of the package to install.
    """
    return [
        f"it needs the package {module}, which is not installed: pip install {package}."
        for module, package in packages.items()
        if module not in sys.modules and importlib.util.find_spec(module) is None
    ]


def common_reasons(spec: UpdateSpec, meta: UpdateMeta, dtypes: Sequence[torch.dtype] = HALF_DTYPES) -> list[str]:
    """Return the reasons that hold for every package: other recurrences, devices or dtypes."""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return violations(
        {
            f"it needs tensors on 'cuda', got '{meta.device}'.": meta.device != "cuda",
            f"it computes in {names}, got {str(meta.dtype).removeprefix('torch.')}.": meta.dtype not in dtypes,
        }
    ) + recurrence_reasons(spec)


def recurrence_reasons(spec: UpdateSpec) -> list[str]:
    """Return the reasons of recurrences that no package computes."""
    return violations(
        {
            "decay must not be 'rate'.": spec.decay == "rate",
            f"erase_key must be 'key', got '{spec.erase_key}'.": spec.erase_key == "own",
            f"erase_from must be 'decayed', got '{spec.erase_from}'.": spec.transition == "delta"
            and spec.erase_from == "previous",
            "beta='separate' needs an erase and a write strength per head; it has one strength for both.": (
                spec.beta == "separate"
            ),
            "negative_eigenvalues='erase' needs separate erase and write strengths; it has one strength for both.": (
                spec.negative_eigenvalues == "erase"
            ),
            f"householders must be 1, got {spec.householders}.": spec.householders > 1,
            f"read must be 'after', got '{spec.read}'.": spec.read == "before",
        }
    )


def scalar_reasons(spec: UpdateSpec, meta: UpdateMeta) -> list[str]:
    """Return the reasons of packages whose decay and beta are scalars per head."""
    return violations(
        {
            f"decay must be 'none', 'fixed' or 'head', got '{spec.decay}'.": spec.decay == "channel",
            "a fixed decay must have one value per head, log_decay [HV], got [HV, K].": meta.decay_channels,
            f"transition must be 'additive' or 'delta', got '{spec.transition}'.": spec.transition == "dplr",
            f"beta must be 'none' or 'head', got '{spec.beta}'.": spec.beta == "channel",
        }
    )


def strength(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor | None:
    """Return the common strength of erase and write [B, T, HV], or beta if the spec leaves it unchanged; None is 1."""
    if spec.reparam == "none" and spec.negative_eigenvalues == "off":
        return inputs.beta
    return strengths(spec, inputs)[1]


def strength_or_ones(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor:
    """Return the common strength of erase and write [B, T, HV]; a tensor of ones if it is 1."""
    beta = strength(spec, inputs)
    return inputs.v.new_ones(inputs.v.shape[:-1]) if beta is None else beta
