"""Modules of transformers that mixers must equal, and the map from their parameters to ours.

"Theirs" is the module of transformers, "ours" the mixer of deltazoo.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad

from deltazoo.backends.update.base import Backend
from deltazoo.mixers import (
    KDA,
    MLA,
    MLSTM,
    RGLRU,
    RWKV4,
    Attention,
    GatedDeltaNet,
    LFM2Conv,
    LightningAttention,
    Mamba,
    Mamba2,
    MixerConfig,
)
from deltazoo.mixers.core.mixer import FIRST_PLACE, Mixer, Place
from deltazoo.mixers.parts.rope_scaling import RopeScaling

WIDTH = 32

Tensors = dict[str, Tensor]


class Oracle(ABC):
    """A mixer's config, the module of transformers that it must equal, and the map between their parameters.

    Class attributes: `ours`; `place`, of our mixer; `cached`, whether their decoding cache can be tested;
    `differentiable`, whether their backward pass works.
    """

    ours: ClassVar[MixerConfig]
    place: ClassVar[Place] = FIRST_PLACE
    cached: ClassVar[bool] = True
    differentiable: ClassVar[bool] = True
    config: Any = None
    theirs: nn.Module

    def call(self, x: Tensor, cache: Any) -> Tensor:
        """Run their module."""
        return self.theirs(x, cache_params=cache)

    @abstractmethod
    def map_parameters(self, w: Tensors) -> Tensors:
        """Return their parameters, or the gradients of them, by our names."""

    def cache(self) -> Any:
        """Return an empty cache for their module."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def randomise(self) -> None:
        """Draw all parameters of their module, because some are initialised to constants."""
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))

    def weights(self) -> Tensors:
        """Return a state dict for our mixer."""
        return self.map_parameters(
            {name: parameter.detach().clone() for name, parameter in self.theirs.named_parameters()}
        )

    def gradients(self) -> Tensors:
        """Return their gradients by our names; zeros for parameters without one."""
        grads = {name: parameter.grad for name, parameter in self.theirs.named_parameters()}
        return self.map_parameters({name: torch.zeros(()) if grad is None else grad for name, grad in grads.items()})

    def shared(self, name: str, gradient: Tensor) -> Tensor | None:
        """Return the part of a gradient that both modules have; None if theirs has no such parameter."""
        return gradient

    def mixer(self, backend: str | Backend) -> Mixer:
        """Return our mixer with their weights."""
        mixer = self.ours.build(WIDTH, self.place, backend)
        mixer.load_state_dict(self.weights())
        return mixer


def separate_qkv(w: Tensors) -> Tensor:
    return torch.cat([w[f"{name}_proj.weight"] for name in "qkv"])


class GatedDelta(Oracle, ABC):
    """A gated delta rule with grouped value heads. A subclass names the projections of its inputs."""

    ours = GatedDeltaNet(heads=2, value_heads=4, key_width=8, value_width=6)
    sizes: ClassVar[dict[str, Any]] = {
        "hidden_size": WIDTH,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
        "rms_norm_eps": 1e-5,
    }

    @abstractmethod
    def projections(self, w: Tensors) -> dict[str, Tensor]:
        """Return the weights of qkv, decay, beta, gate, norm and out."""

    def map_parameters(self, w: Tensors) -> Tensors:
        p = self.projections(w)
        return {
            "project.to_qkv.weight": p["qkv"],
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "operands.decay.A_log": w["A_log"],
            "operands.decay.dt_bias": w["dt_bias"],
            "operands.decay.proj.weight": p["decay"],
            "operands.beta.proj.weight": p["beta"],
            "outputs.norm.weight": p["norm"],
            "outputs.gate.proj.weight": p["gate"],
            "out.weight": p["out"],
        }


