"""Print the elementwise kernels of an update, for `deltazoo.explain`."""

from deltazoo.backends.base import UpdateMeta
from deltazoo.backends.devices import DeviceSpec
from deltazoo.backends.shapes import Shape
from deltazoo.backends.triton.element.config import Tiling, element_heuristic, parse_element, segment_length, tiling
from deltazoo.backends.triton.element.op import MAX_VALUE_WIDTH
from deltazoo.backends.triton.plan import LAUNCHES
from deltazoo.backends.triton.tiles import cdiv


def element_kernels(split: int, packed: bool, grad: bool) -> tuple[list[str], list[str]]:
    """Return the kernels of the forward and the backward in the order of their launches."""

    def names(step: str) -> list[str]:
        segments = list(LAUNCHES["element segments", step]) if split else []
        return [*segments, *LAUNCHES["elementwise", step], *(LAUNCHES["tail", "portable"] if packed else ())]

    return names("forward"), names("backward") if grad else []


def explain_element(meta: UpdateMeta, shape: Shape | None, device: DeviceSpec | None, config: str) -> str | None:
    """List the kernels of an elementwise update in order. Without a GPU there is no plan."""
    device = DeviceSpec.current() if device is None else device
    if device.platform == "interpreter":
        return None
    launches = parse_element(config) if config else element_heuristic(meta.K, min(meta.V, MAX_VALUE_WIDTH))
    head = f"elementwise kernels on {device.name} ({device.processors} SMs, Triton {device.triton})"
    sizes = (meta.H, meta.HV, meta.K, min(meta.V, MAX_VALUE_WIDTH))
    tiles = {"forward": tiling(launches.forward, *sizes), "backward": tiling(launches.backward, *sizes)}
    split = 0
    if shape is not None:
        split = segment_length(launches, tiles["forward"], shape.sequences, shape.T, device.processors)
        head += f" for {shape.name}: B = {shape.B}, T = {shape.T}"
    rows = [f"{head}:"]
    for step, kernels in zip(tiles, element_kernels(split, meta.packed, meta.grad), strict=True):
        if kernels:
            launch = getattr(launches, step)
            rows.append(f"  {step}: {' -> '.join(kernels)}")
            rows.append(f"    {_describe(tiles[step])}, {launch.group} tokens loaded at once")
    if meta.grad:
        rows.append(f"  checkpoints of the state every {launches.every} tokens")
    if shape is not None:
        segments = f"{cdiv(shape.T, split)} of {split} tokens, computed in parallel" if split else "none"
        rows.append(f"  segments: {segments}")
    return "\n".join(rows)


def _describe(tile: Tiling) -> str:
    keys = "shared keys" if tile.SHARED else "keys per channel"
    return f"{tile.BLOCKS} blocks of {tile.BC} channels with {keys}, {tile.W} warps"
