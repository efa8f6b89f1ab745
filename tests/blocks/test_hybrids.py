"""Whole hybrids against transformers' models with the same random weights: logits, and the gradient of the embedding.

The presets have the layers of these stacks at the published sizes; the maps between the mixers' parameters are those of
the mixers' tests.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import oracles
import pytest
import torch
import torch.nn.functional as F
from oracles import WIDTH, Oracle, Tensors
from torch import Tensor

from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers.core.conformance import relative_error

pytest.importorskip("transformers", minversion="5.23", reason="older versions have no OLMo Hybrid and Kimi Linear")

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-4  # relative RMS error between two float32 models
VOCAB = 29
VOCABULARY = {"vocab_size": VOCAB, "pad_token_id": None}  # a padding token would have no gradient
SIZES = {**VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA2 = {"mixer": "mamba2", "heads": 2, "key_width": 6, "value_width": 8}
ATTENTION = {"mixer": "attention", "heads": 4, "key_value_heads": 2}


class Family(NamedTuple):
    """A model of transformers and the stack that must equal it.

    Args:
        config: the fields of their config.
        stack: the fields of our StackSpec.
        oracle: chooses the map of a mixer's parameters from the parameters.
        norms: the names of a layer's norms, of the mixers and of the MLP.
        mlp: the name of a layer's MLP.
        fold: changes their parameters before the map.
        arguments: of their forward.
    """

    config: dict[str, Any]
    stack: dict[str, Any]
    oracle: Callable[[Tensors], type[Oracle]]
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    mlp: str = "mlp"
    fold: Callable[[Tensors], Tensors] = lambda w: w
    arguments: dict[str, Any] | None = None


def add_one_to_norms(w: Tensors) -> Tensors:
    """Their norms multiply by 1 + weight, except the one of Gated DeltaNet's output."""
    shifted = {k: "norm" in k and k.endswith("weight") and "linear_attn" not in k for k in w}
    return {name: weight + 1 if shifted[name] else weight for name, weight in w.items()}


def rename_olmo_norms(w: Tensors) -> Tensors:
    """Name the norms after the branches of an attention layer as those before the branches of the other layers."""
    renamed = {}
    for name, weight in w.items():
        layer = name.partition("_layernorm")[0].rpartition(".")[0]
        if f"{layer}.post_feedforward_layernorm.weight" in w:
            name = name.replace("post_attention_layernorm", "input_layernorm")
            name = name.replace("post_feedforward_layernorm", "post_attention_layernorm")
        renamed[name] = weight
    return renamed


FALCON_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [1.5, 0.6],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.3],
}


def fold_falcon_multipliers(w: Tensors) -> Tensors:
    """Multiply the weights by the multipliers of the maps' outputs; then no multiplier is left."""
    m = FALCON_MULTIPLIERS
    ssm = torch.cat([torch.full((n,), s) for n, s in zip([64, 64, 12, 12, 8], m["ssm_multipliers"], strict=True)])
    factors = {
        "embed_tokens.weight": m["embedding_multiplier"],
        "lm_head.weight": m["lm_head_multiplier"],
        "q_proj.weight": m["attention_in_multiplier"],
        "k_proj.weight": m["attention_in_multiplier"] * m["key_multiplier"],
        "v_proj.weight": m["attention_in_multiplier"],
        "o_proj.weight": m["attention_out_multiplier"],
        "mamba.in_proj.weight": m["ssm_in_multiplier"] * ssm[:, None],
        "mamba.out_proj.weight": m["ssm_out_multiplier"],
        "gate_proj.weight": m["mlp_multipliers"][0],
        "down_proj.weight": m["mlp_multipliers"][1],
    }
    return {name: weight * next((f for k, f in factors.items() if name.endswith(k)), 1) for name, weight in w.items()}


