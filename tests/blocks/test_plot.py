"""The plot of a stack draws its layers and the bytes of a state beside those of a transformer of the same size."""

import xml.etree.ElementTree as ElementTree

import matplotlib.image
import pytest

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks import preset
from deltazoo.blocks.inspect.plot import memory, plot_stack, transformer_of
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import Attention

LENGTHS = [8, 16, 64]


def test_memory_is_that_of_a_state_of_each_length():
    description = preset("nemotron-h-tiny").describe()
    expected = [description.state_bytes + length * description.cache_bytes for length in LENGTHS]
    assert memory(preset("nemotron-h-tiny"), LENGTHS) == expected
    window = preset("samba-tiny")  # a window of 16 tokens, 2 heads of 32, keys and values of 4 bytes
    small, full, long = memory(window, LENGTHS)
    assert full - small == 8 * 2 * 64 * 4
    assert long == full


@pytest.mark.parametrize("name", ["nemotron-h", "qwen3-next", "deltanet-swa"])
def test_the_transformer_has_the_same_width_and_number_of_parameters(name):
    spec = preset(name)
    transformer = transformer_of(spec)
    assert (transformer.width, transformer.vocab, transformer.tied) == (spec.width, spec.vocab, spec.tied)
    assert {type(layer.mixer) for layer in transformer.expand()} == {Attention}
    sizes = [stack.describe().parameters for stack in (spec, transformer)]
    layer = transformer.describe().layers[0].parameters
    assert abs(sizes[0] - sizes[1]) <= layer / 2


def test_a_transformer_of_a_stack_without_mlps_and_attention_has_the_defaults():
    spec = StackSpec(width=64, depth=2, vocab=9, pattern="mamba", mlp="none")
    assert transformer_of(spec).expand()[0].mixer == Attention()
    assert transformer_of(spec).depth == 1


def test_the_plot_has_a_block_for_each_layer(tmp_path):
    path = tmp_path / "stack.svg"
    plot_stack(preset("nemotron-h-tiny"), path)
    text = path.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    blue, grey = "#1f77b4", "#cccccc"
    for colour in (blue, grey):  # three Mamba-2 layers, three MLPs, and the legend
        assert text.count(f'style="fill: {colour}"') == 3 + 1
    plot_stack(preset("samba-tiny"), tmp_path / "stack.png")
    assert matplotlib.image.imread(tmp_path / "stack.png").std() > 0.01


def test_another_suffix_and_a_missing_matplotlib_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"a plot must end in .svg, .png, .pdf, got '.*stack.txt'"):
        plot_stack(preset("samba-tiny"), tmp_path / "stack.txt")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'deltazoo\[plot\]'"):
        plot_stack(preset("samba-tiny"), tmp_path / "stack.svg")
