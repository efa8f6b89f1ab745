"""The Hopper kernels on a CPU against float64: Gluon kernels emulated (gluon_on_cpu.py), the others interpreted."""

import sys

import gluon_on_cpu
import pytest
import torch
from gluon_on_cpu import LAUNCHED, PACKAGE, Timing, kernels, launcher
from triton_cases import IN_16_BITS, INTERPRETED, SPECS, assert_conforms, errors

from deltazoo import UpdateSpec, conformance
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend, problem
from deltazoo.backends.triton.chunk import plan
from deltazoo.backends.tuning.candidates import Target
from deltazoo.backends.tuning.measure import checks_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 as make test sets it")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    from deltazoo.backends.triton.chunk import execute

    names = (
        "sm90.prepare",
        "sm90.channel_prepare",
        "sm90.scan",
        "sm90.scan_producer",
        "sm90.scan_products",
        "sm90.reverse",
        "sm90.sweep",
        "sm90.fused_backward",
        "sm90.gradients",
        "sm90.channel_levels",
        "sm90.channel_gradients",
        "sm90.additive_gradients",
        "sm90.dplr_prepare",
        "sm90.dplr_gradients",
    )
    for name, module in kernels(*names).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(execute, "launcher", launcher(execute.launcher))
    hopper = DeviceSpec("a Hopper GPU", "cuda", (9, 0), 4, 232448)
    monkeypatch.setattr(problem, "device_spec", lambda index: hopper)


SCAN_LAUNCH = Launch(tile=64, kernel="sm90")
PREPARE = {"prepare": Launch(tile=16, stages=1, kernel="sm90")}
SCANS = PREPARE | {"scan": SCAN_LAUNCH, "recompute": SCAN_LAUNCH}
SWEEP = SCANS | {"reverse": SCAN_LAUNCH}
FUSED = SWEEP | {"reverse": Launch(tile=64, kernel="fused")}
GRADIENTS = {"gradients": Launch(tile=64, keys=64, stages=1, kernel="sm90")}
BY_SCANS = ["sm90_prepare_kernel", "sm90_scan_kernel"]
BY_REVERSE = [*BY_SCANS, "sm90_reverse_kernel"]
BY_SWEEP = [*BY_SCANS, "sm90_backward_sweep_kernel"]
BY_FUSED = [*BY_SCANS, "sm90_fused_backward_kernel"]
PACK = (70, 0, 1, 64)
ROUTES = {
    "prepare": (PREPARE, Shape("pack", 1, 135, 1, 2, 72, 16, lengths=PACK), BY_SCANS[:1]),
    "scans": (SCANS, Shape("short", 1, 150, 1, 2, 128, 128), BY_SCANS),
    "three tiles of keys": (SWEEP, Shape("short", 1, 150, 1, 1, 192, 64), BY_REVERSE),
    "four tiles of keys": (SWEEP, Shape("pack", 1, 135, 1, 1, 200, 136, lengths=PACK), BY_REVERSE),
    "one tile of keys": (SWEEP, Shape("pack", 1, 135, 1, 2, 40, 72, lengths=PACK), BY_REVERSE),
    "two tiles of keys": (
        SWEEP | GRADIENTS,
        Shape("short", 1, 300, 1, 2, 128, 136),
        [*BY_REVERSE, "sm90_gradients_kernel"],
    ),
    "sweep": (SWEEP, Shape("pack", 1, 135, 1, 2, 104, 72, lengths=PACK), BY_SWEEP),
    "sweep of value tiles": (SWEEP, Shape("short", 1, 100, 1, 1, 128, 256), BY_SWEEP),
    "fused": (FUSED, Shape("short", 1, 300, 2, 2, 128, 128), BY_FUSED),
    "fused packs": (FUSED, Shape("pack", 1, 265, 1, 1, 104, 72, lengths=(200, 0, 1, 64)), BY_FUSED),
    "gradients": (GRADIENTS, Shape("short", 1, 100, 1, 2, 72, 104), ["sm90_gradients_kernel"]),
    "narrow tile of values": (
        GRADIENTS,
        Shape("pack", 1, 135, 1, 1, 64, 208, lengths=PACK),
        ["sm90_gradients_kernel"],
    ),
}
REGIMES = ("ordinary", "decays", "parallel", "no state")
CASES = [  # half of the specs on each route; every route and spec in every regime, and with late and early copies
    pytest.param(
        route,
        name,
        REGIMES[(i // 2 + j // 2) % 4],
        (i // 4 + j // 2) % 2 == 0,
        marks=[pytest.mark.slow] if (i + j) % 2 else [],
    )
    for i, route in enumerate(ROUTES)
    for j, name in enumerate(IN_16_BITS)
]


@pytest.mark.parametrize(("route", "name", "regime", "late"), CASES)
def test_every_kernel_matches_float64_for_every_spec(monkeypatch, route, name, regime, late):
    monkeypatch.setattr(Timing, "late", late)
    launches, shape, expected = ROUTES[route]
    inputs = {"state": "none"} if regime == "no state" else {"regime": regime}
    LAUNCHED.clear()
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, scratch=2**20, **launches)),
        Case(SPECS[name], shape, torch.float16, **inputs),
    )
    no_wy_tiles = SPECS[name].transition == "additive"
    assert {*LAUNCHED} == {kernel for kernel in expected if not (no_wy_tiles and kernel == "sm90_prepare_kernel")}


