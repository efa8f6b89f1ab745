"""Compile the kernels that the plan chooses for every Triton version, GPU architecture and kind of update.

    python tests/bench/portability.py                            the whole grid
    python tests/bench/portability.py --triton 3.9.0 --devices sm_100,sm_120 --updates gdn,kda --widths 128

Each Triton version is installed into build/portability/ and runs in its own process. A kernel is compiled once per
architecture; results are kept in build/portability/ until the kernel changes. The resources of every problem go to
tests/backends/portability.json, which a test compares with what the backend refuses, and a summary to
docs/portability.md. Problems that are not compiled by a call keep their former results.
"""

import argparse
import contextlib
import datetime
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Hashable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "portability"
STORED = ROOT / "tests" / "backends" / "portability.json"
PAGE = ROOT / "docs" / "portability.md"
TRITON = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
# name: compute capability and bytes of shared memory per block (CUDA programming guide, table of capabilities)
DEVICES = {
    "sm_80": ("NVIDIA A100-SXM4-80GB", (8, 0), 163 * 1024), "sm_86": ("NVIDIA RTX A6000", (8, 6), 99 * 1024),
    "sm_89": ("NVIDIA GeForce RTX 4090", (8, 9), 99 * 1024), "sm_90": ("NVIDIA H200", (9, 0), 227 * 1024),
    "sm_100": ("NVIDIA B200", (10, 0), 227 * 1024), "sm_120": ("NVIDIA GeForce RTX 5090", (12, 0), 99 * 1024),
}  # fmt: skip
UPDATES: dict[str, dict[str, str]] = {
    "gdn": {"decay": "head", "beta": "head"},
    "additive": {"decay": "head", "transition": "additive"},
    "delta": {"beta": "head"},
    "kda": {"decay": "channel", "beta": "head"},
    "gla": {"decay": "channel", "transition": "additive"},
    "efla": {"decay": "head", "beta": "head", "reparam": "efla"},
    "negative": {"decay": "head", "beta": "head", "negative_eigenvalues": "both"},
    "dplr": {"decay": "channel", "transition": "dplr"},
    "mamba": {"decay": "rate", "transition": "additive"},
}
WITHOUT_UPDATE = ("convolution", "norm", "mlp", "loss")  # forward and backward
PASSES = ("forward", "training", "decode", *WITHOUT_UPDATE)
TENSOR_MEMORY = 512  # columns
Problem = tuple[str, str, str, int, str]  # device, update ("" for WITHOUT_UPDATE), dtype, width, pass


def device_of(name: str, triton: str) -> Any:
    from deltazoo.backends.torch_ext.devices import DeviceSpec

    gpu, capability, shared = DEVICES[name]
    return DeviceSpec(gpu, "cuda", capability, 4, shared, triton)  # 4 processors: no segments


def refusals(device: str, update: str, dtype: str, width: int, kind: str, triton: str) -> list[str]:
    """What the backend says about a problem."""
    import torch

    from deltazoo.backends.triton import TritonBackend
    from deltazoo.backends.update.base import UpdateMeta
    from deltazoo.backends.update.spec import UpdateSpec

    backend = TritonBackend()
    backend._interpreted = False
    meta = UpdateMeta("cuda", getattr(torch, dtype), H=2, HV=2, K=width, V=width, grad=kind == "training")
    return backend.unsupported_on(UpdateSpec(**UPDATES[update]), meta, device_of(device, triton))


