"""MiniMax-Text-01: Lightning Attention with softmax attention in some layers, and a mixture of experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed, rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.lightning_attention import LightningAttention

EXPERTS = parts.ExpertNames(expert=parts.MlpNames("w1", "w3", "w2"))
OUTPUT_NORM_EPS = 1e-6  # a constant of the model, whatever rms_norm_eps is
BRANCHES = ("full_attn", "linear_attn", "mlp")


class MiniMax(Family):
    """MiniMax-Text-01 (-hf). Tables of decays are computed from the config: not read, but written."""

    architecture: ClassVar[str] = "MiniMaxForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("router_jitter_noise",)
    dropped: ClassVar[tuple[str, ...]] = ("*.slope_rate", "*_decay")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(sliding_window=None)
        depth, heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_width = config.get("head_dim", config["hidden_size"] // heads)
        mixers = {
            "linear_attention": LightningAttention(
                heads=heads, key_width=head_width, value_width=head_width, norm_eps=OUTPUT_NORM_EPS, slopes="power"
            ),
            "full_attention": decoder.attention(config, **config.rotary(theta=1e6)),
        }
        default = ["linear_attention" if i % 2 else "full_attention" for i in range(depth)]
        pattern = decoder.layer_types(config, default)
        hidden, experts = config["intermediate_size"], config["num_local_experts"]
        return {
            **decoder.sizes(config),
            "pattern": pattern,
            "layers": {name: mixer for name, mixer in mixers.items() if name in pattern},
            "mlp": MoE(width=hidden, experts=experts, active=config["num_experts_per_tok"]),
            "norm_position": "post",
            "residual_scale": self._factor(config, "alpha"),
            "branch_scale": self._factor(config, "beta"),
        }

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layer = spec.expand()[0]
        assert isinstance(layer.mlp, MoE)
        attention = decoder.first(spec, Attention, layer.mixers[0])
        if isinstance(attention, LightningAttention):  # the sizes are those of both
            shape = attention.shape(spec.width)
            attention = Attention(heads=shape.heads, key_value_heads=shape.heads, head_width=shape.key_width)
        factors = {"alpha": layer.residual_scale, "beta": layer.branch_scale}
        return {
            **decoder.sizes_config(spec),
            **decoder.attention_config(attention, spec.width),
            **{f"{branch}_{kind}_factor": x for branch in BRANCHES for kind, x in factors.items()},
            "layer_types": decoder.layer_types_config(spec),
            "intermediate_size": layer.mlp.hidden(spec.width),
            "num_local_experts": layer.mlp.experts,
            "num_experts_per_tok": layer.mlp.active,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width))

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, MoE)
        rules = under("mlp.", "block_sparse_moe.", parts.experts(mlp, width, EXPERTS))
        if isinstance(mixer, Attention):
            return rules + under("mixers.0.", "self_attn.", parts.attention(mixer, width))
        assert isinstance(mixer, LightningAttention)
        shape = mixer.shape(width)
        names = {"outputs.norm.weight": "norm.weight", "outputs.gate.proj.weight": "output_gate.weight"}
        linear = [
            rule(
                {"project.to_qkv.weight": "q k v"},
                {"qkv_proj.weight": Packed("q k v", groups=shape.heads)},
                dict.fromkeys("qkv", shape.heads * shape.key_width),
            ),
            *renamed(names | {"out.weight": "out_proj.weight"}),
        ]
        return rules + under("mixers.0.", "self_attn.", linear)

    def constants(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the decays within a block of `block_size` tokens, in float32."""
        tables: dict[str, Tensor] = {}
        for i, layer in enumerate(spec.expand()):
            if not isinstance(layer.mixers[0], LightningAttention):
                continue
            heads, depth = layer.mixers[0].shape(spec.width).heads, len(spec.expand())
            slope = (1 / 2 ** (8 / heads)) ** (torch.arange(heads) + 1)
            slope = (slope * (1 - i / (depth - 1 + 1e-5) + 1e-5))[:, None, None]
            position = torch.arange(size := config.get("block_size", 256)) + 1
            distance = (position[:, None] - position)[None, None]
            within = {
                "query": -slope * position[:, None],
                "key": -slope * (size - position[:, None]),
                "diagonal": torch.where(distance >= 0, -slope * distance, float("-inf")),
            }
            prefix = f"model.layers.{i}.self_attn."
            tables |= {f"{prefix}slope_rate": slope} | {f"{prefix}{x}_decay": y.exp() for x, y in within.items()}
        return tables

    @staticmethod
    def _factor(config: HubConfig, kind: str) -> float:
        """Return the factor that all branches must have."""
        first, *others = (config.get(f"{branch}_{kind}_factor", 1.0) for branch in BRANCHES)
        if any(other != first for other in others):
            raise ConfigError(f"config.json: the {kind} factors of all branches must be equal, got {[first, *others]}")
        return float(first)