class Qwen3NextDelta(GatedDelta):
    """With projections interleaved by key head."""

    def __init__(self) -> None:
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

        self.config = Qwen3NextConfig(**self.sizes)
        self.theirs = Qwen3NextGatedDeltaNet(self.config, 0)

    def projections(self, w: Tensors) -> dict[str, Tensor]:
        qkvz = rearrange(w["in_proj_qkvz.weight"], "(h c) d -> h c d", h=2).split([8, 8, 12, 12], dim=1)
        q, k, v, gate = (stream.flatten(0, 1) for stream in qkvz)
        beta, decay = rearrange(w["in_proj_ba.weight"], "(h two r) d -> two (h r) d", h=2, two=2)
        out, norm = w["out_proj.weight"], w["norm.weight"]
        return {"qkv": torch.cat([q, k, v]), "decay": decay, "beta": beta, "gate": gate, "norm": norm, "out": out}


class Qwen35Delta(GatedDelta):
    def __init__(self) -> None:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        self.config = Qwen3_5TextConfig(**self.sizes)
        self.theirs = Qwen3_5GatedDeltaNet(self.config, 0)

    def projections(self, w: Tensors) -> dict[str, Tensor]:
        inputs = {"qkv": "qkv", "decay": "a", "beta": "b", "gate": "z"}
        p = {name: w[f"in_proj_{theirs}.weight"] for name, theirs in inputs.items()}
        return p | {"norm": w["norm.weight"], "out": w["out_proj.weight"]}


class OlmoHybrid(GatedDelta):
    """With eigenvalues in [-1, 1]. The weights are small enough that our upper bound of beta has no effect."""

    ours = GatedDeltaNet(heads=2, value_heads=4, key_width=8, value_width=6, negative_eigenvalues="both")

    def __init__(self) -> None:
        from transformers import OlmoHybridConfig
        from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

        sizes = self.sizes | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        self.config = OlmoHybridConfig(**sizes, linear_allow_neg_eigval=True, num_attention_heads=2)
        self.theirs = OlmoHybridGatedDeltaNet(self.config, 0)

    def randomise(self) -> None:
        super().randomise()
        with torch.no_grad():
            self.theirs.b_proj.weight.mul_(0.1)

    def projections(self, w: Tensors) -> dict[str, Tensor]:
        inputs = {"decay": "a_proj", "beta": "b_proj", "gate": "g_proj", "norm": "o_norm", "out": "o_proj"}
        return {"qkv": separate_qkv(w)} | {name: w[f"{theirs}.weight"] for name, theirs in inputs.items()}


class KimiLinear(Oracle):
    ours = KDA(heads=3, key_width=8, value_width=8)

    def __init__(self) -> None:
        from transformers import KimiLinearConfig
        from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

        sizes = {"hidden_size": WIDTH, "linear_num_heads": 3, "linear_head_dim": 8, "num_hidden_layers": 1}
        self.config = KimiLinearConfig(**sizes, layer_types=["linear_attention"], rms_norm_eps=1e-5)
        self.theirs = KimiLinearDeltaAttention(self.config, 0)

    def map_parameters(self, w: Tensors) -> Tensors:
        return self.low_rank_maps(w) | {
            "project.to_qkv.weight": separate_qkv(w),
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "operands.decay.A_log": w["forget_gate.A_log"].flatten(),
            "operands.decay.dt_bias": w["forget_gate.dt_bias"],
            "operands.beta.proj.weight": w["b_proj.weight"],
            "outputs.norm.weight": w["o_norm.weight"],
            "out.weight": w["o_proj.weight"],
        }

    def low_rank_maps(self, w: Tensors) -> Tensors:
        """Return the maps of the decay and of the output gate."""
        return {
            "operands.decay.proj.0.weight": w["forget_gate.f_a_proj.weight"],
            "operands.decay.proj.1.weight": w["forget_gate.f_b_proj.weight"],
            "outputs.gate.proj.0.weight": w["g_a_proj.weight"],
            "outputs.gate.proj.1.weight": w["g_b_proj.weight"],
        }


