"""Explain an update or a module: which backend or kernel computes what, and why others do not."""

from typing import TYPE_CHECKING, overload

from torch import nn

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.update import explain as updates
from deltazoo.backends.update.base import Backend, UpdateMeta
from deltazoo.backends.update.spec import UpdateSpec

if TYPE_CHECKING:
    from deltazoo.blocks.inspect.explain_module import ModuleExplanation


@overload
def explain(
    subject: UpdateSpec,
    meta: UpdateMeta,
    backend: str | Backend | None = None,
    shape: Shape | tuple[int, int] | None = None,
    device: DeviceSpec | str | None = None,
) -> updates.Explanation: ...


@overload
def explain(
    subject: nn.Module, *, shape: tuple[int, int], device: DeviceSpec | str | None = None
) -> "ModuleExplanation": ...


def explain(
    subject: UpdateSpec | nn.Module,
    meta: UpdateMeta | None = None,
    backend: str | Backend | None = None,
    shape: Shape | tuple[int, int] | None = None,
    device: DeviceSpec | str | None = None,
) -> "updates.Explanation | ModuleExplanation":
    """Say which backend computes an update, or which kernels a module launches and why its other operators do not.

    Args:
        subject: a spec, or a mixer, layer or language model, whose weights are not read.
        meta, backend: for a spec, a description of the tensors, and as for `bind`.
        shape: (B, T). For a spec it gives the exact kernel plan; a module needs it.
        device: the name of a known device, such as "NVIDIA H200", or a DeviceSpec; no GPU is needed. None: for a spec
            `meta.device`, for a module the GPU of this machine.
    Returns: for a spec, the verdict on every backend and the plan; for a module, the operators and launches of
        training, of a prompt and of decoding.
    Raises: UnknownNameError; ConfigError; UnsupportedError: the module holds packed or sharded weights.
    """
    if isinstance(subject, UpdateSpec):
        if meta is None:
            raise ConfigError("meta must be a deltazoo.UpdateMeta for a spec, got None")
        return updates.explain(subject, meta, backend, shape, device)
    if meta is not None or backend is not None:
        raise ConfigError("meta and backend are for specs: a module has its dtype and its backend")
    if isinstance(shape, Shape):
        raise ConfigError(f"shape must be (B, T) for a module, got {cut(shape)}")
    from deltazoo.blocks.inspect.explain_module import explain_module  # imports all mixers' parts

    return explain_module(subject, shape, device)
