"""What does not run on a device, as the stored compilations show, is refused; `make portability` compiles it."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from deltazoo.backends.triton.chunk import heuristic, plan
from deltazoo.backends.triton.limits import size_refusals

STORED = json.loads(Path(__file__).with_name("portability.json").read_text())["results"]
_spec = importlib.util.spec_from_file_location("portability", Path(__file__).parents[1] / "bench" / "portability.py")
portability = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(portability)


def stored_updates():
    """Versions, problems and results of every update, forward or with gradients."""
    for version, results in STORED.items():
        for name, result in results.items():
            words = name.split()
            if len(words) == 5 and words[-1] in ("forward", "training"):
                device, update, dtype, width, kind = words
                yield version, (device, update, dtype, int(width), kind), result


@pytest.mark.parametrize("version", STORED)
def test_what_does_not_fit_a_device_is_refused(version):
    wrong = [
        f"{problem}: {result['faults']}"
        for triton, problem, result in stored_updates()
        if triton == version and result["faults"] and not portability.refusals(*problem, version)
    ]
    assert not wrong, wrong


def test_what_is_not_refused_fits_shared_memory():
    for version, problem, result in stored_updates():
        limit = portability.DEVICES[problem[0]][2]
        if not portability.refusals(*problem, version):
            assert result["shared"] <= limit, (version, problem)


def test_the_grid_covers_every_kind_of_decay_and_every_architecture():
    assert {"head", "none", "channel"} <= {update.get("decay", "none") for update in portability.UPDATES.values()}
    assert {capability for _, capability, _ in portability.DEVICES.values()} == {
        (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
    }  # fmt: skip


def test_the_summary_counts_what_does_not_run():
    fits = {"faults": [], "shared": 2048, "tensor memory": 0, "registers": 255, "spills": {"a": 8}, "serialized": []}
    refused = fits | {"faults": ["b: shared 200000 > 101376"], "shared": 200000}
    text = portability.page({"results": {"3.9.0": {"sm_89 gdn 64": fits, "sm_89 gdn 256": refused}}})
    assert text.splitlines()[-1] == "| 3.9.0 | sm_89 | 2 | 2 | 0 | 255 | 8 (a) | 1 |"


@pytest.mark.parametrize("split_terms", [False, True])
def test_wide_keys_get_smaller_tiles_where_shared_memory_is_small(split_terms):
    import torch

    problem = plan.Problem(torch.bfloat16, 2, 200, 2, 2, 256, 256, True, False, "head", False, split_terms)
    small, large = (
        heuristic.heuristic(problem, portability.device_of(name, "3.7.1")).reverse for name in ("sm_89", "sm_80")
    )
    assert small.tile * small.stages < large.tile * large.stages


@pytest.mark.parametrize("grad", [False, True])
def test_size_refusals_are_traceable(grad):
    ones = torch.ones(2)

    def refused(x: torch.Tensor) -> torch.Tensor:
        return x + len(size_refusals("GPU", 99 * 1024, torch.bfloat16, 200, 400, grad))

    compiled = torch.compile(refused, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ones), refused(ones))


@pytest.mark.parametrize("kind", portability.PASSES)
@pytest.mark.parametrize("update", portability.UPDATES)
def test_every_problem_of_the_grid_launches_kernels(update, kind):
    launched = []

    def launcher(kernel, *_, **__):
        launched.append(kernel.__name__)
        return lambda *_: None

    portability.launch(("sm_90", update, "bfloat16", 64, kind), "3.7.1", launcher)
    if update == "mamba" and kind not in portability.WITHOUT_UPDATE:
        scans = ["element_scan_kernel", *(["element_backward_kernel"] if kind == "training" else [])]
        assert launched == (["element_step_kernel"] if kind == "decode" else scans)
    elif kind == "decode":
        assert launched == ["decode_kernel", "verify_kernel", "commit_kernel"]
    else:
        assert len(launched) >= (4 if kind == "training" else 2)