SPLIT = {
    "negative": SPECS["negative"],
    "householders": SPECS["householders"],
    "before": SPECS["both before"].model_copy(update={"negative_eigenvalues": "both"}),
    "no decay": UpdateSpec(beta="head", negative_eigenvalues="erase"),
}


SPLIT_CASES = [
    pytest.param(name, route, regime, marks=[pytest.mark.slow] if (i + j + n) % 3 else [])
    for i, name in enumerate(SPLIT)
    for j, route in enumerate(("sweep of value tiles", "sweep", "fused", "fused packs"))
    for n, regime in enumerate(("ordinary", "parallel", "decays"))
]


@pytest.mark.parametrize(("name", "route", "regime"), SPLIT_CASES)
def test_split_terms_in_bfloat16_match_float64(monkeypatch, name, route, regime):
    # the interpreter has no bfloat16 arithmetic; the portable kernels that run here only convert it
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    launches, shape, expected = ROUTES[route]
    LAUNCHED.clear()
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, scratch=2**20, **launches)),
        Case(SPLIT[name], shape, torch.bfloat16, regime),
    )
    assert {*LAUNCHED} == {*expected}


BY_CHANNEL = {
    "kda": UpdateSpec(decay="channel", beta="head"),
    "gla": UpdateSpec(decay="channel", transition="additive"),
    "beta per channel": UpdateSpec(decay="channel", beta="channel"),  # a write strength per channel scales v
    "write strength": UpdateSpec(decay="channel", transition="additive", beta="head", read="before"),
    "read before": UpdateSpec(decay="channel", transition="additive", read="before"),
    "both before": UpdateSpec(decay="channel", beta="head", read="before", erase_from="previous"),
    "strengths per channel, erase before": UpdateSpec(decay="channel", beta="channel", erase_from="previous"),
}
CHANNEL_SCANS = dict.fromkeys(("scan", "recompute", "reverse"), SCAN_LAUNCH)
CHANNEL_ROUTES = {
    "two tiles of keys": ({}, Shape("grouped", 1, 230, 1, 2, 128, 128)),
    "odd tiles": ({}, Shape("pack", 1, 265, 1, 1, 104, 136, lengths=(200, 0, 1, 64))),
    "one tile of keys": ({}, Shape("heads", 1, 300, 2, 2, 64, 64)),
    "windows": ({"scratch": 0}, Shape("narrow", 1, 400, 1, 1, 40, 72)),
    "segments": ({"segment_chunks": 4}, Shape("segments", 1, 400, 1, 1, 72, 72)),
}
CHANNEL_CASES = [
    pytest.param(
        route, name, REGIMES[(i + j) % 4], (i + j // 4) % 2 == 0, marks=[pytest.mark.slow] if (i + j) % 3 else []
    )
    for i, route in enumerate(CHANNEL_ROUTES)
    for j, name in enumerate(BY_CHANNEL)
]


@pytest.mark.parametrize(("route", "name", "regime", "late"), CHANNEL_CASES)
def test_the_scans_with_a_decay_per_channel_match_float64(monkeypatch, route, name, regime, late):
    monkeypatch.setattr(Timing, "late", late)
    launches, shape = CHANNEL_ROUTES[route]
    inputs = {"state": "none"} if regime == "no state" else {"regime": regime}
    LAUNCHED.clear()
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, **CHANNEL_SCANS, **({"scratch": 2**20} | launches))),
        Case(BY_CHANNEL[name], shape, torch.float16, **inputs),
    )
    assert {*LAUNCHED} == {"sm90_scan_kernel", "sm90_reverse_kernel"}