class Compiler:
    """A replacement of `launcher` that compiles each distinct kernel once and keeps its resources.

    used: the resources of the kernels launched since the last reset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
        self.architecture = 90
        self.used: list[dict[str, Any]] = []

    def __call__(
        self, kernel: Any, tensors: Mapping[str, Any], traits: Mapping[str, Hashable], options: Any = (4, 1, None)
    ) -> Any:
        read = [name for name in kernel.arg_names if name in tensors or name in traits]
        types = {name: types_of(tensors[name]) for name in read if name in tensors}
        constants = {name: traits[name] for name in read if name not in tensors}
        text = repr((kernel.cache_key, types, constants, tuple(options), self.architecture))
        key = hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()
        if key not in self.known:
            self.known[key] = self.compile(kernel, tensors, traits, options)
            self.path.write_text(json.dumps(self.known))
        self.used.append(self.known[key])
        return lambda *_: None

    def compile(self, kernel: Any, *launch: Any) -> dict[str, Any]:
        from compiling import compile_kernel

        log = io.StringIO()
        try:
            with contextlib.redirect_stdout(log):
                compiled = compile_kernel(kernel, *launch, architecture=self.architecture)
        except Exception as error:
            lines = str(error).strip().splitlines()
            return {"kernel": kernel.__name__, "error": lines[0][:200] if lines else type(error).__name__}
        text = log.getvalue()  # of ptxas
        return {
            "kernel": kernel.__name__,
            "shared": compiled.metadata.shared,
            "tensor memory": getattr(compiled.metadata, "tmem_size", None) or 0,
            "registers": max(map(int, re.findall(r"Used (\d+) registers", text))),
            "spills": max(map(int, re.findall(r"(\d+) bytes spill stores", text))),
            "serialized": bool(re.search(r"C75\d\d", text)),
        }


def types_of(x: Any) -> str:
    """The dtype of an operand, or of each in a NamedTuple."""
    return str([*map(types_of, x)]) if isinstance(x, tuple) else str(getattr(x, "dtype", x))


def launch(problem: Problem, triton: str, compiler: Compiler) -> None:
    """Run the launch code of a problem on CPU tensors with this launcher."""
    import torch
    from compiling import launch_update

    from deltazoo.backends.conformance import Case
    from deltazoo.backends.conformance.cases import draw
    from deltazoo.backends.measure.shapes import Shape
    from deltazoo.backends.triton import problem as problems
    from deltazoo.backends.triton.chunk.heuristic import heuristic
    from deltazoo.backends.triton.chunk.registry import saves_16_bits
    from deltazoo.backends.triton.decode import launch as decode
    from deltazoo.backends.triton.decode.op import decode_operands
    from deltazoo.backends.triton.lower import computes_in_float32, splits_terms
    from deltazoo.backends.update.spec import UpdateSpec

    name, update, dtype_name, width, kind = problem
    device, dtype = device_of(name, triton), getattr(torch, dtype_name)
    if kind in WITHOUT_UPDATE:
        with patch("deltazoo.backends.triton.runtime.launcher.launcher", compiler):
            launch_without_update(kind, dtype, width)
        return
    spec = UpdateSpec(**UPDATES[update])
    if spec.decay == "rate":
        launch_elementwise(dtype, width, kind, device, compiler)
        return
    split_terms, channel = splits_terms(spec, width, dtype), spec.decay == "channel"
    dtype = torch.float32 if computes_in_float32(spec, width, dtype, channel) else dtype
    split_terms = split_terms and dtype != torch.float32
    dplr = spec.transition == "dplr"
    what = problems.Problem(
        dtype, 2, 200, 2, 2, width, width, spec.transition != "additive", dplr, spec.decay, False, split_terms,
        dplr=dplr,
    )  # fmt: skip
    what = what._replace(saves_16_bits=saves_16_bits(what, device))
    if kind != "decode":
        launch_update(what, device, compiler, before=dplr, grad=kind == "training")
        return
    case = Case(spec, Shape("tokens", 4, 4, 2, 2, width, width), dtype)
    x, traits = decode_operands(spec, draw(case), "")
    one = decode_operands(spec, draw(case._replace(shape=case.shape._replace(T=1))), "")[0]
    states, accepted = torch.empty(4, 2, width, width), torch.zeros(4, dtype=torch.int32)
    step = heuristic(what, device).decode
    with patch.object(decode, "launcher", compiler):
        decode.step_(one, traits, states, None, step)
        _, values = decode.verify(x, traits, states, None, step)
        decode.commit_(x, traits, values, states, None, accepted, step)


def launch_without_update(kind: str, dtype: Any, width: int) -> None:
    """Run the launch code of another kernel of a layer, with heads of `width`, on CPU tensors."""
    import torch

    from deltazoo.backends.triton.conv import op as short_conv
    from deltazoo.backends.triton.glu import op as glu
    from deltazoo.backends.triton.loss import op as cross_entropy
    from deltazoo.backends.triton.norm import op as norm
    from deltazoo.backends.update.base import ConvInputs

    heads, tokens = 4, 200
    x, weight = torch.empty(1, tokens, heads, width, dtype=dtype), torch.empty(width, dtype=dtype)
    rows, row_weight = x.view(tokens, heads * width), torch.empty(heads * width, dtype=dtype)
    if kind == "convolution":
        inputs = ConvInputs(x.flatten(2), torch.empty(heads * width, 4, dtype=dtype))
        config = [*short_conv.FORWARD, *short_conv.BACKWARD]
        for unit in (0, width):
            (y,) = short_conv._forward(*inputs, [heads * width], [True], [unit], config)
            short_conv._backward(*inputs, [y], [heads * width], [True], [unit], config)
    elif kind == "norm":  # of a residual sum, and of heads with a gate
        norm._forward(rows, rows, None, row_weight, 1e-5, "none")
        norm._backward(rows, None, row_weight, rows, rows, 1e-5, "none")
        norm._forward(x, None, x.flatten(2), weight, 1e-5, "silu")
        norm._backward(x, x.flatten(2), weight, x, None, 1e-5, "silu")
    elif kind == "mlp":
        for activation in ("silu", "gelu", "relu2"):
            h = glu._forward(rows, activation)
            glu._backward(rows, h, activation)
    else:
        targets, numbers = torch.zeros(tokens, dtype=torch.int64), torch.empty(tokens)
        for scale, gradients, z_loss, cap in ((None, True, None, None), (numbers, True, 1e-4, 30.0)):
            cross_entropy.losses_(rows, targets, scale, numbers, gradients, -100, z_loss, cap)


def launch_elementwise(dtype: Any, width: int, kind: str, device: Any, compiler: Compiler) -> None:
    """Run the launch code of Mamba's update with `width` states per channel on CPU tensors."""
    import torch

    from deltazoo.backends.triton import problem as problems
    from deltazoo.backends.triton.element import launch
    from deltazoo.backends.triton.element.operands import ElementKind, ElementOperands, ElementStepCall

    B, T, channels = 2, 1 if kind == "decode" else 200, 256
    qk, v = torch.empty(B, T, 1, width, dtype=dtype), torch.empty(B, T, channels, 1, dtype=dtype)
    step, rate, states = torch.empty(B, T, channels), torch.empty(channels, width), torch.empty(B, channels, width, 1)
    with patch.object(launch, "launcher", compiler), patch.object(problems, "device_spec", lambda _: device):
        if kind == "decode":
            launch.step_(ElementStepCall(qk, qk, v, None, step, rate, states, None, "after", 1.0))
            return
        x = ElementOperands(qk, qk, v, step=step, rate=rate)
        o, _, checkpoints = launch.forward(x, ElementKind("after", 1.0), kind == "training")
        if kind == "training":
            launch.backward(x, ElementKind("after", 1.0), checkpoints, o, None, True)


