"""Weights of safetensors files into an engine: each rank reads the ranges that it keeps."""

import contextlib
import json
import math
import mmap
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from zeroth import _C, _names
from zeroth._access import WeightReport

if TYPE_CHECKING:
    from zeroth._engine import Engine

__all__ = ["Rename", "load_pretrained"]

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None] | None
"""names in the files -> names of the module: a mapping for those that differ, or a function, whose None leaves a tensor
out"""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MANIFEST = "manifest.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_LONGEST_HEADER = 100_000_000
"""bytes, as safetensors itself has it"""


def load_pretrained(
    model: "Engine | nn.Module", path: str | os.PathLike[str], *, rename: Rename = None, strict: bool = True
) -> WeightReport:
    """Brings the weights of a Hugging Face folder (model.safetensors, or the sharded model.safetensors.index.json), or
    of one safetensors file, into an engine or a module on the CPU. No pickles are read.

    Into an engine, at every stage: masters and parameters, converted between floating-point dtypes; moments stay. Files
    are mapped, and each rank reads the elements that it keeps, so all ranks must see the files. Collective and blocking
    then, between steps. `rename`: names in the files, each with the one of the module, as Engine.load() has it; the
    other way round is taken where no name of the files is a first one. `strict`: names that are missing or too many are
    an error; else the report lists them. A tied weight may be there under any of its names.
    Raises Error, on all ranks and with nothing changed: IO for files that are missing, cut or corrupt; MODEL for
    another model, shape or dtype; MISMATCH if ranks read other files; USAGE in the middle of a step."""
    with contextlib.ExitStack() as files:
        if isinstance(model, nn.Module):
            return _into_module(model, dict(_tensors(pathlib.Path(path), rename, files)), strict)
        failure, found = "", []
        try:
            found = list(_tensors(pathlib.Path(path), rename, files))
        except (_C.Error, OSError) as error:  # for all ranks to hear
            failure = str(error)
        missing, unexpected = model._core.load_mapped(found, strict, failure)
        torch.clear_autocast_cache()
        del found
        return WeightReport(missing=missing, unexpected=unexpected)


def _tensors(path: pathlib.Path, rename: Rename, files: contextlib.ExitStack) -> Iterator[tuple[str, torch.Tensor]]:
    found = [pair for file in _files_of(path) for pair in _mapped(file, files)]
    if isinstance(rename, Mapping):
        there = {name for name, _ in found}
        # The other way round. Files have one name of a tied weight, and `rename` may have all.
        if there.isdisjoint(rename) and not there.isdisjoint(rename.values()):
            rename = {name: of_module for of_module, name in rename.items()}
        rename = _by(rename)
    for name, tensor in found:
        new = name if rename is None else rename(name)
        if new is not None:
            yield _names.plain(new), tensor


def _by(names: Mapping[str, str]) -> Callable[[str], str]:
    return lambda name: names.get(name, name)


def _files_of(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _corrupt(index, repr(error)) from error
        for name in names:
            if not isinstance(name, str) or pathlib.PurePath(name).name != name:
                raise _corrupt(index, f"a file outside of its folder: {name!r}")
        return [path / name for name in names]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    of_zeroth = (path / MANIFEST).is_file() or any(path.glob(f"step-*/{MANIFEST}"))
    raise _C.make_error(
        "IO",
        "there are no weights",
        where="python.load_pretrained",
        which=str(path),
        expected=f"a safetensors file, or a folder with {SINGLE} or {INDEX}",
        got="a checkpoint of Zeroth" if of_zeroth else "neither",
        hint="engine.load(path) loads it; zeroth ckpt convert --to hf makes such a folder of it" if of_zeroth else "",
    )


def _mapped(path: pathlib.Path, files: contextlib.ExitStack) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors over the mapped file, whose pages are read when somebody looks."""
    file = files.enter_context(path.open("rb"))
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST_HEADER):
        raise _corrupt(path, f"{size} bytes with a header of {length}")
    try:
        header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError) as error:
        raise _corrupt(path, repr(error)) from error
    begin = 8 + length
    memory: Any = b""
    if size > begin:
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)  # torch wants memory that may be written
    for name, entry in entries.items():
        dtype, shape, offset = _checked(path, name, entry, size - begin)
        count = math.prod(shape)
        flat = (
            torch.empty(0, dtype=dtype)
            if count == 0
            else torch.frombuffer(memory, dtype=dtype, count=count, offset=begin + offset)
        )
        yield name, flat.view(shape)


def _checked(path: pathlib.Path, name: str, entry: Any, size: int) -> tuple[torch.dtype, list[int], int]:
    try:
        dtype, shape, (first, last) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"{name}: {error!r}") from error
    numbers = [*shape, first, last] if isinstance(shape, list) else [None]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise _corrupt(path, f"{name}: shape {shape}, offsets {first} to {last}")
    if not first <= last <= size or last - first != math.prod(shape) * dtype.itemsize:
        raise _corrupt(path, f"{name}: offsets {first} to {last} of {size} for {shape}")
    return dtype, shape, first


def _corrupt(path: pathlib.Path, got: str) -> _C.Error:
    return _C.make_error(
        "IO",
        "a file of weights is cut or corrupt",
        where="python.load_pretrained",
        which=str(path),
        expected="safetensors",
        got=got[:200],
    )


def _into_module(model: nn.Module, found: Mapping[str, torch.Tensor], strict: bool) -> WeightReport:
    own = _names.plain_keys(model.state_dict(keep_vars=True))
    places: dict[int, list[str]] = {}
    for name, tensor in own.items():
        places.setdefault(id(tensor), []).append(name)
    unfit = [
        f"{name}: {list(tensor.shape)} for {list(own[name].shape)}"
        for name, tensor in found.items()
        if name in own and tensor.shape != own[name].shape
    ]
    missing = [names[0] for names in places.values() if not any(name in found for name in names)]
    unexpected = [name for name in found if name not in own]
    if unfit or (strict and (missing or unexpected)):
        raise _C.make_error(
            "MODEL",
            "weights are of another model",
            where="python.load_pretrained",
            expected="every tensor of the module's state_dict(), of its shape, and no others",
            got=f"other shapes {unfit[:5]}, missing {missing[:5]}, unexpected {unexpected[:5]}",
            hint="rename= maps names; strict=False keeps what is missing",
        )
    with torch.no_grad():
        for name, tensor in found.items():
            if name in own:
                own[name].copy_(tensor)
    return WeightReport(missing=missing, unexpected=unexpected)
