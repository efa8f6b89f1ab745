"""The engine: many requests in one pool of states, prompts in pieces beside decoding rows, reuse of prefixes.

T tokens of a step's pieces, N pieces, L vocabulary
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, StateError, ValueRangeError
from deltazoo.backends.update.check import check_integer, check_type
from deltazoo.blocks.generation.engine.flight import Flight
from deltazoo.blocks.generation.engine.job import Job
from deltazoo.blocks.generation.engine.pages import row_states
from deltazoo.blocks.generation.engine.pool import Pool, grant_pages
from deltazoo.blocks.generation.engine.prefix_tree import PrefixTree, default_limit
from deltazoo.blocks.generation.engine.request import (
    Continuation,
    Event,
    Reason,
    Request,
    TextCodec,
    TokenLogprobs,
    check_prompt,
    check_sampling,
)
from deltazoo.blocks.generation.engine.row_sampling import NOT_FINITE, DrawKind
from deltazoo.blocks.generation.engine.steps import Steps, step_sizes
from deltazoo.blocks.generation.sampling import Sampling
from deltazoo.blocks.model.interface import TokenModel, check_model

_MOST_PIECES = 8  # prompts that are read at the same time
_MOST_CANDIDATES = 256  # waiting requests that a step considers


class EngineCounts(NamedTuple):
    """Counters of an engine.

    steps: calls of `step`. read, reused: prompt tokens that were read, and those whose state a snapshot had. passes:
    passes with drafts, counted per request; passed: tokens that they yielded.
    """

    steps: int = 0
    read: int = 0
    reused: int = 0
    passes: int = 0
    passed: int = 0

    @property
    def tokens_per_pass(self) -> float | None:
        """Mean number of tokens of a pass with drafts, from 1 to 1 + the number of drafts; None without passes."""
        return self.passed / self.passes if self.passes else None


class Engine:
    """Continue many requests at once: `submit` them, and iterate over the events, or call `step`.

    A step reads pieces of prompts, packed, and then decodes one token of each request whose prompt it has read.
    Requests join and leave between steps. The tokens of a request do not depend on the others, up to rounding.

    On CUDA the steps are captured in CUDA graphs, one for each of a few sizes, unless the model runs Python code of
    hooks, and the device is one step ahead of the host. The model must not change while the engine exists.

    Args:
        model: its state has one row per slot.
        slots: maximum number of requests that are in progress; others wait.
        step_tokens: maximum number of tokens that a step reads, of prompts and of decoding rows; None: 2048, or more if
            the decoding rows alone can exceed it.
        cache_tokens: number of tokens that the caches of attention hold for all requests and snapshots, in pages of 64,
            which a request reserves before its prompt is read; None: for models without such caches.
        prefix_bytes: memory for snapshots of states after prefixes of prompts, which other prompts reuse; 0: none are
            kept; None: an eighth of the memory of a CUDA device, 256 MiB elsewhere.
        compile: compile the decoding step for each of its sizes, as `Decoder` does.
        speculate: number of tokens that a decoding step drafts for each request by prompt lookup, and verifies in one
            pass with the next one (`deltazoo.blocks.generation.speculation`); 0: none. Each request advances by its own
            number of accepted drafts. Steps of many requests have no drafts. A request reserves this many more tokens
            in the caches.
    Raises: InputError or a subclass; StateError: the model needs `cache_tokens`.
    """

    def __init__(
        self,
        model: TokenModel,
        slots: int = 64,
        step_tokens: int | None = None,
        cache_tokens: int | None = None,
        prefix_bytes: int | None = None,
        compile: bool = False,
        speculate: int = 0,
    ) -> None:
        check_model(model)
        check_integer("slots", slots)
        check_integer("speculate", speculate, 0)
        step_tokens = max(2048, slots * (2 + speculate)) if step_tokens is None else step_tokens
        check_integer("step_tokens", step_tokens)
        if step_tokens <= slots * (1 + speculate):
            drafts = f" * {1 + speculate} tokens of a pass" if speculate else ""
            raise ValueRangeError(f"step_tokens must be above slots = {slots}{drafts}, got {step_tokens}")
        self.model, self.step_tokens, self.speculate = model, step_tokens, speculate
        states = row_states(model, cache_tokens, slots)
        self.capacity, self.pages = states.longest, states.pages
        on_cuda = model.device.type == "cuda"
        sizes = step_sizes(1, slots, halves=not compile) if on_cuda or compile else None
        self._decoding = Pool(model, slots, states, sizes, speculate)
        pieces = min(slots, _MOST_PIECES)
        self._reading = Pool(model, pieces, states, step_sizes(1, pieces, False) if on_cuda else None, speculate)
        limit = default_limit(model.device) if prefix_bytes is None else prefix_bytes
        has_space = limit >= self._reading.row_bytes
        self.prefixes = PrefixTree(limit, self.pages, states.page_bytes) if has_space else None
        self.counts = EngineCounts()
        self._steps = Steps(model, step_tokens, compile)
        self._codec = TextCodec.of(model)
        self._waiting: deque[Job] = deque()
        self._numbers = itertools.count()
        self._in_flight: deque[Flight] = deque()
        self._is_ahead = on_cuda  # whether the host launches a step before it has the tokens of the one before
        self._events: list[Event] = []
        self._open: set[Request] = set()  # requests that have not ended

    @property
    def slots(self) -> int:
        """The maximum number of requests in progress."""
        return self._decoding.rows

    @property
    def pending(self) -> int:
        """The number of requests that have not ended."""
        return len(self._open)

    def submit(self, prompt: str | Sequence[int] | Tensor, sampling: Sampling | None = None) -> Request:
        """Queue a request.

        Args:
            prompt: tokens, or text if the model has a tokenizer or is one of bytes.
            sampling: None: the defaults of `Sampling`.
        Raises: InputError or a subclass; ConfigError: the model has no text; StateError: prompt and continuation exceed
            the share of a slot in the caches.
        """
        check_type("sampling", sampling, Sampling | None, "a Sampling or None")
        sampling = sampling or Sampling()
        tokens, vocab = self._tokens(prompt), self.model.spec.vocab
        check_prompt(tokens, vocab)
        check_sampling(sampling, self._codec, vocab)
        longest = len(tokens) + sampling.max_tokens - 1 + self.speculate  # the last token is not read
        if self.capacity is not None and longest > self.capacity:
            drafts = f", and {self.speculate} drafted ones" if self.speculate else ""
            raise StateError(
                f"the caches hold at most {self.capacity} tokens of a request, but it needs {longest}: "
                f"{len(tokens)} of the prompt and {sampling.max_tokens} new ones, the last of which is not read{drafts}"
            )
        seed = sampling.seed if isinstance(sampling.seed, int) else int(torch.randint(2**63 - 1, ()))
        request = Request(tokens, sampling)
        continuation = Continuation(request, self._codec, isinstance(prompt, str), vocab)
        prompt_T = torch.tensor(tokens, device="cpu")
        kind = DrawKind.of(sampling)
        job = Job(request, continuation, next(self._numbers), prompt_T, seed, longest, kind)
        if self.prefixes is not None:
            job.node = self.prefixes.insert(prompt_T)
        self._waiting.append(job)
        self._open.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request with the tokens that have arrived. It frees its slot at the next step."""
        if request in self._open:
            self._end(request, "cancelled")
            self._drop_from_queue()

    def __iter__(self) -> Iterator[Event]:
        """Call `step` until no request is left, and yield the events."""
        while self.pending or self._events:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Read pieces of prompts, decode a token of each running request, and return the events since the last call.

        If it raises an error, the requests whose states may be damaged end with that error. The others continue with
        the next step.
        """
        earlier = len(self._in_flight)
        self._release_ended()
        with self._ending_on_error(self._reading.jobs):
            self._admit()
            if len(self._reading):
                self._read_pieces()
        if len(self._decoding):
            with self._ending_on_error(self._decoding.jobs):
                self._decode_rows()
        self.counts = self.counts._replace(steps=self.counts.steps + 1)
        launched = len(self._in_flight) > earlier
        for _ in range(earlier if self._is_ahead and launched else len(self._in_flight)):
            flight = self._in_flight.popleft()
            with self._ending_on_error([job for job in flight.jobs if job is not None]):
                self._collect(flight)
        events, self._events = self._events, []
        return events

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile and capture the steps of all sizes, which otherwise happens when they first occur."""
        for pool, run in ((self._reading, self._steps.warm_up_reading), (self._decoding, self._steps.warm_up_decoding)):
            if len(pool):
                raise StateError(f"warm_up needs an engine without requests in progress, got {len(pool)}")
            run(pool)

    def _tokens(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            if self._codec is None:
                raise ConfigError(f"a prompt of text needs a vocabulary of bytes or a tokenizer, got {prompt!r:.80}")
            return self._codec.encode(prompt)
        if isinstance(prompt, Tensor):
            if prompt.dim() != 1 or prompt.is_floating_point():
                raise ValueRangeError(f"a prompt must be integers [T], got {prompt.dtype} {list(prompt.shape)}")
            return [int(token) for token in prompt.tolist()]
        check_type("prompt", prompt, Sequence, "text, or a sequence of tokens")
        return list(prompt)  # type: ignore[call-overload]

    def _release_ended(self) -> None:
        """Free the rows of requests that have ended or need no further step."""
        for pool in (self._reading, self._decoding):
            for row in reversed(range(len(pool))):
                if pool.jobs[row].request.done or pool.jobs[row].has_drawn_all:
                    self._forget(pool.leave(row))

    def _drop_from_queue(self) -> None:
        """Drop requests that have ended before they had a slot."""
        for job in [job for job in self._waiting if job.request.done]:
            self._waiting.remove(job)
            self._forget(job)

    def _end(self, request: Request, reason: Reason, error: BaseException | None = None) -> None:
        request.end(reason, error)
        self._record(Event(request))

    def _record(self, event: Event) -> None:
        self._events.append(event)
        if event.done:
            self._open.discard(event.request)

    def _forget(self, job: Job) -> None:
        if self.pages is not None:
            self.pages.release(job.pages)
            job.pages = []
        if self.prefixes is not None and job.node is not None:
            self.prefixes.release(job.node)
            job.node = None

    def _admit(self) -> None:
        """Start to read the prompts of waiting requests, oldest first, while slots and pages are free.

        A request waits while another one reads a prefix that both share. A request that waits for pages blocks later
        ones, which could otherwise starve it.
        """
        reading, decoding = self._reading, self._decoding
        for job in list(itertools.islice(self._waiting, _MOST_CANDIDATES)):
            if reading.is_full or len(reading) + len(decoding) >= decoding.rows:
                return
            snapshot = None
            if self.prefixes is not None and job.node is not None:
                readers = [(other.node, other.read) for other in reading.jobs if other.node is not None]
                if self.prefixes.must_wait(job.node, readers):
                    continue
                snapshot = self.prefixes.find(job.node)
            if self.pages is not None and not grant_pages(job, snapshot, self.pages, self.prefixes):
                return
            reading.join(job, snapshot)
            self._waiting.remove(job)
            job.request.reused = job.read
            self.counts = self.counts._replace(reused=self.counts.reused + job.read)

    def _read_pieces(self) -> None:
        """Read a piece of each prompt within the budget, and draw the first token where it was the last piece."""
        pool = self._reading
        decoding = self._decoding
        per_row = 1 + decoding.drafted(decoding.width)  # or fewer with more rows
        budget = self.step_tokens - len(decoding) * per_row
        pieces = [pool.jobs[0].prompt[:0]] * len(pool)
        for row in sorted(range(len(pool)), key=lambda row: pool.jobs[row].number):
            job = pool.jobs[row]
            end = len(job.prompt)
            if self.prefixes is not None and job.node is not None:
                end = self.prefixes.boundary(job.node, job.read)
            if end == len(job.prompt):  # the step then decodes its row, too
                if end - job.read + per_row <= budget:
                    budget -= per_row
                else:
                    end -= 1
            pieces[row] = job.prompt[job.read : min(end, job.read + budget)]
            budget -= len(pieces[row])
        self._steps.read(pool, pieces)
        complete: list[Job | None] = [None] * len(pool)
        for row, job in enumerate(pool.jobs):
            job.read += len(pieces[row])
            if job.read == len(job.prompt):
                complete[row] = job
                pool.begin_draws(row)
            tree, node = self.prefixes, job.node
            if tree is not None and node is not None and len(pieces[row]) and tree.wants(node, job.read):
                tree.store(node, pool.snapshot(row))
        self.counts = self.counts._replace(read=self.counts.read + sum(map(len, pieces)))
        if not any(complete):
            return
        self._draw(pool, complete)
        for row in reversed(range(len(pool))):
            if complete[row] is None:
                continue
            if pool.jobs[row].has_drawn_all:
                self._forget(pool.leave(row))
            else:
                pool.move(row, self._decoding)

    def _decode_rows(self) -> None:
        """Decode the rows of the decoding pool: a step of the model, or a pass with drafts, and a draw."""
        pool, jobs = self._decoding, list[Job | None](self._decoding.jobs)
        drafted = pool.next_drafted()
        if not drafted:
            self._steps.decode(pool)
            self._draw(pool, jobs)
            return
        self._steps.verify(pool)
        self._draw(pool, jobs, drafted)
        self._steps.commit(pool)

    def _draw(self, pool: Pool, jobs: list[Job | None], drafted: int = 0) -> None:
        """Draw the tokens of each row, and start to copy those of the jobs to the host."""
        active = [job for job in jobs if job is not None]
        kind = DrawKind.union({job.kind for job in active})
        if kind.samples:
            pool.set_uniforms(jobs)
        drawn = self._steps.draw(pool, kind, drafted)
        for job in active:
            job.drawn += 1
        self._in_flight.append(Flight.start(jobs, drawn))

    def _collect(self, flight: Flight) -> None:
        """Give the drawn tokens to their requests."""
        has_drafts = flight.has_drafts
        for row, (job, tokens) in enumerate(zip(flight.jobs, flight.wait(), strict=False)):
            if job is None or job.request.done:
                continue
            if has_drafts:
                job.count_pass(len(tokens))
                counts = self.counts
                self.counts = counts._replace(passes=counts.passes + 1, passed=counts.passed + len(tokens))
            for place, token in enumerate(tokens):
                if not job.request.done:
                    self._append(job, token, flight.logprobs(row, place, job.request.sampling.logprobs))

    def _append(self, job: Job, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a token to a request, which may end it."""
        if token == NOT_FINITE:
            error = ValueRangeError("the logits of the request must be finite, got NaN or inf")
            self._end(job.request, "error", error)
            return
        try:
            self._record(job.continuation.append(token, logprobs))
        except Exception as error:  # of the tokenizer
            self._end(job.request, "error", error)

    @contextmanager
    def _ending_on_error(self, jobs: list[Job]) -> Iterator[None]:
        """End jobs with the error of the block, which may have left half of their states changed, or lost tokens."""
        try:
            yield
        except BaseException as error:
            for job in jobs:
                if not job.request.done:
                    self._end(job.request, "error", error)
            self._drop_from_queue()
            raise
