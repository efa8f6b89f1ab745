"""The bottom layer: the update specification and the backends that compute it. It contains no nn.Module.

`dir(deltazoo.backends)` lists the public names: what a backend, its tests and its callers need.
"""

from deltazoo import by_name, lazy_exports

_MODULES = by_name(
    {
        "deltazoo.backends": ["conformance", "lowering"],
        "deltazoo.backends.base": ["Backend", "state_dtype"],
        "deltazoo.backends.compile": ["CompileBackend"],
        "deltazoo.backends.devices": ["DeviceSpec"],
        "deltazoo.backends.errors": [
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
        "deltazoo.backends.progress": ["Progress", "silent"],
        "deltazoo.backends.reference": ["ReferenceBackend"],
        "deltazoo.backends.triton": ["TritonBackend"],
    }
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
