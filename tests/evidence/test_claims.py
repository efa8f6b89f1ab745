"""Claims about state tracking and recall that small models decide on two CPU cores in minutes."""

from pathlib import Path

from deltazoo.blocks.probes.runner import ProbeConfig, probe

PARITY = "parity(width=32,batch=32,length=80,lengths=[80,160],steps=200,rates=[1e-2],evaluation_tokens=16384)"
S3 = "s3(width=64,batch=64,length=12,lengths=[12,24],steps=200,rates=[5e-3],evaluation_tokens=16384)"
RECALL = (
    "mqar(length=64,lengths=[64],tokens=64,pairs=12,steps=1200,batch=32,width=32,heads=1,rates=[1e-2],"
    "evaluation_tokens=8192)"
)


def scores(mixers: list[str], task: str, folder: Path) -> list[float]:
    """Return the accuracy of each mixer in the last half of the longest sequences."""
    result = probe([(mixers, [task])], folder, ProbeConfig(seeds=1, workers=1))
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


def test_recall_needs_short_convolutions(tmp_path: Path) -> None:
    """Yang 2024, arXiv 2406.06484, table 3: without them a layer cannot bind a value to the key before it."""
    short, none = scores(["deltanet", "deltanet(conv_width=0)"], RECALL, tmp_path)
    assert short > 0.95
    assert none < 0.3
