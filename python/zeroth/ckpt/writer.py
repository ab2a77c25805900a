"""Contents into a checkpoint of Zeroth: one file, committed as engines do it."""

import os

import torch

from zeroth import _C
from zeroth._json_values import user_text
from zeroth._preflight import VERSION
from zeroth.ckpt import hypers
from zeroth.ckpt.contents import NO_GROUP, WEIGHT, Contents, Lazy
from zeroth.ckpt.dtypes import name_of, raw_bytes
from zeroth.ckpt.refusals import refused

__all__ = ["manifest_of", "write"]

_WIDENED = (torch.float16, torch.bfloat16)
_PIECE_BYTES = 64 << 20


def write(contents: Contents, folder: str | os.PathLike[str], *, keep_last: int = 0, keep_every: int = 0) -> str:
    """Writes it as the checkpoint of its step into `folder`, one tensor at a time, and returns the path of what is on
    the disk then. Weights of 16 bits of trained parameters become the float32 masters that engines have. Blocks. Raises
    Error: USAGE if the step is there, IO; and then nothing of it stays."""
    contents.require_unique()
    contents.drop_accumulation()
    manifest = manifest_of(contents)
    writer = _C.CheckpointWriter(os.fspath(folder), manifest)
    lazies = _lazies(contents)
    for key in writer.keys:
        lazy = lazies[key]
        tensor = lazy.read()
        if tuple(tensor.shape) != lazy.shape or tensor.dtype != lazy.dtype:
            raise refused(
                "a tensor is not what its source says",
                which=f"{contents.origin}, {key}",
                expected=f"{lazy.dtype} {list(lazy.shape)}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
            )
        data = raw_bytes(tensor)
        for begin in range(0, data.numel(), _PIECE_BYTES):
            writer.write(data[begin : begin + _PIECE_BYTES])
        del tensor, data
    return writer.commit(keep_last, keep_every)


def manifest_of(contents: Contents) -> _C.Manifest:
    """What the checkpoint will say of itself, without its files."""
    manifest = _C.Manifest()
    manifest.version = VERSION
    manifest.step = contents.step
    manifest.plan = "none"
    manifest.optimizer = contents.optimizer
    manifest.configuration = "" if contents.manifest is None else contents.manifest.configuration
    manifest.groups = [hypers.to_json(group) for group in contents.groups]
    manifest.loss_scaler = hypers.scaler_to_json(contents.loss_scaler)
    manifest.user = user_text({"client": None, "scheduler": None, **contents.user})
    manifest.user_of_rank = [""]
    params = []
    for param in contents.params:
        which = f"{contents.origin}, {param.name}"
        one = _C.CheckpointParam()
        one.name = param.name
        one.shape = list(param.shape)
        one.dtype = name_of(param.dtype, which)
        one.trainable = param.trainable
        one.group = param.group if 0 <= param.group < len(contents.groups) else NO_GROUP
        one.updates = param.updates
        one.aliases = param.aliases
        one.states = [
            _C.CheckpointState(name, name_of(lazy.dtype, which), list(lazy.shape))
            for name, lazy in _as_kept(param.states, param.trainable).items()
        ]
        params.append(one)
    manifest.params = params
    manifest.extras = [
        _C.CheckpointState(name, name_of(lazy.dtype, f"{contents.origin}, {name}"), list(lazy.shape))
        for name, lazy in contents.buffers.items()
    ]
    return manifest


def _as_kept(states: dict[str, Lazy], trainable: bool) -> dict[str, Lazy]:
    weight = states[WEIGHT]
    if trainable and weight.dtype in _WIDENED:
        return {**states, WEIGHT: weight.to(torch.float32, lambda tensor, dtype: tensor.to(dtype))}
    return states


def _lazies(contents: Contents) -> dict[str, Lazy]:
    lazies = {f"extra/{name}": lazy for name, lazy in contents.buffers.items()}
    for param in contents.params:
        for name, lazy in _as_kept(param.states, param.trainable).items():
            lazies[f"{param.name}/{name}"] = lazy
    return lazies
