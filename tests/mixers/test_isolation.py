"""Values and gradients that are not finite stay within their sequence: of a pack, or row of a padded batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deltazoo.backends.compile import CompileBackend
from deltazoo.mixers import FoX, Mamba3, PathAttention, SlidingWindow
from deltazoo.mixers.core.mixer import Context, Mixer, MixerConfig

T, WIDTH, CHANGED = 16, 24, 1  # the index of the sequence that gets the values
PACK = Context(cu_seqlens=torch.tensor([0, 5, 12, T], dtype=torch.int32))
TIME = torch.arange(T)
PADDED = Context(mask=torch.stack([TIME >= 4, TIME < 11, TIME >= 0]))


class Results(NamedTuple):
    """Outputs, gradient of x and the floating-point tensors of the state."""

    y: Tensor
    d_x: Tensor
    state: list[Tensor]


def run(mixer: Callable[..., Any], x: Tensor, d_y: Tensor, context: Context, state: Any) -> Results:
    x = x.clone().requires_grad_()
    y, new_state, _ = mixer(x, state, context)
    y.backward(d_y)
    assert x.grad is not None
    leaves = [leaf.detach() for leaf in tree_leaves(new_state) if isinstance(leaf, Tensor)]
    return Results(y.detach(), x.grad, [leaf for leaf in leaves if leaf.is_floating_point()])


def others(x: Tensor, context: Context) -> Tensor:
    """Select the tokens of the other sequences: x [B, T, ...] to [tokens, ...]."""
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    keep[changed_tokens(context)] = False
    return x[keep if context.mask is None else keep & context.mask]


def changed_tokens(context: Context) -> tuple[int, slice]:
    return (CHANGED, slice(None)) if context.cu_seqlens is None else (0, slice(5, 12))


@pytest.mark.parametrize("context", [PACK, PADDED], ids=["packed", "padded"])
def test_a_sequence_with_nan_changes_no_output_gradient_or_state_of_others(
    config: MixerConfig, context: Context
) -> None:
    torch.manual_seed(0)
    mixer = config.build(WIDTH, backend=CompileBackend(chunk=16, compiled=False)).double()
    x, d_y = torch.randn(2, 1 if context is PACK else 3, T, WIDTH, dtype=torch.float64)
    row, tokens = changed_tokens(context)
    for state, value in ((None, torch.nan), (mixer.init_state(3, 2 * T), torch.inf)):
        expected = run(mixer, x, d_y, context, state)
        changed_x, changed_d_y = x.clone(), d_y.clone()
        changed_x[row, 6] = value
        changed_d_y[row, tokens] = value
        for new_x in (changed_x, x) if state is None else (changed_x,):
            results = run(mixer, new_x, changed_d_y, context, state)
            assert results.y[row, 6].isfinite().all() == (new_x is x)
            for actual, unchanged in zip(results[:2], expected[:2], strict=True):
                torch.testing.assert_close(others(actual, context), others(unchanged, context), rtol=1e-6, atol=1e-9)
            rows = torch.arange(3) != CHANGED
            for actual, unchanged in zip(results.state, expected.state, strict=True):
                torch.testing.assert_close(actual[rows], unchanged[rows], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "config",
    [PathAttention(heads=2, forget_gate=True), FoX(heads=2), Mamba3(value_heads=2, key_width=8, value_width=8)],
    ids=lambda config: config.name,
)
def test_nan_stays_within_its_sequence_across_chunks(config: MixerConfig) -> None:
    check_long_pack(config, lambda mixer: mixer)


@pytest.mark.graphs
@pytest.mark.parametrize("config", [FoX(heads=2), SlidingWindow(heads=2, window=20)], ids=lambda config: config.name)
def test_nan_stays_within_its_sequence_in_compiled_attention(config: MixerConfig) -> None:
    """Compiled code cannot attend to one sequence after the other."""
    torch._dynamo.reset()
    check_long_pack(config, lambda mixer: torch.compile(mixer, fullgraph=True, backend="aot_eager"))


def check_long_pack(config: MixerConfig, wrap: Callable[[Mixer], Callable[..., Any]]) -> None:
    torch.manual_seed(0)
    mixer = config.build(16, backend=CompileBackend(chunk=16, compiled=False))
    x, d_y = torch.randn(2, 1, 150, 16)
    context = Context(cu_seqlens=torch.tensor([0, 70, 100, 150], dtype=torch.int32))
    changed = x.clone()
    changed[:, 80] = torch.nan
    expected, results = run(mixer, x, d_y, context, None), run(wrap(mixer), changed, d_y, context, None)
    assert not results.y[:, 80].isfinite().all()
    for pair in zip(results[:2], expected[:2], strict=True):
        actual, unchanged = (torch.cat([t[:, :70], t[:, 100:]], 1) for t in pair)
        torch.testing.assert_close(actual, unchanged, rtol=1e-4, atol=1e-5)
