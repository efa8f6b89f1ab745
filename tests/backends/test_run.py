"""Launches by compiled handle: its cache key and its arguments; and the values that launch configs refuse."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.triton import Launch, LaunchConfig
from deltazoo.backends.triton.runtime import launcher as running


class Kernel:
    """Imitates a Triton kernel: records compilations, and launches of its compiled handle."""

    arg_names = ("x", "y", "n", "factor", "FLAG", "DECAY")

    def __init__(self, compiles: bool = True) -> None:
        self.fn = lambda: None
        self.compiles = compiles
        self.compilations: list[dict[str, Any]] = []
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.compilations.append(options)
            return _Compiled(self) if self.compiles else None

        return launch


class _Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream: self.kernel.launches.append((grid, arguments))


@pytest.fixture(autouse=True)
def no_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_compiled", {})
    monkeypatch.setattr(running, "current_stream", lambda device: 0)


def run(kernel, *, programs=1, n=1, factor=0.5, options=None, traits=None, **tensors):
    options = options or running.Options()
    traits = {"FLAG": True, "DECAY": "head"} if traits is None else traits
    running.launcher(kernel, {"y": None} | tensors, traits, options)(programs, {"factor": factor, "n": n})


def test_repeated_call_passes_bare_pointers_in_the_order_of_the_parameters():
    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(64)
    run(kernel, x=x, programs=3, n=7, options=running.Options(8, 2))
    run(kernel, unused=x, x=y, programs=5, n=9, factor=0.25, options=running.Options(8, 2))
    assert kernel.compilations == [{"num_warps": 8, "num_stages": 2}]
    assert kernel.launches == [((5, 1, 1), (y.data_ptr(), None, 9, 0.25, True, "head"))]


@pytest.mark.parametrize("missing", ["x", "FLAG"])
def test_a_kernel_whose_parameter_is_not_given_is_an_error(missing):
    tensors = {"x": torch.zeros(4)} if missing != "x" else {"z": torch.zeros(4), "y": torch.zeros(4)}
    traits = {"FLAG": True, "DECAY": "head"} if missing != "FLAG" else {"DECAY": "head"}
    with pytest.raises(KeyError, match=missing):
        run(Kernel(), traits=traits, **tensors)


def test_descriptor_is_passed_on_and_cached_by_dtype_and_tile():
    def tiles(rows: int, dtype: torch.dtype = torch.float32) -> TensorDescriptor:
        return TensorDescriptor(torch.zeros(8, 8, dtype=dtype), [8, 8], [8, 1], [rows, 8])

    kernel, x, again = Kernel(), torch.zeros(64), tiles(4)
    for descriptor in (tiles(4), again, tiles(8), tiles(4, torch.bfloat16)):
        run(kernel, x=x, y=descriptor, programs=3)
    assert len(kernel.compilations) == 3
    assert kernel.launches == [((3, 1, 1), (x.data_ptr(), again, 1, 0.5, True, "head"))]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(64)[1:]},
        {"y": torch.zeros(64)},
        {"traits": {"FLAG": False, "DECAY": "head"}},
        {"options": running.Options(warps=8)},
        {"options": running.Options(stages=2)},
        {"options": running.Options(registers=160)},
    ],
    ids=["dtype", "alignment", "another operand", "trait", "warps", "stages", "registers"],
)
def test_call_that_compiles_differently_has_its_own_handle(other):
    kernel, call = Kernel(), {"x": torch.zeros(64)}
    run(kernel, **call)
    run(kernel, **(call | other))
    assert len(kernel.compilations) == 2
    assert not kernel.launches
    run(kernel, **(call | other))
    assert len(kernel.compilations) == 2
    assert len(kernel.launches) == 1


def test_launchers_share_compiled_handles():
    kernel, x, traits = Kernel(), torch.zeros(64), {"FLAG": True, "DECAY": "head"}
    first = running.launcher(kernel, {"x": x, "y": None}, traits)
    first(1, {"n": 1, "factor": 0.5})
    first(1, {"n": 2, "factor": 0.5})
    run(kernel, x=x, n=3)
    assert [arguments[2] for _, arguments in kernel.launches] == [2, 3]
    assert len(kernel.compilations) == 1


def test_interpreted_kernels_and_64_bit_numbers_are_not_cached():
    interpreted, wide = Kernel(compiles=False), Kernel()
    for _ in range(2):
        run(interpreted, x=torch.zeros(4))
        run(wide, x=torch.zeros(4), n=2**31)
    assert len(interpreted.compilations) == len(wide.compilations) == 2


def test_without_cached_launch_triton_launches_every_time(monkeypatch):
    monkeypatch.setattr(running, "CACHED_LAUNCH", False)
    kernel, x = Kernel(), torch.zeros(64)
    for n in range(2):
        run(kernel, x=x, n=n)
    assert len(kernel.compilations) == 2
    assert not kernel.launches


def test_zero_programs_launch_nothing():
    kernel = Kernel()
    run(kernel, x=torch.zeros(4), programs=0)
    assert not kernel.compilations


@pytest.mark.parametrize("keys", [16, 48])
def test_key_tiles_that_ptxas_miscompiles_are_refused(keys):
    with pytest.raises(ValidationError, match=f"keys must be 0 or a power of two >= 32, got {keys}"):
        Launch(tile=64, keys=keys)


@pytest.mark.parametrize("fields", [{"tile": 48}, {"tile": 64, "warps": 3}])
def test_sizes_that_are_no_power_of_two_are_refused(fields):
    name, number = list(fields.items())[-1]
    with pytest.raises(ValidationError, match=f"{name} must be a power of two, got {number}"):
        Launch(**fields)


@pytest.mark.parametrize(
    ("kernel", "launch", "message"),
    [
        (
            "fused_step",
            Launch(tile=64, kernel="sm90"),
            "fused_step.kernel must be one of 'portable', got 'sm90'",
        ),
        ("decode", Launch(tile=64, kernel="sm90"), "decode.kernel must be one of 'portable', got 'sm90'"),
        ("scan", Launch(tile=64, keys=64), "scan.keys must be 0: only gradients tiles the keys, got 64"),
    ],
)
def test_fields_that_a_kernel_does_not_use_are_refused(kernel, launch, message):
    with pytest.raises(ValidationError, match=message):
        LaunchConfig(**{kernel: launch})
