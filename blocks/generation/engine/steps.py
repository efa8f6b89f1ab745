"""The calls of the model on the rows of a pool: captured in CUDA graphs, compiled, or eager.

T tokens of a step's pieces, N pieces
"""

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from deltazoo.backends.torch_ext.cuda_graph import capture, eager_if_refused
from deltazoo.blocks.generation.decoder import Buffers, Decoder
from deltazoo.blocks.generation.drafted_pass import Pass
from deltazoo.blocks.generation.engine.pool import Pool
from deltazoo.blocks.generation.engine.row_sampling import DrawKind, Drawn, draw
from deltazoo.blocks.generation.fingerprint import runs_python_code
from deltazoo.blocks.model.interface import TokenModel
from deltazoo.mixers.core.mixer import Context
from deltazoo.mixers.core.state import overwrite_, rollback_, snapshot

_LEAST_TOKENS = 64  # of the pieces of a step whose sizes are rounded up


class Steps:
    """The calls of the model on a pool: captured in CUDA graphs, compiled, or eager."""

    def __init__(self, model: TokenModel, step_tokens: int, compile: bool) -> None:
        self._model, self._compile = model, compile
        self._captures = model.device.type == "cuda" and not runs_python_code(model)
        self._token_sizes = step_sizes(min(_LEAST_TOKENS, step_tokens), step_tokens)
        self._decoders: dict[int, Decoder] = {}
        self._readers: dict[tuple[int, int], tuple[Tensor, Callable[[], object]]] = {}
        self._passes: dict[int, Pass] = {}
        self._draws: dict[tuple[Pool, int, DrawKind, int], tuple[Callable[[], object], list[Drawn]]] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    def decode(self, pool: Pool) -> None:
        """Read the next token of each row, and write the logits."""
        self._decoder(pool, pool.width).step()

    def verify(self, pool: Pool) -> None:
        """Draft tokens after the next one of each row, read them, and write the logits of the pass."""
        self._pass(pool, pool.width).verify()

    def commit(self, pool: Pool) -> None:
        """Advance the states by the accepted tokens of the pass."""
        self._pass(pool, pool.width).commit()

    def read(self, pool: Pool, pieces: list[Tensor]) -> None:
        """Read a piece of a prompt per row, which may be empty; write the logits of their last tokens."""
        N, T = pool.width, sum(map(len, pieces))
        if self._captures:
            T = next(size for size in self._token_sizes if size >= T)
        host = _pack(pieces, N, T)
        if not self._captures:
            _read(self._model, pool.buffers(N), host.to(self._model.device), T)
            return
        packed, run = self._reader(pool, N, T)
        packed.copy_(host.pin_memory(), non_blocking=True)
        run()

    def draw(self, pool: Pool, kind: DrawKind, drafted: int = 0) -> Drawn:
        """Draw a token per row, or those of a pass with drafts."""
        if not self._captures:
            return draw(pool.draw_buffers(pool.width, drafted), kind)
        key = pool, pool.width, kind, drafted
        replay, result = self._draw(*key)
        replay()
        return result[-1]

    def warm_up_decoding(self, pool: Pool) -> None:
        """Make the decoders and passes of all sizes, and the usual draws."""
        for rows in pool.sizes or ():
            self._decoder(pool, rows)
            self._warm_up_draws(pool, rows, 0)
            if drafted := pool.drafted(rows):
                self._pass(pool, rows)
                self._warm_up_draws(pool, rows, drafted)

    def warm_up_reading(self, pool: Pool) -> None:
        """Make the graphs of pieces of all sizes, and the usual draws."""
        if self._captures:
            for rows, tokens in itertools.product(pool.sizes or (), self._token_sizes):
                self._reader(pool, rows, tokens)
            for rows in pool.sizes or ():
                self._warm_up_draws(pool, rows, 0)

    def _warm_up_draws(self, pool: Pool, rows: int, drafted: int) -> None:
        """Make the draws of requests without penalties and log-probabilities: greedy, sampled, and with filters."""
        if self._captures:
            for kind in (DrawKind(), DrawKind(samples=True), DrawKind(samples=True, filters=True)):
                self._draw(pool, rows, kind, drafted)

    def _decoder(self, pool: Pool, rows: int) -> Decoder:
        if rows not in self._decoders:
            decoder = Decoder(self._model, rows, pool.capacity, self._compile, pool.buffers(rows))
            if self._captures:
                with eager_if_refused("the decoding step"):
                    decoder.capture()
            elif self._compile:
                decoder.warm_up()
            self._decoders[rows] = decoder
        return self._decoders[rows]

    def _pass(self, pool: Pool, rows: int) -> Pass:
        if rows not in self._passes:
            on_cuda = self._model.device.type == "cuda"
            layers = self._decoder(pool, rows).layers if self._compile and on_cuda else None
            model = self._model  # a reference to `self` would be a cycle, which delays the release of the graphs
            passes = Pass(lambda: model, pool.pass_buffers(rows), self._compile, layers)
            if self._captures:
                passes.capture(self._memory)
            elif self._compile:
                passes.warm_up()
            self._passes[rows] = passes
        return self._passes[rows]

    def _draw(self, pool: Pool, rows: int, kind: DrawKind, drafted: int) -> tuple[Callable[[], object], list[Drawn]]:
        """Capture a draw in a CUDA graph. The tensors that the warm-up changes are restored."""
        key = pool, rows, kind, drafted
        if key not in self._draws:
            buffers, result = pool.draw_buffers(rows, drafted), list[Drawn]()
            changed = [buffers.tokens, buffers.seen, *(buffers.text or ())]
            before = snapshot(changed)
            replay = capture(lambda: result.append(draw(buffers, kind)), buffers.tokens.device, self._memory)
            rollback_(changed, before)
            self._draws[key] = replay, result[-1:]
        return self._draws[key]

    def _reader(self, pool: Pool, rows: int, tokens: int) -> tuple[Tensor, Callable[[], object]]:
        """Capture the reading of pieces of T tokens in all. The warm-up has empty pieces, which leave the states."""
        key = rows, tokens
        if key not in self._readers:
            packed = _pack([], rows, tokens).to(self._model.device)
            run = functools.partial(_read, self._model, pool.buffers(rows), packed, tokens)
            replay: Callable[[], object] = run
            with eager_if_refused("the prefill"):
                replay = capture(run, packed.device, self._memory)
            self._readers[key] = packed, replay
        return self._readers[key]


