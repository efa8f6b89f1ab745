"""Rules of the parts that families share: attention, MLPs, mixtures of experts, gated delta rules, Mamba.

The names of ours are those of a mixer's or MLP's module; the names of theirs are below the module of the same part.
"""

from typing import NamedTuple

from deltazoo.blocks.checkpoints.rules import Packed, Rule, Side, renamed, rule, under
from deltazoo.blocks.model.mlp import Dense
from deltazoo.blocks.model.moe import MoE
from deltazoo.mixers.attention import AttentionConfig
from deltazoo.mixers.kda import KDA
from deltazoo.mixers.mamba import Mamba
from deltazoo.mixers.mamba2 import Mamba2
from deltazoo.mixers.mla import MLA

QKV = {"q_proj.weight": "q", "k_proj.weight": "k", "v_proj.weight": "v"}


class AttentionNames(NamedTuple):
    """Their modules of attention beside q_proj, k_proj and v_proj."""

    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"


def attention(config: AttentionConfig, width: int, names: AttentionNames | None = None) -> list[Rule]:
    """Return rules of attention; with a gate, q_proj holds q and the gate of each head."""
    theirs_beside = names or AttentionNames()
    heads, key_value_heads, head_width = config.resolve_heads(width)
    sizes = {"q": heads * head_width, "k": key_value_heads * head_width, "v": key_value_heads * head_width}
    ours: dict[str, str | Packed] = {"to_qkv.weight": "q k v"}
    theirs: dict[str, str | Packed] = {**QKV}
    if config.gate:
        ours["to_gate.weight"] = "gate"
        theirs["q_proj.weight"] = Packed("q gate", groups=heads)
        sizes["gate"] = sizes["q"]
    modules = {"out": theirs_beside.out}
    if config.qk_norm:
        modules |= {"q_norm": theirs_beside.q_norm, "k_norm": theirs_beside.k_norm}
    return [rule(ours, theirs, sizes), *renamed({f"{x}.weight": f"{y}.weight" for x, y in modules.items()})]


class MlpNames(NamedTuple):
    """Their modules of an MLP, also of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def dense_mlp(config: Dense, width: int, names: MlpNames | None = None) -> list[Rule]:
    """Return rules of a dense MLP, gated or not."""
    gate, up, down = names or MlpNames()
    if not config.gated:
        return renamed({"to_hidden.weight": f"{up}.weight", "out.weight": f"{down}.weight"})
    sizes = dict.fromkeys(("gate", "up"), config.hidden(width))
    return [
        rule({"to_hidden.weight": "gate up"}, {f"{gate}.weight": "gate", f"{up}.weight": "up"}, sizes),
        rule("out.weight", f"{down}.weight"),
    ]


class ExpertNames(NamedTuple):
    """Their modules of a mixture of experts."""

    router: str = "gate"
    expert: MlpNames = MlpNames()
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    selection_bias: str = "gate.e_score_correction_bias"
    joined: tuple[str, str] | None = None  # tensors with the inputs and outputs of all experts, if they may be so
    to_latent: str = "fc1_latent_proj"
    from_latent: str = "fc2_latent_proj"


def experts(config: MoE, width: int, names: ExpertNames | None = None) -> list[Rule]:
    """Return rules of the router, experts.N, the shared expert and its gate, and the maps of latent vectors."""
    names = names or ExpertNames()
    kinds = {"gate": names.expert.gate} if config.gated else {}
    kinds["up"] = names.expert.up
    numbers, hidden = range(config.experts), config.hidden(width)
    pieces = [f"{kind}.{n}" for n in numbers for kind in kinds]
    inputs = {f"experts.{n}.{module}.weight": f"{kind}.{n}" for n in numbers for kind, module in kinds.items()}
    outputs = {f"experts.{n}.{names.expert.down}.weight": f"down.{n}" for n in numbers}
    stacked = [Packed(" ".join(kind), stack=config.experts) for kind in (pieces, outputs.values())]
    sizes = [dict.fromkeys(pieces, hidden), dict.fromkeys(outputs.values(), config.latent_width or width)]
    rules = [rule("router.weight", f"{names.router}.weight")]
    for i, (ours, theirs) in enumerate((("to_hidden.weight", inputs), ("out.weight", outputs))):
        joined = None if names.joined is None else {names.joined[i]: stacked[i]}
        rules.append(rule({ours: stacked[i]}, theirs, sizes[i])._replace(other_theirs=joined))
    if config.shared_width is not None:
        rules += under("shared.", f"{names.shared}.", dense_mlp(config.shared(), width))
    if config.shared_gate:
        rules.append(rule("shared_gate.weight", f"{names.shared_gate}.weight"))
    if config.latent_width is not None:
        maps = {"to_latent": names.to_latent, "from_latent": names.from_latent}
        rules += renamed({f"{x}.weight": f"{y}.weight" for x, y in maps.items()})
    if config.selection_bias:
        rules.append(rule("router.bias", names.selection_bias, precise=True))
    return rules


class DeltaNames(NamedTuple):
    """Their tensors of a gated delta rule. Pieces: q, k, v, gate, beta, decay; those of the convolution are q, k, v.

    `other_conv` has the rows of q, k and v in the convolutions of folders that were cut at other rows.
    """

    inputs: Side
    conv: Side
    norm: str = "norm.weight"
    out: str = "out_proj.weight"
    other_conv: dict[str, int] | None = None


def gated_delta(names: DeltaNames, sizes: dict[str, int]) -> list[Rule]:
    """Return rules of a gated delta rule. Args: sizes: rows of q, k, v, gate, beta and decay."""
    ours = {
        "project.to_qkv.weight": "q k v",
        "outputs.gate.proj.weight": "gate",
        "operands.beta.proj.weight": "beta",
        "operands.decay.proj.weight": "decay",
    }
    exact = {"operands.decay.A_log": "A_log", "operands.decay.dt_bias": "dt_bias", "outputs.norm.weight": names.norm}
    return [
        rule(ours, names.inputs, sizes),
        rule({"project.conv.weight": "q k v"}, names.conv, sizes)._replace(other_sizes=names.other_conv),
        rule("out.weight", names.out),
        *renamed(exact, precise=True),
    ]


def mamba(config: Mamba, channels: int) -> list[Rule]:
    """Return rules of Mamba's mixer; `config.inner_norm` "weighted" has Jamba's names of the norms."""
    selective = "operands.selective."
    names = {
        "project.conv.bias": "conv1d.bias",
        f"{selective}proj.weight": "x_proj.weight",
        f"{selective}to_step.weight": "dt_proj.weight",
        "out.weight": "out_proj.weight",
    }
    if config.inner_norm == "weighted":
        names |= {f"{selective}norms.{i}.weight": f"{x}_layernorm.weight" for i, x in enumerate(("dt", "b", "c"))}
    exact = {f"{selective}to_step.bias": "dt_proj.bias", f"{selective}A_log": "A_log", "outputs.skip.D": "D"}
    return [
        rule(
            {"project.to_v.weight": "x", "outputs.gate.proj.weight": "gate"},
            {"in_proj.weight": "x gate"},
            {"x": channels, "gate": channels},
        ),
        rule("project.conv.weight", {"conv1d.weight": Packed("all", axes=(1,))}),
        *renamed(names),
        *renamed(exact, precise=True),
    ]


def mamba2(config: Mamba2, width: int) -> list[Rule]:
    """Return rules of Mamba-2's mixer: in_proj holds the gate, x, B, C and dt; the convolution x, B and C."""
    shape = config.shape(width)
    inner, keys = shape.value_heads * shape.value_width, shape.heads * shape.key_width
    sizes = {"gate": inner, "x": inner, "B": keys, "C": keys, "dt": shape.value_heads}
    ours = {
        "project.to_qkv.weight": "C B x",
        "outputs.gate.proj.weight": "gate",
        "operands.decay.proj.weight": "dt",
    }
    exact = {"operands.decay.A_log": "A_log", "operands.decay.dt_bias": "dt_bias", "outputs.skip.D": "D"}
    names = {"out.weight": "out_proj.weight"} | ({"outputs.norm.weight": "norm.weight"} if config.norm else {})
    return [
        rule(ours, {"in_proj.weight": "gate x B C dt"}, sizes),
        rule({"project.conv.weight": "C B x"}, {"conv1d.weight": Packed("x B C", axes=(1,))}, sizes),
        rule({"project.conv.bias": "C B x"}, {"conv1d.bias": "x B C"}, sizes),
        *renamed(names),
        *renamed(exact, precise=True),
    ]


