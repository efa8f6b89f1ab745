"""Combine the segments of sequences: the state at the start of each, or its gradient at the end of each.

S_{s+1} = map_s * S_s + end_s;    with REVERSE  dS_{s-1} = map_s * dS_s + end_s
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "segments"])
def element_combine_kernel(
    maps, ends, initial, starts, cu, T, segments,
    HV: tl.constexpr, STATE: tl.constexpr, BLOCK: tl.constexpr, SEGMENT_TOKENS: tl.constexpr, PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Combine the segments of one sequence in order, with REVERSE the last first. Grid: sequence, block of elements.

    Reads maps, ends [N segments, STATE, HV] and initial [N, HV, STATE] (None: 0). Writes starts [N segments, STATE,
    HV]. STATE = K V.
    """
    SIZE: tl.constexpr = HV * STATE
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // BLOCKS
    element = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    in_state = element < SIZE
    length = T
    if PACKED:
        length = tl.load(cu + sequence + 1) - tl.load(cu + sequence)
    number = tl.maximum((length + SEGMENT_TOKENS - 1) // SEGMENT_TOKENS, 1)
    S = tl.zeros([BLOCK], tl.float32)
    if initial is not None:
        at = initial + tl.cast(sequence, tl.int64) * SIZE + element % HV * STATE + element // HV
        S = tl.load(at, mask=in_state, other=0.0)
    for i in range(number):
        segment = number - 1 - i if REVERSE else i
        offset = tl.cast(sequence * segments + segment, tl.int64) * SIZE + element
        tl.store(starts + offset, S, mask=in_state)
        S = tl.load(maps + offset, mask=in_state, other=0.0) * S + tl.load(ends + offset, mask=in_state, other=0.0)
