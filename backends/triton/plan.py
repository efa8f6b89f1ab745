"""Kernel plans: which kernels compute one update, decided once from the problem, the device and the launch config.

A new kernel is one entry in `KERNELS`: the phase it computes, the problems and devices it takes. Launch code, the
heuristic, the tuner and `explain` read the resulting `Plan`; README.md lists every step.

B batch, T time, N sequences, H key heads, HV value heads, K key width, V value width
"""

from collections.abc import Container
from typing import Literal, NamedTuple

import torch

from deltazoo.backends.devices import INTERPRETER, DeviceSpec
from deltazoo.backends.errors import ConfigError
from deltazoo.backends.triton.config import CHUNK, KernelChoice, LaunchConfig
from deltazoo.backends.triton.tiles import cdiv

Decay = Literal["none", "fixed", "head", "channel"]
Version = Literal["portable", "hopper"]
Backward = Literal["none", "fused", "sweep", "reverse+gradients"]
SCALAR_DECAYS = ("none", "fixed", "head")
Prepare = Literal["gates", "channel", "hopper channel", "pair", "hopper pair", "portable", "hopper"]
Gradients = Literal["channel", "hopper channel", "hopper additive", "pair", "hopper pair", "portable", "hopper"]
Phase = Literal["prepare", "scan", "recompute", "reverse", "gradients"]


class Problem(NamedTuple):
    """The sizes and traits of one update, as far as kernels and launch configs depend on them.

    Args:
        N: sequences. T: tokens per row of the batch.
        delta: with an erase term. erase_key: the erase key is an operand, not k.
        decay: none, one number per head ("fixed"), one per token and head ("head"), or also per key ("channel").
        packed: several sequences in one row (cu_seqlens).
        split_terms: values that feed back into the state are split into two terms (hi + lo).
        saves_16_bits: with split_terms the states that the backward reads have 16 bits.
        pair: DPLR with a decay per channel, which has a key for v and another for what the erase key reads.
    """

    dtype: torch.dtype
    N: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    delta: bool
    erase_key: bool
    decay: Decay
    packed: bool
    split_terms: bool = False
    saves_16_bits: bool = False
    pair: bool = False

    @property
    def saved_dtype(self) -> torch.dtype:
        """The dtype in which the backward stores states and their gradients."""
        return torch.float32 if self.split_terms and not self.saves_16_bits else self.dtype

    @property
    def extra_keys(self) -> bool:
        """Whether the kernels read keys beside q and k: an erase key, or with a decay per channel keys with decays."""
        return self.erase_key or self.decay == "channel"

    @property
    def grouped(self) -> bool:
        """Whether several value heads share a key head."""
        return self.HV != self.H


class Limits(NamedTuple):
    """The problems that one kernel takes.

    Args:
        hopper: runs on sm_90 only, with 16-bit operands, saved states of the same dtype, chunks of 64 tokens, and
            widths that are multiples of 8 (rows are copied by 16 bytes).
        keys, values: widths per head.
        decays: kinds of decay. channel_keys: widths of keys with a decay per channel or an erase key.
        grouped: takes grouped heads. own_key: takes an erase key beside a decay that is not per channel.
        pair_widths, pair_dtypes: widths of keys and values, and dtypes, that it takes of DPLR.
    """

    hopper: bool = False
    keys: range = range(1, 257)
    values: range = range(1, 2**31)
    decays: tuple[str, ...] = SCALAR_DECAYS
    channel_keys: range = range(1, 257)
    grouped: bool = True
    own_key: bool = True
    pair_widths: Container[int] = ()
    pair_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)

    def takes_pair(self, problem: Problem) -> bool:
        """Whether the kernel takes DPLR of these widths and dtype."""
        widths = self.pair_widths
        return problem.K in widths and problem.V in widths and problem.dtype in self.pair_dtypes


