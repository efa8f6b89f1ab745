"""A model of barriers: python barriers.py counts how many random interleavings of a kernel's warp groups hang.

An mbarrier tells the phase that ended last from the one before it, by parity, and no more: who waits for a phase after
the next one has ended waits for ever. The two groups that compute walk in step, and are one here. Each model says
where its kernel waits and tells, and asserts that what it reads is what was copied for it.
"""

import random


class Barrier:
    def __init__(self):
        self.ended = 0

    def arrive(self):
        self.ended += 1

    def wait(self, parity):
        while self.ended & 1 == parity:
            yield "waits"


class Walk:
    """hopper/sweep.py. early: the copying group waits for the chunk before to be released before it loads the states
    of this one."""

    def __init__(self, chunks, early=True):
        self.chunks, self.early = chunks, early
        self.came, self.rest_came = [Barrier(), Barrier()], [Barrier(), Barrier()]
        self.states_came, self.done, self.walked = Barrier(), Barrier(), Barrier()
        self.buffers, self.states = [None, None], None

    def fill(self, stage, chunk):
        self.buffers[stage] = chunk
        yield
        self.came[stage].arrive()
        yield
        self.rest_came[stage].arrive()
        yield

    def copies(self):
        yield from self.fill(0, self.chunks - 1)
        for back in range(self.chunks):
            chunk = self.chunks - 1 - back
            yield from self.walked.wait((back & 1) ^ 1)
            self.states = chunk
            yield
            if self.early:
                yield from self.done.wait((back & 1) ^ 1)
            self.states_came.arrive()
            yield
            if not self.early:
                yield from self.done.wait((back & 1) ^ 1)
            if chunk > 0:
                yield from self.fill(1 - back % 2, chunk - 1)

    def computes(self):
        stage = phase = 0
        for chunk in reversed(range(self.chunks)):
            yield from self.came[stage].wait(phase)
            assert self.buffers[stage] == chunk
            yield from self.rest_came[stage].wait(phase)
            yield from self.states_came.wait(stage)
            yield
            assert self.states == chunk
            self.walked.arrive()
            yield
            assert self.buffers[stage] == chunk
            self.done.arrive()
            yield
            phase ^= stage
            stage ^= 1


class ReplayAndWalk(Walk):
    """hopper/fused_backward.py: segments of `every`. One barrier per buffer, or one for both."""

    def __init__(self, chunks, every, apart=True):
        super().__init__(chunks)
        self.every, self.replayed = every, Barrier()
        self.done = [Barrier(), Barrier()] if apart else [self.done] * 2
        self.apart = apart

    def free_again(self, filled):
        """When the buffer of the fill before the last is done with."""
        parity = (filled // 2 & 1) ^ 1 if self.apart else filled & 1
        if self.apart or filled > 1:
            yield from self.done[filled % 2].wait(parity)

    def copies(self):
        filled = turned = gone = 0
        end = self.chunks
        while end > 0:
            begin = (end - 1) // self.every * self.every
            for chunk in range(begin, end):
                yield from self.free_again(filled)
                yield from self.fill(filled % 2, ("replay", chunk))
                filled += 1
            for back in range(end - begin + 1):
                chunk = end - 1 - back
                if back > 0:
                    if back == 1:
                        yield from self.replayed.wait(turned & 1)
                    yield from self.walked.wait((gone & 1) ^ 1)
                    self.states = chunk + 1
                    yield
                    self.states_came.arrive()
                    gone += 1
                    yield
                if chunk >= begin:
                    yield from self.free_again(filled)
                    yield from self.fill(filled % 2, ("walk", chunk))
                    filled += 1
            turned += 1
            end = begin

    def computes(self):
        stage = phase = odd = 0
        end = self.chunks
        while end > 0:
            begin = (end - 1) // self.every * self.every
            self.states = "parked"  # the gradient of the state, where no state is until the replay is over
            for chunk in range(begin, end):
                yield from self.came[stage].wait(phase)
                assert self.buffers[stage] == ("replay", chunk)
                yield from self.rest_came[stage].wait(phase)
                yield
                assert self.states == "parked"
                assert self.buffers[stage] == ("replay", chunk)
                self.done[stage].arrive()
                yield
                phase ^= stage
                stage ^= 1
            self.replayed.arrive()
            yield
            for chunk in reversed(range(begin, end)):
                yield from self.came[stage].wait(phase)
                assert self.buffers[stage] == ("walk", chunk)
                yield from self.rest_came[stage].wait(phase)
                yield from self.states_came.wait(odd)
                yield
                assert self.states == chunk
                self.walked.arrive()
                yield
                assert self.buffers[stage] == ("walk", chunk)
                self.done[stage].arrive()
                yield
                phase ^= stage
                stage ^= 1
                odd ^= 1
            end = begin


def hangs(kernel, seed):
    choose = random.Random(seed)
    groups, idle = [kernel.copies(), kernel.computes()], 0
    while groups and idle < 500:
        group = choose.choice(groups)
        try:
            idle = idle + 1 if next(group) == "waits" else 0
        except StopIteration:
            groups.remove(group)
    return bool(groups)


def count(what, kernels):
    tries = [hangs(kernel, seed) for seed, kernel in enumerate(kernels)]
    print(f"{what}: {sum(tries)} of {len(tries)} hang")


if __name__ == "__main__":
    for early in (False, True):
        kernels = (Walk(chunks, early) for chunks in range(1, 30) for _ in range(200))
        count(f"walk, waits {'before' if early else 'after'} telling", kernels)
    for apart in (False, True):
        kernels = (ReplayAndWalk(n, every, apart) for n in range(1, 40) for every in (1, 2, 8, 16) for _ in range(30))
        count(f"replay and walk, {'a barrier a buffer' if apart else 'one barrier for both'}", kernels)
