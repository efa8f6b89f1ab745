"""RWKV-4 (`-pile`, `-world`) in folders of transformers."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import rwkv
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, renamed
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.mixers import rwkv4
from deltazoo.mixers.rwkv_channel_mix import RWKVChannelMix

NAMES = rwkv.Names(
    embedding="rwkv.embeddings.weight",
    blocks="rwkv.blocks",
    norm="rwkv.ln_out",
    head="head.weight",
    first_norm="pre_ln",
    time=("ln1", "attention"),
    channel=("ln2", "feed_forward"),
)
MAPS = {"k": "key", "v": "value", "r": "receptance"}
EPS = 1e-5  # of ln_out, whatever layer_norm_epsilon is


class RWKV4(Family):
    """RWKV-4. The factors of `rescale_every` cancel out."""

    architecture: ClassVar[str] = "RwkvForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("context_length", "rescale_every")

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(layer_norm_epsilon=EPS)
        width = config["hidden_size"]
        time = rwkv4.RWKV4(channels=config.get("attention_hidden_size", width))
        hidden = config.get("intermediate_size", 4 * width)
        channel = RWKVChannelMix(hidden=hidden, gate=True, mix="current")
        return rwkv.stack(config, EPS, time, channel)

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        time, _ = rwkv.mixers(spec)
        return {
            **rwkv.config(spec),
            "attention_hidden_size": time.shape(spec.width).value_heads,
            "layer_norm_epsilon": EPS,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        def mixed(streams: str) -> dict[str, Packed]:
            return {f"time_mix_{MAPS[x]}": Packed(x, axes=(0, 1)) for x in streams}

        names = {f"project.to_{x}.weight": f"{module}.weight" for x, module in MAPS.items()}
        names |= {"operands.key.w": "time_decay", "outputs.bonus.u": "time_first", "out.weight": "output.weight"}
        time_mix = [rwkv.mix("project.mix", mixed("kvr"), spec.width), *renamed(names)]
        names = {"to_k.weight": "key.weight", "to_r.weight": "receptance.weight", "out.weight": "value.weight"}
        channel_mix = [rwkv.mix("mix_weight", mixed("kr"), spec.width), *renamed(names)]
        return rwkv.rules(spec, NAMES, lambda block: time_mix, channel_mix)