class BailingHybrid(KimiLinear):
    """KDA with a lower bound of the decay, and full-rank maps where Kimi Linear has low-rank ones.

    Our low-rank maps have a rank of 40, at least the width: the identity, then their map padded with zeros.
    """

    ours = KDA(heads=3, key_width=8, value_width=8, gate_rank=40, decay_bound=-5.0)
    cached = False

    def __init__(self) -> None:
        pytest.importorskip("transformers", minversion="5.20", reason="Bailing Hybrid needs transformers 5.20 or newer")
        from transformers import BailingHybridConfig
        from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

        sizes = {"hidden_size": WIDTH, "linear_num_heads": 3, "linear_head_dim": 8, "num_hidden_layers": 1}
        config = BailingHybridConfig(**sizes, kda_safe_gate=True, kda_lower_bound=-5.0, rms_norm_eps=1e-5)
        self.theirs = BailingHybridDeltaAttention(config, 0)

    def low_rank_maps(self, w: Tensors) -> Tensors:
        maps = {"operands.decay": w["forget_gate.f_proj.weight"], "outputs.gate": w["g_proj.weight"]}
        identity = {f"{name}.proj.0.weight": torch.eye(40, WIDTH) for name in maps}
        return identity | {f"{name}.proj.1.weight": pad(weight, (0, 40 - WIDTH)) for name, weight in maps.items()}

    def shared(self, name: str, gradient: Tensor) -> Tensor | None:
        if ".proj.0." in name:
            return None
        return gradient[:, :WIDTH] if ".proj.1." in name else gradient


class Glm5Next(KimiLinear):
    """KDA with low-rank maps and a lower bound of the decay."""

    ours = KDA(heads=3, key_width=8, value_width=8, decay_bound=-5.0)

    def __init__(self) -> None:
        pytest.importorskip("transformers", minversion="5.23", reason="GLM-5.3 needs transformers 5.23 or newer")
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

        sizes = {"hidden_size": WIDTH, "linear_num_heads": 3, "linear_head_dim": 8, "num_hidden_layers": 1}
        self.config = Glm5NextTextConfig(**sizes, layer_types=["linear_attention"], rms_norm_eps=1e-5)
        self.theirs = Glm5NextTextLinearAttention(self.config, 0)


