"""Checks that every mixer must pass. One line runs them in the tests of a plug-in:

test_my_mixer = conformance.suite(MyMixer(heads=2))
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from deltazoo.backends.compile import CompileBackend
from deltazoo.backends.io.errors import UnknownNameError
from deltazoo.backends.update.base import Backend
from deltazoo.backends.update.check import validate
from deltazoo.mixers.core.mixer import Context, Mixer, MixerConfig, Place
from deltazoo.mixers.core.state import rollback_, snapshot
from deltazoo.mixers.core.update import Update

T, CAPACITY = 19, 32
COMPILED_T = 2  # a short sequence: graphs of the plain-PyTorch backends grow with the number of chunks
LATER_PLACE = Place(1, 2)  # some initial values depend on the layer
EXACT, ROUNDED = 1e-9, 0.03


class Subject(NamedTuple):
    """Config under test, with the width and backend to build it."""

    config: MixerConfig
    width: int
    backend: str | Backend

    def mixer(self, dtype: torch.dtype = torch.float64) -> Mixer:
        """Build the mixer; every call gives the same weights."""
        torch.manual_seed(0)
        return self.config.build(self.width, backend=self.backend).to(dtype)

    def x(self) -> Tensor:
        """Draw the input [2, T, width], the same in every call."""
        torch.manual_seed(1)
        return torch.randn(2, T, self.width, dtype=torch.float64)


class _FunctionMode(TorchFunctionMode):
    """Changes nothing. The mode of a default device is traced for every call, which doubles the time of a trace."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def trains(subject: Subject) -> float:
    """Gradients of all parameters through the state between two pieces equal those of one call."""
    mixer, x = subject.mixer(), subject.x()
    gradients = [_gradients(mixer, y, x) for y in (_run_pieces(mixer, x, [7, 12]), mixer(x)[0])]
    return relative_error(*gradients)


@torch.no_grad()
def prefills_in_pieces(subject: Subject) -> float:
    """Outputs of several pieces, one of them empty, equal those of one call."""
    mixer, x = subject.mixer(), subject.x()
    return relative_error(_run_pieces(mixer, x, [1, 6, 0, 12]), mixer(x)[0])


@torch.no_grad()
def decodes(subject: Subject) -> float:
    """Outputs of one call per token equal those of one call."""
    mixer, x = subject.mixer(), subject.x()
    return relative_error(_run_pieces(mixer, x, [1] * T), mixer(x)[0])


@torch.no_grad()
def packs(subject: Subject) -> float:
    """Outputs of packed sequences equal those of each sequence alone."""
    mixer, x = subject.mixer(), subject.x()[:1]
    expected = torch.cat([mixer(x[:, :5])[0], mixer(x[:, 5:])[0]], 1)
    return relative_error(mixer(x, None, Context(cu_seqlens=torch.tensor([0, 5, T], dtype=torch.int32)))[0], expected)


@torch.no_grad()
def continues_packs(subject: Subject) -> float:
    """Outputs of packs that continue from states equal those of each sequence alone; a pack may lack a sequence."""
    mixer, x = subject.mixer(), subject.x()
    sequences = [x[:1, :8], x[:1, 8:14], x[1:, :5]]
    expected = [mixer(sequence)[0] for sequence in sequences]
    state: Any = mixer.init_state(3, CAPACITY)
    first, outputs, references = [0, 0, 0], [], []
    for lengths in ([5, 0, 4], [3, 6, 0], [0, 0, 1]):
        tokens = [slice(begin, begin + n) for begin, n in zip(first, lengths, strict=True)]
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        pack = torch.cat([sequence[:, part] for sequence, part in zip(sequences, tokens, strict=True)], 1)
        y, state, _ = mixer(pack, state, Context(cu_seqlens=bounds))
        outputs.append(y)
        references += [value[:, part] for value, part in zip(expected, tokens, strict=True)]
        first = [part.stop for part in tokens]
    return relative_error(torch.cat(outputs, 1), torch.cat(references, 1))


@torch.no_grad()
def keeps_shapes(subject: Subject) -> float:
    """Outputs have the shape and dtype of x, and every tensor of a state has one row per sequence."""
    for dtype in (torch.float32, torch.float64):
        mixer, x = subject.mixer(dtype), subject.x().to(dtype)
        y, state, _ = mixer(x, mixer.init_state(2, CAPACITY))
        for value in (y, mixer(x)[0]):
            if value.shape != x.shape or value.dtype != dtype:
                return float("inf")
        if any(tensor.shape[0] != 2 for tensor in tree_leaves(state) if isinstance(tensor, Tensor)):
            return float("inf")
    return 0.0


