"""Compare mixers whose tokens are split over GPUs with one GPU, in bfloat16."""

import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from deltazoo.blocks.parallel.context import ContextParallel, Layout
from deltazoo.mixers.core.config import parse
from deltazoo.mixers.core.mixer import Context

MIXERS: dict[str, dict[str, object]] = {
    "gated_deltanet": {"mixer": "gated_deltanet", "heads": 2},
    "two key tiles": {"mixer": "gated_deltanet", "key_width": 200, "value_width": 400},
    "kda": {"mixer": "kda", "heads": 2},
    "mamba2": {"mixer": "mamba2"},
    "rwkv7": {"mixer": "rwkv7"},
    "sliding_window": {"mixer": "sliding_window", "heads": 2, "window": 100},
    "attention": {"mixer": "attention", "heads": 2},
    "path_attention": {"mixer": "path_attention", "heads": 4},
    "log_linear_gdn": {"mixer": "log_linear_gdn", "heads": 2, "value_heads": 4},
    "log_linear_mamba2": {"mixer": "log_linear_mamba2"},
    "momentum_deltanet": {"mixer": "momentum_deltanet", "heads": 4},
    "titans": {"mixer": "titans"},
    "ttt_linear": {"mixer": "ttt_linear"},
    "hyena": {"mixer": "hyena"},
    "mom": {"mixer": "mom", "memory": {"mixer": "gated_deltanet", "heads": 2, "key_width": 32, "value_width": 32}},
}
MIXERS["mom, first piece empty"] = MIXERS["mom"]
WIDTH, DOCUMENTS = 256, (0, 400, 650, 650, 900)


def errors_of(name: str, parallel: ContextParallel) -> dict[str, tuple[float, float]]:
    """Return the relative errors of the output and of the gradients of x and all parameters, summed over ranks.

    Of the tokens split over the ranks, and of one GPU, both compared with the same weights on a CPU in float64.
    """
    torch.manual_seed(0)
    config = MIXERS[name]
    mixer = parse(config).build(WIDTH).bfloat16()
    exact = parse(config).build(WIDTH, backend="reference").double()
    exact.load_state_dict({key: value.double() for key, value in mixer.state_dict().items()})
    x, d_y = torch.randn(2, 1, DOCUMENTS[-1], WIDTH, dtype=torch.bfloat16)
    sizes = None
    if name.endswith("first piece empty"):
        others = parallel.mesh.size() * (2 if parallel.layout == "zigzag" else 1) - 1
        cuts = [DOCUMENTS[-1] * g // others for g in range(others + 1)]
        sizes = [0, *(b - a for a, b in itertools.pairwise(cuts))]
    batch = parallel.plan(1, DOCUMENTS[-1], DOCUMENTS, sizes)
    bounds = torch.tensor(DOCUMENTS, dtype=torch.int32)
    expected = _run(exact, x.double(), d_y.double(), Context(cu_seqlens=bounds))
    mixer, x, d_y = mixer.cuda(), x.cuda(), d_y.cuda()
    one = _run(mixer, x, d_y, Context(cu_seqlens=bounds.cuda()))
    split = _run(mixer, batch.shard(x), batch.shard(d_y), batch.context)
    split[2:] = (gradient.float() for gradient in split[2:])  # of parameters, summed as FSDP2 does
    for gradient in split[2:]:
        dist.all_reduce(gradient)
    one[:2], expected[:2] = map(batch.shard, one[:2]), map(batch.shard, expected[:2])
    names = ["y", "x", *dict(mixer.named_parameters())]
    return {n: (_error(a, e), _error(b, e)) for n, a, b, e in zip(names, split, one, expected, strict=True)}


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-6))


def _run(mixer: torch.nn.Module, x: torch.Tensor, d_y: torch.Tensor, context: Context) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = mixer(leaf, None, context).y
    gradients = torch.autograd.grad(y, [leaf, *mixer.parameters()], d_y, materialize_grads=True)
    return [y.detach(), *(gradient.contiguous() for gradient in gradients)]


def run_gpu_rank(rank: int, name: str, ranks: int, layout: Layout, symmetric: bool, folder: str) -> None:
    """Save the errors of a mixer on this rank."""
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("context",))
    parallel = ContextParallel(mesh, layout, symmetric=symmetric)
    torch.save(errors_of(name, parallel), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # threads of NCCL may outlast the interpreter
