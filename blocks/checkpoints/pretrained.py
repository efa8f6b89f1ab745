"""Reading a folder of transformers into a model, tensor by tensor."""

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, DeltazooError
from deltazoo.backends.torch_ext.devices import usable_device
from deltazoo.backends.torch_ext.sharded import place_as
from deltazoo.backends.update.base import Backend
from deltazoo.blocks.checkpoints.bare import bare_config, bare_file
from deltazoo.blocks.checkpoints.export import Origin, check_rules
from deltazoo.blocks.checkpoints.family import CONFIG, Family, family, read_config
from deltazoo.blocks.checkpoints.fp8 import Blocks, read_blocks
from deltazoo.blocks.checkpoints.rules import Rule
from deltazoo.blocks.checkpoints.tensor_files import TensorFiles, all_finite, read_json
from deltazoo.blocks.data.tokenizer import read_tokenizer
from deltazoo.blocks.model.compilation import run_eagerly
from deltazoo.blocks.model.stack import LanguageModel
from deltazoo.blocks.spec.stack_spec import StackSpec


class Source(NamedTuple):
    """A folder that was read up to its weights: the stack, the family, what a saved folder keeps, and blocks of FP8."""

    spec: StackSpec
    family: Family
    origin: Origin
    blocks: Blocks | None = None


HEAD = "lm_head.weight"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Device of the weights, and their dtype or None
Form = tuple[torch.device, torch.dtype | None]
# Sentences about damage, and whether the values of each tensor of the folder are finite
Findings = tuple[list[str], dict[str, list[Tensor | bool]]]


def read_spec(folder: str | Path) -> Source:
    """Read the config.json of a folder, or the sizes of weights that have none.

    Raises: ConfigError, which names a field that no stack expresses; UnknownNameError: no family has the model type.
    """
    file = bare_file(Path(folder))
    values = read_json(Path(folder) / CONFIG) if file is None else bare_config(file)
    model_type, config = read_config(values)
    found = family(model_type)
    try:
        spec = StackSpec(**found.stack(config))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:  # of a wrong value
        if isinstance(error, DeltazooError) and str(error).startswith("config.json"):
            raise
        problem = str(error) if isinstance(error, DeltazooError) else f"a field has a wrong value: {error}"
        raise ConfigError(
            f"{file or Path(folder) / CONFIG}: {problem.rstrip('.')}; the last fields read: {config.last_read()}"
        ) from error
    config.check_all_read((*found.ignored, "quantization_config"))
    return Source(spec, found, Origin(found.written_as or model_type, config.kept()), read_blocks(values))


def from_pretrained(
    folder: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    backend: str | Backend | None = None,
    shard: Callable[[LanguageModel], object] | None = None,
) -> LanguageModel:
    """Build a model with the weights of a folder that transformers wrote or can read, in evaluation mode.

    The folder has a config.json and the weights in safetensors or PyTorch files, single or in shards with an index.
    Tensors are read one by one: the memory needed is that of the model and of one tensor. Weights in FP8 with a scale
    per block are dequantised. `model.tokenizer` is the folder's. No code of the folder runs.

    Args:
        folder: a local folder; or a `.pth` file of RWKV-7, or a folder with one.
        device: of the model; None: the CPU.
        dtype: of the weights; None: each has that of the folder. Decays and the weights beside them keep that of the
            folder, which is float32 in most.
        backend: as for `deltazoo.load`.
        shard: called with the model on the meta device before the weights are read, to apply FSDP2's `fully_shard`:
            each rank then reads the files and keeps its part. FSDP2 needs one dtype in each of its groups.
    Raises:
        ConfigError: the config has a field that no stack expresses, or tensors are missing, unknown, misshapen,
            duplicated, damaged, NaN or infinite. One error lists them all.
        UnknownNameError: no installed family has the `model_type` of the folder.
    """
    source = read_spec(folder)
    place = torch.device("cpu") if device is None else usable_device(device)
    with run_eagerly(place), torch.device("meta"):
        model = source.spec.build(backend)
        if shard is not None:
            shard(model)
    with TensorFiles(bare_file(Path(folder)) or Path(folder), source.blocks) as files:
        placements = model.state_dict()
        tensors = _read_weights(folder, source, files, placements, (place, dtype))
        model.load_state_dict(tensors, assign=True)
    model.origin = source.origin
    model.tokenizer = read_tokenizer(Path(folder), source.origin.fields, source.spec.vocab)
    return model.eval()