@pytest.mark.parametrize(
    ("spec", "shape", "launches"),
    [
        (SPECS["gated delta"], Shape("pack", 1, 390, 1, 2, 72, 136, lengths=(230, 0, 1, 64, 95)), SWEEP),
        (BY_CHANNEL["kda"], Shape("pack", 1, 390, 1, 2, 72, 136, lengths=(230, 0, 1, 64, 95)), CHANNEL_SCANS),
        (BY_CHANNEL["kda"], Shape("whole chunks", 1, 256, 2, 2, 128, 128), CHANNEL_SCANS | GRADIENTS),
    ],
    ids=["pack", "pack, decay per channel", "states in the rows of gradients"],
)
def test_programs_of_64_values(monkeypatch, spec, shape, launches):
    """24 SMs: in the pack the sequence of 230 tokens has them, the others have programs of 128 values."""
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    monkeypatch.setattr(problem, "device_spec", lambda index: DeviceSpec("a Hopper GPU", "cuda", (9, 0), 24, 232448))
    decisions, decide = [], plan._narrow_min_chunks
    monkeypatch.setattr(plan, "_narrow_min_chunks", lambda *args: decisions.append(decide(*args)) or decisions[-1])
    dtype = torch.bfloat16 if "gradients" in launches else torch.float16
    for late in (False, True):  # the plan of the second run is cached
        monkeypatch.setattr(Timing, "late", late)
        assert_conforms(TritonBackend(LaunchConfig(checkpoint_chunks=2, **launches)), Case(spec, shape, dtype))
    assert {*decisions} == {3 if shape.lengths else 1}


ERASE_KEYS = {
    "own": UpdateSpec(decay="head", beta="head", erase_key="own"),
    "erase before": SPECS["own"],
    "no beta, no decay": UpdateSpec(erase_key="own"),
    "fixed decay": UpdateSpec(decay="fixed", beta="separate", erase_key="own"),
    "both before": SPECS["own"].model_copy(update={"beta": "separate", "read": "before"}),
    "negative": UpdateSpec(beta="head", erase_key="own", negative_eigenvalues="both"),
    "householders": SPECS["own"].model_copy(update={"householders": 2}),
    # one term
    "strengths per channel": UpdateSpec(decay="head", beta="channel"),
    "dplr": UpdateSpec(decay="fixed", transition="dplr"),
}
BY_OWN_KEY = {*BY_REVERSE, "sm90_gradients_kernel"}
ERASE_KEY_CASES = [
    pytest.param(
        route, name, REGIMES[(i + j) % 4], (i + j // 4) % 2 == 0, marks=[pytest.mark.slow] if (i + j) % 3 else []
    )
    for i, route in enumerate(CHANNEL_ROUTES)
    for j, name in enumerate(ERASE_KEYS)
    if route != "segments" or j > 6  # the interpreter has no bfloat16, and portable kernels compute maps of segments
]


@pytest.mark.parametrize(("route", "name", "regime", "late"), ERASE_KEY_CASES)
def test_erase_keys_that_differ_from_k(monkeypatch, route, name, regime, late):
    monkeypatch.setattr(Timing, "late", late)
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    launches, shape = CHANNEL_ROUTES[route]
    inputs = {"state": "none"} if regime == "no state" else {"regime": regime}
    dtype = torch.bfloat16 if ERASE_KEYS[name].erase_key == "own" else torch.float16
    LAUNCHED.clear()
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, **SWEEP, **GRADIENTS, **({"scratch": 2**20} | launches))),
        Case(ERASE_KEYS[name], shape, dtype, **inputs),
    )
    assert {*LAUNCHED} == BY_OWN_KEY


