"""The bottom layer: the update specification and the backends that compute it. It contains no nn.Module.

`dir(deltazoo.backends)` lists the public names: what a backend, its tests and its callers need.
"""

from deltazoo import by_name, lazy_exports

_MODULES = by_name(
    {
        "deltazoo.backends": ["conformance"],
        "deltazoo.backends.update": ["lowering"],
        "deltazoo.backends.update.base": ["Backend", "state_dtype"],
        "deltazoo.backends.compile": ["CompileBackend"],
        "deltazoo.backends.torch_ext.devices": ["DeviceSpec"],
        "deltazoo.backends.io.errors": [
            "ConfigError",
            "ConfigWarning",
            "DeltazooError",
            "DeviceError",
            "DtypeError",
            "DuplicateNameError",
            "InputError",
            "OperandError",
            "PatternError",
            "PluginError",
            "ShapeError",
            "StateError",
            "UnknownNameError",
            "UnsupportedError",
            "ValueRangeError",
        ],
        "deltazoo.backends.io.progress": ["Progress", "silent"],
        "deltazoo.backends.update.reference": ["ReferenceBackend"],
        "deltazoo.backends.triton": ["TritonBackend"],
    }
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