@torch.no_grad()
def passes_valid_operands(subject: Subject) -> float:
    """Operands of updates are finite, decays at most 0, and strengths in the interval of their spec.

    Raises: ValueRangeError, as `deltazoo.validate`, if they are not.
    """
    mixer = subject.mixer()
    for module in mixer.modules():
        if isinstance(module, Update):
            module.register_forward_pre_hook(lambda update, arguments: validate(update.spec, arguments[0]))
    mixer(subject.x())
    return 0.0


@torch.no_grad()
def pads(subject: Subject) -> float:
    """Outputs of a left-padded and a right-padded row equal those of the unpadded rows."""
    mixer, x = subject.mixer(), subject.x()
    time = torch.arange(T)
    y = mixer(x, None, Context(mask=torch.stack([time >= 4, time < 11])))[0]
    left, right = mixer(x[:1, 4:])[0], mixer(x[1:, :11])[0]
    return max(relative_error(y[:1, 4:], left), relative_error(y[1:, :11], right))


@torch.no_grad()
def is_causal_and_isolated(subject: Subject) -> float:
    """Outputs do not depend on later tokens, nor on another row of the batch, which is NaN on purpose."""
    mixer, x = subject.mixer(), subject.x()
    changed = x.clone()
    changed[0, 8:] = 7 * torch.randn_like(changed[0, 8:])
    changed[1] = torch.nan
    return relative_error(mixer(changed)[0][0, :8], mixer(x)[0][0, :8])


