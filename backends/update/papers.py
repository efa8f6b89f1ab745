"""Papers that define the same update as a spec."""

from deltazoo.backends.update.spec import UpdateSpec

# Paper -> the fields of its UpdateSpec that differ from the defaults; scale is not compared.
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
    ("Longhorn, exact form (Liu et al. 2024, 2407.14207)", {"beta": "head", "reparam": "longhorn"}),
    ("Comba (2506.02475)", {"beta": "separate", "decay": "head", "erase_from": "previous"}),
    ("RWKV-7 (Peng 2025, 2503.14456)", {"transition": "dplr", "decay": "channel", "erase_from": "previous"}),
)


def papers(spec: UpdateSpec) -> list[str]:
    """Return the papers that define this update; [] for a combination of fields that no listed paper has."""
    fields = {
        name: value
        for name, value in spec.model_dump(exclude={"version", "scale", "householders"}).items()
        if value != UpdateSpec.model_fields[name].default
    }
    matches = [paper for paper, paper_fields in _PAPERS if paper_fields == fields]
    if spec.householders == 1:
        return matches
    shared = {key: value for key, value in fields.items() if key not in ("decay", "negative_eigenvalues")}
    if shared != {"beta": "head"} or spec.decay not in ("none", "head"):
        return []
    return [f"{'Gated ' if spec.decay == 'head' else ''}DeltaProduct, n = {spec.householders} (Siems 2025, 2502.10297)"]
