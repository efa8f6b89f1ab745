"""Time the engine on a whole model: python engine.py [MODEL] [warm | decode | serve | few | prefix | drafts | all]...

bf16, random weights, greedy. Prints rows of

decode: tokens per second of 64 decoding requests, against a captured step of 64 rows alone.
serve: tokens per second of 512 requests with prompts of 64 to 2,048 tokens and outputs of 32 to 512, both log-uniform,
    in 64 slots, against static batches of 64 of the same requests by `generate_tokens` (the first BATCHES batches).
prefix: the prompt tokens that 64 requests with a common prefix of 4,096 tokens and suffixes of up to 128 read,
    submitted together and one after the other, and the seconds, with and without reuse.
drafts: texts of 1 and 8 requests that repeat themselves after 50 tokens, so that their drafts are found, and random
    texts, with and without passes of three drafts; then passes with 3 tokens each, forced, against plain steps of as
    many requests.
all: drafts, pages and reuse of prefixes together, for a hybrid of MODEL's layers with attention in every fourth one:
    16 requests with a common prefix of 4,096 tokens, whose continuations repeat themselves, against an engine without
    drafts and reuse.
few: serve with 128 requests and one batch.
warm: only few tokens of each, to fill the caches of compilers.

Needs a CUDA device.
"""

import functools
import itertools
import math
import random
import statistics
import sys
import time

import torch

import deltazoo
from deltazoo import Engine, Sampling
from deltazoo.backends.ops import prompt_lookup
from deltazoo.blocks import Decoder, generate_tokens
from deltazoo.blocks.generation.engine import pool, row_sampling
from deltazoo.mixers import Attention

SLOTS, REQUESTS, BATCHES = 64, 512, 2
DRAFTED = 3
CACHE = SLOTS * 4608


def build(name):
    torch.manual_seed(0)
    with torch.device("cuda"):
        return deltazoo.preset(name).build().to(torch.bfloat16).eval()


