"""Decoders are kept for later calls while the model has not changed, and their tokens are those of eager steps."""

import gc
import sys
import threading
import weakref
from functools import partial
from types import MethodType

import pytest
import torch
import wrapping
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from deltazoo.blocks.generation import kept
from deltazoo.blocks.generation.decoder import Decoder
from deltazoo.blocks.generation.generate import generate_tokens, stream
from deltazoo.blocks.generation.prompts import PromptGraphs
from deltazoo.blocks.generation.sampling import Sampling

pytestmark = pytest.mark.runs
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Made(list):
    """The decoders that were made, in order."""


@pytest.fixture
def made(monkeypatch) -> Made:
    """Let every call on a CPU compile, without a compiler's work, and record the decoders that are made."""
    made, make = Made(), kept._make

    def record(*arguments):
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(kept, "_make", record)
    monkeypatch.setattr(kept, "cxx_compiler", lambda: "c++")
    monkeypatch.setattr(kept, "COMPILE_FROM", {"cpu": 1, "cuda": 10**9})
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return made


@pytest.fixture
def stub(monkeypatch) -> list:
    """Let a capture on a CPU return the call. Its calls read and write the tensors that a CUDA graph would."""
    captured = []

    def capture(call, device, pool=None, warm_ups=1):
        for _ in range(warm_ups + 1):
            call()
        captured.append(call)
        return call

    for module in ("sampler", "prompts"):
        monkeypatch.setattr(f"deltazoo.blocks.generation.{module}.capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    return captured


def generate(model, prompt, count=6, **sampling):
    return generate_tokens(model, prompt, Sampling(max_tokens=count, **sampling))


def eager(model, prompt, count=6, **sampling):
    decoder = Decoder(model, len(prompt), len(prompt[0]) + count)
    return generate_tokens(decoder, prompt, Sampling(max_tokens=count, **sampling))


def test_a_second_call_uses_the_kept_decoder_and_sees_new_weights(model, tokens, made):
    assert torch.equal(generate(model, tokens(3, 7)), eager(model, tokens(3, 7)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for prompt in (tokens(3, 7), tokens(4, 2), tokens(3, 9)):  # three rows are decoded as four
        assert torch.equal(generate(model, prompt, seed=1), eager(model, prompt, seed=1))
    assert len(made) == 1
    assert made[0].decoder.batch == 4
    assert torch.equal(generate(model, tokens(1, 300)), eager(model, tokens(1, 300)))
    assert len(made) == 2  # other sizes: one row, and the cache of the attention layer


def test_stop_sequences_cut_the_steps_that_ran_ahead(model, tokens, stub, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.generation.sampler.SLOTS", 24)
    ahead, other = Decoder(model, 4, 60), Decoder(model, 3, 60)
    ahead.sampler.captures = ahead.sampler.asynchronous = True
    prompt = tokens(3, 7)
    rows = eager(model, prompt, 40).tolist()
    for ends in ((1, 1, 1), (7, 8, 9), (17, 25, 3), (16, 24, 8), (39, 30, 5)):
        stop = [tuple(row[max(end - 3, 0) : end]) for row, end in zip(rows, ends, strict=True)]
        sampling = Sampling(max_tokens=40, stop=stop)
        expected = generate_tokens(other, prompt, sampling)
        assert torch.equal(generate_tokens(ahead, prompt, sampling), expected)
        assert torch.equal(torch.stack(list(stream(ahead, prompt, sampling)), 1), expected)
        assert expected.shape[1] <= max(ends)


@pytest.mark.parametrize("change", ["lora", "packed", "train", "half", "weight", "setting", "hook"])
def test_a_changed_model_is_decoded_as_changed(model, tokens, made, change):
    model.float()
    before = generate(model, tokens(1, 5), temperature=0)
    if change in ("lora", "packed"):
        wrapping.replace(model, wrapping.Adapted if change == "lora" else wrapping.Packed)
    elif change == "train":
        model.train(not model.training)
    elif change == "half":
        model.bfloat16()
    elif change == "weight":
        model.embedding.weight.data = 1.5 * model.embedding.weight.data.flip(0)
    elif change == "setting":
        model.logit_cap = 0.5
    else:
        model.stack.layers[0].mlp.register_forward_hook(lambda module, arguments, y: y._replace(y=-y.y))
    after = generate(model, tokens(1, 5), temperature=0)
    assert torch.equal(after, eager(model, tokens(1, 5), temperature=0))
    if change in ("lora", "weight", "hook"):
        assert not torch.equal(after, before)
    assert len(made) == (1 if change == "hook" else 2)  # with hooks the step is eager
    assert len(kept._kept[model]) == (0 if change == "hook" else 1)


def test_decoders_are_freed_with_their_model(build, spec, tokens, made):
    first, second = build(spec), build(spec)
    expected = generate(first, tokens(1, 3))
    assert torch.equal(generate(second, tokens(1, 3)), expected)
    decoder, model = weakref.ref(made[0].decoder), weakref.ref(first)
    made.clear()
    del first
    gc.collect()
    assert model() is None
    assert decoder() is None
    assert torch.equal(generate(second, tokens(1, 3)), expected)
    assert not made


def test_kept_decoders_take_a_limited_share_of_memory(model, tokens, made, monkeypatch):
    generate(model, tokens(1, 3))
    generate(model, tokens(2, 3))
    monkeypatch.setattr(kept, "KEPT_BYTES", made[1].bytes)
    generate(model, tokens(2, 3))
    assert [one.decoder.batch for one in kept._kept[model]] == [2]  # the one of one row was used before
    monkeypatch.setattr(kept, "KEPT_BYTES", 0)
    assert torch.equal(generate(model, tokens(2, 3)), eager(model, tokens(2, 3)))
    assert not kept._kept[model]


def test_streams_at_the_same_time_do_not_share_a_decoder(model, tokens, made):
    sampling = Sampling(max_tokens=6)
    one, other = stream(model, tokens(1, 5), sampling), stream(model, tokens(1, 4), sampling)
    pairs = list(zip(one, other, strict=True))
    for prompt, columns in zip((tokens(1, 5), tokens(1, 4)), zip(*pairs, strict=True), strict=True):
        assert torch.equal(torch.stack(columns, 1), eager(model, prompt))
    assert len(made) == 2
    abandoned = stream(model, tokens(1, 5), sampling)
    next(abandoned)
    abandoned.close()
    assert torch.equal(generate(model, tokens(1, 5)), eager(model, tokens(1, 5)))
    assert len(made) == 2


def test_earlier_tokens_of_a_captured_decoder_count_towards_compilation(model, tokens, monkeypatch):
    monkeypatch.setattr(kept, "cxx_compiler", lambda: "c++")
    monkeypatch.setattr(kept, "COMPILE_FROM", {"cpu": 100})
    assert not kept.compiles(model, 99)
    assert kept.compiles(model, 100)
    used = kept.Kept(Decoder(model, 4, 8), kept.fingerprint(model), (), 0, decoded=60)
    monkeypatch.setitem(kept._kept, model, [used])
    assert kept.compiles(model, 40, batch=3)
    assert not kept.compiles(model, 40, batch=1)
    handle = model.stack.register_forward_hook(lambda *arguments: None)
    assert not kept.compiles(model, 100)
    handle.remove()
    monkeypatch.setattr(kept, "cxx_compiler", lambda: None)
    assert not kept.compiles(model, 100)


def test_draws_of_a_graph_equal_eager_draws(model, tokens, stub, monkeypatch):
    monkeypatch.setattr("deltazoo.blocks.generation.sampler.SLOTS", 8)
    decoder, other = Decoder(model, 4, 50), Decoder(model, 3, 50)
    decoder.sampler.captures = True
    rows = [tokens(9), tokens(2), tokens(5)]
    many = {"top_k": 7, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    for options in ({"temperature": 0}, {"seed": (3, 1, 2)}, many, many | {"stop": ((4,), (2, 3))}, {"seed": 5}):
        sampling = Sampling(max_tokens=30, **options)
        assert torch.equal(generate_tokens(decoder, rows, sampling), generate_tokens(other, rows, sampling))
    assert len(stub) == 3  # seeds, stop sequences and limits do not change a graph


def test_a_prompt_shape_that_recurs_is_captured(model, tokens, stub):
    decoder, reads = Decoder(model, 2, 50), []
    decoder.prompts, read = PromptGraphs(), decoder._read
    decoder._read = lambda *arguments: reads.append(1) or read(*arguments)
    for shape in ((2, 7), (2, 7), (2, 3), (2, 7), (1, 3), (2, 3), (2, 3)):
        prompt = torch.randint(29, shape)
        assert torch.equal(generate_tokens(decoder, prompt, Sampling(max_tokens=6)), eager(model, prompt))
    assert len(stub) == 2
    assert len(reads) == 3 + 2 * 2 + 4  # three shapes, warm-up and capture of two, and four replays


def test_sizes_are_rounded_up():
    assert [kept._rounded_batch(n) for n in (1, 2, 3, 4, 5, 17, 32)] == [1, 2, 4, 4, 8, 32, 32]
    for n in range(1, 40_000, 37):
        assert n <= kept._rounded_capacity(n) <= max(n + 255, 1.13 * n)


@pytest.mark.cuda
@CUDA
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_generate_the_tokens_of_eager_steps(spec, compiled, monkeypatch):
    torch.manual_seed(0)
    model = spec.build("compile").cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    monkeypatch.setattr(kept, "COMPILE_FROM", {"cuda": 1 if compiled else 10**9})
    rows = [torch.randint(29, (n,), device="cuda") for n in (7, 3, 5)]
    many = {"top_k": 7, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    for sampling in (
        Sampling(max_tokens=40, temperature=0),
        Sampling(max_tokens=300, seed=(3, 1, 2)),
        Sampling(max_tokens=40, **many),
        Sampling(max_tokens=60, stop=((4,), (2, 3), tuple(range(5)))),
        Sampling(max_tokens=60, stop=tuple(range(29))),
    ):
        expected = generate_tokens(Decoder(model, 4, 400), rows, sampling)
        assert torch.equal(generate_tokens(model, rows, sampling), expected)
        assert torch.equal(torch.stack(list(stream(model, rows, sampling)), 1), expected.cpu())
    made = list(kept._kept[model])  # of capacity 256 and 512
    assert [one.compile_s is not None for one in made] == [compiled] * 2
    with torch.no_grad():
        model.stack.layers[0].mlp.out.weight.mul_(-1)
    expected = generate_tokens(Decoder(model, 4, 400), rows, Sampling(max_tokens=40))
    assert torch.equal(generate_tokens(model, rows, Sampling(max_tokens=40)), expected)
    assert {id(one) for one in kept._kept[model]} == {id(one) for one in made}


@pytest.mark.cuda
@CUDA
def test_prompts_of_a_shape_that_recurs_are_read_by_a_graph(spec):
    model = spec.build("compile").cuda()
    prompts = [torch.randint(29, (2, n), device="cuda") for n in (5, 5, 5, 9, 5, 9, 9, 9)]
    for prompt in prompts:
        expected = generate_tokens(Decoder(model, 2, 100), prompt, Sampling(max_tokens=20, temperature=0))
        assert torch.equal(generate_tokens(model, prompt, Sampling(max_tokens=20, temperature=0)), expected)
    (one,) = kept._kept[model]
    assert len(one.decoder.prompts._graphs) == 2


@pytest.mark.cuda
@CUDA
def test_memory_does_not_grow_with_the_number_of_calls(spec):
    model, prompt = spec.build("compile").cuda(), torch.zeros(1, 4, dtype=torch.int64, device="cuda")
    call = partial(generate_tokens, model, prompt, Sampling(max_tokens=9))
    call(), call()
    before, blocks = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        call()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before
    assert torch.cuda.memory_reserved() == blocks
    del model, call
    gc.collect()
    assert torch.cuda.memory_allocated() < before


def test_kept_decoders_are_not_used_while_flops_are_counted(model, tokens, made):
    expected = generate(model, tokens(1, 3))
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(generate(model, tokens(1, 3)), expected)
    assert counter.get_total_flops() > 0
    assert len(made) == 1


def test_offloaded_weights_are_decoded_eagerly(model, tokens, made):
    expected = generate(model, tokens(1, 3))
    wrapping.offload(model)
    assert torch.equal(generate(model, tokens(1, 3)), expected)
    assert len(made) == 1
    assert isinstance(model, nn.Module)


def test_calls_at_the_same_time_never_share_a_decoder(model, tokens, made):
    prompts = [tokens(1, 3 + n) for n in range(4)]
    wanted = [eager(model, prompt, 2, temperature=0).tolist() for prompt in prompts]
    wrong = []

    def work(first: int) -> None:
        for n in range(first, first + 30):
            found = generate(model, prompts[n % 4], 2, temperature=0).tolist()
            if found != wanted[n % 4]:
                wrong.append((n, found))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert len({id(one) for one in kept._kept[model]}) == len(kept._kept[model])


class Negated(TorchFunctionMode):
    """Negates the result of linear maps."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return -result if function is nn.functional.linear else result


def test_a_function_mode_and_a_global_hook_count_while_they_are_active(model, tokens, made):
    plain = generate(model, tokens(1, 5), temperature=0)
    with Negated():
        assert torch.equal(generate(model, tokens(1, 5), temperature=0), eager(model, tokens(1, 5), temperature=0))
    called = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(module))
    generate(model, tokens(1, 5), count=3, temperature=0)
    hook.remove()
    assert sum(module is model.stack.norm for module in called) == 3
    assert torch.equal(generate(model, tokens(1, 5), temperature=0), plain)
    assert len(made) == 1


def test_attributes_that_refer_to_a_model_do_not_keep_it_alive(build, spec, tokens, made):
    class Callback:
        def __init__(self, owner):
            self.owner = owner

    model = build(spec)
    model.chat, model.callback = MethodType(lambda self: None, model), Callback(model)
    model.stack.layers[0].hint = {"log": partial(print, model)}
    wanted = generate(model, tokens(1, 5))
    assert torch.equal(generate(model, tokens(1, 5)), wanted)
    assert len(made) == 1
    reference = weakref.ref(model)
    made.clear()
    del model
    gc.collect()
    assert reference() is None
