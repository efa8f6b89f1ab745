"""RWKV-7 in folders of flash-linear-attention, and in the `.pth` files of its authors."""

from typing import Any, ClassVar

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.blocks.checkpoints import fla, rwkv
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed, rule
from deltazoo.blocks.checkpoints.values import SIZE, check_value
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers import rwkv7
from deltazoo.mixers.parts.low_rank import Ranks
from deltazoo.mixers.rwkv_channel_mix import RWKVChannelMix

STREAMS = "rwkvag"
NAMES = {
    "project.to_r.weight": "r_proj.weight", "project.to_k.weight": "k_proj.weight",
    "project.to_v.weight": "v_proj.weight", "out.weight": "o_proj.weight", "outputs.bonus.u": "r_k",
    "outputs.norm.weight": "g_norm.weight", "outputs.norm.bias": "g_norm.bias",
}  # fmt: skip
PTH_NAMES = {
    "project.to_r.weight": "receptance.weight", "project.to_k.weight": "key.weight",
    "project.to_v.weight": "value.weight", "out.weight": "output.weight", "outputs.bonus.u": "r_k",
    "outputs.norm.weight": "ln_x.weight", "outputs.norm.bias": "ln_x.bias",
}  # fmt: skip
PTH = rwkv.Names("emb.weight", "blocks", "ln_out", "head.weight", "ln0", ("ln1", "att"), ("ln2", "ffn"))
LOW_RANKS = {"decay": "w", "rate": "a", "value": "v", "gate": "g"}
RANK_FIELDS = {  # and their defaults
    "decay": ("decay_low_rank_dim", 64), "rate": ("a_low_rank_dim", 64), "value": ("v_low_rank_dim", 16),
    "gate": ("gate_low_rank_dim", 128),
}  # fmt: skip
VECTOR = Packed("all", axes=(0, 1))


class RWKV7(Family):
    """RWKV-7 of flash-linear-attention, also with the six weights of the token shift as one tensor `x_x`."""

    architecture: ClassVar[str] = "RWKV7ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = (*fla.Fla.ignored, "num_heads", "hidden_ratio")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(attn=None, hidden_act="sqrelu", norm_bias=True, norm_first=True)
        width, head_width = config["hidden_size"], config.get("head_dim", 64)
        values, heads, eps = config.get("value_dim") or width, width // head_width, config.get("norm_eps", 1e-5)
        sizes = values if isinstance(values, list) else [values]
        for size in sizes:
            check_value("value_dim", size, SIZE, least=1)
        if len({*sizes}) != 1:
            raise ConfigError(f"config.json: value_dim must be the same in all layers, got {cut(values)}")
        mixer = rwkv7.RWKV7(
            heads=heads,
            key_width=head_width,
            value_width=sizes.pop() // heads,
            ranks=Ranks(**{name: config.get(*field) for name, field in RANK_FIELDS.items()}),
            norm_eps=head_width * eps,
        )
        hidden = config.get("intermediate_size", 32 * -(-int(width * config.get("hidden_ratio", 4.0)) // 32))
        return rwkv.stack(config, eps, mixer, RWKVChannelMix(hidden=hidden))

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        time, _ = rwkv.mixers(spec)
        shape, ranks = time.shape(spec.width), time.ranks or Ranks.for_width(spec.width)
        return {
            **rwkv.config(spec),
            "norm_eps": spec.norm_eps,
            "head_dim": shape.key_width,
            "value_dim": [shape.value_heads * shape.value_width] * (len(spec.expand()) // 2),
            "hidden_act": "sqrelu",
            **{field: getattr(ranks, name) for name, (field, _) in RANK_FIELDS.items()},
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        def time_mix(block: int) -> list[Rule]:
            vectors = {f"x_{x}": Packed(x, axes=(0, 1)) for x in STREAMS}
            joined = {"x_x": Packed(" ".join(STREAMS), stack=len(STREAMS))}
            found = [rwkv.mix("project.mix", vectors, spec.width)._replace(other_theirs=joined)]
            for name, x in LOW_RANKS.items():
                if name != "value" or block:
                    found += rwkv.low_rank(f"project.{name}", f"{x}_lora", bias=name != "gate")
            return found + renamed(NAMES | {"project.xi": "k_k", "project.alpha": "k_a"})

        names = {"to_k.weight": "key.weight", "out.weight": "value.weight"}
        channel_mix = [rwkv.mix("mix_weight", {"x_k": Packed("k")}, spec.width), *renamed(names)]
        return rwkv.rules(spec, rwkv.Names(), time_mix, channel_mix)


class RWKV7Pth(RWKV7):
    """RWKV-7 of BlinkDL/RWKV-LM; it is written as a folder of flash-linear-attention, `rwkv7`."""

    written_as: ClassVar[str | None] = "rwkv7"
    dropped: ClassVar[tuple[str, ...]] = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")

    def rules(self, spec: ModelSpec) -> list[Rule]:
        def time_mix(block: int) -> list[Rule]:
            vectors = {f"x_{x}": Packed(x, axes=(0, 1)) for x in STREAMS}
            found = [rwkv.mix("project.mix", vectors, spec.width), *renamed(PTH_NAMES)]
            found += [rule("project.xi", {"k_k": VECTOR}), rule("project.alpha", {"k_a": VECTOR})]
            for name, x in LOW_RANKS.items():
                if name != "value" or block:
                    for i, side in enumerate(("down", "up"), start=1):
                        theirs = {f"{x}{i}": Packed("all", transposed=True)}
                        found.append(rule(f"project.{name}.{side}.weight", theirs))
                    if name != "gate":
                        found.append(rule(f"project.{name}.bias", {f"{x}0": VECTOR}))
            return found

        names = {"to_k.weight": "key.weight", "out.weight": "value.weight"}
        channel_mix = [rwkv.mix("mix_weight", {"x_k": Packed("k", axes=(0, 1))}, spec.width), *renamed(names)]
        return rwkv.rules(spec, PTH, time_mix, channel_mix)
