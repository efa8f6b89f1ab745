"""What tests of the tuner and of its tables share: targets, a device, and a runner that makes times up."""

import torch

from deltazoo.backends.measure.environment import environment
from deltazoo.backends.shapes import SHAPES
from deltazoo.backends.spec import UpdateSpec
from deltazoo.backends.triton.config import Device, Launch
from deltazoo.backends.tuning.candidates import Target
from deltazoo.backends.tuning.tune import Runner, TuneConfig

GATED = UpdateSpec(decay="head", beta="head")
T900 = Device("NVIDIA T900", 132, 232448)
PACK = Target(GATED, SHAPES["pack_8x4096"], torch.bfloat16)
LONG = Target(GATED, SHAPES["dense_1x32768"], torch.bfloat16)
TOKEN = Target(GATED, SHAPES["decode_64"], torch.bfloat16)
FORWARD = TuneConfig(directions=("forward",))


class FakeRunner(Runner):
    """Each kernel's time is its warps, but for `quick`; what `wrong` names fails the check."""

    device, triton = T900, "3.6.0"

    def __init__(self, quick=None, wrong=(), stop_after=None):
        self.quick, self.wrong, self.stop_after = quick or {}, wrong, stop_after
        self.checked, self.timed, self.closed, self.heard = [], [], False, []

    def environment(self):
        return environment().model_copy(update={"device": self.device.name})

    def ahead(self, steps, until):
        self.heard.append([(step.target, step.kernel) for step in steps])

    def check(self, target, kernel, configs):
        if self.stop_after is not None and len(self.checked) == self.stop_after:
            raise KeyboardInterrupt
        self.checked.append((target, kernel))
        return ["o has relative RMS error 1, above 5e-3" if self._of(c, kernel) in self.wrong else "" for c in configs]

    def time(self, target, kernel, configs, rounds):
        self.timed.append((target, kernel, configs))
        return [self._seconds(config) for config in configs]

    def close(self):
        self.closed = True

    def _of(self, config, kernel):
        return config.split if kernel == "split" else getattr(config, kernel)

    def _seconds(self, config):
        split = self.quick.get(config.split, 10.0) if isinstance(config.split, int) else 10.0
        launches = [launch for _, launch in config if isinstance(launch, Launch)]
        return (split + sum(self.quick.get(launch, 1.0) for launch in launches)) / 1e3


def by_kernel(records):
    return {record.kernel: record for record in records}
