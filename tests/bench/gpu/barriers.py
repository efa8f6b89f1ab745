"""A model of mbarriers: python barriers.py counts the random interleavings of a kernel's warp groups that deadlock.

A wait on an mbarrier distinguishes only the last completed phase from the one before it, by parity: a thread that waits
for a phase after the next one has completed waits for ever. The two consumer warp groups run in lockstep and are one
generator here. Each model states where its kernel waits and arrives, and asserts that it reads the chunk it expects.
"""

import random


class Barrier:
    def __init__(self):
        self.phases = 0

    def arrive(self):
        self.phases += 1

    def wait(self, parity):
        while self.phases & 1 == parity:
            yield "waits"


class Sweep:
    """hopper/sweep.py. early: the producer waits for the release of the previous chunk before it loads states."""

    def __init__(self, chunks, early=True):
        self.chunks, self.early = chunks, early
        self.full, self.rest_full = [Barrier(), Barrier()], [Barrier(), Barrier()]
        self.states_full, self.empty, self.states_empty = Barrier(), Barrier(), Barrier()
        self.buffers, self.states = [None, None], None

    def fill(self, stage, chunk):
        self.buffers[stage] = chunk
        yield
        self.full[stage].arrive()
        yield
        self.rest_full[stage].arrive()
        yield

    def producer(self):
        yield from self.fill(0, self.chunks - 1)
        for back in range(self.chunks):
            chunk = self.chunks - 1 - back
            yield from self.states_empty.wait((back & 1) ^ 1)
            self.states = chunk
            yield
            if self.early:
                yield from self.empty.wait((back & 1) ^ 1)
            self.states_full.arrive()
            yield
            if not self.early:
                yield from self.empty.wait((back & 1) ^ 1)
            if chunk > 0:
                yield from self.fill(1 - back % 2, chunk - 1)

    def consumer(self):
        stage = phase = 0
        for chunk in reversed(range(self.chunks)):
            yield from self.full[stage].wait(phase)
            assert self.buffers[stage] == chunk
            yield from self.rest_full[stage].wait(phase)
            yield from self.states_full.wait(stage)
            yield
            assert self.states == chunk
            self.states_empty.arrive()
            yield
            assert self.buffers[stage] == chunk
            self.empty.arrive()
            yield
            phase ^= stage
            stage ^= 1


class FusedBackward(Sweep):
    """hopper/fused_backward.py: windows of `every` chunks. An empty barrier per buffer, or one for both buffers."""

    def __init__(self, chunks, every, apart=True):
        super().__init__(chunks)
        self.every, self.recomputed = every, Barrier()
        self.empty = [Barrier(), Barrier()] if apart else [self.empty] * 2
        self.apart = apart

    def acquire(self, filled):
        """Wait until the consumer has released the buffer of the fill before last."""
        parity = (filled // 2 & 1) ^ 1 if self.apart else filled & 1
        if self.apart or filled > 1:
            yield from self.empty[filled % 2].wait(parity)

    def producer(self):
        filled = windows = loaded = 0
        end = self.chunks
        while end > 0:
            begin = (end - 1) // self.every * self.every
            for chunk in range(begin, end):
                yield from self.acquire(filled)
                yield from self.fill(filled % 2, ("recompute", chunk))
                filled += 1
            for back in range(end - begin + 1):
                chunk = end - 1 - back
                if back > 0:
                    if back == 1:
                        yield from self.recomputed.wait(windows & 1)
                    yield from self.states_empty.wait((loaded & 1) ^ 1)
                    self.states = chunk + 1
                    yield
                    self.states_full.arrive()
                    loaded += 1
                    yield
                if chunk >= begin:
                    yield from self.acquire(filled)
                    yield from self.fill(filled % 2, ("sweep", chunk))
                    filled += 1
            windows += 1
            end = begin

    def consumer(self):
        stage = phase = odd = 0
        end = self.chunks
        while end > 0:
            begin = (end - 1) // self.every * self.every
            self.states = "parked"  # the buffer holds the gradient of the state until the recomputation is over
            for chunk in range(begin, end):
                yield from self.full[stage].wait(phase)
                assert self.buffers[stage] == ("recompute", chunk)
                yield from self.rest_full[stage].wait(phase)
                yield
                assert self.states == "parked"
                assert self.buffers[stage] == ("recompute", chunk)
                self.empty[stage].arrive()
                yield
                phase ^= stage
                stage ^= 1
            self.recomputed.arrive()
            yield
            for chunk in reversed(range(begin, end)):
                yield from self.full[stage].wait(phase)
                assert self.buffers[stage] == ("sweep", chunk)
                yield from self.rest_full[stage].wait(phase)
                yield from self.states_full.wait(odd)
                yield
                assert self.states == chunk
                self.states_empty.arrive()
                yield
                assert self.buffers[stage] == ("sweep", chunk)
                self.empty[stage].arrive()
                yield
                phase ^= stage
                stage ^= 1
                odd ^= 1
            end = begin


def deadlocks(kernel, seed):
    choose = random.Random(seed)
    groups, idle = [kernel.producer(), kernel.consumer()], 0
    while groups and idle < 500:
        group = choose.choice(groups)
        try:
            idle = idle + 1 if next(group) == "waits" else 0
        except StopIteration:
            groups.remove(group)
    return bool(groups)


def count(name, kernels):
    tries = [deadlocks(kernel, seed) for seed, kernel in enumerate(kernels)]
    print(f"{name}: {sum(tries)} of {len(tries)} deadlock")


if __name__ == "__main__":
    for early in (False, True):
        kernels = (Sweep(chunks, early) for chunks in range(1, 30) for _ in range(200))
        count(f"sweep, waits {'before' if early else 'after'} it arrives", kernels)
    for apart in (False, True):
        kernels = (FusedBackward(n, every, apart) for n in range(1, 40) for every in (1, 2, 8, 16) for _ in range(30))
        count(f"fused backward, {'a barrier per buffer' if apart else 'one barrier for both buffers'}", kernels)
