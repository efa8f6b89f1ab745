"""DDP and FSDP2 give the mean of the gradients that one process computes for the rows of each rank."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from deltazoo.blocks.model.layer import Layer
from deltazoo.blocks.model.mlp import Mlp
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.objective import Objective
from deltazoo.mixers.core.conformance import relative_error
from deltazoo.mixers.core.mixer import Mixer

pytestmark = pytest.mark.runs
MLP = {"type": "moe", "experts": 3, "width": 8, "shared_width": 8, "balance": 0.1}
PATTERN = "gated_deltanet(heads=1) + mom(memories=3, z=0.1) + sliding_window(heads=1, window=4)"
SPEC = {"width": 16, "depth": 3, "vocab": 29, "pattern": PATTERN, "mlp": MLP}
RANKS = 2
WRAPPED = {"mixers and MLPs": (Mixer, Mlp), "layers": Layer, "every module": nn.Module}


def build_model() -> LanguageModel:
    torch.manual_seed(0)
    return StackSpec.model_validate(SPEC).build(backend="reference")


def build_rwkv7() -> LanguageModel:
    """Weights large enough that the first layer's values change the loss."""
    torch.manual_seed(0)
    model = StackSpec(width=16, depth=2, vocab=29, pattern="rwkv7(heads=1)", mlp={"width": 8}).build("reference")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def build_mixed() -> LanguageModel:
    """All kinds of side outputs, and states in float32 and of attention."""
    torch.manual_seed(0)
    pattern = "2*rwkv7(heads=1) + mom(memories=3, active=1, z=0.1) + sliding_window(heads=1, window=4)"
    model = StackSpec(width=16, depth=4, vocab=29, pattern=pattern, mlp=MLP).build("reference")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def decode(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    state, logits = model.init_state(tokens_BT.shape[0], tokens_BT.shape[1]), []
    for token in tokens_BT.split(1, 1):
        out, state = model(token, state)
        logits.append(out)
    return torch.cat(logits, 1)


def make_batch() -> Tensor:
    return torch.randint(29, (2 * RANKS, 8), generator=torch.Generator().manual_seed(1))


def wrap(strategy: str) -> nn.Module:
    objective = Objective(build_model())
    if strategy == "ddp":
        return DistributedDataParallel(objective)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in objective.model.stack.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(objective, mesh=mesh)


def shard_with_mixed_precision(root: nn.Module, kinds: type | tuple[type, ...]) -> nn.Module:
    mesh, policy = dist.device_mesh.init_device_mesh("cpu", (RANKS,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in reversed(list(root.modules())[1:]):
        if isinstance(module, kinds) and not isinstance(module, nn.ModuleList | nn.ModuleDict | LanguageModel):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(root, mesh=mesh, mp_policy=policy)


def run_rank(rank: int, folder: str) -> None:
    """Save the gradients of each strategy. One process runs both, because importing torch takes most of the time."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    rows = make_batch()[2 * rank : 2 * rank + 2]
    for strategy in ("ddp", "fsdp2"):
        objective = wrap(strategy)
        objective(rows[:, :-1], rows[:, 1:]).backward()
        gradients = {}
        for name, parameter in objective.named_parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name.removeprefix("module.")] = whole
        if rank == 0:
            torch.save(gradients, f"{folder}/{strategy}.pt")
    objective, mesh = Objective(build_rwkv7()), dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in objective.model.stack.layers:  # a mixed-precision policy copies the containers among the arguments
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    loss = fully_shard(objective, mesh=mesh)(rows[:, :-1], rows[:, 1:])
    if rank == 0:
        torch.save(loss.detach(), f"{folder}/rwkv7.pt")
    losses, logits = {}, {}
    for name, kinds in WRAPPED.items():
        objective = shard_with_mixed_precision(Objective(build_mixed()), kinds)
        losses[name] = objective(rows[:, :-1], rows[:, 1:])
        losses[name].backward()
        assert all(parameter.grad is not None for parameter in objective.parameters()), name
        with torch.no_grad():
            logits[name] = decode(shard_with_mixed_precision(build_mixed(), kinds), rows)
    if rank == 0:
        torch.save((losses, logits), f"{folder}/mixed.pt")
    dist.barrier()
    os._exit(0)  # a normal exit has hung on threads of gloo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the gradients that two processes computed."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("parallel")
    mp.spawn(run_rank, (str(folder),), nprocs=RANKS)
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_give_the_gradients_of_one(strategy: str, folder: Path) -> None:
    objective = Objective(build_model())
    for rows in make_batch().split(2):  # the load-balance loss is one of each rank's rows
        (objective(rows[:, :-1], rows[:, 1:]) / RANKS).backward()
    gradients = torch.load(folder / f"{strategy}.pt")
    assert gradients.keys() == dict(objective.named_parameters()).keys()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.timeout(180)
def test_mixed_precision_keeps_the_values_that_layers_share(folder: Path) -> None:
    rows = make_batch()[:2]
    expected = build_rwkv7().loss(rows[:, :-1], rows[:, 1:])
    torch.testing.assert_close(torch.load(folder / "rwkv7.pt"), expected.detach(), rtol=1e-5, atol=0)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_mixed_precision_keeps_losses_and_states(wrapped: str, folder: Path) -> None:
    """The loss includes three auxiliary losses; decoding equals that of the unwrapped model."""
    losses, logits = torch.load(folder / "mixed.pt")
    rows, model = make_batch()[:2], build_mixed()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    expected = model.losses(rows[:, :-1], rows[:, 1:])
    assert expected.auxiliary.keys() == {"moe_balance", "mom_balance", "mom_z"}
    torch.testing.assert_close(losses[wrapped].detach(), expected.total.detach(), rtol=2e-3, atol=0)
    assert expected.total - expected.cross_entropy > 0.05 * expected.total  # the tolerance notices a lost loss
    with torch.no_grad():
        assert relative_error(logits[wrapped], model(rows)[0]) < 0.02
