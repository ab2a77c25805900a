"""convert(): from any form to any other."""

import math
import os
from collections.abc import Sequence
from typing import Literal

import torch

from zeroth.ckpt import optimizer_state
from zeroth.ckpt.contents import WEIGHT, Contents
from zeroth.ckpt.dcp import is_dcp, read_dcp
from zeroth.ckpt.dcp_writer import write_dcp
from zeroth.ckpt.deepspeed import is_deepspeed, read_deepspeed
from zeroth.ckpt.deepspeed_universal import is_universal, read_universal
from zeroth.ckpt.dtypes import computed
from zeroth.ckpt.huggingface import is_huggingface, read_huggingface, write_huggingface
from zeroth.ckpt.reader import is_checkpoint, open_checkpoint
from zeroth.ckpt.refusals import refused
from zeroth.ckpt.torch_file import read_torch, write_torch
from zeroth.ckpt.writer import write

__all__ = ["SOURCES", "TARGETS", "convert", "kind_of", "read"]

SOURCES = ("zeroth", "hf", "torch", "dcp", "deepspeed", "deepspeed-universal")
TARGETS = ("zeroth", "hf", "torch", "dcp")
_SHARD_BYTES = 5 * 1000**3


def kind_of(path: str | os.PathLike[str]) -> str:
    """One of SOURCES, by what lies there. Raises Error CHECKPOINT for what is none of them."""
    path = os.fspath(path)
    if not os.path.exists(path):
        raise refused("there is no such file or folder", code="IO", which=path)
    if is_checkpoint(path):
        return "zeroth"
    for kind, looks_so in (
        ("hf", is_huggingface),
        ("dcp", is_dcp),
        ("deepspeed-universal", is_universal),
        ("deepspeed", is_deepspeed),
    ):
        if looks_so(path):
            return kind
    if os.path.isfile(path):
        return "torch"
    if any(name.startswith("step-") for name in os.listdir(path)):
        return "zeroth"
    raise refused("a folder is no checkpoint of any known form", which=path, expected=", ".join(SOURCES))


def read(
    path: str | os.PathLike[str],
    kind: str | None = None,
    *,
    param_names: Sequence[str] | None = None,
    model_prefix: str | None = None,
) -> Contents:
    """What is in a checkpoint of any form, to be read tensor by tensor. `kind`: one of SOURCES; None: found out.
    `param_names`: of the optimizer's parameters in a torch file, in the order of its groups. `model_prefix`: of the
    keys of weights in a DCP. Raises Error CHECKPOINT, USAGE, IO."""
    contents = _read(os.fspath(path), kind, param_names, model_prefix)
    contents.plain_names()
    return contents


def _read(path: str, kind: str | None, param_names: Sequence[str] | None, model_prefix: str | None) -> Contents:
    kind = kind or kind_of(path)
    if kind == "zeroth":
        return open_checkpoint(path).contents()
    if kind == "hf":
        return read_huggingface(path)
    if kind == "torch":
        return read_torch(path, param_names)
    if kind == "dcp":
        return read_dcp(path, model_prefix=model_prefix)
    if kind == "deepspeed":
        return read_deepspeed(path)
    if kind == "deepspeed-universal":
        return read_universal(path)
    raise refused("there is no such form", code="USAGE", which="kind", expected=", ".join(SOURCES), got=kind)


def convert(
    source: str | os.PathLike[str] | Contents,
    target: str | os.PathLike[str],
    *,
    to: Literal["zeroth", "hf", "torch", "dcp"],
    weights: Literal["computed", "master"] | None = None,
    dtype: torch.dtype | None = None,
    state: str = WEIGHT,
    optimizer: bool = True,
    max_shard_bytes: int = _SHARD_BYTES,
    step: int | None = None,
) -> str:
    """Writes `source` in another form and returns the path. Blocks.

    `weights`: "computed", as the model computes with them, or "master", in float32 where there is one; None: computed
    for "hf", else master, so that nothing is lost. `dtype`: instead, all floating-point weights in this one; not for
    "zeroth", which keeps masters. `state`: whose values are the weights, say "average" of zeroth.Average. `optimizer`:
    its states too, where the form has them ("hf" has none). `max_shard_bytes`: of a file of "hf". `step`: instead of
    the source's. Raises Error: USAGE if `target` is there already (for "zeroth": that step in that folder),
    CHECKPOINT, IO; then nothing of it stays."""
    contents = source if isinstance(source, Contents) else read(source)
    target = os.fspath(target)
    if step is not None:
        contents.step = step
    if state != WEIGHT:
        contents.use_state(state)
    contents.drop_accumulation()
    if to not in TARGETS:
        raise refused("there is no such form", code="USAGE", which="to", expected=", ".join(TARGETS), got=str(to))
    if to == "zeroth":
        if dtype is not None or weights == "computed":
            raise refused("a checkpoint of Zeroth keeps masters", code="USAGE", which="dtype, weights")
        if not optimizer:
            contents.without_optimizer()
        return write(contents, target)
    if not optimizer or to == "hf":
        contents.without_optimizer()
    optimizer_state.note_others(contents)
    round_weights(contents, weights or ("computed" if to == "hf" else "master"), dtype)
    contents.require_unique()
    if to == "hf":
        write_huggingface(contents, target, max_shard_bytes=max_shard_bytes)
    elif to == "torch":
        write_torch(contents, target)
    else:
        write_dcp(contents, target)
    return target


def round_weights(contents: Contents, weights: str, dtype: torch.dtype | None) -> None:
    """Changes the weights of `contents`; states of the optimizer stay."""
    for param in contents.params:
        weight = param.states[WEIGHT]
        of_master = weights == "master" and math.prod(param.shape) > 0  # without elements there is nothing to keep
        wanted = dtype or (weight.dtype if of_master else param.dtype)
        if weight.dtype.is_floating_point and weight.dtype.itemsize > 1:
            param.states[WEIGHT] = weight.to(wanted, computed)
    if dtype is None:
        return
    for name, lazy in contents.buffers.items():
        if lazy.dtype.is_floating_point and lazy.dtype.itemsize > 1:
            contents.buffers[name] = lazy.to(dtype, computed)
