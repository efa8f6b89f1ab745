"""A part that no CUDA graph can contain stays eager with a warning; a lack of memory is an error."""

import pytest
import torch

from deltazoo.backends.torch_ext.cuda_graph import eager_if_refused


def test_a_refused_capture_is_a_warning_that_names_the_part(caplog):
    with eager_if_refused("the decoding step"):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert [record.getMessage() for record in caplog.records] == [
        "the decoding step of this model cannot be captured and stays eager: "
        "operation not permitted when stream is capturing"
    ]


def test_a_lack_of_memory_is_raised():
    with pytest.raises(torch.OutOfMemoryError), eager_if_refused("the decoding step"):
        raise torch.OutOfMemoryError("out of memory")
