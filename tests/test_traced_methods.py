"""No code that torch.compile traces calls a tensor method that it cannot trace under a torch function mode."""

import ast
from pathlib import Path

import pytest

from deltazoo import backends

ROOT = Path(backends.__file__).parents[1]
# Methods that torch.Tensor implements by a call of super() or of Python code that torch.compile skips. Tracing them
# fails while a mode is active, such as that of torch.set_default_device. torch.unflatten(x, ...) can be traced.
UNTRACEABLE = {"unflatten", "dim_order"}


@pytest.mark.parametrize("layer", ["backends", "mixers", "blocks"])
def test_traced_code_calls_no_untraceable_tensor_method(layer):
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / layer).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in UNTRACEABLE
        and not (isinstance(node.value, ast.Name) and node.value.id == "torch")
    ]
    assert found == []
