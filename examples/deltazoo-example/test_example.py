"""The plug-in's tests: the backend and the mixer by their kits in a line each, and the mixer by training it."""

import torch

import deltazoo
from deltazoo.backends import registry
from deltazoo.mixers import parse
from deltazoo.mixers.core import conformance

test_conformance = deltazoo.conformance.suite("prefix")
test_mixer = conformance.suite(parse({"mixer": "fading_deltanet", "heads": 2}))


def test_the_plugin_is_installed_under_its_names():
    assert "prefix" in registry.names(registry.BACKENDS)
    assert registry.owner(registry.MIXERS, "fading_deltanet") == "deltazoo-example 0.1.0"


def test_the_mixer_is_the_same_on_every_backend_and_in_pieces():
    config = parse({"mixer": "fading_deltanet", "heads": 2})
    torch.manual_seed(0)
    mixers = {name: config.build(32, backend=name) for name in ("reference", "prefix")}
    mixers["prefix"].load_state_dict(mixers["reference"].state_dict())
    x = torch.randn(3, 20, 32)
    want, _ = mixers["reference"](x)
    torch.testing.assert_close(mixers["prefix"](x)[0], want, rtol=1e-4, atol=1e-5)
    state, pieces = mixers["prefix"].init_state(3), []
    for piece in x.split([7, 1, 12], dim=1):
        y, state = mixers["prefix"](piece, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), want, rtol=1e-4, atol=1e-5)


def test_the_mixer_learns_to_repeat_the_token_before():
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16)
    mixer = parse({"mixer": "fading_deltanet", "heads": 2}).build(32, backend="prefix")
    model = torch.nn.ModuleList([embed, mixer, head])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        tokens = torch.randint(16, (8, 24))
        logits = head(mixer(embed(tokens))[0])[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-1].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[0] > 2.5  # log 16 = 2.77: nothing is known
    assert losses[-1] < 0.5
