"""Small random models of transformers with uneven sizes, written as folders."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

VOCAB, WIDTH = 53, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EPS = 1e-3  # large enough that a norm with another epsilon is seen
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
ATTENTION = HEADS | {"rms_norm_eps": EPS}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10
}  # fmt: skip
SSD = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 7, "mamba_n_groups": 3}
MAMBA = {"state_size": 5, "time_step_rank": 3, "layer_norm_epsilon": EPS}


class Model(NamedTuple):
    """A model of transformers: the names of its classes before "ForCausalLM" and "Config", and its config's fields."""

    name: str
    config: str
    fields: dict[str, Any]


def rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", **fields}}


MODELS = {
    "llama": Model("Llama", "LlamaConfig", SIZES | ATTENTION | rope(rope_theta=500.0)),
    "llama-tied": Model("Llama", "LlamaConfig", SIZES | ATTENTION | {"head_dim": 6, "tie_word_embeddings": True}),
    "llama-llama3": Model(
        "Llama", "LlamaConfig",
        SIZES | ATTENTION | {"max_position_embeddings": 128}
        | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0}
           | {"high_freq_factor": 3.0, "original_max_position_embeddings": 32}},
    ),
    "qwen3-yarn": Model(
        "Qwen3", "Qwen3Config",
        SIZES | ATTENTION | {"head_dim": 16, "max_position_embeddings": 128}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0}
           | {"original_max_position_embeddings": 32}},
    ),
    "qwen3": Model("Qwen3", "Qwen3Config", SIZES | ATTENTION | {"head_dim": 10} | rope(rope_theta=1e6)),
    "qwen3-tied": Model("Qwen3", "Qwen3Config", SIZES | ATTENTION | {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_next": Model(
        "Qwen3Next", "Qwen3NextConfig", SIZES | ATTENTION | DELTA | EXPERTS | {"head_dim": 16}
    ),
    "qwen3_next-scores": Model(
        "Qwen3Next", "Qwen3NextConfig",
        SIZES | ATTENTION | DELTA | EXPERTS | {"head_dim": 8, "norm_topk_prob": False, "tie_word_embeddings": True}
        | rope(rope_theta=99.0, partial_rotary_factor=0.5),
    ),
    "qwen3_5_text": Model(
        "Qwen3_5", "Qwen3_5TextConfig", SIZES | ATTENTION | DELTA | {"head_dim": 16, "linear_conv_kernel_dim": 3}
    ),
    "qwen3_5_text-tied": Model(
        "Qwen3_5", "Qwen3_5TextConfig", SIZES | ATTENTION | DELTA | {"head_dim": 8, "tie_word_embeddings": True}
    ),
    "olmo_hybrid": Model("OlmoHybrid", "OlmoHybridConfig", SIZES | ATTENTION | DELTA | rope(rope_theta=None)),
    "olmo_hybrid-rope": Model(
        "OlmoHybrid", "OlmoHybridConfig",
        SIZES | ATTENTION | DELTA | {"linear_allow_neg_eigval": False} | rope(rope_theta=100.0),
    ),
    "mamba": Model("Mamba", "MambaConfig", SIZES | MAMBA),
    "mamba-tied": Model("Mamba", "MambaConfig", SIZES | MAMBA | {"expand": 3, "tie_word_embeddings": True}),
    "mamba2": Model(
        "Mamba2", "Mamba2Config",
        SIZES | {"num_heads": 6, "head_dim": 16, "state_size": 7, "n_groups": 3, "expand": 3, "chunk_size": 8}
        | {"layer_norm_epsilon": EPS},
    ),
    "mamba2-tied": Model(
        "Mamba2", "Mamba2Config",
        SIZES | {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 1, "expand": 2, "chunk_size": 8}
        | {"layer_norm_epsilon": EPS, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": Model(
        "Qwen3_5Moe", "Qwen3_5MoeTextConfig", SIZES | ATTENTION | DELTA | EXPERTS | {"head_dim": 16}
    ),
    "bamba": Model(
        "Bamba", "BambaConfig",
        SIZES | ATTENTION | {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 7, "mamba_n_groups": 3}
        | {"mamba_expand": 3, "attn_layer_indices": [1]},
    ),
    "jamba": Model(
        "Jamba", "JambaConfig",
        SIZES | ATTENTION | {"mamba_d_state": 5, "mamba_dt_rank": 3, "num_experts": 3, "num_hidden_layers": 5}
        | {"attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "jamba-dense": Model(
        "Jamba", "JambaConfig",
        SIZES | ATTENTION | {"mamba_d_state": 5, "mamba_dt_rank": 3, "num_experts": 1, "num_experts_per_tok": 1}
        | {"attn_layer_period": 3, "attn_layer_offset": 1, "tie_word_embeddings": True},
    ),
    "kimi_linear": Model(
        "KimiLinear", "KimiLinearConfig",
        SIZES | {"rms_norm_eps": EPS, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"kv_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "linear_num_heads": 3}
        | {"linear_head_dim": 8, "moe_intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "n_shared_experts": 2},
    ),
    "kimi_linear-groups": Model(
        "KimiLinear", "KimiLinearConfig",
        SIZES | {"rms_norm_eps": EPS, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"kv_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "linear_num_heads": 2}
        | {"linear_head_dim": 8, "moe_intermediate_size": 12, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "n_shared_experts": 1}
        | {"n_group": 4, "topk_group": 2},
    ),
    "bailing_hybrid": Model(
        "BailingHybrid", "BailingHybridConfig",
        SIZES | {"rms_norm_eps": EPS, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"kv_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5, "head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "n_shared_experts": 2}
        | {"moe_intermediate_size": 12, "num_local_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
        | {"n_group": 4, "topk_group": 2, "kda_lower_bound": -3.0, "rope_theta": 100.0},
    ),
    "lfm2": Model(
        "Lfm2", "Lfm2Config",
        SIZES | HEADS | {"norm_eps": EPS, "layer_types": ["conv", "full_attention", "conv"]}
        | {"tie_word_embeddings": True, "block_multiple_of": 8},
    ),
    "lfm2-bias": Model(
        "Lfm2", "Lfm2Config",
        SIZES | HEADS | {"norm_eps": EPS, "layer_types": ["full_attention", "conv", "conv"], "conv_bias": True}
        | {"block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    ),
    "xlstm": Model(
        "xLSTM", "xLSTMConfig",
        SIZES | {"hidden_size": 64, "num_heads": 4, "norm_eps": 1e-6, "qk_dim_factor": 1.0, "v_dim_factor": 2.0}
        | {"ffn_proj_factor": 1.3, "ffn_round_up_to_multiple_of": 9, "output_logit_soft_cap": 3.0}
        | {"autocast_kernel_dtype": "float32", "chunk_size": 8},
    ),
    "rwkv": Model("Rwkv", "RwkvConfig", SIZES | {"intermediate_size": 72}),
    "rwkv-rescaled": Model("Rwkv", "RwkvConfig", SIZES | {"rescale_every": 2, "tie_word_embeddings": True}),
    "lfm2_moe": Model(
        "Lfm2Moe", "Lfm2MoeConfig",
        SIZES | HEADS | {"norm_eps": EPS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "routed_scaling_factor": 1.5},
    ),
    "falcon_mamba": Model("FalconMamba", "FalconMambaConfig", SIZES | MAMBA | {"mixer_rms_eps": 1e-2}),
    "falcon_h1": Model(
        "FalconH1", "FalconH1Config",
        SIZES | ATTENTION | SSD | {"mamba_d_ssm": 96, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0}
        | {"mlp_multipliers": [1.5, 0.6], "key_multiplier": 0.8, "attention_in_multiplier": 1.2}
        | {"attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.6}
        | {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.3], "head_dim": 10} | rope(rope_theta=1e5),
    ),
    "falcon_h1-norm": Model(
        "FalconH1", "FalconH1Config",
        SIZES | ATTENTION | SSD | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "tie_word_embeddings": True}
        | {"time_step_limit": (0.1, 0.9)},
    ),
    "nemotron_h": Model(
        "NemotronH", "NemotronHConfig",
        {name: x for name, x in SIZES.items() if name != "num_hidden_layers"} | HEADS | {"layer_norm_epsilon": EPS}
        | {"head_dim": 10, "ssm_state_size": 7, "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 3}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]}
        | {"time_step_min": 0.3, "n_routed_experts": 6, "moe_intermediate_size": 12, "routed_scaling_factor": 1.7}
        | {"moe_shared_expert_intermediate_size": 9, "moe_latent_size": 20, "n_group": 3, "topk_group": 2},
    ),
    "nemotron_h-dense": Model(
        "NemotronH", "NemotronHConfig",
        {name: x for name, x in SIZES.items() if name != "num_hidden_layers"} | HEADS | {"layer_norm_epsilon": EPS}
        | {"head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "tie_word_embeddings": True},
    ),
    "granitemoehybrid": Model(
        "GraniteMoeHybrid", "GraniteMoeHybridConfig",
        SIZES | ATTENTION | SSD | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"embedding_multiplier": 3.0, "logits_scaling": 6.0, "residual_multiplier": 0.22, "mamba_expand": 3}
        | {"attention_multiplier": 0.3, "num_local_experts": 5, "shared_intermediate_size": 20},
    ),
    "granitemoehybrid-dense": Model(
        "GraniteMoeHybrid", "GraniteMoeHybridConfig",
        SIZES | ATTENTION | SSD | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"position_embedding_type": "rope", "num_local_experts": 0, "shared_intermediate_size": 20}
        | {"mamba_expand": 3, "tie_word_embeddings": True},
    ),
    "minimax": Model(
        "MiniMax", "MiniMaxConfig",
        SIZES | ATTENTION | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 6}
        | {"num_local_experts": 5, "block_size": 8} | rope(rope_theta=100.0)
        | {f"{x}_alpha_factor": 1.7 for x in ("full_attn", "linear_attn", "mlp")}
        | {f"{x}_beta_factor": 0.9 for x in ("full_attn", "linear_attn", "mlp")},
    ),
}  # fmt: skip


def write(folder: Path, name: str, dtype: torch.dtype = torch.float32, fields: dict[str, Any] | None = None) -> None:
    """Write a random model to a folder. A_log, dt_bias and gated norms are stored in float32, as on the hub.

    Args: fields: of the config, beside those in `MODELS`.
    """
    import transformers

    model = MODELS[name]
    config = getattr(transformers, model.config)(**model.fields | (fields or {}))
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{model.name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.05 if key.endswith("b_proj.weight") else 0.2))
            if not key.endswith(("A_log", "dt_bias", "linear_attn.norm.weight", ".D")):
                parameter.data = parameter.data.to(dtype)
        for key, buffer in theirs.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.rand_like(buffer))
    theirs.config.dtype = dtype
    theirs.save_pretrained(folder)
