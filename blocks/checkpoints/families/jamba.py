"""Jamba: Mamba with normalised operands, attention without positions in some layers, and experts in others."""

from collections.abc import Sequence
from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.families.bamba import NAMES
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.attention import Attention
from deltazoo.mixers.mamba import Mamba


class Jamba(Family):
    """Jamba 1 and 1.5; sliding windows are refused."""

    architecture: ClassVar[str] = "JambaForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = (
        "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep",
        "calc_logits_for_entire_prompt",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(mamba_conv_bias=True, mamba_proj_bias=False)
        width, depth = config["hidden_size"], config["num_hidden_layers"]
        rank = config.get("mamba_dt_rank", "auto")
        mamba = Mamba(
            channels=config.get("mamba_expand", 2) * width,
            state_size=config.get("mamba_d_state", 16),
            step_rank=-(-width // 16) if rank == "auto" else rank,
            conv_width=config.get("mamba_d_conv", 4),
            inner_norm="weighted",
            norm_eps=config["rms_norm_eps"],
        )
        attention = decoder.attention(config, rotary_theta=None)
        hidden, count = config["intermediate_size"], config.get("num_experts", 16)
        dense = Dense(width=hidden)
        active = config.get("num_experts_per_tok", 2)
        moe = MoE(width=hidden, experts=count, active=active, normalize=False) if count > 1 else dense
        attends = self._places(config, "attn_layer", 8, 4)
        sparse = self._places(config, "expert_layer", 2, 1)
        names = [("attention" if i in attends else "mamba") + ("_moe" if i in sparse else "") for i in range(depth)]
        layers = {
            name: LayerSpec(mixer=attention if "attention" in name else mamba, mlp=moe if "_moe" in name else dense)
            for name in dict.fromkeys(names)
        }
        return {**decoder.sizes(config), "pattern": " + ".join(names), "layers": layers, "mlp": dense}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layers = spec.expand()
        mamba = decoder.first(spec, Mamba, Mamba(channels=2 * spec.width))
        moes = [layer.mlp for layer in layers if isinstance(layer.mlp, MoE)]
        widths = {layer.mlp.hidden(spec.width) for layer in layers if layer.mlp != "none"}  # type: ignore[union-attr]
        attention = decoder.attention_config(decoder.first_attention(spec), spec.width)
        return {
            **decoder.sizes_config(spec),
            **{field: attention[field] for field in ("num_attention_heads", "num_key_value_heads")},
            **self._period("attn_layer", [type(layer.mixers[0]) is Attention for layer in layers]),
            **self._period("expert_layer", [isinstance(layer.mlp, MoE) for layer in layers]),
            "num_experts": moes[0].experts if moes else 1,
            "num_experts_per_tok": moes[0].active if moes else 1,
            "intermediate_size": widths.pop(),
            "mamba_expand": mamba.shape(spec.width).value_heads // spec.width,
            "mamba_d_state": mamba.state_size,
            "mamba_dt_rank": mamba.step_rank or -(-spec.width // 16),
            "mamba_d_conv": mamba.conv_width,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, Dense | MoE)
        branch = (
            parts.dense_mlp(mlp, width)
            if isinstance(mlp, Dense)
            else parts.experts(mlp, width, parts.ExpertNames("router"))
        )
        rules = under("mlp.", "feed_forward.", branch)
        if isinstance(mixer, Attention):
            return rules + under("mixers.0.", "self_attn.", parts.attention(mixer, width))
        assert isinstance(mixer, Mamba)
        return rules + under("mixers.0.", "mamba.", parts.mamba(mixer, mixer.shape(width).value_heads))

    @staticmethod
    def _places(config: HubConfig, field: str, period: int, offset: int) -> range:
        start, step = config.get(f"{field}_offset", offset), config.get(f"{field}_period", period, least=1)
        if start >= step:
            raise ConfigError(f"config.json: {field}_offset must be less than {field}_period = {step}, got {start}")
        return range(start, config["num_hidden_layers"], step)

    @staticmethod
    def _period(field: str, chosen: Sequence[bool]) -> dict[str, int]:
        places = [i for i, is_chosen in enumerate(chosen) if is_chosen] or [len(chosen)]
        period = places[1] - places[0] if len(places) > 1 else len(chosen) + 1
        return {f"{field}_offset": places[0], f"{field}_period": period}
