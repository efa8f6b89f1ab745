"""States of models that FSDP2 shards with mixed precision: plain tensors, in float32 where they sum over tokens."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from subjects import BATCH, T, build, decode, tokens
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.core.mixer import Mixer


@pytest.fixture(scope="module")
def mesh() -> Iterator[dist.DeviceMesh]:
    """A mesh of this process alone: the parameters are DTensors all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(model: LanguageModel, mesh: dist.DeviceMesh) -> LanguageModel:
    """Wrap every mixer, MLP and layer, the embedding, the head and the model."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    inner = [m for layer in model.stack.layers for m in (*layer.mixers, layer.mlp, layer)]
    for module in (*inner, model.embedding, model.head, model):
        assert module is not None
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def test_sharded_model_decodes_with_plain_states(mixer: str, mesh: dist.DeviceMesh) -> None:
    model = shard(build(mixer), mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    state, whole = model.init_state(BATCH, T), build(mixer).init_state(BATCH, T)
    kinds = [[(type(x), x.dtype, x.shape) for x in tree_leaves(tree)] for tree in (state, whole)]
    assert kinds[0] == kinds[1] and all(type(x) is Tensor for x in tree_leaves(state))
    assert isinstance(model.stack.layers[0].mixers[0], Mixer)
    with torch.no_grad():
        logits = model(tokens()[:, :-1])[0]
    assert logits.dtype == torch.bfloat16
    assert relative_error(decode(model, tokens()[:, :-1]), logits) < 0.01


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sharded_head_computes_the_loss(tied: bool, mesh: dist.DeviceMesh) -> None:
    model, whole = build("kda", tied=tied), build("kda", tied=tied).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for module in (model.embedding, *([] if model.head is None else [model.head]), model.stack):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    assert relative_error(model.loss(inputs, targets), whole.loss(inputs, targets)) < 0.01
