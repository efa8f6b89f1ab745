"""transformers: its layers on our operators (`use`), and our models as AutoModelForCausalLM (`register`)."""

from deltazoo import by_name, lazy_exports

_MODULES = by_name(
    {
        "deltazoo.integrations.fused_maps": ["join_fused_maps", "split_fused_maps"],
        "deltazoo.integrations.transformers.replacement": ["LayerReport", "Replacement", "use"],
        "deltazoo.integrations.transformers.model": ["DeltazooConfig", "DeltazooForCausalLM", "StackCache", "register"],
    }
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
