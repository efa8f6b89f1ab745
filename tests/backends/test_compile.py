"""The compile backend's promises to torch.compile: one graph, no recompilation, memory, sentences."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.backends.base import UpdateInputs, UpdateOutput, state_dtype
from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.dispatch import bind
from deltazoo.backends.errors import UnsupportedError
from deltazoo.backends.reference import ReferenceBackend
from deltazoo.backends.spec import UpdateSpec

SPECS = {
    "gated delta": UpdateSpec(decay="head", beta="head"),
    "channel decay, negative eigenvalues": UpdateSpec(decay="channel", beta="head", negative_eigenvalues="both"),
    "efla, two householders": UpdateSpec(beta="head", reparam="efla", householders=2),
    "additive, fixed, read before": UpdateSpec(transition="additive", decay="fixed", read="before"),
    "rate": UpdateSpec(transition="additive", decay="rate"),
    "dplr": UpdateSpec(transition="dplr", decay="channel"),
    "comba": UpdateSpec(decay="head", beta="head", erase_key="own", erase_from="previous"),
    "channel beta, longhorn": UpdateSpec(decay="head", beta="channel", reparam="longhorn"),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def draw(spec: UpdateSpec, B: int, T: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> UpdateInputs:
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, shape in spec.operands(B, T, 2, 4, 8, 6).items():
        x = torch.randn(shape, generator=generator, dtype=state_dtype(dtype))
        if name in ("log_decay", "rate"):
            x = -x.sigmoid()
        elif name in ("beta", "erase", "write", "step"):
            x = x.sigmoid()
        elif name in ("k", "erase_key", "a", "b"):
            x = 0.7 * torch.nn.functional.normalize(x, dim=-1)
        made[name] = x.to(state_dtype(dtype) if name in ("log_decay", "step", "rate") else dtype).requires_grad_()
    made["state"] = torch.randn(B, 4, 8, 6, generator=generator, dtype=state_dtype(dtype)).requires_grad_()
    return UpdateInputs(**made)


def gradients(inputs: UpdateInputs, out: UpdateOutput) -> list[Tensor]:
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    return list(torch.autograd.grad([out.o.sin().sum(), out.state.cos().sum()], leaves))


def close(got: UpdateOutput, want: UpdateOutput, inputs: UpdateInputs) -> None:
    pairs = [(got.o, want.o), (got.state, want.state)]
    pairs += list(zip(gradients(inputs, got), gradients(inputs, want), strict=True))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def lengths_free(inputs: UpdateInputs) -> UpdateInputs:
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


@pytest.mark.parametrize("name", SPECS)
def test_it_is_one_graph_in_the_callers_compilation_for_every_length(name: str) -> None:
    spec = SPECS[name]
    bound = bind(spec, CompileBackend(chunk=16))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda inputs: bound(inputs), fullgraph=True, backend=counter)
    for T in (37, 80, 131):
        inputs = draw(spec, 2, T, seed=T)
        close(compiled(lengths_free(inputs)), ReferenceBackend().forward(spec, inputs), inputs)
    assert counter.frame_count == 1


def packed(spec: UpdateSpec, bounds: list[int]) -> UpdateInputs:
    state = torch.randn(len(bounds) - 1, 4, 8, 6, requires_grad=True)
    inputs = draw(spec, 1, bounds[-1], seed=len(bounds))
    return inputs._replace(state=state, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


PACKS = ([0, 5, 5, 40, 53], [0, 17, 90], [0, 16, 32, 48, 49, 64])


def test_packed_sequences_are_one_graph_whatever_their_number() -> None:
    spec = SPECS["gated delta"]
    bound = bind(spec, CompileBackend(chunk=16))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda inputs: bound(inputs), fullgraph=True, backend=counter)
    for bounds in PACKS:
        inputs = packed(spec, bounds)
        close(compiled(lengths_free(inputs)), ReferenceBackend().forward(spec, inputs), inputs)
    assert counter.frame_count == 1


def test_from_eager_code_inductor_compiles_it_once_for_all_lengths_and_batches() -> None:
    spec, backend = SPECS["gated delta"], CompileBackend(chunk=16)
    for B, T in ((2, 100), (3, 33), (2, 7), (5, 64), (2, 257)):
        inputs = draw(spec, B, T, seed=T)
        close(backend.forward(spec, inputs), ReferenceBackend().forward(spec, inputs), inputs)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == 1, f"B={B}, T={T} compiled again"


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend compile itself without Inductor: the same graphs, without C++ to compile."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("aot_eager")
@torch._dynamo.config.patch(recompile_limit=1)
def test_each_spec_counts_its_own_recompilations() -> None:
    backend = CompileBackend(chunk=16)
    specs = [UpdateSpec(transition="additive", decay=decay) for decay in ("none", "fixed", "head")]
    for spec in specs:
        for T in (40, 71):
            inputs = draw(spec, 2, T)
            close(backend.forward(spec, inputs), ReferenceBackend().forward(spec, inputs), inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(specs)


@pytest.mark.usefixtures("aot_eager")
@torch._dynamo.config.patch(recompile_limit=1)
def test_which_operands_want_gradients_counts_its_own_recompilations() -> None:
    spec, backend = SPECS["gated delta"], CompileBackend(chunk=16)
    for names in (("q",), ("k", "v"), ("beta",), ("q",)):
        inputs = UpdateInputs(*(None if x is None else x.detach() for x in draw(spec, 2, 40)))
        for name in names:
            getattr(inputs, name).requires_grad_()
        out, want = backend.forward(spec, inputs), ReferenceBackend().forward(spec, inputs)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.usefixtures("aot_eager")
@torch._dynamo.config.patch(recompile_limit=1)
def test_from_eager_code_more_layouts_than_torch_counts_are_compiled_all_the_same() -> None:
    spec, backend = SPECS["gated delta"], CompileBackend(chunk=16)
    inputs = draw(spec, 2, 64)
    for order in ((0, 1, 2, 3), (3, 0, 1, 2), (1, 0, 2, 3)):
        v = inputs.v.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])
        given = inputs._replace(v=v)
        close(backend.forward(spec, given), ReferenceBackend().forward(spec, given), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("decay", ["head", "channel", "rate"])
def test_a_token_may_forget_as_much_as_a_float_can_say(decay: Any, dtype: torch.dtype) -> None:
    spec = UpdateSpec(decay=decay, beta="head")
    x = UpdateInputs(*(None if t is None else t.detach() for t in draw(spec, 2, 40, dtype=dtype)))
    most = torch.finfo(dtype).max
    for tokens in (slice(5, 6), slice(20, 22)):
        if decay == "rate":
            x.step[:, tokens] = most
        else:
            x.log_decay[:, tokens] = -most
    leaves = UpdateInputs(*(None if t is None else t.requires_grad_() for t in x))
    close(CompileBackend(compiled=False).forward(spec, leaves), ReferenceBackend().forward(spec, leaves), leaves)


@pytest.mark.usefixtures("aot_eager")
def test_packed_batches_of_any_size_share_a_graph_from_eager_code() -> None:
    spec, backend = SPECS["gated delta"], CompileBackend(chunk=16)
    for bounds in PACKS:
        inputs = packed(spec, bounds)
        close(backend.forward(spec, inputs), ReferenceBackend().forward(spec, inputs), inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
def test_without_a_cxx_compiler_a_sentence_says_so() -> None:
    spec = SPECS["gated delta"]
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler"):
        CompileBackend().forward(spec, draw(spec, 2, 70))


@pytest.mark.parametrize("chunk", [0, 8, 48, -64])
def test_a_chunk_that_is_no_power_of_two_from_16_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunk must be a power of two from 16 to 512, got {chunk}"):
        CompileBackend(chunk=chunk)


def test_every_chunk_size_gives_the_same_numbers() -> None:
    for spec in SPECS.values():
        inputs = draw(spec, 2, 150, dtype=torch.float64)
        want = ReferenceBackend().forward(spec, inputs)
        for chunk in (16, 32, 128):
            got = CompileBackend(chunk=chunk, compiled=False).forward(spec, inputs)
            torch.testing.assert_close(got.o, want.o, rtol=1e-10, atol=1e-11)
            torch.testing.assert_close(got.state, want.state, rtol=1e-10, atol=1e-11)


def saved_bytes(call: Callable[[], UpdateOutput]) -> int:
    seen: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        call()
    return sum(seen.values())


@pytest.mark.parametrize("name", ["gated delta", "channel decay, negative eigenvalues", "dplr"])
def test_what_the_backward_keeps_is_linear_in_the_length(name: str) -> None:
    spec, backend = SPECS[name], CompileBackend(chunk=16, compiled=False)
    short, long = (saved_bytes(partial(backend.forward, spec, draw(spec, 2, T))) for T in (512, 2048))
    assert 3.5 * short < long < 4.5 * short


class _ScanOperands(TorchDispatchMode):
    """Note the sizes of what the scan operator takes."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.deltazoo.chunk_scan.default:
            self.sizes.append((args[0].numel(), args[1].numel()))
        return func(*args, **(kwargs or {}))


