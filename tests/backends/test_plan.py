"""Kernel plans: the kernels for each device, refusals before compilation, and the table in README.md."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from deltazoo import UpdateSpec, bind, explain
from deltazoo.backends.conformance import Case, draw
from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton import Launch, LaunchConfig, TritonBackend
from deltazoo.backends.triton import limits as triton_limits
from deltazoo.backends.triton import problem as problems
from deltazoo.backends.triton.chunk.execute import load
from deltazoo.backends.triton.chunk.heuristic import heuristic
from deltazoo.backends.triton.chunk.plan import make_plan
from deltazoo.backends.triton.chunk.registry import GATE_GRADIENTS, KERNELS, PHASES, SUM_GROUPS, TAIL, saves_16_bits
from deltazoo.backends.triton.lower import lower
from deltazoo.backends.triton.operands import problem_of
from deltazoo.backends.triton.problem import Problem
from deltazoo.backends.triton.runtime import launcher
from deltazoo.backends.triton.show import problem_for
from deltazoo.backends.triton.support import Kernel, Support, fixed_options, fixed_tiles, per_segment
from deltazoo.backends.update.base import UpdateMeta
from deltazoo.mixers import Comba, PreconditionedDeltaNet

pytest.importorskip("triton", reason="the kernels need the package triton")

GATED = UpdateSpec(decay="head", beta="head")
H200, A100, RTX4090, B200 = (
    DeviceSpec.named(name)._replace(triton="3.7.1")
    for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "NVIDIA B200")
)
SMALL = RTX4090._replace(name="a small GPU", shared_memory=64 * 1024)
MI300X = DeviceSpec.named("AMD Instinct MI300X")._replace(triton="3.7.1")


@pytest.fixture
def backend():
    """A backend that does not use the interpreter, regardless of TRITON_INTERPRET."""
    backend = TritonBackend()
    backend._interpreted = False
    return backend


def meta(K=128, V=128, dtype=torch.bfloat16, grad=True):
    return UpdateMeta("cuda", dtype, H=16, HV=16, K=K, V=V, grad=grad)


@pytest.mark.parametrize(
    ("device", "arguments", "message"),
    [
        (MI300X, {}, "it needs an NVIDIA GPU, and AMD Instinct MI300X is an AMD GPU"),
        (H200._replace(triton="3.10.0"), {}, "it needs Triton 3.6 to 3.9, and 3.10.0 is installed"),
        (H200._replace(triton="3.5.1"), {}, "it needs Triton 3.6 to 3.9, and 3.5.1 is installed"),
        (
            H200._replace(name="NVIDIA T4", capability=(7, 5)),
            {},
            "it needs compute capability 8.0 or newer, and NVIDIA T4 has 7.5",
        ),
        (
            SMALL,
            {"K": 256, "V": 256},
            "K = 256 and V = 256 in bfloat16 need 98304 bytes of shared memory per block for training, and a small GPU "
            "has 65536",
        ),
        (SMALL, {"K": 256, "V": 256, "grad": False}, "need 81920 bytes of shared memory per block, and"),
        (SMALL, {}, "K = 128 and V = 128 in bfloat16 need 93188 bytes of shared memory per block for training, and"),
        (B200, {}, "training on compute capability 10.0 needs Triton 3.9 or newer"),
    ],
)
def test_unsupported_devices_are_refused_with_the_requirement(backend, device, arguments, message):
    (reason,) = backend.unsupported_on(GATED, meta(**arguments), device)
    assert message in reason


@pytest.mark.parametrize(
    ("device", "arguments"),
    [
        (H200, {}),
        (H200._replace(triton="3.6.0"), {"K": 256, "V": 512}),
        (A100, {"K": 256, "V": 256}),
        (RTX4090, {}),
        (RTX4090, {"K": 256, "V": 256}),
        (RTX4090, {"K": 256, "V": 256, "dtype": torch.float32}),
        (B200, {"grad": False}),
        (H200._replace(triton="3.8.0"), {}),
        (H200._replace(triton="3.9.0"), {}),
        (B200._replace(triton="3.9.0"), {}),
    ],
)
def test_supported_devices_are_not_refused(backend, device, arguments):
    assert backend.unsupported_on(GATED, meta(**arguments), device) == []


def test_unsupported_reads_the_current_gpu(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device, refused in ((MI300X, True), (H200, False)):
        monkeypatch.setattr(triton_limits.DeviceSpec, "current", staticmethod(lambda device=device: device))
        assert bool(backend.unsupported(GATED, meta())) is refused


def test_untested_triton_is_refused_without_a_gpu(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(triton_limits, "installed_triton", lambda: "3.10.0")
    assert backend.unsupported(GATED, meta()) == ["it needs Triton 3.6 to 3.9, and 3.10.0 is installed."]


def test_unsupported_does_not_initialise_cuda_without_a_gpu(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    backend.unsupported(GATED, meta())


def problem(**change):
    sizes = {"N": 8, "T": 4096, "H": 16, "HV": 16, "K": 128, "V": 128}
    traits = {"delta": True, "erase_key": False, "decay": "head", "packed": False}
    return Problem(**({"dtype": torch.bfloat16} | sizes | traits | change))


def planned(case, device, grad=True):
    """The plan of the heuristic's config, and the architecture of each kernel's file."""
    plan = make_plan(case, device, heuristic(case, device), grad)
    return plan, {phase: kernel.version for phase, kernel in plan.kernels.items()}


@pytest.mark.parametrize(
    ("change", "device", "prepare", "scan", "reverse"),
    [
        ({}, H200, "sm90_prepare_kernel", "sm90_scan_kernel", "sm90_fused_backward_kernel"),
        ({"HV": 32}, H200, "sm90_prepare_kernel", "sm90_scan_kernel", "sm90_backward_sweep_kernel"),
        ({"K": 64}, H200, "sm90_prepare_kernel", "sm90_scan_kernel", "sm90_reverse_kernel"),
        ({"delta": False}, H200, "gates_kernel", "sm90_scan_kernel", "sm90_fused_backward_kernel"),
        ({"dtype": torch.float32}, H200, "prepare_kernel", "scan_kernel", "reverse_kernel"),
        ({"split_terms": True}, H200, "prepare_kernel", "scan_kernel", "reverse_kernel"),
        ({"erase_key": True}, H200, "sm90_prepare_kernel", "sm90_scan_kernel", "sm90_reverse_kernel"),
        ({"erase_key": True, "split_terms": True}, H200, "prepare_kernel", "scan_kernel", "reverse_kernel"),
        ({}, A100, "prepare_kernel", "scan_kernel", "reverse_kernel"),
        ({}, H200._replace(platform="hip", capability=(9, 4)), "prepare_kernel", "scan_kernel", "reverse_kernel"),
    ],
)
def test_plan_follows_from_problem_and_device(change, device, prepare, scan, reverse):
    case = problem(**change)
    names = make_plan(case, device, heuristic(case, device), grad=True).names()
    assert (names["prepare"], names["scan"], names["reverse"]) == (prepare, scan, reverse)
    without_grad = make_plan(case, device, heuristic(case, device), grad=False)
    assert (without_grad.backward, without_grad.checkpoint_chunks) == ((), 0)


@pytest.mark.parametrize(
    ("change", "version"),
    [
        ({}, "sm90"),
        ({"HV": 32, "V": 256, "packed": True, "decay": "none"}, "sm90"),
        ({"K": 40, "V": 72}, "sm90"),
        ({"K": 32}, "portable"),  # P has one term on Hopper
        ({"K": 136}, "portable"),  # two chunks do not fit in shared memory
        ({"V": 32}, "portable"),
        ({"dtype": torch.float16}, "portable"),
    ],
)
def test_plan_of_split_terms_and_an_erase_key_has_no_sweep(change, version):
    case = problem(**({"erase_key": True, "split_terms": True} | change))
    case = case._replace(saves_16_bits=saves_16_bits(case, H200))
    plan, versions = planned(case, H200)
    assert set(versions.values()) == {version}
    assert "gradients" in plan.kernels


def test_explain_prints_the_kernels_of_an_erase_key():
    spec = PreconditionedDeltaNet().spec()
    text = str(explain(spec, meta(), "triton", shape=(8, 4096), device=H200))
    assert "forward:  sm90_prepare_kernel -> sm90_scan_kernel" in text
    kernels = ("sm90_scan", "sm90_reverse", "sm90_gradients", "gate_gradients")
    recompute, reverse, gradients, gates = (f"{name}_kernel" for name in kernels)
    assert f"backward: 4 x ({recompute} -> {reverse} -> {gradients}) -> {gates}\n" in text


@pytest.mark.parametrize("norm_after", [False, True])
def test_comba_takes_the_hopper_kernels_with_one_term(norm_after):
    spec = Comba(norm_after=norm_after).spec()
    case = problem_for(spec, meta(), Shape("busy", B=8, T=4096, H=16, HV=16, K=128, V=128), H200)
    assert case == problem(erase=True, write=True, erase_from="previous")
    text = str(explain(spec, meta(), "triton", shape=(8, 4096), device=H200))
    assert "forward:  sm90_prepare_kernel -> sm90_scan_kernel" in text
    assert "backward: sm90_fused_backward_kernel -> gate_gradients_kernel\n" in text


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_separate_strengths_are_lowered_to_one_term_without_an_erase_key(decay):
    spec, shape = UpdateSpec(decay=decay, beta="separate"), Shape("drawn", B=2, T=70, H=1, HV=2, K=64, V=64)
    lowered = lower(spec, draw(Case(spec, shape, torch.bfloat16)), "")
    assert not lowered.kind.tied
    assert lowered.operands.b.shape == lowered.operands.w.shape == (2, 70, 2)
    assert problem_of(lowered.operands, lowered.kind, H200).terms == 1
    assert lowered.operands.e is None


@pytest.mark.parametrize(
    ("change", "version"),
    [
        ({}, "sm90"),
        ({"delta": False, "HV": 32}, "sm90"),
        ({"erase_key": True, "packed": True}, "sm90"),  # E is an operand of its own in any case
        ({"K": 136}, "portable"),  # two chunks do not fit in shared memory
        ({"dtype": torch.float32}, "portable"),
        ({"V": 32}, "portable"),
    ],
)
def test_plan_of_a_decay_per_channel_has_no_sweep(change, version):
    case = problem(decay="channel", **change)
    _, versions = planned(case, H200)
    assert [versions[phase] for phase in ("scan", "recompute", "reverse")] == [version] * 3
    assert "gradients" in versions


@pytest.mark.parametrize(
    ("change", "device", "prepare", "gradients"),
    [
        ({}, H200, "sm90_channel_prepare_kernel", "sm90_channel_gradients_kernel"),
        ({"delta": False, "K": 64}, H200, "sm90_channel_prepare_kernel", "sm90_additive_gradients_kernel"),
        (
            {"erase_key": True, "packed": True, "HV": 32},
            H200,
            "sm90_channel_prepare_kernel",
            "sm90_channel_gradients_kernel",
        ),
        ({"dtype": torch.float32}, H200, "channel_prepare_kernel", "channel_gradients_kernel"),
        ({"K": 20}, H200, "channel_prepare_kernel", "channel_gradients_kernel"),
        ({}, A100, "channel_prepare_kernel", "channel_gradients_kernel"),
    ],
)
def test_kernels_of_a_decay_per_channel(change, device, prepare, gradients):
    case = problem(**({"decay": "channel"} | change))
    names = make_plan(case, device, heuristic(case, device), grad=True).names()
    assert (names["prepare"], names["gradients"]) == (prepare, gradients)


@pytest.mark.parametrize(
    ("change", "mebibytes"),
    [
        ({"N": 8}, 32),
        ({"N": 1, "T": 8192, "H": 32, "HV": 32}, 160),  # windows of 32 programs leave SMs idle
        ({"N": 8, "delta": False}, 160),
        ({"N": 8, "decay": "head"}, 160),
        ({"N": 8, "packed": True}, 160),
    ],
)
def test_kda_that_fills_the_device_uses_less_scratch(change, mebibytes):
    case = problem(**({"decay": "channel", "T": 4096, "H": 16, "HV": 16} | change))
    assert heuristic(case, H200).scratch == mebibytes * 2**20


@pytest.mark.parametrize("T", [32_768, 131_072, 1_048_576])
def test_a_window_of_a_long_sequence_holds_segments_for_every_sm(T):
    case = problem(N=1, T=T, HV=32)
    plan = make_plan(case, H200, heuristic(case, H200), grad=True)
    segments = plan.windows.slots // plan.segment_chunks
    assert segments * case.HV >= 0.9 * H200.processors


def test_plan_refuses_a_config_whose_kernel_does_not_support_the_problem():
    config = heuristic(problem(), H200)
    with pytest.raises(ConfigError, match=r"prepare\.kernel = 'sm90' needs an sm90 GPU, .*; got NVIDIA A100"):
        make_plan(problem(), A100, config, grad=True)


NEW_SCAN = """
from deltazoo.backends.triton.chunk.kernels.signature import takes


