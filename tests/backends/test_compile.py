"""Backend "compile" under torch.compile: one graph, no recompilation, saved memory, error messages."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from deltazoo.backends import conformance
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.conformance import Case
from deltazoo.backends.io.errors import ConfigError, UnsupportedError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.update.base import Backend, UpdateInputs, UpdateOutput, state_dtype
from deltazoo.backends.update.dispatch import bind
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.backends.update.spec import UpdateSpec

# Four specs that reach every branch of the code that is traced; the specs of the zoo are marked slow below.
TRACED = {
    "gated delta": UpdateSpec(decay="head", beta="head"),
    "separate strengths, own erase key, two householders, read before": UpdateSpec(
        decay="head", beta="separate", erase_key="own", erase_from="previous", householders=2, read="before"
    ),
    "rate, channel beta, longhorn": UpdateSpec(decay="rate", beta="channel", reparam="longhorn"),
    "dplr": UpdateSpec(transition="dplr", decay="channel"),
}
SPECS = {
    "gated delta": UpdateSpec(decay="head", beta="head"),
    "channel decay, negative eigenvalues": UpdateSpec(decay="channel", beta="head", negative_eigenvalues="both"),
    "efla, two householders": UpdateSpec(beta="head", reparam="efla", householders=2),
    "additive, fixed, read before": UpdateSpec(transition="additive", decay="fixed", read="before"),
    "rate": UpdateSpec(transition="additive", decay="rate"),
    "dplr": UpdateSpec(transition="dplr", decay="channel"),
    "comba": UpdateSpec(decay="head", beta="separate", erase_from="previous"),
    "own erase key": UpdateSpec(decay="head", beta="head", erase_key="own", erase_from="previous"),
    "channel beta, longhorn": UpdateSpec(decay="head", beta="channel", reparam="longhorn"),
}

ELEMENTWISE = UpdateSpec(transition="additive", decay="head", beta="head")  # with V = 2: the smallest traced graph


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def draw(
    spec: UpdateSpec, B: int, T: int, seed: int = 0, dtype: torch.dtype = torch.float32, V: int = 6
) -> UpdateInputs:
    generator = torch.Generator().manual_seed(seed)
    operands: dict[str, Tensor] = {}
    for name, shape in spec.operands(B, T, 2, 4, 8, V).items():
        x = torch.randn(shape, generator=generator, dtype=state_dtype(dtype))
        if name in ("log_decay", "rate"):
            x = -x.sigmoid()
        elif name in ("beta", "erase", "write", "step"):
            x = x.sigmoid()
        elif name in ("k", "erase_key", "a", "b"):
            x = 0.7 * torch.nn.functional.normalize(x, dim=-1)
        operands[name] = x.to(state_dtype(dtype) if name in ("log_decay", "step", "rate") else dtype).requires_grad_()
    operands["state"] = torch.randn(B, 4, 8, V, generator=generator, dtype=state_dtype(dtype)).requires_grad_()
    return UpdateInputs(**operands)


def gradients(inputs: UpdateInputs, out: UpdateOutput) -> list[Tensor]:
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    losses = [loss for loss in (out.o.sin().sum(), out.state.cos().sum()) if loss.requires_grad]
    return list(torch.autograd.grad(losses, leaves))


def assert_matches_reference(out: UpdateOutput, spec: UpdateSpec, inputs: UpdateInputs) -> None:
    """Compare outputs, final state and all gradients."""
    reference = ReferenceBackend().forward(spec, inputs)
    pairs = [(out.o, reference.o), (out.state, reference.state)]
    pairs += list(zip(gradients(inputs, out), gradients(inputs, reference), strict=True))
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-5)


def with_dynamic_lengths(inputs: UpdateInputs) -> UpdateInputs:
    """Mark T as dynamic; with cu_seqlens the number of sequences too."""
    for name, x in inputs._asdict().items():
        if x is None:
            continue
        if name in ("state", "cu_seqlens"):
            if inputs.cu_seqlens is not None:
                torch._dynamo.mark_dynamic(x, 0)
        elif x.dim() > 2:
            torch._dynamo.mark_dynamic(x, 1)
    return inputs


def assert_one_graph(spec: UpdateSpec, batches: Iterable[UpdateInputs], compiler: str = "aot_eager") -> None:
    """Compile one graph in the caller's torch.compile, and compare its results on every batch."""
    bound = bind(spec, CompileBackend(chunk=16))
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(lambda inputs: bound(inputs), fullgraph=True, backend=counter)
    for inputs in batches:
        assert_matches_reference(compiled(with_dynamic_lengths(inputs)), spec, inputs)
    assert counter.frame_count == 1


