"""Time generation with whole models: python generate.py [first | peers | forward | compiled]... [MODEL]...

bf16, random weights, prompts of 512 tokens (attention: 8,192). Prints for each model and batch size the floor, the time
per token of `generate_tokens` without options, and the time to the first token of a prompt of 2,048. The floor is the
time to read the weights, to read and write the states, and to read the caches of the middle token, at the speed of a
copy measured in the same run. MODEL is a prefix of a name below. Needs a CUDA device. Uses the public API only, so that
it also measures other versions.

first: print only the seconds of the first call in this process, after imports and the construction of the model.
compiled: add a decoder that is compiled and captured.
forward: add the forward of a prompt of 2,048 with compiled layers.
peers: add transformers with the same sizes, as far as it has the layers.
"""

import functools
import gc
import statistics
import sys
import time

import torch

import deltazoo
from deltazoo.blocks import Decoder, StackSpec, compile_layers, generate_tokens, stream
from deltazoo.blocks.inspect.peer_models import transformers_model

QWEN = {  # about 2 billion parameters, 0.4 active
    "width": 1024, "depth": 16, "vocab": 32000, "pattern": "3*gated_deltanet + attention", "tied": False,
    "layers": {
        "gated_deltanet": {
            "mixer": "gated_deltanet", "heads": 8, "value_heads": 16, "key_width": 128, "value_width": 128,
        },
        "attention": {
            "mixer": "attention", "heads": 8, "key_value_heads": 2, "head_width": 256, "rotary_fraction": 0.25,
            "qk_norm": "head", "gate": True,
        },
    },
    "mlp": {"type": "moe", "width": 512, "experts": 72, "active": 8, "shared_width": 512, "shared_gate": True},
}  # fmt: skip
BILLION = {"width": 2048, "depth": 24, "vocab": 32000}
MODELS = {
    "gated-deltanet-1.3b": "gated-deltanet-1.3b",
    "gated-deltanet-h1-1.3b": "gated-deltanet-h1-1.3b",
    "transformer-pp-1.3b": "transformer-pp-1.3b",
    "qwen": QWEN,
    "kda": {**BILLION, "pattern": "kda(heads=16, key_width=128, value_width=128)", "mlp": {"width": 5632}},
    "mamba2": {**BILLION, "depth": 48, "pattern": "mamba2", "mlp": "none"},
    "rwkv7": {**BILLION, "pattern": "rwkv7", "mlp": {"width": 5632}},
}
BATCHES = {"transformer-pp-1.3b": (1,), "qwen": (1,)}
PROMPTS = {"transformer-pp-1.3b": 8192}
FIRST_PROMPT = 2048
FEW, MANY = 8, 200  # tokens of the two calls whose difference is the time per token


def build(name):
    torch.manual_seed(0)
    source = MODELS[name]
    spec = deltazoo.preset(source) if isinstance(source, str) else StackSpec.model_validate(source)
    with torch.device("cuda"):
        return spec.build().to(torch.bfloat16).eval()


def prompt(model, batch, length):
    return torch.randint(model.spec.vocab, (batch, length), device="cuda")


