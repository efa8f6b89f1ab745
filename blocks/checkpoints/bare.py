"""Weights without a config.json: the `.pth` files of RWKV-7, whose sizes are those of their tensors."""

from pathlib import Path
from typing import Any

from deltazoo.backends.io.errors import ConfigError
from deltazoo.blocks.checkpoints.family import CONFIG
from deltazoo.blocks.checkpoints.tensor_files import TensorFiles

SUFFIX = ".pth"


def is_pretrained(path: Path) -> bool:
    """Whether a path is a folder of transformers, or weights of RWKV-7; else it may be a training run."""
    return (path / CONFIG).is_file() or bare_file(path) is not None


def bare_file(path: Path) -> Path | None:
    """Return a path that is a `.pth` file, or the only one in a folder without config.json; else None."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    files = [*path.glob(f"*{SUFFIX}")]
    return files[0] if len(files) == 1 and not (path / CONFIG).is_file() else None


def bare_config(path: Path) -> dict[str, Any]:
    """Return the fields of config.json for a file. Raises: ConfigError: it is not RWKV-7's, or is damaged."""
    with TensorFiles(path) as files:
        if files.problems:
            raise ConfigError(f"{path} cannot be read: {'; '.join(files.problems)}")
        shapes = {name: info.shape for name, info in files.infos.items()}
    try:
        (vocab, width), (_, key_width) = shapes["emb.weight"], shapes["blocks.0.att.r_k"]
        blocks = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        ranks = {x: shapes[f"blocks.{blocks - 1}.att.{x}1"][1] for x in "wag"}
        value_width = shapes["blocks.0.att.value.weight"][0]
        value_rank = shapes.get(f"blocks.{blocks - 1}.att.v1", (width, 1))[1]
        hidden = shapes["blocks.0.ffn.key.weight"][0]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{path} must have the tensors of RWKV-7, got {error!r}") from None
    return {
        "model_type": "rwkv7_pth",
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "vocab_size": vocab,
        "head_dim": key_width,
        "value_dim": value_width,
        "intermediate_size": hidden,
        "decay_low_rank_dim": ranks["w"],
        "a_low_rank_dim": ranks["a"],
        "v_low_rank_dim": value_rank,
        "gate_low_rank_dim": ranks["g"],
        "hidden_act": "sqrelu",
        "norm_eps": 1e-5,
    }
