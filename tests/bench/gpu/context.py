"""Time updates of long sequences that are split over GPUs: torchrun --nproc-per-node 4 context.py OUT.json [WORK,...]

For each work of WORKS the whole sequence runs on one GPU, and split over all of them. Prints and stores the times of
forward and backward, queued from eager code and captured in CUDA graphs, the efficiency, which is the time of one GPU
divided by n times that of n, and the largest relative difference between the results of both. If fla-core is
installed, its context parallelism runs beside the gated delta rule.

    python context.py OUT.json WORK,... --model N

runs on one GPU the work of one rank of N, with a local copy in place of the exchange: a bound without communication.

    torchrun --nproc-per-node 4 context.py OUT.json PRESET,... --step

times forward and backward of models in bfloat16, with recomputed layers and without the reduction of gradients: a row
of 131,072 tokens over all GPUs against rows of equal parts of it, one on each.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from deltazoo.backends.context_parallel import exchange
from deltazoo.backends.context_parallel.plan import Cut, make_plan, most_segments
from deltazoo.backends.context_parallel.update import carried_update
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.dispatch import BoundUpdate, bind
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.model.compilation import compile_layers
from deltazoo.blocks.parallel.context import ContextBatch, ContextParallel
from deltazoo.blocks.spec.stack_spec import preset


class Work(NamedTuple):
    """One update. lengths: of packed documents; (): one document."""

    spec: UpdateSpec
    T: int
    H: int
    HV: int
    K: int
    V: int
    lengths: tuple[int, ...] = ()

    @property
    def documents(self) -> list[int]:
        """The bounds of the documents."""
        bounds = [0]
        for length in self.lengths or (self.T,):
            bounds.append(bounds[-1] + length)
        return bounds


GDN, KDA = UpdateSpec(decay="head", beta="head"), UpdateSpec(decay="channel", beta="head")
MAMBA2 = UpdateSpec(decay="head", transition="additive", scale=1.0)
RWKV7 = UpdateSpec(decay="channel", transition="dplr", scale=1.0)
PACK = (40_000, 1_200, 300, 17_000, 5_000, 9_000, 700, 22_000, 4_000, 12_000, 2_500, 8_000, 64, 6_000, 1_308, 2_000)
WORKS = {
    "gdn_131072": Work(GDN, 131_072, 16, 32, 128, 128),
    "gdn_32768": Work(GDN, 32_768, 16, 32, 128, 128),
    "kda_131072": Work(KDA, 131_072, 16, 16, 128, 128),
    "mamba2_131072": Work(MAMBA2, 131_072, 1, 64, 128, 64),
    "rwkv7_131072": Work(RWKV7, 131_072, 64, 64, 64, 64),
    "gdn_pack": Work(GDN, 131_072, 16, 32, 128, 128, PACK),
}
GATES = ("log_decay", "beta")


def draw(work: Work) -> dict[str, Tensor]:
    """Draw the operands of the whole work; every rank draws the same."""
    generator = torch.Generator("cuda").manual_seed(0)
    operands = {}
    for name, shape in work.spec.operands(1, work.T, work.H, work.HV, work.K, work.V).items():
        x = torch.randn(
            shape, generator=generator, device="cuda", dtype=torch.float32 if name in GATES else torch.bfloat16
        )
        if name == "log_decay":
            x = -0.1 * x.sigmoid()
        if name == "beta":
            x = x.sigmoid().bfloat16()
        if name in ("q", "k", "a", "b"):
            x = torch.nn.functional.normalize(x, dim=-1)
        if name in ("a", "b"):
            x = x * (-0.5 if name == "a" else 0.5)
        operands[name] = x
    return operands


def step_of(
    function: Callable[[dict[str, Tensor]], Tensor], operands: dict[str, Tensor], d_o: Tensor
) -> Callable[[], Any]:
    """Return a function that computes the output and all gradients."""
    leaves = {name: x.clone().requires_grad_() for name, x in operands.items()}

    def step() -> tuple[Tensor, ...]:
        o = function(leaves)
        return o, *torch.autograd.grad(o, list(leaves.values()), d_o)

    return step


def whole_step(bound: BoundUpdate, work: Work, operands: dict[str, Tensor], d_o: Tensor) -> Callable[[], Any]:
    """The work on one GPU."""
    cu_seqlens = torch.tensor(work.documents, dtype=torch.int32, device="cuda") if work.lengths else None
    return step_of(lambda x: bound(UpdateInputs(**x, cu_seqlens=cu_seqlens)).o, operands, d_o)


def split_step(bound: BoundUpdate, batch: ContextBatch, operands: dict[str, Tensor], d_o: Tensor) -> Callable[[], Any]:
    """The work of this rank."""
    local = {name: batch.shard(x) for name, x in operands.items()}
    return step_of(lambda x: carried_update(bound, UpdateInputs(**x), batch.plan).o, local, batch.shard(d_o))


def milliseconds(run: Callable[[], Any], calls: int = 5, repeats: int = 5) -> float:
    """Return the median time of a call, on the slowest rank."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if dist.is_initialized():
            dist.barrier()
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    median = torch.tensor(statistics.median(times), device="cuda")
    if dist.is_initialized():
        dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a step in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog thread queries events
        step()
    return graph.replay


