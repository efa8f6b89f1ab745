"""Which kernels compute each mixer on a Hopper GPU; a Sphinx extension, whose directive `kernel-table` shows it."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from deltazoo.backends.update import registry
from deltazoo.backends.update.explain import explain
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.delta_mixer import DeltaMixer
from deltazoo.mixers.core.update import Update

DEVICE, WIDTH, SHAPE = "NVIDIA H200", 2048, (8, 4096)
CONDITIONS = f"{DEVICE}, width {WIDTH}, default fields, bfloat16, {SHAPE[0]} x {SHAPE[1]} tokens, training"
DECODE = (
    "Fused: all of a decode step between the projections and the output map is one kernel, or two if value heads share "
    "the key heads of a convolution."
)

FAMILIES = {
    "hopper": "Hopper kernels (Gluon, sm_90), forward and backward",
    "mixed": "Hopper kernels for a part of the steps, portable or elementwise Triton kernels for the rest",
    "portable": "portable Triton kernels",
    "element": "elementwise Triton kernels",
    "none": "no update kernel: PyTorch code, which torch.compile compiles",
}
# Kernels that exist in one version only, for every GPU.
SHARED = {"gates_kernel", "gate_gradients_kernel", "sum_groups_kernel", "combine_kernel", "zero_tail_kernel"}


class MixerKernels(NamedTuple):
    """The kernels of one mixer: names by direction, in the order of their launches, without repetitions.

    decode: whether a decode step of the whole mixer is one kernel.
    """

    name: str
    forward: list[str]
    backward: list[str]
    decode: bool

    @property
    def family(self) -> str:
        kernels = {kernel for kernel in (*self.forward, *self.backward) if kernel not in SHARED}
        chunked = {kernel for kernel in kernels if not kernel.startswith("element")}
        hopper = {kernel for kernel in chunked if kernel.startswith("sm90")}
        if not kernels:
            return "none"
        if not chunked:
            return "element"
        return "hopper" if hopper == kernels else "mixed" if hopper else "portable"


def mixer_kernels(name: str) -> MixerKernels:
    """Return the kernels of a registered mixer under CONDITIONS."""
    with torch.device("meta"):
        mixer = config_class(name)().build(WIDTH, backend="reference")
    kernels: dict[str, list[str]] = {"forward": [], "backward": []}
    for update in mixer.modules():
        if isinstance(update, Update):
            meta = update.meta("cuda", torch.bfloat16, grad=True)
            plan = explain(update.spec, meta, shape=SHAPE, device=DEVICE).plan or ""
            for direction, found in kernels.items():
                for line in re.findall(rf"^ *{direction}: +(.*)$", plan, flags=re.MULTILINE):
                    found += [kernel for kernel in re.findall(r"\w+_kernel", line) if kernel not in found]
    fused = isinstance(mixer, DeltaMixer) and mixer.decode_fusion() is not None
    return MixerKernels(name, kernels["forward"], kernels["backward"], fused)


def all_mixers() -> list[MixerKernels]:
    """Return the kernels of every mixer of deltazoo itself."""
    names = registry.names(registry.MIXERS)
    return [mixer_kernels(name) for name in names if registry.is_built_in(registry.MIXERS, name)]


def rows(mixers: list[MixerKernels]) -> Iterator[list[str]]:
    """Yield the cells of the site's table: a row for each mixer, those of a family together."""
    for family in FAMILIES:
        for mixer in mixers:
            if mixer.family == family:
                decode = "" if family == "none" else "fused" if mixer.decode else "update only"
                names = (" → ".join(kernels) for kernels in (mixer.forward, mixer.backward))
                yield [f"`{mixer.name}`", family, *names, decode]


def setup(app: object) -> dict[str, bool]:
    from docutils import nodes
    from sphinx.application import Sphinx
    from sphinx.util.docutils import SphinxDirective

    class KernelTable(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            head = ["mixer", "family", "forward", "backward", "decode"]
            table = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * 5, *rows(all_mixers())]]
            legend = [f"- {family}: {about}" for family, about in FAMILIES.items()]
            text = [f"Conditions: {CONDITIONS}. {DECODE}", "", *legend, "", *table]
            return self.parse_text_to_nodes("\n".join(text))

    assert isinstance(app, Sphinx)
    app.add_directive("kernel-table", KernelTable)
    return {"parallel_read_safe": True}
