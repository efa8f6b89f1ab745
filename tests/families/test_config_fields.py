"""Configs with the fields and sizes that folders of known models have: each is read whole.

The factors of Falcon-H1 are examples. The numbers of parameters are pinned.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deltazoo.blocks.checkpoints.pretrained import read_spec

MAMBA = ["mamba"] * 5
# Billions of parameters, and the fields
CONFIGS: dict[str, tuple[float, dict[str, Any]]] = {
    "Falcon-H1-0.5B": (
        0.521,
        {
            "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None,
            "bos_token_id": 17, "embedding_multiplier": 5.65, "eos_token_id": 11, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048,
            "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
            "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536,
            "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24,
            "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
            "mamba_use_mlp": True, "max_position_embeddings": 16384, "mlp_bias": False, "mlp_expansion_factor": 8,
            "mlp_multipliers": [0.88, 0.35], "model_type": "falcon_h1", "num_attention_heads": 8,
            "num_hidden_layers": 36, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0,
            "projectors_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0,
            "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.3], "ssm_out_multiplier": 0.23,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52",
            "use_cache": True, "vocab_size": 32784,
        },
    ),
    "Granite-4.0-H-Tiny": (
        6.939,
        {
            "attention_bias": False, "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 1,
            "embedding_multiplier": 12, "eos_token_id": 1, "hidden_act": "silu", "hidden_size": 1536,
            "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 512,
            "layer_types": [*MAMBA, "attention", *MAMBA[:4]] * 4, "logits_scaling": 6, "mamba_chunk_size": 256,
            "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
            "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False, "max_position_embeddings": 131072,
            "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 12,
            "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64,
            "output_router_logits": False, "pad_token_id": 2, "position_embedding_type": "nope",
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
            "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "vocab_size": 100352,
        },
    ),
    "GLA-1.3B": (
        1.366,
        {
            "attn": None, "attn_mode": "chunk", "bos_token_id": 1, "clamp_min": None, "conv_size": 4,
            "elementwise_affine": True, "eos_token_id": 2, "expand_k": 0.5, "expand_v": 1, "feature_map": None,
            "fuse_cross_entropy": True, "fuse_norm": True, "hidden_act": "swish", "hidden_ratio": 4,
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": None,
            "max_position_embeddings": 2048, "model_type": "gla", "norm_eps": 1e-06, "num_heads": 4,
            "num_hidden_layers": 24, "num_kv_heads": None, "tie_word_embeddings": False, "use_cache": True,
            "use_gk": True, "use_gv": False, "use_output_gate": True, "use_short_conv": False,
            "share_conv_kernel": True, "vocab_size": 32000,
        },
    ),
    "mamba2-130m": (
        0.129,
        {
            "d_model": 768, "d_intermediate": 0, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
            "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True,
            "pad_vocab_size_multiple": 16, "tie_embeddings": True,
        },
    ),
    "mamba-130m": (
        0.129,
        {
            "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True,
            "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8,
        },
    ),
    "Llama-3.1-8B": (
        8.03,
        {
            "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
            "eos_token_id": [128001, 128008], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_is_known_and_the_model_has_its_size(name: str, tmp_path: Path) -> None:
    billions, fields = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with torch.device("meta"):
        model = read_spec(tmp_path).spec.build("reference")
    assert round(sum(x.numel() for x in model.parameters()) / 1e9, 3) == billions