@pytest.mark.parametrize("regime", ["ordinary", "parallel"])
def test_each_product_that_feeds_back_has_two_terms(monkeypatch, regime):
    """With one term in S e, in k dS' or in du of dS, or with one term of T, an error is between 1.1e-3 and 3.8e-3."""
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    case = Case(ERASE_KEYS["negative"], Shape("short", 1, 200, 1, 1, 64, 64), torch.bfloat16, regime)
    report = conformance.compare(TritonBackend(LaunchConfig(checkpoint_chunks=2, **SWEEP, **GRADIENTS)), case)
    found = {error.tensor: error.relative for error in report.errors}
    assert found["state"] < 1e-3
    assert found["d_state"] < 1e-3


CHANNEL_SPECS = {
    "KDA": UpdateSpec(decay="channel", beta="head"),
    "GLA": UpdateSpec(decay="channel", transition="additive"),
    "write strength": UpdateSpec(decay="channel", transition="additive", beta="head"),
    "no beta": UpdateSpec(decay="channel"),
    "strengths per channel": UpdateSpec(decay="channel", beta="channel"),
    "strengths per channel, erase before": UpdateSpec(decay="channel", beta="channel", erase_from="previous"),
    "both before": UpdateSpec(decay="channel", beta="head", read="before", erase_from="previous"),
    "read before": UpdateSpec(decay="channel", beta="head", read="before"),
    "erase before": UpdateSpec(decay="channel", beta="head", erase_from="previous"),
    "efla": UpdateSpec(decay="channel", beta="head", reparam="efla"),
}
CHANNEL_SHAPES = (
    Shape("short", 1, 100, 1, 2, 72, 104),
    Shape("pack", 1, 135, 1, 1, 64, 64, lengths=PACK),
    Shape("value tiles", 1, 70, 2, 2, 40, 200),
)


@pytest.mark.parametrize(
    ("name", "shape", "regime", "late"),
    [
        pytest.param(
            name,
            CHANNEL_SHAPES[i % 3],
            REGIMES[(i + j) % 4],
            (i + j // 2) % 2 == 0,
            marks=[pytest.mark.slow] if j > 1 else [],
        )
        for i, name in enumerate(CHANNEL_SPECS)
        for j in range(4)
    ],
)
def test_gradients_with_a_decay_per_channel(monkeypatch, name, shape, regime, late):
    monkeypatch.setattr(Timing, "late", late)
    inputs = {"state": "none"} if regime == "no state" else {"regime": regime}
    LAUNCHED.clear()
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, scratch=2**20, **GRADIENTS)),
        Case(CHANNEL_SPECS[name], shape, torch.float16, **inputs),
    )
    kernel = "channel" if CHANNEL_SPECS[name].transition == "delta" else "additive"
    assert {*LAUNCHED} == {f"sm90_{kernel}_gradients_kernel"}


