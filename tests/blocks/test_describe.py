"""`describe` counts the parameters, bytes and FLOPs of the built model."""

import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import deltazoo
from deltazoo.blocks.inspect.describe import describe
from deltazoo.blocks.model.layer import LayerSpec
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.mixers import Attention, GatedDeltaNet, Mamba2, MoM
from deltazoo.mixers.core.state import nbytes


def test_parameter_counts_equal_those_of_the_built_model(spec):
    for stack in (spec, StackSpec(**dict(spec) | {"tied": False})):
        model, description = stack.build(), stack.describe()
        assert description.parameters == sum(parameter.numel() for parameter in model.parameters())
        for row, layer in zip(description.layers, model.stack.layers, strict=True):
            assert row.parameters == sum(parameter.numel() for parameter in layer.parameters())
        rest = description.parameters - sum(row.parameters for row in description.layers) - stack.width
        assert description.embedding_parameters == rest == stack.vocab * stack.width * (1 if stack.tied else 2)
        assert description == describe(model)


@pytest.mark.parametrize("capacity", [2048, 2053])  # the window, and more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_byte_counts_equal_those_of_a_state(spec, capacity, dtype):
    model = spec.build().to(dtype)
    description = describe(model)
    assert description.dtype == str(dtype).split(".")[1]
    assert description.state_bytes + capacity * description.cache_bytes == nbytes(model.init_state(1, capacity))
    assert [row.cache_bytes > 0 for row in description.layers] == [False, False, True]


def test_flops_equal_those_that_torch_counts():
    stack = StackSpec(width=32, depth=2, vocab=50, pattern=Attention(heads=2))
    with FlopCounterMode(display=False) as counter:  # on the CPU it counts the projections, not the attention scores
        stack.build()(torch.zeros(1, 40, dtype=torch.int64))
    description = stack.describe()
    assert counter.get_total_flops() == 40 * description.flops
    assert description.flops_context == 2 * 4 * 32


def test_a_row_lists_mixers_equations_and_backends(spec):
    rows = spec.describe().layers
    assert [row.name for row in rows] == ["gated_deltanet", "sliding_window", "attention"]
    assert [row.mlp for row in rows] == ["SwiGLU 24", "SwiGLU 24", ""]
    assert [row.mixer for row in rows] == ["gated_deltanet", "sliding_window", "attention | gated_deltanet"]
    assert rows[2].equation.split("\n") == [Attention().equation(), GatedDeltaNet().equation()]
    assert [row.backends.get("cpu") for row in rows] == ["compile", None, "compile"]
    assert spec.describe(backend="reference").layers[0].backends == {"cpu": "reference", "cuda": "reference"}
    with deltazoo.use_backend("reference"):
        assert spec.describe().layers[0].backends == {"cpu": "reference", "cuda": "reference"}


MIXED = StackSpec(
    width=16,
    depth=9,
    vocab=50,
    pattern="3*gdn + (mamba2 | attention) + bare + attention(heads=1) + 3*attention",
    layers={
        "gdn": {"mixer": "gated_deltanet", "heads": 1},
        "mamba2": Mamba2(heads=1, value_heads=1),
        "attention": Attention(heads=2),
        "bare": {"mixer": "none", "mlp": {"width": 24, "activation": "relu2", "gated": False, "bias": True}},
    },
    mlp="dense(width=8)@[0, 1] else moe(width=8, experts=4, shared_width=6)",
)
MOE = "MoE 2/4 x 8 + 6"
RUNS = [
    ("0-1", "gdn", "gated_deltanet", "SwiGLU 8"),
    ("2", "gdn", "gated_deltanet", MOE),
    ("3", "", "mamba2 | attention", MOE),
    ("4", "bare", "mlp", "ReLU2 24 bias"),
    ("5", "", "attention", MOE),  # one head
    ("6-8", "", "attention", MOE),
]
FIGURES = ("parameters", "active_parameters", "flops", "flops_context", "state_bytes", "cache_bytes")


