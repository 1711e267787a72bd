"""A run's checkpoints on disk: written whole or not at all, and looked at before they are believed.

    folder/checkpoint-7/model.safetensors   the mean of the workers' models, with the names of model.state_dict()
                        state.pt            the optimiser's state, for torch.load(weights_only=True)
                        manifest.json       what run it is of, and the lengths and digests of both

A checkpoint is written under another name, and gets its own when all of it is on the disk: a kill at any moment, or a
full disk, leaves the one before. The last two are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.tensors.vector import wide

FORMAT, KEPT = 1, 2
MODEL, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
NAME = re.compile(r"checkpoint-(\d+)")
UNFINISHED = ".unfinished-"  # before the name of one that is being written
LONGEST_HEADER = 100_000_000  # as the safetensors library has it
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")


# Tensors as safetensors lays them: a length, a header in JSON, and the numbers without a gap.


class ModelFile:
    """Where named tensors lie in a file. The widest numbers come first, so that all are aligned."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in _CODES:
                raise ValueError(
                    f"{name} is {tensor.dtype}, which safetensors has no name for; leave it out of the model"
                )
        self.names = sorted(tensors, key=lambda name: -tensors[name].element_size())
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self.names:
            tensor = tensors[name]
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": _CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
        words = json.dumps(header, separators=(",", ":")).encode()
        self.header = words + b" " * (-len(words) % 8)
        self.nbytes = _LENGTH.size + len(self.header) + end

    def lay(self, tensors: Mapping[str, Tensor], into: memoryview) -> None:
        """Write them, in memory of ``nbytes``."""
        start = _LENGTH.size + len(self.header)
        into[:start] = _LENGTH.pack(len(self.header)) + self.header
        for name, place in _read(into).items():
            place.copy_(tensors[name])


def _read(data: memoryview) -> dict[str, Tensor]:
    """The tensors that lie in a file's bytes, where they lie."""
    try:
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        if length > min(LONGEST_HEADER, len(data) - _LENGTH.size):
            raise ValueError(f"its header would be {length} bytes long")
        header = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
        header.pop("__metadata__", None)
        numbers, found, before = data[_LENGTH.size + length :], {}, 0
        for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (begin, end) = _DTYPES[one["dtype"]], [int(n) for n in one["shape"]], one["data_offsets"]
            if begin != before or end > len(numbers) or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} does not lie where it should")
            flat = torch.frombuffer(numbers, dtype=dtype, offset=begin, count=math.prod(shape)) if end > begin else None
            found[name], before = (torch.empty(shape, dtype=dtype) if flat is None else flat.view(shape)), end
    except (KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"its header is not understood: {type(error).__name__}: {error}") from None
    return found


def mean(models: Sequence[memoryview]) -> None:
    """Let the first of these files' bytes be their mean; what is not of floating point stays the first's."""
    first, *others = [_read(one) for one in models]
    for name, tensor in first.items():
        if others and tensor.is_floating_point():
            total = tensor.to(wide(tensor.dtype), copy=True)
            for other in others:
                total += other[name]
            tensor.copy_(total / len(models))


# Writing.


def write(folder: Path, model: memoryview, state: memoryview, about: Mapping[str, Any]) -> Path:
    """One more, under the next number; answers where it is. Older ones go, but for the last."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{UNFINISHED}*"):  # of a job that was killed
        shutil.rmtree(left, ignore_errors=True)
    number = max((number for number, _ in _all(folder)), default=0) + 1
    place, unfinished = folder / f"checkpoint-{number}", folder / f"{UNFINISHED}{number}"
    try:
        unfinished.mkdir()
        files = {}
        for name, data in ((MODEL, model), (STATE, state)):
            _put(unfinished / name, data)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest = {"format": FORMAT, "saved_unix_s": time.time(), **about, "files": files}
        signed = {**manifest, "sha256": _digest_of(manifest)}
        _put(unfinished / MANIFEST, memoryview(json.dumps(signed, indent=1).encode()))
        _sync(unfinished)
        unfinished.rename(place)
        _sync(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for _, old in sorted(_all(folder))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _put(path: Path, data: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading.


class Saved(NamedTuple):
    """One checkpoint, as its manifest describes it. ``damage``: what is wrong with it, in words; "": nothing."""

    place: Path
    manifest: dict[str, Any]
    damage: str = ""

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def in_words(self) -> str:
        """Which one it is, for workers that compare theirs."""
        return f"{self.place.name} of step {self.step}"

    def model(self) -> dict[str, Tensor]:
        return _read(memoryview(bytearray((self.place / MODEL).read_bytes())))


def _all(folder: Path) -> Iterator[tuple[int, Path]]:
    for one in folder.iterdir() if folder.is_dir() else ():
        if (name := NAME.fullmatch(one.name)) is not None:
            yield int(name[1]), one


def every(folder: Path) -> list[Saved]:
    """All checkpoints there, looked through, the newest first."""
    return [_looked_through(place) for _, place in sorted(_all(folder), reverse=True)]


def newest(folder: Path) -> tuple[Saved | None, list[Saved]]:
    """The newest one that is whole, and those that came after it and are damaged. All are damaged: an error."""
    damaged: list[Saved] = []
    for _, place in sorted(_all(folder), reverse=True):
        found = _looked_through(place)
        if not found.damage:
            return found, damaged
        damaged.append(found)
    if damaged:
        said = "; ".join(one.damage for one in damaged)
        raise ValueError(f"no checkpoint in {folder} is whole: {said}; begin without it, or name another folder")
    return None, []


def _looked_through(place: Path) -> Saved:
    try:
        manifest = json.loads((place / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return Saved(place, {}, f"{place / MANIFEST} is of format {manifest['format']}, and this reads {FORMAT}")
        if manifest.pop("sha256") != _digest_of(manifest):
            return Saved(place, manifest, f"{place / MANIFEST} has changed since it was written: its digest is another")
        for name in (MODEL, STATE):
            if wrong := _wrong_with(place / name, manifest["files"][name]):
                return Saved(place, manifest, wrong)
    except OSError as error:
        return Saved(place, {}, f"{error.filename} cannot be read ({error.strerror})")
    except (ValueError, KeyError, TypeError) as error:
        return Saved(place, {}, f"{place / MANIFEST} is not understood ({type(error).__name__}: {error})")
    return Saved(place, manifest)


def _wrong_with(path: Path, wanted: Mapping[str, Any]) -> str:
    if (there := path.stat().st_size) != wanted["bytes"]:
        return f"{path} has {there} bytes, and should have {wanted['bytes']}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == wanted["sha256"] else f"{path} has changed since it was written: its digest is another"
