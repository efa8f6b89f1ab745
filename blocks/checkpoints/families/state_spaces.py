"""Mamba and Mamba-2 in the folders of state-spaces: `pytorch_model.bin` beside a config.json without a model type."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints.families import mamba, mamba2
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.blocks.model.interface import ModelSpec

COMMON = ("layer", "d_state", "d_conv", "expand", "bias", "conv_bias", "chunk_size", "use_mem_eff_path")
IGNORED = ("fused_add_norm", "residual_in_fp32", "attn_cfg", "ssm_cfg")


class StateSpacesMamba(Family):
    """Mamba of state-spaces; folders are written as those of transformers, `mamba`."""

    architecture: ClassVar[str] = "MambaLMHeadModel"
    written_as: ClassVar[str | None] = "mamba"
    aliases: ClassVar[dict[str, str]] = mamba.Mamba.aliases
    ignored: ClassVar[tuple[str, ...]] = IGNORED

    def stack(self, config: HubConfig) -> dict[str, Any]:
        layer = config.nested("ssm_cfg", (*COMMON, "dt_rank"))
        fields = {"time_step_rank": layer.get("dt_rank", "auto"), "state_size": layer.get("d_state", 16)}
        return mamba.Mamba().stack(HubConfig(_common(config, layer) | fields, "mamba"))

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        raise NotImplementedError("it is written as mamba")

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return mamba.Mamba().rules(spec)


class StateSpacesMamba2(Family):
    """Mamba-2 of state-spaces; folders are written as those of transformers, `mamba2`."""

    architecture: ClassVar[str] = "MambaLMHeadModel"
    written_as: ClassVar[str | None] = "mamba2"
    aliases: ClassVar[dict[str, str]] = mamba.Mamba.aliases
    ignored: ClassVar[tuple[str, ...]] = IGNORED

    def stack(self, config: HubConfig) -> dict[str, Any]:
        known = (*COMMON, "headdim", "ngroups", "rmsnorm", "norm_before_gate", "D_has_hdim", "dt_limit")
        layer = config.nested("ssm_cfg", known)
        layer.require(rmsnorm=True, norm_before_gate=False, D_has_hdim=False)
        width, expand, head_width = config["d_model"], layer.get("expand", 2), layer.get("headdim", 64)
        fields = {
            "num_heads": expand * width // head_width,
            "head_dim": head_width,
            "n_groups": layer.get("ngroups", 1),
            "state_size": layer.get("d_state", 128),
            **({"time_step_limit": limits} if (limits := layer.get("dt_limit", like=[])) else {}),
        }
        return mamba2.Mamba2().stack(HubConfig(_common(config, layer) | fields, "mamba2"))

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        raise NotImplementedError("it is written as mamba2")

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return mamba2.Mamba2().rules(spec)


def _common(config: HubConfig, layer: HubConfig) -> dict[str, Any]:
    """Return the fields of transformers that both have. The vocabulary is padded to a multiple."""
    config.require(rms_norm=True, d_intermediate=0, attn_layer_idx=[])
    multiple = config.get("pad_vocab_size_multiple", 8)
    return {
        "hidden_size": config["d_model"],
        "num_hidden_layers": config["n_layer"],
        "vocab_size": multiple * -(-config["vocab_size"] // multiple),
        "tie_word_embeddings": config.get("tie_embeddings", True),
        "layer_norm_epsilon": 1e-5,
        "expand": layer.get("expand", 2),
        "conv_kernel": layer.get("d_conv", 4),
        "use_bias": layer.get("bias", False),
        "use_conv_bias": layer.get("conv_bias", True),
    }
