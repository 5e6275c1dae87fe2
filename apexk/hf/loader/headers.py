"""What a checkpoint folder holds, from the safetensors headers alone: no tensor is read, nothing is ever unpickled.

A file is an 8-byte little-endian length, that many bytes of JSON (name -> dtype, shape, offsets), then the tensors.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_HEADER_BYTES = 100 << 20  # the format's own limit
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is; the text names the file or the tensor, and what was wanted."""


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: `nbytes` bytes from `start`, row-major."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_headers(folder: Path) -> dict[str, Stored]:
    """name -> where it lies, for every tensor of the checkpoint in `folder`, in file order. Raises `CheckpointError`."""
    found: dict[str, Stored] = {}
    index = _index(folder)
    for file in _files(folder, index):
        for stored in _header(file):
            first = found.setdefault(stored.name, stored)
            if first is not stored:
                raise CheckpointError(f"{stored.name} is in {first.file.name} and in {file.name}: which one counts cannot be known")
    for name, file in index.items():
        if name not in found:
            raise CheckpointError(f"{folder / INDEX} promises {name} in {file}, which does not hold it")
    return found


def _index(folder: Path) -> dict[str, str]:
    """tensor name -> file name, empty where the checkpoint is one file."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise TypeError("weight_map is no table of file names")
        outside = next((file for file in index.values() if PurePath(file).is_absolute() or ".." in PurePath(file).parts), None)
        if outside is not None:  # a link in the folder may lead anywhere, as in the hub's cache; a name may not
            raise ValueError(f"it names {outside!r}, which is not in the folder")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as an index ({error})") from error
    return index


def _files(folder: Path, index: dict[str, str]) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; apexk loads from local folders (fetch a model first, e.g. with `hf download`)")
    names = sorted(set(index.values())) or [SINGLE]
    files = [folder / name for name in names]
    missing = [file for file in files if not os.path.isfile(file)]  # False, where pathlib raises, for a name that no file can have
    if not missing:
        return files
    if index:
        raise CheckpointError(f"{folder} lacks {', '.join(file.name for file in missing)}, which {INDEX} names")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise CheckpointError(f"{folder} holds pickled weights ({pickled[0]}); apexk reads safetensors only: load it with transformers "
                              "and write it again with save_pretrained")
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _header(file: Path) -> list[Stored]:
    """The tensors of one file, in the order of their bytes."""

    def fail(what: str):
        raise CheckpointError(f"{file}: {what}")

    def unique(pairs: list[tuple[str, object]]) -> dict:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            fail(f"{next(n for n in names if names.count(n) > 1)} stands twice in its header")
        return table

    size = os.path.getsize(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
            fail(f"no safetensors file: {size} bytes, of which {length} should be its header (cut off?)")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=unique)
        except (RecursionError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            fail(f"its header is not readable as JSON ({error})")
    if not isinstance(header, dict):
        fail("its header is no table")
    header.pop("__metadata__", None)
    tensors, end = [], 0
    for (begin, end_of_this), name, entry in sorted((_offsets(name, entry, fail), name, entry) for name, entry in header.items()):
        kind, shape = entry.get("dtype"), entry.get("shape")
        dtype = DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None:
            fail(f"{name} is of type {kind!r}; known: {', '.join(DTYPES)}")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            fail(f"{name} has shape {shape!r}, wanted a list of sizes")
        if end_of_this - begin != math.prod(shape) * dtype.itemsize:
            fail(f"{name} of shape {shape} in {kind} takes {math.prod(shape) * dtype.itemsize} bytes, its header gives it {end_of_this - begin}")
        if begin != end:
            fail(f"{name} begins at byte {begin} of the data, where the one before it ends at {end}")
        end = end_of_this
        if 8 + length + end > size:
            fail(f"cut off: {name} should end at byte {8 + length + end}, the file has {size}")
        tensors.append(Stored(name, file, dtype, tuple(shape), 8 + length + begin, end - begin))
    return tensors


def _offsets(name: str, entry: object, fail) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets) or not 0 <= offsets[0] <= offsets[1]:
        fail(f"{name} has data_offsets {offsets!r}, wanted [begin, end]")
    return offsets[0], offsets[1]
