"""Launches by compiled handle: its cache key and its arguments; and the values that launch configs refuse."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from triton.tools.tensor_descriptor import TensorDescriptor

from deltazoo.backends.triton import Launch, LaunchConfig
from deltazoo.backends.triton import launcher as running


class Kernel:
    """Counts what it compiles, as a Triton kernel does; compiled, it notes what it is launched with."""

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
    monkeypatch.setattr(running, "_stream", lambda device: 0)


def test_a_call_like_one_before_gets_bare_pointers():
    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(64)
    running.launcher(kernel, (x, None), (True, "head"), warps=8, stages=2)(3, 7, 0.5)
    running.launcher(kernel, (y, None), (True, "head"), warps=8, stages=2)(5, 9, 0.25)
    assert kernel.compilations == [{"num_warps": 8, "num_stages": 2}]
    assert kernel.launches == [((5, 1, 1), (y.data_ptr(), None, 9, 0.25, True, "head"))]


def test_a_descriptor_is_handed_on_and_counts_by_its_dtype_and_tile():
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
def test_what_a_kernel_is_compiled_for_makes_another_handle(other):
    kernel = Kernel()
    call = {"tensors": (torch.zeros(64), None), "constants": (True,)}
    running.launcher(kernel, **call)(1, 1)
    running.launcher(kernel, **(call | other))(1, 1)
    assert len(kernel.compilations) == 2
    assert not kernel.launches
    running.launcher(kernel, **(call | other))(1, 1)
    assert len(kernel.compilations) == 2
    assert len(kernel.launches) == 1


def test_a_kernel_that_one_launcher_compiled_is_the_next_ones():
    kernel, x = Kernel(), torch.zeros(64)
    first = running.launcher(kernel, (x,), (True,))
    first(1, 1)
    first(1, 2)
    running.launcher(kernel, (x,), (True,))(1, 3)
    assert kernel.launches == [((1, 1, 1), (x.data_ptr(), 2, True)), ((1, 1, 1), (x.data_ptr(), 3, True))]
    assert len(kernel.compilations) == 1


def test_nothing_is_kept_of_the_interpreter_nor_of_numbers_beyond_32_bits():
    interpreted, wide = Kernel(compiles=False), Kernel()
    for _ in range(2):
        running.launcher(interpreted, (torch.zeros(4),), ())(1, 1)
        running.launcher(wide, (torch.zeros(4),), ())(1, 2**31)
    assert len(interpreted.compilations) == len(wide.compilations) == 2


def test_no_program_is_no_launch():
    kernel = Kernel()
    running.launcher(kernel, (torch.zeros(4),), ())(0, 1)
    assert not kernel.compilations


@pytest.mark.parametrize("keys", [16, 48])
def test_a_tile_of_keys_that_a_compiler_may_miscarry_is_refused(keys):
    with pytest.raises(ValidationError, match=f"keys must be 0 or a power of two >= 32, got {keys}"):
        Launch(tile=64, keys=keys)


@pytest.mark.parametrize("asked", [{"tile": 48}, {"tile": 64, "warps": 3}])
def test_what_no_kernel_can_be_launched_with_is_refused(asked):
    name, number = list(asked.items())[-1]
    with pytest.raises(ValidationError, match=f"{name} must be a power of two, got {number}"):
        Launch(**asked)


@pytest.mark.parametrize(
    ("kernel", "launch", "said"),
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
def test_a_config_says_nothing_that_its_kernels_do_not_do(kernel, launch, said):
    with pytest.raises(ValidationError, match=said):
        LaunchConfig(**{kernel: launch})
