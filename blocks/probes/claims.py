"""Claims of papers about mixers, each with the runs that decide it; `deltazoo probe --claim NAME` makes its page."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deltazoo.blocks.probes.records import Run, cells
from deltazoo.blocks.probes.tasks import task as task_of

_REACHED, _MARGIN = 0.99, 0.05
_HOLDS = {True: "holds", False: "does not hold", None: "not decided"}
# With the short convolution of the delta rules. GLA's keys are half as wide by default.
_ADDITIVE = ("simple_gla(conv_width=4)", "gla(conv_width=4,key_width=32)")


class Claim(NamedTuple):
    """A claim: on each task, the first mixers are better than the second ones.

    Args:
        sentence: the claim; source: who makes it.
        better, worse: mixers, compared on each task by the mean score of their seeds.
        solved: whether the claim is about what a layer can compute: then `better` must reach 99 %, and the best seed of
            each mixer counts.
        stable: whether the claim is about divergence: then no run of `better` may diverge, at any rate, and some run of
            each of `worse` must.
        also: mixers that the page shows beside them.
        published: by task and mixer, the scaled accuracy in percent that the source reports.
        difference: how the runs differ from those of the source, where the tasks do not say it.
    """

    title: str
    sentence: str
    source: str
    tasks: tuple[str, ...]
    better: tuple[str, ...]
    worse: tuple[str, ...]
    solved: bool = False
    stable: bool = False
    also: tuple[str, ...] = ()
    published: Mapping[str, Mapping[str, float]] | None = None
    difference: str = ""

    @property
    def mixers(self) -> tuple[str, ...]:
        """Every mixer of the page."""
        return *self.better, *self.worse, *self.also


# Heads of 32 channels whatever the width, as in the source.
_PUBLISHED_SIZES = "gate=false,conv_width=0,key_width=32,value_width=32"
_NEGATIVE_GDN = "gated_deltanet(negative_eigenvalues=both)"
CLAIMS = {
    "negative-eigenvalues": Claim(
        "Parity needs negative eigenvalues",
        "With eigenvalues in [-1, 1] a layer of DeltaNet or Gated DeltaNet computes parity beyond its training length; "
        "with eigenvalues in [0, 1], and with Mamba-2's positive decays, it does not.",
        "Grazzi 2024, arXiv 2411.12537",
        ("parity",),
        ("deltanet(negative_eigenvalues=both)", "gated_deltanet(negative_eigenvalues=both)"),
        ("deltanet", "gated_deltanet", "mamba2"),
        solved=True,
    ),
    "two-householders": Claim(
        "Two Householder steps solve S3",
        "A layer of DeltaProduct with two steps per token and eigenvalues in [-1, 1] solves the word problem of S3 "
        "beyond its training length; one step, or eigenvalues in [0, 1], does not.",
        "Siems 2025, arXiv 2502.10297, section 5.1",
        ("s3",),
        ("deltaproduct(gate=false,conv_width=0)",),
        (
            "deltaproduct(gate=false,conv_width=0,householders=1)",
            "deltaproduct(gate=false,conv_width=0,negative_eigenvalues=off)",
        ),
        solved=True,
    ),
    "delta-rule-recall": Claim(
        "The delta rule recalls more than additive updates",
        "DeltaNet and Gated DeltaNet recall more pairs than Simple GLA and GLA, which add to states of the same K x V "
        "with a decay per head and per channel, all with a short convolution.",
        "Yang 2024, arXiv 2406.06484 and 2412.06464",
        ("mqar_short", "mqar"),
        ("deltanet", "gated_deltanet"),
        _ADDITIVE,
    ),
    "overwriting": Claim(
        "The delta rule replaces a value",
        "If keys get new values, DeltaNet and Gated DeltaNet recall the latest one better than additive updates with a "
        "decay, Simple GLA and GLA, with the same short convolution and states of the same K x V.",
        "the construction of the delta rule; task: HazyResearch/zoology",
        ("forgetting_mqar",),
        ("deltanet", "gated_deltanet"),
        _ADDITIVE,
    ),
    "selection": Claim(
        "Selection solves selective copying",
        "Mamba and Mamba-2, whose step depends on the token, copy data among noise; S4D, whose step does not, fails.",
        "Gu & Dao 2023, arXiv 2312.00752, table 1",
        ("selective_copying",),
        ("mamba", "mamba2"),
        ("s4d",),
    ),
    "gates-forget": Claim(
        "Gates forget what does not matter",
        "Gated DeltaNet finds a needle among random words in sequences longer than those of its training, where "
        "DeltaNet, which has no decay, fails.",
        "Yang 2024, arXiv 2412.06464, table 2, S-NIAH-2",
        ("needle2",),
        ("gated_deltanet",),
        ("deltanet",),
    ),
    "gates-cost-retention": Claim(
        "Gates cost retention",
        "In a haystack that repeats one sentence, DeltaNet finds the needle in sequences longer than those of its "
        "training, and Gated DeltaNet, whose state decays, does worse.",
        "Yang 2024, arXiv 2412.06464, table 2, S-NIAH-1",
        ("needle1",),
        ("deltanet",),
        ("gated_deltanet",),
    ),
    "short-convolution": Claim(
        "Short convolutions matter for recall",
        "Without the short convolution of q, k and v, DeltaNet and Gated DeltaNet lose recall.",
        "Yang 2024, arXiv 2406.06484, table 3",
        ("mqar_short",),
        ("deltanet", "gated_deltanet"),
        ("deltanet(conv_width=0)", "gated_deltanet(conv_width=0)"),
    ),
    "stable-step": Claim(
        "EFLA's step is stable without a norm of the keys",
        "EFLA, which integrates the delta rule exactly over a step, trains with keys of any length; DeltaNet, whose "
        "step is Euler's, needs the L2 norm of its keys.",
        "Lei 2025, arXiv 2512.12602",
        ("mqar_short", "stacks"),
        ("efla",),
        ("deltanet(key_norm=false)",),
        stable=True,
        also=("efla(key_norm=true)", "deltanet"),
    ),
    "robust-digits": Claim(
        "EFLA reads digits whose pixels are disturbed",
        "Trained on handwritten digits, pixel by pixel, EFLA reads digits with dropped, scaled and noisy pixels better "
        "than DeltaNet.",
        "Lei 2025, arXiv 2512.12602, robustness",
        ("digits_dropped", "digits_scaled", "digits_noisy"),
        ("efla",),
        ("deltanet",),
        also=("s4d", "attention"),
        difference="images of 8 x 8 pixels with a token for each of 17 greys, in place of 28 x 28 real numbers: a "
        "scaled pixel is another token.",
    ),
    "mixture-of-memories": Claim(
        "A mixture of memories recalls more with the same active state",
        "With four memories, of which each token uses one, MoM recalls more pairs than Gated DeltaNet, whose state has "
        "the size of one memory.",
        "Du 2025, arXiv 2502.13685",
        ("capacity",),
        ("mom(active=1,shared=false)",),
        ("gated_deltanet",),
        also=("mom", "deltanet"),
    ),
    "hybrids-recall": Claim(
        "A layer of attention recalls what recurrent stacks do not",
        "With attention in place of one of two recurrent layers a model recalls more pairs than a fixed state stores.",
        "Arora 2024, arXiv 2402.18668; Yang 2024, arXiv 2412.06464, hybrid models",
        ("capacity",),
        ("gated_deltanet + attention", "mamba2 + attention"),
        ("gated_deltanet", "mamba2"),
        also=("attention",),
    ),
    "induction-heads": Claim(
        "Mamba extrapolates induction heads to 2^20 tokens",
        "Mamba, trained on 256 tokens, recalls what followed a token in sequences of 1,048,576 tokens; H3 and Hyena do "
        "not.",
        "Gu & Dao 2023, arXiv 2312.00752, table 2",
        ("induction_long",),
        ("mamba",),
        ("h3", "hyena"),
        solved=True,
        also=("mamba2", "gated_deltanet"),
        difference="10,000 steps of 64 sequences in place of 204,800 of 8, which are 39 % of the sequences; bfloat16.",
    ),
    "s3-published": Claim(
        "DeltaProduct's S3 at the published size",
        "One layer of DeltaProduct with two steps per token and eigenvalues in [-1, 1], trained on 128 tokens, solves "
        "S3 at 512 tokens; with one step, or eigenvalues in [0, 1], it does not.",
        "Siems 2025, arXiv 2502.10297, section 5.1; automl/DeltaProduct",
        ("s3_published",),
        (f"deltaproduct({_PUBLISHED_SIZES})",),
        (
            f"deltaproduct({_PUBLISHED_SIZES},householders=1)",
            f"deltaproduct({_PUBLISHED_SIZES},negative_eigenvalues=off)",
        ),
        solved=True,
        difference="new sequences in every step, in place of 100 epochs of 100,000; float32 weights with products in "
        "bfloat16, in place of bfloat16 weights.",
    ),
    "rotations-track-states": Claim(
        "Mamba-3 tracks states, Mamba-2 does not",
        "Mamba-3, by its rotations, and Gated DeltaNet with eigenvalues in [-1, 1] compute parity and modular "
        "arithmetic beyond the training length, and Mamba-2 does not.",
        "Lahoti 2026, arXiv 2603.15569, table 5b",
        ("parity_curriculum", "arithmetic_curriculum"),
        ("mamba3", _NEGATIVE_GDN),
        ("mamba2",),
        published={
            "parity_curriculum": {"mamba3": 100, _NEGATIVE_GDN: 100, "mamba2": 0.90},
            "arithmetic_curriculum": {"mamba3": 98.51, _NEGATIVE_GDN: 99.25, "mamba2": 47.81},
        },
        difference="every prefix has an answer, so that training begins with the answers of the first 40 tokens, and "
        "those of the last half of 256 are scored; the length grows in the first half of the steps, which the source "
        "does not state; four rates or three of its eight.",
    ),
}


class Verdict(NamedTuple):
    """The outcome of a claim on a task; holds: None if the runs do not decide it."""

    holds: bool | None
    sentences: list[str]


def verdict(claim: Claim, task: str, runs: Sequence[Run]) -> Verdict:
    """Compare the scores on a task of the claim.

    The lowest of `better` must exceed the highest of `worse` by 5 points, and be 99 % if the claim says solved. Nothing
    is decided if neither is 5 points above chance, if a mixer that should solve the task has not learned it at the
    shortest length, or where the means are compared, if their seeds overlap or each has one seed.
    """
    found = cells(runs)
    compared = *claim.better, *claim.worse
    missing = [f"`{mixer}`" for mixer in compared if (task, mixer) not in found]
    if missing:
        return Verdict(None, [f"Not decided: there is no finished run on {task} of {', '.join(missing)}."])
    if claim.stable:
        return _stability(claim, task, runs)
    score = "best seed" if claim.solved else "mean"
    scores = {mixer: found[task, mixer].best if claim.solved else found[task, mixer].score for mixer in compared}
    low, high = min(claim.better, key=scores.__getitem__), max(claim.worse, key=scores.__getitem__)
    holds: bool | None = scores[low] >= scores[high] + _MARGIN and (scores[low] >= _REACHED or not claim.solved)
    ours, theirs = ([run.score for run in found[task, mixer].runs] for mixer in (low, high))
    learned = max(*ours, *theirs) >= task_of(task).chance + _MARGIN
    vary = min(ours) < max(ours) or min(theirs) < max(theirs)
    overlap = vary and min(ours) <= max(theirs) and min(theirs) <= max(ours)
    trained = max(run.trained for run in found[task, low].runs)
    untrained = claim.solved and not holds and trained < _REACHED
    single = len(ours) == len(theirs) == 1
    if not learned or untrained or ((overlap or single) and not claim.solved):
        holds = None
    sentences = [
        f"On {task} the claim {'is ' * (holds is None)}{_HOLDS[holds]} in these settings: by the {score}, the "
        f"lowest of the better mixers is `{low}` with {100 * scores[low]:.1f} %, the highest of the others "
        f"`{high}` with {100 * scores[high]:.1f} %."
    ]
    if not learned:
        sentences.append("Neither of them has learned the task.")
    elif untrained:
        sentences.append(
            f"`{low}` has not learned the task: the best seed has {100 * trained:.1f} % at the shortest length."
        )
    elif holds is None and single:
        sentences.append("Each of them has one seed.")
    elif holds is None:
        sentences.append(
            f"The seeds overlap: `{low}` has {100 * min(ours):.1f} to {100 * max(ours):.1f} %, `{high}` "
            f"{100 * min(theirs):.1f} to {100 * max(theirs):.1f} %."
        )
    if claim.solved:
        reached = [sum(run.score >= _REACHED for run in found[task, mixer].runs) for mixer in claim.better]
        seeds = [len(found[task, mixer].runs) for mixer in claim.better]
        counts = ", ".join(f"{n} of {m}" for n, m in zip(reached, seeds, strict=True))
        sentences.append(
            f"The best seed counts, because a claim that a layer can compute something needs one run that does. "
            f"Seeds that reach {100 * _REACHED:.0f} %, for each of the better mixers: {counts}. The table has the "
            f"means."
        )
    return Verdict(holds, sentences)


def _stability(claim: Claim, task: str, runs: Sequence[Run]) -> Verdict:
    """Compare the runs that diverged, of all rates and seeds."""
    ended = {mixer: [run.diverged for run in runs if (run.task, run.mixer) == (task, mixer)] for mixer in claim.mixers}
    holds = not any(any(ended[mixer]) for mixer in claim.better) and all(any(ended[mixer]) for mixer in claim.worse)
    counts = ", ".join(f"`{mixer}` {sum(each)} of {len(each)}" for mixer, each in ended.items())
    return Verdict(
        holds,
        [
            f"On {task} the claim {_HOLDS[holds]} in these settings. Runs that diverged, of all rates and seeds: "
            f"{counts}. A run ends as diverged if its loss is not finite at one of ten evaluations."
        ],
    )


def outcome(claim: Claim, runs: Sequence[Run]) -> str:
    """Name the outcome of a claim, for each task if it has several."""
    outcomes = {task: _HOLDS[verdict(claim, task, runs).holds] for task in claim.tasks}
    if len(set(outcomes.values())) == 1:
        return outcomes[claim.tasks[0]]
    return ", ".join(f"{name} on {task}" for task, name in outcomes.items())
