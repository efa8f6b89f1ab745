"""Claims of papers about mixers, each with the runs that decide it; `deltazoo probe --claim NAME` makes its page."""

from collections.abc import Mapping
from typing import NamedTuple

# With the short convolution of the delta rules. GLA's keys are half as wide by default.
_ADDITIVE = ("simple_gla(conv_width=4)", "gla(conv_width=4,key_width=32)")


class Claim(NamedTuple):
    """A claim: on each task, the first mixers are better than the second ones.

    Args:
        sentence: the claim; source: who makes it.
        better, worse: mixers, compared on each task by the mean score of their seeds.
        solved: whether the claim is about what a layer can compute: then `better` must reach 99 %, and the best seed of
            each mixer counts.
        learned: whether the claim is about mixers that learn the task at the training length, and differ beyond it.
        stable: whether the claim is about divergence: then no run of `better` may diverge, and some run of each of
            `worse` must, at the same rates and seeds.
        also: mixers that the page shows beside them.
        reported: what the source reports, in words.
        published: by task and mixer, the scaled accuracy in percent that the source reports.
        difference: how the runs differ from those of the source, where the tasks do not say it.
        remark: what else the runs show.
    """

    title: str
    sentence: str
    source: str
    tasks: tuple[str, ...]
    better: tuple[str, ...]
    worse: tuple[str, ...]
    solved: bool = False
    learned: bool = False
    stable: bool = False
    also: tuple[str, ...] = ()
    reported: str = ""
    published: Mapping[str, Mapping[str, float]] | None = None
    difference: str = ""
    remark: str = ""

    @property
    def mixers(self) -> tuple[str, ...]:
        """Every mixer of the page."""
        return *self.better, *self.worse, *self.also