@torch.no_grad()
def runs_in_bfloat16(subject: Subject) -> float:
    """Outputs under bfloat16 autocast equal those in float64 up to rounding."""
    mixer, exact, x = subject.mixer(torch.float32), subject.mixer(), subject.x()
    exact.load_state_dict({name: value.double() for name, value in mixer.state_dict().items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return relative_error(mixer(x.float())[0], exact(x)[0])


def is_one_graph(subject: Subject) -> float:
    """Outputs and gradients under torch.compile(fullgraph=True) equal those of eager mode.

    The mixer is traced under a torch function mode, where torch.compile cannot trace some methods of tensors, such as
    `unflatten`.
    """
    torch._dynamo.reset()
    mixer, x = subject.mixer(), subject.x()[:, :COMPILED_T]
    y = mixer(x)[0]
    with _FunctionMode():
        compiled_y = torch.compile(mixer, fullgraph=True, backend="aot_eager")(x)[0]
    gradients = [_gradients(mixer, output, x) for output in (compiled_y, y)]
    return max(relative_error(compiled_y, y), relative_error(*gradients))


@torch.no_grad()
def exports(subject: Subject) -> float:
    """Outputs of the program from torch.export equal those of eager mode."""
    mixer, x = subject.mixer(), subject.x()[:, :COMPILED_T]
    program = torch.export.export(mixer, (x,), strict=False)
    return relative_error(program.module()(x)[0], mixer(x)[0])


@torch.no_grad()
def rolls_back(subject: Subject) -> float:
    """After a rollback to a snapshot, outputs do not depend on the tokens between snapshot and rollback."""
    mixer, x = subject.mixer(), subject.x()
    _, state, _ = mixer(x[:, :9], mixer.init_state(2, CAPACITY))
    saved = snapshot(state)
    _, state, _ = mixer(x[:, :3], state)
    if all(torch.equal(a, b) for a, b in zip(tree_leaves(state), tree_leaves(saved), strict=True)):
        return float("inf")  # the state does not depend on the tokens
    return relative_error(mixer(x[:, 9:], rollback_(state, saved))[0], mixer(x)[0][:, 9:])


@torch.no_grad()
def verifies(subject: Subject) -> float:
    """Outputs of drafted and later tokens equal those of one call; each row accepts some tokens, or none.

    Steps with drafts follow each other and steps without; each row is thus at another token.
    """
    mixer, x = subject.mixer(), subject.x()
    expected, state = mixer(x)[0], mixer(x[:, :1], mixer.init_state(2, CAPACITY)).state
    rows, seen = torch.arange(2)[:, None], torch.ones(2, dtype=torch.int64)
    values, references = [], []
    for accepted in ((3, 0), (1, 3), None, (0, 2), (2, 1), None, (3, 3), (0, 0), None, None):
        T = 1 if accepted is None else 3
        index = seen[:, None] + torch.arange(T)
        count = torch.tensor([1, 1] if accepted is None else accepted)
        is_accepted = torch.arange(T) < count[:, None]
        tokens = torch.where(is_accepted[..., None], x[rows, index], -x[rows, index].flip(0))
        y, new, _ = mixer(tokens, state, Context(verify=accepted is not None))
        if accepted is None:
            state = new
        else:
            mixer.commit_(new, state, count.int())
        values.append(y[is_accepted])
        references.append(expected[rows, index][is_accepted])
        seen += count
    return relative_error(torch.cat(values), torch.cat(references))


@torch.no_grad()
def initialises(subject: Subject) -> float:
    """After the meta device and `to_empty`, `init_weights` draws bitwise the weights of an ordinary build.

    Raises: TypeError, if a submodule has parameters or buffers but no `reset_parameters`.
    """
    torch.manual_seed(0)
    expected = _tensors(subject.config.build(subject.width, LATER_PLACE, subject.backend))
    with torch.device("meta"):
        mixer = subject.config.build(subject.width, LATER_PLACE, subject.backend)
    mixer.to_empty(device="cpu")
    tensors = _tensors(mixer)
    for tensor in tensors.values():
        tensor.fill_(77)  # a value that no initialisation sets
    torch.manual_seed(0)
    mixer.init_weights()
    equal = tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)
    return 0.0 if equal else float("inf")


# Name of each property: the function that returns its relative error, and the bound of that error.
PROPERTIES: dict[str, tuple[Callable[[Subject], float], float]] = {
    "train": (trains, EXACT),
    "prefill in pieces": (prefills_in_pieces, EXACT),
    "decode": (decodes, EXACT),
    "packed": (packs, EXACT),
    "packed pieces": (continues_packs, EXACT),
    "shapes": (keeps_shapes, EXACT),
    "operands": (passes_valid_operands, EXACT),
    "padded": (pads, EXACT),
    "causal, isolated": (is_causal_and_isolated, EXACT),
    "bf16 autocast": (runs_in_bfloat16, ROUNDED),
    "fullgraph": (is_one_graph, EXACT),
    "export": (exports, EXACT),
    "rollback": (rolls_back, EXACT),
    "verify": (verifies, EXACT),
    "init_weights": (initialises, EXACT),
}


def error(config: MixerConfig, name: str, width: int = 16, backend: str | Backend | None = None) -> float:
    """Return the relative error of one property.

    Args: backend: None: the chunk-parallel backend in plain PyTorch, without torch.compile.
    Raises: UnknownNameError.
    """
    if name not in PROPERTIES:
        raise UnknownNameError("property", name, PROPERTIES)
    chosen = CompileBackend(chunk=16, compiled=False) if backend is None else backend
    return PROPERTIES[name][0](Subject(config, width, chosen))


class Result(NamedTuple):
    """One property of a mixer: its relative error, None if it raised an exception, and a sentence unless it holds."""

    name: str
    error: float | None
    bound: float
    failure: str = ""


def check(config: MixerConfig, width: int = 16, backend: str | Backend | None = None) -> Iterator[Result]:
    """Yield the result of each property. Args: as of `error`."""
    for name, (_, bound) in PROPERTIES.items():
        try:
            measured = error(config, name, width, backend)
        except Exception as failure:
            yield Result(name, None, bound, f"{name}: {_claim(name)} {type(failure).__name__}: {failure}")
        else:
            yield Result(name, measured, bound, "" if measured <= bound else _failure(name, measured))


def _failure(name: str, measured: float) -> str:
    return f"{name}: the relative error is {measured:.1e}, more than {PROPERTIES[name][1]:.0e}. {_claim(name)}"


def _claim(name: str) -> str:
    """Return the first sentence about a property."""
    return " ".join((PROPERTIES[name][0].__doc__ or "").partition("\n\n")[0].split())


def suite(
    config: MixerConfig, width: int = 16, backend: str | Backend | None = None, without: Sequence[str] = ()
) -> Callable[..., None]:
    """Create a pytest test of a mixer, parametrised by property.

    Args: width: D of the mixer; backend: as for `error`; without: names of properties to skip.
    Raises: UnknownNameError.
    """
    import pytest

    for name in without:
        if name not in PROPERTIES:
            raise UnknownNameError("property", name, PROPERTIES)

    @pytest.mark.parametrize("name", [name for name in PROPERTIES if name not in without])
    def test_conformance(name: str) -> None:
        measured = error(config, name, width, backend)
        assert measured <= PROPERTIES[name][1], _failure(name, measured)

    return test_conformance


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Return |value - expected| / |expected|."""
    return float(((value.double() - expected.double()).norm() / expected.double().norm()).detach())


def _tensors(mixer: Mixer) -> dict[str, Tensor]:
    return {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}


def _gradients(mixer: Mixer, y: Tensor, x: Tensor) -> Tensor:
    """Return the gradients of all parameters as one vector."""
    gradients = torch.autograd.grad((y * x).sum(), list(mixer.parameters()), allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def _run_pieces(mixer: Mixer, x: Tensor, pieces: list[int]) -> Tensor:
    """Process x piece by piece, from an empty state."""
    state: Any = mixer.init_state(x.shape[0], CAPACITY)
    outputs = []
    for piece in x.split(pieces, 1):
        y, state, _ = mixer(piece, state)
        outputs.append(y)
    return torch.cat(outputs, 1)
