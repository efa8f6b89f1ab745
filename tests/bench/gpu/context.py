"""Time updates and steps of models whose tokens are split over GPUs: torchrun --nproc-per-node 4 context.py OUT.json

    --updates WORK,...   updates of WORKS, the whole on one GPU and split over all: captured in CUDA graphs, and split
                         also queued from eager code; efficiency is the time of one GPU divided by n times that of n
    --layers MIXER,...   forward and backward of layers of width 2,048 with default fields, of LAYER_TOKENS tokens of
                         each GPU: the whole on one GPU and split over all, compiled
    --pairs              with --updates: split over the two GPUs of each pair
    --steps PRESET,...   forward and backward of models in bfloat16, layers compiled and recomputed: a row of 32,768
                         tokens for each GPU, over all of them, against rows of equal parts of it, one on each
    --nccl               with --steps or --longest: exchange summaries by NCCL; updates are timed with both exchanges
    --longest PRESET T   a training step of a row of T tokens, with FSDP2 over the same GPUs and AdamW, and its memory
    --fla WORK,...       flash-linear-attention's context parallelism, also captured; it may hang: use timeout

    python context.py OUT.json ... --alone 4

does the work of one rank of 4 on one GPU: the collectives of torch's fake group copy the rank's own tensors. This
compiles all kernels, and is a bound without communication. --profile also prints the time of each kernel, and --tiny
checks this script on a CPU. All results are printed and stored as they arrive.
"""

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from deltazoo.backends.context_parallel.update import carried_update
from deltazoo.backends.triton.tiles import cdiv
from deltazoo.backends.update.base import UpdateInputs
from deltazoo.backends.update.dispatch import BoundUpdate, bind
from deltazoo.backends.update.spec import UpdateSpec
from deltazoo.blocks.model.compilation import compile_layers
from deltazoo.blocks.parallel.context import ContextBatch, ContextParallel
from deltazoo.blocks.spec.stack_spec import preset
from deltazoo.blocks.training.objective import Objective
from deltazoo.mixers.core.config import parse
from deltazoo.mixers.core.mixer import Context


class Work(NamedTuple):
    """One update. lengths: of packed documents; (): one document. decay: twice the mean of -log_decay."""

    spec: UpdateSpec
    T: int
    H: int
    HV: int
    K: int
    V: int
    lengths: tuple[int, ...] = ()
    decay: float = 0.1

    @property
    def documents(self) -> list[int]:
        """The bounds of the documents."""
        bounds = [0]
        for length in self.lengths or (self.T,):
            bounds.append(bounds[-1] + length)
        return bounds

    @property
    def calls(self) -> int:
        """Calls of a measurement: more of short ones, because the GPUs do not start the first one together."""
        return 5 if self.T > 100_000 else 20


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
    "gdn_slow_131072": Work(GDN, 131_072, 16, 32, 128, 128, decay=1e-4),  # every state reaches the end
    "gdn_pack": Work(GDN, 131_072, 16, 32, 128, 128, PACK),
}
GATES = ("log_decay", "beta")
STEP_TOKENS, LAYER_TOKENS, TINY_SHARE = 32_768, 8192, 1024  # the first two of each GPU


