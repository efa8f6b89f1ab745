"""RWKV-6 in folders of flash-linear-attention."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import fla, rwkv
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed, rule
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers import rwkv6
from deltazoo.mixers.rwkv_channel_mix import RWKVChannelMix

OURS, THEIRS = "w k v r g", "r w k v g"  # the streams of the token shift
NAMES = {
    "project.mix_x": "x_proj.0.mu",
    **{f"project.to_{x}.weight": f"{x}_proj.linear.weight" for x in "rkvg"},
    "out.weight": "o_proj.weight",
    "outputs.bonus.u": "bonus",
    "outputs.norm.weight": "g_norm.weight",
    "outputs.norm.bias": "g_norm.bias",
}


class RWKV6(Family):
    """RWKV-6."""

    architecture: ClassVar[str] = "RWKV6ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = (*fla.Fla.ignored, "hidden_ratio")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(attn=None, hidden_act="sqrelu", norm_bias=True, norm_first=True)
        width, heads, eps = config["hidden_size"], config.get("num_heads", 4), config.get("norm_eps", 1e-5)
        mixer = rwkv6.RWKV6(
            heads=heads,
            key_width=fla.expanded(config, "expand_k", 0.5, heads),
            value_width=fla.expanded(config, "expand_v", 1.0, heads),
            mix_rank=config.get("proj_low_rank_dim", 32),
            decay_rank=config.get("gate_low_rank_dim", 64),
            norm_eps=eps,
        )
        hidden = config.get("intermediate_size", 32 * -(-int(width * config.get("hidden_ratio", 3.5)) // 32))
        return rwkv.stack(config, eps, mixer, RWKVChannelMix(hidden=hidden, gate=True))

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        time, _ = rwkv.mixers(spec)
        return {
            **rwkv.config(spec),
            "norm_eps": spec.norm_eps,
            "hidden_act": "sqrelu",
            "proj_low_rank_dim": time.mix_rank,
            "gate_low_rank_dim": time.decay_rank,
            **fla.expansions(time.shape(spec.width), spec.width),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        (time, _), width = rwkv.mixers(spec), spec.width
        sizes = [dict.fromkeys(OURS.split(), rows) for rows in (width, time.mix_rank)]
        time_mix = [
            rule({"project.mix": Packed(OURS, stack=5)}, {"x_bias": Packed(THEIRS, stack=5)}, sizes[0]),
            rule({"project.mix_down.weight": OURS}, {"x_proj.0.linear.weight": THEIRS}, sizes[1]),
            rule(
                {"project.mix_up": Packed(OURS, stack=5)},
                {"x_proj.2.weight": Packed(THEIRS, transposed=True)},
                sizes[1],
            ),
            *rwkv.low_rank("project.decay", "w_proj.linear"),
            *renamed(NAMES),
        ]
        names = {"to_k.weight": "key.linear.weight", "to_r.weight": "receptance.linear.weight"}
        mixed = {"key.mu": Packed("k"), "receptance.mu": Packed("r")}
        channel_mix = [
            rwkv.mix("mix_weight", mixed, width),
            *renamed(names | {"out.weight": "value.weight"}),
        ]
        return rwkv.rules(spec, rwkv.Names(), lambda block: time_mix, channel_mix)
