"""More mixers against transformers' modules, random weights mapped over: outputs, all gradients, cached decoding."""

from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from deltazoo.backends.base import Backend
from deltazoo.mixers import KDA, MLSTM, RGLRU, RWKV4, GatedDeltaNet, LightningAttention, Mamba
from deltazoo.mixers.core.mixer import MixerConfig, Place

pytest.importorskip("transformers", minversion="5.17", reason="deltazoo[hf] needs transformers 5.17 or newer")

WIDTH = 32
FORWARD, GRADIENT = 2e-5, 1e-4

Tensors = dict[str, Tensor]


class Case:
    """One oracle: `ours`, `theirs`, how theirs is called, and their parameters, or gradients, by name to ours."""

    ours: MixerConfig
    place = Place()
    backward = True
    theirs: nn.Module

    def call(self, x: Tensor, cache: Any) -> Tensor:
        return self.theirs(x, cache_params=cache)

    def mapped(self, w: Tensors) -> Tensors:
        raise NotImplementedError

    def cache(self) -> Any:
        """An empty cache; None where theirs cannot be trusted."""
        return None

    def draw(self) -> None:
        """Random values in every parameter."""
        with torch.no_grad():
            for parameter in self.theirs.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))


class MambaCase(Case):
    ours = Mamba(channels=24, state_size=5, step_rank=3)

    def __init__(self) -> None:
        from transformers import MambaConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer

        sizes = {"hidden_size": WIDTH, "state_size": 5, "time_step_rank": 3, "num_hidden_layers": 1}
        self.config = MambaConfig(**sizes, intermediate_size=24)
        self.config.intermediate_size = 24
        self.theirs = MambaMixer(self.config, 0).eval()

    def mapped(self, w: Tensors) -> Tensors:
        x, z = w["in_proj.weight"].chunk(2)
        dt, k, q = w["x_proj.weight"].split([3, 5, 5])
        return {
            "project.to_v.weight": x,
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "project.conv.bias": w["conv1d.bias"],
            "operands.selective.proj.weight": torch.cat([dt, k, q]),
            "operands.selective.to_step.weight": w["dt_proj.weight"],
            "operands.selective.to_step.bias": w["dt_proj.bias"],
            "operands.selective.A_log": w["A_log"],
            "outputs.skip.D": w["D"],
            "outputs.gate.proj.weight": z,
            "out.weight": w["out_proj.weight"],
        }

    def cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)


class FalconMambaCase(MambaCase):
    ours = Mamba(channels=24, state_size=5, step_rank=3, inner_norm=True, norm_eps=1e-6)

    def __init__(self) -> None:
        from transformers import FalconMambaConfig
        from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer

        sizes = {"hidden_size": WIDTH, "state_size": 5, "time_step_rank": 3, "num_hidden_layers": 1}
        self.config = FalconMambaConfig(**sizes, intermediate_size=24, mixer_rms_eps=1e-6)
        self.config.intermediate_size = 24
        self.theirs = FalconMambaMixer(self.config, 0, initialize_mixer_weights=False).eval()


class MiniMaxCase(Case):
    ours = LightningAttention(heads=4, key_width=8, value_width=8)
    place = Place(2, 5)

    def __init__(self) -> None:
        from transformers import MiniMaxConfig
        from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

        config = MiniMaxConfig(
            hidden_size=WIDTH, num_attention_heads=4, head_dim=8, num_hidden_layers=5, block_size=16, rms_norm_eps=1e-6
        )
        self.theirs = MiniMaxLightningAttention(config, 2)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        return self.theirs(x, position_embeddings=None, attention_mask=None, past_key_values=cache)[0]

    def mapped(self, w: Tensors) -> Tensors:
        return {
            "project.to_qkv.weight": rearrange(w["qkv_proj.weight"], "(h three e) d -> (three h e) d", h=4, three=3),
            "outputs.norm.weight": w["norm.weight"],
            "outputs.gate.proj.weight": w["output_gate.weight"],
            "out.weight": w["out_proj.weight"],
        }

    def cache(self) -> Any:
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()


class GatedDeltaCase(Case):
    """Qwen3.5's, with flat projections."""

    ours: MixerConfig = GatedDeltaNet(heads=2, value_heads=4, key_width=8, value_width=6)

    def __init__(self) -> None:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

        self.config = Qwen3_5TextConfig(**self.head_shape(), rms_norm_eps=1e-5)
        self.theirs = Qwen3_5GatedDeltaNet(self.config, 0)

    @staticmethod
    def sizes() -> dict[str, Any]:
        return {
            "hidden_size": WIDTH,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "num_hidden_layers": 1,
            "layer_types": ["linear_attention"],
        }

    def mapped(self, w: Tensors) -> Tensors:
        return {
            "project.to_qkv.weight": w["in_proj_qkv.weight"],
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "operands.decay.A_log": w["A_log"],
            "operands.decay.dt_bias": w["dt_bias"],
            "operands.decay.proj.weight": w["in_proj_a.weight"],
            "operands.beta.proj.weight": w["in_proj_b.weight"],
            "outputs.norm.weight": w["norm.weight"],
            "outputs.gate.proj.weight": w["in_proj_z.weight"],
            "out.weight": w["out_proj.weight"],
        }

    def cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)


