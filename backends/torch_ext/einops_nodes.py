"""einops under torch.compile: a call becomes one node of the graph.

Dynamo of torch 2.13 traces the functions of einops 0.8.2 with the parser of their patterns; older ones record one node
per call. That takes about half of the time to trace a layer: gated_deltanet 9.1 -> 4.4 s, mom 29.7 -> 18.9 s, on two
busy cores of a CPU.
"""

import einops
import torch

from deltazoo.backends.torch_ext.trace_constant import constant_in_graphs


@constant_in_graphs
def record_einops_calls() -> None:
    """Register the functions of einops with Dynamo. Call it while Dynamo traces: it is imported then."""
    torch.compiler.allow_in_graph([einops.rearrange, einops.repeat, einops.reduce])
