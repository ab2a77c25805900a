"""Files of torch.save() with plain tensors: {"name": tensor}, or {"model": ..., "optimizer": ...}. Never a pickle that
runs code: torch.load(weights_only=True)."""

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroth.ckpt import optimizer_state
from zeroth.ckpt.contents import WEIGHT, Contents, Param, of_tensor, weight_of
from zeroth.ckpt.facts import KEY, adopt_facts, facts_text
from zeroth.ckpt.huggingface import is_buffer
from zeroth.ckpt.new_path import new_file
from zeroth.ckpt.refusals import io_error, refused

__all__ = ["from_state_dict", "load_plain", "load_plain_bytes", "read_names", "read_torch", "write_torch"]

_MODEL = ("model", "model_state_dict", "state_dict", "module")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
_STEP = ("step", "global_step", "global_steps")


def load_plain(path: str) -> Any:
    """Tensors are mapped from the file and read when they are used, if it is a zip archive. Raises Error CHECKPOINT for
    a file with anything but tensors and plain values, and IO."""
    return _load(path, path, mapped=zipfile.is_zipfile(path))


def load_plain_bytes(data: bytes, which: str) -> Any:
    """The same for what stands in a part of a file."""
    return _load(io.BytesIO(data), which, mapped=False)


def _load(source: str | io.BytesIO, path: str, *, mapped: bool) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise io_error("a file cannot be read", error, path) from error
    except Exception as error:  # whatever bytes can lead to
        raise refused(
            "a file is none of tensors and plain values",
            which=path,
            got=str(error).splitlines()[0] if str(error) else repr(error),
            hint="save model.state_dict() and optimizer.state_dict(): objects of other classes are never made",
        ) from error


def read_torch(path: str, param_names: Sequence[str] | None = None) -> Contents:
    """A state_dict, or a dictionary with one and that of an Adam, AdamW or SGD. `param_names`: of the optimizer's
    parameters, in the order of its groups, if the file does not say. Raises Error CHECKPOINT, IO."""
    loaded = load_plain(path)
    if not isinstance(loaded, Mapping):
        raise refused("a file has no state_dict", which=path, got=type(loaded).__name__)
    weights, optimizer, rest = _parts(loaded)
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        strange = [str(name) for name, value in weights.items() if not isinstance(value, torch.Tensor)]
        raise refused(
            "a file has no state_dict of tensors",
            which=path,
            expected=f"tensors by name, alone or under one of {', '.join(_MODEL)}",
            got=", ".join(strange[:10]) or "nothing",
        )
    contents = from_state_dict(path, "torch", {str(name): value for name, value in weights.items()})
    for name in _STEP:
        value = optimizer_state.scalar(rest.get(name))
        if value is not None:
            contents.step = int(value)
            break
    if optimizer is not None:
        optimizer_state.adopt(contents, optimizer_state.by_name(optimizer, param_names, contents))
    if isinstance(rest.get("client_state"), dict):
        contents.user = {"client": rest["client_state"]}
    adopt_facts(contents, rest.get(KEY))
    unknown = sorted({str(name) for name in rest} - {*_STEP, "client_state", KEY})
    if unknown:
        contents.left_out.append(f"keys of the file: {', '.join(unknown)}")
    return contents


def from_state_dict(origin: str, kind: str, tensors: Mapping[str, torch.Tensor]) -> Contents:
    """Two names of one memory are a tied weight."""
    contents = Contents(origin=origin, kind=kind, params=[])
    seen: dict[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]], Param] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise refused("a tensor is not dense", which=f"{origin}, {name}", got=str(tensor.layout))
        if is_buffer(name, tensor.dtype):
            contents.buffers[name] = of_tensor(tensor)
            continue
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            seen[place].aliases.append(name)
            continue
        lazy = of_tensor(tensor)
        param = weight_of(name, lazy)
        seen[place] = param
        contents.params.append(param)
    return contents


def _parts(loaded: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], Mapping[str, Any] | None, dict[Any, Any]]:
    if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return loaded, None, {}
    rest = dict(loaded)
    weights: Mapping[Any, Any] = {}
    for name in _MODEL:
        if isinstance(rest.get(name), Mapping):
            weights = rest.pop(name)
            break
    optimizer = None
    for name in _OPTIMIZER:
        value = rest.get(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, Mapping) and "param_groups" in value:
            optimizer = value
            del rest[name]
            break
    return (weights if weights else loaded), optimizer, rest


def write_torch(contents: Contents, path: str) -> None:
    """{"model", "optimizer", "step", "client_state"} if there are states of an optimizer, else the state_dict alone.
    torch.load(weights_only=True) reads it. All of it is in memory at once, as torch.save() wants it. Raises Error USAGE
    if `path` is there, and IO."""
    model: dict[str, torch.Tensor] = {}
    for param in contents.params:
        tensor = param.states[WEIGHT].read()
        for name in (param.name, *param.aliases):
            model[name] = tensor
    for name, lazy in contents.buffers.items():
        model[name] = lazy.read()
    whole: dict[str, Any] = model
    if contents.has_optimizer:
        whole = {
            "model": model,
            "optimizer": optimizer_state.to_numbered(contents),
            "step": contents.step,
            "client_state": contents.user.get("client"),
            KEY: facts_text(contents),
        }
    with new_file(os.fspath(path)) as temporary:
        torch.save(whole, temporary)


def read_names(path: str) -> list[str]:
    """A JSON list of names. Raises Error USAGE, IO."""
    try:
        with open(path, encoding="utf-8") as file:
            names = json.load(file)
    except OSError as error:
        raise io_error("a file cannot be read", error, path) from error
    except ValueError as error:
        raise refused("a file is no JSON", code="USAGE", which=path, got=str(error)) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refused("a file is no list of names", code="USAGE", which=path, got=type(names).__name__)
    return names