class OlmoHybridCase(GatedDeltaCase):
    """With eigenvalues in [-1, 1]; beta stays below our bound with these weights."""

    ours = GatedDeltaNet(heads=2, value_heads=4, key_width=8, value_width=6, negative_eigenvalues="both")

    def __init__(self) -> None:
        from transformers import OlmoHybridConfig
        from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

        sizes = self.head_shape() | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        self.config = OlmoHybridConfig(**sizes, linear_allow_neg_eigval=True, num_attention_heads=2)
        self.theirs = OlmoHybridGatedDeltaNet(self.config, 0)

    def draw(self) -> None:
        super().draw()
        with torch.no_grad():
            self.theirs.b_proj.weight.mul_(0.1)

    def mapped(self, w: Tensors) -> Tensors:
        flat = {
            "in_proj_qkv.weight": torch.cat([w[f"{name}_proj.weight"] for name in "qkv"]),
            "in_proj_a.weight": w["a_proj.weight"],
            "in_proj_b.weight": w["b_proj.weight"],
            "norm.weight": w["o_norm.weight"],
            "in_proj_z.weight": w["g_proj.weight"],
            "out_proj.weight": w["o_proj.weight"],
        }
        return super().mapped(w | flat)


class BailingCase(Case):
    """KDA with a decay that has a lower bound, and full maps where Kimi Linear has low-rank ones."""

    ours = KDA(heads=3, key_width=8, value_width=8, gate_rank=40, decay_bound=-5.0)

    def __init__(self) -> None:
        pytest.importorskip("transformers", minversion="5.20")  # older ones have no Bailing Hybrid
        from transformers import BailingHybridConfig
        from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

        sizes = {"hidden_size": WIDTH, "linear_num_heads": 3, "linear_head_dim": 8, "num_hidden_layers": 1}
        config = BailingHybridConfig(**sizes, kda_safe_gate=True, kda_lower_bound=-5.0, rms_norm_eps=1e-5)
        self.theirs = BailingHybridDeltaAttention(config, 0)

    def mapped(self, w: Tensors) -> Tensors:
        eye = torch.eye(40, WIDTH)  # full maps as low-rank ones of a rank that is high enough

        def padded(weight: Tensor) -> Tensor:
            return torch.nn.functional.pad(weight, (0, 8))

        return {
            "project.to_qkv.weight": torch.cat([w[f"{name}_proj.weight"] for name in "qkv"]),
            "project.conv.weight": w["conv1d.weight"].squeeze(1),
            "operands.decay.A_log": w["forget_gate.A_log"],
            "operands.decay.dt_bias": w["forget_gate.dt_bias"],
            "operands.decay.proj.0.weight": eye,
            "operands.decay.proj.1.weight": padded(w["forget_gate.f_proj.weight"]),
            "operands.beta.proj.weight": w["b_proj.weight"],
            "outputs.norm.weight": w["o_norm.weight"],
            "outputs.gate.proj.0.weight": eye,
            "outputs.gate.proj.1.weight": padded(w["g_proj.weight"]),
            "out.weight": w["o_proj.weight"],
        }


class XLSTMCase(Case):
    ours = MLSTM(heads=2, key_width=8, value_width=16)

    def __init__(self) -> None:
        from transformers.models.xlstm import modeling_xlstm
        from transformers.models.xlstm.configuration_xlstm import xLSTMConfig

        if not hasattr(modeling_xlstm, "xLSTMLayer"):
            pytest.skip("transformers' own xLSTM is not defined where the xlstm package is installed")
        config = xLSTMConfig(
            hidden_size=WIDTH, num_heads=2, qk_dim_factor=0.5, chunk_size=37, autocast_kernel_dtype="float32",
            mode="train", return_last_states=True, weight_mode="single",
        )  # fmt: skip
        self.theirs = modeling_xlstm.xLSTMLayer(config)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        return self.theirs(x)[0]

    def mapped(self, w: Tensors) -> Tensors:
        return {
            "project.to_qkv.weight": torch.cat([w[f"{name}.weight"] for name in "qkv"]),
            "operands.gates.proj.weight": torch.cat([w["igate_preact.weight"], w["fgate_preact.weight"]]),
            "operands.gates.proj.bias": torch.cat([w["igate_preact.bias"], w["fgate_preact.bias"]]),
            "outputs.norm.weight": w["multihead_norm.weight"],
            "outputs.gate.proj.weight": w["ogate_preact.weight"],
            "out.weight": w["out_proj.weight"],
        }


