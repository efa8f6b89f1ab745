"""A model of the mbarriers of the backward sweep: python barriers.py counts the random interleavings that deadlock.

A wait on an mbarrier compares parities, so it cannot tell a phase from the one two phases before it: a thread that
waits for a phase after the next one has completed, too, waits forever. The two consumer warp groups run in step and are
one generator here. Barriers are named as in the kernels, and each model asserts that the consumer reads the chunk that
it expects.
"""

import random


class Barrier:
    def __init__(self):
        self.completed = 0  # phases

    def arrive(self):
        self.completed += 1

    def wait(self, parity):
        while self.completed & 1 == parity:
            yield "waits"


class Sweep:
    """hopper/sweep.py.

    release_first: the producer waits for the release of the previous chunk before it arrives on state_full, as the
    kernel does, instead of after it.
    """

    def __init__(self, chunks, release_first=True):
        self.chunks, self.release_first = chunks, release_first
        self.k_full, self.q_full = [Barrier(), Barrier()], [Barrier(), Barrier()]  # one per stage
        self.state_full, self.state_empty, self.empty = Barrier(), Barrier(), Barrier()
        self.T_low_full, self.du_empty = Barrier(), Barrier()  # with two terms
        self.buffers, self.state, self.T_low = [None, None], None, None

    def copy_chunk(self, stage, chunk):
        self.buffers[stage] = chunk
        yield
        self.k_full[stage].arrive()
        yield
        self.q_full[stage].arrive()
        yield

    def copy_low_inverse(self, parity, chunk):
        yield from self.du_empty.wait(parity)
        self.T_low = chunk
        yield
        self.T_low_full.arrive()
        yield

    def read_low_inverse(self, parity, chunk):
        self.du_empty.arrive()
        yield
        yield from self.T_low_full.wait(parity)
        assert self.T_low == chunk

    def producer(self):
        yield from self.copy_chunk(0, self.chunks - 1)
        for i in range(self.chunks):
            chunk = self.chunks - 1 - i
            yield from self.state_empty.wait((i & 1) ^ 1)
            self.state = chunk
            yield
            if self.release_first:
                yield from self.empty.wait((i & 1) ^ 1)
            self.state_full.arrive()
            yield
            yield from self.copy_low_inverse(i & 1, chunk)
            if not self.release_first:
                yield from self.empty.wait((i & 1) ^ 1)
            if chunk > 0:
                yield from self.copy_chunk(1 - i % 2, chunk - 1)

    def consumer(self):
        stage = phase = 0
        for chunk in reversed(range(self.chunks)):
            yield from self.k_full[stage].wait(phase)
            assert self.buffers[stage] == chunk
            yield from self.read_low_inverse(stage, chunk)
            yield from self.q_full[stage].wait(phase)
            yield from self.state_full.wait(stage)
            yield
            assert self.state == chunk
            self.state_empty.arrive()
            yield
            assert self.buffers[stage] == chunk
            self.empty.arrive()
            yield
            phase ^= stage
            stage ^= 1


class FusedBackward(Sweep):
    """hopper/fused_backward.py, with intervals of `every` chunks.

    per_stage: an empty barrier per stage, as in the kernel, instead of one for both stages.
    """

    def __init__(self, chunks, every, per_stage=True):
        super().__init__(chunks)
        self.every, self.per_stage, self.states_stored = every, per_stage, Barrier()
        self.empty = [Barrier(), Barrier()] if per_stage else [self.empty] * 2

    def wait_empty(self, fills):
        """Wait until the consumer has released the stage that is filled next."""
        parity = (fills // 2 & 1) ^ 1 if self.per_stage else fills & 1
        if self.per_stage or fills > 1:
            yield from self.empty[fills % 2].wait(parity)

    def producer(self):
        fills = intervals = swept = 0
        end = self.chunks
        while end > 0:
            first = (end - 1) // self.every * self.every
            for chunk in range(first, end):
                yield from self.wait_empty(fills)
                yield from self.copy_chunk(fills % 2, ("recompute", chunk))
                fills += 1
            for step in range(end - first + 1):
                chunk = end - 1 - step
                if step > 0:
                    if step == 1:
                        yield from self.states_stored.wait(intervals & 1)
                    yield from self.state_empty.wait((swept & 1) ^ 1)
                    self.state = chunk + 1
                    yield
                    self.state_full.arrive()
                    yield
                    yield from self.copy_low_inverse(swept & 1, chunk + 1)
                    swept += 1
                if chunk >= first:
                    yield from self.wait_empty(fills)
                    yield from self.copy_chunk(fills % 2, ("sweep", chunk))
                    fills += 1
            intervals += 1
            end = first

    def consumer(self):
        stage = phase = state_phase = 0
        end = self.chunks
        while end > 0:
            first = (end - 1) // self.every * self.every
            self.state = "spilled"  # the buffer holds dS while states are recomputed
            for chunk in range(first, end):
                yield from self.k_full[stage].wait(phase)
                assert self.buffers[stage] == ("recompute", chunk)
                yield from self.q_full[stage].wait(phase)
                yield
                assert self.state == "spilled"
                assert self.buffers[stage] == ("recompute", chunk)
                self.empty[stage].arrive()
                yield
                phase ^= stage
                stage ^= 1
            self.states_stored.arrive()
            yield
            for chunk in reversed(range(first, end)):
                yield from self.k_full[stage].wait(phase)
                assert self.buffers[stage] == ("sweep", chunk)
                yield from self.read_low_inverse(state_phase, chunk)
                yield from self.q_full[stage].wait(phase)
                yield from self.state_full.wait(state_phase)
                yield
                assert self.state == chunk
                self.state_empty.arrive()
                yield
                assert self.buffers[stage] == ("sweep", chunk)
                self.empty[stage].arrive()
                yield
                phase ^= stage
                stage ^= 1
                state_phase ^= 1
            end = first


def deadlocks(kernel, seed):
    choose = random.Random(seed)
    warp_groups, idle = [kernel.producer(), kernel.consumer()], 0
    while warp_groups and idle < 500:
        warp_group = choose.choice(warp_groups)
        try:
            idle = idle + 1 if next(warp_group) == "waits" else 0
        except StopIteration:
            warp_groups.remove(warp_group)
    return bool(warp_groups)


def report(name, kernels):
    runs = [deadlocks(kernel, seed) for seed, kernel in enumerate(kernels)]
    print(f"{name}: {sum(runs)} of {len(runs)} interleavings deadlock")


if __name__ == "__main__":
    for first in (False, True):
        kernels = (Sweep(chunks, first) for chunks in range(1, 30) for _ in range(200))
        report(f"sweep, producer waits for empty {'before' if first else 'after'} it arrives on state_full", kernels)
    for per_stage in (False, True):
        kernels = (FusedBackward(n, m, per_stage) for n in range(1, 40) for m in (1, 2, 8, 16) for _ in range(30))
        report(f"fused backward, {'one empty barrier per stage' if per_stage else 'one for both stages'}", kernels)
