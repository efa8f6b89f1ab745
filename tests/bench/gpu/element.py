"""Time the elementwise updates through autograd: python element.py [NAME]...

Prints ms of the forward, of forward and backward, and the peak MiB of a step, as perf.py does. Needs a CUDA device.
"""

import sys

import torch
from perf import DEVICE, bench, both, peak
from torch.nn.functional import logsigmoid, softplus

from deltazoo import UpdateInputs, UpdateSpec, bind
from deltazoo.backends.triton import TritonBackend

CASES = {  # decay, B, T, H, HV, K, V
    "mamba": ("rate", 8, 4096, 1, 4096, 16, 1),
    "mamba, one sequence": ("rate", 1, 8192, 1, 4096, 16, 1),
    "mamba, 64 states": ("rate", 8, 2048, 1, 2048, 64, 1),
    "hgrn": ("head", 8, 4096, 2048, 2048, 1, 1),
    "lru": ("fixed", 8, 4096, 1024, 1024, 1, 2),
    "s5": ("fixed", 8, 4096, 1, 2048, 16, 2),
    "longhorn": ("channel", 4, 4096, 1, 2048, 16, 1),
    "64 keys in 16 heads": ("head", 8, 4096, 16, 1024, 64, 1),
}


def element_inputs(decay: str, B: int, T: int, H: int, HV: int, K: int, V: int, grad: bool = False) -> UpdateInputs:
    """Random operands without a state, equal for equal sizes."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=DEVICE)

    x = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    x = {name: tensor.bfloat16() for name, tensor in x.items()}
    if decay == "rate":
        x["step"] = softplus(normal(B, T, HV) - 3)
        x["rate"] = -torch.arange(1.0, K + 1, device=DEVICE).expand(HV, K).contiguous()
    elif decay == "fixed":
        x["log_decay"] = -torch.rand(HV, generator=generator, device=DEVICE) * 0.1
    else:
        x["log_decay"] = logsigmoid(normal(B, T, HV, *([K] if decay == "channel" else [])))
    return UpdateInputs(**{name: tensor.requires_grad_(grad) for name, tensor in x.items()})


for name, (decay, *sizes) in CASES.items():
    if sys.argv[1:] and name not in sys.argv[1:]:
        continue
    bound = bind(UpdateSpec(decay=decay, transition="additive", scale=1.0), TritonBackend())
    x = element_inputs(decay, *sizes)
    forward = bench(lambda bound=bound, x=x: bound(x))
    x = element_inputs(decay, *sizes, grad=True)
    step = both(bound, x, torch.randn_like(x.v))
    print(f"{name}: {forward:.3f}; {bench(step):.3f}; {peak(step):.0f} MiB", flush=True)
