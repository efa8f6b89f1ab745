"""Tests of the plug-in: the conformance kits, agreement of two backends, a training run and a probe by name."""

import json
import subprocess
import sys

import torch

import deltazoo
from deltazoo.mixers import conformance as mixer_conformance
from deltazoo.mixers import parse

CONFIG = parse({"mixer": "decayed_deltanet", "heads": 2})

test_backend_conforms = deltazoo.conformance.suite("prefix")
test_mixer_conforms = mixer_conformance.suite(CONFIG)


def test_backend_is_registered():
    meta = deltazoo.UpdateMeta("cpu", torch.float32, H=2, HV=2, K=16, V=16)
    assert "prefix" in {verdict.backend for verdict in deltazoo.explain(deltazoo.UpdateSpec(), meta).verdicts}


def test_mixer_has_the_same_output_on_both_backends_and_in_chunked_prefill():
    torch.manual_seed(0)
    mixers = {name: CONFIG.build(32, backend=name) for name in ("reference", "prefix")}
    mixers["prefix"].load_state_dict(mixers["reference"].state_dict())
    x = torch.randn(3, 20, 32)
    expected = mixers["reference"](x).y
    torch.testing.assert_close(mixers["prefix"](x)[0], expected, rtol=1e-4, atol=1e-5)
    state, pieces = mixers["prefix"].init_state(3), []
    for piece in x.split([7, 1, 12], dim=1):
        y, state, _ = mixers["prefix"](piece, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-4, atol=1e-5)


def test_mixer_learns_to_output_the_previous_token():
    torch.manual_seed(0)
    embed, mixer, head = torch.nn.Embedding(16, 32), CONFIG.build(32, backend="prefix"), torch.nn.Linear(32, 16)
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
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[0] > 2.5  # a uniform guess has log 16 = 2.77
    assert losses[-1] < 0.5


def test_mixer_is_probed_by_name(tmp_path):
    task = "parity(length=4,lengths=[4],steps=100,batch=16,width=16,rates=[1e-2],evaluation_tokens=1024)"
    command = [sys.executable, "-m", "deltazoo", "probe", "--mixers", "decayed_deltanet", "--tasks", task]
    subprocess.run([*command, "--out", str(tmp_path), "--seeds", "1", "--workers", "1"], check=True)
    run = json.loads((tmp_path / "runs.jsonl").read_text())
    assert run["mixer"] == "decayed_deltanet" and run["accuracy"]["4"] > 0.9
