"""Context parallelism: outputs, states and gradients of split sequences equal those of one process, on every rank."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from fsdp_rank import batch_of, build_model, expected_gradients, run_fsdp_rank
from gpu_rank import MIXERS, run_gpu_rank
from ranks import Case, errors_of, random_case, worst_errors
from small_configs import WIDTH, ZOO, small
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.context_parallel.plan import Cut, make_plan, most_segments
from deltazoo.backends.io.errors import OperandError, ShapeError, UnsupportedError, ValueRangeError
from deltazoo.backends.triton.gather.op import Place, refusal
from deltazoo.blocks.parallel.context import ContextParallel, Layout
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.parts.attention import split_attention
from deltazoo.mixers.parts.attention.split_attention import attend_line

EXACT = 1e-10
# What is exchanged: maps of the delta rule, decays, decays by rate, maxima, sums of exponentials, angles, least squares
# with states, the halo of a window, keys and values, latent vectors, sums of log gates; tokens for heads, for groups of
# heads, for channels.
KINDS = (
    "gated_deltanet", "retnet", "mamba", "rwkv4", "abc", "mamba3", "mesa", "sliding_window", "attention", "mla", "fox",
    "momentum_deltanet", "path_attention, forget gate, grouped heads", "hyena", "mom",
)  # fmt: skip
# Options with a further state, or that shorten the exchange.
OPTIONS = {
    "hgrn2, convolution": small("hgrn2", conv_width=3),
    "gsa, shared keys": small("gsa", heads=4, value_heads=None, key_value_heads=2, conv_width=3),
    "mla, window": small("mla", window=4, gate="head", bias=True),
    **{
        f"mom of gated_deltanet, sharing {sharing}": small(
            "mom", memory={"mixer": "gated_deltanet", "heads": 2, "key_width": 4, "conv_width": 4}, sharing=sharing
        )
        for sharing in ("all", "none")
    },
    "mom of lfm2_conv": small("mom", memory={"mixer": "lfm2_conv"}),
}
REFUSED = {"mom of attention": small("mom", memory={"mixer": "attention", "heads": 2})}
CASES = [Case("rows", 3, 7), Case("zigzag, states", 2, 9, "zigzag", state=True)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, whose zigzag layout has two pieces."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("context",))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [*KINDS, *OPTIONS, *REFUSED])
def test_two_pieces_equal_the_whole(name: str, mesh: DeviceMesh) -> None:
    case = Case("two pieces", 1, 17, "zigzag", (0, 2, 2, 13, 17), (8, 9), state=True, segments=4)
    errors = errors_of((ZOO | OPTIONS | REFUSED)[name], WIDTH, case, ContextParallel(mesh, "zigzag", gather=True))
    assert max(errors.values()) < EXACT, errors


def test_two_processes_equal_one(tmp_path: Path) -> None:
    configs = {name: ZOO[name] for name in ("gated_deltanet", "mamba", "sliding_window", "attention", "titans")}
    assert_exact(worst_errors(2, tmp_path, configs, WIDTH, CASES))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_decoding_continues_a_split_prompt(layout: Layout, mesh: DeviceMesh) -> None:
    model = build_model().eval()
    prompt, last = batch_of(0)[0][:, :-1], batch_of(0)[0][:, -1:]
    batch = ContextParallel(mesh, layout).plan(*prompt.shape)
    with torch.no_grad():
        expected, state = model(prompt, model.init_state(2, 16))
        expected_next, _ = model(last, state)
        logits, state = model(batch.shard(prompt), model.init_state(2, 16), batch.context)
        actual_next, _ = model(last, state)
    torch.testing.assert_close(batch.gather(logits), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(actual_next, expected_next, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_mixers_that_do_not_split_say_why(name: str) -> None:
    cut = Cut((0, 4, 8), (0, 1))
    plan = make_plan([0, 8], cut, 0, 2, "", 1, "cpu")
    mixer = REFUSED[name].build(WIDTH, backend="reference")
    with pytest.raises(UnsupportedError, match=f"^context parallelism: {type(mixer).__name__} [a-z].{{20,}}"):
        mixer(torch.zeros(1, 4, WIDTH), None, Context(cu_seqlens=plan.cu_seqlens, parallel=plan))


def test_every_mixer_splits() -> None:
    refusing = {n for n, c in ZOO.items() if c.build(WIDTH, backend="reference").split_refusal() is not None}
    assert not refusing


def test_plan_of_a_document_across_three_pieces() -> None:
    documents, cut = [0, 3, 3, 14, 16], Cut((0, 5, 10, 16), (0, 1, 2))
    assert most_segments(documents, cut) == 3
    plans = [make_plan(documents, cut, rank, 3, "", 3, "cpu") for rank in range(3)]
    assert [plan.cu_seqlens.tolist() for plan in plans] == [[0, 3, 3, 5], [0, 5, 5, 5], [0, 4, 6, 6]]
    assert [plan.receives.tolist() for plan in plans] == [[False], [True], [True]]
    none = [0] * 4  # a count of pieces and their indices, for each of three segments
    before = [none] * 3, [[1, 0, 0, 0], none, none], [[2, 0, 1, 0], none, none]
    after = [none, none, [2, 2, 1, 0]], [[1, 2, 0, 0], none, none], [none] * 3
    assert [plan.before.tolist() for plan in plans] == [*map(list, before)]
    assert [plan.after.tolist() for plan in plans] == [*map(list, after)]
    assert plans[0].joins.tolist() == [False, True, False]
    assert [plan.distance.tolist() for plan in plans] == [[[-1, -1, -1]], [[0, -1, -1]], [[5, 0, -1]]]
    assert plans[2].positions.tolist() == [[7, 8, 9, 10, 0, 1]]


def test_flash_attention_writes_the_gradients_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *lengths: int, scale: float, window_size: object
    ) -> Tensor:
        """Attend to all keys, with the gradients of flash attention: those of keys in no sequence are not written."""
        in_sequence = torch.zeros(len(k), 1, 1).index_fill(0, torch.arange(int(cu_k[0]), int(cu_k[-1])), 1)
        k, v = (x * 1 for x in (k, v))
        for x in (k, v):
            x.register_hook(lambda grad: torch.where(in_sequence > 0, grad, torch.nan))
        outputs = [q[:0]]
        for n in range(len(cu_q) - 1):
            spans = (cu_q[n : n + 2], cu_k[n : n + 2], cu_k[n : n + 2])
            q_n, k_n, v_n = (x[a:b].transpose(0, 1) for x, (a, b) in zip((q, k, v), spans, strict=True))
            visible = torch.ones(q_n.shape[1], k_n.shape[1]).tril(k_n.shape[1] - q_n.shape[1]) > 0
            outputs.append(F.scaled_dot_product_attention(q_n, k_n, v_n, visible, scale=scale).transpose(0, 1))
        return torch.cat(outputs)

    plan = make_plan([0, 3, 4, 10], Cut((0, 5, 7, 10), (0, 1, 1)), 1, 2, "", 1, "cpu")
    q, k, v = (torch.randn(1, n, 1, 4, requires_grad=True) for n in (5, 10, 10))
    expected = attend_line(q, k, v, 0.5, None, plan)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(split_attention, "has_flash_attention", lambda q, v: True)
    actual = attend_line(q, k, v, 0.5, None, plan)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    gradients = (torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (actual, expected))
    for given, right in zip(*gradients, strict=True):
        torch.testing.assert_close(given, right)


def test_wrong_batches_are_refused(mesh: DeviceMesh) -> None:
    parallel = ContextParallel(mesh)
    with pytest.raises(ValueRangeError, match=r"cu_seqlens must rise from 0 to B T = 6, got \[0, 4\]"):
        parallel.plan(1, 6, [0, 4])
    with pytest.raises(ValueRangeError, match=r"sizes must be 1 numbers with the sum B T = 6, got \[2, 4\]"):
        parallel.plan(1, 6, sizes=[2, 4])
    with pytest.raises(ValueRangeError, match="segments must be at least 2 for this batch, got 1"):
        parallel.plan(1, 6, [0, 4, 6], segments=1)
    with pytest.raises(ShapeError, match=r"x must have shape \[2, 3, '...'\] like the batch, got \[3, 2\]"):
        parallel.plan(2, 3).shard(torch.zeros(3, 2))
    with pytest.raises(OperandError, match="layout must be one of 'contiguous', 'zigzag', got 'ring'"):
        ContextParallel(mesh, "ring")  # type: ignore[arg-type]
    with pytest.raises(OperandError, match="symmetric needs GPUs of one host that NVLink connects: the mesh has"):
        ContextParallel(mesh, symmetric=True)
    context = parallel.plan(1, 6).context
    mixer = ZOO["gated_deltanet"].build(WIDTH, backend="reference")
    with pytest.raises(ShapeError, match=r"context.parallel needs the \[1, 6\] tokens of this rank .* \[1, 5, 24\]"):
        mixer(torch.zeros(1, 5, WIDTH), None, context)
    with pytest.raises(ShapeError, match="and no cu_seqlens"):
        mixer(torch.zeros(1, 6, WIDTH), None, context._replace(cu_seqlens=None))


def test_the_exchange_is_named(mesh: DeviceMesh) -> None:
    assert str(ContextParallel(mesh)) == (
        "context parallelism: 1 rank, contiguous, summaries by gloo (the mesh has no GPUs)"
    )


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([Place("a", 0, [0, 18]), Place("a", 1, [18, 0])], None),
        ([Place("a", 0, [0])], "there is one rank"),
        ([Place("a", 0, [0]), Place("b", 0, [0])], "ranks 0 and 1 are on different hosts"),
        ([Place("a", 0, [0]), Place("a", 0, [0])], "ranks 0 and 1 both have device 0: every rank must see all GPUs"),
        ([Place("a", 0, "no"), Place("a", 1, "no")], "no"),
        (
            [Place("a", 0, [0, 4, 4]), Place("a", 1, [4, 0, 0]), Place("a", 2, [4, 0, 0])],
            "no NVLink connects the GPUs of ranks 1 and 2",
        ),
    ],
)
def test_gpus_without_common_memory_use_a_collective(places: list[Place], expected: str | None) -> None:
    assert refusal(places) == expected


@pytest.mark.cuda
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(
    ("ranks", "layout", "symmetric"),
    [
        (1, "zigzag", False), (2, "contiguous", False), (2, "zigzag", True), (4, "zigzag", False),
        (4, "contiguous", True),
    ],
)  # fmt: skip
def test_gpus_equal_float64(ranks: int, layout: Layout, symmetric: bool, name: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    mp.spawn(run_gpu_rank, (name, ranks, layout, symmetric, str(tmp_path)), nprocs=ranks)
    for rank in range(ranks):
        errors = torch.load(tmp_path / f"{rank}.pt")
        wrong = {key: e for key, e in errors.items() if not e[0] < max(2e-2, 1.5 * e[1])}  # as in mixers/test_gpu.py
        assert not wrong, (rank, wrong)


@pytest.mark.parallel
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_mixer_over_ranks_equals_one_process(ranks: int, tmp_path: Path) -> None:
    cases = [*CASES, *(random_case(seed, ranks) for seed in range(6))]
    assert_exact(worst_errors(ranks, tmp_path, ZOO, WIDTH, cases))


@pytest.mark.parallel
def test_fsdp2_and_context_parallelism_on_one_mesh(tmp_path: Path) -> None:
    mp.spawn(run_fsdp_rank, (str(tmp_path),), nprocs=4)
    loss, gradients = torch.load(tmp_path / "gradients.pt")
    expected_loss, expected = expected_gradients()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        error = float((gradient - expected[name]).norm() / expected[name].norm().clamp(min=1e-9))
        assert error < 1e-9, (name, error)


@pytest.mark.parallel
@pytest.mark.parametrize(
    "name", ["gated_deltanet", "path_attention", "hyena", "mom of gated_deltanet, sharing all", "mom of lfm2_conv"]
)
def test_one_graph_serves_batches_of_other_documents(name: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    parallel = ContextParallel(mesh, "zigzag")
    mixer = (ZOO | OPTIONS)[name].build(WIDTH, backend=CompileBackend(chunk=16, compiled=False)).double()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 20, WIDTH, dtype=torch.float64)
    with torch.compiler.set_stance("default"):
        for i, documents in enumerate(([0, 3, 12, 20], [0, 13, 17, 20])):
            context = parallel.plan(1, 20, documents, segments=3).context
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                y = compiled(x, None, context)[0]
            expected = mixer(x, None, context).y
            gradients, wanted = (torch.autograd.grad(z.square().sum(), list(mixer.parameters())) for z in (y, expected))
            torch.testing.assert_close([y, *gradients], [expected, *wanted], rtol=1e-9, atol=1e-12)


def assert_exact(errors: dict[str, dict[str, float]]) -> None:
    wrong = {key: {name: x for name, x in e.items() if not x < EXACT} for key, e in errors.items()}
    assert errors and not any(wrong.values()), {key: e for key, e in wrong.items() if e}
