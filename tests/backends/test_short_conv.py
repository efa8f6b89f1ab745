"""The short convolution with SiLU and norm: plain torch and the kernels against float64, operators, graphs.

The kernels run on a GPU, or with TRITON_INTERPRET=1 on the CPU in Triton's interpreter.
"""

import copy
import importlib.util
import itertools
import os
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pairs import cover
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import (
    DeviceError,
    DtypeError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
    ValueRangeError,
)
from deltazoo.backends.ops.short_conv import ConvInputs, ConvMeta, ConvPart, short_conv
from deltazoo.backends.triton import TritonBackend
from deltazoo.backends.triton.conv import op as conv
from deltazoo.backends.triton.conv import step_op as conv_step
from deltazoo.backends.update.dispatch import bind_conv, use_backend
from deltazoo.backends.update.reference import ReferenceBackend
from deltazoo.mixers import KDA, Context, DeltaNet, GatedDeltaNet, Hyena, Mesa, MixerConfig
from deltazoo.mixers.core.mixer import Mixer
from deltazoo.mixers.parts.convolution import ShortConv
from deltazoo.mixers.parts.feature_maps import FeatureMap
from deltazoo.mixers.parts.norms import UnitNorm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
CAN_RUN_KERNELS = importlib.util.find_spec("triton") is not None and (INTERPRETED or DEVICE == "cuda")
needs_triton = pytest.mark.skipif(not CAN_RUN_KERNELS, reason="needs a CUDA device, or TRITON_INTERPRET=1")

Parts = list[ConvPart]
Run = Callable[[ConvInputs, Parts], tuple[Tensor, ...]]

Q, V, BARE = ConvPart(32, True, 16), ConvPart(40, True), ConvPart(24)


class Case(NamedTuple):
    """B rows of T tokens, or one pack of sequences if there are lengths."""

    parts: Parts
    T: int = 0
    lengths: tuple[int, ...] = ()
    W: int = 4
    bias: bool = False
    history: bool = False
    B: int = 2
    groups: tuple[int, ...] = ()  # sequences of the pack up to the end of each group


