"""Layers: norm positions, single branches, kinds of MLP, shared weights; scaled embeddings and capped logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.spec.stack_spec import LayerSpec, StackSpec
from deltazoo.mixers import Attention, GatedDeltaNet, Mamba2
from deltazoo.mixers.core.mixer import FIRST_PLACE, Context

WIDTH = 8
CONTEXT = Context()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def build(**fields: object) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = LayerSpec(mixer=GatedDeltaNet(heads=1), mlp=Dense(width=12), **fields).build(
        WIDTH, FIRST_PLACE, "reference"
    )
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


EQUATIONS = {
    "pre": lambda x, n, f: x + f(n(x)),
    "output": lambda x, n, f: x + n(f(x)),
    "post": lambda x, n, f: 1.7 * n(x) + f(n(x)),
}


@pytest.mark.parametrize("position", EQUATIONS)
def test_norms_are_at_the_position_of_the_equation(position):
    layer = build(norm_position=position, **({"residual_scale": 1.7} if position == "post" else {}))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    equation = EQUATIONS[position]
    middle = equation(x, lambda x: rms_norm(x, layer.norm.weight), lambda x: layer.mixers[0](x)[0])
    expected = equation(middle, lambda x: rms_norm(x, layer.mlp_norm.weight), lambda x: layer.mlp(x, CONTEXT).y)
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-12, atol=1e-12)


def test_a_residual_scale_that_no_layer_uses_is_refused():
    spec = {"width": WIDTH, "depth": 2, "vocab": 9, "pattern": "a"}
    layer = {"mixer": {"mixer": "deltanet"}, "residual_scale": 1.7}
    sentence = 'residual_scale needs norm_position="post", got 1.7 with norm_position="pre"'
    with pytest.raises(ConfigError, match=sentence):
        StackSpec(**spec, layers={"a": {"mixer": "deltanet"}}, residual_scale=1.7)
    with pytest.raises(ConfigError, match=r'layers.a: residual_scale needs .* got 1.7 with norm_position="output"'):
        StackSpec(**spec, layers={"a": layer}, norm_position="output")
    with pytest.raises(ConfigError, match=sentence):
        LayerSpec(mixer="none", residual_scale=1.7, norm_position="pre")
    StackSpec(**spec, layers={"a": layer}, norm_position="post")
    StackSpec(**spec, layers={"a": layer | {"norm_position": "post"}})


def test_a_layer_may_be_only_a_mixer_or_only_an_mlp():
    layers = {"mlp": {"mixer": "none"}, "mamba": {"mixer": {"mixer": "mamba2", "value_heads": 2}, "mlp": "none"}}
    spec = StackSpec(width=WIDTH, depth=2, vocab=9, pattern="mlp + mamba", layers=layers, mlp={"width": 12})
    assert spec == StackSpec(**spec.model_dump(mode="json"))
    python = LayerSpec(mixer="none") + LayerSpec(mixer=Mamba2(value_heads=2), mlp="none")
    assert spec == StackSpec(width=WIDTH, depth=2, vocab=9, pattern=python, mlp={"width": 12})
    model = spec.build("reference")
    assert {name.split(".")[3] for name in model.state_dict() if name.startswith("stack.layers.0")} == {
        "mlp_norm",
        "mlp",
    }
    assert not any("mlp" in name for name in model.state_dict() if name.startswith("stack.layers.1"))
    x = torch.randn(1, 3, WIDTH)
    mlp = model.stack.layers[0]
    torch.testing.assert_close(mlp(x, ())[0], x + mlp.mlp(rms_norm(x, mlp.mlp_norm.weight), CONTEXT).y)
    assert [row.mixer for row in spec.describe().layers] == ["mlp", "mamba2"]
    assert [row.state_bytes > 0 for row in spec.describe().layers] == [False, True]
    with pytest.raises(ConfigError, match="a layer needs a mixer or an MLP, got 'none' for both"):
        LayerSpec(mixer="none", mlp="none")


ACTIVATIONS = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_computes_its_equation(activation, bias):
    phi = ACTIVATIONS[activation]
    gated = Dense(width=6, activation=activation, bias=bias).build(WIDTH)
    plain = Dense(width=6, activation=activation, bias=bias, gated=False).build(WIDTH)
    x = torch.randn(2, 3, WIDTH)
    gate, up = gated.to_hidden(x).split(6, -1)
    torch.testing.assert_close(gated(x, CONTEXT).y, gated.out(phi(gate) * up))
    torch.testing.assert_close(plain(x, CONTEXT).y, plain.out(phi(plain.to_hidden(x))))
    count = 3 * WIDTH * 6 + bias * (12 + WIDTH)
    assert sum(parameter.numel() for parameter in gated.parameters()) == count
    assert (plain.flops, gated.flops) == (4 * WIDTH * 6, 6 * WIDTH * 6)


SHARED = {
    "attn": {"mixer": {"mixer": "attention", "heads": 2}, "share": "a"},
    "gdn": {"mixer": "gated_deltanet", "heads": 1},
}


def shared_spec(**layers: object) -> StackSpec:
    return StackSpec(
        width=WIDTH, depth=4, vocab=9, pattern="gdn + attn", layers=SHARED | layers, mlp={"width": 12}, norm_eps=1e-5
    )


def test_shared_layers_have_one_set_of_weights_and_a_state_for_each_place():
    torch.manual_seed(0)
    model, tokens = shared_spec().build("reference").double(), torch.randint(9, (2, 7))
    layers = model.stack.layers
    assert layers[1] is layers[3]
    assert layers[0] is not layers[2]
    own = {"attn": {"mixer": {"mixer": "attention", "heads": 2}}}
    separate = shared_spec(**own).build("reference").double()
    separate.load_state_dict(model.state_dict())  # has the shared weights under both places
    expected = separate(tokens)[0]
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-12, atol=1e-12)
    state, logits = model.init_state(2, capacity=7), []
    for token in tokens.split(1, 1):
        out, state = model(token, state)
        logits.append(out)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-9, atol=1e-9)
    model.loss(tokens, tokens).backward()
    separate.loss(tokens, tokens).backward()
    at_1, at_3 = (separate.stack.layers[i].mlp.out.weight.grad for i in (1, 3))
    torch.testing.assert_close(layers[1].mlp.out.weight.grad, at_1 + at_3, rtol=1e-9, atol=1e-12)


def test_the_parameters_of_a_shared_layer_count_once():
    description = shared_spec().describe()
    assert [row.parameters > 0 for row in description.layers] == [True, True, True, False]
    assert description.parameters == sum(x.numel() for x in shared_spec().build("reference").parameters())
    assert description.cache_bytes == 2 * description.layers[1].cache_bytes > 0


def test_shared_layers_must_be_equal():
    other = {"mixer": {"mixer": "attention", "heads": 4}, "share": "a"}
    with pytest.raises(ConfigError, match="share: layers with the same label must be equal"):
        StackSpec(**shared_spec().model_dump() | {"pattern": "attn + other", "layers": SHARED | {"other": other}})


def test_embeddings_are_scaled_and_logits_capped():
    spec = {"width": WIDTH, "depth": 1, "vocab": 9, "pattern": Attention(heads=1), "mlp": {"width": 12}}
    torch.manual_seed(0)
    plain = StackSpec(**spec).build().double()
    model = StackSpec(**spec, embedding_scale=3.0, logit_cap=0.1).build().double()
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(9, (2, 5))
    features = plain.stack(3 * plain.embedding(tokens)).x
    expected = 0.1 * torch.tanh(features @ plain.embedding.weight.T / 0.1)
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.loss(tokens, tokens), F.cross_entropy(expected.flatten(0, 1), tokens.flatten()))
    for field in ({"embedding_scale": 2.0}, {"logit_cap": 30.0}, {"norm_position": "post"}):
        assert StackSpec(**spec) != StackSpec(**spec, **field)


def test_layer_norms_and_a_norm_of_the_embeddings() -> None:
    """x + MLP(norm(x)) by torch's layer norm, after the norm of the embeddings and before that of the head."""
    spec = {"width": WIDTH, "depth": 1, "vocab": 9, "pattern": "a", "mlp": {"width": 12}, "norm_eps": 1e-2}
    spec |= {"layers": {"a": {"mixer": "none"}}}
    model = StackSpec(**spec, norm="layer", embedding_norm=True).build().double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_()
    assert sum("norm" in name for name in model.state_dict()) == 6

    def norm(x: Tensor, name: str) -> Tensor:
        module = model.get_submodule(name)
        return F.layer_norm(x, (WIDTH,), module.weight, module.bias, 1e-2)

    tokens = torch.randint(9, (2, 5))
    x = norm(model.embedding.weight[tokens], "embedding_norm")
    mlp = model.stack.layers[0].mlp
    gate, up = (norm(x, "stack.layers.0.mlp_norm") @ mlp.to_hidden.weight.T).chunk(2, -1)
    x = norm(x + (F.silu(gate) * up) @ mlp.out.weight.T, "stack.norm")
    torch.testing.assert_close(model(tokens)[0], x @ model.embedding.weight.T, rtol=1e-12, atol=1e-12)
    again = StackSpec.model_validate(model.spec.model_dump())
    assert again == model.spec and again != StackSpec(**spec, norm="layer") != StackSpec(**spec)
    with pytest.raises(ConfigError, match=r'norm_offset needs norm="rms", got 1\.0'):
        StackSpec(**spec, norm="layer", norm_offset=1.0)


