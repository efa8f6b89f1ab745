"""What precedes the first step: the model of a run, and the checks of everything that could fail later."""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.torch_ext.allocation import format_bytes, physical_memory
from deltazoo.backends.torch_ext.devices import cxx_compiler, usable_device
from deltazoo.blocks.checkpoints.export import choose_family
from deltazoo.blocks.checkpoints.family import CONFIG
from deltazoo.blocks.checkpoints.pretrained import from_pretrained, read_spec
from deltazoo.blocks.checkpoints.sharded import CHECKPOINTS
from deltazoo.blocks.data.shards import TOKENIZER
from deltazoo.blocks.data.tokenizer import GENERATION, read_tokenizer
from deltazoo.blocks.inspect.describe import parameter_count
from deltazoo.blocks.model.compilation import check_updates, compile_layers, run_eagerly
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.parallel.ranks import Ranks, local_device
from deltazoo.blocks.spec.stack_spec import StackSpec
from deltazoo.blocks.training.config import Precision, TrainConfig
from deltazoo.blocks.training.source import RowSource, ShardSource

_log = logging.getLogger("deltazoo")

_COMPUTED: dict[Precision, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "autocast": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip
_SAVED = 12  # bytes per parameter in a checkpoint: the weight and two moments in float32


def is_pretrained(model: object) -> bool:
    """Whether the name of a model is a folder of weights."""
    return isinstance(model, str | Path) and (Path(model) / CONFIG).is_file()


def run_device(config: TrainConfig) -> torch.device:
    """Return the device of this process. Raises: ConfigError."""
    device = usable_device(local_device(config.device))
    if config.compile and device.type == "cpu" and cxx_compiler() is None:
        raise ConfigError(
            "torch.compile needs a C++ compiler on the CPU, got none: install g++ or clang++ (Windows: cl), "
            "or train with compile=False"
        )
    return device


def build_model(
    spec: StackSpec, config: TrainConfig, device: torch.device, ranks: Ranks, pretrained: str | Path | None = None
) -> LanguageModel:
    """Build the model with its initial weights, equal on all processes, in the dtype of the run.

    A GPU draws the weights itself, so that they differ from those that a CPU draws from the same seed.

    Args: pretrained: folder of the weights.
    Raises: ConfigError.
    """
    _check_memory(spec, config, device, ranks)
    torch.manual_seed(config.seed)
    sharded = config.parallel.mode == "fsdp" and ranks.size > 1
    with nullcontext() if config.compile else run_eagerly(device):
        if pretrained is not None:
            model = from_pretrained(pretrained, device, backend=config.backend).float().train()
        else:
            with device if device.type == "cuda" else nullcontext():
                model = spec.build(backend=config.backend).to(device)
    if config.precision == "float64":
        model = model.double()
    if config.precision == "bfloat16" and not sharded:  # FSDP2 keeps float32 weights and casts the gathered ones
        model = model.bfloat16()
    check_updates(model, _COMPUTED[config.precision])
    model.checkpoint_layers(config.checkpointing)
    return compile_layers(model) if config.compile else model


def keep_origin(model: LanguageModel, config: TrainConfig) -> None:
    """Let a resumed model write folders like the one that it began from, if that still exists."""
    if is_pretrained(config.model):
        source = read_spec(str(config.model))
        model.origin = source.origin
        model.tokenizer = read_tokenizer(Path(str(config.model)), source.origin.fields, model.spec.vocab)


def check_run(model: LanguageModel, source: RowSource, config: TrainConfig, folder: Path | None) -> None:
    """Raise ConfigError for what would fail during the run or at its end: vocabulary, tokenizer, disk, export."""
    if model.spec.vocab < source.least_vocab:
        kind = "bytes" if source.dense else "these data"
        raise ConfigError(f"vocab must be at least {source.least_vocab} to train on {kind}, got {model.spec.vocab}")
    check_tokenizer(model, source)
    if config.checkpoint.pretrained:
        choose_family(model.spec, model.origin.model_type if model.origin else None)
    if folder is not None:
        _check_disk(folder, model, config)


def check_tokenizer(model: LanguageModel, source: RowSource) -> None:
    """Raise ConfigError if the file of the model's tokenizer is known, and another one encoded the text."""
    if model.tokenizer is not None and (path := model.tokenizer.folder / TOKENIZER).is_file():
        tokenizer = source.shards["train"][0].index.tokenizer if isinstance(source, ShardSource) else None
        if tokenizer is None or tokenizer.digest != hashlib.sha256(path.read_bytes()).hexdigest():
            got = "bytes" if tokenizer is None or tokenizer.name != TOKENIZER else "another tokenizer"
            raise ConfigError(
                f"{source.origin.source} must be encoded by the tokenizer of the model: deltazoo data SOURCE "
                f"--tokenizer {path}, got {got}"
            )


def _check_memory(spec: StackSpec, config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Raise ConfigError if weights, gradients and optimizer alone exceed the memory of the device."""
    with torch.device("meta"):
        parameters = parameter_count(spec.build())
    sharing = (config.parallel.shard or ranks.size) if config.parallel.mode == "fsdp" else 1
    per_parameter = {"float64": 32, "float32": 16, "autocast": 16, "bfloat16": 16}[config.precision]
    needed = parameters * per_parameter // sharing
    if device.type == "cuda":
        total: int | None = torch.cuda.get_device_properties(device).total_memory
    else:
        total = physical_memory()
    if total is None:
        return
    if needed > total:
        raise ConfigError(
            f"weights, gradients and optimizer need {format_bytes(needed)} on each {device.type}, which has "
            f"{format_bytes(total)}: use parallel.mode fsdp on more processes, or a smaller model"
        )
    if ranks.is_first and device.type == "cuda":
        _log.info(
            "%s parameters; weights, gradients and optimizer: %s of %s, without activations",
            f"{parameters:,}", format_bytes(needed), format_bytes(total),
        )  # fmt: skip


def _check_disk(folder: Path, model: LanguageModel, config: TrainConfig) -> None:
    """Raise ConfigError if the checkpoints that are kept, and one that is written, do not fit on the disk."""
    size = parameter_count(model) * _SAVED
    needed = size * (config.checkpoint.keep + config.checkpoint.best + 1)
    checkpoints = folder / CHECKPOINTS
    used = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file()) if checkpoints.is_dir() else 0
    free = shutil.disk_usage(folder).free
    if free + used < needed:
        raise ConfigError(
            f"the checkpoints need {format_bytes(needed)}, {folder} has {format_bytes(free)} free: lower "
            f"checkpoint.keep, got {config.checkpoint.keep}, or choose another disk"
        )


def copy_tokenizer(source: RowSource, folder: Path) -> None:
    """Copy the tokenizer of the data into the folder of the run, for `deltazoo generate`. Raises: ConfigError."""
    if not isinstance(source, ShardSource):
        return
    shards = source.shards["train"][0]
    path, end = shards.folder / TOKENIZER, shards.index.tokenizer.end
    if shards.index.tokenizer.name == TOKENIZER and path.is_file():
        shutil.copyfile(path, folder / TOKENIZER)
        if end is not None:
            (folder / GENERATION).write_text(json.dumps({"eos_token_id": end}) + "\n", encoding="utf-8")


@contextmanager
def warnings_of_rank(ranks: Ranks) -> Iterator[None]:
    """Let only rank 0 log in the block."""
    level = _log.level
    if not ranks.is_first:
        _log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        _log.setLevel(level)