PACK = (3, 0, 70, 1, 2, 64, 0, 5)
CASES = {
    "one token": Case([Q, V], 1, bias=True, history=True),
    "fewer than taps": Case([Q, BARE], 2, W=6, history=True),
    "short": Case([Q, Q, V], 5),
    "a strip": Case([Q, V, BARE], 64, bias=True, history=True),
    "a strip and a token": Case([V, Q], 65, W=3, history=True),
    "three strips": Case([ConvPart(192, True, 96)], 130, W=2),
    "a norm without silu": Case([ConvPart(32, False, 32)], 70, bias=True),
    "head of 128": Case([ConvPart(256, True, 128)], 70),
    "head of 200": Case([ConvPart(200, True, 200)], lengths=(9, 60, 0, 4)),
    "one tap": Case([Q, V], 9, W=1, bias=True, history=True),
    "eight taps": Case([Q, V], 20, W=8, bias=True, history=True),
    "odd channels": Case([ConvPart(9, True, 3), ConvPart(5)], 33, bias=True),
    "no channels": Case([Q, ConvPart(0), V], 7),
    "pack": Case([Q, V], lengths=PACK),
    "pack with history": Case([Q, V], lengths=PACK, bias=True, history=True),
    "pack of single tokens": Case([Q, V], lengths=(1,) * 7, W=3, history=True),
    "short pack with history": Case([Q, V], lengths=(3, 0, 10, 1, 40), bias=True, history=True),
    "pack, eight taps": Case([Q], lengths=(3, 0, 10, 1, 40), W=8, bias=True, history=True),
    "groups": Case([Q, V], lengths=PACK, groups=(1, 1, 4, 8)),
    "groups with history": Case([Q, V, BARE], lengths=PACK, bias=True, history=True, groups=(2, 3, 7, 8)),
    "groups in one strip": Case([Q, V], lengths=(3, 0, 10, 1, 40), bias=True, history=True, groups=(1, 3, 5)),
    "no token": Case([Q, V], 0, bias=True, history=True),
    "no token in a pack": Case([Q, V], lengths=(0, 0), history=True),
    "no row": Case([Q, V], 6, history=True, B=0),
}
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def draw(case: Case, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> ConvInputs:
    torch.manual_seed(0)
    B, T, N = (1, sum(case.lengths), len(case.lengths)) if case.lengths else (case.B, case.T, case.B)
    C = sum(part.channels for part in case.parts)

    def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()

    wide = torch.promote_types(dtype, torch.float32)
    cu_seqlens = bounds(case.lengths, device) if case.lengths else None
    G = (len(case.groups),) if case.groups else ()
    return ConvInputs(
        leaf(B, T, C),
        leaf(*G, C, case.W, dtype=wide),
        leaf(*G, C, dtype=wide) if case.bias else None,
        leaf(N, case.W - 1, C) if case.history else None,
        cu_seqlens,
        None if cu_seqlens is None or not G else cu_seqlens[list(case.groups)],
    )


def bounds(lengths: tuple[int, ...], device: str = DEVICE) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def conv1d_reference(inputs: ConvInputs, parts: Parts) -> tuple[Tensor, ...]:
    """Compute the convolution sequence by sequence with torch's conv1d."""
    x, weight, bias, history, cu, ends = inputs
    W, C = weight.shape[-1], x.shape[2]
    if ends is not None:  # each group as a pack of its own
        assert cu is not None
        results, first = [], 0
        for g, last in enumerate(torch.searchsorted(cu, ends, right=True).tolist()):
            begin, end = int(cu[first]), int(cu[last - 1])
            part = ConvInputs(
                x[:, begin:end],
                weight[g],
                None if bias is None else bias[g],
                None if history is None else history[first : last - 1],
                cu[first:last] - begin,
            )
            results.append(conv1d_reference(part, parts))
            first = last - 1
        return tuple(torch.cat(ys, 1) for ys in zip(*results, strict=True))
    rows = list(x) if cu is None else [x[0, a:b] for a, b in itertools.pairwise(cu.tolist())]
    ys = []
    for n, row in enumerate(rows):
        before = row.new_zeros(W - 1, C) if history is None else history[n]
        ys.append(F.conv1d(torch.cat([before, row]).mT, weight[:, None], bias, groups=C).mT if len(row) else row)
    y = (torch.stack(ys) if len(ys) else x) if cu is None else torch.cat([x[0, :0], *ys])[None]
    out = []
    for stream, part in zip(y.split([part.channels for part in parts], -1), parts, strict=True):
        s = stream * stream.sigmoid() if part.silu else stream
        if part.unit:
            heads = s.unflatten(-1, (-1, part.unit)) if s.numel() else s[..., None]
            s = (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).reshape(s.shape)
        out.append(s)
    return tuple(out)


def gradients(run: Run, inputs: ConvInputs, parts: Parts) -> tuple[Tensor, ...]:
    """Return the results, then the gradients of all operands."""
    leaves = [t for t in inputs[:4] if t is not None]
    out = run(inputs, parts)
    torch.manual_seed(1)
    d = [torch.randn(y.shape, dtype=torch.float64).to(y) for y in out]
    grads = torch.autograd.grad(out, leaves, d, materialize_grads=True)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    return *out, *grads


def assert_agrees(run: Run, case: Case, dtype: torch.dtype) -> None:
    inputs = draw(case, dtype)
    got = gradients(run, inputs, case.parts)
    operands = [None if t is None else t.detach().double().requires_grad_() for t in inputs[:4]]
    exact = gradients(conv1d_reference, ConvInputs(*operands, inputs.cu_seqlens, inputs.ends), case.parts)
    assert all(y.dtype == dtype for y in got[: len(case.parts)])
    for actual, want in zip(got, exact, strict=True):
        assert actual.shape == want.shape
        error, size = (float(t.detach().norm()) for t in (actual.double() - want, want))
        assert error <= LIMITS[dtype] * size, (error, size)


needs_no_interpreter = pytest.mark.skipif(
    INTERPRETED, reason="runs no kernel; the run without the interpreter covers it"
)


@needs_no_interpreter
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_plain_torch_matches_conv1d(name: str, dtype: torch.dtype) -> None:
    assert_agrees(short_conv, CASES[name], dtype)


_DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


SMOKE = [("short pack with history", torch.float32), ("short", torch.float32)]


@needs_triton
@pytest.mark.parametrize(("name", "dtype"), cover(list(CASES), _DTYPES, SMOKE))
def test_kernels_match_conv1d(name: str, dtype: torch.dtype) -> None:
    assert_agrees(conv.short_conv, CASES[name], dtype)


STEPS = {
    "norms": Case([Q, V, Q], 1, bias=True, history=True),
    "odd channels": Case([ConvPart(9, True, 3), ConvPart(5)], 1, W=2, history=True, B=3),
    "many taps": Case([ConvPart(70)], 1, W=20, bias=True, history=True),
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_the_kernel_of_one_token_matches_plain_torch_and_appends_it(name: str, dtype: torch.dtype) -> None:
    case = STEPS[name]
    inputs = ConvInputs(*(None if x is None else x.detach() for x in draw(case, dtype)))
    assert inputs.history is not None
    inputs = inputs._replace(x=F.pad(inputs.x, (0, 3))[..., : inputs.x.shape[2]])  # a view of wider rows
    expected = short_conv(ConvInputs(*(None if x is None else x.double() for x in inputs)), case.parts)
    appended = torch.cat([inputs.history, inputs.x], 1)[:, 1:]
    assert conv_step.computes_step(inputs, case.parts) == inputs.x.is_cuda
    for actual, y in zip(conv_step.conv_step_(inputs, case.parts), expected, strict=True):
        assert actual.dtype == dtype
        assert (actual - y).norm() < LIMITS[dtype] * y.norm()
    assert torch.equal(inputs.history, appended)


def test_the_kernel_of_one_token_computes_steps_with_a_history_and_equal_heads() -> None:
    inputs = ConvInputs(*(None if x is None else x.detach() for x in draw(STEPS["norms"], device="cpu")))
    heads = [ConvPart(32, True, 16), ConvPart(40, True, 8), ConvPart(32)]
    assert not conv_step.computes_step(inputs, heads)
    assert not conv_step.computes_step(inputs._replace(history=None), [BARE])


@needs_triton
def test_each_part_is_a_separate_contiguous_tensor() -> None:
    case = CASES["a strip"]
    out = conv.short_conv(draw(case), case.parts)
    assert all(y.is_contiguous() for y in out)
    assert len({y.untyped_storage().data_ptr() for y in out}) == len(case.parts)


@needs_triton
@pytest.mark.parametrize(
    ("launch", "name"),
    cover(
        [
            conv.ConvLaunch(rows=1, columns=16, strip=16, group=1),
            conv.ConvLaunch(rows=2, columns=64, strip=32, group=8, warps=2),
            conv.ConvLaunch(rows=16, columns=32, strip=128, group=2, warps=8),
        ],
        ["short pack with history", "three strips"],
    ),
)
def test_the_result_does_not_depend_on_the_launch_config(launch: conv.ConvLaunch, name: str) -> None:
    assert_agrees(lambda x, parts: conv.short_conv(x, parts, launch, launch), CASES[name], torch.float32)


@needs_triton
@pytest.mark.parametrize("name", ["a strip and a token", "short pack with history"])
def test_the_kernels_are_deterministic(name: str) -> None:
    case = CASES[name]
    first, second = (gradients(conv.short_conv, draw(case), case.parts) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


RUNS = [
    pytest.param(short_conv, id="plain", marks=needs_no_interpreter),
    pytest.param(conv.short_conv, id="kernels", marks=needs_triton),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("history", [False, True], ids=["no history", "history"])
def test_rows_after_the_last_sequence_have_zero_results_and_gradients(run: Run, history: bool) -> None:
    """cu_seqlens ends before T. Uninitialised memory is NaN, so that a row that no program writes fails the test."""
    case = Case([Q, V], lengths=(3, 0, 10, 20), W=3, bias=True, history=history)
    whole, end = draw(case), sum(case.lengths)
    tail = torch.full((1, 19, whole.x.shape[2]), torch.nan, device=DEVICE)
    longer = whole._replace(x=torch.cat([whole.x.detach(), tail], 1).requires_grad_())

    def results(inputs: ConvInputs) -> list[Tensor]:
        leaves = [t for t in inputs[:4] if t is not None]
        ys = run(inputs, case.parts)
        d = [torch.linspace(-1, 1, y.shape[2], device=DEVICE).expand_as(y) for y in ys]
        return [*ys, *torch.autograd.grad(ys, leaves, d)]

    torch.use_deterministic_algorithms(True)
    try:
        got, want = results(longer), results(whole)
    finally:
        torch.use_deterministic_algorithms(False)
    for actual, expected in zip(got[:3], want[:3], strict=True):  # results, gradient of x
        assert not actual[:, end:].any()
        torch.testing.assert_close(actual[:, :end], expected)
    for actual, expected in zip(got[3:], want[3:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("lengths", [(70, 2, 0, 61), ()], ids=["pack", "rows"])
def test_non_finite_values_stay_in_their_sequence_and_head(run: Run, lengths: tuple[int, ...]) -> None:
    case = Case([Q, V], 70, lengths, bias=True, history=True)
    clean, tainted = draw(case), draw(case)
    begin, end, row = (72, 133, 0) if lengths else (0, 70, 1)
    with torch.no_grad():
        tainted.x[row, [begin, end - 1], 17] = torch.nan  # the second head of q
        tainted.x[row, begin, 40] = torch.inf
        tainted.history[-1, :, 50] = torch.nan
    touched = torch.zeros_like(clean.x, dtype=torch.bool)
    touched[row, begin:end, [*range(16, 32), 40, 50]] = True
    touched_by_part = touched.split([32, 40], -1)
    want, got = (gradients(run, inputs, case.parts) for inputs in (clean, tainted))
    for actual, expected, taint in zip(got, want, (*touched_by_part, touched), strict=False):  # results, gradient of x
        assert torch.equal(actual[~taint], expected[~taint])
    channels = [c for c in range(72) if c not in (*range(16, 32), 40, 50)]
    for actual, expected in zip(got[3:5], want[3:5], strict=True):  # gradients of weight and bias
        torch.testing.assert_close(actual[channels], expected[channels])
    torch.testing.assert_close(got[5][:-1], want[5][:-1])  # gradient of the other sequences' history


@needs_triton
def test_inputs_may_have_any_strides() -> None:
    case = Case([Q, V], 20, bias=True, history=True)
    x = draw(case)
    T, C = x.x.shape[1:]
    layouts = [
        F.pad(x.x, (8, 8))[..., 8:-8],  # a larger token stride
        F.pad(x.x, (1, 2))[..., 1:-2],  # no 16-byte loads
        x.x.mT.contiguous().mT,
        F.pad(x.x, (0, 0, 3, 0))[:, 3:],  # a larger row stride
        F.pad(x.x.flatten(), (1, 0))[1:].view(2, T, C),  # not aligned to 16 bytes
    ]
    want = gradients(conv.short_conv, x, case.parts)
    for layout in layouts:
        assert torch.equal(layout, x.x)
        strided = x._replace(
            x=layout.detach().requires_grad_(), weight=x.weight.detach().mT.contiguous().mT.requires_grad_()
        )
        for actual, expected in zip(gradients(conv.short_conv, strided, case.parts), want, strict=True):
            assert torch.equal(actual, expected)


@needs_triton
@pytest.mark.parametrize("name", ["short", "short pack with history"])
def test_the_operators_pass_opcheck(name: str) -> None:
    case = CASES[name]
    inputs = [t if t is None else t.detach() for t in draw(case)]
    kind = [[part[i] for part in case.parts] for i in range(3)] + [[*conv.FORWARD, *conv.BACKWARD]]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.deltazoo.triton_short_conv.default, (*inputs, *kind), test_utils=tests)
    d = [torch.randn_like(y) for y in torch.ops.deltazoo.triton_short_conv(*inputs, *kind)]
    arguments = (*inputs, d, *kind)
    torch.library.opcheck(torch.ops.deltazoo.triton_short_conv_backward.default, arguments, test_utils=tests)


@needs_triton
def test_second_derivative_is_refused() -> None:
    case = CASES["short"]
    inputs = draw(case)
    (grad,) = torch.autograd.grad(conv.short_conv(inputs, case.parts)[0].square().sum(), inputs.x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


@needs_triton
def test_forward_mode_is_refused() -> None:
    inputs = draw(CASES["short"])
    bound = bind_conv(CASES["short"].parts, TritonBackend())
    with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: bound(inputs._replace(x=x)), (inputs.x,), (inputs.x,))


@pytest.mark.graphs
@pytest.mark.parametrize(
    "backend", [pytest.param("compile", marks=needs_no_interpreter), pytest.param("triton", marks=needs_triton)]
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_one_graph_forward_and_backward_for_every_length(backend: str, packed: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    bound = bind_conv([Q, V], backend)

    def run(inputs: ConvInputs) -> Tensor:
        q, v = bound(inputs)
        return q.square().cos().sum() + v.square().sum()

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    for T in (20, 17):
        case = Case([Q, V], T, (T - 9, 0, 9) if packed else (), bias=True, history=True)
        inputs = draw(case)
        leaves = list(inputs[:4])
        want = torch.autograd.grad(run(inputs), leaves)
        for got, grad in zip(torch.autograd.grad(compiled(inputs), leaves), want, strict=True):
            torch.testing.assert_close(got, grad)
    assert counter.frame_count == 1


def test_unsupported_convolutions_are_refused_with_reasons() -> None:
    def reasons(dtype: torch.dtype = torch.float16, taps: int = 4, unit: int = 128, device: str = DEVICE) -> list[str]:
        return TritonBackend().short_conv_unsupported(ConvMeta(device, dtype, taps, (ConvPart(2 * unit, True, unit),)))

    assert reasons() == [] if CAN_RUN_KERNELS else reasons() == ["it needs tensors on 'cuda', got 'cpu'."]
    assert reasons(taps=64) == reasons()
    assert "heads with a norm must have at most 1024 channels, got 1025." in reasons(unit=1025)
    assert any("got float64" in reason for reason in reasons(torch.float64))
    assert any("got 'mps'" in reason for reason in reasons(device="mps"))


class Counting(ReferenceBackend):
    """Supports convolutions of at most three taps and counts its calls."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def short_conv_unsupported(self, meta: ConvMeta) -> list[str]:
        return [] if meta.taps <= 3 else [f"at most 3 taps, got {meta.taps}."]

    def short_conv(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...]:
        self.calls += 1
        return conv1d_reference(inputs, list(parts))


class WithoutShortConv(ReferenceBackend):
    """A backend that overrides none of the methods of the short convolution."""

    name = "older"


def test_plain_torch_computes_the_convolutions_that_a_backend_does_not_support() -> None:
    for W, calls in ((3, 1), (4, 0)):
        backend, inputs = Counting(), draw(Case([Q, V], 6, W=W))
        got = bind_conv([Q, V], backend)(inputs)
        assert backend.calls == calls
        for actual, want in zip(got, short_conv(inputs, [Q, V]), strict=True):
            torch.testing.assert_close(actual, want)
    meta = ConvMeta("cpu", torch.float32, 4, (Q,))
    assert WithoutShortConv().short_conv_unsupported(meta) == [
        "it has no kernel for the short convolution: plain torch computes it."
    ]
    assert torch.equal(bind_conv([Q, V], WithoutShortConv())(inputs)[0], short_conv(inputs, [Q, V])[0])


def test_a_mixer_runs_its_convolution_on_the_backend_of_its_update() -> None:
    config, x = GatedDeltaNet(heads=2, key_width=8, value_width=8, conv_width=3), torch.randn(2, 5, 16)
    named, surrounding, later = Counting(), Counting(), Counting()
    config.build(16, backend=named)(x)
    with use_backend(surrounding):
        mixer = config.build(16)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(config.build(16, backend="reference"))))
    assert copied.project.conv.bound.requested == "reference"
    mixer(x)
    mixer.rebind(later)
    mixer(x)
    assert [named.calls, surrounding.calls, later.calls] == [1, 1, 1]
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        mixer.rebind("referense")
    filtering = Counting()
    Hyena(conv_width=3, max_length=8).build(16, backend=filtering)(x)
    assert filtering.calls == 1


def test_invalid_shapes_are_refused_with_the_expected_shape() -> None:
    x = draw(Case([Q, V], lengths=(4, 3), bias=True, history=True))
    bound = bind_conv([Q, V])
    with pytest.raises(ShapeError, match="parts must have 72 channels in total, each a multiple of its unit"):
        bind_conv([Q])(x)
    with pytest.raises(ShapeError, match="a multiple of its unit"):
        bind_conv([ConvPart(32, True, 5), V])(x)
    with pytest.raises(ShapeError, match=r"weight must have shape \[72, 4\], got \[71, 4\]"):
        bound(x._replace(weight=x.weight[1:]))
    with pytest.raises(ShapeError, match=r"bias must have shape \[72\], got \[1\]"):
        bound(x._replace(bias=x.bias[:1]))
    with pytest.raises(ShapeError, match=r"history must have shape \[2, 3, 72\], got \[1, 3, 72\]"):
        bound(x._replace(history=x.history[1:]))
    with pytest.raises(ShapeError, match="need B = 1, got B = 2"):
        bound(x._replace(x=x.x.expand(2, -1, -1)))
    with pytest.raises(ShapeError, match=r"x must have shape \[B, T, C\], got \[7, 72\]"):
        bound(x._replace(x=x.x[0]))
    with pytest.raises(ShapeError, match=r"weight must have shape \[C, W\] with W >= 1, got \[72, 0\]"):
        bound(x._replace(weight=x.weight[:, :0]))
    grouped = draw(CASES["groups in one strip"], device="cpu")._replace(history=None)
    with pytest.raises(ShapeError, match=r"weight must have shape \[3, 72, 4\], got \[2, 72, 4\]"):
        bound(grouped._replace(weight=grouped.weight[:2]))
    with pytest.raises(ShapeError, match=r"ends must have shape \[G\], with cu_seqlens"):
        bound(grouped._replace(cu_seqlens=None))
    with pytest.raises(ShapeError, match=r"ends must have shape \[G\], with cu_seqlens, got \[\]"):
        bound(grouped._replace(ends=grouped.ends[0]))
    with pytest.raises(
        ValueRangeError, match=r"ends must be bounds of cu_seqlens that rise to T = 54, got \[3, 12, 54\]"
    ):
        bound(grouped._replace(ends=torch.tensor([3, 12, 54], dtype=torch.int32)))
    with pytest.raises(ShapeError, match=r"cu_seqlens must have shape \[N \+ 1\], got \[0\]"):
        bound(x._replace(cu_seqlens=x.cu_seqlens[:0]))


@pytest.mark.parametrize("bounds", [(0, 5, 3), (2, 4, 7), (0, 4, 99), (0, 1, 3)])
def test_invalid_bounds_of_a_pack_are_refused(bounds: tuple[int, ...]) -> None:
    x = draw(Case([Q, V], lengths=(4, 3), bias=True, history=True), device="cpu")  # values are checked on the CPU only
    with pytest.raises(ValueRangeError, match="cu_seqlens must rise from 0 to T = 7, got"):
        bind_conv([Q, V])(x._replace(cu_seqlens=torch.tensor(bounds, dtype=torch.int32)))


def test_wrong_dtypes_and_devices_are_refused_by_name() -> None:
    x = draw(Case([Q, V], lengths=(4, 3), bias=True, history=True))
    bound = bind_conv([Q, V])
    with pytest.raises(DtypeError, match=r"x must be of a float dtype, got torch\.int64"):
        bound(x._replace(x=x.x.long()))
    with pytest.raises(DtypeError, match=r"cu_seqlens must be int32, got torch\.int64"):
        bound(x._replace(cu_seqlens=x.cu_seqlens.long()))
    with pytest.raises(DeviceError, match=f"bias must be on {x.x.device}, where x is, got meta"):
        bound(x._replace(bias=x.bias.to("meta")))


class Kernels(CompileBackend):
    """The compile backend with the kernels' convolution."""

    name = "kernels"

    def __init__(self) -> None:
        super().__init__(compiled=False)

    def short_conv_unsupported(self, meta: ConvMeta) -> list[str]:
        return []

    def short_conv(self, inputs: ConvInputs, parts: tuple[ConvPart, ...]) -> tuple[Tensor, ...]:
        return conv.short_conv(inputs, parts)


LAYERS = {
    "dense": (GatedDeltaNet(heads=2, value_heads=4, key_width=8, value_width=6, reparam="efla"), 2, None),
    "pack": (KDA(heads=2), 1, Context(cu_seqlens=bounds((4, 0, 2)))),
    "padding": (
        DeltaNet(heads=2, key_width=8, householders=2),
        2,
        Context(mask=torch.tensor([[True] * 6, [False] * 2 + [True] * 4], device=DEVICE)),
    ),
    "mesa": (Mesa(heads=2, steps=2), 2, None),
}


@needs_triton
@pytest.mark.parametrize(
    "name",  # the slow layers have convolutions of the same traits
    ["dense", "pack", *(pytest.param(name, marks=pytest.mark.slow) for name in ("padding", "mesa"))],
)
def test_a_layer_with_the_kernels_is_one_graph_and_agrees_with_the_reference(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config, B, context = LAYERS[name]
    mixer = config.build(16, backend="reference").to(DEVICE)
    x = torch.randn(B, 6, 16, device=DEVICE, requires_grad=True)
    want = outcome(mixer, mixer, x, context)
    mixer.rebind(Kernels())
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    for run in (mixer, compiled):
        for actual, expected in zip(outcome(run, mixer, x, context), want, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def outcome(run: Callable, mixer: Mixer, x: Tensor, context: Context | None) -> list[Tensor]:
    """Return a layer's output, its final state, and all gradients."""
    packed = context is not None and context.cu_seqlens is not None
    y, state, _ = run(x, mixer.init_state(len(context.cu_seqlens) - 1 if packed else len(x)), context)
    total = y.square().sum() + sum(part.square().sum() for part in state.values())
    return [y, *state.values(), *torch.autograd.grad(total, [x, *mixer.parameters()])]


def test_a_projection_with_fused_feature_map_and_norm_equals_separate_parts() -> None:
    """The second DeltaNet has a norm that does not fuse, which is then replaced by the same norm."""

    def build(config: MixerConfig) -> torch.nn.Module:
        torch.manual_seed(0)
        return config.build(16, backend="reference").double()

    x = torch.randn(2, 7, 16, dtype=torch.float64)
    for conv_width, reparam in itertools.product((0, 4), ("none", "efla")):
        fields = {"heads": 2, "conv_width": conv_width, "reparam": reparam}
        fused, separate = build(DeltaNet(**fields)), build(DeltaNet(**fields, qk_norm="l1"))
        assert set(fused.operands) == {"beta"}
        assert isinstance(separate.operands["feature"], FeatureMap)
        separate.operands["unit"] = UnitNorm("l2", separate.operands["unit"].which)
        torch.testing.assert_close(fused(x)[0], separate(x)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("taps", [1, 4])
def test_the_final_state_is_the_last_unmasked_inputs(taps: int) -> None:
    part, x = ShortConv(3, taps), torch.arange(24.0).view(1, 8, 3)
    past = taps - 1
    state = -torch.arange(3.0 * past * 3).view(3, past, 3) - 1
    packed = Context(cu_seqlens=bounds((2, 0, 6), "cpu"))
    rows = [torch.cat([state[n], x[0, a:b]])[b - a :] for n, (a, b) in enumerate([(0, 2), (2, 2), (2, 8)])]
    assert torch.equal(part(x, state.clone(), packed)[1], torch.stack(rows))
    for count in (0, 1, 3, 8):
        mask = (torch.arange(8) < count)[None]
        want = torch.cat([state[:1], x[:, :count]], 1)[:, count:]
        assert torch.equal(part(x, state[:1].clone(), Context(mask=mask))[1], want)
        assert torch.equal(part(x[:, :count], state[:1].clone(), Context())[1], want)


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_tensors_of_more_than_two_to_the_31_elements() -> None:
    parts = [ConvPart(2048, True, 128), ConvPart(2048, True)]
    T = 2**31 // 4096 + 70
    x = torch.zeros(1, T, 4096, device="cuda", dtype=torch.bfloat16)
    end = torch.randn(1, 70, 4096, device="cuda", dtype=torch.bfloat16)
    x[:, -70:] = end
    weight = torch.randn(4096, 4, device="cuda")
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    tail = [end.requires_grad_(), weight]
    out, want = conv.short_conv(ConvInputs(x, weight), parts), short_conv(ConvInputs(end, weight), parts)
    d = [torch.randn_like(y) for y in want]
    whole = [F.pad(y, (0, 0, T - 70, 0)) for y in d]
    got, expected = torch.autograd.grad(out, leaves, whole), torch.autograd.grad(want, tail, d)
    for actual, y in zip((*(y[:, -70:] for y in out), got[0][:, -70:], got[1]), (*want, *expected), strict=True):
        assert float((actual - y).float().norm()) <= LIMITS[torch.bfloat16] * float(y.float().norm())


def test_second_derivatives_on_a_cpu_are_those_of_shifted_products() -> None:
    """Eager calls on a CPU use torch's convolution, with a backward of our own."""
    draw = torch.Generator().manual_seed(3)
    sizes = {"x": (2, 7, 6), "weight": (6, 3), "bias": (6,), "history": (2, 2, 6)}
    operands = [torch.randn(*size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes.values()]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return short_conv(ConvInputs(*tensors), (ConvPart(6, True, 3),))[0]

    assert torch.autograd.gradgradcheck(run, operands)