_ANY_WIDTH = range(1, 2**31)
_PORTABLE = Limits(decays=(*SCALAR_DECAYS, "channel"), pair_widths=_ANY_WIDTH)
# with more keys and a decay per channel or an erase key two stages of the ring buffer do not fit
_HOPPER_SCAN = Limits(
    hopper=True, values=range(33, 513), decays=(*SCALAR_DECAYS, "channel"), channel_keys=range(1, 129)
)
# in order of preference
KERNELS: dict[Phase, dict[KernelChoice, Limits]] = {
    "prepare": {
        "hopper": Limits(hopper=True, decays=_PORTABLE.decays, pair_widths=(64, 128)),
        "portable": _PORTABLE,
    },
    "scan": {"hopper": _HOPPER_SCAN, "portable": _PORTABLE},
    "recompute": {"hopper": _HOPPER_SCAN, "portable": _PORTABLE},
    "reverse": {
        # one program per sequence and head, 128 values, and no other program adds to its key gradients
        "fused": Limits(hopper=True, keys=range(65, 129), values=range(33, 129), grouped=False, own_key=False),
        "hopper": _HOPPER_SCAN,
        "portable": _PORTABLE,
    },
    "gradients": {
        "hopper": Limits(
            hopper=True,
            values=range(1, 513),
            decays=(*SCALAR_DECAYS, "channel"),
            pair_widths=(64, 128),
            pair_dtypes=(torch.bfloat16,),  # factors of up to 2^60 exceed the range of float16
        ),
        "portable": _PORTABLE,
    },
}


def takes(phase: Phase, kernel: KernelChoice, problem: Problem, device: DeviceSpec, chunk: int = CHUNK) -> bool:
    """Whether a kernel takes a problem on a device."""
    limits = KERNELS[phase].get(kernel)
    channel = problem.decay == "channel"
    if limits is None or problem.K not in limits.keys or problem.V not in limits.values:
        return False
    if problem.erase_key and not channel and not limits.own_key:
        return False
    if problem.extra_keys and problem.K not in limits.channel_keys:
        return False
    if problem.pair and not limits.takes_pair(problem):
        return False
    if problem.decay not in limits.decays or (problem.grouped and not limits.grouped):
        return False
    if not limits.hopper:
        return True
    same_dtype = problem.dtype == problem.saved_dtype and problem.dtype.itemsize == 2
    aligned = problem.K % 8 == problem.V % 8 == 0
    return device.is_hopper and same_dtype and chunk == 64 and aligned


def occupies(problem: Problem, device: DeviceSpec) -> bool:
    """Whether one program per sequence, head and 128 values occupies at least 40 % of the SMs."""
    return problem.N * problem.HV * cdiv(problem.V, 128) * 5 >= device.processors * 2


def sweeps(K: int, V: int) -> bool:
    """Whether the Hopper reverse scan computes the gradients, too.

    More keys do not fit its registers, with fewer keys half of its work would be padding, and a program has 128 values.
    """
    return 64 < K <= 128 and (V <= 128 or V % 128 == 0)


def saves_16_bits(dtype: torch.dtype, K: int, V: int, erase_key: bool, channel: bool) -> bool:
    """Whether an update with split terms saves 16 bits on a Hopper GPU: if its kernels take it then.

    They have P in one term, which with few keys costs o more than it may: 5.1e-3 with 8 keys, no beta and no decay.
    """
    takes_keys = 32 < K <= 128 if erase_key else sweeps(K, V)
    return dtype == torch.bfloat16 and V in _HOPPER_SCAN.values and takes_keys and not channel


def on_device(problem: Problem, device: DeviceSpec) -> Problem:
    """Return a problem that was derived without a device as that device computes it."""
    if not (problem.split_terms and device.is_hopper):
        return problem
    by_channel = problem.decay == "channel"
    takes_16_bits = saves_16_bits(problem.dtype, problem.K, problem.V, problem.erase_key, by_channel)
    return problem._replace(saves_16_bits=takes_16_bits)


class Plan(NamedTuple):
    """The kernels of one update.

    Args:
        prepare: "gates": no erase term, cumulative decays only; "channel", "pair" and the same on Hopper: for a
            decay per channel, also the scaled operands; else also the WY tiles T and P.
        forward: the scan that computes o and the final state.
        backward: "none": without gradients. "fused": one launch recomputes the states, scans back and computes the
            gradients. "sweep": recomputed states, then one launch for scan and gradients. "reverse+gradients": two.
        recompute, reverse, gradients: the version of each kernel that the backward launches.
        split: chunks per segment if the backward computes the segments of a sequence in parallel, else 0.
        forward_split: the same in the forward.
        halved_from: the Hopper reverse scan has a program for every 64 values of a sequence of at least so many chunks,
            for every 128 of a shorter one; 0: for every 128 of all sequences.
        forward_halved_from: the same in the forward.
        every: chunks between two checkpoints of the state; 0: none is stored.
    """

    prepare: Prepare
    forward: Version
    backward: Backward = "none"
    recompute: Version | None = None
    reverse: Version | None = None
    gradients: Gradients | None = None
    split: int = 0
    forward_split: int = 0
    halved_from: int = 0
    forward_halved_from: int = 0
    every: int = 0


