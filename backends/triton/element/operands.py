"""The arguments of the elementwise operators, and the gradients that the backward returns; does not import Triton.

B batch, T time, N sequences, S state slots, H key heads, HV value heads (channels), K key width, V value width
"""

from typing import NamedTuple

from torch import Tensor


class ElementOperands(NamedTuple):
    """The tensors of an update. None: no such operand.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V].
        log_decay: fixed [HV] or [HV, K], or per token [B, T, HV] or [B, T, HV, K].
        step, rate: [B, T, HV] and [HV, K], instead of log_decay, which is their product.
        state: [N, HV, K, V].
        cu_seqlens: [N + 1] int32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    step: Tensor | None = None
    rate: Tensor | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def decay(self) -> str:
        """The kind of decay; the kernels' constant DECAY."""
        if self.step is not None:
            return "rate"
        if self.log_decay is None:
            return "none"
        return ("fixed", "fixed_channel", "head", "channel")[self.log_decay.dim() - 1]


class ElementKind(NamedTuple):
    """The traits of an update. read: as in the spec. config: an ElementConfig as JSON; "": the heuristic chooses it."""

    read: str
    scale: float
    config: str = ""


class ElementCall(NamedTuple):
    """The arguments of the forward operator; save: store what the backward needs."""

    x: ElementOperands
    kind: ElementKind
    save: bool


class ElementBackwardCall(NamedTuple):
    """The arguments of the backward operator; key_gradients: q or k requires a gradient."""

    x: ElementOperands
    checkpoints: Tensor
    d_o: Tensor
    d_final: Tensor | None
    kind: ElementKind
    key_gradients: bool


class ElementStepCall(NamedTuple):
    """The arguments of the decode operator; states [S, HV, K, V] are updated in place, slots [B] int64."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    step: Tensor | None
    rate: Tensor | None
    states: Tensor
    slots: Tensor | None
    read: str
    scale: float


def gradient_names(x: ElementOperands, key_gradients: bool) -> list[str]:
    """Return the names of the operands whose gradients the backward operator returns, in order.

    A loop, because torch.compile traces this function and does not support a comprehension with a cell variable here.
    """
    names = ["q", "k"] if key_gradients else []
    names.append("v")
    for name, operand in (("log_decay", x.log_decay), ("step", x.step), ("rate", x.rate), ("state", x.state)):
        if operand is not None:
            names.append(name)
    return names


def empty_gradients(x: ElementOperands, key_gradients: bool) -> dict[str, Tensor]:
    """Allocate the gradients that the backward operator returns, in the shapes and dtypes of the operands."""
    gradients = {}
    for name in gradient_names(x, key_gradients):
        operand = getattr(x, name)
        gradients[name] = operand.new_empty(operand.shape)
    return gradients