def difference(value: Tensor, expected: Tensor) -> float:
    """Return the relative error in the RMS norm; on the worst rank."""
    error = (value.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12)
    if dist.is_initialized():
        dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error)


def differences(
    whole: tuple[Tensor, ...], split: tuple[Tensor, ...], batch: ContextBatch, names: list[str]
) -> dict[str, float]:
    """Return the relative difference between the results of both steps at this rank's tokens."""
    pairs = zip(["o", *names], whole, split, strict=True)
    return {name: difference(s, batch.shard(w)) for name, w, s in pairs}


def fla_step(work: Work, operands: dict[str, Tensor], d_o: Tensor, batch: ContextBatch) -> Callable[[], Any]:
    """The work of this rank by flash-linear-attention. Raises: ImportError."""
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    bounds = torch.tensor(work.documents, dtype=torch.int64, device="cuda")
    context = build_cp_context(bounds, dist.group.WORLD, cu_seqlens_cpu=bounds.cpu())
    local = {name: batch.shard(x) for name, x in operands.items()}

    def function(x: dict[str, Tensor]) -> Tensor:
        return chunk_gated_delta_rule(
            x["q"], x["k"], x["v"], x["log_decay"], x["beta"], cu_seqlens=context.cu_seqlens, cp_context=context
        )[0]

    return step_of(function, local, batch.shard(d_o))


