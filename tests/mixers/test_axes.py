"""Options of the delta rule: every combination in every mixer either equals its recurrence or is refused.

The options are the step (`reparam`), negative eigenvalues and the number of householders.
"""

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.update import registry
from deltazoo.backends.update.spec import NegativeEigenvalues, Reparam
from deltazoo.mixers import Longhorn
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


def expected_refusal(name: str, reparam: str, negative: str) -> str | None:
    """Return the error message of an invalid combination, or None if it is valid."""
    if reparam == "none":
        return None
    if negative != "off":
        return f"negative_eigenvalues={negative!r} with reparam={reparam!r}: its eigenvalue is positive"
    if name == "comba":  # its erase strength differs from its write strength
        return f"beta='separate' with reparam={reparam!r}: the size of a step is one beta"
    return None


def recurrence(x: dict[str, Tensor | None], config: HeadConfig) -> Tensor:
    """Compute the output token by token from the operands of the update."""
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
                b, w = (y[:, t, m] for y in (micro["erase"], micro["write"]))
                b, w = (b[..., None], w[..., None]) if spec.beta == "separate" else (b, w)
            else:
                b = w = micro["beta"][:, t, m, :, None]
            b = b if spec.negative_eigenvalues == "off" else 2 * b
            w = 2 * w if spec.negative_eigenvalues == "both" else w
            size = (k * b * k).sum(-1, keepdim=True)
            if spec.reparam == "efla":
                b, w = (y * (1 - torch.exp(-size)) / size for y in (b, w))
            if spec.reparam == "longhorn":
                b, w = (y / (1 + size) for y in (b, w))
            decayed = S * a[..., None] if m == 0 else S
            erased = S if spec.erase_from == "previous" else decayed
            S = decayed + k[..., None] * (w * v - (erased * (b * e)[..., None]).sum(-2))[..., None, :]
        outputs.append(K**-0.5 * (S * by_value_head(q[:, t])[..., None]).sum(-2))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("name", "reparam", "negative", "n"), PRODUCT)
def test_combination_equals_its_recurrence_or_is_refused(name: str, reparam: str, negative: str, n: int) -> None:
    axes = {"reparam": reparam, "negative_eigenvalues": negative, "householders": n}
    message = expected_refusal(name, reparam, negative)
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            config_class(name)(**SIZES, **axes)
        return
    assert_equals_recurrence(config_class(name)(**SIZES, **axes))


def test_longhorn_supports_householders() -> None:
    assert_equals_recurrence(Longhorn(**SIZES, householders=2))


def assert_equals_recurrence(config: HeadConfig) -> None:
    """Compare the output, the gradients of all operands, and decoding."""
    torch.manual_seed(0)
    mixer = config.build(WIDTH, backend=CompileBackend(chunk=16, compiled=False)).double()
    recorded: list[dict[str, Tensor | None]] = []
    mixer.update.register_forward_hook(lambda _, args, out: recorded.append({**args[0]._asdict(), "o": out[0]}))
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    y = mixer(x)[0]
    operands = recorded[0]
    o, expected = operands.pop("o"), recurrence(operands, config)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-11)
    weight, leaves = torch.randn_like(expected), [operand for operand in operands.values() if operand is not None]
    ours, theirs = (torch.autograd.grad((z * weight).sum(), leaves, retain_graph=True) for z in (o, expected))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-7, atol=1e-9)
    state, tokens = mixer.init_state(2), []
    with torch.no_grad():
        for token in x.split(1, 1):
            out, state, _ = mixer(token, state)
            tokens.append(out)
    torch.testing.assert_close(torch.cat(tokens, 1), y, rtol=1e-9, atol=1e-11)
