"""How a spec is written down: its equation, and the papers whose update it is."""

from deltazoo.backends.spec import UpdateSpec

_SCALAR_DECAY = {"head": "d_t"}
_MATRIX_DECAY = {"fixed": "Diag(d)", "channel": "Diag(d_t)", "rate": "Diag(exp(step_t rate))"}


def equation(spec: UpdateSpec) -> str:
    """Write the recurrence in one or two lines of plain text; d is the decay exp(log_decay), f a strength made of k.

    S_t = d_t (I - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T;  o_t = K^-1/2 S_t^T q_t
    """
    erase, write = _strengths(spec)
    value = "(w_t * v_t)^T" if spec.beta == "channel" else "v_t^T"
    line = f"S_t = {_kept(spec, erase)} + {_product(write, 'k_t', value)}"
    if spec.householders > 1:
        line += f"   ({spec.householders} such steps a token, the decay on the first)"
    scale = "K^-1/2" if spec.scale is None else "" if spec.scale == 1 else f"{spec.scale!r}"
    read = "S_(t-1)^T" if spec.read == "before" else "S_t^T"
    return f"{line};  o_t = {_product(scale, read, 'q_t')}{_factor(spec)}"


def _kept(spec: UpdateSpec, erase: str) -> str:
    """What is left of the previous state."""
    scalar, matrix = _SCALAR_DECAY.get(spec.decay, ""), _MATRIX_DECAY.get(spec.decay, "")
    if spec.transition == "additive":
        return _product(scalar, matrix, "S_(t-1)")
    diagonal = matrix or _product(scalar, "I")
    if spec.transition == "dplr":
        return f"({diagonal} + b_t a_t^T) S_(t-1)"
    key = "e_t" if spec.erase_key == "own" else "k_t"
    reader = f"(b_t * {key})^T" if spec.beta == "channel" else f"{key}^T"
    erased = _product(erase, "k_t", reader)
    if spec.erase_from == "previous":
        return f"({diagonal} - {erased}) S_(t-1)"
    return _product(scalar, f"(I - {erased})", matrix, "S_(t-1)")


def _strengths(spec: UpdateSpec) -> tuple[str, str]:
    """The scalars before the erase and the write."""
    if spec.reparam != "none":
        return "f_t", "f_t"
    beta = "beta_t" if spec.beta == "head" else ""
    doubled = _product("2", beta)
    return {"off": (beta, beta), "both": (doubled, doubled), "erase": (doubled, beta)}[spec.negative_eigenvalues]


def _factor(spec: UpdateSpec) -> str:
    """The line that says what f_t is."""
    if spec.reparam == "none":
        return ""
    norm = "(k_t^T (b_t * k_t))" if spec.beta == "channel" else "|k_t|^2"
    beta = "beta_t" if spec.beta == "head" else ""
    time = _product(beta, norm)
    factor = f"(1 - exp(-{time})) / {norm}" if spec.reparam == "efla" else f"{beta or 1} / (1 + {time})"
    return f"\n  with f_t = {factor}"


def _product(*factors: str) -> str:
    return " ".join(factor for factor in factors if factor)


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