FAMILIES = {
    "FalconH1": Family(
        {
            **SIZES,
            **FALCON_MULTIPLIERS,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "mamba_d_ssm": 64,
        }
        | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2},
        {
            "pattern": "mamba2 | attn",
            "layers": {"mamba2": MAMBA2 | {"norm": False}, "attn": ATTENTION},
            "norm_eps": 1e-5,
        }
        | {"mlp": {"width": 20}, "depth": 2},
        lambda w: oracles.Mamba2Oracle if "A_log" in w else oracles.Llama,
        norms=("input_layernorm", "pre_ff_layernorm"),
        mlp="feed_forward",
        fold=fold_falcon_multipliers,
    ),
    "Jamba": Family(
        {**SIZES, "intermediate_size": 20, "num_hidden_layers": 3, "num_experts": 4, "mamba_d_state": 5}
        | {"mamba_dt_rank": 3, "attn_layer_period": 3, "attn_layer_offset": 2},
        {"pattern": "mamba + sparse + attn", "depth": 3, "mlp": {"width": 20}}
        | {
            "layers": {
                "mamba": (mamba := {"mixer": "mamba", "state_size": 5, "step_rank": 3, "inner_norm": "weighted"})
                | {"norm_eps": 1e-6},
                "sparse": {
                    "mixer": mamba | {"norm_eps": 1e-6},
                    "mlp": {"type": "moe", "width": 20, "experts": 4, "active": 2, "normalize": False},
                },
                "attn": ATTENTION | {"rotary_theta": None},
            }
        },
        lambda w: oracles.Jamba if "A_log" in w else oracles.Llama,
        norms=("input_layernorm", "pre_ff_layernorm"),
        mlp="feed_forward",
    ),
    "MiniMax": Family(
        {
            **SIZES,
            "head_dim": 8,
            "intermediate_size": 20,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "block_size": 8,
        }
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "linear_attn_alpha_factor": 1.7}
        | {"layer_types": 2 * ["linear_attention"] + ["full_attention"]}
        | {"full_attn_alpha_factor": 1.7, "mlp_alpha_factor": 1.7},
        {"pattern": "2*lightning + attn", "depth": 3, "norm_position": "post", "residual_scale": 1.7, "norm_eps": 1e-5}
        | {"mlp": {"type": "moe", "width": 20, "experts": 4, "active": 2}}
        | {
            "layers": {
                "lightning": {"mixer": "lightning_attention", "heads": 4, "key_width": 8, "value_width": 8},
                "attn": ATTENTION | {"rotary_theta": 1e6},
            }
        },
        lambda w: oracles.MiniMax if "qkv_proj.weight" in w else oracles.Llama,
    ),
    "NemotronH": Family(
        {**SIZES, "head_dim": 8, "intermediate_size": 20, "hybrid_override_pattern": "M-*M", "mamba_num_heads": 8}
        | {"mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8},
        {"pattern": "mamba2 + mlp + attn + mamba2", "depth": 4, "norm_eps": 1e-5}
        | {
            "layers": {
                "mamba2": {"mixer": MAMBA2, "mlp": "none"},
                "mlp": {"mixer": "none", "mlp": {"width": 20, "activation": "relu2", "gated": False}},
                "attn": {"mixer": ATTENTION | {"rotary_theta": None}, "mlp": "none"},
            }
        },
        lambda w: oracles.Mamba2Oracle if "A_log" in w else oracles.Llama,
        norms=("norm", "norm"),
        mlp="mixer",
    ),
    "OlmoHybrid": Family(
        {
            **SIZES,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {"rope_theta": None},
        }
        | {k: v for k, v in oracles.GatedDelta.sizes.items() if k.startswith("linear")},
        {"pattern": "gdn + attn", "depth": 2, "mlp": {"width": 20}}
        | {
            "layers": {
                "gdn": {"mixer": "gated_deltanet", "heads": 2, "value_heads": 4, "key_width": 8, "value_width": 6}
                | {"negative_eigenvalues": "both"},
                "attn": {
                    "mixer": ATTENTION | {"rotary_theta": None, "qk_norm": "all"},
                    "norm_position": "output",
                },
            }
        },
        lambda w: oracles.OlmoHybrid if "A_log" in w else oracles.OlmoHybridAttention,
        fold=rename_olmo_norms,
    ),
    "Qwen3Next": Family(
        {**SIZES, "head_dim": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 10,
        }
        | {k: v for k, v in oracles.GatedDelta.sizes.items() if k.startswith("linear")},
        {"pattern": "gdn + attn", "depth": 2}
        | {"mlp": {"type": "moe", "width": 12, "experts": 4, "active": 2, "shared_width": 10, "shared_gate": True}}
        | {
            "layers": {
                "gdn": {"mixer": "gated_deltanet", "heads": 2, "value_heads": 4, "key_width": 8, "value_width": 6}
                | {"norm_eps": 1e-6},
                "attn": ATTENTION | {"head_width": 16, "rotary_fraction": 0.25, "qk_norm": "head", "gate": True},
            }
        },
        lambda w: oracles.Qwen3NextDelta if "A_log" in w else oracles.Qwen3NextAttention,
        fold=add_one_to_norms,
    ),
    "Qwen3_5": Family(
        {**SIZES, "head_dim": 16, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        | {"intermediate_size": 20}
        | {k: v for k, v in oracles.GatedDelta.sizes.items() if k.startswith("linear")},
        {"pattern": "gdn + attn", "depth": 2, "mlp": {"width": 20}}
        | {
            "layers": {
                "gdn": {"mixer": "gated_deltanet", "heads": 2, "value_heads": 4, "key_width": 8, "value_width": 6}
                | {"norm_eps": 1e-6},
                "attn": ATTENTION | {"head_width": 16, "rotary_fraction": 0.25, "qk_norm": "head", "gate": True},
            }
        },
        lambda w: oracles.Qwen35Delta if "A_log" in w else oracles.Qwen3NextAttention,
        fold=add_one_to_norms,
    ),
    "RecurrentGemma": Family(  # from position 1 on: at position 0 their module omits a factor of the paper
        {**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 40, "num_hidden_layers": 3}
        | {"attention_window_size": 5},
        {"pattern": "2*rglru + swa", "depth": 3, "embedding_scale": 5.65625, "logit_cap": 30.0, "tied": True}
        | {"mlp": {"width": 20, "activation": "gelu", "bias": True}}
        | {
            "layers": {
                "rglru": {"mixer": "rg_lru", "blocks": 2},
                "swa": {
                    "mixer": "sliding_window",
                    "heads": 2,
                    "key_value_heads": 1,
                    "rotary_fraction": 0.5,
                    "window": 5,
                }
                | {"out_bias": True},
            }
        },
        lambda w: oracles.RecurrentGemma if "linear_x.weight" in w else oracles.Llama,
        norms=("temporal_pre_norm", "channel_pre_norm"),
        mlp="mlp_block",
        fold=add_one_to_norms,
        arguments={"position_ids": torch.arange(1, 20)[None], "use_cache": False},
    ),
    "KimiLinear": Family(
        {
            **oracles.MLA_SIZES,
            **VOCABULARY,
            "intermediate_size": 20,
            "num_hidden_layers": 3,
            "linear_num_heads": 3,
        }
        | {"linear_head_dim": 8, "moe_intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        {"pattern": "first + kda + attn", "depth": 3, "norm_eps": 1e-5}
        | {
            "layers": {
                "first": {"mixer": (kda := {"mixer": "kda", "heads": 3, "key_width": 8, "value_width": 8})}
                | {"mlp": {"width": 20}},
                "kda": kda,
                "attn": {"mixer": "mla", "heads": 4, "key_width": 6, "value_width": 5, "latent_width": 7}
                | {"rotary_width": 4, "rotary_theta": None},
            }
        }
        | {
            "mlp": {"type": "moe", "width": 12, "experts": 4, "active": 2, "scores": "sigmoid", "selection_bias": True}
            | {"scale": 2.446, "shared_width": 12}
        },
        lambda w: oracles.KimiLinear if "A_log" in w or "forget_gate.A_log" in w else oracles.KimiLinearAttention,
    ),
}


def under(prefix: str, w: Tensors) -> Tensors:
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in w.items() if name.startswith(f"{prefix}.")}


def mlp_parameters(w: Tensors) -> Tensors:
    """Map a dense MLP or a mixture of experts."""
    if "experts.down_proj" in w:
        router = "router.weight" if "router.weight" in w else "gate.weight"
        ours = {
            "router.weight": w[router],
            "to_hidden.weight": w["experts.gate_up_proj"],
            "out.weight": w["experts.down_proj"],
        }
        for name in ("shared_expert", "shared_experts"):
            ours |= {f"shared.{key}": tensor for key, tensor in mlp_parameters(under(name, w)).items()}
        return ours | (
            {"shared_gate.weight": w["shared_expert_gate.weight"]} if "shared_expert_gate.weight" in w else {}
        )
    inputs = [name for name in ("gate_proj", "up_proj") if f"{name}.weight" in w]
    ours = {}
    for kind in ("weight", "bias"):
        if f"down_proj.{kind}" in w:
            ours[f"to_hidden.{kind}"] = torch.cat([w[f"{name}.{kind}"] for name in inputs])
            ours[f"out.{kind}"] = w[f"down_proj.{kind}"]
    return ours


def mixer_parameters(w: Tensors, oracle: type[Oracle]) -> Tensors:
    """Map the parameters of a mixer, whose output norm or output bias may be missing."""
    ours = object.__new__(oracle).map_parameters({"norm.weight": torch.zeros(0), **w})
    bias = {"out.bias": w["o_proj.bias"]} if "o_proj.bias" in w else {}
    return {name: tensor for name, tensor in ours.items() if tensor.numel()} | bias


def layer_parameters(w: Tensors, family: Family) -> Tensors:
    children = dict.fromkeys(name.partition(".")[0] for name in w)
    mixers = [
        under(child, w)
        for child in ("mamba", "linear_attn", "self_attn", "temporal_block", "mixer")
        if child in children
    ]
    mixers = [mixer for mixer in mixers if not (family.mlp == "mixer" and "up_proj.weight" in mixer)]
    ours = {"norm.weight": w[f"{family.norms[0]}.weight"]} if mixers and f"{family.norms[0]}.weight" in w else {}
    for i, mixer in enumerate(mixers):
        ours |= {f"mixers.{i}.{name}": x for name, x in mixer_parameters(mixer, family.oracle(mixer)).items()}
    mlp = mlp_parameters(under(family.mlp, w))
    if mlp:
        ours |= {"mlp_norm.weight": w[f"{family.norms[1]}.weight"]} | {f"mlp.{name}": x for name, x in mlp.items()}
    return ours


def stack_parameters(w: Tensors, family: Family, depth: int) -> Tensors:
    w = family.fold({name.removeprefix("model."): tensor for name, tensor in w.items()})
    norm = next(n for n in ("norm", "final_layernorm", "final_norm", "norm_f") if f"{n}.weight" in w)
    embedding = next(n for n in ("embed_tokens", "embeddings") if f"{n}.weight" in w)
    ours = {"embedding.weight": w[f"{embedding}.weight"], "stack.norm.weight": w[f"{norm}.weight"]}
    if "lm_head.weight" in w:
        ours["head.weight"] = w["lm_head.weight"]
    for i in range(depth):
        ours |= {f"stack.layers.{i}.{name}": x for name, x in layer_parameters(under(f"layers.{i}", w), family).items()}
    return ours


def unchanged(key: str, parameter: Tensor) -> None:
    """Keep the random weights."""


def same_weights(
    name: str, change: Callable[[str, Tensor], None] = unchanged
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return transformers' model and the stack with equal random weights. Args: change: edits a parameter by name."""
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, f"{name}{'Text' if name == 'Qwen3_5' else ''}Config")(**family.config)
    config._attn_implementation = "eager"
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.4))
            change(key, parameter)
    spec = StackSpec(**{"width": WIDTH, "vocab": VOCAB, "tied": False, **family.stack})
    ours = spec.build("reference")
    weights = stack_parameters(dict(theirs.named_parameters()), family, spec.depth)
    missing = ours.load_state_dict({key: x.detach().clone() for key, x in weights.items()}, strict=False)
    assert not missing.unexpected_keys
    assert all(key.endswith("router.bias") for key in missing.missing_keys)  # a buffer that is 0 in both
    return theirs, ours