def test_an_offset_is_added_to_the_weights_of_all_norms_and_to_none_initially() -> None:
    """In float32, so that a bfloat16 weight near 0 has an effect that it would not have near 1."""
    sizes = {"width": WIDTH, "depth": 1, "vocab": 9, "mlp": {"width": 12}}
    attention = {"mixer": "attention", "heads": 2, "qk_norm": "head"}
    plain = StackSpec(**sizes, pattern="a", layers={"a": attention}).build()
    offset = StackSpec(**sizes, pattern="a", layers={"a": attention | {"norm_offset": 1.0}}, norm_offset=1.0).build()
    weights = plain.state_dict()
    norms = [name for name in weights if "norm" in name]
    assert len(norms) == 5
    assert all((offset.state_dict()[name] == 0).all() for name in norms)
    tokens = torch.arange(8)[None]
    offset.load_state_dict(weights | {name: torch.full_like(weights[name], 0.25) for name in norms})
    plain.load_state_dict(weights | {name: torch.full_like(weights[name], 1.25) for name in norms})
    torch.testing.assert_close(offset(tokens)[0], plain(tokens)[0])
    norm = offset.bfloat16().stack.norm
    norm.load_state_dict({"weight": torch.full((WIDTH,), 2.0**-12)})
    scale = norm.scale()
    assert scale is not None and scale.dtype == torch.float32 and (scale == 1 + 2.0**-12).all()
