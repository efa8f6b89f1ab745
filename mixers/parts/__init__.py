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
    "gates.beta": ["Beta", "ChannelBeta"],
    "attention.caches": ["KVCache"],
    "attention.pages": ["CachePages", "PagedCache"],
    "ssm.complex_decays": ["LRUDecay", "S5Decay"],
    "ssm.complex_states": ["ComplexConjugate", "FromRotatingFrame", "ToRotatingFrame"],
    "memory.conjugate_gradient": ["ConjugateGradientSolve"],
    "convolution": ["ShortConv", "TokenShift"],
    "gates.decays": ["FixedDecay", "SigmoidDecay", "SlopeDecay", "SoftplusDecay", "TiedInputGate"],
    "ssm.diagonal_ssm": ["DiagonalSSM"],
    "gates.exponential_gating": ["ExponentialGate"],
    "feature_maps": ["FeatureMap", "LearnedFeatureMap", "RandomFourierFeatures", "ValueSilu"],
    "memory.feedback": ["Feedback"],
    "gates.forget_gates": ["ForgetGate"],
    "gates.per_value_head": ["RepeatForValueHeads"],
    "gates.softmax_keys": ["SoftmaxKeys"],
    "gates.tempered_gates": ["ConvolvedSkip", "TemperedProjection"],
    "memory.joint_memories": ["JointMemories", "JointSizes", "joint_refusal"],
    "memory.token_pack": ["TokenPack"],
    "memory.log_linear": ["LogLinearUpdate"],
    "low_rank": ["LowRank", "Ranks"],
    "ssm.mamba3": ["AccumulatedRotary", "BiasedNorm", "TrapezoidalGates", "TrapezoidalRead", "TrapezoidalWrite"],
    "normaliser": ["Normalise", "NormaliserColumn"],
    "norms": ["HeadNorm", "KeyNorm", "LayerNorm", "RMSNorm", "SharedLayerNorm", "UnitNorm", "rms_norm", "unit_norm"],
    "gates.output_gates": ["OutputGate", "OutputSilu", "PrecomputedGate"],
    "memory.momentum": ["MomentumInputs", "momentum_delta_rule"],
    "memory.preconditioner": ["EraseAsPair", "Preconditioner"],
    "projections": ["ChannelProjection", "QKVProjection", "ShareKeyValues"],
    "gates.rg_lru": ["RGLRUGate"],
    "rope_scaling": ["RopeScaling", "ScaledFrequencies"],
    "rotary": ["Rotary", "Rotation", "apply_rotary", "rotation_at"],
    "rwkv.rwkv4": ["RWKV4Projection", "WKVBonus", "WKVGate"],
    "rwkv.rwkv6": ["RWKV6Projection"],
    "rwkv.rwkv7": ["RWKV7Projection"],
    "ssm.selective": ["SelectiveOperands"],
    "ssm.stream_factors": ["StreamFactors"],
    "skips": ["Bonus", "Feedthrough", "Skip"],
    "attention.slot_attention": ["GatedSlots", "RoutedSlots", "SlotKeyPass", "SlotValuePass", "SoftmaxSlots"],
    "attention.softmax_attention": ["attend", "attend_cache", "attend_packed", "attend_ring_buffer"],
    "memory.token_scan": ["TokenScan"],
}
_MODULES = by_name(
    {"deltazoo.mixers.core.part": _INTERFACES}
    | {f"deltazoo.mixers.parts.{module}": names for module, names in _PARTS.items()}
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
