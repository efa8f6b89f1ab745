"""Launches by compiled handle: its cache key and its arguments; and the values that launch configs refuse."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.triton import Launch, LaunchConfig
from deltazoo.backends.triton import launcher as running


class Kernel:
    """Imitates a Triton kernel: records compilations, and launches of its compiled handle."""

    def __init__(self, compiles: bool = True) -> None:
        self.fn = object()
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


def test_repeated_call_passes_bare_pointers():
    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(64)
    running.launcher(kernel, (x, None), (True, "head"), warps=8, stages=2)(3, 7, 0.5)
    running.launcher(kernel, (y, None), (True, "head"), warps=8, stages=2)(5, 9, 0.25)
    assert kernel.compilations == [{"num_warps": 8, "num_stages": 2}]
    assert kernel.launches == [((5, 1, 1), (y.data_ptr(), None, 9, 0.25, True, "head"))]


def test_descriptor_is_passed_on_and_cached_by_dtype_and_tile():
    def tiles(rows: int, dtype: torch.dtype = torch.float32) -> TensorDescriptor:
        return TensorDescriptor(torch.zeros(8, 8, dtype=dtype), [8, 8], [8, 1], [rows, 8])

    kernel, x, again = Kernel(), torch.zeros(64), tiles(4)
    for descriptor in (tiles(4), again, tiles(8), tiles(4, torch.bfloat16)):
        running.launcher(kernel, (x, descriptor), (True,))(3, 7)
    assert len(kernel.compilations) == 3
    assert kernel.launches == [((3, 1, 1), (x.data_ptr(), again, 7, True))]


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": (torch.zeros(64, dtype=torch.bfloat16), None)},
        {"tensors": (torch.zeros(64)[1:], None)},
        {"tensors": (torch.zeros(64), torch.zeros(64))},
        {"constants": (False,)},
        {"warps": 8},
        {"stages": 2},
        {"registers": 160},
    ],
    ids=["dtype", "alignment", "another operand", "constant", "warps", "stages", "registers"],
)
def test_call_that_compiles_differently_has_its_own_handle(other):
    kernel = Kernel()
    call = {"tensors": (torch.zeros(64), None), "constants": (True,)}
    running.launcher(kernel, **call)(1, 1)
    running.launcher(kernel, **(call | other))(1, 1)
    assert len(kernel.compilations) == 2
    assert not kernel.launches
    running.launcher(kernel, **(call | other))(1, 1)
    assert len(kernel.compilations) == 2
    assert len(kernel.launches) == 1


def test_launchers_share_compiled_handles():
    kernel, x = Kernel(), torch.zeros(64)
    first = running.launcher(kernel, (x,), (True,))
    first(1, 1)
    first(1, 2)
    running.launcher(kernel, (x,), (True,))(1, 3)
    assert kernel.launches == [((1, 1, 1), (x.data_ptr(), 2, True)), ((1, 1, 1), (x.data_ptr(), 3, True))]
    assert len(kernel.compilations) == 1


def test_interpreted_kernels_and_64_bit_numbers_are_not_cached():
    interpreted, wide = Kernel(compiles=False), Kernel()
    for _ in range(2):
        running.launcher(interpreted, (torch.zeros(4),), ())(1, 1)
        running.launcher(wide, (torch.zeros(4),), ())(1, 2**31)
    assert len(interpreted.compilations) == len(wide.compilations) == 2


def test_without_cached_launch_triton_launches_every_time(monkeypatch):
    monkeypatch.setattr(running, "CACHED_LAUNCH", False)
    kernel, x = Kernel(), torch.zeros(64)
    for n in range(2):
        running.launcher(kernel, (x,), (True,))(1, n)
    assert len(kernel.compilations) == 2
    assert not kernel.launches


def test_zero_programs_launch_nothing():
    kernel = Kernel()
    running.launcher(kernel, (torch.zeros(4),), ())(0, 1)
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
            Launch(tile=64, kernel="hopper"),
            "fused_step.kernel must be one of 'portable', got 'hopper'",
        ),
        ("decode", Launch(tile=64, kernel="hopper"), "decode.kernel must be one of 'portable', got 'hopper'"),
        ("scan", Launch(tile=64, keys=64), "scan.keys must be 0: only gradients tiles the keys, got 64"),
    ],
)
def test_fields_that_a_kernel_does_not_use_are_refused(kernel, launch, message):
    with pytest.raises(ValidationError, match=message):
        LaunchConfig(**{kernel: launch})
