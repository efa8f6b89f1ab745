"""The route of an update: which operator computes it, decided once from the spec and the sizes."""

from typing import Any, Literal

from deltazoo.backends.update.spec import UpdateSpec

# chunks: the chunked kernels (op.py). elements: the elementwise scan (element/op.py). step, element step: the kernels
# of one token without gradients (decode_op.py, element/op.py).
Route = Literal["chunks", "elements", "step", "element step"]
MAX_ELEMENT_VALUES = 2  # value columns that one launch of the elementwise kernels computes


def route_of(spec: UpdateSpec, V: int, T: Any = None, *, packed: bool = False, grad: bool = True) -> Route:
    """Return the route of an update of T tokens per row; None: of more than one.

    The elementwise kernels compute additive updates of one write per token, with narrow values or a rate. For values
    of width 1 or 2 the products of a chunk are more work than the recurrence itself. With a rate, the gradient of the
    log decay is multiplied by the step, and only these kernels compute it without cancellation.
    """
    narrow = V <= MAX_ELEMENT_VALUES
    elementwise = spec.transition == "additive" and spec.householders == 1 and (narrow or spec.decay == "rate")
    if T is not None and T == 1 and not packed and not grad and (narrow or not elementwise):
        return "element step" if elementwise else "step"
    return "elements" if elementwise else "chunks"
