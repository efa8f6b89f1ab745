"""LFM2 with a mixture of experts in all but the first layers."""

from typing import Any, ClassVar

from deltazoo.blocks.checkpoints import decoder, lfm2, parts
from deltazoo.blocks.checkpoints.families.lfm2 import Lfm2
from deltazoo.blocks.checkpoints.family import Family, HubConfig
from deltazoo.blocks.checkpoints.rules import Rule, under
from deltazoo.blocks.model.interface import ModelSpec
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE

EXPERTS = parts.ExpertNames(expert=lfm2.MLP, selection_bias="expert_bias")
NO_EXPERTS = MoE(width=1, experts=1, active=1)  # written for a stack without: transformers needs the fields


class Lfm2Moe(Family):
    """LFM2 with experts."""

    architecture: ClassVar[str] = "Lfm2MoeForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = Lfm2.ignored

    def stack(self, config: HubConfig) -> dict[str, Any]:
        mixers, types = lfm2.mixers(config)
        mlps: dict[str, Dense | MoE] = {
            "dense": Dense(width=config["intermediate_size"]),
            "sparse": MoE(
                width=config["moe_intermediate_size"],
                experts=config["num_experts"],
                active=config["num_experts_per_tok"],
                scores="sigmoid",
                selection_bias=config.get("use_expert_bias", True),
                normalize=config.get("norm_topk_prob", True),
                scale=config.get("routed_scaling_factor", 1.0),
                balance=0.0,
            ),
        }
        dense = config.get("num_dense_layers", 2)
        places = [(kind, "dense" if i < dense else "sparse") for i, kind in enumerate(types)]
        layers = {f"{kind}_{mlp}": LayerSpec(mixer=mixers[kind], mlp=mlps[mlp]) for kind, mlp in places}
        return {**lfm2.sizes(config), "pattern": " + ".join("_".join(place) for place in places), "layers": layers}

    def config(self, spec: ModelSpec) -> dict[str, Any]:
        mlps = [layer.mlp for layer in spec.expand()]
        sparse = next((mlp for mlp in mlps if isinstance(mlp, MoE)), NO_EXPERTS)
        dense = next((mlp for mlp in mlps if isinstance(mlp, Dense)), Dense(width=sparse.width))
        return {
            **lfm2.mixers_config(spec),
            "intermediate_size": dense.hidden(spec.width),
            "num_dense_layers": sum(isinstance(mlp, Dense) for mlp in mlps),
            "moe_intermediate_size": sparse.hidden(spec.width),
            "num_experts": sparse.experts,
            "num_experts_per_tok": sparse.active,
            "use_expert_bias": sparse.selection_bias,
            "norm_topk_prob": sparse.normalize,
            "routed_scaling_factor": sparse.scale,
        }

    def rules(self, spec: ModelSpec) -> list[Rule]:
        return decoder.model_rules(spec, lambda layer: self._layer(layer, spec.width), lfm2.NAMES)

    def _layer(self, layer: LayerSpec, width: int) -> list[Rule]:
        mlp = layer.mlp
        assert isinstance(mlp, Dense | MoE)
        if isinstance(mlp, MoE):
            rules = parts.experts(mlp, width, EXPERTS)
            return lfm2.mixer_rules(layer, width) + under("mlp.", "feed_forward.", rules)
        return lfm2.mixer_rules(layer, width) + under("mlp.", "feed_forward.", parts.dense_mlp(mlp, width, lfm2.MLP))