def expected_rows(description):
    """The cells of each run of equal layers and of the totals, figures exact."""
    rows = [description.layers[int(run[0].split("-")[0])] for run in RUNS]
    figures = [[f"{getattr(row, field):,}" for field in FIGURES] for row in [*rows, description]]
    return [[*run, *cells] for run, cells in zip([*RUNS, ("all", "", "", "")], figures, strict=True)]


def test_the_table_lists_runs_of_equal_layers_in_order():
    description = MIXED.describe()
    expected = expected_rows(description)
    lines = description.lines()
    rows = [re.split(r" {2,}", line) for line in lines[3 : 3 + len(expected)]]
    assert rows == [[cell for cell in row if cell] for row in expected]
    markdown = description.markdown().splitlines()
    assert markdown[0].startswith(
        "| layers | name | mixer | MLP | params | active params | FLOPs/token | FLOPs/context |"
    )
    assert [re.split(r" *(?<!\\)\| *", row)[1:-1] for row in markdown[2:]] == [
        [cell.replace("|", "\\|") for cell in row] for row in expected
    ]


def test_print_of_a_stack_and_of_its_description_is_the_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert str(MIXED) == str(MIXED.describe()) == "\n".join(MIXED.describe().lines(200))
    wrong = StackSpec(width=15, depth=1, vocab=9, pattern=Attention(heads=99))
    assert str(wrong).startswith(f"{wrong!r}\ncannot be built: layer 0 (attention): ")


@pytest.mark.parametrize("width", [80, 100, 150])
def test_the_table_fits_a_width_and_keeps_every_row(width):
    description = MIXED.describe()
    lines = description.lines(width)
    assert max(map(len, lines)) <= width
    runs = [line.split()[0] for line in lines if re.match(r"(\d+(-\d+)?|all) ", line)]
    assert runs == [row[0] for row in expected_rows(description)]
    words = " ".join(lines).split()
    for run in RUNS:
        assert {*" ".join(run).split()} <= {*words}


def test_large_figures_have_four_digits_and_a_unit_where_exact_ones_do_not_fit():
    spec = StackSpec(
        width=4096, depth=3, vocab=32000, pattern="2*mamba2 + attention", mlp="moe(experts=512, width=9999)"
    )
    description = spec.describe()
    (last,) = (line for line in description.lines(80) if line.startswith("all"))
    expected = [f"{getattr(description, field) / 1e9:.4g}" for field in ("parameters", "active_parameters", "flops")]
    assert last.split()[1:4] == [f"{expected[0]}B", f"{expected[1]}B", f"{expected[2]}G"]
    (last,) = (line for line in description.lines(200) if line.startswith("all"))
    assert last.split()[1:4] == [
        f"{n:,}" for n in (description.parameters, description.active_parameters, description.flops)
    ]


def test_active_parameters_leave_out_the_experts_and_memories_that_a_token_does_not_use():
    moe, dense = MoE(width=8, experts=5, active=2, shared_width=4), Dense(width=8)
    mom = MoM(memory=GatedDeltaNet(heads=1), memories=4, active=1)
    shared = LayerSpec(mixer=mom, mlp=moe, share="a")
    spec = StackSpec(width=16, depth=3, vocab=9, pattern=2 * shared + Attention(heads=1), mlp=dense)
    model, description = spec.build(), spec.describe()
    layer = model.stack.layers[0]
    joint = layer.mixers[0].joint
    maps = [next(iter(of_memories.children())) for of_memories in (joint.to_kv, *joint.gates.values())]
    unused = 3 * 3 * 16 * 8 + 3 * sum(x.numel() for part in maps for x in part.parameters())
    first, again, last = description.layers
    assert first.parameters - first.active_parameters == unused
    assert (again.parameters, again.active_parameters) == (0, 0)
    assert last.active_parameters == last.parameters
    assert description.parameters - description.active_parameters == unused
    assert "0 params: the layer shares the weights" in str(spec)
