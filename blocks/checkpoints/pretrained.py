"""Reading a folder of transformers into a model, tensor by tensor."""

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.backends.update.base import Backend
from deltazoo.blocks.checkpoints.export import Origin, check_rules
from deltazoo.blocks.checkpoints.family import CONFIG, Family, family, read_config
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.blocks.checkpoints.tensor_files import TensorFiles, read_json
from deltazoo.blocks.model.compilation import run_eagerly
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec


class Source(NamedTuple):
    """A folder that was read up to its weights: the stack, the family, and what a saved folder keeps."""

    spec: StackSpec
    family: Family
    origin: Origin


def read_spec(folder: str | Path) -> Source:
    """Read the config.json of a folder.

    Raises: ConfigError, which names a field that no stack expresses; UnknownNameError: no family has the model type.
    """
    path = Path(folder) / CONFIG
    model_type, config = read_config(read_json(path))
    found = family(model_type)
    spec = StackSpec(**found.stack(config))
    config.check_all_read(found.ignored)
    return Source(spec, found, Origin(found.written_as or model_type, config.kept()))


def from_pretrained(
    folder: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    backend: str | Backend | None = None,
) -> LanguageModel:
    """Build a model with the weights of a folder that transformers wrote or can read, in evaluation mode.

    The folder has a config.json and the weights in safetensors or PyTorch files, single or in shards with an index.
    Files are mapped, and tensors copied one by one: the memory needed is that of the model and of one tensor. No code
    of the folder runs.

    Args:
        folder: a local folder.
        device: of the model; None: the CPU.
        dtype: of the weights; None: each has that of the folder. Decays and the weights beside them keep that of the
            folder, which is float32 in most.
        backend: as for `deltazoo.load`.
    Raises:
        ConfigError: the config has a field that no stack expresses, or tensors are missing, unknown, misshapen,
            duplicated, damaged, NaN or infinite. One error lists them all.
        UnknownNameError: no installed family has the `model_type` of the folder.
    """
    source = read_spec(folder)
    files = TensorFiles(Path(folder))
    place = torch.device("cpu") if device is None else usable_device(device)
    with run_eagerly(place), torch.device("meta"):
        model = source.spec.build(backend)
    shapes = model.state_dict()
    theirs, dropped = _their_names(files, source.family)
    rows = {name: files.infos[actual].shape[0] for name, actual in theirs.items() if files.infos[actual].shape}
    rules = [rule.fitting(rows) for rule in source.family.rules(source.spec)]
    check_rules(rules, shapes)
    if source.spec.tied:
        dropped.append("lm_head.weight")
    _refuse(folder, files.problems + _name_problems(rules, shapes, files, theirs, dropped))
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for rule in rules:
        tensors |= _read_rule(rule, shapes, files, theirs, (place, dtype), problems)
    _refuse(folder, problems)
    model.load_state_dict(tensors, assign=True)
    model.origin = source.origin
    return model.eval()


def _their_names(files: TensorFiles, found: Family) -> tuple[dict[str, str], list[str]]:
    """Return the name in the folder of each name in the rules, and the dropped names."""
    names: dict[str, str] = {}
    dropped = []
    for actual in files.infos:
        if any(fnmatch(actual, pattern) for pattern in found.dropped):
            dropped.append(actual)
            continue
        name = actual
        for pattern, replacement in found.aliases.items():
            name = re.sub(pattern, replacement, name)
        if name in names:
            files.problems.append(f"{actual} and {names[name]} are the same tensor")
        names[name] = actual
    return names, dropped


def _name_problems(
    rules: list[Rule], shapes: dict[str, Tensor], files: TensorFiles, theirs: dict[str, str], dropped: list[str]
) -> list[str]:
    """Compare names, shapes and dtypes of the folder with those that the rules expect."""
    problems = []
    expected: dict[str, Tensor] = {}
    for rule in rules:
        written = rule.write(shapes)
        expected |= written
        for name, tensor in written.items():
            if name not in theirs:
                problems.append(f"{name} is missing")
                continue
            info = files.infos[theirs[name]]
            if info.shape != tuple(tensor.shape):
                problems.append(f"{name} must have shape {list(tensor.shape)}, got {list(info.shape)}")
            if not isinstance(info.dtype, torch.dtype) or not info.dtype.is_floating_point:
                problems.append(f"{name} must be float64, float32, float16 or bfloat16, got {info.dtype}")
    return problems + [f"{theirs[name]} is unknown" for name in theirs if name not in expected and name not in dropped]


def _read_rule(
    rule: Rule,
    shapes: dict[str, Tensor],
    files: TensorFiles,
    theirs: dict[str, str],
    form: tuple[torch.device, torch.dtype | None],
    problems: list[str],
) -> dict[str, Tensor]:
    """Read the tensors of one rule, and add a sentence for each that is not finite. Args: form: device and dtype."""
    device, dtype = form
    stored = {files.infos[theirs[name]].dtype for name in rule.theirs}
    if dtype is None or rule.precise:
        dtypes = [x for x in stored if isinstance(x, torch.dtype)]
        if len(dtypes) > 1:
            problems.append(f"{', '.join(rule.theirs)} are one tensor here and must have one dtype: pass dtype")
        dtype = dtypes[0]
    tensors = {name: torch.empty(shapes[name].shape, dtype=dtype, device=device) for name in rule.ours}
    targets = rule.targets(tensors)
    for name, packed in rule.theirs.items():
        source = files.get(theirs[name])
        if not all(bool(bound.isfinite()) for bound in source.aminmax()):  # NaN propagates; no mask in memory
            problems.append(f"{name} has values that are NaN or infinite")
        for piece, rows in packed.split(source, rule.sizes).items():
            targets[piece].copy_(rows)
    return tensors


def _refuse(folder: str | Path, problems: list[str]) -> None:
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{folder} cannot be read, and nothing was loaded: {listed}")