@pytest.mark.parametrize(
    ("name", "regime", "late"),
    [
        ("KDA", "decays", True),
        ("strengths per channel", "no state", False),
        ("GLA", "ordinary", True),
        pytest.param("both before", "ordinary", True, marks=pytest.mark.slow),
        pytest.param("read before", "no state", False, marks=pytest.mark.slow),
    ],
)
def test_states_in_the_rows_of_gradients(monkeypatch, name, regime, late):
    monkeypatch.setattr(Timing, "late", late)
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    decisions, decide = [], plan._states_in_gradients
    monkeypatch.setattr(plan, "_states_in_gradients", lambda *args: decisions.append(decide(*args)) or decisions[-1])
    inputs = {"state": "none"} if regime == "no state" else {"regime": regime}
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, scratch=0, **CHANNEL_SCANS, **GRADIENTS)),
        Case(CHANNEL_SPECS[name], Shape("whole chunks", 1, 256, 2, 2, 128, 128), torch.bfloat16, **inputs),
    )
    assert set(decisions) == {True}


@pytest.mark.parametrize(
    ("name", "regime"),
    [*zip(("kda", "gla", "read before", "strengths per channel, erase before"), REGIMES, strict=True)],
)
def test_prepare_of_a_decay_per_channel(name, regime):
    inputs = {"state": "none"} if regime == "no state" else {"regime": regime}
    LAUNCHED.clear()
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, **PREPARE)),
        Case(BY_CHANNEL[name], Shape("pack", 1, 135, 1, 2, 40, 16, lengths=PACK), torch.float16, **inputs),
    )
    assert {*LAUNCHED} == {"sm90_channel_prepare_kernel"}


DPLR = UpdateSpec(decay="channel", transition="dplr")
DPLR_SHAPES = (
    Shape("short", 1, 150, 2, 2, 64, 64),
    Shape("pack", 1, 135, 1, 1, 64, 64, lengths=PACK),
    Shape("wide", 1, 100, 1, 1, 128, 128),
)
# "ordinary" and "decays" have chunks that are marked for the portable kernels, "weak" has none; "mixed" has both
DPLR_CASES = [
    (0, "after", "mixed"), (0, "before", "weak"), (0, "after", "parallel"), (1, "after", "weak"),
    (1, "before", "ordinary"), (2, "after", "weak"), (2, "before", "mixed"), (0, "after", "decays"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "read", "regime"), DPLR_CASES)
def test_prepare_and_gradients_of_dplr(monkeypatch, shape, read, regime):
    # in float16: the interpreter of the portable kernels has no bfloat16; 2^12 is in the range of float16
    gradients = [
        kernel._replace(support=kernel.support._replace(dtypes=(torch.float16,)))
        if kernel.name == "sm90_dplr_gradients_kernel"
        else kernel
        for kernel in plan.KERNELS["gradients"]
    ]
    monkeypatch.setitem(plan.KERNELS, "gradients", gradients)
    for name in "dplr_prepare", "dplr_gradients":
        monkeypatch.setattr(sys.modules[f"{PACKAGE}.sm90.{name}"], "WEAK", 12.0, raising=False)
    drawn = regime in ("weak", "mixed")
    case = Case(
        DPLR.model_copy(update={"read": read}), DPLR_SHAPES[shape], torch.float16, "ordinary" if drawn else regime
    )
    backend = TritonBackend(LaunchConfig(checkpoint_chunks=2, scratch=2**20, **PREPARE, **GRADIENTS))
    LAUNCHED.clear()
    if drawn:
        x = draw(case, "cpu")
        decay = -0.2 * torch.rand_like(x.log_decay)
        strong = torch.rand_like(decay) < (0.001 if regime == "mixed" else 0.0)
        found = errors(backend, case, x._replace(log_decay=torch.where(strong, -20.0, decay).requires_grad_()))
        assert max(found.values()) < 5e-3, found
    else:
        assert_conforms(backend, case)
    assert {*LAUNCHED} == {"sm90_dplr_prepare_kernel", "sm90_dplr_gradients_kernel"}


@pytest.mark.parametrize(
    ("launches", "V"), [(SWEEP, 72), (SCANS, 136), (SWEEP, 136)], ids=["sweep", "scans", "reverse"]
)
def test_sequences_in_segments(launches, V):
    shape = Shape("segments", 1, 400, 1, 1, 72, V)
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, segment_chunks=4, **launches)),
        Case(SPECS["gated delta"], shape, torch.float16),
    )