def random_tokens() -> Tensor:
    return torch.randint(VOCAB, (1, 19), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(name: str) -> None:
    theirs, ours = same_weights(name)
    tokens = random_tokens()
    expected, actual = theirs(tokens, **(FAMILIES[name].arguments or {})).logits, ours(tokens)[0]
    assert relative_error(actual, expected) < OUTPUT_TOLERANCE
    F.cross_entropy(expected[0, :-1], tokens[0, 1:]).backward()
    F.cross_entropy(actual[0, :-1], tokens[0, 1:]).backward()
    gradient = theirs.get_input_embeddings().weight.grad
    scale = FALCON_MULTIPLIERS["embedding_multiplier"] if name == "FalconH1" else 1
    assert relative_error(ours.embedding.weight.grad * scale, gradient) < GRADIENT_TOLERANCE


def small_dt(key: str, parameter: Tensor) -> None:
    """Make dt = softplus(-8) or so, 3e-4, in every head."""
    if key.endswith("dt_bias"):
        parameter.sub_(8.0)


def saturated_beta(key: str, parameter: Tensor) -> None:
    """Make beta = 2 sigmoid of large numbers."""
    if key.endswith("b_proj.weight"):
        parameter.mul_(20.0)


def test_a_saturated_beta_equals_that_of_transformers() -> None:
    theirs, ours = same_weights("OlmoHybrid", saturated_beta)
    with torch.no_grad():
        expected, actual = theirs(random_tokens()).logits, ours(random_tokens())[0]
    assert relative_error(actual, expected) < OUTPUT_TOLERANCE


def test_the_limit_of_dt_that_only_nemotron_h_has_is_the_only_difference() -> None:
    """Nemotron-H raises dt to 1e-3; docs/sources.md gives the error."""
    theirs, ours = same_weights("NemotronH", small_dt)
    with torch.no_grad():
        expected, actual = theirs(random_tokens()).logits, ours(random_tokens())[0]
        assert relative_error(actual, expected) > 10 * OUTPUT_TOLERANCE
        for module in theirs.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, float("inf"))
        assert relative_error(actual, theirs(random_tokens()).logits) < OUTPUT_TOLERANCE
