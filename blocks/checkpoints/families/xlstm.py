"""xLSTM 7B: mLSTM with a sigmoid output gate, and SwiGLU."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, parts
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, renamed, rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.mixers.mlstm import MLSTM

NAMES = decoder.Names(
    embedding="backbone.embeddings.weight",
    layers="backbone.blocks",
    norm="backbone.out_norm.weight",
    layer_norm="norm_mlstm.weight",
    mlp_norm="norm_ffn.weight",
    eps="norm_eps",
)
GATE_CAP = 15.0  # of the logits of the input and forget gates, a constant of the mixer


class XLSTM(Family):
    """xLSTM with one tensor for each map, `weight_mode` "single"."""

    architecture: ClassVar[str] = "xLSTMForCausalLM"
    # Kernels of transformers and of the package xlstm, and the dtypes in which they compute
    ignored: ClassVar[tuple[str, ...]] = (
        "autocast_kernel_dtype", "chunk_size", "chunkwise_kernel", "embedding_dim", "force_bos_token_insert",
        "inference_state_dtype", "max_inference_chunksize", "mlstm_round_up_to_multiple_of", "mode",
        "norm_reduction_force_float32", "num_blocks", "return_last_states", "sequence_kernel", "step_kernel",
    )  # fmt: skip

    def stack(self, config: HubConfig) -> dict[str, Any]:
        eps = config.get("norm_eps", 1e-6)
        config.require(use_bias=False, add_out_norm=True, weight_mode="single", gate_soft_cap=GATE_CAP, eps=eps)
        width, heads = config["hidden_size"], config["num_heads"]
        mixer = MLSTM(
            heads=heads,
            key_width=int(width * config.get("qk_dim_factor", 0.5)) // heads,
            value_width=int(width * config.get("v_dim_factor", 1.0)) // heads,
            norm_eps=eps,
        )
        multiple = config.get("ffn_round_up_to_multiple_of", 64)
        hidden = int((width * config.get("ffn_proj_factor", 2.667) + multiple - 1) // multiple * multiple)
        return {
            **decoder.sizes(config, NAMES),
            "logit_cap": config.get("output_logit_soft_cap", 30.0),
            "pattern": "mlstm",
            "layers": {"mlstm": mixer},
            "mlp": Dense(width=hidden),
        }

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mixer, mlp = decoder.first(spec, MLSTM), spec.expand()[0].mlp
        assert isinstance(mlp, Dense)
        shape, hidden = mixer.shape(spec.width), mlp.hidden(spec.width)
        keys, values = shape.heads * shape.key_width, shape.heads * shape.value_width
        return {
            **{field: x for field, x in decoder.sizes_config(spec, NAMES).items() if field != "hidden_act"},
            "eps": spec.norm_eps,
            "num_heads": shape.heads,
            "qk_dim_factor": self._factor(keys, spec.width),
            "v_dim_factor": self._factor(values, spec.width),
            "ffn_proj_factor": (hidden - 0.5) / spec.width,  # rounded up to the next multiple
            "ffn_round_up_to_multiple_of": hidden,
            "gate_soft_cap": GATE_CAP,
            "output_logit_soft_cap": spec.logit_cap,
            "use_bias": False,
            "add_out_norm": True,
            "weight_mode": "single",
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        (mixer,), mlp = layer.mixers, layer.mlp
        assert isinstance(mixer, MLSTM) and isinstance(mlp, Dense)
        shape = mixer.shape(width)
        keys = shape.heads * shape.key_width
        sizes = {"q": keys, "k": keys, "v": shape.heads * shape.value_width}
        gates = {f"{x}gate": shape.heads for x in "if"}
        names = {"outputs.norm.weight": "multihead_norm.weight", "outputs.gate.proj.weight": "ogate_preact.weight"}
        rules = [rule({"project.to_qkv.weight": "q k v"}, {f"{x}.weight": x for x in "qkv"}, sizes)]
        for kind in ("weight", "bias"):
            theirs = {f"{x}_preact.{kind}": x for x in gates}
            rules.append(rule({f"operands.gates.proj.{kind}": "igate fgate"}, theirs, gates))
        rules += renamed(names | {"out.weight": "out_proj.weight"})
        dense = parts.dense_mlp(mlp, width, parts.MlpNames("proj_up_gate", "proj_up", "proj_down"))
        return under("mixers.0.", "mlstm_layer.", rules) + under("mlp.", "ffn.", dense)

    @staticmethod
    def _factor(size: int, width: int) -> float:
        """Return a factor whose product with the width is cut to the size."""
        factor = size / width
        return factor if int(width * factor) == size else (size + 0.25) / width
