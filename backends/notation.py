"""How a spec is written down: its equation, and the papers whose update it is."""

from deltazoo.backends.spec import UpdateSpec

_DECAY = {"none": "", "fixed": "Diag(d)", "head": "d_t", "channel": "Diag(d_t)", "rate": "Diag(exp(step_t rate))"}


def equation(spec: UpdateSpec) -> str:
    """Write the recurrence in one or two lines of plain text.

    S_t = d_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T;  o_t = scale S_t^T q_t
    """
    decay = _DECAY[spec.decay]
    decayed = f"{decay} S_(t-1)" if decay else "S_(t-1)"
    write = {"none": "k_t v_t^T", "head": "{w} k_t v_t^T", "channel": "k_t (w_t * v_t)^T"}[spec.beta]
    strength = _strength(spec)
    write = write.format(w=strength[1])
    if spec.negative_eigenvalues == "both" and spec.beta == "channel":
        write = "2 " + write
    if spec.transition == "additive":
        body = f"S_t = {decayed} + {write}"
    elif spec.transition == "dplr":
        body = f"S_t = {decayed} + b_t (a_t^T S_(t-1)) + {write}"
    else:
        key = "e_t" if spec.erase_key == "own" else "k_t"
        read = f"({'b_t * ' if spec.beta == 'channel' else ''}{key})^T".replace("(k_t)", "k_t").replace("(e_t)", "e_t")
        state = "S_(t-1)" if spec.erase_from == "previous" else decayed
        erase = f"{strength[0]} k_t {read} {state}".strip()
        body = f"S_t = {decayed} - {erase} + {write}"
        if spec.beta != "head" and spec.reparam != "none":
            body = body.replace(write, f"f_t {write}")
    if spec.householders > 1:
        body += f"   ({spec.householders} such steps a token, the decay on the first)"
    scale = "K^-1/2 " if spec.scale is None else "" if spec.scale == 1 else f"{spec.scale:g} "
    line = f"{body};  o_t = {scale}{'S_(t-1)' if spec.read == 'before' else 'S_t'}^T q_t"
    return f"{line}{_where(spec)}"


def _strength(spec: UpdateSpec) -> tuple[str, str]:
    """The factors on erase and write, as written."""
    if spec.reparam != "none":
        return "f_t", "f_t"
    beta = "beta_t" if spec.beta == "head" else ""
    doubled = f"2 {beta}".strip()
    if spec.negative_eigenvalues == "off":
        return beta, beta
    return doubled, doubled if spec.negative_eigenvalues == "both" else beta


def _where(spec: UpdateSpec) -> str:
    if spec.reparam == "none":
        return ""
    n = "k_t^T (b_t * k_t)" if spec.beta == "channel" else "|k_t|^2"
    beta = "beta_t" if spec.beta == "head" else "1"
    if spec.reparam == "efla":
        factor = f"(1 - exp(-{beta} {n})) / {n}".replace("-1 ", "-")
    else:
        factor = f"{beta} / (1 + {beta} {n})".replace("1 |", "|").replace("1 k", "k")
    return f"\n  with f_t = {factor}"


# The papers whose update a spec is, by the axes that differ from UpdateSpec's defaults (scale left out).
_PAPERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("linear attention (Katharopoulos 2020, 2006.16236)", {"transition": "additive"}),
    ("RetNet (Sun 2023, 2307.08621)", {"transition": "additive", "decay": "fixed"}),
    ("Lightning Attention (2401.04658)", {"transition": "additive", "decay": "fixed"}),
    ("Mamba-2 (Dao & Gu 2024, 2405.21060)", {"transition": "additive", "decay": "head"}),
    ("GLA (Yang 2024, 2312.06635)", {"transition": "additive", "decay": "channel"}),
    ("HGRN2 (Qin 2024, 2404.07904)", {"transition": "additive", "decay": "channel"}),
    ("RWKV-6 (Peng 2024, 2404.05892)", {"transition": "additive", "decay": "channel", "read": "before"}),
    ("Mamba (Gu & Dao 2023, 2312.00752)", {"transition": "additive", "decay": "rate"}),
    ("DeltaNet (Schlag 2021, 2102.11174; Yang 2024, 2406.06484)", {"beta": "head"}),
    ("DeltaNet, eigenvalues in [-1, 1] (Grazzi 2024, 2411.12537)", {"beta": "head", "negative_eigenvalues": "both"}),
    ("Gated DeltaNet (Yang 2024, 2412.06464)", {"beta": "head", "decay": "head"}),
    ("Kimi Delta Attention (2510.26692)", {"beta": "head", "decay": "channel"}),
    ("Gated DeltaNet-2 (2605.22791)", {"beta": "channel", "decay": "channel"}),
    ("EFLA (2512.12602)", {"beta": "head", "reparam": "efla"}),
    ("Longhorn, exact form (Liu 2024, 2407.14207)", {"beta": "head", "reparam": "longhorn"}),
    ("Comba (2506.02475)", {"beta": "head", "decay": "head", "erase_key": "own", "erase_from": "previous"}),
    ("RWKV-7 (Peng 2025, 2503.14456)", {"transition": "dplr", "decay": "channel", "erase_from": "previous"}),
)


def papers(spec: UpdateSpec) -> list[str]:
    """Name the papers whose update this spec is; empty for a combination that is new."""
    given = {
        name: value
        for name, value in spec.model_dump(exclude={"version", "scale", "householders"}).items()
        if value != UpdateSpec.model_fields[name].default
    }
    equal = [paper for paper, axes in _PAPERS if axes == given]
    if spec.householders == 1:
        return equal
    plain = {key: value for key, value in given.items() if key not in ("decay", "negative_eigenvalues")}
    if plain != {"beta": "head"} or spec.decay not in ("none", "head"):
        return []
    return [f"{'Gated ' if spec.decay == 'head' else ''}DeltaProduct, n = {spec.householders} (Siems 2025, 2502.10297)"]