# Heads of 32 channels whatever the width, as in the source.
_PUBLISHED_SIZES = "gate=false,conv_width=0,key_width=32,value_width=32"
_S3_REPORTED = (
    "trained on 128 tokens and tested on 512, two steps with eigenvalues in [-1, 1] solve S3; one step, or eigenvalues "
    "in [0, 1], does not."
)
_SLOW_GDN, _SLOW_MAMBA2 = "gated_deltanet(A_init_range=[0.01,1])", "mamba2(A_init_range=[0.0625,1])"
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
        reported="Mamba-3's table 5b, scaled accuracy at 256 tokens: Gated DeltaNet with eigenvalues in [-1, 1] 100, "
        "Mamba-2 0.90.",
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
        reported=_S3_REPORTED,
    ),
    "delta-rule-recall": Claim(
        "The delta rule recalls more than additive updates",
        "DeltaNet recalls more pairs than Simple GLA and GLA, which add to states of the same K x V with a decay per "
        "head and per channel, all with a short convolution.",
        "Yang 2024, arXiv 2406.06484",
        ("mqar_short", "mqar_long"),
        ("deltanet",),
        _ADDITIVE,
        also=("gated_deltanet", _SLOW_GDN),
        difference="mqar_long has twice as many pairs as the keys of a head have dimensions, and one size of MQAR in "
        "place of a mixture.",
        reported="on MQAR with 64 pairs in 512 tokens DeltaNet is perfect, even without a convolution.",
        remark="Gated DeltaNet has not learned mqar_long with A, the rates of its initial decays, drawn up to 16, its "
        "default; with A up to 1 it has in two of three seeds.",
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
        "Mamba and Mamba-2, whose step depends on the token, copy data among noise; S4D, whose step does not, does "
        "worse.",
        "Gu & Dao 2023, arXiv 2312.00752, table 1",
        ("selective_copying_long",),
        ("mamba", "mamba2"),
        ("s4d",),
        reported="at 4,096 tokens, for training and test: S4 18.3 %, in the blocks of H3 and Mamba 57.0 and 56.4 %; "
        "Hyena 30.1 %; Mamba (S6) 97.0 to 99.8 %.",
    ),
    "decays-forget": Claim(
        "Decays let additive updates forget",
        "If keys get new values, Simple GLA, whose states decay by a factor per head and token, recalls the latest one "
        "better than the same layer without a decay.",
        "none; task: HazyResearch/zoology",
        ("forgetting_mqar",),
        ("simple_gla(conv_width=4)",),
        ("simple_gla(conv_width=4,temperature=1e9)",),
        difference="the layer without a decay is Simple GLA with decays of 1 to seven digits.",
    ),
    "gates-cost-retention": Claim(
        "Gates cost retention",
        "In a haystack that repeats one sentence, or of random words, DeltaNet finds the needle in sequences longer "
        "than those of its training, and Gated DeltaNet, whose state decays, does worse.",
        "Yang 2024, arXiv 2412.06464, table 2, S-NIAH-1",
        ("needle1_long", "needle2_long"),
        ("deltanet",),
        ("gated_deltanet",),
        learned=True,
        also=(_SLOW_GDN,),
        reported="language models of 1.3 B parameters, DeltaNet and Gated DeltaNet: S-NIAH-1 at 8,192 tokens, twice "
        "their training length, 98.8 and 91.8 %; S-NIAH-2, in essays, 14.4 and 29.6 %: there the gate helps, because "
        "models of language store what may be needed.",
        difference="the models are trained on the needle alone, and no word of the haystack is a value, so that "
        "nothing in it need be stored or forgotten: needle2_long tests retention, too.",
        remark="At 4,096 tokens, 16 times the training length, all seeds find the needle. Gated DeltaNet fails from "
        "65,536 tokens on.",
    ),
    "short-convolution": Claim(
        "Short convolutions matter for recall",
        "Without the short convolution of q, k and v, DeltaNet and Gated DeltaNet lose recall.",
        "Yang 2024, arXiv 2406.06484, table 3",
        ("mqar_short",),
        ("deltanet", "gated_deltanet"),
        ("deltanet(conv_width=0)", "gated_deltanet(conv_width=0)"),
        reported="short convolutions lower the perplexity of language models; on MQAR with 64 pairs in 512 tokens "
        "DeltaNet is perfect, even without one.",
        difference="1,500 steps and 16 pairs.",
    ),
    "initial-decays": Claim(
        "Slow initial decays help a small Mamba-2 to learn recall",
        "Mamba-2 with two heads recalls more pairs after the same training if A, the rates of its initial decays, are "
        "drawn from 1/16 to 1 in place of 1 to 16, the range of the source.",
        "none; with two heads a draw up to 16 may leave a layer without a head that remembers 30 tokens",
        ("mqar_short", "capacity"),
        (_SLOW_MAMBA2,),
        ("mamba2",),
        also=(_SLOW_GDN, "gated_deltanet"),
        remark="Gated DeltaNet gains from it on mqar_long (see delta-rule-recall) and loses on capacity_long (see "
        "mixture-of-memories).",
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
        remark="On stacks DeltaNet without the norm trains at lower rates as well as with it: the table has the best "
        "rate of each.",
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
        difference="all three tasks test the same model of a mixer at a rate, trained on undisturbed images, and "
        "choose the rate by the disturbed ones; images of 8 x 8 pixels with a token for each of 17 greys, in place of "
        "28 x 28 real numbers: a scaled pixel is another token.",
    ),
    "mixture-of-memories": Claim(
        "Mixture of memories improves recall",
        "MoM has four routed memories, of which each token uses two, and one shared memory. It recalls more pairs than "
        "Gated DeltaNet, whose state has the size of one memory.",
        "Du 2025, arXiv 2502.13685",
        ("capacity_long",),
        ("mom",),
        ("gated_deltanet",),
        also=("mom(active=1,shared=false)", "deltanet", _SLOW_GDN),
        learned=True,
        remark="The score is that of 64 pairs, four times as many as in the training; at the training length neither "
        "is far ahead. `mom(active=1,shared=false)` has the same active state as Gated DeltaNet: each token uses one "
        "of four memories. It has not learned the task.",
    ),
    "hybrids-recall": Claim(
        "A layer of attention recalls what recurrent stacks do not",
        "With attention in place of one of two recurrent layers a model recalls more pairs than two layers of "
        "DeltaNet, whose states have a fixed size.",
        "Arora 2024, arXiv 2402.18668; Yang 2024, arXiv 2412.06464, hybrid models",
        ("capacity", "capacity_large"),
        ("gated_deltanet + attention", "mamba2 + attention"),
        ("deltanet",),
        learned=True,
        also=("gated_deltanet", "mamba2", "attention"),
        difference="attention to all previous tokens, in place of sliding windows. capacity_large has 128 pairs, four "
        "times as many as the keys of a head have dimensions, in training and test.",
        remark="capacity tests four times as many pairs as were trained, where attention fails, too. On capacity_large "
        "DeltaNet recalls fewer pairs at every number than after training with 16 pairs: what it lacks there is not "
        "the size of its state alone. Gated DeltaNet and Mamba-2 have not learned it.",
    ),
    "induction-heads": Claim(
        "Mamba extrapolates induction heads to 2^20 tokens",
        "Mamba, trained on 256 tokens, recalls what followed a token in sequences of 1,048,576 tokens; H3 and Hyena do "
        "not.",
        "Gu & Dao 2023, arXiv 2312.00752, table 2",
        ("induction_published",),
        ("mamba",),
        ("h3", "hyena"),
        solved=True,
        learned=True,
        reported="trained on 256 tokens, Mamba 100 % from 64 to 1,048,576; H3 100 at 256, 80.9 at 512, 7.4 at 2^20; "
        "Hyena 44.1 at 1,024, 9.8 at 2^20; attention at 512 58.6 (absolute positions), 83.6 (rotary) and 99.6 (xPos).",
        difference="204,800 steps, a rate of 1e-3 and width 64 for all, as in the source for Mamba, in place of 81,920 "
        "steps, 2e-4 and width 128 for the others; one seed of the others; the rate falls to 0, in place of a constant "
        "one; bfloat16. With 16 sequences of 2^20 tokens one answer is 6.25 points.",
        remark="Runs with 81,920 steps and both rates are among the other runs of the index: "
        "`induction_published(steps=81920,rates=[2e-4,1e-3])`.",
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
        reported=_S3_REPORTED,
        difference="new sequences in every step, in place of 100 epochs of 100,000; float32 weights with products in "
        "bfloat16, in place of bfloat16 weights.",
    ),
    "rotations-track-states": Claim(
        "Mamba-3 tracks states better than Mamba-2",
        "Mamba-3, by its rotations, and Gated DeltaNet with eigenvalues in [-1, 1] are more accurate on parity and "
        "modular arithmetic beyond the training length than Mamba-2.",
        "Lahoti 2026, arXiv 2603.15569, table 5b",
        ("parity_curriculum", "arithmetic_curriculum"),
        ("mamba3", _NEGATIVE_GDN),
        ("mamba2",),
        also=(_SLOW_MAMBA2,),
        published={
            "parity_curriculum": {"mamba3": 100, _NEGATIVE_GDN: 100, "mamba2": 0.90},
            "arithmetic_curriculum": {"mamba3": 98.51, _NEGATIVE_GDN: 99.25, "mamba2": 47.81},
        },
        difference="every prefix has an answer, so that training begins with the answers of the first 40 tokens, and "
        "those of the last half of 256 are scored; the length grows in the first half of the steps, which the source "
        "does not state; four rates or three of its eight. The source reports the best of 16 configurations, two "
        "widths and eight rates; here one seed chooses the rate.",
        remark="Mamba-2 does not learn the arithmetic here with A, the rates of its initial decays, drawn from 1 to "
        "16, its default. With A from 1/16 to 1 one of three seeds does, in part, and reaches more than the lowest "
        "seed of Mamba-3.",
    ),
}
