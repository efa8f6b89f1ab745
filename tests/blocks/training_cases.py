"""A small model and a short run, and changes of its settings, for the tests of training."""

from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import TrainConfig, parse_nested
from deltazoo.blocks.training.nested import merged

SPEC = StackSpec(
    width=16,
    depth=2,
    vocab=256,
    pattern="gated_deltanet(heads=1) + sliding_window(heads=1, window=8)",
    mlp={"width": 16},
)
CONFIG = TrainConfig(
    steps=8,
    batch={"rows": 2, "length": 12},
    schedule={"warmup": 2},
    evaluation={"every": 3, "batches": 2},
    optimizer={"learning_rate": 1e-2},
    checkpoint={"background": False},
    backend="reference",
    compile=False,
)


def changed(config, **changes):
    """Return a config with changes, by paths with __ in place of points."""
    paths = {path.replace("__", "."): value for path, value in changes.items()}
    return parse_nested(TrainConfig, merged(config.model_dump(), paths))
