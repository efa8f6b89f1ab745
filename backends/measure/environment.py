"""The environment of a measurement: versions, device, compiler, commit and date."""

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from deltazoo.backends.io.errors import count
from deltazoo.backends.io.versions import installed
from deltazoo.backends.torch_ext.devices import cxx_compiler, tf32_allowed, usable_device

_ARCHIVED = "$Format:%H$"  # `git archive` replaces it by the commit; see .gitattributes


class Environment(BaseModel):
    """Versions, device and date.

    Args:
        device: name of the device.
        driver: version of the GPU driver.
        threads: CPU threads of torch.
        omp_wait_policy: the variable OMP_WAIT_POLICY.
        tf32: whether float32 matrix products may use tf32 on the device.
        compiler: path of the C++ compiler that Inductor would use on the CPU; None if there is none.
        commit: of the deltazoo repository, with "-dirty" if it has changes, or of the archive that `git archive` made;
            None for an installed wheel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    deltazoo: str
    python: str
    torch: str
    triton: str | None
    platform: str
    device: str
    driver: str | None
    threads: int
    omp_wait_policy: str | None
    tf32: bool
    compiler: str | None
    commit: str | None

    def line(self) -> str:
        """Format everything in one line, as the header of a table."""
        parts = [
            self.date,
            f"deltazoo {self.deltazoo}" + (f" ({self.commit})" if self.commit else ""),
            f"torch {self.torch}",
            f"triton {self.triton}" if self.triton else "no triton",
            f"python {self.python}",
            self.device + (f", driver {self.driver}" if self.driver else ""),
            count(self.threads, "thread")
            + (f", OMP_WAIT_POLICY={self.omp_wait_policy}" if self.omp_wait_policy else ""),
            f"tf32 {'on' if self.tf32 else 'off'}",
        ]
        return "; ".join(parts)


def environment(device: str | torch.device = "cpu") -> Environment:
    """Describe the environment of this process.

    Args: device: "cpu", "cuda", "cuda:1", ...
    Raises: ConfigError if the device is not available.
    """
    device = usable_device(device)
    return Environment(
        date=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        deltazoo=installed("deltazoo") or "not installed",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=installed("triton"),
        platform=f"{platform.system()} {platform.machine()}",
        device=_device_name(device),
        driver=_driver() if device.type == "cuda" else None,
        threads=torch.get_num_threads(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        tf32=device.type == "cuda" and tf32_allowed(),
        compiler=cxx_compiler(),
        commit=_commit(),
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or None


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None if "$" in _ARCHIVED else _ARCHIVED[:12]
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None


def _output(*command: str) -> str:
    """Return the output of a program; "" if it is missing or fails."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip()
