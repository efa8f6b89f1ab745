"""Values of config.json that are missing, null or of an older form: logits of transformers, and folders written."""

import json
from pathlib import Path
from typing import Any

import folders
import pytest
import torch

import deltazoo
from deltazoo.mixers.core.conformance import relative_error

pytest.importorskip("transformers", minversion="5.23", reason="older versions have no OLMo Hybrid")

TOKENS = torch.randint(folders.VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


def change(folder: Path, changes: dict[str, Any], missing: tuple[str, ...] = ()) -> None:
    """Replace and remove fields of a folder's config.json."""
    path = folder / "config.json"
    fields = {name: x for name, x in json.loads(path.read_text()).items() if name not in missing}
    path.write_text(json.dumps(fields | changes))


@torch.no_grad()
def assert_logits_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = theirs(TOKENS, use_cache=False).logits
    actual = deltazoo.from_pretrained(folder, dtype=torch.float32)(TOKENS)[0]
    assert relative_error(actual, expected) < 1e-5


LINEAR = {"type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 50.0},
        {"rope_theta": None},
        {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_theta": 50.0, "rope_scaling": LINEAR},
        {"rope_theta": None, "rope_scaling": LINEAR},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rope_scaling": LINEAR},
        {"rope_theta": 50.0, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    ],
    ids=json.dumps,
)
def test_only_a_theta_that_is_null_leaves_out_the_positions_of_olmo_hybrid(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    folders.write(tmp_path, "olmo_hybrid")
    change(tmp_path, fields, missing=("rope_theta", "rope_scaling", "rope_parameters"))
    assert_logits_of_transformers(tmp_path)