class Run(NamedTuple):
    """The processes of a run. mesh: of context parallelism. tiny: on a CPU, with tokens divided by TINY_SHARE.

    parallel: with the exchange of the devices, or NCCL. collective: with NCCL.
    """

    parallel: ContextParallel
    collective: ContextParallel
    mesh: DeviceMesh
    tiny: bool
    profile: bool

    @property
    def ranks(self) -> int:
        """The ranks that share a sequence."""
        return self.mesh.size()

    @property
    def device(self) -> str:
        """Of all tensors."""
        return "cpu" if self.tiny else "cuda"

    @property
    def backend(self) -> str:
        """Of updates."""
        return "compile" if self.tiny else "triton"

    def work(self, name: str) -> Work:
        """Return a work of WORKS."""
        work = WORKS[name]
        if not self.tiny:
            return work
        lengths = tuple(cdiv(n, TINY_SHARE) for n in work.lengths)
        return work._replace(T=sum(lengths) or work.T // TINY_SHARE, lengths=lengths, H=1, HV=work.HV // work.H)


def draw(work: Work, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """Draw the operands of the whole work, and the gradient of its output; every rank draws the same."""
    generator = torch.Generator(device).manual_seed(0)
    operands = {}
    for name, shape in work.spec.operands(1, work.T, work.H, work.HV, work.K, work.V).items():
        x = torch.randn(
            shape, generator=generator, device=device, dtype=torch.float32 if name in GATES else torch.bfloat16
        )
        if name == "log_decay":
            x = -work.decay * x.sigmoid()
        if name == "beta":
            x = x.sigmoid().bfloat16()
        if name in ("q", "k", "a", "b"):
            x = torch.nn.functional.normalize(x, dim=-1)
        if name in ("a", "b"):
            x = x * (-0.5 if name == "a" else 0.5)
        operands[name] = x
    return operands, torch.randn(operands["v"].shape, generator=generator, device=device, dtype=torch.bfloat16)


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
    cu_seqlens = torch.tensor(work.documents, dtype=torch.int32, device=d_o.device) if work.lengths else None
    return step_of(lambda x: bound(UpdateInputs(**x, cu_seqlens=cu_seqlens)).o, operands, d_o)


def split_step(bound: BoundUpdate, batch: ContextBatch, operands: dict[str, Tensor], d_o: Tensor) -> Callable[[], Any]:
    """The work of this rank."""
    local = {name: batch.shard(x) for name, x in operands.items()}
    return step_of(lambda x: carried_update(bound, UpdateInputs(**x), batch.plan).o, local, batch.shard(d_o))


def milliseconds(run: Callable[[], Any], calls: int = 5, repeats: int = 5) -> float:
    """Return the median time of a call, on the slowest rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run()
    times = []
    for _ in range(repeats):
        dist.barrier()
        _synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        _synchronize()
        times.append(1e3 * (time.perf_counter() - start) / calls)
    median = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a step in a CUDA graph."""
    if not torch.cuda.is_available():
        return step
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


def kernel_times(run: Callable[[], Any], calls: int = 5) -> dict[str, list[float]]:
    """Return the launches of each kernel per call, and their milliseconds; the slowest first."""
    from torch.profiler import ProfilerActivity, profile

    run()
    _synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as records:
        for _ in range(calls):
            run()
        _synchronize()
    events = sorted(records.key_averages(), key=lambda event: -event.self_device_time_total)
    times = {event.key[:60]: [event.count / calls, event.self_device_time_total / calls / 1e3] for event in events}
    return dict(list(times.items())[:45])


def difference(value: Tensor, expected: Tensor) -> float:
    """Return the relative error in the RMS norm; on the worst rank."""
    error = (value.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-12)
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return float(error.detach())


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


def measure(name: str, run: Run) -> dict[str, Any]:
    """Measure one update."""
    work = run.work(name)
    operands, d_o = draw(work, run.device)
    bound = bind(work.spec, run.backend)
    whole = whole_step(bound, work, operands, d_o)
    row: dict[str, Any] = {"work": name, "gpus": run.ranks, "one_gpu_ms": milliseconds(captured(whole), work.calls)}
    exchanges = {"symmetric": run.parallel} if run.parallel.symmetric else {}
    for exchange, parallel in (exchanges | {"collective": run.collective}).items():
        batch = parallel.plan(1, work.T, work.documents)
        split = split_step(bound, batch, operands, d_o)
        row[f"{exchange}_ms"] = milliseconds(captured(split), work.calls)
        row[f"{exchange}_efficiency"] = row["one_gpu_ms"] / (run.ranks * row[f"{exchange}_ms"])
        row[f"{exchange}_difference"] = differences(whole(), split(), batch, list(operands))
        row[f"{exchange}_eager_ms"] = milliseconds(split)
    if run.profile:
        row["kernels"], row["kernels_of_whole"] = kernel_times(captured(split)), kernel_times(captured(whole))
    return row


def measure_fla(name: str, run: Run) -> dict[str, Any]:
    """Measure flash-linear-attention's context parallelism on one work."""
    work = run.work(name)
    operands, d_o = draw(work, run.device)
    batch = run.parallel.plan(1, work.T, work.documents)
    row: dict[str, Any] = {"work": name, "gpus": run.ranks, "library": "FLA"}
    whole = whole_step(bind(work.spec, run.backend), work, operands, d_o)
    try:
        fla = fla_step(work, operands, d_o, batch)
        row["difference"] = differences(whole(), fla(), batch, list(operands))
        row["eager_split_ms"] = milliseconds(fla)
        row["split_ms"] = milliseconds(captured(fla), work.calls)
    except Exception as error:  # a failure of the peer is a result
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def measure_layer(name: str, run: Run) -> dict[str, Any]:
    """Measure the forward and backward pass of a layer, of all tokens on one GPU and of those of the ranks."""
    T = run.ranks * (LAYER_TOKENS // TINY_SHARE if run.tiny else LAYER_TOKENS)
    torch.manual_seed(0)
    width, dtype = (64, torch.float32) if run.tiny else (2048, torch.bfloat16)
    layer = parse({"mixer": name}).build(width).to(run.device, dtype)
    x, d_y = torch.randn(2, 1, T, width, dtype=dtype, device=run.device)
    batch = run.parallel.plan(1, T)
    torch.compiler.reset()
    function = torch.compile(layer, backend="eager" if run.tiny else "inductor")

    def step(x: Tensor, d_y: Tensor, context: Context) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [x.clone().requires_grad_(), *layer.parameters()]

        def run_step() -> tuple[Tensor, ...]:
            y = function(leaves[0], None, context).y
            return y, *torch.autograd.grad(y, leaves, d_y, materialize_grads=True)

        return run_step

    whole = step(x, d_y, Context(cu_seqlens=torch.tensor([0, T], dtype=torch.int32, device=run.device)))
    split = step(batch.shard(x), batch.shard(d_y), batch.context)
    row: dict[str, Any] = {"work": f"layer of {name}", "gpus": run.ranks, "tokens": T}
    row["one_gpu_ms"], row["split_ms"] = milliseconds(whole), milliseconds(split)
    row["efficiency"] = row["one_gpu_ms"] / (run.ranks * row["split_ms"])
    row["difference"] = differences(whole()[:2], split()[:2], batch, ["x"])
    return row


def model_rows(name: str, T: int, run: Run) -> tuple[Any, Tensor]:
    """Build a model, and draw the tokens of a row and the one after them."""
    torch.manual_seed(0)
    with torch.device(run.device):
        spec = preset(name)
        model = (spec.model_copy(update={"depth": 2}) if run.tiny else spec).build()
    generator = torch.Generator(run.device).manual_seed(0)
    return model, torch.randint(model.spec.vocab, (1, T + 1), device=run.device, generator=generator)


def measure_step(name: str, run: Run) -> dict[str, Any]:
    """Measure a model's forward and backward with context parallelism and with data parallelism."""
    T = run.ranks * (STEP_TOKENS // TINY_SHARE if run.tiny else STEP_TOKENS)
    model, rows = model_rows(name, T, run)
    model.bfloat16()
    compile_layers(model.checkpoint_layers("full"), "eager" if run.tiny else "inductor")
    batch, part = run.parallel.plan(1, T), T // run.ranks

    def step(*arguments: Any) -> Callable[[], Any]:
        def run_step() -> None:
            model.zero_grad()
            model.loss(*arguments).backward()

        return run_step

    data = step(rows[:, :part].contiguous(), rows[:, 1 : part + 1].contiguous())
    context = step(batch.shard(rows[:, :-1]), batch.shard(rows[:, 1:]), batch.context)
    row: dict[str, Any] = {"work": f"step of {name}", "gpus": run.ranks, "tokens": T}
    row["data_parallel_ms"] = milliseconds(data, calls=1, repeats=3)
    row["context_parallel_ms"] = milliseconds(context, calls=1, repeats=3)
    row["efficiency"] = row["data_parallel_ms"] / row["context_parallel_ms"]
    if not run.tiny:
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    if run.profile:
        row["kernels"], row["kernels_of_data_parallel"] = kernel_times(context, 1), kernel_times(data, 1)
    return row


def measure_longest(name: str, T: int, run: Run) -> dict[str, Any]:
    """Measure a training step of one row of T tokens: FSDP2 and context parallelism over the same ranks, AdamW."""
    model, rows = model_rows(name, T, run)
    compile_layers(model.checkpoint_layers("full"), "eager" if run.tiny else "inductor")
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    objective = Objective(model)
    for layer in model.stack.layers:
        fully_shard(layer, mesh=run.mesh, mp_policy=policy)
    fully_shard(objective, mesh=run.mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(objective.parameters(), 1e-4, foreach=True)
    batch = run.parallel.plan(1, T)
    tokens, targets = batch.shard(rows[:, :-1]), batch.shard(rows[:, 1:])
    losses = []

    def step() -> None:
        loss = objective(tokens, targets, batch.context)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    row: dict[str, Any] = {"work": f"training step of {name}, FSDP2", "gpus": run.ranks, "tokens": T}
    row["ms"] = milliseconds(step, calls=1, repeats=1)
    row["losses"] = [round(float(loss), 4) for loss in losses]
    if not run.tiny:
        row["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def join(alone: int, tiny: bool) -> None:
    """Join the process group: that of torchrun, or with `alone` ranks a fake one that contains this process."""
    if alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=alone // 2, world_size=alone)
        return
    if not tiny:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if tiny else "nccl")


def command_line() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("out")
    for name in ("updates", "layers", "steps", "fla"):
        parser.add_argument(f"--{name}", type=lambda x: x.split(","), default=[])
    parser.add_argument("--longest", nargs=2)
    parser.add_argument("--alone", type=int, default=0)
    for name in ("nccl", "pairs", "profile", "tiny"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main() -> None:
    chosen = command_line()
    join(chosen.alone, chosen.tiny)
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()

    def report(measured: Callable[[], dict[str, Any]]) -> None:
        row = measured()
        row["seconds"] = round(time.perf_counter() - started, 1)
        rows.append(row)
        if dist.get_rank() == (chosen.alone // 2):
            card = "cpu" if chosen.tiny else torch.cuda.get_device_name()
            shown = {key: x for key, x in row.items() if not key.startswith("kernels")}
            shown |= {key: max(x.values()) for key, x in row.items() if key.endswith("difference")}
            print({key: round(x, 4) if isinstance(x, float) else x for key, x in shown.items()}, flush=True)
            with open(chosen.out, "w") as file:
                json.dump({"card": card, "torch": torch.__version__, "rows": rows}, file)
        if not chosen.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    size, kind = dist.get_world_size(), "cpu" if chosen.tiny else "cuda"
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("context",))
    if chosen.pairs:
        mesh = init_device_mesh(kind, (size // 2, 2), mesh_dim_names=("data", "context"))["context"]
    collective = ContextParallel(mesh, symmetric=False)
    parallel = collective if chosen.nccl or chosen.alone else ContextParallel(mesh)
    run = Run(parallel, collective, mesh, chosen.tiny, chosen.profile)
    if dist.get_rank() == 0:
        print(parallel, flush=True)
    for name in chosen.updates:
        report(lambda name=name: measure(name, run))
    for name in chosen.layers:
        report(lambda name=name: measure_layer(name, run))
    for name in chosen.steps:
        report(lambda name=name: measure_step(name, run))
    if chosen.longest:
        report(lambda: measure_longest(chosen.longest[0], int(chosen.longest[1]), run))
    for name in chosen.fla:
        report(lambda name=name: measure_fla(name, run))
    os._exit(0)  # after a failure of one rank the others would wait for it


if __name__ == "__main__":
    main()
