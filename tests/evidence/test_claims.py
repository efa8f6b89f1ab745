"""Claims about state tracking that small models decide on two CPU cores in minutes."""

from pathlib import Path

from deltazoo.blocks.probes.runner import ProbeConfig, probe

PARITY = "parity(width=32,batch=32,length=80,lengths=[80,160],steps=200,rates=[1e-2],evaluation_tokens=16384)"
S3 = "s3(width=64,batch=64,length=12,lengths=[12,24],steps=200,rates=[5e-3],evaluation_tokens=16384)"


def scores(mixers: list[str], task: str, folder: Path) -> list[float]:
    """Return the accuracy of each mixer in the last half of the longest sequences."""
    result = probe(mixers, [task], folder, ProbeConfig(seeds=1, workers=1))
    assert result.problems == []
    return [run.score for mixer in mixers for run in result.runs if run.mixer == mixer]


def test_parity_needs_negative_eigenvalues(tmp_path: Path) -> None:
    """Grazzi 2024, arXiv 2411.12537: at twice the training length, eigenvalues in [-1, 1] against [0, 1]."""
    both, off = scores(["deltanet(negative_eigenvalues=both)", "deltanet"], PARITY, tmp_path)
    assert both > 0.95
    assert off < 0.6


def test_s3_needs_two_householders(tmp_path: Path) -> None:
    """Siems 2025, arXiv 2502.10297: at twice the training length, two steps per token against one."""
    mixers = ["deltaproduct(gate=false,conv_width=0)", "deltaproduct(gate=false,conv_width=0,householders=1)"]
    two, one = scores(mixers, S3, tmp_path)
    assert two > 0.9
    assert one < 0.6
