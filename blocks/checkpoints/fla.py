"""What the models of flash-linear-attention have in common: sizes, SwiGLU, attention in some layers, and names."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Packed, Rule, Side, rule, under
from deltazoo.blocks.checkpoints.values import SIZE
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.attention import Attention, AttentionConfig, SlidingWindow
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.core.part import HeadShape

NAMES = decoder.Names(
    embedding="model.embeddings.weight",
    layer_norm="attn_norm.weight",
    mlp_norm="mlp_norm.weight",
    eps="norm_eps",
)
_SMALL = {"num_heads": 1, "head_dim": 8}  # of the mixer that is written for a stack of attention alone
ATTENTION_FIELDS = ("layers", "num_heads", "num_kv_heads", "qkv_bias", "qk_norm", "window_size", "rope_theta")


class Fla(Family):
    """A family of flash-linear-attention: one kind of mixer, and softmax attention in the layers of `attn`."""

    library: ClassVar[str] = "flash-linear-attention"
    ignored: ClassVar[tuple[str, ...]] = (
        "attn_mode", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm", "fuse_swiglu",
        "share_conv_kernel", "use_l2warp",
    )  # fmt: skip

    @abstractmethod
    def mixer(self, config: HubConfig) -> MixerConfig:
        """Return the mixer. Raises: ConfigError."""

    @abstractmethod
    def mixer_config(self, mixer: Any, width: int) -> dict[str, Any]:
        """Return the fields that `mixer` reads."""

    @abstractmethod
    def mixer_rules(self, mixer: Any, width: int) -> list[Rule]:
        """Return the rules of the mixer."""

    def stack(self, config: HubConfig) -> dict[str, Any]:
        config.require(attnres_block_size=None, elementwise_affine=True, hidden_act="swish")
        layers: dict[str, MixerConfig] = {"linear": self.mixer(config)}
        fields = config.nested("attn", ATTENTION_FIELDS)
        attends = fields.get("layers", [])
        if attends:
            layers["attention"] = _attention(fields)
        names = ["attention" if i in attends else "linear" for i in range(config["num_hidden_layers"])]
        width, ratio = config["hidden_size"], config.get("hidden_ratio", 4.0)
        hidden = config.get("intermediate_size", 256 * -(-int(width * ratio * 2 / 3) // 256))
        return {
            "width": width,
            "depth": len(names),
            "vocab": config["vocab_size"],
            "tied": config.get("tie_word_embeddings", False),
            "norm_eps": config.get("norm_eps", 1e-6),
            "pattern": " + ".join(names),
            "layers": {name: layer for name, layer in layers.items() if name in names},
            "mlp": Dense(width=hidden),
        }

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        layers = spec.expand()
        attends = [i for i, layer in enumerate(layers) if isinstance(layer.mixers[0], AttentionConfig)]
        others = [layer.mixers[0] for i, layer in enumerate(layers) if i not in attends]
        mixer = others[0] if others else self.mixer(HubConfig(_SMALL | {"hidden_size": spec.width}, "of fla"))
        mlp = layers[0].mlp
        assert isinstance(mlp, Dense)
        sizes = decoder.sizes_config(spec, NAMES)
        return {
            **{field: value for field, value in sizes.items() if field != "hidden_act"},
            "hidden_act": "swish",
            "intermediate_size": mlp.hidden(spec.width),
            "attn": _attention_config(layers[attends[0]].mixers[0], attends, spec.width) if attends else None,
            **self.mixer_config(mixer, spec.width),
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mlp, Dense)
        rules = parts.attention(mixer, width) if isinstance(mixer, AttentionConfig) else self.mixer_rules(mixer, width)
        return under("mixers.0.", "attn.", rules) + under("mlp.", "mlp.", parts.dense_mlp(mlp, width))


def convolutions(streams: str) -> dict[str, str | Packed]:
    """Return their convolutions of q, k and v. Args: streams: some of "qkv"."""
    return {f"{x}_conv1d.weight": Packed(x, axes=(1,)) for x in streams}


def qkv(keys: int, values: int, conv_width: int, queries: int | None = None) -> list[Rule]:
    """Return the rules of the maps to q, k and v and of their convolutions. Args: the numbers of channels."""
    sizes = {"q": queries or keys, "k": keys, "v": values}
    ours: Side = {"project.conv.weight": "q k v"}
    rules = [rule({"project.to_qkv.weight": "q k v"}, parts.QKV, sizes)]
    return [*rules, rule(ours, convolutions("qkv"), sizes)] if conv_width else rules


def conv_width(config: HubConfig, default: bool = True) -> int:
    """Return the width of the short convolution, 0 if there is none. Args: default: whether there usually is one."""
    width: int = config.get("conv_size", 4)
    return width if config.get("use_short_conv", default) else 0


def conv_config(width: int) -> dict[str, Any]:
    """Return the fields that `conv_width` reads."""
    return {"use_short_conv": bool(width), "conv_size": width or 4}


def expanded(config: HubConfig, field: str, default: float, heads: int) -> int:
    """Return the width of a head whose field is the ratio of all heads' widths to that of the model."""
    return round(config.get(field, default) * config["hidden_size"]) // heads


def expansions(shape: HeadShape, width: int) -> dict[str, Any]:
    """Return the fields that `expanded` reads, and the number of heads."""
    return {
        "num_heads": shape.heads,
        "expand_k": shape.heads * shape.key_width / width,
        "expand_v": shape.heads * shape.value_width / width,
    }


def _attention(fields: HubConfig) -> Attention | SlidingWindow:
    fields.require(qkv_bias=False, qk_norm=False)
    heads, theta = fields["num_heads"], fields.get("rope_theta", 10000.0)
    sizes = {"heads": heads, "key_value_heads": fields.get("num_kv_heads", heads), "rotary_theta": float(theta)}
    if window := fields.get("window_size", like=SIZE):
        return SlidingWindow(**sizes, window=window)
    return Attention(**sizes)


def _attention_config(mixer: MixerConfig, places: Sequence[int], width: int) -> dict[str, Any]:
    assert isinstance(mixer, AttentionConfig)
    heads, key_value_heads, _ = mixer.resolve_heads(width)
    return {
        "layers": [*places],
        "num_heads": heads,
        "num_kv_heads": key_value_heads,
        "qkv_bias": False,
        "window_size": mixer.window_or_none(),
        "rope_theta": mixer.rotary_theta,
    }
