"""README and the pages that it begins: their Python examples run; commands, links and numbers hold."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import deltazoo
from deltazoo.backends.update import registry
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import GatedDeltaNet, SlidingWindow
from deltazoo.mixers.core.config import config_class

ROOT = Path(deltazoo.__file__).resolve().parent
README = (ROOT / "README.md").read_text()
UPDATE, USAGE = ((ROOT / "docs" / name).read_text() for name in ("update.md", "usage.md"))


def code_blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(block: str) -> dict[str, Any]:
    """Run an example with torch.compile disabled, and return its variables."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    with torch.compiler.set_stance("force_eager"):
        exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_first_example_trains_loads_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = "".join(code_blocks("python")[:2]).replace(
        'steps=50, batch={"rows": 4, "length": 128}', 'steps=4, batch={"rows": 2, "length": 32}'
    )
    assert "steps=4" in block
    namespace = run(block)
    points = namespace["training"].points
    assert points[-1].validation_bits < points[0].validation_bits
    trained = deltazoo.load("runs/first").state_dict()
    assert all(torch.equal(trained[name], value) for name, value in namespace["model"].state_dict().items())


def test_update_example_computes_the_recurrence() -> None:
    torch.manual_seed(0)
    namespace = run(code_blocks("python", UPDATE)[0])
    out, inputs, spec = namespace["out"], namespace["inputs"], namespace["spec"]
    assert out.o.shape == (2, 100, 4, 32)
    assert out.state.shape == (2, 4, 16, 32)
    S = torch.zeros(2, 4, 16, 32)
    for t in range(100):
        k, v = inputs.k[:, t].repeat_interleave(2, 1), inputs.v[:, t]
        S = inputs.log_decay[:, t].exp()[..., None, None] * S
        S = S + k[..., None] * (inputs.beta[:, t, :, None] * (v - (k[..., None] * S).sum(-2)))[..., None, :]
    torch.testing.assert_close(out.state, S, rtol=1e-4, atol=1e-5)
    assert str(spec).startswith("S_t = d_t")


@pytest.mark.parametrize("text", [README, UPDATE], ids=["model", "update"])
def test_example_answers_without_compiling(text: str, tmp_path: Path) -> None:
    """A compilation takes 20 s, an example 5 s of processor time, half of it to import torch."""
    code = f"import sys\n{code_blocks('python', text)[0]}\nprint('torch._inductor.compile_fx' in sys.modules)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-1] == "False"


def test_mixer_example_gives_equal_results_in_pieces_and_at_once() -> None:
    torch.manual_seed(0)
    with deltazoo.use_backend("reference"):
        namespace = run(code_blocks("python", USAGE)[0])
    pieces = torch.cat([namespace["first"], namespace["rest"]], 1)
    torch.testing.assert_close(pieces, namespace["y"], rtol=1e-4, atol=1e-5)
    assert namespace["logits"].shape == (1, 1, 256)
    model, tokens = namespace["model"], namespace["tokens"]
    with torch.no_grad():  # after the rollback, decoding continues after the 17 tokens
        continued, _ = model(tokens[:, :4], namespace["state"])
        expected, _ = model(torch.cat([tokens, tokens[:, :4]], 1))
    torch.testing.assert_close(continued, expected[:, 17:], rtol=1e-4, atol=1e-5)


def test_yaml_and_python_define_the_same_stack() -> None:
    (text,) = code_blocks("yaml", USAGE)
    data = yaml.safe_load(text)
    python = StackSpec(width=64, depth=4, vocab=256, pattern=3 * GatedDeltaNet(heads=2) + SlidingWindow(window=32))
    assert StackSpec.model_validate(data) == python


def test_example_mixer_decodes_as_it_trains() -> None:
    example = run(code_blocks("python")[2])["DecayedDeltaNet"]
    assert deltazoo.mixers.conformance.error(example(heads=2), "decode") < 1e-9
    assert deltazoo.mixers.conformance.error(example(heads=2), "init_weights") == 0


def test_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 100


def test_numbers_of_mixers() -> None:
    own = [name for name in registry.names(registry.MIXERS) if registry.owner(registry.MIXERS, name)[:9] == "deltazoo "]
    short = [name for name in own if len(inspect.getsource(config_class(name)).splitlines()) <= 40]
    text = " ".join(README.split())
    assert f"# deltazoo {len(own)} token mixers for PyTorch" in text
    assert f"The config of {len(short)} of the {len(own)} mixers is a class of at most forty lines" in text


def test_links_of_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 20
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("command", re.findall(r"^    deltazoo (\w+)", README, flags=re.MULTILINE))
def test_command_exists(command: str) -> None:
    from deltazoo.cli import app

    assert command in {registered.name for registered in app.registered_commands}


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_make_target_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_stacks_of_the_documentation_build_and_compute_a_loss() -> None:
    text = (ROOT / "docs" / "stacks.md").read_text()
    examples = code_blocks("yaml", text)
    assert len(examples) == 3
    tokens = torch.arange(10)[None]
    for example in examples:
        model = StackSpec.model_validate(yaml.safe_load(example)).build("reference")
        assert model.loss(tokens, tokens).isfinite()


def test_the_settings_of_the_example_of_resume_can_change() -> None:
    from deltazoo.blocks.training.rules import RESUMABLE

    usage = " ".join(USAGE.split())
    (text,) = re.findall(r"deltazoo\.resume\(folder, changes=(\{.*?\})\)", usage)
    assert yaml.safe_load(text).keys() <= set(RESUMABLE)
