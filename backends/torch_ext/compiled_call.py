"""A function that eager code calls compiled: copies of its code, no limit on recompilations, eager under modes.

Five facts about torch.compile, tested with torch 2.11 and 2.13, ask for this module:

- It counts recompilations per code object, and records by function name which sizes changed between calls. A copy
  of the code under a new name starts afresh, so that functions do not share either.
- With fullgraph=True it raises FailOnRecompileLimitHit at the limit, after the eighth graph. The call is then repeated
  without a limit. The graphs compiled before remain in use.
- While a dispatch mode must see every operator it compiles nothing. With fullgraph=True it then raises, and it marks
  the code as never to be compiled, so that later calls fail, too.
- AOTAutograd does not cache a graph with a torch.autograd.Function unless a setting allows it: it differentiates and
  partitions the graph in every process. The graph from Dynamo has the code of the function, so the cache's key has it.
- In a module of DistributedDataParallel it splits each graph at the bounds of DDP's buckets, so that one large graph
  does not delay the exchange of all gradients. Functions as small as a layer need no split, which prevents fusions.
"""

import itertools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch

from deltazoo.backends.torch_ext.modes import dispatch_mode_is_active

P = ParamSpec("P")
R = TypeVar("R")

_counter = itertools.count()


def compiled_call(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """Compile a copy of a function with fullgraph=True.

    Args: options: of torch.compile.
    Returns: a callable that runs the function itself while a dispatch mode is active, and in a traced caller, because
        torch 2.11 cannot trace a compiled function.
    """
    assert isinstance(function, FunctionType)
    name = f"{function.__name__}_{next(_counter)}"
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    compiled = cast("Callable[P, R]", torch.compile(copy, fullgraph=True, **options))
    is_first = True

    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        nonlocal is_first
        if torch.compiler.is_compiling() or dispatch_mode_is_active():
            return function(*arguments, **keywords)
        if is_first:
            is_first = False
            from torch._dynamo import config as dynamo_config
            from torch._functorch import config as functorch_config

            cached = functorch_config.patch(autograd_cache_allow_custom_autograd_functions=True)
            with cached, dynamo_config.patch(optimize_ddp=False):
                return call(*arguments, **keywords)
        try:
            return compiled(*arguments, **keywords)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            unlimited = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
            with torch._dynamo.config.patch(unlimited):
                return compiled(*arguments, **keywords)

    return call