class Mamba2Oracle(Oracle):
    ours = Mamba2(heads=2, key_width=6, value_width=8)

    def __init__(self) -> None:
        pytest.importorskip(
            "transformers", minversion="5.23", reason="older versions normalise all groups of Mamba-2 as one"
        )
        from transformers import Mamba2Config
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

        sizes = {"hidden_size": WIDTH, "num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "expand": 2}
        self.config = Mamba2Config(**sizes, chunk_size=16, num_hidden_layers=1, layer_norm_epsilon=1e-5)
        self.theirs = Mamba2Mixer(self.config, 0).eval()

    def map_parameters(self, w: Tensors) -> Tensors:
        def qkv(x: Tensor) -> Tensor:
            """Order x, B, C as q, k, v."""
            v, k, q = x.split([64, 12, 12])
            return torch.cat([q, k, v])

        gate, xbc, dt = w["in_proj.weight"].split([64, 88, 8])
        return {
            "project.to_qkv.weight": qkv(xbc),
            "project.conv.weight": qkv(w["conv1d.weight"].squeeze(1)),
            "project.conv.bias": qkv(w["conv1d.bias"]),
            "operands.decay.A_log": w["A_log"],
            "operands.decay.dt_bias": w["dt_bias"],
            "operands.decay.proj.weight": dt,
            "outputs.skip.D": w["D"],
            "outputs.gate.proj.weight": gate,
            "outputs.norm.weight": w["norm.weight"],
            "out.weight": w["out_proj.weight"],
        }


class MambaOracle(Oracle):
    ours = Mamba(channels=24, state_size=5, step_rank=3)
    sizes: ClassVar[dict[str, int]] = {
        "hidden_size": WIDTH,
        "state_size": 5,
        "time_step_rank": 3,
        "num_hidden_layers": 1,
    }

    def __init__(self) -> None:
        from transformers import MambaConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer

        self.config = MambaConfig(**self.sizes, intermediate_size=24)
        self.config.intermediate_size = 24  # the constructor overwrites it
        self.theirs = MambaMixer(self.config, 0).eval()

    def map_parameters(self, w: Tensors) -> Tensors:
        x, gate = w["in_proj.weight"].chunk(2)
        return {
            "project.to_v.weight": x,
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "project.conv.bias": w["conv1d.bias"],
            "operands.selective.proj.weight": w["x_proj.weight"],
            "operands.selective.to_step.weight": w["dt_proj.weight"],
            "operands.selective.to_step.bias": w["dt_proj.bias"],
            "operands.selective.A_log": w["A_log"],
            "outputs.skip.D": w["D"],
            "outputs.gate.proj.weight": gate,
            "out.weight": w["out_proj.weight"],
        }


class FalconMamba(MambaOracle):
    ours = Mamba(channels=24, state_size=5, step_rank=3, inner_norm="plain", norm_eps=1e-6)

    def __init__(self) -> None:
        from transformers import FalconMambaConfig
        from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

        self.config = FalconMambaConfig(**self.sizes, intermediate_size=24, mixer_rms_eps=1e-6)
        self.config.intermediate_size = 24
        self.theirs = FalconMambaMixer(self.config, 0, initialize_mixer_weights=False).eval()


class Jamba(MambaOracle):
    ours = Mamba(state_size=5, step_rank=3, inner_norm="weighted", norm_eps=1e-6)

    def __init__(self) -> None:
        from transformers import JambaConfig
        from transformers.models.jamba.modeling_jamba import JambaMambaMixer

        self.config = JambaConfig(hidden_size=WIDTH, mamba_d_state=5, mamba_dt_rank=3, num_hidden_layers=1)
        self.theirs = JambaMambaMixer(self.config, 0).eval()

    def map_parameters(self, w: Tensors) -> Tensors:
        norms = enumerate(("dt_layernorm", "b_layernorm", "c_layernorm"))
        return super().map_parameters(w) | {f"operands.selective.norms.{i}.weight": w[f"{n}.weight"] for i, n in norms}


class MiniMax(Oracle):
    """With six heads, for which their slopes differ from those of Lightning Attention."""

    ours = LightningAttention(heads=6, key_width=8, value_width=8, slopes="power")
    place = Place(2, 5)

    def __init__(self) -> None:
        from transformers import MiniMaxConfig
        from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

        sizes = {"hidden_size": WIDTH, "num_attention_heads": 6, "head_dim": 8, "num_hidden_layers": 5}
        self.theirs = MiniMaxLightningAttention(MiniMaxConfig(**sizes, block_size=16, rms_norm_eps=1e-6), 2)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        return self.theirs(x, position_embeddings=None, attention_mask=None, past_key_values=cache)[0]

    def map_parameters(self, w: Tensors) -> Tensors:
        return {
            "project.to_qkv.weight": rearrange(w["qkv_proj.weight"], "(h three e) d -> (three h e) d", three=3, e=8),
            "outputs.norm.weight": w["norm.weight"],
            "outputs.gate.proj.weight": w["output_gate.weight"],
            "out.weight": w["out_proj.weight"],
        }

    def cache(self) -> Any:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()


class XLSTM(Oracle):
    ours = MLSTM(heads=2, key_width=8, value_width=16)
    cached = False

    def __init__(self) -> None:
        from transformers.models.xlstm import modeling_xlstm
        from transformers.models.xlstm.configuration_xlstm import xLSTMConfig

        if not hasattr(modeling_xlstm, "xLSTMLayer"):
            pytest.skip("transformers does not define its own xLSTM if the package xlstm is installed")
        config = xLSTMConfig(
            hidden_size=WIDTH, num_heads=2, qk_dim_factor=0.5, chunk_size=37, autocast_kernel_dtype="float32",
            mode="train", return_last_states=True, weight_mode="single",
        )  # fmt: skip
        self.theirs = modeling_xlstm.xLSTMLayer(config)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        return self.theirs(x)[0]

    def map_parameters(self, w: Tensors) -> Tensors:
        return {
            "project.to_qkv.weight": torch.cat([w[f"{name}.weight"] for name in "qkv"]),
            "operands.gates.proj.weight": torch.cat([w["igate_preact.weight"], w["fgate_preact.weight"]]),
            "operands.gates.proj.bias": torch.cat([w["igate_preact.bias"], w["fgate_preact.bias"]]),
            "outputs.norm.weight": w["multihead_norm.weight"],
            "outputs.gate.proj.weight": w["ogate_preact.weight"],
            "out.weight": w["out_proj.weight"],
        }


class Rwkv(Oracle):
    """Forward only, because their backward pass fails."""

    ours = RWKV4(channels=24)
    cached = False
    differentiable = False

    def __init__(self) -> None:
        from transformers import RwkvConfig
        from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

        config = RwkvConfig(hidden_size=WIDTH, attention_hidden_size=24, num_hidden_layers=1)
        self.theirs = RwkvSelfAttention(config, 0)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        with torch.no_grad():
            return self.theirs(x)[0]

    def map_parameters(self, w: Tensors) -> Tensors:
        return {
            "project.mix": torch.stack([w[f"time_mix_{name}"].flatten() for name in ("key", "value", "receptance")]),
            "project.to_k.weight": w["key.weight"],
            "project.to_v.weight": w["value.weight"],
            "project.to_r.weight": w["receptance.weight"],
            "operands.key.w": w["time_decay"],
            "outputs.bonus.u": w["time_first"],
            "out.weight": w["output.weight"],
        }


class RecurrentGemma(Oracle):
    """Called from position 1 on, because at position 0 their module omits the factor sqrt(1 - a^2) of the paper."""

    ours = RGLRU(channels=24, blocks=3)
    cached = False

    def __init__(self) -> None:
        from transformers import RecurrentGemmaConfig
        from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

        config = RecurrentGemmaConfig(hidden_size=WIDTH, lru_width=24, num_attention_heads=3, num_hidden_layers=1)
        self.theirs = RecurrentGemmaRecurrentBlock(config, 0)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        positions = torch.arange(1, x.shape[1] + 1).expand(x.shape[:2])
        return self.theirs(x, positions, None, use_cache=False)[0]

    def map_parameters(self, w: Tensors) -> Tensors:
        gates = ("recurrent_gate", "input_gate")
        return {
            "project.to_v.weight": w["linear_x.weight"],
            "project.to_v.bias": w["linear_x.bias"],
            "project.conv.weight": w["conv_1d.weight"].squeeze(1),
            "project.conv.bias": w["conv_1d.bias"],
            "operands.real.weight": torch.stack([w[f"rg_lru.{gate}_weight"] for gate in gates]),
            "operands.real.bias": torch.stack([w[f"rg_lru.{gate}_bias"].flatten() for gate in gates]),
            "operands.real.L": w["rg_lru.recurrent_param"],
            "outputs.gate.proj.weight": w["linear_y.weight"],
            "outputs.gate.proj.bias": w["linear_y.bias"],
            "out.weight": w["linear_out.weight"],
            "out.bias": w["linear_out.bias"],
        }


class Lfm2(Oracle):
    ours = LFM2Conv(bias=True)

    def __init__(self) -> None:
        from transformers import Lfm2Config
        from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

        sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
        self.config = Lfm2Config(**sizes, conv_bias=True, layer_types=["conv", "full_attention"])
        self.theirs = Lfm2ShortConv(self.config, 0)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        return self.theirs(x, past_key_values=cache)

    def map_parameters(self, w: Tensors) -> Tensors:
        return {
            "filters.conv.weight": w["conv.weight"].squeeze(1),
            "filters.conv.bias": w["conv.bias"],
            "to_bcx.weight": w["in_proj.weight"],
            "to_bcx.bias": w["in_proj.bias"],
            "out.weight": w["out_proj.weight"],
            "out.bias": w["out_proj.bias"],
        }


class SoftmaxAttention(Oracle, ABC):
    """Attention that needs rotary embeddings and a causal mask from its model."""

    rotary: Callable[[Tensor, Tensor], Any]

    def call(self, x: Tensor, cache: Any) -> Tensor:
        past = cache.get_seq_length() if cache is not None else 0
        positions = torch.arange(past, past + x.shape[1])
        mask = (torch.arange(past + x.shape[1]) <= positions[:, None])[None, None]
        embeddings = self.rotary(x, positions[None])
        return self.theirs(x, position_embeddings=embeddings, attention_mask=mask, past_key_values=cache)[0]


class Llama(SoftmaxAttention):
    ours = Attention(heads=4, key_value_heads=2)

    def __init__(self) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

        sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
        self.config = LlamaConfig(**sizes, rope_theta=10000.0)
        self.config._attn_implementation = "sdpa"
        self.theirs, self.rotary = LlamaAttention(self.config, 0), LlamaRotaryEmbedding(self.config)

    def map_parameters(self, w: Tensors) -> Tensors:
        return {"to_qkv.weight": separate_qkv(w), "out.weight": w["o_proj.weight"]}


class OlmoHybridAttention(SoftmaxAttention):
    """With a norm of q and of k over all heads, and the rotary embeddings that their model leaves out by default."""

    ours = Attention(heads=4, key_value_heads=2, qk_norm="all", norm_eps=1e-5)

    def __init__(self) -> None:
        from transformers import OlmoHybridConfig
        from transformers.models.olmo_hybrid import modeling_olmo_hybrid

        sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
        layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
        rotary = {"rope_type": "default", "rope_theta": 10000.0}
        self.config = OlmoHybridConfig(**sizes, **layers, rope_parameters=rotary)
        self.config._attn_implementation = "sdpa"
        self.theirs = modeling_olmo_hybrid.OlmoHybridAttention(self.config, 0)
        self.rotary = modeling_olmo_hybrid.OlmoHybridRotaryEmbedding(self.config)

    def map_parameters(self, w: Tensors) -> Tensors:
        norms = {name: w[name] for name in ("q_norm.weight", "k_norm.weight")}
        return norms | {"to_qkv.weight": separate_qkv(w), "out.weight": w["o_proj.weight"]}


class Qwen3NextAttention(SoftmaxAttention):
    """With QK norm, an output gate and rotary embeddings of a quarter of the channels."""

    ours = Attention(heads=4, key_value_heads=2, head_width=16, rotary_fraction=0.25, qk_norm="head", gate=True)

    def __init__(self) -> None:
        from transformers import Qwen3NextConfig
        from transformers.models.qwen3_next import modeling_qwen3_next

        sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        self.config = Qwen3NextConfig(
            **sizes, num_hidden_layers=1, layer_types=["full_attention"], rope_parameters=rotary
        )
        self.config._attn_implementation = "sdpa"
        self.theirs = modeling_qwen3_next.Qwen3NextAttention(self.config, 0)
        self.rotary = modeling_qwen3_next.Qwen3NextRotaryEmbedding(self.config)

    def map_parameters(self, w: Tensors) -> Tensors:
        q, gate = rearrange(w["q_proj.weight"], "(h two e) d -> two (h e) d", h=4, two=2)
        return {
            "to_qkv.weight": torch.cat([q, w["k_proj.weight"], w["v_proj.weight"]]),
            "to_gate.weight": gate,
            "q_norm.weight": w["q_norm.weight"],
            "k_norm.weight": w["k_norm.weight"],
            "out.weight": w["o_proj.weight"],
        }

    def weights(self) -> Tensors:
        """Their norms multiply by 1 + weight, ours by the weight."""
        return {
            name: weight + (name in ("q_norm.weight", "k_norm.weight")) for name, weight in super().weights().items()
        }


MLA_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 7, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5, "num_hidden_layers": 1,
}  # fmt: skip


