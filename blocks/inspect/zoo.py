"""The page of the zoo: every mixer with its equation, spec, cost, backends, source, oracle and length."""

import inspect
from pathlib import Path

from pydantic import BaseModel

from deltazoo.blocks.inspect.catalog import MixerEntry, catalog
from deltazoo.blocks.inspect.show import sheet
from deltazoo.mixers.core.config import config_class
from deltazoo.mixers.core.mixer import MixerConfig

WIDTH = 1024
EQUATION = "its equation, token by token in float64"

# What each is tested against; in tests/mixers.
ORACLES = {
    "attention": "transformers `llama`, `qwen3_next`",
    "sliding_window": "masked softmax in float64",
    "linear_attention": EQUATION,
    "retnet": EQUATION,
    "lightning_attention": "transformers `minimax`",
    "gated_retnet": EQUATION,
    "gated_rfa": EQUATION,
    "mlstm": "transformers `xlstm`; the unstabilised equation in float64",
    "mamba2": "transformers `mamba2`",
    "mamba": "transformers `mamba`, `falcon_mamba`",
    "s4d": "its equation in complex float64; scipy.signal's discretisations",
    "gla": EQUATION,
    "hgrn2": EQUATION,
    "hgrn": "its equation in complex float64",
    "rwkv4": "transformers `rwkv`, forward",
    "rwkv6": EQUATION,
    "rwkv7": EQUATION,
    "gsa": EQUATION,
    "rg_lru": "transformers `recurrent_gemma`",
    "lru": "its equation in complex float64",
    "s5": "its equation in complex float64; scipy.signal's discretisations",
    "deltanet": EQUATION,
    "deltaproduct": EQUATION,
    "gated_deltaproduct": EQUATION,
    "longhorn": EQUATION,
    "longhorn_diagonal": EQUATION,
    "efla": EQUATION,
    "gated_deltanet": "transformers `qwen3_next`, `qwen3_5`, `olmo_hybrid`",
    "gated_efla": "matrix exponential in float64",
    "gated_longhorn": "the implicit step, solved in float64",
    "kda": "transformers `kimi_linear`, `bailing_hybrid`",
    "gated_deltanet2": EQUATION,
    "comba": EQUATION,
    "ttt_linear": "its equation in float64, the inner gradient by autograd",
    "titans": "its equation in float64, the inner gradient by autograd",
    "mesa": "an exact solve for every token in float64",
    "mom": "a loop over tokens and memories, for every mixer of table A",
    "h3": "its equation in complex float64",
    "hyena": "its equation in float64",
}


class Animal(BaseModel):
    """One mixer of the zoo, with its defaults at width 1024."""

    name: str
    about: str
    equation: str
    spec: str
    state: int
    cache: int
    flops: int
    backends: list[str]
    source: str
    oracle: str
    lines: int


def zoo() -> list[Animal]:
    """Every mixer that is installed with deltazoo itself."""
    return [_animal(entry) for entry in catalog().mixers if entry.owner.startswith("deltazoo ")]


def page() -> str:
    """The zoo as Markdown."""
    head = [
        "# The zoo",
        "",
        f"Made by `deltazoo zoo`. Figures are for the defaults at width {WIDTH}: the state in bytes a sequence (and",
        "what a cache adds for every token kept), forward FLOPs a token with the projections. Backends are those that",
        "take it on the CPU. Lines are those of the mixer's file; what it shares with others stands in parts.",
        "Indented stands the update inside, in the words of its spec.",
        "",
    ]
    return "\n".join([*head, *(line for animal in zoo() for line in _section(animal))]).rstrip() + "\n"


def _animal(entry: MixerEntry) -> Animal:
    name = entry.name
    kind = config_class(name)
    found = sheet(name, WIDTH)
    cost = kind().cost(WIDTH)
    return Animal(
        name=name,
        about=(inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " "),
        equation=entry.equation,
        spec=entry.spec or "outside the update spec",
        state=cost.state_bytes,
        cache=cost.cache_bytes,
        flops=cost.flops,
        backends=[row.backend for row in found.backends if row.chosen or not _refuses(row.reasons)],
        source=kind.source,
        oracle=ORACLES.get(name, ""),
        lines=_lines(kind),
    )


def _refuses(reasons: list[str]) -> bool:
    return not all(reason.startswith(("can, ", "can; ")) for reason in reasons)


def _lines(kind: type[MixerConfig]) -> int:
    return len(Path(inspect.getfile(kind)).read_text().splitlines())


def _section(animal: Animal) -> list[str]:
    cache = f" + {animal.cache:,} a token" if animal.cache else ""
    return [
        f"## {animal.name}",
        "",
        animal.about,
        "",
        *(f"    {line}" for line in animal.equation.splitlines()),
        "",
        f"- spec: `{animal.spec}`",
        f"- state: {animal.state:,} bytes{cache}; {animal.flops:,} FLOPs a token",
        f"- backends: {', '.join(animal.backends) or 'needs none'}",
        f"- source: {animal.source}",
        f"- oracle: {animal.oracle}",
        f"- lines: {animal.lines}",
        "",
    ]
