"""Writing a model as a folder of transformers: config.json and safetensors in shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, cut
from deltazoo.backends.io.output_path import output_folder
from deltazoo.backends.update import registry
from deltazoo.blocks.checkpoints.built import first_difference
from deltazoo.blocks.checkpoints.family import CONFIG, Family, HubConfig, family
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.blocks.checkpoints.tensor_files import (
    MAX_SHARD_BYTES,
    SAFETENSORS,
    shard_names,
    shards,
    write_json,
    write_shard,
)
from deltazoo.blocks.data.tokenizer import Tokenizer
from deltazoo.blocks.model.interface import ModelSpec

FORMATS = ("transformers",)


class Origin(NamedTuple):
    """The folder that a model was read from: its model type, and the fields of its config.json without effect."""

    model_type: str
    fields: dict[str, Any]


class SavableModel(Protocol):
    """The part of `LanguageModel` that is written."""

    origin: Origin | None
    tokenizer: Tokenizer | None

    @property
    def spec(self) -> ModelSpec: ...
    def state_dict(self) -> dict[str, Tensor]: ...


def save_pretrained(
    model: SavableModel,
    folder: str | Path,
    format: str = "transformers",  # the name that users of transformers know
    model_type: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the folder; see `LanguageModel.save_pretrained`."""
    if format not in FORMATS:
        raise ConfigError(f"format must be {' or '.join(map(repr, FORMATS))}, got {cut(format)}")
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder: choose another")
    origin = model.origin
    found, config = choose_family(model.spec, model_type or (origin.model_type if origin else None))
    tensors = model.state_dict()
    rules = found.rules(model.spec)
    check_rules(rules, tensors)
    kept = origin.fields if origin else {}
    constants = found.constants(model.spec, {**kept, **config})
    _write_weights(target, rules, tensors, constants, max_shard_bytes)
    dtype = str(tensors["embedding.weight"].dtype).removeprefix("torch.")
    if model.tokenizer is not None:
        model.tokenizer.copy_files(target)
    write_json(target / CONFIG, {**kept, **config, "architectures": [found.architecture], "dtype": dtype})


def _write_weights(
    target: Path, rules: list[Rule], tensors: dict[str, Tensor], constants: dict[str, Tensor], max_shard_bytes: int
) -> None:
    """Create the folder, and write its tensors in shards, and with several shards their index."""
    sources: dict[str, Rule] = {}
    sizes: dict[str, int] = {}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    for rule in rules:
        for name, tensor in rule.write(shapes).items():
            sources[name], sizes[name] = rule, tensor.nbytes
    sizes |= {name: tensor.nbytes for name, tensor in constants.items()}
    files = shards(sizes, max_shard_bytes)
    names = shard_names(len(files))
    output_folder(target)
    for file, members in zip(names, files, strict=True):
        written = dict(_tensors([name for name in members if name in sources], sources, tensors))
        write_shard(target / file, written | {name: constants[name] for name in members if name in constants})
    if len(files) > 1:
        weight_map = {name: file for file, members in zip(names, files, strict=True) for name in members}
        metadata = {"total_size": sum(sizes.values())}
        write_json(target / f"{SAFETENSORS}.index.json", {"metadata": metadata, "weight_map": weight_map})


def _tensors(names: list[str], sources: dict[str, Rule], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield these tensors of the folder by name. Tensors of one rule that follow each other are computed together."""
    written: dict[str, Tensor] = {}
    last: Rule | None = None
    for name in names:
        rule = sources[name]
        if rule is not last:
            written, last = rule.write({ours: tensors[ours].detach() for ours in rule.ours}), rule
        yield name, _own_memory(written[name].cpu())


def _own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that shares its memory with no other, as safetensors needs it."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def check_rules(rules: list[Rule], tensors: dict[str, Tensor]) -> None:
    """Raise ConfigError unless each tensor of the model is in exactly one rule: else the family is wrong."""
    ours = [name for rule in rules for name in rule.ours]
    wrong = sorted({name for name in ours if ours.count(name) > 1} if len(ours) != len({*ours}) else set())
    wrong += sorted({*ours} ^ {*tensors})
    if wrong:
        raise ConfigError(
            "the rules of the family must have each tensor of the model once, without adapters or quantised weights; "
            f"wrong: {', '.join(wrong)}"
        )


def choose_family(spec: ModelSpec, model_type: str | None) -> tuple[Family, dict[str, Any]]:
    """Return the family that expresses a stack, and its config.json; of several of a library, that with fewest fields.

    Raises: ConfigError: the family, or without a `model_type` any installed one, does not express the stack.
    """
    names = [model_type] if model_type else registry.names(registry.FAMILIES)
    fits: list[tuple[Family, dict[str, Any]]] = []
    reasons, others = [], []
    for name in names:
        found = family(name)
        if found.written_as is not None:
            reasons += [f"{name}: it is written as {found.written_as}"] * (model_type is not None)
            continue
        try:
            config = {**found.config(spec), "model_type": name}
            back = type(spec)(**found.stack(HubConfig(config, name)))
        except ConfigError as error:
            reasons.append(f"{name}: {error}")
            continue
        except Exception:  # see `Family.config`
            others.append(name)
            continue
        difference = None if back == spec else first_difference(spec, back)
        if difference is None:
            fits.append((found, config))
        else:
            reasons.append(f"{name}: {difference}")
    if fits:
        return min(fits, key=lambda fit: (fit[0].library != Family.library, len(fit[1])))
    if others:
        reasons.append(f"other layers or settings: {', '.join(others)}")
    kind = f"a model of type {model_type!r} of" if model_type else "any family of"
    raise ConfigError(f"the stack is not {kind} transformers:\n  " + "\n  ".join(reasons))