def mla_parameters(w: Tensors) -> Tensors:
    return {
        "to_latent.weight": w["kv_a_proj_with_mqa.weight"],
        "latent_norm.weight": w["kv_a_layernorm.weight"],
        "to_kv.weight": w["kv_b_proj.weight"],
        "out.weight": w["o_proj.weight"],
    }


class DeepseekV3(SoftmaxAttention):
    """Their rotary pairs are neighbouring channels, ours are channels i and i + 2 of the last four."""

    ours = MLA(heads=4, key_width=6, value_width=5, latent_width=7, rotary_width=4, query_rank=9)

    def __init__(self) -> None:
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3

        self.config = DeepseekV3Config(**MLA_SIZES, q_lora_rank=9)
        self.config._attn_implementation = "sdpa"
        self.theirs = modeling_deepseek_v3.DeepseekV3Attention(self.config, 0)
        self.rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(self.config)

    def map_parameters(self, w: Tensors) -> Tensors:
        q = w["q_b_proj.weight"].unflatten(0, (4, 10))
        latent = w["kv_a_proj_with_mqa.weight"]
        return mla_parameters(w) | {
            "to_q.0.weight": w["q_a_proj.weight"],
            "to_q.1.weight": w["q_a_layernorm.weight"],
            "to_q.2.weight": torch.cat([q[:, :6], q[:, 6::2], q[:, 7::2]], 1).flatten(0, 1),
            "to_latent.weight": torch.cat([latent[:7], latent[7::2], latent[8::2]]),
        }


