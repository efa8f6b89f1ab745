"""The axes of the delta rule are fields of the mixers: their whole product, against one recurrence in float64.

EFLA and Longhorn with any decay, negative eigenvalues with any Euler-stepped mixer, householders with any of them.
Every registered mixer of the delta rule is walked over every value of every axis: a combination either is its
recurrence, or the config refuses it in words. None is left out.
"""

import itertools
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from deltazoo.backends import registry
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.spec import NegativeEigenvalues, Reparam
from deltazoo.mixers import EFLA, Longhorn
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.families.delta_rule import DeltaRuleConfig
from deltazoo.mixers.families.update import HeadConfig

NAMES = [
    name
    for name in registry.names(registry.MIXERS)
    if registry.owner(registry.MIXERS, name).startswith("deltazoo ") and issubclass(config_class(name), DeltaRuleConfig)
]
PRODUCT = list(itertools.product(NAMES, get_args(Reparam), get_args(NegativeEigenvalues), (1, 2, 3)))
WIDTH, T = 12, 7
SIZES = {"heads": 2, "value_heads": 4, "key_width": 4, "value_width": 3}


def refusal(name: str, reparam: str, negative: str) -> str | None:
    """What the config says to a combination that means nothing."""
    if reparam == "none":
        return None
    if negative != "off":
        return f"negative_eigenvalues={negative!r} with reparam={reparam!r}: its eigenvalue is positive"
    if name == "comba":  # its erase key is another than its key
        return f"erase_key='own' with reparam={reparam!r}: the step is exact only for e = k"
    return None


def by_hand(x: dict[str, Tensor | None], config: HeadConfig) -> Tensor:
    """Step by step from the operands that the update is given."""
    spec = config.spec()
    n = spec.householders
    q = x["q"]
    B, _, H, K = q.shape
    micro = {
        name: y if n > 1 or y is None else y.unsqueeze(2) for name, y in x.items() if name not in ("q", "log_decay")
    }
    HV, V = micro["v"].shape[-2:]
    S, outputs = q.new_zeros(B, HV, K, V), []

    def by_value_head(key: Tensor) -> Tensor:
        return key.repeat_interleave(HV // H, 1)

    for t in range(T):
        decay = x["log_decay"]
        a = torch.ones(B, HV, 1, dtype=q.dtype) if decay is None else decay[:, t].exp().view(B, HV, -1)
        for m in range(n):
            k, v = by_value_head(micro["k"][:, t, m]), micro["v"][:, t, m]
            e = k if micro["erase_key"] is None else by_value_head(micro["erase_key"][:, t, m])
            if micro["beta"] is None:
                b, w = micro["erase"][:, t, m], micro["write"][:, t, m]
            else:
                b = w = micro["beta"][:, t, m, :, None]
            b = b if spec.negative_eigenvalues == "off" else 2 * b
            w = 2 * w if spec.negative_eigenvalues == "both" else w
            size = (k * b * k).sum(-1, keepdim=True)
            if spec.reparam == "efla":
                b, w = (y * (1 - torch.exp(-size)) / size for y in (b, w))
            if spec.reparam == "longhorn":
                b, w = (y / (1 + size) for y in (b, w))
            kept = S * a[..., None] if m == 0 else S
            seen = S if spec.erase_from == "previous" else kept
            S = kept + k[..., None] * (w * v - (seen * (b * e)[..., None]).sum(-2))[..., None, :]
        outputs.append(K**-0.5 * (S * by_value_head(q[:, t])[..., None]).sum(-2))
    return torch.stack(outputs, 1)


def test_the_product_has_every_mixer_of_the_delta_rule() -> None:
    assert {"deltanet", "gated_deltanet", "kda", "gated_deltanet2", "comba", "deltaproduct", "gated_deltaproduct",
            "gated_efla", "gated_longhorn"} <= set(NAMES)  # fmt: skip
    refused = [case for case in PRODUCT if refusal(*case[:3]) is not None]
    assert len(PRODUCT) == len(NAMES) * 27
    assert len(refused) == len(NAMES) * 12 + 6  # two steps x two signs x three; and Comba's


@pytest.mark.parametrize(("name", "reparam", "negative", "n"), PRODUCT)
def test_every_combination_is_its_recurrence_or_is_refused(name: str, reparam: str, negative: str, n: int) -> None:
    axes = {"reparam": reparam, "negative_eigenvalues": negative, "householders": n}
    why = refusal(name, reparam, negative)
    if why is not None:
        with pytest.raises(ValidationError, match=why):
            config_class(name)(**SIZES, **axes)
        return
    is_its_recurrence(config_class(name)(**SIZES, **axes))


@pytest.mark.parametrize("kind", [EFLA, Longhorn])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_stepped_rules_take_householders(kind: type[HeadConfig], n: int) -> None:
    is_its_recurrence(kind(**SIZES, householders=n))


def is_its_recurrence(config: HeadConfig) -> None:
    """Output, gradients of all operands, and decoding."""
    torch.manual_seed(0)
    mixer = config.build(WIDTH, backend=CompileBackend(chunk=16, compiled=False)).double()
    seen: list[dict[str, Tensor | None]] = []
    mixer.update.register_forward_hook(lambda _, args, out: seen.append({**args[0]._asdict(), "o": out[0]}))
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    y = mixer(x)[0]
    operands = seen[0]
    o, want = operands.pop("o"), by_hand(operands, config)
    torch.testing.assert_close(o, want, rtol=1e-9, atol=1e-11)
    weight, leaves = torch.randn_like(want), [operand for operand in operands.values() if operand is not None]
    ours, theirs = (torch.autograd.grad((z * weight).sum(), leaves, retain_graph=True) for z in (o, want))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)
    state, tokens = mixer.init_state(2), []
    with torch.no_grad():
        for token in x.split(1, 1):
            out, state = mixer(token, state)
            tokens.append(out)
    torch.testing.assert_close(torch.cat(tokens, 1), y, rtol=1e-9, atol=1e-11)
