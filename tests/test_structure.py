"""Rules of the source (no import circles, few parameters, launches by name), and the Makefile's list of tests."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import deltazoo
from deltazoo.cli import _COMMANDS

ROOT = Path(deltazoo.__file__).resolve().parent
LAYERS = ("backends", "mixers", "blocks", "integrations", "cli")
MOST_PARAMETERS = 8
MOST_POSITIONAL = 4
# These call Triton's compiled kernels, which take their arguments by position.
LAUNCHERS = {"backends/triton/runtime/launcher.py", "backends/triton/runtime/replay.py"}

# The signatures of these are those of another library.
FOREIGN_SIGNATURES = {"integrations/fla.py", "integrations/transformers/functions.py"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of every module in these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_the_import_graph_has_no_circles() -> None:
    """Counts imports in functions and for type checkers, too."""
    grimp = pytest.importorskip("grimp", reason="import-linter, of deltazoo[dev], is not installed")
    graph = grimp.build_graph("deltazoo", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 300
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names a circle


def parameters(function: Function) -> int:
    """Count the parameters of a function, without `self` and `cls`."""
    given = function.args
    names = [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len([x for x in (given.vararg, given.kwarg) if x])


def is_kernel(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_functions_take_at_most_eight_parameters() -> None:
    """Kernels and their device functions are exempt, and commands: the parameters of a command are its options."""
    commands = {(command.__module__, command.__name__) for command in _COMMANDS.values()}
    found = []
    for path, tree in sources(*LAYERS):
        if path in FOREIGN_SIGNATURES:
            continue
        module = f"deltazoo.{path.removesuffix('.py').replace('/', '.')}"
        for node in ast.walk(tree):
            if not isinstance(node, Function) or is_kernel(node) or (module, node.name) in commands:
                continue
            if parameters(node) > MOST_PARAMETERS:
                found.append(f"{path}:{node.lineno} {node.name}: {parameters(node)}")
    assert found == []


def launches(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls that launch kernels: `launcher(...)`, calls of its result, and `kernel[grid](...)`."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_launcher(node.value):
            bound |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            by_grid = isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value).endswith("kernel")
            if is_launcher(node) or is_launcher(node.func) or name in bound or by_grid:
                yield node


def is_launcher(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launcher"


def positional(call: ast.Call) -> int:
    """Count positional arguments; an unpacked sequence counts as too many."""
    return MOST_POSITIONAL + 1 if any(isinstance(x, ast.Starred) for x in call.args) else len(call.args)


def test_launches_take_at_most_four_arguments_by_position() -> None:
    found: dict[str, list[int]] = {}
    for path, tree in sources("backends/triton"):
        if path not in LAUNCHERS and "/kernels/" not in path and not path.endswith("kernels.py"):
            found[path] = [positional(call) for call in launches(tree)]
    families = {path.split("/")[2] for path, counts in found.items() if counts}
    assert families >= {"chunk", "conv", "decode", "element", "glu", "loss", "norm"}
    assert max(count for counts in found.values() for count in counts) <= MOST_POSITIONAL, found


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("run = launcher(kernel, tensors, traits)\nrun(1, numbers)", [3, 2]),
        ("launcher(kernel, tensors, traits, options)(1, numbers)", [2, 4]),
        ("kernel[(1,)](a, b, c, d, e)", [5]),
        ("kernel[(1,)](*arguments)", [5]),
    ],
)
def test_positional_arguments_of_launches_are_counted(source: str, counts: list[int]) -> None:
    assert sorted(map(positional, launches(ast.parse(source)))) == sorted(counts)


def test_backward_reads_its_saved_tensors_once() -> None:
    """The second read raises under activation checkpointing, which computes the tensors again for one."""
    functions = 0
    for path, tree in sources("backends", "mixers", "blocks", "integrations"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "backward":
                reads = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and x.attr == "saved_tensors"]
                assert len(reads) <= 1, f"{path}:{node.lineno}"
                functions += bool(reads)
    assert functions > 20


def test_the_interpreter_runs_the_tests_of_every_kernel() -> None:
    """Files that need the interpreter or a GPU are in the Makefile's list, unless all of their tests need a GPU."""
    (listed,) = re.findall(r"^INTERPRETED := .*test_%.py,(.*)\)$", (ROOT / "Makefile").read_text(), re.M)
    files = {path.stem.removeprefix("test_"): path.read_text() for path in (ROOT / "tests/backends").glob("test_*.py")}
    needed = {name for name, text in files.items() if "needs_triton" in text and "pytest.mark.cuda,\n" not in text}
    assert needed <= {*listed.split()}