class RwkvCase(Case):
    """Forward only: their backward fails."""

    ours = RWKV4(channels=24)
    backward = False

    def __init__(self) -> None:
        from transformers import RwkvConfig
        from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

        config = RwkvConfig(hidden_size=WIDTH, attention_hidden_size=24, num_hidden_layers=1)
        self.theirs = RwkvSelfAttention(config, 0)

    def call(self, x: Tensor, cache: Any) -> Tensor:
        with torch.no_grad():
            return self.theirs(x)[0]

    def mapped(self, w: Tensors) -> Tensors:
        mixes = [w[f"time_mix_{name}"].flatten() for name in ("key", "value", "receptance")]
        return {
            "project.mix": torch.stack(mixes),
            "project.to_k.weight": w["key.weight"],
            "project.to_v.weight": w["value.weight"],
            "project.to_r.weight": w["receptance.weight"],
            "operands.key.w": w["time_decay"],
            "outputs.bonus.u": w["time_first"],
            "out.weight": w["output.weight"],
        }


class RecurrentGemmaCase(Case):
    """The equation of the paper: their code leaves out the root at position 0, so it is called from position 1 on."""

    ours = RGLRU(channels=24, blocks=3)

    def __init__(self) -> None:
        from transformers import RecurrentGemmaConfig
        from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

        config = RecurrentGemmaConfig(hidden_size=WIDTH, lru_width=24, num_attention_heads=3, num_hidden_layers=1)
        self.theirs = RecurrentGemmaRecurrentBlock(config, 0)

    def draw(self) -> None:
        super().draw()
        with torch.no_grad():
            for name in ("linear_x", "linear_y", "linear_out"):  # ours have none
                getattr(self.theirs, name).bias.zero_()

    def call(self, x: Tensor, cache: Any) -> Tensor:
        place = torch.arange(1, x.shape[1] + 1).expand(x.shape[:2])
        return self.theirs(x, place, None, use_cache=False)[0]

    def mapped(self, w: Tensors) -> Tensors:
        gates = [w["rg_lru.recurrent_gate_weight"], w["rg_lru.input_gate_weight"]]
        biases = [w["rg_lru.recurrent_gate_bias"].flatten(), w["rg_lru.input_gate_bias"].flatten()]
        return {
            "project.to_v.weight": w["linear_x.weight"],
            "project.conv.weight": w["conv_1d.weight"].squeeze(1),
            "project.conv.bias": w["conv_1d.bias"],
            "operands.real.weight": torch.stack(gates),
            "operands.real.bias": torch.stack(biases),
            "operands.real.L": w["rg_lru.recurrent_param"],
            "outputs.gate.proj.weight": w["linear_y.weight"],
            "out.weight": w["linear_out.weight"],
        }


CASES = [
    MambaCase,
    FalconMambaCase,
    MiniMaxCase,
    GatedDeltaCase,
    OlmoHybridCase,
    BailingCase,
    XLSTMCase,
    RwkvCase,
    RecurrentGemmaCase,
]


@pytest.fixture(params=CASES, ids=lambda case: case.__name__.removesuffix("Case"))
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(3)
    made: Case = request.param()
    made.draw()
    return made


def ours_of(case: Case, backend: str | Backend) -> nn.Module:
    weights = case.mapped({name: parameter.detach().clone() for name, parameter in case.theirs.named_parameters()})
    mixer = case.ours.build(WIDTH, case.place, backend)
    mixer.load_state_dict(weights)
    return mixer


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).detach())


def test_outputs_and_gradients_equal_theirs(case: Case, backend: str | Backend) -> None:
    ours = ours_of(case, backend)
    torch.manual_seed(4)
    weight = torch.randn(2, 37, WIDTH)
    x_ours = torch.randn(2, 37, WIDTH, requires_grad=True)
    x_theirs = x_ours.detach().clone().requires_grad_(case.backward)
    got, want = ours(x_ours)[0], case.call(x_theirs, None)
    assert relative(got, want) < FORWARD
    if not case.backward:
        return
    (got * weight).sum().backward()
    (want * weight).sum().backward()
    assert relative(x_ours.grad, x_theirs.grad) < GRADIENT
    gradients = {name: parameter.grad for name, parameter in case.theirs.named_parameters()}
    theirs = case.mapped({name: torch.zeros(()) if grad is None else grad for name, grad in gradients.items()})
    mine = dict(ours.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if isinstance(case, BailingCase) and ".proj.0." in name:
            continue  # the identity stands for what theirs has not
        own = mine[name].grad
        if isinstance(case, BailingCase) and ".proj.1." in name:
            own, gradient = own[:, :WIDTH], gradient[:, :WIDTH]
        assert relative(own, gradient) < GRADIENT, name


def test_cached_decoding_equals_theirs(case: Case, backend: str | Backend) -> None:
    cache = case.cache()
    if cache is None:
        pytest.skip("their cache is not to be trusted, or wants their whole model")
    ours = ours_of(case, backend)
    torch.manual_seed(5)
    x = torch.randn(2, 9, WIDTH)
    with torch.no_grad():
        state = ours.init_state(2)
        for piece in x.split([5, 1, 1, 1, 1], dim=1):
            got, state = ours(piece, state)
            assert relative(got, case.call(piece, cache)) < FORWARD
