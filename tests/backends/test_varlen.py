"""The index of each row's packed sequence, in eager code and under Inductor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deltazoo.backends.compile.packing import packing
from deltazoo.backends.update.varlen import sequence_index, valid_sequence_index

BOUNDS = [0, 0, 3, 3, 4, 7, 7]
INDEX = [1, 1, 1, 3, 4, 4, 4, 6, 6]  # 6: rows 7 and 8 are in no sequence
T = len(INDEX)


class LookupTables(TorchDispatchMode):
    """Record the sorted tensors in which `torch.searchsorted` and `torch.bucketize` search."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.searchsorted.Tensor:
            self.found.append(args[0])
        if func is torch.ops.aten.bucketize.Tensor:
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def row_of_a_table() -> Tensor:
    """Return the bounds as a view with an offset, as in a loop over packs inside a compiled function."""
    return torch.tensor([[9] * len(BOUNDS), BOUNDS], dtype=torch.int32)[1]


def test_empty_sequences_have_no_rows_and_rows_after_the_last_one_get_n() -> None:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    assert sequence_index(bounds, T).tolist() == INDEX
    assert valid_sequence_index(bounds, T).tolist() == [min(n, 5) for n in INDEX]
    assert sequence_index(bounds[:1], 0).tolist() == []


@pytest.mark.parametrize(
    "function", [sequence_index, lambda bounds, T: packing(bounds, T, 4)], ids=["index", "packing"]
)
def test_lookup_tables_are_not_views(function: Callable[..., object]) -> None:
    """Inductor of torch 2.11 ignores the offset of a view (pytorch #182343), on CUDA and without an error."""
    with LookupTables() as tables:
        function(row_of_a_table(), T)
    assert tables.found
    for table in tables.found:
        assert table.untyped_storage().nbytes() == table.nbytes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_inductor_on_cuda_equals_eager() -> None:
    def index(table: Tensor) -> Tensor:
        return sequence_index(table[1], T) * 1

    table = torch.tensor([[9] * len(BOUNDS), BOUNDS], dtype=torch.int32, device="cuda")
    assert torch.compile(index, fullgraph=True)(table).tolist() == INDEX