@pytest.mark.graphs
@pytest.mark.parametrize("name", TRACED)
def test_callers_torch_compile_gets_one_graph_for_all_lengths(name: str) -> None:
    # AOTAutograd traces the same operators of every spec: the slow test below has the specs with large graphs.
    compiler = "eager" if name in ("rate, channel beta, longhorn", "dplr") else "aot_eager"
    assert_one_graph(TRACED[name], (draw(TRACED[name], 2, T, seed=T) for T in (37, 80, 131, 5)), compiler)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_spec_compiles_to_one_graph_for_all_lengths(name: str) -> None:
    assert_one_graph(SPECS[name], (draw(SPECS[name], 2, T, seed=T) for T in (37, 80, 131, 5)))


def packed(spec: UpdateSpec, bounds: list[int], padding: int = 0) -> UpdateInputs:
    """Draw a pack with `padding` rows after its last sequence."""
    state = torch.randn(len(bounds) - 1, 4, 8, 6, requires_grad=True)
    inputs = draw(spec, 1, bounds[-1] + padding, seed=len(bounds))
    return inputs._replace(state=state, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


PACKS = (([0, 5, 5, 40, 53], 0), ([0, 17, 90], 21), ([0, 16, 32, 48, 49, 64], 0))


@pytest.mark.graphs
def test_packs_of_any_number_of_sequences_share_the_callers_graph() -> None:
    assert_one_graph(SPECS["gated delta"], (packed(SPECS["gated delta"], *pack) for pack in PACKS))


@pytest.mark.graphs
def test_inductor_compiles_once_from_eager_code_for_all_lengths_and_batch_sizes() -> None:
    spec, backend = SPECS["gated delta"], CompileBackend(chunk=16)
    for B, T in ((2, 100), (3, 33), (2, 7), (5, 64), (2, 257)):
        inputs = draw(spec, B, T, seed=T)
        assert_matches_reference(backend.forward(spec, inputs), spec, inputs)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == 1, f"B={B}, T={T} compiled again"


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with "eager" instead of Inductor: Dynamo's graphs, which the tests count, and nothing after them."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.mark.graphs
@pytest.mark.usefixtures("only_traced")
@torch._dynamo.config.patch(recompile_limit=1)
def test_recompile_limit_counts_each_spec_separately() -> None:
    backend = CompileBackend(chunk=16)
    specs = [UpdateSpec(transition="additive", decay=decay) for decay in ("none", "fixed", "head")]
    for spec in specs:
        for T in (40, 71):
            inputs = draw(spec, 2, T, V=2)
            assert_matches_reference(backend.forward(spec, inputs), spec, inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(specs)


@pytest.mark.graphs
@pytest.mark.usefixtures("only_traced")
@torch._dynamo.config.patch(recompile_limit=1)
def test_recompile_limit_counts_each_set_of_operands_with_gradients_separately() -> None:
    spec, backend = ELEMENTWISE, CompileBackend(chunk=16)
    for names in (("q",), ("k", "v"), ("beta",), ("q",)):
        inputs = UpdateInputs(*(None if x is None else x.detach() for x in draw(spec, 2, 40, V=2)))
        for name in names:
            getattr(inputs, name).requires_grad_()
        assert_matches_reference(backend.forward(spec, inputs), spec, inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.graphs
@pytest.mark.usefixtures("only_traced")
@torch._dynamo.config.patch(recompile_limit=1)
def test_eager_calls_recompile_past_the_recompile_limit_for_new_strides() -> None:
    spec, backend = ELEMENTWISE, CompileBackend(chunk=16)
    inputs = draw(spec, 2, 64, V=2)
    for order in ((0, 1, 2, 3), (3, 0, 1, 2), (1, 0, 2, 3)):
        v = inputs.v.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
        strided = inputs._replace(v=v)
        assert_matches_reference(backend.forward(spec, strided), spec, strided)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.usefixtures("only_traced")
def test_eager_calls_compile_under_a_function_mode() -> None:
    spec, backend = UpdateSpec(transition="additive"), CompileBackend(chunk=16)
    inputs = draw(spec, 2, 40)
    with torch.device("cpu"):
        out = backend.forward(spec, inputs)
    assert_matches_reference(out, spec, inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.graphs
@pytest.mark.usefixtures("only_traced")
def test_eager_calls_run_eagerly_under_a_dispatch_mode_and_compile_after_it() -> None:
    spec, backend = UpdateSpec(transition="additive"), CompileBackend(chunk=16)
    inputs = draw(spec, 2, 40)
    for mode, graphs in ((FlopCounterMode(display=False), 0), (nullcontext(), 1), (FlopCounterMode(display=False), 1)):
        with mode:
            assert_matches_reference(backend.forward(spec, inputs), spec, inputs)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        assert not isinstance(mode, FlopCounterMode) or mode.get_total_flops() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", ["head", "channel", "rate"])
def test_largest_finite_decay_gives_the_reference_results(decay: Any, dtype: torch.dtype) -> None:
    spec = UpdateSpec(decay=decay, beta="head")
    x = UpdateInputs(*(None if t is None else t.detach() for t in draw(spec, 2, 40, dtype=dtype)))
    largest = torch.finfo(dtype).max
    for tokens in (slice(5, 6), slice(20, 22)):
        if decay == "rate":
            x.step[:, tokens] = largest
        else:
            x.log_decay[:, tokens] = -largest
    leaves = UpdateInputs(*(None if t is None else t.requires_grad_() for t in x))
    assert_matches_reference(CompileBackend(compiled=False).forward(spec, leaves), spec, leaves)


@pytest.mark.graphs
@pytest.mark.usefixtures("only_traced")
def test_packs_of_any_number_of_sequences_share_a_graph_from_eager_code() -> None:
    spec, backend = SPECS["gated delta"], CompileBackend(chunk=16)
    for pack in PACKS:
        inputs = packed(spec, *pack)
        assert_matches_reference(backend.forward(spec, inputs), spec, inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.graphs
@torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
def test_missing_cxx_compiler_raises_unsupported_error() -> None:
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler"):
        CompileBackend().forward(ELEMENTWISE, draw(ELEMENTWISE, 2, 70, V=2))


@pytest.mark.parametrize("chunk", [0, 8, 48, -64])
def test_chunk_must_be_a_power_of_two_from_16(chunk: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk must be a power of two from 16 to 512, got {chunk}"):
        CompileBackend(chunk=chunk)


def test_results_do_not_depend_on_the_chunk_size() -> None:
    for spec in SPECS.values():
        inputs = draw(spec, 2, 150, dtype=torch.float64)
        expected = ReferenceBackend().forward(spec, inputs)
        for chunk in (16, 32, 128):
            out = CompileBackend(chunk=chunk, compiled=False).forward(spec, inputs)
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-11)


def saved_bytes(call: Callable[[], UpdateOutput]) -> int:
    """Return the size of the storages that a call saves for its backward."""
    sizes: dict[int, int] = {}

    def record(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        call()
    return sum(sizes.values())


@pytest.mark.parametrize("name", ["gated delta", "channel decay, negative eigenvalues", "dplr"])
def test_saved_memory_is_linear_in_the_length(name: str) -> None:
    spec, backend = SPECS[name], CompileBackend(chunk=16, compiled=False)
    short, long = (saved_bytes(partial(backend.forward, spec, draw(spec, 2, T))) for T in (512, 2048))
    assert 3.5 * short < long < 4.5 * short


class KeySizes(TorchDispatchMode):
    """Record the number of elements of q and k in each call of the scan operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.deltazoo.chunk_scan.default:
            self.sizes.append((args[0].numel(), args[1].numel()))
        return func(*args, **(kwargs or {}))


def test_value_heads_of_a_group_share_their_keys_in_memory() -> None:
    spec = SPECS["gated delta"]
    with KeySizes() as keys:
        CompileBackend(chunk=16, compiled=False).forward(spec, draw(spec, 2, 64))
    BTHK = 2 * 64 * 2 * 8  # two key heads, not four value heads
    assert keys.sizes == [(BTHK, BTHK)]


@pytest.mark.parametrize("bounds", [[0, 5, 5, 40], [0, 0], [0]], ids=str)
@pytest.mark.parametrize("name", [*SPECS, "elementwise"])
@pytest.mark.parametrize(
    "backend", [CompileBackend(chunk=16, compiled=False), ReferenceBackend()], ids=lambda b: b.name
)
def test_rows_after_the_last_sequence_are_zero_and_never_read(backend: Backend, name: str, bounds: list[int]) -> None:
    spec, V = (ELEMENTWISE, 2) if name == "elementwise" else (SPECS[name], 6)
    padded = UpdateInputs(*(x if x is None else x.detach() for x in draw(spec, 1, bounds[-1] + 37, V=V)))
    inputs = padded._replace(
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32), state=torch.ones(len(bounds) - 1, 4, 8, V)
    )
    in_time = [field for field, x in padded._asdict().items() if x is not None and x.shape[:2] == padded.q.shape[:2]]
    for field in in_time:
        getattr(inputs, field)[:, bounds[-1] :] = torch.nan
    leaves = {
        field: x.requires_grad_() for field, x in inputs._asdict().items() if x is not None and x.is_floating_point()
    }
    o, state = backend.forward(spec, inputs)  # bypasses the check of cu_seqlens
    assert not o[:, bounds[-1] :].any()
    cut = inputs._replace(**{field: leaves[field][:, : bounds[-1]] for field in in_time})
    expected = ReferenceBackend().forward(spec, cut)
    torch.testing.assert_close(o[:, : bounds[-1]], expected.o, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected.state, rtol=1e-4, atol=1e-5)
    losses = [y.sum() for y in (o, state) if y.requires_grad]
    grads = torch.autograd.grad(losses, list(leaves.values()), materialize_grads=True) if losses else []
    for field, grad in zip(leaves, grads, strict=False):
        assert not grad[:, bounds[-1] :].any() if field in in_time else grad.isfinite().all(), field


@pytest.mark.parametrize("decay", ["head", "channel", "none"])
@pytest.mark.parametrize("backend", ["compile", "reference"])
def test_empty_batch_gives_empty_outputs_and_gradients(decay, backend):
    spec = UpdateSpec(decay=decay, beta="head")
    x = UpdateInputs(*(t if t is None else t[:0].detach().requires_grad_() for t in draw(spec, 1, 20)))
    out = bind(spec, backend)(x)
    assert out.o.shape == x.v.shape
    assert out.state.shape == (0, *x.v.shape[2:3], x.q.shape[-1], x.v.shape[-1])
    operands = [t for t in x if t is not None]
    grads = torch.autograd.grad(out.o.sum() + out.state.sum(), operands)
    assert [g.shape for g in grads] == [t.shape for t in operands]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "spec",
    [
        UpdateSpec(decay="channel", beta="head"),
        UpdateSpec(decay="channel", transition="dplr"),
        UpdateSpec(decay="channel", transition="additive", read="before"),
    ],
    ids=["kda", "rwkv7", "rwkv6"],
)
def test_compiled_updates_on_a_gpu_match_float64(spec: UpdateSpec) -> None:
    case = Case(spec, Shape("two heads", 2, 130, 2, 2, 64, 64), torch.bfloat16)
    report = conformance.compare(CompileBackend(), case, device="cuda")
    assert report.errors, str(report)
    assert not report.failures, str(report)