def seconds(call):
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_speed():
    """The bytes per second that a copy reads and writes."""
    a, b = (torch.empty(2**29, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * a.nbytes / statistics.median(seconds(lambda: a.copy_(b)) for _ in range(12))


def floor_bytes(model, batch, context):
    """The bytes that a step moves: weights and caches read, states read and written."""
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    if model.head is not None:
        weights -= model.embedding.weight.nbytes
    weights -= sum(2 * m.unused_parameters for m in model.modules() if hasattr(m, "unused_parameters"))
    total = weights
    for layer in model.init_state(batch, context).layers:
        for state in layer:
            cached = type(state).__name__ == "KVCache"
            leaves = torch.utils._pytree.tree_leaves(state)
            total += (1 if cached else 2) * sum(x.nbytes for x in leaves)
    return weights, total


def per_token(generate, many=MANY, repeats=5):
    """Milliseconds per token: the median difference of two calls, so that the prompt does not count."""
    generate(FEW)
    differences = [seconds(lambda: generate(many)) - seconds(lambda: generate(FEW)) for _ in range(repeats)]
    return 1e3 * statistics.median(differences) / (many - FEW)


def sampling(count):
    return deltazoo.Sampling(max_tokens=count, temperature=0)


def first_token(model):
    """Milliseconds from the call to the first token on the host; median of later calls."""
    tokens = prompt(model, 1, FIRST_PROMPT)

    def call():
        columns = stream(model, tokens, sampling(40))
        int(next(columns))
        columns.close()

    call()
    return 1e3 * statistics.median(seconds(call) for _ in range(5))


def compiled_forward(model):
    """Milliseconds of the features and the last logits of a prompt, with layers that are compiled one by one."""
    tokens, compiled = prompt(model, 1, FIRST_PROMPT), compile_layers(model)

    @torch.no_grad()
    def call():
        x, _ = compiled.features(tokens, model.init_state(1, FIRST_PROMPT + 8), None)
        compiled.logits(x[:, -1])

    first = seconds(call)
    return 1e3 * statistics.median(seconds(call) for _ in range(5)), first


def measure(name, speed, modes):
    model = build(name)
    length = PROMPTS.get(name, 512)
    for batch in BATCHES.get(name, (1, 32)):
        tokens = prompt(model, batch, length)
        weights, total = floor_bytes(model, batch, length + (FEW + MANY) // 2)
        floor = 1e3 * total / speed
        ours = per_token(lambda n, tokens=tokens: generate_tokens(model, tokens, sampling(n)))
        line = f"{name}, B = {batch}: weights {weights / 2**30:.2f} GiB, floor {floor:.3f} ms; {ours:.3f} ms a token, "
        print(line + f"{ours / floor:.2f}x", flush=True)
        if "compiled" in modes:
            start = time.perf_counter()
            decoder = Decoder(model, batch, length + MANY, compile=True).capture()
            took = time.perf_counter() - start
            ours = per_token(lambda n, tokens=tokens, decoder=decoder: generate_tokens(decoder, tokens, sampling(n)))
            print(
                f"    compiled and captured: {ours:.3f} ms a token, {ours / floor:.2f}x; built in {took:.1f} s",
                flush=True,
            )
            del decoder
        gc.collect()
    line = f"    first token of {FIRST_PROMPT}, B = 1: {first_token(model):.2f} ms"
    if "forward" in modes:
        forward, first = compiled_forward(model)
        line += f"; compiled forward {forward:.2f} ms, its first call {first:.1f} s"
    print(line, flush=True)


def measure_peer(name):
    model = build(name)
    spec, length = model.spec, PROMPTS.get(name, 512)
    del model
    gc.collect()
    with torch.device("cuda"):
        peer = transformers_model(spec, "cuda").to(torch.bfloat16).eval()
    for batch in BATCHES.get(name, (1, 32)):
        tokens = torch.randint(spec.vocab, (batch, length), device="cuda")
        theirs = per_token(
            lambda n, tokens=tokens: peer.generate(tokens, max_new_tokens=n, min_new_tokens=n, do_sample=False),
            many=24, repeats=2,
        )  # fmt: skip
        print(f"    transformers, B = {batch}: {theirs:.3f} ms a token", flush=True)


def main():
    modes = [word for word in sys.argv[1:] if word in ("first", "peers", "forward", "compiled")]
    prefixes = tuple(word for word in sys.argv[1:] if word not in modes) or ("",)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, deltazoo {deltazoo.__version__}", flush=True)
    names = [name for name in MODELS if name.startswith(prefixes)]
    if "first" in modes:
        for name in names:
            model = build(name)
            tokens = prompt(model, 1, 512)
            took = seconds(lambda model=model, tokens=tokens: generate_tokens(model, tokens, sampling(8)))
            print(f"{name}: first call {took:.2f} s", flush=True)
        return
    speed = copy_speed()
    print(f"a copy moves {speed / 1e12:.3f} TB/s", flush=True)
    for name in names:
        calls = [functools.partial(measure, name, speed, modes)]
        calls += [functools.partial(measure_peer, name)] * ("peers" in modes)
        for call in calls:
            try:
                call()
            except Exception as error:
                print(f"    {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
