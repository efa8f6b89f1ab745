"""Wrong values in the config.json of every family raise the package's error; that of a text names the field."""

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import folders
import pytest
import test_fla

from deltazoo.backends.io.errors import DeltazooError
from deltazoo.blocks.checkpoints.family import family
from deltazoo.blocks.checkpoints.pretrained import read_spec

transformers = pytest.importorskip("transformers", minversion="5.23", reason="older versions have no OLMo Hybrid")

WRONG = (None, "x", -1, [], 1e9, 10**9, 0, {}, [None])
RWKV7 = {
    "hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 17, "head_dim": 8, "value_dim": 24, "norm_eps": 1e-5,
    "intermediate_size": 20, "decay_low_rank_dim": 5, "a_low_rank_dim": 4, "v_low_rank_dim": 3,
    "gate_low_rank_dim": 6, "hidden_act": "sqrelu",
}  # fmt: skip
STATE_SPACES = {
    "d_model": 64, "d_intermediate": 0, "n_layer": 2, "vocab_size": 50, "attn_layer_idx": [], "rms_norm": True,
    "pad_vocab_size_multiple": 8, "tie_embeddings": True,
}  # fmt: skip
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "window_size": 6, "rope_theta": 50.0}


def configs() -> dict[str, dict[str, Any]]:
    """Return a config of every family; those of a vision tower differ in where the fields are."""
    found: dict[str, dict[str, Any]] = {"rwkv7_pth": RWKV7 | {"model_type": "rwkv7_pth"}}
    for model in folders.MODELS.values():
        config = getattr(transformers, model.config)(**model.fields)
        unread = ("id2label", "label2id", "return_dict")
        fields = json.loads(config.to_json_string(use_diff=False))
        found.setdefault(config.model_type, {x: y for x, y in fields.items() if x not in unread})
    for name, (_, fields, _) in test_fla.MODELS.items():
        found[name] = {"model_type": name} | test_fla.SIZES | fields
    found["gated_deltanet"]["attn"] = ATTENTION
    for number, layer in enumerate(("Mamba1", "Mamba2")):
        sizes = {"layer": layer, "d_state": 16, "d_conv": 4, "expand": 2}
        found[f"state_spaces_mamba{number + 1 if number else ''}"] = STATE_SPACES | {"ssm_cfg": sizes}
    return found


CONFIGS = configs()


def test_every_family_has_a_config_here() -> None:
    names = {each.name for each in entry_points(group="deltazoo.families") if family(each.name).nested is None}
    assert names <= CONFIGS.keys()


@pytest.mark.filterwarnings("ignore:layers.* is not in the pattern")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_value_raises_the_error_of_the_package(name: str, tmp_path: Path) -> None:
    fields, path = CONFIGS[name], tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    ignored = {*read_spec(tmp_path).family.ignored, "model_type"}
    places = [(x,) for x in fields if x not in ignored]
    places += [(x, y) for x, values in fields.items() if isinstance(values, dict) for y in values]
    unnamed = []
    for place in places:
        for wrong in WRONG:
            changed = json.loads(json.dumps(fields))
            (changed if len(place) == 1 else changed[place[0]])[place[-1]] = wrong
            path.write_text(json.dumps(changed))
            try:
                read_spec(tmp_path)
            except DeltazooError as error:
                if wrong == "x" and place[-1] not in str(error):
                    unnamed.append((place, error))
    assert not unnamed
