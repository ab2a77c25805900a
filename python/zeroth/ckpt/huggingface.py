"""Folders of weights as Hugging Face has them: model.safetensors, or shards with an index."""

import json
import math
import os

import torch

from zeroth import _C
from zeroth.ckpt.contents import WEIGHT, Contents, Lazy, weight_of
from zeroth.ckpt.dtypes import name_of, raw_bytes
from zeroth.ckpt.facts import KEY, adopt_facts, facts_text
from zeroth.ckpt.new_path import new_folder
from zeroth.ckpt.refusals import io_error, refused
from zeroth.ckpt.safetensors_file import SafetensorsFile

__all__ = ["is_huggingface", "read_huggingface", "write_huggingface"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PIECE_BYTES = 64 << 20
_BUFFER_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def is_huggingface(path: str) -> bool:
    return path.endswith(".safetensors") or any(os.path.isfile(os.path.join(path, n)) for n in (_SINGLE, _INDEX))


def read_huggingface(path: str) -> Contents:
    """`path`: a folder, or a safetensors file. Statistics of normalisation layers and tensors of integers are buffers,
    all else is a parameter. Raises Error CHECKPOINT, IO."""
    tensors: dict[str, Lazy] = {}
    aliases: dict[str, str] = {}
    facts: list[str | None] = []
    for name in _files_of(path):
        file = SafetensorsFile(name)
        for key, lazy in file.tensors.items():
            if tensors.setdefault(key, lazy) is not lazy:
                raise refused("two files have one tensor", which=f"{path}, {key}")
        aliases |= {other: kept for other, kept in file.metadata.items() if other not in ("format", KEY)}
        facts.append(file.metadata.get(KEY))
    contents = Contents(origin=path, kind="hf", params=[])
    for key, lazy in tensors.items():
        if is_buffer(key, lazy.dtype):
            contents.buffers[key] = lazy
            continue
        own = [other for other, kept in aliases.items() if kept == key and other not in tensors]
        param = weight_of(key, lazy)
        param.aliases = own
        contents.params.append(param)
    for text in facts:
        adopt_facts(contents, text)
    return contents


def is_buffer(name: str, dtype: torch.dtype) -> bool:
    """A guess, for sources that do not say: bool, int64 and int32, and running statistics by their names."""
    return name.rpartition(".")[2] in _BUFFER_NAMES or dtype in (torch.bool, torch.int64, torch.int32)


def _files_of(path: str) -> list[str]:
    if path.endswith(".safetensors"):
        return [path]
    index = os.path.join(path, _INDEX)
    if not os.path.isfile(index):
        return [os.path.join(path, _SINGLE)]
    try:
        with open(index, encoding="utf-8") as file:
            names = sorted({str(name) for name in json.load(file)["weight_map"].values()})
    except OSError as error:
        raise io_error("a file cannot be read", error, index) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise refused("an index of safetensors files cannot be read", which=index, got=repr(error)) from error
    for name in names:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise refused("an index names a file elsewhere", which=index, got=name)
    return [os.path.join(path, name) for name in names]


def write_huggingface(contents: Contents, folder: str, *, max_shard_bytes: int) -> None:
    """Weights and buffers, one tensor in memory at a time. A tied weight is written once, under its first name; its
    other names are in the metadata of its file. Raises Error USAGE if `folder` is there, and IO."""
    tensors = {param.name: param.states[WEIGHT] for param in contents.params} | contents.buffers
    shards = _shards_of(tensors, max_shard_bytes)
    aliases = {param.name: param.aliases for param in contents.params}
    weight_map: dict[str, str] = {}
    with new_folder(folder) as temporary:
        for number, names in enumerate(shards, 1):
            single = len(shards) == 1
            file_name = _SINGLE if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
            metadata = {other: name for name in names for other in aliases.get(name, [])}
            writer = _C.SafetensorsWriter(
                os.path.join(temporary, file_name),
                [
                    (name, name_of(lazy.dtype, f"{contents.origin}, {name}"), list(lazy.shape), lazy.bytes)
                    for name, lazy in ((name, tensors[name]) for name in names)
                ],
                {**metadata, "format": "pt", KEY: facts_text(contents, names)},
            )
            for name in names:
                data = raw_bytes(tensors[name].read())
                for begin in range(0, data.numel(), _PIECE_BYTES):
                    writer.write(data[begin : begin + _PIECE_BYTES])
                del data
                weight_map[name] = file_name
            writer.commit()
        if len(shards) > 1:
            total = sum(lazy.bytes for lazy in tensors.values())
            elements = sum(math.prod(param.shape) for param in contents.params)
            about = {"metadata": {"total_parameters": elements, "total_size": total}, "weight_map": weight_map}
            with open(os.path.join(temporary, _INDEX), "w", encoding="utf-8") as file:
                json.dump(about, file, indent=2, sort_keys=True)
                file.write("\n")


def _shards_of(tensors: dict[str, Lazy], most: int) -> list[list[str]]:
    """In order; each at most `most` bytes, or one tensor."""
    shards: list[list[str]] = [[]]
    room = most
    for name, lazy in tensors.items():
        if shards[-1] and lazy.bytes > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= lazy.bytes
    return shards
