"""The kernel that gathers tensors of several GPUs, on one process that plays the other ranks."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.mark.parametrize(("ranks", "rank", "elements"), [(1, 0, 5), (3, 1, 40)])
def test_a_rank_gathers_what_the_others_wrote(ranks: int, rank: int, elements: int) -> None:
    from deltazoo.backends.triton.gather.kernels import GatherTraits, gather_kernel

    slices, block = 3, 8
    memory = [torch.zeros(2 * elements + slices * ranks) for _ in range(ranks)]
    flags = [x[2 * elements :].view(torch.int32).view(slices, ranks) for x in memory]
    buffers = torch.tensor([x.data_ptr() for x in memory])
    calls = torch.zeros(slices, dtype=torch.int32)
    traits = GatherTraits(ranks, elements, block, 2)
    for call in range(3):
        x, gathered = torch.randn(ranks, elements), torch.empty(ranks, elements)
        half = call % 2 * elements
        for other in {*range(ranks)} - {rank}:
            memory[other][half : half + elements] = x[other]
            flags[rank][:, other] = call + 1
        gather_kernel[(slices,)](x[rank].clone(), gathered, buffers, calls, rank, traits)
        assert torch.equal(gathered, x)
        assert all((flags[other][:, rank] == call + 1).all() for other in {*range(ranks)} - {rank})
        assert (calls == call + 1).all()
