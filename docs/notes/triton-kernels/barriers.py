"""A model of the walk's barriers: python barriers.py counts how many random interleavings of its groups hang.

An mbarrier tells the phase that ended last from the one before it, by parity, and no more: who waits for a phase after
the next one has ended waits for ever. The two groups that compute walk in step, and are one here.
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


def hangs(chunks, seed, early):
    """early: the copying group waits for the chunk before to be done with before it tells of the states of this one."""
    choose = random.Random(seed)
    came, rest_came = [Barrier(), Barrier()], [Barrier(), Barrier()]
    states_came, done, walked = Barrier(), Barrier(), Barrier()
    buffers, states = [None, None], None

    def fill(stage, chunk):
        buffers[stage] = chunk
        yield
        came[stage].arrive()
        yield
        rest_came[stage].arrive()
        yield

    def copies():
        nonlocal states
        yield from fill(0, chunks - 1)
        for back in range(chunks):
            chunk = chunks - 1 - back
            yield from walked.wait((back & 1) ^ 1)
            states = chunk
            yield
            if early:
                yield from done.wait((back & 1) ^ 1)
            states_came.arrive()
            yield
            if not early:
                yield from done.wait((back & 1) ^ 1)
            if chunk > 0:
                yield from fill(1 - back % 2, chunk - 1)

    def computes():
        stage = phase = 0
        for chunk in reversed(range(chunks)):
            yield from came[stage].wait(phase)
            assert buffers[stage] == chunk
            yield from rest_came[stage].wait(phase)
            yield from states_came.wait(stage)
            yield
            assert states == chunk
            walked.arrive()
            yield
            assert buffers[stage] == chunk
            done.arrive()
            yield
            phase ^= stage
            stage ^= 1

    groups, idle = [copies(), computes()], 0
    while groups and idle < 500:
        group = choose.choice(groups)
        try:
            idle = idle + 1 if next(group) == "waits" else 0
        except StopIteration:
            groups.remove(group)
    return bool(groups)


if __name__ == "__main__":
    for early in (False, True):
        tries = [hangs(chunks, seed, early) for chunks in range(1, 30) for seed in range(200)]
        print("waits", "before" if early else "after", f"telling: {sum(tries)} of {len(tries)} hang")