def _read_weights(
    folder: str | Path, source: Source, files: TensorFiles, placements: dict[str, Tensor], form: Form
) -> dict[str, Tensor]:
    """Return the tensors of the model. Args: placements: those of the model on the meta device, sharded or not."""
    shapes = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in placements.items()}
    theirs, dropped = _their_names(files, source.family)
    rows = {name: files.infos[actual].shape[0] for name, actual in theirs.items() if files.infos[actual].shape}
    rules = [rule.fitting(rows) for rule in source.family.rules(source.spec)]
    check_rules(rules, shapes)
    if source.spec.tied:
        dropped.append(HEAD)
    _refuse(folder, files.problems + _name_problems(rules, shapes, files, theirs, dropped))
    tensors: dict[str, Tensor] = {}
    problems = _tied_problems(rules, files, theirs) if source.spec.tied else []
    finite: dict[str, list[Tensor | bool]] = {}
    for rule in rules:
        read = _read_rule(rule, shapes, files, theirs, form, (problems, finite))
        tensors |= {name: place_as(placements[name], tensor) for name, tensor in read.items()}
    problems += [f"{name} has values that are NaN or infinite" for name, flags in finite.items() if not all(flags)]
    _refuse(folder, problems)
    return tensors


def _tied_problems(rules: list[Rule], files: TensorFiles, theirs: dict[str, str]) -> list[str]:
    """Compare a head in the folder of a tied stack, which is not read, with the embedding."""
    (embedding,) = next(rule for rule in rules if "embedding.weight" in rule.ours).theirs
    if HEAD not in theirs or files.equal(theirs[HEAD], theirs[embedding]):
        return []
    return [f"{HEAD} must equal {embedding}, to which the config ties it: set tie_word_embeddings to false to read it"]


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
            if info.dtype not in _FLOATS:
                problems.append(f"{name} must be float64, float32, float16 or bfloat16, got {info.dtype}")
    return problems + [f"{theirs[name]} is unknown" for name in theirs if name not in expected and name not in dropped]


def _read_rule(
    rule: Rule,
    shapes: dict[str, Tensor],
    files: TensorFiles,
    theirs: dict[str, str],
    form: Form,
    findings: Findings,
) -> dict[str, Tensor]:
    """Read the tensors of one rule. Args: findings: what is found about their values is added."""
    device, dtype = form
    problems, finite = findings
    stored = {files.infos[theirs[name]].dtype for name in rule.theirs}
    if dtype is None or rule.precise:
        dtypes = [x for x in stored if isinstance(x, torch.dtype)]
        if len(dtypes) > 1:
            problems.append(f"{', '.join(rule.theirs)} are one tensor here and must have one dtype: pass dtype")
        dtype = dtypes[0]
    tensors = {name: torch.empty(shapes[name].shape, dtype=dtype, device=device) for name in rule.ours}
    targets = rule.targets(tensors)
    for name, packed in rule.theirs.items():
        actual, pieces = theirs[name], packed.pieces.replace("~", " ").split()
        rows = [targets[piece] for piece in pieces]
        if packed.is_ordered and files.in_place(actual, rows):
            finite[name] = files.get_into(actual, rows)
        else:
            tensor = files.get(actual)
            finite[name] = [all_finite(tensor)]
            for piece, source in packed.split(tensor, rule.sizes).items():
                targets[piece].copy_(source)
            narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
            if narrower and all(finite[name]) and not all(all_finite(row) for row in rows):
                problems.append(f"{name} has values that {dtype} cannot hold")
    return tensors


def _refuse(folder: str | Path, problems: list[str]) -> None:
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{folder} cannot be read, and nothing was loaded: {listed}")
