"""Weights in FP8 with a scale per block, as DeepSeek and Qwen publish them: w = FP8 value times scale of its block.

The scales of the tensor NAME are NAME_scale_inv. With blocks of b_1 x b_2 they have the shape [rows / b_1,
columns / b_2], rounded up. Source: DeepSeek-V3, arXiv 2412.19437, section 3.3, and its published inference code.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, cut

SCALE = "_scale_inv"
Blocks = tuple[int, int]
_KNOWN = (
    "activation_scheme", "dequantize", "fmt", "modules_to_not_convert", "quant_method", "scale_fmt",
    "weight_block_size",
)  # fmt: skip


def read_blocks(config: Mapping[str, Any]) -> Blocks | None:
    """Return the size of the blocks from `quantization_config` of a config.json, None if the weights are not quantised.

    Raises: ConfigError: another quantisation.
    """
    fields = config.get("quantization_config")
    if fields is None:
        return None
    blocks: Any = fields.get("weight_block_size") if isinstance(fields, Mapping) else None
    sizes = isinstance(blocks, list) and len(blocks) == 2 and all(isinstance(x, int) and x > 0 for x in blocks)
    if not isinstance(fields, Mapping) or fields.get("quant_method") != "fp8" or not sizes:
        raise ConfigError(
            "config.json: quantization_config must have quant_method 'fp8' and the two sizes weight_block_size, got "
            f"{cut(fields)}: no other quantisation is supported"
        )
    if unknown := [name for name in fields if name not in _KNOWN]:
        raise ConfigError(f"config.json: quantization_config with {', '.join(unknown)} is not supported")
    if fields.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"config.json: quantization_config.fmt must be 'e4m3', got {cut(fields['fmt'])}")
    rows, columns = blocks
    return rows, columns


def scale_problem(name: str, weight: tuple[int, ...], scale: tuple[int, ...], blocks: Blocks) -> str | None:
    """Return a sentence if the shape of the scales does not fit that of the weight."""
    if len(weight) < 2:
        return f"{name} is in FP8 and must be a matrix, got the shape {list(weight)}"
    expected = (*weight[:-2], *(-(-size // block) for size, block in zip(weight[-2:], blocks, strict=True)))
    if scale == expected:
        return None
    return f"{name + SCALE} must have shape {list(expected)}, got {list(scale)}"


def dequantize(weight: Tensor, scale: Tensor, blocks: Blocks) -> Tensor:
    """Return the product in float32, rounded to bfloat16. Args: weight: [..., R, C] FP8; scale: float32."""
    rows, columns = weight.shape[-2:]
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    scale = scale.repeat_interleave(blocks[1], -1)[..., :columns]
    for i in range(scale.shape[-2]):  # a float32 copy of one row of blocks at a time
        block = slice(i * blocks[0], min(rows, (i + 1) * blocks[0]))
        result[..., block, :] = weight[..., block, :].float() * scale[..., i : i + 1, :]
    return result