def summarise(used: list[dict[str, Any]], shared: int) -> dict[str, Any]:
    """The largest use of each resource, and why kernels do not run."""
    done = [kernel for kernel in used if "error" not in kernel]
    result: dict[str, Any] = {"faults": sorted({f"{k['kernel']}: {k['error']}" for k in used if "error" in k})}
    for name, limit in (("shared", shared), ("tensor memory", TENSOR_MEMORY), ("registers", 255)):
        largest = max(done, key=lambda kernel: kernel[name], default=None)
        result[name] = largest[name] if largest else 0
        if largest and largest[name] > limit:
            result["faults"].append(f"{largest['kernel']}: {name} {largest[name]} > {limit}")
    result["spills"] = {k["kernel"]: k["spills"] for k in sorted(done, key=lambda k: k["spills"]) if k["spills"]}
    result["serialized"] = sorted({k["kernel"] for k in done if k["serialized"]})
    return result


def compile_all(problems: list[Problem]) -> None:
    """Compile problems with the installed Triton; print one JSON line for each."""
    import triton

    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    compiler = Compiler(FOLDER / f"{triton.__version__}.json")
    for problem in problems:
        compiler.architecture, compiler.used = int(problem[0].removeprefix("sm_")), []
        launch(problem, triton.__version__, compiler)
        print(json.dumps([problem, summarise(compiler.used, DEVICES[problem[0]][2])]), flush=True)


