"""Queries about sizes that torch.compile or torch.export may treat as symbols."""

import torch


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds for all values of the symbols. Asking does not add a guard.

    For concrete sizes this is the condition.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    # Importing it takes a second; a traced caller has imported it.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