def kda(config: KDA, width: int, out: str = "o_proj") -> list[Rule]:
    """Return rules of KDA. Args: out: their module of the output map."""
    shape = config.shape(width)
    keys = shape.heads * shape.key_width
    sizes = {"q": keys, "k": keys, "v": shape.value_heads * shape.value_width}
    names = {
        "operands.beta.proj": "b_proj",
        "operands.decay.proj.0": "f_a_proj",
        "operands.decay.proj.1": "f_b_proj",
        "outputs.gate.proj.0": "g_a_proj",
        "outputs.gate.proj.1": "g_b_proj",
        "out": out,
    }
    conv = {f"{x}_conv1d.weight": Packed(x, axes=(1,)) for x in "qkv"}
    axes: tuple[int, ...] = (0, 1, 3)  # of A_log
    if config.gate_rank == "full":  # Ling 3.0
        names = {name: theirs for name, theirs in names.items() if not name.endswith((".0", ".1"))}
        names |= {"operands.decay.proj": "f_proj", "outputs.gate.proj": "g_proj"}
        axes = ()
    return [
        rule({"project.to_qkv.weight": "q k v"}, QKV, sizes),
        rule({"project.conv.weight": "q k v"}, conv, sizes),
        rule("operands.decay.A_log", {"A_log": Packed("all", axes=axes)}, precise=True),
        *renamed({"operands.decay.dt_bias": "dt_bias", "outputs.norm.weight": "o_norm.weight"}, precise=True),
        *renamed({f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}),
    ]


def mla(config: MLA, out: str = "o_proj") -> list[Rule]:
    """Return rules of latent attention. Theirs rotates adjacent channels, ours two halves. Args: out: see `kda`."""
    names = {
        "latent_norm": "kv_a_layernorm",
        "to_kv": "kv_b_proj",
        "out": out,
    }
    query = "to_q", "q_proj"
    if config.query_rank is not None:
        query = "to_q.2", "q_b_proj"
        names |= {"to_q.0": "q_a_proj", "to_q.1": "q_a_layernorm"}
    if config.gate is not None:
        names["to_gate"] = "g_proj"
    half = 0 if config.rotary_theta is None else (config.rotary_width or 0) // 2
    heads = range(config.heads or 1)
    sizes = {"latent": config.latent_width or 0, "even": half, "odd": half}
    for h in heads:
        sizes |= {f"q{h}": config.key_width or 0, f"even{h}": half, f"odd{h}": half}
    rotary = {
        ("to_latent", "kv_a_proj_with_mqa"): "latent even~odd",
        query: " ".join(f"q{h} even{h}~odd{h}" for h in heads),
    }
    rules = renamed({f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()})
    for (ours, theirs), pieces in rotary.items():
        pieces = pieces if half else "all"
        rules.append(rule({f"{ours}.weight": pieces.replace("~", " ")}, {f"{theirs}.weight": pieces}, sizes))
    return rules