def run_version(version: str, problems: list[Problem]) -> Iterator[tuple[Problem, dict[str, Any]]]:
    """Compile problems in a process with this version of Triton, which is installed first."""
    target = FOLDER / f"triton-{version}"
    if not (target / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    paths = [str(target), str(ROOT / "tests" / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(FOLDER / "cache")}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}  # the default until 3.9, which warns about it
    command = [sys.executable, __file__, "--compile", json.dumps(problems)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("[["):
            problem, result = json.loads(line)
            yield tuple(problem), result
    if child.wait():
        raise SystemExit(f"compiling with Triton {version} ended with exit status {child.returncode}")


def problems_of(options: argparse.Namespace) -> list[Problem]:
    """Problems by update, so that devices share what Triton caches. Other kernels of a layer do not depend on it."""
    grid = product(options.widths, options.dtypes, options.updates, options.devices, PASSES)
    grid = (problem for problem in grid if problem[0] != "16" or problem[2] == "mamba")
    found = [(d, "" if p in WITHOUT_UPDATE else u, t, int(w), p) for w, t, u, d, p in grid if p in options.passes]
    return list(dict.fromkeys(found))


def name_of(problem: Problem) -> str:
    return " ".join(map(str, filter(None, problem)))


def page(stored: dict[str, Any]) -> str:
    """The summary: per version and device the largest resources and what does not run."""
    head = "| Triton | device | problems | shared KiB | tensor memory | registers | spill B | not run |\n|" + "---|" * 8
    rows = []
    for version, device in product(TRITON, DEVICES):
        results = {n: r for n, r in stored["results"].get(version, {}).items() if n.startswith(f"{device} ")}
        if not results:
            continue
        spills = {k: b for r in results.values() for k, b in r["spills"].items()}
        kernel = max(spills, key=lambda k: spills[k], default="")
        faults = [n.removeprefix(f"{device} ") for n, r in results.items() if r["faults"]]
        largest = [max(r[name] for r in results.values() if not r["faults"]) if len(faults) < len(results) else 0
                   for name in ("shared", "tensor memory", "registers")]  # fmt: skip
        numbers = [f"{largest[0] / 1024:.0f}", *map(str, largest[1:])]
        spill = f"{spills[kernel]} ({kernel})" if spills else "0"
        rows.append(f"| {version} | {device} | {len(results)} | {' | '.join(numbers)} | {spill} | {len(faults)} |")
    return f"{head}\n" + "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {"triton": TRITON, "devices": tuple(DEVICES), "updates": tuple(UPDATES), "passes": PASSES,
             "dtypes": ("bfloat16", "float32"), "widths": ("16", "64", "128", "256")}  # fmt: skip
    for option, values in names.items():
        parser.add_argument(f"--{option}", type=lambda text: text.split(","), default=values, help=",".join(values))
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        compile_all([tuple(problem) for problem in json.loads(options.compile)])
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    stored = json.loads(STORED.read_text()) if STORED.is_file() else {"results": {}}
    for version in options.triton:
        for problem, result in run_version(version, problems_of(options)):
            stored["results"].setdefault(version, {})[name_of(problem)] = result
            print(version, name_of(problem), json.dumps(result), flush=True)
    stored["date"] = datetime.date.today().isoformat()
    lines = (f"  {json.dumps(v)}: {{\n{_lines(r)}\n  }}" for v, r in sorted(stored["results"].items()))
    STORED.write_text(f'{{"date": "{stored["date"]}", "results": {{\n' + ",\n".join(lines) + "\n}}\n")
    text = PAGE.read_text().partition("<!-- table -->")[0] if PAGE.is_file() else "# Portability\n\n"
    PAGE.write_text(f"{text}<!-- table -->\n\nCompiled on {stored['date']}.\n\n{page(stored)}\n")


def _lines(results: dict[str, Any]) -> str:
    return ",\n".join(f"    {json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests" / "backends")]
    main()
