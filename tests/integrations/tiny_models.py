"""Tiny models of transformers with random weights, and how they are run in training and in pieces."""

from typing import Any

import torch
import transformers
from folders import ATTENTION, EPS, HEADS, MODELS, SIZES, VOCAB, Model
from torch import Tensor

MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 7, "mamba_n_groups": 3, "mamba_expand": 3}
MORE = {
    "falcon_h1": Model(
        "FalconH1", "FalconH1Config",
        SIZES | ATTENTION | MAMBA2 | {"mamba_d_ssm": 96, "mamba_chunk_size": 8, "head_dim": 8},
    ),
    "granitemoehybrid": Model(
        "GraniteMoeHybrid", "GraniteMoeHybridConfig",
        SIZES | ATTENTION | MAMBA2 | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"num_local_experts": 3, "num_experts_per_tok": 2, "shared_intermediate_size": 12},
    ),
    "nemotron_h": Model(
        "NemotronH", "NemotronHConfig",
        SIZES | HEADS | {"mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 7, "n_groups": 3, "expand": 3}
        | {"hybrid_override_pattern": "M*M", "layer_norm_epsilon": EPS, "head_dim": 8, "chunk_size": 8},
    ),
    "zamba2": Model(
        "Zamba2", "Zamba2Config",
        SIZES | HEADS | {"mamba_d_state": 7, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_expand": 2}
        | {"num_mem_blocks": 1, "chunk_size": 8, "mamba_headdim": 8, "num_hidden_layers": 3}
        | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "adapter_rank": 4},
    ),
    "zamba": Model(
        "Zamba", "ZambaConfig",
        SIZES | HEADS | {"mamba_d_state": 5, "mamba_dt_rank": 3, "n_mamba_heads": 2}
        | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"], "num_key_value_heads": 4},
    ),
}  # fmt: skip
# None of their layers calls a function
NOT_SERVED = ("Llama", "Qwen3", "MiniMax", "xLSTM", "Rwkv")
FAMILIES = {name: model for name, model in {**MODELS, **MORE}.items() if model.name not in NOT_SERVED}
T = 21


def build(name: str) -> Any:
    """Build a tiny model with uneven sizes and random weights in every parameter."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.fields, attn_implementation="eager")
    return perturbed(getattr(transformers, f"{family.name}ForCausalLM")(config))


def perturbed(model: Any) -> Any:
    """Add random numbers to all parameters, so that none is 0 or 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def tokens(batch: int = 2, length: int = T, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float = 2e-5) -> None:
    assert actual.shape == wanted.shape
    error = (actual.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
    assert float(error.detach()) < tolerance


def trained(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits in training mode, and the gradient of every parameter."""
    model.train()
    model.zero_grad()
    device = next(model.parameters()).device
    logits = model(tokens().to(device), use_cache=False).logits
    (logits * torch.linspace(-1, 1, VOCAB, device=device)).sum().backward()
    model.eval()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def in_pieces(model: Any, ids: Tensor) -> Tensor:
    """The logits of a prefill, continuations by several tokens, and single tokens."""
    pieces, cache = [], transformers.DynamicCache(config=model.config)
    name = "cache_params" if model.config.model_type in ("mamba", "mamba2", "falcon_mamba") else "past_key_values"
    for piece in ids.split([9, 1, 5, 1, 1, 1, 3], 1):
        pieces.append(model(piece, use_cache=True, **{name: cache}).logits)
    return torch.cat(pieces, 1)