def build_cyclic(name, **changes):
    """Build a model with untied embeddings, whose greedy continuation repeats a cycle of 50 tokens."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = deltazoo.preset(name).model_copy(update={"tied": False, **changes}).build()
    set_cycles(model)
    return model.to(torch.bfloat16).eval()


@torch.no_grad()
def set_cycles(model, period=50):
    """Scale up the embedding so that it dominates the residual stream, and make the head predict a cycle of tokens."""
    model.embedding.weight.normal_()
    token = torch.arange(model.spec.vocab // period * period, device=model.device)
    successor = torch.where(token % period == period - 1, token - period + 1, token + 1)
    model.head.weight.zero_()
    model.head.weight[successor] = model.embedding.weight[token]
    model.embedding.weight.mul_(20)


def seconds(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def tokens(rng, model, count):
    return [rng.randrange(model.spec.vocab) for _ in range(count)]


def log_uniform(rng, least, most):
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def run(engine):
    for _ in engine:
        pass


def row(*cells):
    print(" | ".join(str(cell) for cell in cells), flush=True)


def engine_of(model, **settings):
    return Engine(model, slots=SLOTS, step_tokens=2048, cache_tokens=CACHE, **settings)


def decode(model, engine, count):
    rng = random.Random(0)
    decoder = Decoder(model, SLOTS, CACHE // SLOTS).capture()
    alone = statistics.median(seconds(decoder.step) for _ in range(count))
    del decoder
    for _ in range(SLOTS):
        engine.submit(tokens(rng, model, 16), Sampling(temperature=0, max_tokens=count + 40))
    while len(engine._decoding) < SLOTS:
        engine.step()
    for _ in range(8):
        engine.step()
    taken = seconds(lambda: [engine.step() for _ in range(count)]) / count
    run(engine)
    row("decode 64", f"step alone {alone * 1e3:.3f} ms", f"engine {taken * 1e3:.3f} ms", f"{alone / taken:.3f}x")


def serve(model, engine, requests, batches, most):
    rng = random.Random(1)
    work = [
        (tokens(rng, model, log_uniform(rng, 64, 2048)), min(log_uniform(rng, 32, 512), most)) for _ in range(requests)
    ]
    submitted = []

    def by_engine():
        for prompt, limit in work:
            submitted.append(engine.submit(prompt, Sampling(temperature=0, max_tokens=limit)))
        run(engine)

    before = engine.counts
    taken = seconds(by_engine)
    count = sum(limit for _, limit in work)
    assert sum(len(request.tokens) for request in submitted) == count
    steps, read = engine.counts.steps - before.steps, engine.counts.read - before.read
    rate = f"{count / taken:.0f} tokens/s"
    row("serve", f"{requests} requests", f"{taken:.2f} s", rate, f"{steps} steps", f"{read} tokens read", memory())
    static = count = 0
    for n, start in enumerate([0, *range(0, batches * SLOTS, SLOTS)]):  # the first one captures the step
        batch = work[start : start + SLOTS]
        longest = max(limit for _, limit in batch) if n else 2
        prompts = [torch.tensor(prompt, device="cuda") for prompt, _ in batch]
        sampling = Sampling(temperature=0, max_tokens=longest)
        static += (n > 0) * seconds(functools.partial(generate_tokens, model, prompts, sampling))
        count += (n > 0) * sum(limit for _, limit in batch)
    if batches:
        row("static", f"{batches} batches of {SLOTS}", f"{static:.2f} s", f"{count / static:.0f} tokens/s", memory())


def prefix(model, engine, shared, count):
    unshared = engine_of(model, prefix_bytes=0)
    for n, (name, together, here) in enumerate(
        (("together", True, engine), ("one after the other", False, engine), ("no reuse", True, unshared))
    ):
        rng = random.Random(n)
        first = tokens(rng, model, shared)
        prompts = [first + tokens(rng, model, rng.randint(1, 128)) for _ in range(count)]

        def submit_all(here=here, together=together, prompts=prompts):
            for prompt in prompts:
                here.submit(prompt, Sampling(temperature=0, max_tokens=1))
                if not together:
                    run(here)
            run(here)

        before = here.counts.read
        taken = seconds(submit_all)
        read, whole = here.counts.read - before, sum(map(len, prompts))
        row("prefix", name, f"{read} of {whole} tokens read, {whole / read:.1f}x less", f"{taken:.3f} s")


def steady(engine, model, requests):
    """Start requests, and step until all of them decode."""
    rng = random.Random(0)
    started = [engine.submit(tokens(rng, model, 16), Sampling(temperature=0, max_tokens=1000)) for _ in range(requests)]
    while len(engine._decoding) < requests:
        engine.step()
    for _ in range(4):
        engine.step()
    return started


def step_seconds(engine, model, requests, count):
    started = steady(engine, model, requests)
    taken = seconds(lambda: [engine.step() for _ in range(count)]) / count
    for request in started:
        engine.cancel(request)
    run(engine)
    return taken


def drafts(model, count, sizes=(1, 4, 8, 16, 32, 64)):
    pool.MOST_TOKENS = 4 * SLOTS
    plain, engine = engine_of(model, prefix_bytes=0), engine_of(model, prefix_bytes=0, speculate=DRAFTED)
    looked_up(model, plain, engine, 8 * count)
    append = row_sampling.append_

    def append_forced(chosen, checked, read, *state):
        if read.shape[1] > 1:
            read[:, 1:DRAFTED].copy_(checked[:, : DRAFTED - 1])
            read[:, DRAFTED:].fill_(prompt_lookup.REJECTED)
        return append(chosen, checked, read, *state)

    row_sampling.append_ = append_forced
    engine = engine_of(model, prefix_bytes=0, speculate=DRAFTED)
    for requests in sizes:
        alone, taken = (step_seconds(here, model, requests, count) for here in (plain, engine))
        row(
            *("forced", f"{requests} requests", f"step {alone * 1e3:.3f} ms", f"pass {taken * 1e3:.3f} ms"),
            *(f"pays from {taken / alone:.2f} tokens", f"{DRAFTED} tokens: {DRAFTED * alone / taken:.2f}x"),
        )
    row_sampling.append_ = append


def looked_up(model, plain, engine, count):
    for requests, (text, temperature) in itertools.product((1, 8), {"repeated": 0.0, "random": 1e4}.items()):
        rng, results = random.Random(3), []
        prompts = [tokens(rng, model, 64) * 4 for _ in range(requests)]
        for name, here in (("plain", plain), ("drafts", engine)) * 2:
            submitted, before = [], here.counts

            def work(here=here, submitted=submitted, prompts=prompts, temperature=temperature):
                sampling = Sampling(temperature=temperature, max_tokens=count)
                submitted += [here.submit(prompt, sampling) for prompt in prompts]
                run(here)

            taken = seconds(work)
            passes, passed = here.counts.passes - before.passes, here.counts.passed - before.passed
            results.append([request.tokens for request in submitted])
            first = [
                next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
                for a, b in zip(results[0], results[-1], strict=True)
            ]
            row(
                *(text, f"{requests} requests", name, f"{requests * count / taken:.0f} tokens/s", f"{passes} passes"),
                *(f"{passed / max(passes, 1):.2f} tokens per pass", f"equal for {min(first)} of {count} tokens"),
            )


def everything(model, count, prefix=4096, slots=16):
    """Compare the tokens and the time of an engine with drafts, pages and reuse with one that has pages alone."""
    first = []
    for name, settings in (("pages", {"prefix_bytes": 0}), ("pages, reuse and drafts", {"speculate": DRAFTED})):
        engine = Engine(model, slots, 2048, slots * (prefix + 128 + count + 64), **settings)
        for seed in range(2):  # the first run captures the steps
            rng, before = random.Random(seed), engine.counts
            common = tokens(rng, model, prefix)
            prompts = [common + tokens(rng, model, rng.randint(1, 128)) for _ in range(slots)]
            submitted = [engine.submit(prompt, Sampling(temperature=0, max_tokens=count)) for prompt in prompts]
            taken = seconds(functools.partial(run, engine))
        first = first or [request.tokens for request in submitted]
        equal = sum(request.tokens == expected for request, expected in zip(submitted, first, strict=True))
        passes, passed = engine.counts.passes - before.passes, engine.counts.passed - before.passed
        row(
            *("all", name, f"{slots} requests", f"{slots * count / taken:.0f} tokens/s", f"{taken:.3f} s"),
            *(f"{engine.counts.read - before.read} tokens read", f"{passed / max(passes, 1):.2f} tokens per pass"),
            *(f"{equal} of {slots} equal", memory()),
        )


def memory():
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"peak {peak:.1f} GiB"


def main():
    names = sys.argv[1:]
    work = [name for name in names if name in ("warm", "decode", "serve", "few", "prefix", "drafts", "all")]
    model_name = next((name for name in names if name not in work), "gated-deltanet-1.3b")
    row(torch.cuda.get_device_name(), torch.__version__, model_name)
    start = time.perf_counter()
    if "all" in work:
        recurrent = deltazoo.preset(model_name)
        layers = {**recurrent.layers, "attention": Attention(heads=16, head_width=128)}
        model = build_cyclic(model_name, pattern=f"3*{recurrent.pattern} + attention", layers=layers)
        everything(model, 32 if "warm" in work else 200)
        row(f"{time.perf_counter() - start:.1f} s in all")
        return
    model = build_cyclic(model_name) if "drafts" in work else build(model_name)
    if "drafts" in work:
        drafts(model, 8 if "warm" in work else 50)
        row(f"{time.perf_counter() - start:.1f} s in all", memory())
        return
    engine = engine_of(model)
    built = time.perf_counter()
    engine.warm_up()
    row(f"built in {built - start:.1f} s", f"warmed up in {time.perf_counter() - built:.1f} s", memory())
    if "warm" in work:
        decode(model, engine, 4)
        serve(model, engine, SLOTS, 1, 8)
        prefix(model, engine, 512, 3)
    if "serve" in work:
        serve(model, engine, REQUESTS, BATCHES, 512)
    if "prefix" in work:
        prefix(model, engine, 4096, 64)
    if "decode" in work:
        decode(model, engine, 100)
    if "few" in work:
        serve(model, engine, 2 * SLOTS, 1, 512)


if __name__ == "__main__":
    main()