def test_the_fused_backward_needs_no_scratch_memory():
    LAUNCHED.clear()
    assert_conforms(
        TritonBackend(LaunchConfig(checkpoint_chunks=2, scratch=0, **FUSED)),
        Case(SPECS["gated delta"], Shape("short", 2, 150, 1, 1, 72, 72), torch.float16),
    )
    assert {*LAUNCHED} == {*BY_FUSED}


@pytest.mark.parametrize(
    ("kernel", "module", "name", "launches"),
    [
        ("recompute", "sm90.scan", "load_checkpoint", SWEEP),
        ("reverse", "sm90.fused_backward", "load_interval_state", FUSED),
    ],
)
@pytest.mark.parametrize("lengths", [(), (256, 256)])
def test_the_cases_of_the_tuner_start_from_checkpoints(monkeypatch, kernel, module, name, launches, lengths):
    target = Target(SPECS["gated delta"], Shape("tuned", 1, 512, 1, 1, 128, 128, lengths), torch.float16)
    config = LaunchConfig(checkpoint_chunks=2, **launches)
    cases = checks_of(target, kernel, config)
    assert_conforms(TritonBackend(config), cases[0])
    module = sys.modules[f"{PACKAGE}.{module}"]
    load = getattr(module, name)

    def load_wrong(*args):
        S = load(*args)
        if kernel == "reverse":
            return S * (1.5 if int(args[3]) > 0 else 1.0)  # also called for the initial state
        return tuple(1.5 * tile for tile in S)

    monkeypatch.setattr(module, name, load_wrong)
    with pytest.raises(AssertionError, match="above"):
        assert_conforms(TritonBackend(config), cases[0])


@pytest.mark.parametrize("fault", ["value", "address", "barrier", "product", "copy"])
def test_the_emulation_detects_faults(monkeypatch, fault):
    scan, producer = sys.modules[f"{PACKAGE}.sm90.scan"], sys.modules[f"{PACKAGE}.sm90.scan_producer"]
    to_16_bits, store_tile, producer_arrive = scan.to_16_bits, scan.store_tile, producer.producer_arrive
    name, replacement, message = {
        "value": ("to_16_bits", lambda x, dtype: to_16_bits(x * 1.05, dtype), "above"),
        "address": (
            "store_tile",
            lambda base, *rest: store_tile(base + 2**24, *rest),
            "outside every tensor",
        ),
        "barrier": ("consumer_release", lambda empty: None, "timeout in a wait for an mbarrier"),
        "product": ("warpgroup_mma_wait", lambda outstanding, deps: tuple(deps), "read before the wait for it"),
        "copy": (
            "producer_arrive",
            lambda full, pending, pred: producer_arrive(full, pending + 1, pred),
            r"nan +limit",
        ),
    }[fault]
    monkeypatch.setattr(producer if fault == "copy" else scan, name, replacement)
    monkeypatch.setattr(gluon_on_cpu, "TIMEOUT", 0.5 if fault == "barrier" else gluon_on_cpu.TIMEOUT)
    monkeypatch.setattr(Timing, "late", True)
    shape = Shape("more chunks than stages", 1, 300, 1, 1, 128, 128)
    with pytest.raises(AssertionError, match=message):
        assert_conforms(
            TritonBackend(LaunchConfig(checkpoint_chunks=2, **SCANS)), Case(SPECS["gated delta"], shape, torch.float16)
        )


@pytest.mark.parametrize("address", [2**31 - 8, 2**47 - 8])
def test_pointer_arithmetic_keeps_64_bits(address):
    at = gluon_on_cpu.Array(address, gluon_on_cpu.Pointer(gluon_on_cpu.DTYPES["float16"]))
    steps = gluon_on_cpu.Array(torch.tensor([0, 4, 8], dtype=torch.int32))
    assert (at + steps).x.tolist() == [address, address + 8, address + 16]
    assert (at - steps).x.tolist() == [address, address - 8, address - 16]
