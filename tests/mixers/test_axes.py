"""The axes of the delta rule are fields of the mixers: their whole product, against one recurrence in float64.

EFLA and Longhorn with any decay, negative eigenvalues with any Euler-stepped mixer, householders with any of them.
"""

import itertools

import pytest
import torch
from torch import Tensor

from deltazoo.backends.compile import CompileBackend
from deltazoo.mixers import Comba, DeltaNet, GatedDeltaNet, GatedDeltaNet2
from deltazoo.mixers.kda import KDA
from deltazoo.mixers.variant import DeltaRuleConfig

MIXERS: dict[str, type[DeltaRuleConfig]] = {
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "kda": KDA,
    "gated_deltanet2": GatedDeltaNet2,
    "comba": Comba,
}
STEPS = [("none", "off"), ("none", "both"), ("none", "erase"), ("efla", "off"), ("longhorn", "off")]
PRODUCT = [
    (name, reparam, negative, n)
    for name, (reparam, negative), n in itertools.product(MIXERS, STEPS, (1, 2, 3))
    if not (name == "comba" and reparam != "none")  # its erase key is another than its key
]
WIDTH, T = 12, 7


def by_hand(x: dict[str, Tensor | None], config: DeltaRuleConfig) -> Tensor:
    """Step by step from the operands that the update is given."""
    n, spec = config.householders, config.spec()
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
            b = b if config.negative_eigenvalues == "off" else 2 * b
            w = 2 * w if config.negative_eigenvalues == "both" else w
            size = (k * b * k).sum(-1, keepdim=True)
            if config.reparam == "efla":
                b, w = (y * (1 - torch.exp(-size)) / size for y in (b, w))
            if config.reparam == "longhorn":
                b, w = (y / (1 + size) for y in (b, w))
            kept = S * a[..., None] if m == 0 else S
            seen = S if spec.erase_from == "previous" else kept
            S = kept + k[..., None] * (w * v - (seen * (b * e)[..., None]).sum(-2))[..., None, :]
        outputs.append(K**-0.5 * (S * by_value_head(q[:, t])[..., None]).sum(-2))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("name", "reparam", "negative", "n"), PRODUCT)
def test_every_combination_is_its_recurrence(name: str, reparam: str, negative: str, n: int) -> None:
    torch.manual_seed(0)
    config = MIXERS[name](
        heads=2,
        value_heads=4,
        key_width=4,
        value_width=3,
        reparam=reparam,
        negative_eigenvalues=negative,
        householders=n,
    )
    mixer = config.build(WIDTH, backend=CompileBackend(chunk=16, compiled=False)).double()
    seen: list[dict[str, Tensor | None]] = []
    mixer.update.register_forward_hook(lambda _, args, out: seen.append({**args[0]._asdict(), "o": out[0]}))
    x = torch.randn(2, T, WIDTH, dtype=torch.float64)
    y = mixer(x)[0]
    operands = seen[0]
    torch.testing.assert_close(operands.pop("o"), by_hand(operands, config), rtol=1e-9, atol=1e-11)
    state, tokens = mixer.init_state(2), []
    with torch.no_grad():
        for token in x.split(1, 1):
            out, state = mixer(token, state)
            tokens.append(out)
    torch.testing.assert_close(torch.cat(tokens, 1), y, rtol=1e-9, atol=1e-11)
