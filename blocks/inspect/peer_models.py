"""Models of other packages with the sizes of a stack, for benchmarks.

A report prints the messages of errors after the name of the package, which they call "it".
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.peers.common import missing_packages
from deltazoo.blocks.checkpoints.families.qwen3_next import experts_config
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers.attention import Attention, AttentionConfig, SlidingWindow
from deltazoo.mixers.core.mixer import MixerConfig
from deltazoo.mixers.core.part import HeadShape
from deltazoo.mixers.gated_deltanet import GatedDeltaNet
from deltazoo.mixers.kda import KDA


def transformers_model(spec: StackSpec, device: str) -> nn.Module:
    """Build a model of transformers: Qwen3.5 for layers of gated_deltanet, Mistral for layers of attention.

    Layers of both with mixtures of experts become Qwen3-Next.

    Raises: ConfigError: the package is not installed, or has no model with these layers.
    """
    _check_installed({"transformers": "transformers"})
    mixers = _mixers(spec)
    common: dict[str, Any] = {
        "vocab_size": spec.vocab, "hidden_size": spec.width, "num_hidden_layers": spec.depth,
        "tie_word_embeddings": spec.tied, "rms_norm_eps": spec.norm_eps,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    package = import_module("transformers")
    delta = [mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet)]
    attention = [mixer for mixer in mixers if isinstance(mixer, Attention)]
    if delta and len(delta) + len(attention) == len(mixers):
        types = ["linear_attention" if isinstance(mixer, GatedDeltaNet) else "full_attention" for mixer in mixers]
        common |= {"layer_types": types, **_qwen_delta(_equal(delta), spec.width)}
        if attention:
            common |= _qwen_attention(_equal(attention), spec.width) | _qwen_experts(spec)
            return package.Qwen3NextForCausalLM(package.Qwen3NextConfig(**common))
        config = package.Qwen3_5TextConfig(**common, intermediate_size=_mlp_width(spec))
        return package.Qwen3_5ForCausalLM(config)
    common["intermediate_size"] = _mlp_width(spec)
    if all(isinstance(mixer, Attention | SlidingWindow) for mixer in mixers):
        mixer = _equal(mixers)
        config = package.MistralConfig(
            **common, **_attention_heads(mixer, spec.width, "num_attention_heads", "num_key_value_heads", "head_dim"),
            sliding_window=mixer.window_or_none(),
            rope_parameters={"rope_type": "default", "rope_theta": mixer.rotary_theta},
            max_position_embeddings=2**20,
        )  # fmt: skip
        return package.MistralForCausalLM(config)
    raise ConfigError(
        "it has no model with these layers; it needs all gated_deltanet, gated_deltanet and attention with experts, or "
        "equal attention."
    )


def fla_model(spec: StackSpec, device: str) -> nn.Module:
    """Build a model of flash-linear-attention: gated_deltanet or kda, alone or with attention layers; attention alone.

    Raises: ConfigError: there is no CUDA device, the package is not installed, or it has no model with these layers.
    """
    if device != "cuda":
        raise ConfigError(f"it needs a CUDA device, got {device!r}.")
    _check_installed({"fla.models": "flash-linear-attention", "transformers": "transformers"})
    package, config = import_module("fla.models"), fla_config(spec)
    model: nn.Module = getattr(package, config.pop("class") + "ForCausalLM")(
        getattr(package, config.pop("config"))(**config)
    )
    return model


def fla_config(spec: StackSpec) -> dict[str, Any]:
    """Return the fields of a config of flash-linear-attention, and the names of its classes. Raises: ConfigError."""
    mixers = _mixers(spec)
    common: dict[str, Any] = {
        "vocab_size": spec.vocab, "hidden_size": spec.width, "num_hidden_layers": spec.depth,
        "intermediate_size": _mlp_width(spec), "tie_word_embeddings": spec.tied, "norm_eps": spec.norm_eps,
    }  # fmt: skip
    recurrent = [mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet | KDA)]
    attention = [mixer for mixer in mixers if isinstance(mixer, Attention | SlidingWindow)]
    if len(recurrent) + len(attention) < len(mixers):
        raise ConfigError("it has no model with these layers; it needs gated_deltanet, kda or attention.")
    names = ("num_heads", "num_kv_heads", "head_dim")
    if not recurrent:
        mixer = _equal(mixers)
        heads = _fla_heads(mixer, spec.width, names)
        extra = {"window_size": mixer.window_or_none(), "rope_theta": mixer.rotary_theta}
        return common | heads | extra | {"class": "Transformer", "config": "TransformerConfig"}
    mixer, name = _equal(recurrent), "KDA" if isinstance(recurrent[0], KDA) else "GatedDeltaNet"
    if mixer.negative_eigenvalues == "erase":
        raise ConfigError("it has no negative_eigenvalues='erase'.")
    shape = _delta_shape(mixer, spec.width, "negative_eigenvalues")
    common |= {
        "head_dim": shape.key_width, "expand_v": shape.value_width / shape.key_width, "num_heads": shape.heads,
        "num_v_heads": shape.value_heads, "conv_size": mixer.conv_width,
        "allow_neg_eigval": mixer.negative_eigenvalues == "both",
    }  # fmt: skip
    if attention:
        first = _equal(attention)
        layers = [i for i, mixer in enumerate(mixers) if isinstance(mixer, AttentionConfig)]
        extra = {"layers": layers, "window_size": first.window_or_none(), "rope_theta": first.rotary_theta}
        common["attn"] = _fla_heads(first, spec.width, names) | extra
    return common | {"class": name, "config": f"{name}Config"}


PEER_MODELS: dict[str, Callable[[StackSpec, str], nn.Module]] = {
    "transformers_model": transformers_model,
    "fla_model": fla_model,
}


def _check_installed(packages: dict[str, str]) -> None:
    if missing := missing_packages({module.partition(".")[0]: package for module, package in packages.items()}):
        raise ConfigError(" ".join(missing))


def _mixers(spec: StackSpec) -> list[MixerConfig]:
    """Return the mixer of each layer. Raises: ConfigError: the layers have a form that the other packages lack."""
    if spec.embedding_scale != 1 or spec.logit_scale != 1 or spec.logit_cap is not None:
        raise ConfigError("it has no embedding_scale, no logit_scale and no logit_cap.")
    if spec.norm != "rms" or spec.embedding_norm:
        raise ConfigError("it has RMS norms, and none after the embedding.")
    mixers = []
    for i, layer in enumerate(spec.expand()):
        if len(layer.mixers) != 1 or layer.norm_position != "pre" or layer.share is not None or layer.is_scaled:
            raise ConfigError(
                f"layer {i} ({layer.title}) must have one mixer, norm_position 'pre', no scales and no share."
            )
        mixers.append(layer.mixers[0])
    return mixers


def _mlp_width(spec: StackSpec) -> int:
    mlps = {layer.mlp for layer in spec.expand()}
    mlp = mlps.pop()
    if mlps or not isinstance(mlp, Dense) or mlp.activation != "silu" or not mlp.gated or mlp.bias:
        raise ConfigError("all layers must have the same dense SwiGLU without biases.")
    return mlp.hidden(spec.width)


def _equal(mixers: list[Any]) -> Any:
    if any(mixer != mixers[0] for mixer in mixers):
        raise ConfigError(f"the layers of {mixers[0].name} must be equal.")
    return mixers[0]


def _delta_shape(mixer: GatedDeltaNet | KDA, width: int, *supported: str) -> HeadShape:
    """Return the sizes of a mixer. Raises: ConfigError: a field that is not `supported` differs from its default."""
    sizes = {"heads", "value_heads", "key_width", "value_width", "conv_width", "norm_eps", *supported}
    defaults = dict(type(mixer)())
    changed = [name for name, value in mixer if name not in sizes and value != defaults[name]]
    if changed:
        raise ConfigError(f"its mixer has no {', '.join(changed)}.")
    return mixer.shape(width).validated()


def _attention_heads(mixer: AttentionConfig, width: int, *names: str) -> dict[str, int]:
    if mixer.gate or mixer.qk_norm or mixer.rotary_theta is None or mixer.rotary_fraction != 1:
        raise ConfigError("attention must have rotary embeddings of all channels, no gate and no qk_norm.")
    return dict(zip(names, mixer.resolve_heads(width), strict=True))


def _qwen_delta(mixer: GatedDeltaNet, width: int) -> dict[str, int]:
    shape = _delta_shape(mixer, width)
    return {
        "linear_num_key_heads": shape.heads, "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.key_width, "linear_value_head_dim": shape.value_width,
        "linear_conv_kernel_dim": mixer.conv_width,
    }  # fmt: skip


def _qwen_attention(mixer: Attention, width: int) -> dict[str, Any]:
    if not mixer.gate or mixer.qk_norm != "head" or mixer.rotary_theta is None:
        raise ConfigError("attention beside gated_deltanet must have a gate, qk_norm='head' and rotary embeddings.")
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    rope = {
        "rope_type": "default", "rope_theta": mixer.rotary_theta, "partial_rotary_factor": mixer.rotary_fraction,
    }  # fmt: skip
    return {**dict(zip(names, mixer.resolve_heads(width), strict=True)), "rope_parameters": rope}


def _qwen_experts(spec: StackSpec) -> dict[str, Any]:
    mlps = {layer.mlp for layer in spec.expand()}
    mlp = mlps.pop()
    if mlps or not isinstance(mlp, MoE) or not mlp.shared_gate or mlp.activation != "silu" or not mlp.gated:
        raise ConfigError("all layers must have the same mixture of gated experts, with a gated shared one.")
    return experts_config(mlp, spec.width) | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _fla_heads(mixer: AttentionConfig, width: int, names: tuple[str, str, str]) -> dict[str, int]:
    heads = _attention_heads(mixer, width, *names)
    if heads.pop("head_dim") * heads["num_heads"] != width:
        raise ConfigError("its attention needs head_width = width / heads.")
    return heads
