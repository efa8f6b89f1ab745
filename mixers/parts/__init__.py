"""Modules that mixers consist of: projections, decays, gates, norms, convolutions, caches.

`dir(deltazoo.mixers.parts)` lists the public names: every part, and the interfaces of `deltazoo.mixers.core.part`.
"""

from deltazoo import by_name, lazy_exports

_INTERFACES = [
    "Fusible",
    "HasBackend",
    "HasFlops",
    "HeadShape",
    "LinearPart",
    "OperandPart",
    "OutputArguments",
    "OutputPart",
    "Parts",
    "ResizesHeads",
    "Stateful",
    "StatelessOutputPart",
    "init_normal",
    "projection",
]
_PARTS = {
    "beta": ["Beta", "ChannelBeta"],
    "caches": ["KVCache"],
    "complex_decays": ["LRUDecay", "S5Decay"],
    "complex_states": ["ComplexConjugate", "FromRotatingFrame", "ToRotatingFrame"],
    "conjugate_gradient": ["ConjugateGradientSolve"],
    "convolution": ["ShortConv", "TokenShift"],
    "decays": ["FixedDecay", "SigmoidDecay", "SlopeDecay", "SoftplusDecay", "TiedInputGate"],
    "diagonal_ssm": ["DiagonalSSM"],
    "exponential_gating": ["ExponentialGate"],
    "feature_maps": ["FeatureMap", "RandomFourierFeatures"],
    "feedback": ["Feedback"],
    "forget_gates": ["ForgetGate"],
    "log_linear": ["LogLinearUpdate"],
    "low_rank": ["LowRank", "Ranks"],
    "mamba3": ["AccumulatedRotary", "BiasedNorm", "PresentWrite", "TrapezoidalGates", "TrapezoidalWrite"],
    "normaliser": ["Normalise", "NormaliserColumn"],
    "norms": ["HeadNorm", "RMSNorm", "UnitNorm", "rms_norm", "unit_norm"],
    "output_gates": ["OutputGate", "OutputSilu", "PrecomputedGate"],
    "preconditioner": ["Preconditioner"],
    "projections": ["ChannelProjection", "QKVProjection"],
    "rg_lru": ["RGLRUGate"],
    "rotary": ["Rotary", "Rotation", "apply_rotary", "rotation_at"],
    "rwkv4": ["RWKV4Projection", "WKVBonus", "WKVGate"],
    "rwkv6": ["RWKV6Projection"],
    "rwkv7": ["RWKV7Projection"],
    "selective": ["SelectiveOperands"],
    "skips": ["Bonus", "Feedthrough", "Skip"],
    "slot_attention": ["GatedSlots", "SlotKeyPass", "SlotValuePass", "SoftmaxSlots"],
    "softmax_attention": ["attend", "attend_cache", "attend_packed", "attend_ring_buffer"],
    "token_scan": ["TokenScan"],
}
_MODULES = by_name(
    {"deltazoo.mixers.core.part": _INTERFACES}
    | {f"deltazoo.mixers.parts.{module}": names for module, names in _PARTS.items()}
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
