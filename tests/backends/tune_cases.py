"""Targets, a device and a runner with simulated times, for the tests of the tuner and of launch tables."""

import torch

from deltazoo.backends.measure.environment import environment
from deltazoo.backends.measure.shapes import SHAPES
from deltazoo.backends.torch_ext.devices import DeviceSpec
from deltazoo.backends.triton.config import Launch
from deltazoo.backends.tuning import candidates
from deltazoo.backends.tuning.candidates import Target
from deltazoo.backends.tuning.tune import Runner, TuneConfig
from deltazoo.backends.update.spec import UpdateSpec

GATED = UpdateSpec(decay="head", beta="head")
T900 = DeviceSpec("NVIDIA T900", "cuda", (8, 0), 132, 232448, "3.6.0")
HOPPER = T900._replace(capability=(9, 0))
PACK = Target(GATED, SHAPES["pack_8x4096"], torch.bfloat16)
LONG = Target(GATED, SHAPES["dense_1x32768"], torch.bfloat16)
TOKEN = Target(GATED, SHAPES["decode_64"], torch.bfloat16)
FORWARD = TuneConfig(directions=("forward",))


def problem_of(target, kernel, device=T900):
    """The problem that the tuner looks up for a target."""
    return candidates.problem_of(target, kernel, device)


class FakeRunner(Runner):
    """A runner that launches nothing.

    Args:
        quick: the time of a launch or of a number of segments, where it differs from the default.
        wrong: launches that fail the numeric check.
        stop_after: number of checked kernels after which the run is interrupted.
    """

    device = T900

    def __init__(self, quick=None, wrong=(), stop_after=None):
        self.quick, self.wrong, self.stop_after = quick or {}, wrong, stop_after
        self.compiled, self.checked, self.timed = [], [], []

    def environment(self):
        return environment().model_copy(update={"device": self.device.name})

    def compile(self, target, kernel, configs):
        self.compiled.append((target, kernel, configs))

    def check(self, target, kernel, config):
        if (target, kernel) not in self.checked:
            if self.stop_after is not None and len(self.checked) == self.stop_after:
                raise KeyboardInterrupt
            self.checked.append((target, kernel))
        return "o has relative RMS error 1, above 5e-3" if getattr(config, kernel) in self.wrong else ""

    def time(self, target, kernel, configs, rounds):
        self.timed.append((target, kernel, configs))
        return [self._seconds(config) for config in configs]

    def _seconds(self, config):
        segments = self.quick.get(config.segment_chunks, 10.0)
        launches = [launch for _, launch in config if isinstance(launch, Launch)]
        return (segments + sum(self.quick.get(launch, 1.0) for launch in launches)) / 1e3


def by_kernel(records):
    return {record.key.kernel: record for record in records}
