"""Context parallelism where few tensors need a gradient: all ranks run the same collectives in the backward."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_configs import WIDTH, ZOO
from torch.distributed.device_mesh import init_device_mesh

from deltazoo.blocks.parallel.context import ContextParallel
from deltazoo.mixers.core.mixer import Context

TOKENS = 17


def run_rank(rank: int, names: list[str], folder: str) -> None:
    """Save the relative errors of the gradient of each parameter, if x and the other parameters need none."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    parallel = ContextParallel(init_device_mesh("cpu", (2,), mesh_dim_names=("context",))["context"])
    errors: dict[str, float] = {}
    for name in names:
        torch.manual_seed(0)
        mixer = ZOO[name].build(WIDTH, backend="reference").double().requires_grad_(False)
        x, weight = torch.randn(2, 1, TOKENS, WIDTH, dtype=torch.float64)
        whole = Context(cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32))
        for sizes in ((TOKENS, 0), (0, TOKENS), (1, TOKENS - 1)):
            batch = parallel.plan(1, TOKENS, sizes=sizes)
            for path, parameter in mixer.named_parameters():
                parameter.requires_grad_()
                expected = torch.autograd.grad((mixer(x, None, whole).y * weight).sum(), parameter)[0]
                loss = (mixer(batch.shard(x), None, batch.context).y * batch.shard(weight)).sum()
                gradient = torch.autograd.grad(loss, parameter)[0] if loss.requires_grad else 0 * parameter.detach()
                dist.all_reduce(gradient)
                parameter.requires_grad_(False)
                error = (gradient - expected).norm() / expected.norm().clamp(min=1e-9)
                errors[f"{name}, {sizes}: {path}"] = float(error)
    torch.save(errors, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parallel
@pytest.mark.parametrize("names", [["mom"], ["rwkv6", "mesa", "titans", "log_linear_gdn", "hyena", "gated_deltanet"]])
def test_one_trained_parameter_beside_an_empty_rank(names: list[str], tmp_path: Path) -> None:
    mp.spawn(run_rank, (names, str(tmp_path)), nprocs=2)
    for rank in range(2):
        wrong = {key: e for key, e in torch.load(tmp_path / f"{rank}.pt").items() if not e < 1e-9}
        assert not wrong, (rank, wrong)