def device_spec(index: int | None) -> DeviceSpec:
    """The device of tensors with this CUDA index; None: CPU tensors, which Triton's interpreter computes on."""
    return INTERPRETER if index is None else DeviceSpec.current(index)


def make_plan(problem: Problem, device: DeviceSpec, config: LaunchConfig, grad: bool) -> Plan:
    """Decide which kernels run.

    Raises: ConfigError if the config asks for a kernel that does not take the problem.
    """
    for phase in KERNELS:
        kernel = getattr(config, phase).kernel
        if not takes(phase, kernel, problem, device, config.chunk):
            raise ConfigError(_refusal(phase, kernel, problem, device, config.chunk))
    chunks = cdiv(problem.T, config.chunk)
    split = config.split if config.split and chunks > config.split else 0
    plan = Plan(
        _prepare(problem, _version(config.prepare.kernel)),
        _version(config.scan.kernel),
        split=split,
        # in a pack that keeps the device busy only the backward gains from segments
        forward_split=0 if problem.packed and occupies(problem, device) else split,
    )
    plan = plan._replace(forward_halved_from=_halved_from(problem, device, plan.forward, plan.forward_split))
    if not grad:
        return plan
    plan = plan._replace(every=config.every)
    if config.reverse.kernel == "fused":
        return plan._replace(backward="fused")
    plan = plan._replace(recompute=_version(config.recompute.kernel))
    if config.reverse.kernel == "hopper" and not problem.extra_keys and sweeps(problem.K, problem.V):
        return plan._replace(backward="sweep")
    reverse = _version(config.reverse.kernel)
    return plan._replace(
        backward="reverse+gradients",
        reverse=reverse,
        gradients=_gradients(config.gradients.kernel, problem),
        halved_from=_halved_from(problem, device, reverse, split),
    )


def _halved_from(problem: Problem, device: DeviceSpec, scan: Version, split: int) -> int:
    """The chunks of the shortest sequence whose scan has a program for every 64 values; 0: none can be as long.

    The time of a scan is that of its longest sequence if that has more than twice the mean number of chunks per SM.
    Programs of 64 values take 30 % less time per chunk, but twice as many SMs. In a pack every sequence gets the
    programs, although those of short ones have no work, so a pack of many sequences keeps programs of 128 values.
    Segments are parallel already.
    """
    chunks, tiles = cdiv(problem.T, CHUNK), problem.HV * cdiv(problem.V, 128)
    if scan != "hopper" or split or problem.V <= 64:
        return 0
    if problem.packed and problem.N * tiles > 3 * device.processors:
        return 0
    all_chunks = chunks * tiles * (1 if problem.packed else problem.N)
    shortest = 2 * all_chunks // device.processors + 1
    return shortest if chunks >= shortest else 0


# The kernels of each step and version, in the order of their launches; README.md has a row for each.
LAUNCHES: dict[tuple[str, str], tuple[str, ...]] = {
    ("prepare", "gates"): ("gates_kernel",),
    ("prepare", "channel"): ("channel_prepare_kernel",),
    ("prepare", "hopper channel"): ("hopper_channel_prepare_kernel",),
    ("prepare", "pair"): ("pair_prepare_kernel",),
    ("prepare", "hopper pair"): ("hopper_pair_prepare_kernel", "pair_prepare_kernel"),
    ("prepare", "portable"): ("prepare_kernel",),
    ("prepare", "hopper"): ("hopper_prepare_kernel",),
    ("segments", "forward"): ("scan_kernel", "combine_kernel"),
    ("forward", "portable"): ("scan_kernel",),
    ("forward", "hopper"): ("hopper_scan_kernel",),
    ("recompute", "portable"): ("scan_kernel",),
    ("recompute", "hopper"): ("hopper_scan_kernel",),
    ("segments", "backward"): ("scan_kernel", "reverse_kernel", "combine_kernel"),
    ("backward", "fused"): ("hopper_fused_backward_kernel",),
    ("backward", "sweep"): ("hopper_backward_sweep_kernel",),
    ("reverse", "portable"): ("reverse_kernel",),
    ("reverse", "hopper"): ("hopper_reverse_kernel",),
    ("gradients", "channel"): ("channel_gradients_kernel",),
    ("gradients", "hopper channel"): ("hopper_channel_gradients_kernel",),
    ("gradients", "hopper additive"): ("hopper_additive_gradients_kernel",),
    ("gradients", "pair"): ("pair_gradients_kernel",),
    ("gradients", "hopper pair"): ("hopper_pair_gradients_kernel", "pair_gradients_kernel"),
    ("gradients", "portable"): ("gradients_kernel",),
    ("gradients", "hopper"): ("hopper_gradients_kernel",),
    ("group sums", "portable"): ("sum_groups_kernel",),
    ("gate gradients", "portable"): ("gate_gradients_kernel",),
    ("element segments", "forward"): ("element_scan_kernel", "element_combine_kernel"),
    ("elementwise", "forward"): ("element_scan_kernel",),
    ("element segments", "backward"): ("element_scan_kernel", "element_reverse_kernel", "element_combine_kernel"),
    ("elementwise", "backward"): ("element_backward_kernel",),
    ("tail", "portable"): ("zero_tail_kernel",),
}


