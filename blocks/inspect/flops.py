"""Floating-point operations of a model per token by two formulas, and the peaks of devices.

6N: 6 per parameter and trained token, 2 in the forward pass (Kaplan 2020, arXiv 2001.08361, section 2.1). N counts the
parameters of matrix products that a token passes through: the embedding only if the head shares it, and of experts only
the active ones.

All: the matrix products and short convolutions, the recurrences, and the scores and sums of attention over the tokens
that a causal mask or a window leaves; three times the forward pass for a trained token.
"""

from statistics import fmean

from pydantic import BaseModel, ConfigDict

from deltazoo.backends.measure.workload import Direction
from deltazoo.blocks.inspect.layer_table import Description
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.mixers.attention import SlidingWindow

# Dense matrix products in bfloat16 and float16 with float32 accumulation, TFLOP/s, from the vendors' data sheets.
PEAK_TFLOPS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA B200": 2250.0,
    "NVIDIA GeForce RTX 5090": 209.5,
    "AMD Instinct MI300X": 1307.4,
}


class TokenFlops(BaseModel):
    """Operations of one token. by_parameters: 6N, or 2N without a backward pass; all: see the file's docstring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    by_parameters: float
    all: float


def token_flops(model: LanguageModel, description: Description, length: int, direction: Direction) -> TokenFlops:
    """Count the operations of a token: the mean over a sequence, or for "decode" of the token after it.

    Args:
        model: may be on the meta device.
        description: of the model.
        length: tokens per sequence.
    """
    spec, decode = model.spec, direction == "decode"
    N = description.active_parameters - (0 if spec.tied else spec.width * spec.vocab)
    context = length + 1 if decode else _mean_context(length, length)
    forward = description.flops + description.flops_context * context
    for layer_spec in spec.expand():
        for config in layer_spec.mixers:
            if isinstance(config, SlidingWindow):  # its cost counts a full window for every token
                heads, _, head_width = config.resolve_heads(spec.width)
                seen = min(config.window, length + 1) if decode else _mean_context(length, config.window)
                forward -= 4 * heads * head_width * (config.window - seen)
    passes = 3 if direction == "backward" else 1
    return TokenFlops(by_parameters=2 * passes * N, all=passes * forward)


def _mean_context(length: int, window: int) -> float:
    """Return the mean number of tokens, itself included, that a token sees in a window of a sequence."""
    return fmean(min(t, window) for t in range(1, length + 1))