def measure(name: str, parallel: ContextParallel, graphs: bool) -> dict[str, Any]:
    """Measure one work. Without `graphs` also compare the results."""
    work, n = WORKS[name], dist.get_world_size()
    operands = draw(work)
    d_o = torch.randn(1, work.T, work.HV, work.V, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(d_o, 0)
    bound = bind(work.spec, "triton")
    batch = parallel.plan(1, work.T, work.documents)
    whole, split = whole_step(bound, work, operands, d_o), split_step(bound, batch, operands, d_o)
    row: dict[str, Any] = {"work": name, "gpus": n, "mode": "graph" if graphs else "eager"}
    if not graphs:
        row["difference"] = differences(whole(), split(), batch, list(operands))
    mode = captured if graphs else lambda step: step
    row["one_gpu_ms"], row["split_ms"] = milliseconds(mode(whole)), milliseconds(mode(split))
    row["efficiency"] = row["one_gpu_ms"] / (n * row["split_ms"])
    return row


def measure_fla(name: str, parallel: ContextParallel) -> dict[str, Any]:
    """Measure flash-linear-attention's context parallelism on one work, queued from eager code."""
    work = WORKS[name]
    operands = draw(work)
    d_o = torch.randn(1, work.T, work.HV, work.V, device="cuda", dtype=torch.bfloat16)
    dist.broadcast(d_o, 0)
    batch = parallel.plan(1, work.T, work.documents)
    row: dict[str, Any] = {"work": name, "gpus": dist.get_world_size(), "mode": "FLA, eager"}
    whole = whole_step(bind(work.spec, "triton"), work, operands, d_o)
    try:
        fla = fla_step(work, operands, d_o, batch)
        row["difference"] = differences(whole(), fla(), batch, list(operands))
        row["split_ms"] = milliseconds(fla)
    except Exception as error:  # a failure of the peer is a result
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def measure_step(name: str, parallel: ContextParallel, T: int = 131_072) -> dict[str, Any]:
    """Measure a model's step with context parallelism and with data parallelism."""
    n = dist.get_world_size()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = preset(name).build().bfloat16()
    compile_layers(model.checkpoint_layers("full"))
    rows = torch.randint(model.spec.vocab, (1, T + 1), device="cuda")
    dist.broadcast(rows, 0)
    batch, part = parallel.plan(1, T), T // n

    def run(*arguments: Any) -> Callable[[], Any]:
        def step() -> None:
            model.zero_grad()
            model.loss(*arguments).backward()

        return step

    data = run(rows[:, :part].contiguous(), rows[:, 1 : part + 1].contiguous())
    context = run(batch.shard(rows[:, :-1]), batch.shard(rows[:, 1:]), batch.context)
    row: dict[str, Any] = {"work": f"step of {name}", "gpus": n, "tokens": T}
    row["data_parallel_ms"] = milliseconds(data, calls=1, repeats=3)
    row["context_parallel_ms"] = milliseconds(context, calls=1, repeats=3)
    row["efficiency"] = row["data_parallel_ms"] / row["context_parallel_ms"]
    row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row


class LocalCopies:
    """Collectives of `ranks` equal ranks, computed by copies on this GPU."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def all_gather_into_tensor(self, x: Tensor, *_: Any) -> Tensor:
        """Return x for each rank."""
        return x.repeat(self.ranks, *[1] * (x.dim() - 1))

    def reduce_scatter_tensor(self, x: Tensor, *_: Any) -> Tensor:
        """Return the sum of the ranks' parts."""
        return x.unflatten(0, (self.ranks, -1)).sum(0)

    def wait_tensor(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


def model(name: str, n: int) -> dict[str, Any]:
    """Time one rank of n without communication."""
    exchange._ops = LocalCopies(n)
    work = WORKS[name]
    operands = draw(work)
    d_o = torch.randn(1, work.T, work.HV, work.V, device="cuda", dtype=torch.bfloat16)
    bound, row = bind(work.spec, "triton"), {"work": name, "gpus": n, "mode": "graph, no communication"}
    cut = Cut(tuple(g * work.T // n for g in range(n + 1)), tuple(range(n)))
    plan = make_plan(work.documents, cut, n // 2, n, "", most_segments(work.documents, cut), "cuda")
    batch = ContextBatch(plan, (1, work.T))
    row["one_gpu_ms"] = milliseconds(captured(whole_step(bound, work, operands, d_o)))
    row["split_ms"] = milliseconds(captured(split_step(bound, batch, operands, d_o)))
    row["efficiency"] = row["one_gpu_ms"] / (n * row["split_ms"])
    return row


def main() -> None:
    arguments = sys.argv[1:]
    ranks = int(arguments.pop(arguments.index("--model") + 1)) if "--model" in arguments else 0
    steps = "--step" in arguments
    out, *names = [x for x in arguments if not x.startswith("--")]
    works = names[0].split(",") if names else list(WORKS)
    rows = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        if not dist.is_initialized() or dist.get_rank() == 0:
            worst = {key: max(row[key].values()) for key in ("difference",) if key in row}
            print({key: round(x, 4) if isinstance(x, float) else x for key, x in (row | worst).items()}, flush=True)
            with open(out, "w") as file:
                json.dump({"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file)

    if ranks:
        for name in works:
            report(model(name, ranks))
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("context",))
    parallel = ContextParallel(mesh)
    if steps:
        for name in works:
            report(measure_step(name, parallel))
        dist.destroy_process_group()
        return
    for graphs in (False, True):
        for name in works:
            report(measure(name, parallel, graphs))
            torch.cuda.empty_cache()
    for name in works:
        if WORKS[name].spec == GDN:
            report(measure_fla(name, parallel))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
