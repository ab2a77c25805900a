"""Universal checkpoints of DeepSpeed (ds_to_universal): zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt."""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from zeroth.ckpt import hypers, optimizer_state
from zeroth.ckpt.contents import WEIGHT, Contents, Lazy, Param, of_tensor
from zeroth.ckpt.deepspeed import adam_w_of, model_files_of, read_model_states, scaler_of
from zeroth.ckpt.inert_pickle import load_inert
from zeroth.ckpt.refusals import io_error, refused

__all__ = ["is_universal", "read_universal"]

_WEIGHT_FILE = "fp32.pt"
_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def is_universal(path: str) -> bool:
    zero = os.path.join(path, "zero")
    return os.path.isdir(zero) and any(
        os.path.isfile(os.path.join(zero, name, _WEIGHT_FILE)) for name in os.listdir(zero)
    )


def read_universal(path: str) -> Contents:
    """`path`: the folder that ds_to_universal wrote. Files are opened when their tensors are wanted. Raises Error
    CHECKPOINT, IO."""
    ranks = [load_inert(name) for name in model_files_of(path)]
    contents, frozen = read_model_states(path, ranks)
    contents.kind = "deepspeed-universal"
    model = ranks[0]
    shapes = [
        {str(name): tuple(int(extent) for extent in shape) for name, shape in group.items()}
        for group in model.get("param_shapes") or []
    ]
    shape_of = {name: shape for group in shapes for name, shape in group.items()}
    shared = model.get("shared_params") or {}
    tied = {str(other): str(name) for other, name in (shared.items() if isinstance(shared, Mapping) else shared)}
    zero = os.path.join(path, "zero")
    try:
        names = sorted(name for name in os.listdir(zero) if os.path.isfile(os.path.join(zero, name, _WEIGHT_FILE)))
    except OSError as error:
        raise io_error("a folder cannot be read", error, zero) from error
    order = [name for name in shape_of if name in names]
    lacking = sorted(shape_of.keys() - set(order))
    if lacking:
        raise refused("parameters of a universal checkpoint are missing", which=zero, got=", ".join(lacking[:10]))
    named = optimizer_state.NamedState(state={}, groups=[])
    for name in [*order, *(name for name in names if name not in shape_of)]:
        if name in contents.buffers or name in tied or name in frozen:
            continue
        _add(contents, named, zero, name, shape_of.get(name), model["module"].get(name))
    for name, lazy in frozen.items():
        contents.params.append(
            Param(name=name, shape=lazy.shape, dtype=lazy.dtype, states={WEIGHT: lazy}, trainable=False)
        )
    for param in contents.params:
        param.aliases = [other for other, name in tied.items() if name == param.name]
    _add_groups(contents, named, os.path.join(zero, "optimizer_state.pt"), shapes, model.get("ds_config"))
    optimizer_state.adopt(contents, named)
    contents.require_unique()
    return contents


def _add(
    contents: Contents,
    named: optimizer_state.NamedState,
    zero: str,
    name: str,
    shape: tuple[int, ...] | None,
    in_module: Any,
) -> None:
    folder = os.path.join(zero, name)
    weight = _lazy(os.path.join(folder, _WEIGHT_FILE), shape)
    compute = in_module.dtype if isinstance(in_module, torch.Tensor) else torch.float32
    if shape is None and isinstance(in_module, torch.Tensor) and tuple(in_module.shape) == weight.shape:
        weight = of_tensor(in_module)  # frozen: in its own dtype
    contents.params.append(
        Param(name=name, shape=weight.shape, dtype=compute, states={WEIGHT: weight}, trainable=shape is not None)
    )
    if shape is None:
        return
    states: dict[str, Any] = {
        state: _lazy(os.path.join(folder, f"{state}.pt"), shape)
        for state in _STATES
        if os.path.isfile(os.path.join(folder, f"{state}.pt"))
    }
    step = os.path.join(folder, "step.pt")
    if states:
        states["step"] = _tensor(step) if os.path.isfile(step) else contents.step
        named.state[name] = states


def _tensor(path: str) -> torch.Tensor:
    loaded = load_inert(path)
    tensor = loaded.get("param") if isinstance(loaded, dict) else loaded
    if not isinstance(tensor, torch.Tensor):
        raise refused("a file has no tensor", which=path, got=type(tensor).__name__)
    return tensor


def _lazy(path: str, shape: tuple[int, ...] | None) -> Lazy:
    tensor = _tensor(path)
    whole = tuple(tensor.shape) if shape is None else shape
    elements, dtype = math.prod(whole), tensor.dtype
    padded = tensor.dim() == 1 and tensor.numel() >= elements
    if tensor.numel() != elements and not padded:
        raise refused("a tensor has another size than its parameter", which=path, expected=str(list(whole)))
    return Lazy(shape=whole, dtype=dtype, read=lambda: _tensor(path).reshape(-1)[:elements].reshape(whole).clone())


def _add_groups(
    contents: Contents,
    named: optimizer_state.NamedState,
    path: str,
    shapes: list[dict[str, tuple[int, ...]]],
    config: Any,
) -> None:
    loaded = load_inert(path) if os.path.isfile(path) else {}
    if isinstance(loaded, dict):
        contents.loss_scaler = scaler_of(loaded)
    groups = loaded.get("param_groups") if isinstance(loaded, dict) else None
    if not isinstance(groups, list) or not groups:
        contents.left_out.append("hyper-parameters: there are no groups")
        return
    named.kind = optimizer_state.kind_of(groups, adam_w_of(config))
    if len(groups) == 1:
        members = [[name for group in shapes for name in group]]
    elif len(groups) == len(shapes):
        members = [list(group) for group in shapes]
    else:
        contents.left_out.append("hyper-parameters: groups and shapes are of other numbers")
        return
    for number, (group, own) in enumerate(zip(groups, members, strict=True)):
        named.groups.append((hypers.from_torch(group, f"{path}, group {number}"), own))