def forward_kernels(plan: Plan, problem: Problem) -> list[str]:
    """The kernels of the forward pass in the order of their launches."""
    segments = [("segments", "forward")] if plan.forward_split else []
    return _names([("prepare", plan.prepare), *segments, ("forward", plan.forward), *_tail(problem)])


def backward_kernels(plan: Plan, problem: Problem) -> list[str]:
    """The kernels of the backward pass in the order of their launches, for one window."""
    if plan.backward == "fused":
        return _names([("backward", "fused"), ("gate gradients", "portable"), *_tail(problem)])
    steps = [("recompute", str(plan.recompute))]
    steps += [("segments", "backward")] if plan.split else []
    if plan.backward == "sweep":
        steps.append(("backward", "sweep"))
    else:
        steps += [("reverse", str(plan.reverse)), ("gradients", str(plan.gradients))]
    if problem.grouped or (plan.backward == "sweep" and problem.V > 128):
        steps.append(("group sums", "portable"))
    return _names([*steps, ("gate gradients", "portable"), *_tail(problem)])


def _tail(problem: Problem) -> list[tuple[str, str]]:
    return [("tail", "portable")] if problem.packed else []


def _names(steps: list[tuple[str, str]]) -> list[str]:
    return [name for step in steps for name in LAUNCHES[step]]


def _prepare(problem: Problem, version: Version) -> Prepare:
    if problem.pair:
        return "hopper pair" if version == "hopper" else "pair"
    if problem.decay == "channel":
        return "hopper channel" if version == "hopper" else "channel"
    return version if problem.delta else "gates"


def _version(kernel: KernelChoice) -> Version:
    return "hopper" if kernel == "hopper" else "portable"


def _gradients(kernel: KernelChoice, problem: Problem) -> Gradients:
    if problem.pair:
        return "hopper pair" if kernel == "hopper" else "pair"
    channel = problem.decay == "channel"
    if kernel == "hopper" and channel:
        return "hopper channel" if problem.delta else "hopper additive"
    if kernel == "hopper":
        return "hopper"
    return "channel" if channel else "portable"


def _refusal(phase: Phase, kernel: KernelChoice, problem: Problem, device: DeviceSpec, chunk: int) -> str:
    limits = KERNELS[phase][kernel]
    keys = limits.channel_keys if problem.extra_keys else limits.keys
    needs = [f"K in {interval(keys)}", f"V in {interval(limits.values)}", f"decay in {', '.join(limits.decays)}"]
    needs += [] if limits.grouped else ["H = HV"]
    needs += [] if limits.own_key else ["no erase key unless the decay is per channel"]
    if not limits.pair_widths:
        needs.append("no DPLR")
    elif limits.pair_widths != _ANY_WIDTH:
        needs.append(f"for DPLR K and V in {limits.pair_widths}")
    if limits.pair_widths and len(limits.pair_dtypes) == 1:
        needs.append(f"for DPLR {limits.pair_dtypes[0]}")
    if limits.hopper:
        needs = [
            "a Hopper GPU", "16-bit operands and saved states of one dtype", "chunks of 64 tokens",
            "K and V that are multiples of 8", *needs,
        ]  # fmt: skip
    return (
        f"{phase}.kernel = {kernel!r} needs {', '.join(needs)}; got {device.name}, {problem.dtype} saved in "
        f"{problem.saved_dtype}, {'an' if problem.erase_key else 'no'} erase key, chunks of {chunk}, K = {problem.K}, "
        f"V = {problem.V}, decay = {problem.decay}, H = {problem.H}, HV = {problem.HV}"
        f"{', DPLR' if problem.pair else ''}"
    )


def interval(widths: range) -> str:
    """Print a range of widths."""
    return f"{widths[0]} to {widths[-1]}" if widths[-1] < 2**31 - 1 else f"{widths[0]} and more"
