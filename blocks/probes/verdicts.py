"""Verdicts: whether runs support a claim, do not, or do not decide it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deltazoo.blocks.probes.claims import Claim
from deltazoo.blocks.probes.records import Cell, Run, cells

_REACHED, _MARGIN = 0.99, 0.05
_HOLDS = {True: "holds", False: "does not hold", None: "is not decided"}


class Verdict(NamedTuple):
    """The outcome of a claim on a task; holds: None if the runs do not decide it."""

    holds: bool | None
    sentences: list[str]


def verdict(claim: Claim, task: str, runs: Sequence[Run]) -> Verdict:
    """Compare the scores on a task of the claim.

    The lowest of `better` must exceed the highest of `worse` by 5 points, and be 99 % if the claim says solved. Nothing
    is decided if a mixer has not learned the task and the outcome depends on it, if the task does not separate the
    mixers, or where the means are compared, if their seeds overlap or each has one seed.
    """
    found = cells(runs)
    mixers = *claim.better, *claim.worse
    missing = [f"`{mixer}`" for mixer in mixers if (task, mixer) not in found]
    if missing:
        return Verdict(None, [f"Not decided: there is no finished run on {task} of {', '.join(missing)}."])
    if claim.stable:
        return _stability(claim, task, runs)
    compared = {mixer: found[task, mixer] for mixer in mixers}
    scores = {mixer: cell.best if claim.solved else cell.score for mixer, cell in compared.items()}
    low, high = min(claim.better, key=scores.__getitem__), max(claim.worse, key=scores.__getitem__)
    holds = scores[low] >= scores[high] + _MARGIN and (scores[low] >= _REACHED or not claim.solved)
    doubt = _doubt(claim, compared, scores, low, high, holds)
    decided = None if doubt else holds
    sentences = [
        f"On {task} the claim {_HOLDS[decided]} in these settings. By the {'best seed' if claim.solved else 'mean'}, "
        f"`{low}` is the lowest of the mixers that it favours, with {100 * scores[low]:.1f} %, and `{high}` the "
        f"highest of the others, with {100 * scores[high]:.1f} %.",
        *doubt,
    ]
    if claim.solved:
        reached = [sum(run.score >= _REACHED for run in compared[mixer].runs) for mixer in claim.better]
        seeds = [len(compared[mixer].runs) for mixer in claim.better]
        counts = ", ".join(f"{n} of {m}" for n, m in zip(reached, seeds, strict=True))
        sentences.append(
            f"The best seed counts, because a claim that a layer can compute something needs one run that does. "
            f"Seeds that reach {100 * _REACHED:.0f} %, for each of the mixers that it favours: {counts}. The table has "
            f"the means."
        )
    return Verdict(decided, sentences)


def outcome(claim: Claim, runs: Sequence[Run]) -> str:
    """Name the outcome of a claim, for each task if it has several."""
    outcomes = {task: _HOLDS[verdict(claim, task, runs).holds].removeprefix("is ") for task in claim.tasks}
    if len(set(outcomes.values())) == 1:
        return outcomes[claim.tasks[0]]
    return ", ".join(f"{name} on {task}" for task, name in outcomes.items())


def _doubt(
    claim: Claim, compared: Mapping[str, Cell], scores: Mapping[str, float], low: str, high: str, holds: bool
) -> list[str]:
    """Return why the scores do not decide the claim, [] if they do."""
    if holds:
        unlearned = [
            mixer for mixer in claim.worse if claim.learned and not any(map(_has_learned, compared[mixer].runs))
        ]
    elif claim.solved:
        unlearned = [low] if max(run.trained for run in compared[low].runs) < _REACHED else []
    else:
        unlearned = [] if all(map(_has_learned, compared[low].runs)) else [low]
    if unlearned:
        return [_unlearned(compared[mixer]) for mixer in unlearned]
    if claim.solved:
        return []
    if not holds and min(scores[low], scores[high]) >= 1 - _MARGIN:
        return [f"The task does not separate them: `{high}` has {100 * scores[high]:.1f} %."]
    if not holds and len(compared[low].runs[0].settings["rates"]) == 1:
        return [f"One learning rate was tried, {compared[low].rate:g}; others may be better for `{low}`."]
    ours, theirs = ([run.score for run in compared[mixer].runs] for mixer in (low, high))
    if len(ours) == len(theirs) == 1:
        return ["Each of them has one seed."]
    if min(ours) <= max(theirs) and min(theirs) <= max(ours):
        return [
            f"The seeds overlap: `{low}` has {100 * min(ours):.1f} to {100 * max(ours):.1f} %, `{high}` "
            f"{100 * min(theirs):.1f} to {100 * max(theirs):.1f} %."
        ]
    return []


def _has_learned(run: Run) -> bool:
    """Whether a run is nearer to perfect answers than to chance at the training length or a shorter one.

    A run that is scored at one length counts as having learned the task.
    """
    known = [accuracy for length, accuracy in run.accuracy.items() if length <= run.settings["length"]]
    return len(run.accuracy) == 1 or max(known, default=run.trained) >= (1 + run.chance) / 2


def _unlearned(cell: Cell) -> str:
    figures = ", ".join(f"{100 * run.trained:.1f}" for run in cell.runs)
    return f"`{cell.mixer}` has not learned the task well enough: at the training length its seeds have {figures} %."


def _stability(claim: Claim, task: str, runs: Sequence[Run]) -> Verdict:
    """Compare the runs that diverged, of the rates and seeds of all compared mixers."""
    ended = {
        mixer: {(run.rate, run.seed): run.diverged for run in runs if (run.task, run.mixer) == (task, mixer)}
        for mixer in claim.mixers
    }
    common = set.intersection(*(set(ended[mixer]) for mixer in (*claim.better, *claim.worse)))
    same = {mixer: [diverged for place, diverged in each.items() if place in common] for mixer, each in ended.items()}
    is_stable = not any(any(same[mixer]) for mixer in claim.better)
    holds = is_stable and all(any(same[mixer]) for mixer in claim.worse)
    lone = [
        f"`{mixer}` also diverged at rate {rate:g}, seed {seed}, which the other side has not run."
        for mixer in claim.worse
        for (rate, seed), diverged in ended[mixer].items()
        if diverged and (rate, seed) not in common
    ]
    decided = None if lone and is_stable and not holds else holds
    counts = ", ".join(f"`{mixer}` {sum(each)} of {len(each)}" for mixer, each in same.items())
    return Verdict(
        decided,
        [
            f"On {task} the claim {_HOLDS[decided]} in these settings. Runs that diverged, of the rates and seeds that "
            f"both sides have: {counts}. A run ends as diverged if its loss is not finite at one of ten evaluations.",
            *lone,
        ],
    )
