"""Launch the kernels of the delta rule with momentum; imported when a kernel first runs.

G chunk slots, C tokens of a chunk, N sequences, H heads, K key width, V value width
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.ops.momentum_chunks import MomentumOperands, MomentumSaved, MomentumToken
from deltazoo.backends.triton.momentum.kernels import operands, scan
from deltazoo.backends.triton.momentum.kernels.tiles import MomentumTraits
from deltazoo.backends.triton.runtime.launcher import launcher
from deltazoo.backends.triton.support import Options
from deltazoo.backends.triton.tiles import cdiv, limit_warps, most_registers, power_of_two


class Tiles(NamedTuple):
    """Tiles and launch parameters. scan, reverse, gradients, step: value columns of a tile; keys: of the gradients.

    No tile of a product is narrower than 64 columns: ptxas 12.8 miscompiled some (docs/compiler-bugs.md).
    """

    scan: int = 64
    scan_options: Options = Options(8, 1, most_registers(8))
    reverse: int = 64
    reverse_options: Options = Options(8, 1, most_registers(8))
    gradients: int = 64
    keys: int = 64
    gradients_options: Options = Options(8, 2, most_registers(8))
    prepare: Options = Options(8)
    pairs: Options = Options(8)
    gates: Options = Options(8)
    step: int = 32


TILES = Tiles()


def forward(x: MomentumOperands, *results: Tensor) -> None:
    """Compute o, the new states, and what the backward reads into `results`."""
    o, final, *kept = results
    with torch.cuda.device_of(x.q):
        tensors = x._asdict() | dict(zip(MomentumSaved._fields, kept, strict=True)) | {"o": o, "final": final}
        run = launcher(operands.momentum_prepare_kernel, tensors, {"traits": _traits(x, 64, TILES.keys)}, TILES.prepare)
        run(x.q.shape[0] * x.q.shape[2], {})
        _scan(scan.momentum_scan_kernel, x, tensors, TILES.scan, options=TILES.scan_options)


def backward(
    x: MomentumOperands, saved: MomentumSaved, d_o: Tensor, d_final: Tensor, *, out: Sequence[Tensor], scratch: int
) -> None:
    """Compute the gradients into `out`.

    The states are computed again for windows of heads whose states take at most `scratch` bytes together.
    """
    G, (C, H, K), V = x.q.shape[0], x.q.shape[1:], x.v.shape[-1]
    most = scratch // max(1, 4 * G * K * V * x.q.element_size())
    size = cdiv(H, cdiv(H, min(H, max(1, most))))  # as many windows, of equal size
    states, d_states = (x.q.new_empty(G, size, 2, K, V) for _ in range(2))
    pairs, d_pairs = x.q.new_empty(G, size, 2, C, C), x.beta.new_empty(G, H, 2, C, C)
    key_tiles = cdiv(K, TILES.keys)
    partial = x.beta.new_empty(key_tiles, G, H, 6, C)
    names = (*(f"d_{name}" for name in MomentumOperands._fields[:7]), "d_state")
    tensors = x._asdict() | saved._asdict() | dict(zip(names, out, strict=True)) | {
        "d_o": d_o, "d_final": d_final, "states": states, "d_states": d_states, "pairs": pairs, "d_pairs": d_pairs,
        "partial": partial,
    }  # fmt: skip
    with torch.cuda.device_of(x.q):
        for head in range(0, H, size):
            window = range(head, min(head + size, H))
            numbers = {"head": head, "heads": len(window)}
            _scan(scan.momentum_states_kernel, x, tensors, TILES.scan, options=TILES.scan_options, window=window)
            _scan(scan.momentum_reverse_kernel, x, tensors, TILES.reverse, options=TILES.reverse_options, window=window)
            traits = _traits(x, 64, TILES.keys)
            run = launcher(scan.momentum_pairs_kernel, tensors, {"traits": traits}, TILES.pairs)
            run(G * len(window), numbers)
            traits = _traits(x, TILES.gradients, TILES.keys)
            run = launcher(scan.momentum_gradients_kernel, tensors, {"traits": traits}, options=TILES.gradients_options)
            run(G * len(window) * key_tiles, {"G": G} | numbers)
        traits = _traits(x, 64, TILES.keys)
        launcher(operands.momentum_gates_kernel, tensors, {"traits": traits}, TILES.gates)(G * H, {"G": G})


def step_(x: MomentumToken, o: Tensor) -> None:
    """Decode one token per row into o, updating S and N of x in place."""
    (B, H, K), V = x.q.shape, x.v.shape[-1]
    BK, BV = power_of_two(K), min(TILES.step, power_of_two(V))
    traits = MomentumTraits(H=H, K=K, V=V, C=1, BK=BK, BV=BV)
    with torch.cuda.device_of(x.q):
        options = Options(limit_warps(8, BK * BV))
        run = launcher(scan.momentum_step_kernel, x._asdict() | {"o": o}, {"traits": traits}, options)
        run(B * H * cdiv(V, BV), {})


def _scan(
    kernel: Any, x: MomentumOperands, tensors: dict[str, Tensor | None], BV: int, *, options: Options,
    window: range | None = None,
) -> None:  # fmt: skip
    """Launch a scan for a window of heads; None: all."""
    window = range(x.q.shape[2]) if window is None else window
    traits = _traits(x, BV)
    programs = (x.starts.shape[0] - 1) * len(window) * cdiv(traits.V, BV)
    run = launcher(kernel, tensors, {"traits": traits}, options)
    run(programs, {"G": x.q.shape[0], "head": window.start, "heads": len(window)})


def _traits(x: MomentumOperands, BV: int, BK: int | None = None) -> MomentumTraits:
    (C, H, K), V = x.q.shape[1:], x.v.shape[-1]
    return MomentumTraits(H=H, K=K, V=V, C=C, BK=max(64, power_of_two(K)) if BK is None else BK, BV=BV)
