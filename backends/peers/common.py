"""What the adapters share: refusals in sentences, and operands as the gated delta rule of other packages wants them.

B batch, T time, HV value heads, N packed sequences
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deltazoo.backends.base import UpdateInputs, UpdateMeta
from deltazoo.backends.lowering import log_decay, strengths
from deltazoo.backends.spec import UpdateSpec

HALVES = (torch.bfloat16, torch.float16)


def refused(rules: Mapping[str, bool]) -> list[str]:
    """The sentences whose rule is broken."""
    return [sentence for sentence, broken in rules.items() if broken]


def missing(packages: Mapping[str, str]) -> list[str]:
    """A sentence for each package (module -> what to install) that is not there; nothing is imported."""
    return [
        f"it needs the package {module}, which is not installed: pip install {wheel}."
        for module, wheel in packages.items()
        if module not in sys.modules and importlib.util.find_spec(module) is None
    ]


def unusual(spec: UpdateSpec, meta: UpdateMeta, dtypes: Sequence[torch.dtype] = HALVES) -> list[str]:
    """What none of the packages takes: other recurrences than the gated delta rule's family, other devices, dtypes."""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return refused(
        {
            f"it needs tensors on 'cuda', got '{meta.device}'.": meta.device != "cuda",
            f"it computes in {names}, got {str(meta.dtype).removeprefix('torch.')}.": meta.dtype not in dtypes,
            f"decay must be 'none', 'fixed' or 'head', got '{spec.decay}'.": spec.decay in ("channel", "rate"),
            "a fixed decay must be a number a head, log_decay [HV], got [HV, K].": meta.decay_channels,
            f"transition must be 'additive' or 'delta', got '{spec.transition}'.": spec.transition == "dplr",
            f"beta must be 'none' or 'head', got '{spec.beta}'.": spec.beta == "channel",
            f"erase_key must be 'key', got '{spec.erase_key}'.": spec.erase_key == "own",
            f"erase_from must be 'decayed', got '{spec.erase_from}'.": spec.erase_from == "previous",
            "negative_eigenvalues='erase' needs two strengths, and it has one.": spec.negative_eigenvalues == "erase",
            f"householders must be 1, got {spec.householders}.": spec.householders > 1,
            f"read must be 'after', got '{spec.read}'.": spec.read == "before",
        }
    )


def strength(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor | None:
    """The one strength of erase and write [B, T, HV], as it was given where nothing is to be done; None is 1."""
    if spec.reparam == "none" and spec.negative_eigenvalues == "off":
        return inputs.beta
    return strengths(spec, inputs)[1]


def ones(inputs: UpdateInputs) -> Tensor:
    """A strength of 1 for every token and head, [B, T, HV]."""
    return inputs.v.new_ones(inputs.v.shape[:-1])


def decay_of(spec: UpdateSpec, inputs: UpdateInputs) -> Tensor | None:
    """log_decay token by token [B, T, HV] in float32; None where nothing decays."""
    return log_decay(spec, inputs)