class Scan:
    arg_names = ("gmem", "scale", "T", "traits")
    __name__, fn = "sm999_scan_kernel", lambda: None


sm999_scan_kernel = takes("q k v gates o final checkpoints cu", "H HV K BV")(Scan())
"""


def test_a_kernel_of_a_new_architecture_is_a_file_and_an_entry(monkeypatch, tmp_path, backend):
    """The plan chooses it, a launch config may ask for it, and the launch code gives it what its parameters name."""
    (tmp_path / "scan_of_sm999.py").write_text(NEW_SCAN)
    monkeypatch.syspath_prepend(tmp_path)
    entry = Kernel(
        "sm999_scan_kernel", "scan_of_sm999", "scan", "sm999",
        support=Support(frozenset({"sm999"}), values=range(1, 257)), programs=per_segment,
        tiles=fixed_tiles(values=32), options=fixed_options(warps=2),
    )  # fmt: skip
    monkeypatch.setitem(KERNELS, "scan", [entry, *KERNELS["scan"]])
    new = H200._replace(name="NVIDIA X", capability=(99, 9))
    launched = []

    class Handles(dict):
        def get(self, key, default=None):
            return self

        def __getitem__(self, grid):
            return lambda *arguments, stream: launched.append((grid[0], arguments))

    monkeypatch.setattr(launcher, "_compiled", Handles())
    monkeypatch.setattr(launcher, "current_stream", lambda index: 0)
    monkeypatch.setattr(problems, "device_spec", lambda index: new)
    assert "forward:  prepare_kernel -> sm999_scan_kernel" in str(
        explain(GATED, meta(), "triton", shape=(8, 4096), device=new)
    )
    assert LaunchConfig(scan=Launch(tile=64, kernel="sm999")).scan.kernel == "sm999"
    x = draw(Case(GATED, Shape("small", B=2, T=100, H=2, HV=4, K=64, V=64), torch.bfloat16))
    monkeypatch.setattr(TritonBackend, "_tensors_unsupported", staticmethod(lambda *_: []))
    bind(GATED, backend)(x)
    programs, arguments = launched[1]
    assert programs == 2 * 4 * 2
    pointers, *numbers, traits = arguments
    assert pointers[:3] == (x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr())
    assert numbers == [GATED.scale_of(64), 100]
    assert traits._asdict() == {"H": 2, "HV": 4, "K": 64, "BV": 32}
    for device in (H200, A100):
        assert "sm999" not in str(explain(GATED, meta(), "triton", shape=(8, 4096), device=device))


def test_explain_prints_the_plan_of_a_named_device():
    text = str(explain(GATED, meta(), "triton", shape=(8, 4096), device=H200))
    assert "kernel plan on NVIDIA H200 (sm_90, 132 SMs, Triton 3.7.1)" in text
    assert "forward:  sm90_prepare_kernel -> sm90_scan_kernel" in text
    assert "backward: sm90_fused_backward_kernel -> gate_gradients_kernel\n" in text
    conditions = str(explain(GATED, meta(), "triton", device=H200))
    assert "reverse fused sm90_fused_backward_kernel: an sm90 GPU" in conditions
    assert "K 65 to 128, V 33 to 128" in conditions
    assert "sm90_" not in str(explain(GATED, meta(), "triton", device=A100))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("NVIDIA H100", "; did you mean 'NVIDIA H100 80GB HBM3'?"),
        ("H100 PCIe", "; did you mean 'NVIDIA H100 80GB HBM3'?"),
        ("nvidia h200", "; did you mean 'NVIDIA H200'?"),
        ("NVIDIA A100 80GB PCIe", "; did you mean 'NVIDIA A100-SXM4-80GB'?"),
        ("NVIDIA B100", ""),  # near to others by its letters only
    ],
)
def test_an_unknown_device_suggests_the_same_model_or_none(name, hint):
    with pytest.raises(ConfigError) as error:
        DeviceSpec.named(name)
    assert str(error.value).endswith(f"got {name!r}{hint}")


def test_explain_refuses_an_unknown_device_with_the_known_names():
    with pytest.raises(ConfigError, match=r"device name must be one of 'NVIDIA H200', .*, got 'NVIDIA Q1'"):
        explain(GATED, meta(), "triton", device="NVIDIA Q1")


def test_readme_has_one_row_per_version_with_its_kernels():
    text = (files("deltazoo.backends.triton") / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| phase | version |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    listed = {(phase, version, *re.findall(r"`(\w+)`", kernels)) for phase, version, kernels, *_ in rows}
    registered = {
        (phase, kernel.version, kernel.name, *([kernel.marked.name] if kernel.marked else []))
        for phase in PHASES
        for kernel in KERNELS[phase]
    }
    registered -= {("prepare", "sm90", "gates_kernel")}  # the portable one, which a config may name so
    assert {row for row in listed if row[0] in PHASES} == registered
    followed = {(kernel.phase, kernel.version, kernel.name) for kernel in (SUM_GROUPS, GATE_GRADIENTS, TAIL)}
    assert followed <= listed
    assert {row[0] for row in listed} == {*PHASES, "segments", "elementwise", "element segments"} | {
        kernel[0] for kernel in followed
    }
    assert all(len(row) == 7 and all(row) for row in rows)


def test_the_module_of_every_kernel_defines_it():
    for kernels in KERNELS.values():
        assert [load(kernel).__name__ for kernel in kernels] == [kernel.name for kernel in kernels]


def test_readme_names_every_kernel():
    package = files("deltazoo.backends.triton")
    text = (package / "README.md").read_text(encoding="utf-8")
    sources = (path.read_text(encoding="utf-8") for path in Path(str(package)).rglob("*.py"))
    kernel = re.compile(r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", re.MULTILINE)
    defined = {name for source in sources for name in kernel.findall(source)}
    assert {*re.findall(r"^\|.*`(\w+_kernel)`", text, re.MULTILINE)} <= defined
    assert defined <= {*re.findall(r"`(\w+_kernel)`", text)}


@pytest.mark.parametrize("dynamic", [False, True])
def test_unsupported_is_traced_in_one_graph(backend, monkeypatch, dynamic):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(triton_limits, "installed_triton", lambda: "3.10.0")

    def count(x):
        return x + len(backend.unsupported(GATED, meta(K=x.shape[-1], dtype=x.dtype)))

    compiled = torch.compile(count, fullgraph=True, backend="eager", dynamic=dynamic)
    assert compiled(torch.zeros(2, 64)).unique().item() == 1


@pytest.mark.parametrize(
    ("change", "splits"),
    [
        ({"T": 20576, "HV": 32}, (32, 0)),  # lengths differ: only the backward is divided, below the average length
        ({"T": 32768, "HV": 32, "N": 16}, (0, 0)),  # many programs
        ({"T": 20576, "HV": 32, "packed": False}, (0, 0)),
        ({"T": 20576, "HV": 32, "delta": False}, (0, 0)),
        ({"T": 8 * 4096, "HV": 16}, (0, 0)),  # the fused backward has no segments
        ({"T": 8 * 1024, "HV": 32}, (0, 0)),  # short on average
        ({"N": 1, "T": 32768, "H": 2, "HV": 8}, (32, 32)),  # few programs
        ({"N": 1, "T": 8192, "HV": 64, "packed": False}, (64, 0)),  # half of the SMs: maps cost the forward too much
        ({"N": 1, "T": 32768, "HV": 64, "packed": False}, (64, 0)),  # two segments per window of the backward
        ({"N": 1, "T": 8192, "HV": 64, "packed": False, "delta": False}, (64, 0)),
        ({"N": 1, "T": 8192, "HV": 64, "V": 64, "packed": False, "delta": False}, (32, 32)),  # two programs per SM
        ({"N": 2, "T": 8192, "HV": 64, "V": 64, "packed": False, "delta": False}, (64, 64)),
        ({"N": 1, "T": 2048, "HV": 64, "packed": False}, (0, 0)),  # short
        ({"N": 1, "T": 8192, "HV": 80, "packed": False}, (0, 0)),  # more than half of the SMs
    ],
)
def test_few_programs_and_sequences_of_a_pack_longer_than_the_average_divide_the_sequences(change, splits):
    case = problem(**({"N": 8, "H": 16, "packed": True} | change))
    plan = make_plan(case, H200, heuristic(case, H200), grad=True)
    assert (plan.segment_chunks, plan.forward_segment_chunks) == splits


@pytest.mark.parametrize(
    ("change", "forward", "backward"),
    [
        ({"N": 8, "T": 20576, "HV": 32, "packed": True}, 157, 0),  # 322 chunks x 32 heads / 132 SMs = 78, twice as many
        ({"N": 100, "T": 20576, "HV": 32, "packed": True}, 0, 0),  # most of the programs would have no work
        ({"N": 1, "T": 8192, "HV": 32, "decay": "channel"}, 63, 63),  # 128 chunks in 32 programs
        ({"N": 1, "T": 8192, "HV": 66, "decay": "channel"}, 0, 0),  # every SM has a program of 64 values
        ({"N": 1, "T": 8192, "HV": 65, "decay": "channel"}, 127, 127),
        ({"N": 2, "T": 8192, "HV": 32, "decay": "channel", "V": 64}, 0, 0),
        ({"N": 2, "T": 8192, "HV": 16, "decay": "channel", "V": 256}, 125, 125),
        ({"N": 1, "T": 32768, "H": 2, "HV": 8}, 0, 0),  # segments
        ({"N": 8, "T": 4096, "HV": 16}, 0, 0),
    ],
)
def test_long_sequences_have_programs_of_64_values(change, forward, backward):
    case = problem(**({"H": 16} | change))
    plan = make_plan(case, H200, heuristic(case, H200), grad=True)
    assert (plan.forward_narrow_min_chunks, plan.narrow_min_chunks) == (forward, backward)
