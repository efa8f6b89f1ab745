"""The tensors of a folder in safetensors or PyTorch files, read one by one into memory; and writing them in shards."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from deltazoo.backends.io.errors import ConfigError, cut, file_errors, first_line
from deltazoo.backends.io.json_text import json_object
from deltazoo.blocks.checkpoints.fp8 import SCALE, Blocks, dequantize, scale_problem

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
MAX_SHARD_BYTES = 5_000_000_000
_PIECE_BYTES = 1 << 22  # read and checked by one thread, while they are in a cache
_PINNED_BYTES = 1 << 24  # of each of two buffers between a file and a GPU
_MAX_THREADS = 8
_INFINITY = {  # its bits
    torch.float64: 0x7FF0_0000_0000_0000, torch.float32: 0x7F80_0000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor; the dtype is a text if torch here cannot compute with it."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class Source(NamedTuple):
    """Where a tensor is: bytes of an open file, or a tensor that torch has mapped."""

    file: str
    descriptor: int = -1
    offset: int = 0
    mapped: Tensor | None = None


class TensorFiles:
    """The tensors of a folder by name. A tensor is read when it is asked for. Close it, or use it in a `with`.

    Args: path: of the folder, or of a single file; blocks: of the scales of FP8 weights, which are dequantised.
    Attributes: `infos`, by name, with the dtype after the dequantisation; `problems`, a sentence for each damaged file
        or entry.
    """

    def __init__(self, path: Path, blocks: Blocks | None = None) -> None:
        self.infos: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self.blocks = blocks
        self._source: dict[str, Source] = {}
        self._descriptors: list[int] = []
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._pinned: list[tuple[Tensor, torch.cuda.Event]] | None = None
        self._scaled: dict[str, TensorInfo] = {}  # as they are stored, with scales
        self._threads = min(torch.get_num_threads(), _MAX_THREADS)
        self._readers = ThreadPoolExecutor(self._threads)  # starts no thread before the first task
        folder, listed = (path.parent, {"": path.name}) if path.is_file() else (path, self._find(path))
        for file in dict.fromkeys(listed.values()):
            for name, info, source in self._read_file(folder / file):
                if name in self.infos:
                    self.problems.append(f"{name} is in two files, {self._source[name].file} and {file}")
                    continue
                self.infos[name], self._source[name] = info, source
        for name, file in listed.items():
            if name and name in self._source and self._source[name].file != file:
                self.problems.append(f"{name} is in {self._source[name].file}, and the index says {file}")
        if blocks is not None:
            self._take_scales(blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def get(self, name: str) -> Tensor:
        """Return a tensor on the CPU, whose memory the next call uses again.

        Raises: ConfigError: the file is shorter than its header says.
        """
        if name not in self._scaled:
            return self._read(name, self.infos[name])
        assert self.blocks is not None
        scale = self._read(name + SCALE, self._scaled[name + SCALE]).to(torch.float32, copy=True)
        return dequantize(self._read(name, self._scaled[name]), scale, self.blocks)

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same shape and values."""
        if self.infos[name].shape != self.infos[other].shape:
            return False
        return bool((self.get(name).clone() == self.get(other)).all())

    def get_into(self, name: str, targets: Sequence[Tensor]) -> list[Tensor | bool]:
        """Read a tensor into contiguous rows of the same dtype, in order, without a copy between.

        Returns: whether the values of each target are finite; tensors on a GPU, for which the host need not wait.
        Raises: as `get`.
        """
        source, finite = self._source[name], list[Tensor | bool]()
        offset = source.offset
        for target in targets:
            finite.append(self._read_bytes(source, offset, target.view(-1).view(torch.uint8), target.dtype))
            offset += target.numel() * target.element_size()
        return finite

    def in_place(self, name: str, targets: Sequence[Tensor]) -> bool:
        """Whether `get_into` can read the tensor into these targets."""
        if self._source[name].mapped is not None or name in self._scaled:
            return False
        dtype = self.infos[name].dtype
        return all(x.device.type in ("cpu", "cuda") and x.dtype == dtype and x.is_contiguous() for x in targets)

    def _read(self, name: str, info: TensorInfo) -> Tensor:
        source = self._source[name]
        if source.mapped is not None:
            return source.mapped
        assert isinstance(info.dtype, torch.dtype)
        size = torch.Size(info.shape).numel() * info.dtype.itemsize
        if self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=torch.uint8)
        self._read_bytes(source, source.offset, self._staging[:size])
        return self._staging[:size].view(info.dtype).view(info.shape)

    def _read_bytes(
        self, source: Source, offset: int, target: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor | bool:
        """Fill a vector of bytes. Returns: whether they are finite numbers of a dtype, if there is one."""
        if not target.is_cuda:
            return self._fill(source, offset, target, dtype)
        self._copy_to_gpu(source, offset, target)
        return dtype is None or all_finite(target.view(dtype))

    def _copy_to_gpu(self, source: Source, offset: int, target: Tensor) -> None:
        """Fill a vector of bytes on a GPU: one pinned buffer is filled while the other one is copied."""
        if self._pinned is None:
            buffers = torch.empty(2, _PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
            self._pinned = [(buffer, torch.cuda.Event()) for buffer in buffers]
        for piece in target.split(_PINNED_BYTES):
            buffer, copied = self._pinned[0]
            self._pinned.reverse()
            copied.synchronize()
            self._fill(source, offset, buffer[: len(piece)])
            piece.copy_(buffer[: len(piece)], non_blocking=True)
            copied.record(torch.cuda.current_stream(target.device))
            offset += len(piece)

    def _fill(self, source: Source, offset: int, target: Tensor, dtype: torch.dtype | None = None) -> bool:
        """Fill a vector of bytes on the CPU by several threads; one copies, and maps new memory, at a limited rate.

        Returns: as `_read_bytes`.
        """
        pieces = target.split(_PIECE_BYTES)
        places = [offset + i * _PIECE_BYTES for i in range(len(pieces))]
        run = self._readers.map if len(pieces) > 1 and self._threads > 1 else map
        return all([*run(_fill, repeat(source), places, pieces, repeat(dtype))])

    def _take_scales(self, blocks: Blocks) -> None:
        """Replace the entries of FP8 weights and their scales by those of the dequantised weights."""
        for name, info in [*self.infos.items()]:
            if info.dtype != torch.float8_e4m3fn:
                continue
            scale = self.infos.pop(name + SCALE, None)
            if scale is None:
                self.problems.append(f"{name + SCALE}, the scales of {name}, is missing")
            elif problem := scale_problem(name, info.shape, scale.shape, blocks):
                self.problems.append(problem)
            else:
                self._scaled |= {name: info, name + SCALE: scale}
            self.infos[name] = TensorInfo(info.shape, torch.bfloat16)

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

    def _read_file(self, path: Path) -> Iterator[tuple[str, TensorInfo, Source]]:
        if not path.is_file():
            self.problems.append(f"the file {path.name} is missing")
            return
        try:
            entries = self._open_pickled(path) if path.suffix in (".bin", ".pth") else self._open_safetensors(path)
        except Exception as error:  # of a damaged file: each reader has its own
            self.problems.append(f"the file {path.name} is damaged or cannot be read: {first_line(error)}")
            return
        yield from entries

    def _open_safetensors(self, path: Path) -> list[tuple[str, TensorInfo, Source]]:
        from safetensors import safe_open

        with safe_open(path, framework="pt"):  # checks the header, and the offsets against the size of the file
            pass
        descriptor = os.open(path, os.O_RDONLY)
        self._descriptors.append(descriptor)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        pairs = json.loads(os.pread(descriptor, length, 8), object_pairs_hook=list)
        entries = []
        seen: set[str] = set()
        for name, value in pairs:
            if name in seen:
                self.problems.append(f"{name} is twice in {path.name}")
            elif name != "__metadata__":
                fields = dict(value)
                info = TensorInfo(tuple(fields["shape"]), _DTYPES.get(fields["dtype"], str(fields["dtype"])))
                source = Source(path.name, descriptor, 8 + length + fields["data_offsets"][0])
                entries.append((name, info, source))
            seen.add(name)
        return entries

    def _open_pickled(self, path: Path) -> list[tuple[str, TensorInfo, Source]]:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(loaded, dict):
            raise TypeError(f"it must hold a dict, got {cut(loaded)}")
        entries = []
        for name, value in loaded.items():
            if isinstance(value, Tensor):
                entries.append((name, TensorInfo(tuple(value.shape), value.dtype), Source(path.name, mapped=value)))
            else:
                self.problems.append(f"{name} in {path.name} must be a tensor, got {cut(value)}")
        return entries


def _fill(source: Source, offset: int, target: Tensor, dtype: torch.dtype | None) -> bool:
    """Read bytes of a file. Returns: whether they are finite numbers of a dtype, if there is one.

    Raises: ConfigError: there are fewer bytes.
    """
    array: Any = target.numpy()
    buffer, start = memoryview(array), 0
    while start < len(buffer):  # Linux reads at most 2 GiB at once
        count = os.preadv(source.descriptor, [buffer[start:]], offset + start)
        if count == 0:
            raise ConfigError(f"{source.file} is shorter than its header says, or was changed: nothing was loaded")
        start += count
    return dtype is None or _are_finite(array, dtype)


def _are_finite(array: Any, dtype: torch.dtype) -> bool:
    """Whether bytes are finite numbers. As integers, infinity and NaN are the largest numbers of each sign.

    numpy reads them at the speed of the cache in the calling thread, where torch would start threads of its own.
    """
    size, infinity = dtype.itemsize, _INFINITY[dtype]
    positive, negative = (array.view(f"{kind}{size}").max(initial=0) for kind in "iu")
    return bool(positive < infinity and negative < infinity + (1 << (8 * size - 1)))


def all_finite(tensor: Tensor) -> Tensor | bool:
    """Whether all values are finite, on the tensor's device. NaN propagates to the bounds, which need no mask."""
    return tensor.numel() == 0 or torch.stack(tensor.aminmax()).isfinite().all()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: ConfigError."""
    with file_errors("read", path):
        return json_object(path.read_text(encoding="utf-8"), path)


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
