"""use: make the recurrent and convolution layers of transformers call our operators, and undo it.

A layer of transformers calls the functions of its modelling file by name. `use(model)` gives each layer a copy of its
forward that reads these names from a copy of the file's namespace, so that other models are unchanged. `use()` changes
the modelling files themselves, for all models of the process.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from deltazoo.backends.io.errors import InputError, cut
from deltazoo.backends.ops.rms_norm import GateActivation
from deltazoo.integrations.operators import norm_and_gate
from deltazoo.integrations.transformers.decode import decode_token
from deltazoo.integrations.transformers.functions import NO_LIMIT, Call, LayerFunctions

# Recurrent layers whose forward holds the recurrence itself, so that there is nothing to replace.
_INLINE = {
    "MiniMaxLightningAttention": "lightning attention",
    "RecurrentGemmaRglru": "RG-LRU",
    "RwkvSelfAttention": "RWKV-4",
    "xLSTMLayer": "mLSTM",
}
_CACHE_NAMES = ("cache_params", "cache")  # of transformers before and since 5.24
_Function = Callable[..., Any]


class LayerReport(NamedTuple):
    """What `use` did with a layer.

    Args:
        name: of the module in the model, or of the class for all models.
        layer: name of its class.
        replaced: names of the functions that are ours now; empty: none.
        reason: why nothing was replaced; "" if something was.
    """

    name: str
    layer: str
    replaced: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.layer}): {', '.join(self.replaced) or f'not replaced: {self.reason}'}"


class Replacement:
    """The changes that `use` has made. As a context manager it undoes them at the end of the block.

    Attributes: layers: a `LayerReport` for each recurrent, convolution and gated norm layer.
    """

    def __init__(self) -> None:
        self.layers: list[LayerReport] = []
        self._undo: list[_Function] = []

    def undo(self) -> None:
        """Restore the replaced attributes, the last one first. A second call has no effect."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))

    def _set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute that `undo` restores."""
        names = vars(owner)
        had, old = name in names, names.get(name)
        setattr(owner, name, value)
        self._undo.append((lambda: setattr(owner, name, old)) if had else (lambda: delattr(owner, name)))


def use(model: nn.Module | None = None) -> Replacement:
    """Make the layers of a model of transformers call our operators.

    Served are the functions of Gated DeltaNet, Kimi Delta Attention, Mamba, Mamba-2 and short convolutions, and RMS
    norms with a gate, of every modelling file that names them as transformers does. Weights, caches and checkpoints
    stay as they are. Packed sequences (`cu_seq_lens_q`) do not see each other, in Mamba and the convolutions either.

        with use(model) as used:
            print(used)
            model.generate(...)

    Args: model: None means all models of this process, also those built later, until the change is undone.
    Returns: the report, which undoes the changes.
    Raises: InputError if the model has no layer that is served.
    Source: transformers 5.17, 5.23 and 5.24, with which it is tested.
    """
    replacement = Replacement()
    if model is None:
        _use_everywhere(replacement)
        return replacement
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch module or None, got {cut(model)}")
    namespaces: dict[str, tuple[LayerFunctions, dict[str, Any]]] = {}
    for name, module in model.named_modules():
        report = _use_in(module, name, namespaces, replacement)
        if report is not None:
            replacement.layers.append(report)
    if not any(report.replaced for report in replacement.layers):
        found = "; ".join(map(str, replacement.layers)) or "no recurrent or convolution layer"
        raise InputError(f"model has no layer whose functions can be replaced: {found}")
    return replacement


def _use_in(
    module: nn.Module, name: str, namespaces: dict[str, tuple[LayerFunctions, dict[str, Any]]], changes: Replacement
) -> LayerReport | None:
    """Replace the functions of one module; None if it is none of the layers that are served or reported."""
    layer = type(module)
    if layer.__name__ in _INLINE:
        return LayerReport(name, layer.__name__, (), f"its forward computes {_INLINE[layer.__name__]} without a call")
    if _is_gated_norm(layer):
        if reason := _norm_reason(module):
            return LayerReport(name, layer.__name__, (), reason)
        changes._set(module, _forward_name(module), MethodType(_gated_norm_forward, module))
        return LayerReport(name, layer.__name__, ("forward",))
    found = _called_functions(layer)
    if not found:
        return None
    if reason := _layer_reason(module):
        return LayerReport(name, layer.__name__, (), reason)
    if layer.__module__ not in namespaces:
        functions = LayerFunctions()
        namespace = {**vars(sys.modules[layer.__module__]), **functions.names()}
        del namespace["__name__"]  # by which torch.compile would find the names in the modelling file
        namespaces[layer.__module__] = functions, namespace
    functions, namespace = namespaces[layer.__module__]
    forward = _in_layer(_with_names(layer.forward, namespace), functions)
    changes._set(module, _forward_name(module), MethodType(forward, module))
    return LayerReport(name, layer.__name__, found)


def _use_everywhere(changes: Replacement) -> None:
    """Replace the functions in all modelling files, and the forward of the gated norms."""
    for file in _modelling_files():
        functions = LayerFunctions()
        replaced = {name: ours for name, ours in functions.names().items() if name in vars(file)}
        for layer in [x for x in vars(file).values() if isinstance(x, type) and x.__module__ == file.__name__]:
            if not issubclass(layer, nn.Module):
                continue
            found = _called_functions(layer)
            if found:
                changes._set(layer, "forward", _in_layer(layer.forward, functions))
                changes.layers.append(LayerReport(f"{layer.__module__}.{layer.__name__}", layer.__name__, found))
            elif _is_gated_norm(layer):
                changes._set(layer, "forward", _norm_or(layer.forward))
                changes.layers.append(LayerReport(f"{layer.__module__}.{layer.__name__}", layer.__name__, ("forward",)))
        for name, ours in replaced.items():
            changes._set(file, name, ours)


def _modelling_files() -> Iterable[ModuleType]:
    """Import the modelling files that define functions which are served."""
    models = importlib.import_module("transformers.models")
    names = set(LayerFunctions().names())
    for info in pkgutil.iter_modules(models.__path__):
        spec = importlib.util.find_spec(f"transformers.models.{info.name}")
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            path = f"{folder}/modeling_{info.name}.py"
            try:
                with open(path, encoding="utf-8") as source:
                    text = source.read()
            except OSError:
                continue
            if any(f"def {name}(" in text for name in names):
                yield importlib.import_module(f"transformers.models.{info.name}.modeling_{info.name}")


def _called_functions(layer: type[nn.Module]) -> tuple[str, ...]:
    """The functions that are served and that the forward of a layer calls by name."""
    code = getattr(_innermost(layer.forward), "__code__", None)
    called = () if code is None else code.co_names
    file = vars(sys.modules[layer.__module__])
    return tuple(name for name in LayerFunctions().names() if name in called and name in file)


def _innermost(function: _Function) -> _Function:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _with_names(function: _Function, names: Mapping[str, Any]) -> _Function:
    """Copy a function, and the functions that its decorators hold, so that the innermost one reads its globals here."""
    assert isinstance(function, FunctionType)
    wrapped = getattr(function, "__wrapped__", None)
    closure, namespace = function.__closure__, function.__globals__
    if wrapped is None:
        namespace = names  # type: ignore[assignment]
    else:
        inner = _with_names(wrapped, names)
        closure = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in closure or ())
    copied = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _in_layer(forward: _Function, functions: LayerFunctions) -> _Function:
    """Wrap the forward of a layer, so that its functions have what transformers does not pass to them."""

    def run(self: nn.Module, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        given = [options.get(name) for name in _CACHE_NAMES] + [*arguments[:1]]
        cache = next((x for x in given if x is not None), None)
        state = None if cache is None else _recurrent_state(cache, getattr(self, "layer_idx", None))
        packed = options.get("cu_seq_lens_q") is not None or options.get("seq_idx") is not None
        if state is not None and not packed and options.get("attention_mask") is None and len(arguments) < 2:
            decoded = decode_token(self, hidden_states, cache, state)
            if decoded is not None:
                return decoded
        limit = getattr(self, "time_step_limit", NO_LIMIT)
        functions.begin(Call(hidden_states.shape[1], options.get("cu_seq_lens_q"), limit), state)
        try:
            return forward(self, hidden_states, *arguments, **options)
        finally:
            functions.end()

    return run


def _recurrent_state(cache: Any, layer: int | None) -> Tensor | None:
    """The recurrent state of a layer in a cache of transformers; None at its first call."""
    if layer is None or layer >= len(cache.layers):
        return None
    states, begun = (getattr(cache.layers[layer], name, None) for name in ("recurrent_states", "has_previous_state"))
    if not states or not begun or not begun[0]:
        return None
    state = states[0]
    return state if isinstance(state, torch.Tensor) else None


def _forward_name(module: nn.Module) -> str:
    """The attribute with the forward: accelerate keeps it in another one below its hooks."""
    return "_old_forward" if "_hf_hook" in vars(module) and "_old_forward" in vars(module) else "forward"


def _layer_reason(module: nn.Module) -> str:
    """Why a layer that calls functions by name is not served; "" if it is."""
    if getattr(module, "activation", None) not in (None, "silu", "swish"):
        return f"its convolution ends with {module.activation!r}, ours with 'silu'"
    if "forward" in vars(module) and _forward_name(module) == "forward":
        return "another program has replaced its forward"
    return ""


def _is_gated_norm(layer: type[nn.Module]) -> bool:
    """Whether a class is an RMS norm with a gate after it, as Gated DeltaNet and KDA have."""
    if not layer.__name__.endswith("RMSNormGated") or not layer.__module__.startswith("transformers.models."):
        return False
    return "activation" in _innermost(layer.__init__).__code__.co_names


def _norm_reason(module: nn.Module) -> str:
    if module.activation not in ("silu", "swish", "sigmoid"):
        return f"its gate is {module.activation!r}, ours 'silu' or 'sigmoid'"
    return ""


def _gated_norm_forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    activation: GateActivation = "sigmoid" if self.activation == "sigmoid" else "silu"
    return norm_and_gate(hidden_states, gate, self.weight, self.variance_epsilon, activation)


def _norm_or(forward: _Function) -> _Function:
    """Our gated norm, or the layer's own forward for another activation."""

    def run(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        ours = not _norm_reason(self)
        return _gated_norm_forward(self, hidden_states, gate) if ours else forward(self, hidden_states, gate)

    return run
