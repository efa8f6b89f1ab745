"""Print the elementwise kernels of an update, for `deltazoo.explain`."""

from deltazoo.backends.measure.shapes import Shape
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.element.config import Tiling, element_heuristic, parse_element, tiling
from deltazoo.backends.triton.element.plan import ElementPlan, ElementSizes, element_plan
from deltazoo.backends.triton.lower import MAX_ELEMENT_VALUES, route_of
from deltazoo.backends.triton.shared_keys.operands import shares_keys
from deltazoo.backends.update.base import UpdateMeta
from deltazoo.backends.update.spec import UpdateSpec


def element_plans(meta: UpdateMeta, shape: Shape, device: DeviceSpec, config: str) -> list[ElementPlan]:
    """Return the plan of each part of at most two value columns, in the order of their forwards."""
    widths = [min(MAX_ELEMENT_VALUES, meta.V - first) for first in range(0, meta.V, MAX_ELEMENT_VALUES)]
    packed = bool(shape.lengths)
    return [
        element_plan(
            ElementSizes(shape.sequences, shape.T, meta.H, meta.HV, meta.K, V, packed), config, device.processors,
            meta.grad,
        )
        for V in widths
    ]  # fmt: skip


def explain_element(
    spec: UpdateSpec, meta: UpdateMeta, shape: Shape | None, device: DeviceSpec | None, config: str
) -> str | None:
    """List the kernels of an elementwise update in order. Without a GPU there is no plan."""
    device = DeviceSpec.current() if device is None else device
    if device.platform == "interpreter":
        return None
    if not config and shares_keys(meta.dtype, spec.decay, meta.H, meta.HV, V=meta.V, read=spec.read):
        return _explain_shared_keys(spec, meta, shape, device)
    head = f"elementwise kernels on {device.name} ({device.processors} SMs, Triton {device.triton})"
    V = min(meta.V, MAX_ELEMENT_VALUES)
    launches = parse_element(config) if config else element_heuristic(meta.K, V)
    if shape is None:
        tiles = [tiling(launch, meta.H, meta.HV, meta.K, V) for launch in (launches.forward, launches.backward)]
        names = ["element_scan_kernel", "element_backward_kernel"][: 1 + meta.grad]
        rows = [f"  {name}: {_describe(tile)}" for name, tile in zip(names, tiles, strict=False)]
        return "\n".join([f"{head}:", *rows])
    title = f"{head} for {shape.name}: B = {shape.B}, T = {shape.T}:"
    if route_of(spec, meta.V, shape.T, packed=bool(shape.lengths), grad=meta.grad) == "element step":
        return f"{title}\n  decode: element_step_kernel"
    plans = element_plans(meta, shape, device, config)
    forward = [step.kernel for plan in plans for step in plan.forward]
    backward = [step.kernel for plan in reversed(plans) for step in plan.backward]
    rows = [title]
    for name, kernels in (("forward", forward), ("backward", backward)):
        if kernels:
            launch, tile = getattr(launches, name), getattr(plans[0], f"{name}_tile")
            rows.append(f"  {name}: {' -> '.join(kernels)}")
            rows.append(f"    {_describe(tile)}, {launch.group} tokens loaded at once")
    if meta.grad:
        rows.append(f"  checkpoints of the state every {launches.checkpoint_tokens} tokens")
    tokens = plans[0].segment_tokens
    segments = f"{plans[0].segments} of {tokens} tokens, computed in parallel" if tokens else "none"
    rows.append(f"  segments: {segments}")
    return "\n".join(rows)


def _explain_shared_keys(spec: UpdateSpec, meta: UpdateMeta, shape: Shape | None, device: DeviceSpec) -> str:
    title = f"kernels of shared keys on {device.name} ({device.processors} SMs, Triton {device.triton})"
    if shape is not None:
        title += f" for {shape.name}: B = {shape.B}, T = {shape.T}"
        if route_of(spec, meta.V, shape.T, packed=bool(shape.lengths), grad=meta.grad) == "element step":
            return f"{title}:\n  decode: element_step_kernel"
    rows = [f"{title}:", "  forward: shared_key_sums_kernel -> shared_key_scan_kernel -> shared_key_output_kernel"]
    if meta.grad:
        rows.append("  backward: shared_key_scan_kernel -> shared_key_gradients_kernel")
    return "\n".join(rows)


def _describe(tile: Tiling) -> str:
    keys = "shared keys" if tile.SHARED else "keys per channel"
    return f"{tile.BLOCKS} blocks of {tile.BC} channels with {keys}, {tile.W} warps"