YARN = {
    "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip


class DeepseekV3Yarn(DeepseekV3):
    """With YaRN, whose factor for long texts also multiplies the scores."""

    ours = DeepseekV3.ours.model_copy(update={"rope_scaling": RopeScaling(**YARN)})

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.deepseek_v3 import modeling_deepseek_v3

        self.config.rope_parameters = YARN | {"rope_theta": 10000.0}
        self.theirs = modeling_deepseek_v3.DeepseekV3Attention(self.config, 0)
        self.rotary = modeling_deepseek_v3.DeepseekV3RotaryEmbedding(self.config)


class KimiLinearAttention(SoftmaxAttention):
    """MLA without position embeddings."""

    ours = MLA(heads=4, key_width=6, value_width=5, latent_width=7, rotary_width=4, rotary_theta=None)

    def __init__(self) -> None:
        from transformers import KimiLinearConfig
        from transformers.models.kimi_linear import modeling_kimi_linear

        self.config = KimiLinearConfig(**MLA_SIZES, layer_types=["full_attention"])
        self.config._attn_implementation = "sdpa"
        self.theirs = modeling_kimi_linear.KimiLinearAttention(self.config, 0)
        self.rotary = lambda x, position: None  # their module ignores the embeddings

    def map_parameters(self, w: Tensors) -> Tensors:
        return mla_parameters(w) | {"to_q.weight": w["q_proj.weight"]}


ORACLES: list[type[Oracle]] = [
    Qwen3NextDelta,
    Qwen35Delta,
    OlmoHybrid,
    KimiLinear,
    BailingHybrid,
    Glm5Next,
    Mamba2Oracle,
    MambaOracle,
    FalconMamba,
    Jamba,
    MiniMax,
    XLSTM,
    Rwkv,
    RecurrentGemma,
    Lfm2,
    Llama,
    OlmoHybridAttention,
    Qwen3NextAttention,
    DeepseekV3,
    DeepseekV3Yarn,
    KimiLinearAttention,
]
