"""deltazoo: a torch.compile-first layer zoo for linear-recurrent token mixers.

An `UpdateSpec` defines the recurrence, and backends compute it. Mixers, blocks and the CLI build on that. `preset`,
`train`, `load`, `generate` and `evaluate` are the functions for whole models.

The public names are those in `__all__` of deltazoo, deltazoo.backends, deltazoo.mixers, deltazoo.mixers.parts and
deltazoo.blocks. Each is imported on first use, so that `import deltazoo` is fast; the stub `__init__.pyi` beside each
package lists them for type checkers.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_exports(
    package: str, find: Callable[[], Mapping[str, str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Create `__getattr__` and `__dir__` of a package whose public names are imported on first use.

    Args:
        package: `__name__` of the package.
        find: returns the module of each public name; that of a public submodule is the package. Called at the first
            use.
    """

    def get(name: str) -> Any:
        if name == "__all__":
            return listed()
        if name.startswith("__") or name not in (modules := find()):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:
            value = importlib.import_module(f"{package}.{name}")
        else:
            value = getattr(__import__(modules[name], fromlist=[name]), name)  # `from module import name`
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted(find())

    return get, listed


def by_name(modules: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the module of each name, from the names of each module."""
    return {name: module for module, names in modules.items() for name in names}


__version__ = "0.1.0"
__path__.append(f"{__path__[0]}/integrations/aliases")  # where `import deltazoo.fla` is found
_MODULES = by_name(
    {
        "deltazoo.backends": ["conformance"],
        "deltazoo.backends.update.base": ["Backend", "Draft", "UpdateInputs", "UpdateMeta", "UpdateOutput"],
        "deltazoo.backends.update.check": ["validate"],
        "deltazoo.backends.update.dispatch": ["BoundUpdate", "bind", "update", "use_backend"],
        "deltazoo.backends.io.errors": ["DeltazooError"],
        "deltazoo.backends.update.spec": ["UpdateSpec"],
        "deltazoo.backends.update.watch": ["watch"],
        "deltazoo.blocks.training.evaluation": ["Evaluation", "evaluate"],
        "deltazoo.blocks.checkpoints.pretrained": ["from_pretrained"],
        "deltazoo.blocks.generation.completion": ["Completion", "generate"],
        "deltazoo.blocks.inspect.explain": ["explain"],
        "deltazoo.blocks.generation.engine.engine": ["Engine"],
        "deltazoo.blocks.generation.sampling": ["Sampling"],
        "deltazoo.blocks.model.layer": ["LayerSpec"],
        "deltazoo.blocks.spec.stack_spec": ["StackSpec", "preset"],
        "deltazoo.blocks.model.stack": ["LanguageModel"],
        "deltazoo.blocks.training.tasks": ["load", "presets", "resume", "train"],
        "deltazoo.blocks.training.config": ["TrainConfig"],
        "deltazoo.blocks.training.records": ["Training"],
        "deltazoo.integrations": ["fla"],
        "deltazoo.mixers.core.mixer": ["Context", "MixerConfig", "Place"],
    }
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
