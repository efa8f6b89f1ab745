"""The kernels for Hopper GPUs against float64 on a CPU: those in Gluon by a stand-in, the others interpreted."""

import sys

import gluon_on_cpu
import pytest
import torch
from gluon_on_cpu import PACKAGE, RAN, Timing, kernels, launcher
from triton_cases import IN_16_BITS, INTERPRETED, SPECS, conforms

from deltazoo.backends.conformance import Case
from deltazoo.backends.shapes import Shape
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend
from deltazoo.backends.triton.config import Device
from deltazoo.backends.tuning.candidates import Target
from deltazoo.backends.tuning.measure import checks_of

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 as make test sets it")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    from deltazoo.backends.triton import backward, config
    from deltazoo.backends.triton import forward as launch

    names = (
        "hopper.prepare",
        "hopper.scan",
        "hopper.reverse",
        "hopper.sweep",
        "hopper.fused_backward",
        "hopper.gradients",
    )
    for name, module in kernels(*names).items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in launch, backward:
        monkeypatch.setattr(module, "launcher", launcher(module.launcher))
    monkeypatch.setattr(config, "device_of", lambda index: Device("a Hopper GPU", 4, 232448, hopper=True))


ONCE = Launch(tile=64, hopper=True)
PREPARE = {"prepare": Launch(tile=16, stages=1, hopper=True)}
SCANS = PREPARE | {"scan": ONCE, "replay": ONCE}
WALK = SCANS | {"reverse": ONCE}
AT_ONCE = WALK | {"reverse": Launch(tile=64, hopper=True, replays=True)}
GRADIENTS = {"gradients": Launch(tile=64, keys=64, stages=1, hopper=True)}
BY_SCANS = ["hopper_prepare_kernel", "hopper_scan_kernel"]
BY_REVERSE = [*BY_SCANS, "hopper_reverse_kernel"]
BY_WALK = [*BY_SCANS, "hopper_backward_sweep_kernel"]
IN_ONE = [*BY_SCANS, "hopper_fused_backward_kernel"]
PACK = (70, 0, 1, 64)
WAYS = {
    "prepare": (PREPARE, Shape("pack", 1, 135, 1, 2, 72, 16, lengths=PACK), BY_SCANS[:1]),
    "scans": (SCANS, Shape("short", 1, 150, 1, 2, 128, 128), BY_SCANS),
    "three tiles of keys": (WALK, Shape("short", 1, 150, 1, 1, 192, 64), BY_REVERSE),
    "four tiles of keys": (WALK, Shape("pack", 1, 135, 1, 1, 200, 136, lengths=PACK), BY_REVERSE),
    "a tile of keys": (WALK, Shape("pack", 1, 135, 1, 2, 40, 72, lengths=PACK), BY_REVERSE),
    "two tiles of keys": (
        WALK | GRADIENTS,
        Shape("short", 1, 300, 1, 2, 128, 136),
        [*BY_REVERSE, "hopper_gradients_kernel"],
    ),
    "walk": (WALK, Shape("pack", 1, 135, 1, 2, 104, 72, lengths=PACK), BY_WALK),
    "walk of tiles": (WALK, Shape("short", 1, 100, 1, 1, 128, 256), BY_WALK),
    "at once": (AT_ONCE, Shape("short", 1, 300, 2, 2, 128, 128), IN_ONE),
    "packs at once": (AT_ONCE, Shape("pack", 1, 265, 1, 1, 104, 72, lengths=(200, 0, 1, 64)), IN_ONE),
    "gradients": (GRADIENTS, Shape("short", 1, 100, 1, 2, 72, 104), ["hopper_gradients_kernel"]),
}
REGIMES = ("ordinary", "decays", "parallel", "no state")
CASES = [
    (way, name, REGIMES[(i + j) % 4], (i + j // 4) % 2 == 0)
    for i, way in enumerate(WAYS)
    for j, name in enumerate(IN_16_BITS)
]


@pytest.mark.parametrize(("way", "name", "regime", "late"), CASES)
def test_every_kernel_and_spec(monkeypatch, way, name, regime, late):
    monkeypatch.setattr(Timing, "late", late)
    change, shape, wanted = WAYS[way]
    how = {"state": "none"} if regime == "no state" else {"regime": regime}
    RAN.clear()
    conforms(
        TritonBackend(LaunchConfig(every=2, scratch=2**20, **change)), Case(SPECS[name], shape, torch.float16, **how)
    )
    gates_alone = SPECS[name].transition == "additive"  # for these are no wy_tiles to prepare
    assert {*RAN} == {kernel for kernel in wanted if not (gates_alone and kernel == "hopper_prepare_kernel")}


@pytest.mark.parametrize(("by", "V"), [(WALK, 72), (SCANS, 136), (WALK, 136)], ids=["walk", "scans", "reverse"])
def test_parts(by, V):
    shape = Shape("parts", 1, 400, 1, 1, 72, V)
    conforms(TritonBackend(LaunchConfig(every=2, split=4, **by)), Case(SPECS["gated delta"], shape, torch.float16))


def test_a_backward_in_one_launch_takes_no_scratch():
    RAN.clear()
    conforms(
        TritonBackend(LaunchConfig(every=2, scratch=0, **AT_ONCE)),
        Case(SPECS["gated delta"], Shape("short", 2, 150, 1, 1, 72, 72), torch.float16),
    )
    assert {*RAN} == {*IN_ONE}


@pytest.mark.parametrize(
    ("kernel", "module", "name", "by"),
    [
        ("replay", "hopper.scan", "load_checkpoint", WALK),
        ("reverse", "hopper.fused_backward", "load_interval_state", AT_ONCE),
    ],
)
@pytest.mark.parametrize("lengths", [(), (256, 256)])
def test_what_the_tuner_checks_begins_at_checkpoints(monkeypatch, kernel, module, name, by, lengths):
    target = Target(SPECS["gated delta"], Shape("tuned", 1, 512, 1, 1, 128, 128, lengths), torch.float16)
    config, cases = checks_of(target, kernel, LaunchConfig(**by))
    conforms(TritonBackend(config), cases[0])
    module = sys.modules[f"{PACKAGE}.{module}"]
    load = getattr(module, name)

    def loaded(*given):
        S = load(*given)
        if kernel == "reverse":
            return S * (1.5 if int(given[3]) > 0 else 1.0)  # from the initial state on it begins, too
        return tuple(1.5 * tile for tile in S)

    monkeypatch.setattr(module, name, loaded)
    with pytest.raises(AssertionError, match="above"):
        conforms(TritonBackend(config), cases[0])


@pytest.mark.parametrize("wrong", ["number", "place", "barrier", "product", "copy"])
def test_the_stand_in_tells_what_is_wrong(monkeypatch, wrong):
    scan = sys.modules[f"{PACKAGE}.hopper.scan"]
    to_16_bits, store_tile, producer_arrive = scan.to_16_bits, scan.store_tile, scan.producer_arrive
    name, instead, told = {
        "number": ("to_16_bits", lambda x, dtype: to_16_bits(x * 1.05, dtype), "above"),
        "place": ("store_tile", lambda base, *rest: store_tile(base + 2**24, *rest), "addresses are of no tensor"),
        "barrier": ("consumer_release", lambda empty: None, "a barrier was waited for in vain"),
        "product": ("warpgroup_mma_wait", lambda outstanding, deps: tuple(deps), "under way was read"),
        "copy": ("producer_arrive", lambda full, pending, pred: producer_arrive(full, pending + 1, pred), "error nan"),
    }[wrong]
    monkeypatch.setattr(scan, name, instead)
    monkeypatch.setattr(gluon_on_cpu, "PATIENCE", 0.5 if wrong == "barrier" else gluon_on_cpu.PATIENCE)
    monkeypatch.setattr(Timing, "late", True)
    shape = Shape("of more chunks than buffers", 1, 300, 1, 1, 128, 128)
    with pytest.raises(AssertionError, match=told):
        conforms(TritonBackend(LaunchConfig(every=2, **SCANS)), Case(SPECS["gated delta"], shape, torch.float16))


@pytest.mark.parametrize("address", [2**31 - 8, 2**47 - 8])
def test_an_address_has_64_bits_whatever_is_added(address):
    at = gluon_on_cpu.Array(address, gluon_on_cpu.Pointer(gluon_on_cpu.DTYPES["float16"]))
    steps = gluon_on_cpu.Array(torch.tensor([0, 4, 8], dtype=torch.int32))
    assert (at + steps).x.tolist() == [address, address + 8, address + 16]
    assert (at - steps).x.tolist() == [address, address - 8, address - 16]
