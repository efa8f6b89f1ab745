"""Layer-by-layer compilation: equal layers share one compiled graph, so compile time does not grow with depth."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.torch_ext.compiled_call import compiled_call
from deltazoo.backends.update.dispatch import requested_backend, use_backend
from deltazoo.blocks.model.interface import TokenModel
from deltazoo.blocks.model.layer import Layer
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.update import Update

M = TypeVar("M", bound=TokenModel)


def compile_layers(model: M, compiler: str | Callable[..., Any] = "inductor") -> M:
    """Compile every layer, once for each distinct LayerSpec, and the last norm, with fullgraph=True; return the model.

    The embedding and the head stay eager, because they offer nothing to fuse. The parameters and the state dict do not
    change.

    Each kind of call has graphs of its own: with and without gradients, a state, a mask, packed sequences or autocast,
    for one row and for one token. The first graph of a kind is compiled for the sizes of its call. The second has
    dynamic sizes and serves every other B and T.

    Args: compiler: the `backend` argument of torch.compile.
    """
    for module, forward in CompiledLayers(model, compiler).forwards:
        vars(module)["forward"] = forward
    return model


class CompiledLayers:
    """The compiled layers of a model, which runs them only while they are `active`; see `compile_layers`.

    Args: dynamic: whether the first graph of a kind has dynamic sizes, so that it serves all sizes.
    """

    def __init__(
        self, model: TokenModel, compiler: str | Callable[..., Any] = "inductor", dynamic: bool = False
    ) -> None:
        specs = dict.fromkeys(model.spec.expand())
        self._methods = {spec: _compile_method(Layer.forward, compiler, dynamic) for spec in specs}
        self._norm = _compile_method(type(model.stack.norm).forward, compiler, dynamic)
        self.forwards = self._bound_to(model)

    def of(self, model: TokenModel) -> "CompiledLayers":
        """Return the same compiled functions for another model with the same kinds of layers."""
        layers = copy.copy(self)
        layers.forwards = self._bound_to(model)
        return layers

    def _bound_to(self, model: TokenModel) -> list[tuple[nn.Module, MethodType]]:
        layers = zip(model.stack.layers, model.spec.expand(), strict=True)
        forwards = [(layer, MethodType(self._methods[spec], layer)) for layer, spec in layers]
        return [*forwards, (model.stack.norm, MethodType(self._norm, model.stack.norm))]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let calls of the model run the compiled layers, except for those that have a forward of their own."""
        changed = {module: forward for module, forward in self.forwards if "forward" not in vars(module)}
        for module, forward in changed.items():
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module in changed:
                del vars(module)["forward"]


def is_compiled_forward(forward: object) -> bool:
    """Whether `compile_layers` has set this forward of a module."""
    return isinstance(forward, MethodType) and hasattr(forward.__func__, "compiled_graphs")


def check_updates(model: TokenModel, dtype: torch.dtype) -> None:
    """Raise UnsupportedError, with the reasons, if a backend cannot train an update of the model in this dtype.

    In a compiled graph the same error would be a long traceback.
    """
    for update in model.modules():
        if isinstance(update, Update):
            update.bound.backend_for(update.meta(model.device.type, dtype, grad=True))


def run_eagerly(device: torch.device | str) -> AbstractContextManager[None]:
    """Return a context in which modules are built with updates that torch.compile does not compile.

    Their backend is `CompileBackend(compiled=False)`, unless the caller, the stack or an enclosing `use_backend` names
    one. On CUDA the context changes nothing, because `compile` is not the default there.
    """
    if str(device).startswith("cuda") or requested_backend(None) is not None:
        return nullcontext()
    return use_backend(CompileBackend(compiled=False))


def _compile_method(
    method: Callable[..., object], compiler: str | Callable[..., Any], dynamic: bool
) -> Callable[..., object]:
    """Compile a method of modules whose first argument is x [B, T, D], once for each kind of call.

    The graph of a kind's first sizes is static, unless `dynamic`. All other sizes share a graph with dynamic sizes.
    """
    first_sizes: dict[tuple[object, ...], tuple[torch.Size, ...]] = {}
    graphs: dict[tuple[object, ...], Callable[..., object]] = {}

    def forward(module: nn.Module, *arguments: Any, **keywords: Any) -> object:
        if torch.compiler.is_compiling():
            return method(module, *arguments, **keywords)
        values = (*arguments, *keywords.values())
        key, sizes = _kind(values), _sizes(values)
        is_static = not dynamic and first_sizes.setdefault(key, sizes) == sizes
        graph = graphs.get((is_static, *key))
        if graph is None:
            graph = graphs[is_static, *key] = compiled_call(method, backend=compiler)
        if is_static:
            return graph(module, *arguments, **keywords)
        keywords = {name: _with_dynamic_sizes(value) for name, value in keywords.items()}
        return graph(module, *map(_with_dynamic_sizes, arguments), **keywords)

    vars(forward)["compiled_graphs"] = graphs
    return forward


def _kind(values: Sequence[object]) -> tuple[object, ...]:
    """Return what a graph depends on besides the sizes of x, masks, positions and packs, apart from B = 1 and T = 1.

    torch.compile specialises a graph for a size of 1, for gradients, for autocast and for each argument that is None.
    """
    x = values[0]
    assert isinstance(x, Tensor)
    device = x.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, *map(_traits, values))


def _traits(value: object) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.requires_grad, *(size == 1 for size in value.shape[:2])
    if isinstance(value, Context):
        return tuple(
            field if field is None or isinstance(field, bool) else isinstance(field, Tensor) for field in value
        )
    return value is None


def _sizes(values: Sequence[object]) -> tuple[torch.Size, ...]:
    """Return the shapes of the tensors among the arguments, and of those in the context."""
    fields = (field for value in values for field in (value if isinstance(value, Context) else (value,)))
    return tuple(field.shape for field in fields if isinstance(field, Tensor))


def _with_dynamic_sizes(value: Any) -> Any:
    """Return the argument with views of tensors whose first two sizes are marked as dynamic, where they are not 1."""
    if isinstance(value, Context):
        return value._replace(**{name: _with_dynamic_sizes(x) for name, x in value._asdict().items()})
    if not isinstance(value, Tensor):
        return value
    view = value.view_as(value)
    for dim, size in enumerate(value.shape[:2]):
        if size > 1:
            torch._dynamo.maybe_mark_dynamic(view, dim)
    return view