def _pack(pieces: list[Tensor], rows: int, tokens: int) -> Tensor:
    """Return pieces [T], their bounds [N + 1] and the indices of their last tokens [N] as one int64 tensor."""
    packed = torch.zeros(tokens + 2 * rows + 1, dtype=torch.int64, device="cpu")
    start = 0
    for row, piece in enumerate(pieces):
        packed[start : start + len(piece)] = piece
        start += len(piece)
        packed[tokens + row + 1] = start
    packed[tokens + len(pieces) + 1 : tokens + rows + 1] = start
    packed[tokens + rows + 1 :] = (packed[tokens + 1 : tokens + rows + 1] - 1).clamp(min=0)
    return packed


def _read(model: TokenModel, buffers: Buffers, packed: Tensor, tokens: int) -> None:
    """Read packed pieces; the logits of an empty one mean nothing."""
    rows = len(buffers.tokens)
    bounds, last = packed[tokens : tokens + rows + 1].int(), packed[tokens + rows + 1 :]
    x_1TD, state = model.features(packed[None, :tokens], buffers.state, Context(cu_seqlens=bounds))
    overwrite_(buffers.state, state)
    buffers.logits.copy_(model.logits(x_1TD[0, last]))


def step_sizes(least: int, most: int, halves: bool = True) -> list[int]:
    """Return the sizes that steps are rounded up to: `least` times powers of two below `most`, and `most`.

    Args: halves: from 4 `least` on also the sizes half-way between.
    """
    sizes, size = list[int](), least
    while size < most:
        sizes += [size, size * 3 // 2] if halves and size >= 4 * least else [size]
        size *= 2
    return [*(size for size in sizes if size < most), most]
