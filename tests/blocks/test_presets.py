"""Every preset builds and has the number of parameters of its published sizes."""

import pytest
import torch
import torch.nn.functional as F

from deltazoo.backends.errors import UnknownNameError
from deltazoo.blocks import preset, presets
from deltazoo.blocks.spec import StackSpec

SMALL = ["gated-deltanet-h1-small", "gated-deltanet-small", "transformer-pp-small"]


def attention(width: int) -> int:
    return 4 * width**2


def deltanet(width: int, heads: int) -> int:
    """q, k, v and out; beta; three convolutions of four taps; a norm of the heads' outputs."""
    return 4 * width**2 + heads * width + 12 * width + width // heads


def gated_deltanet(width: int) -> int:
    """9 heads, K = 3/4 width / 9, V = 3/2 width / 9: q, k; v, gate, out; beta, decay; convolutions; norm."""
    key, value = 3 * width // 4, 3 * width // 2
    return 2 * width * key + 3 * width * value + 2 * 9 * width + 2 * 9 + 4 * (2 * key + value) + value // 9


def stack(width: int, mixers: list[int], hidden: int, vocab: int = 32000) -> int:
    """Tied embedding, a SwiGLU and two norms a layer, a last norm."""
    return vocab * width + sum(mixers) + len(mixers) * (3 * width * hidden + 2 * width) + width


COUNTS = {
    "transformer-pp": (stack(1024, 24 * [attention(1024)], 2816), 0.34),
    "transformer-pp-1.3b": (stack(2048, 24 * [attention(2048)], 5632), 1.3),
    "deltanet-swa": (stack(1024, 12 * [deltanet(1024, 8), attention(1024)], 2816), 0.34),
    "deltanet-swa-1.3b": (stack(2048, 12 * [deltanet(2048, 16), attention(2048)], 5632), 1.3),
    "gated-deltanet": (stack(1536, 11 * [gated_deltanet(1536)], 6144), 0.52),
    "gated-deltanet-1.3b": (stack(2400, 16 * [gated_deltanet(2400)], 5888), 1.3),
    "gated-deltanet-h1": (stack(1536, 6 * [gated_deltanet(1536), attention(1536)], 6144), 0.53),
    "gated-deltanet-h1-1.3b": (stack(2304, 9 * [gated_deltanet(2304), attention(2304)], 6144), 1.3),
    "gated-deltanet-h2": (None, 0.54),
    "samba": (None, 0.42),
}


@pytest.mark.parametrize("name", [name for name in presets.names() if name not in SMALL])
def test_a_preset_has_the_published_number_of_parameters(name):
    exact, billions = COUNTS[name]
    with torch.device("meta"):
        model = StackSpec.load(name).build()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert exact in (None, count)
    assert abs(count / 1e9 - billions) < 0.05 * billions


def test_the_small_presets_have_equal_size_and_learn():
    counts = []
    for name in SMALL:
        torch.manual_seed(0)
        model = StackSpec.load(name).build(backend="reference")
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        tokens = torch.tensor([list(b"the quick brown fox jumps")])
        losses = []
        for _ in range(20):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert abs(losses[0] - F.cross_entropy(torch.zeros(1, 256), torch.tensor([0]))) < 0.3
        assert losses[-1] < 0.5 * losses[0], name
    assert max(counts) / min(counts) < 1.03


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_cites_its_source(name):
    first = presets.text(name).splitlines()[0]
    assert first.startswith("# ")
    assert "arXiv" in presets.text(name) or name in SMALL


def test_preset_returns_the_stack_that_load_reads():
    for name in presets.names():
        assert preset(name) == StackSpec.load(name)
    with pytest.raises(UnknownNameError, match="did you mean 'samba'"):
        preset("sambo")
