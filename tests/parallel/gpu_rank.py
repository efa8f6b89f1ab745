"""Compare mixers whose tokens are split over GPUs with one GPU, in bfloat16."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from deltazoo.blocks.parallel.context import ContextParallel, Layout
from deltazoo.mixers.core.config import parse
from deltazoo.mixers.core.mixer import Context

MIXERS = (
    {"mixer": "gated_deltanet", "heads": 2}, {"mixer": "gated_deltanet", "key_width": 200, "value_width": 400},
    {"mixer": "kda", "heads": 2}, {"mixer": "mamba2"}, {"mixer": "rwkv7"},
    {"mixer": "sliding_window", "heads": 2, "window": 100}, {"mixer": "attention", "heads": 2},
)  # fmt: skip
WIDTH, DOCUMENTS = 256, (0, 400, 650, 650, 900)


def errors_of(config: dict[str, object], parallel: ContextParallel) -> list[float]:
    """Return the relative errors of the output and of the gradients of x and all parameters, summed over ranks."""
    torch.manual_seed(0)
    mixer = parse(config).build(WIDTH).cuda().bfloat16()
    x, d_y = torch.randn(2, 1, DOCUMENTS[-1], WIDTH, dtype=torch.bfloat16).cuda()
    batch = parallel.plan(1, DOCUMENTS[-1], DOCUMENTS)
    whole = Context(cu_seqlens=torch.tensor(DOCUMENTS, dtype=torch.int32, device="cuda"))
    expected = _run(mixer, x, d_y, whole)
    actual = _run(mixer, batch.shard(x), batch.shard(d_y), batch.context)
    actual[2:] = (gradient.float() for gradient in actual[2:])  # of parameters, summed as FSDP2 does
    for gradient in actual[2:]:
        dist.all_reduce(gradient)
    expected[:2] = map(batch.shard, expected[:2])
    return [
        float((a - b).float().norm() / b.float().norm().clamp(min=1e-6)) for a, b in zip(actual, expected, strict=True)
    ]


def _run(mixer: torch.nn.Module, x: torch.Tensor, d_y: torch.Tensor, context: Context) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = mixer(leaf, None, context).y
    parameters = [p for p in mixer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(y, [leaf, *parameters], d_y, materialize_grads=True)
    return [y.detach(), *(gradient.contiguous() for gradient in gradients)]


def run_gpu_rank(rank: int, ranks: int, layout: Layout, symmetric: bool, folder: str) -> None:
    """Save the largest errors of each mixer on this rank."""
    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("context",))
    parallel = ContextParallel(mesh, layout, symmetric=symmetric)
    torch.save({str(config): errors_of(config, parallel) for config in MIXERS}, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # threads of NCCL may outlast the interpreter