def test_grouped_heads_share_their_keys_in_memory() -> None:
    spec = SPECS["gated delta"]
    with _ScanOperands() as seen:
        CompileBackend(chunk=16, compiled=False).forward(spec, draw(spec, 2, 64))
    assert seen.sizes == [(2 * 64 * 2 * 8, 2 * 64 * 2 * 8)]  # [B, T, H, K] each: two key heads, not four


def test_the_reference_is_never_called_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> UpdateOutput:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(ReferenceBackend, "forward", refuse)
    spec = SPECS["gated delta"]
    out = bind(spec, CompileBackend(compiled=False))(draw(spec, 2, 5))
    assert torch.isfinite(out.o).all()


@pytest.mark.parametrize("decay", ["head", "channel", "none"])
@pytest.mark.parametrize("backend", ["compile", "reference"])
def test_no_row_gives_no_output_and_gradients_of_its_shape(decay, backend):
    spec = UpdateSpec(decay=decay, beta="head")
    x = UpdateInputs(*(t if t is None else t[:0].detach().requires_grad_() for t in draw(spec, 1, 20)))
    out = bind(spec, backend)(x)
    assert out.o.shape == x.v.shape
    assert out.state.shape == (0, *x.v.shape[2:3], x.q.shape[-1], x.v.shape[-1])
    given = [t for t in x if t is not None]
    grads = torch.autograd.grad(out.o.sum() + out.state.sum(), given)
    assert [g.shape for g in grads] == [t.shape for t in given]
