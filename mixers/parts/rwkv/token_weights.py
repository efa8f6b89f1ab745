"""What the decode steps of RWKV-6 and RWKV-7 both require of a mixer, and the weights that both read."""

from torch import Tensor, nn

from deltazoo.backends.ops.rwkv_step import MAX_WIDTH, RWKVWeights
from deltazoo.backends.torch_ext.plain_module import is_plain, is_plain_linear
from deltazoo.mixers.core.decode_maps import reads_weight
from deltazoo.mixers.core.token_step import TokenCall
from deltazoo.mixers.parts.convolution import TokenShift
from deltazoo.mixers.parts.gates.output_gates import Activation, PrecomputedGate
from deltazoo.mixers.parts.low_rank import LowRank
from deltazoo.mixers.parts.norms import HeadNorm
from deltazoo.mixers.parts.skips import Bonus


def common_weights(call: TokenCall, shift: nn.Module, decay: LowRank, activation: Activation) -> RWKVWeights | None:
    """Return the weights of the decay, the bonus and the output norm, or None if the kernels do not compute this call.

    Args: call: of a mixer with a `Bonus`, a `HeadNorm` and a `PrecomputedGate`, whose activation must be `activation`.
    """
    outputs = {type(part): part for part in call.parts.values()}
    norm, bonus, gate = outputs[HeadNorm], outputs[Bonus], outputs[PrecomputedGate]
    assert isinstance(norm, HeadNorm) and isinstance(bonus, Bonus) and isinstance(gate, PrecomputedGate)
    if type(shift) is not TokenShift or not is_plain(shift) or call.states["project"].dtype != call.x.dtype:
        return None
    if max(call.states["update"].shape[2:]) > MAX_WIDTH or gate.activation != activation:
        return None
    if norm.kind != "layer" or norm.weight is None or norm.bias is None:
        return None
    if not reads_low_rank(decay, call.x) or decay.bias is None:
        return None
    return RWKVWeights(decay.up.weight, decay.bias, bonus.u, norm.weight, norm.bias, norm.eps)


def reads_low_rank(part: LowRank, x: Tensor) -> bool:
    """Whether products of a row of x with the part's weights, and its bias, are what a call of it computes."""
    return type(part) is LowRank and is_plain(part) and is_plain_linear(part.up) and reads_weight(part.down, x)
