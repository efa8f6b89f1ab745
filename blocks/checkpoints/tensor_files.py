"""The tensors of a folder in safetensors or PyTorch files, mapped and read one by one; and writing them in shards."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, cut, file_errors

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
MAX_SHARD_BYTES = 5_000_000_000
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor; the dtype is a text if torch here cannot compute with it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class TensorFiles:
    """The tensors of a folder by name. Files are mapped: a tensor is read when it is asked for.

    Attributes: `infos`, by name; `problems`, a sentence for each damaged file or entry.
    """

    def __init__(self, folder: Path) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self._open: dict[str, Any] = {}  # the open file of each tensor
        self._file: dict[str, str] = {}
        listed = self._find(folder)
        for file in dict.fromkeys(listed.values()):
            for name, info, opened in self._read_file(folder / file):
                if name in self.infos:
                    self.problems.append(f"{name} is in two files, {self._file[name]} and {file}")
                    continue
                self.infos[name], self._open[name], self._file[name] = info, opened, file
        for name, file in listed.items():
            if name and name in self._file and self._file[name] != file:
                self.problems.append(f"{name} is in {self._file[name]}, and the index says {file}")

    def get(self, name: str) -> Tensor:
        """Return a tensor on the CPU."""
        opened = self._open[name]
        tensor: Tensor = opened[name] if isinstance(opened, dict) else opened.get_tensor(name)
        return tensor

    def _find(self, folder: Path) -> dict[str, str]:
        """Return the file of each tensor by the index, or {"": the only file}."""
        for single in (SAFETENSORS, PICKLED):
            if (folder / single).is_file():
                return {"": single}
            index = folder / f"{single}.index.json"
            if index.is_file():
                entries = read_json(index).get("weight_map")
                if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
                    raise ConfigError(f"{index}: weight_map must map tensors to files, got {cut(entries)}")
                for file in entries.values():
                    if Path(file).name != file:
                        raise ConfigError(f"{index}: a file must be in the same folder, got {cut(file)}")
                return entries
        raise ConfigError(f"{folder} has no weights: it needs {SAFETENSORS} or {PICKLED}, or an index of shards")

    def _read_file(self, path: Path) -> Iterator[tuple[str, TensorInfo, Any]]:
        if not path.is_file():
            self.problems.append(f"the file {path.name} is missing")
            return
        try:
            opened: Any = _open_pickled(path) if path.suffix == ".bin" else _open_safetensors(path)
        except Exception as error:  # of a damaged file: each reader has its own
            self.problems.append(f"the file {path.name} is damaged: {str(error).splitlines()[0]}")
            return
        for name in opened.keys():  # noqa: SIM118 - not a dict if it is safetensors
            if isinstance(opened, dict):
                value = opened[name]
                if not isinstance(value, Tensor):
                    self.problems.append(f"{name} in {path.name} must be a tensor, got {cut(value)}")
                    continue
                yield name, TensorInfo(tuple(value.shape), value.dtype), opened
            else:
                part = opened.get_slice(name)
                dtype = part.get_dtype()
                yield name, TensorInfo(tuple(part.get_shape()), _DTYPES.get(dtype, dtype)), opened


def _open_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt", device="cpu")


def _open_pickled(path: Path) -> dict[str, Any]:
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(loaded, dict):
        raise TypeError(f"it must hold a dict, got {cut(loaded)}")
    return loaded


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: ConfigError."""
    with file_errors("read", path):
        text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {cut(data)}")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object with sorted keys. Raises: ConfigError."""
    with file_errors("write", path):
        path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Distribute tensors to files of at most `max_bytes`, in order; a larger tensor has a file of its own."""
    files: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not files or used + size > max_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def shard_names(count: int) -> list[str]:
    """Return the names of the files."""
    if count == 1:
        return [SAFETENSORS]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file. Raises: ConfigError: it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with file_errors("write", path):
            save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
