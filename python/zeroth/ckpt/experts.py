"""Experts that a checkpoint leaves out."""

import fnmatch
import re
from collections.abc import Sequence

import torch

from zeroth.ckpt.contents import Contents, Lazy, Param
from zeroth.ckpt.refusals import refused

__all__ = ["prune_experts"]

_STACKED = re.compile(r"(.*)\.experts\.(?!\d+\.)[^.]+$")
_LISTED = re.compile(r"(.*)\.experts\.(\d+)\.(.+)$")


def prune_experts(contents: Contents, pattern: str, dropped: Sequence[int]) -> None:
    """Takes experts `dropped` out of each layer whose name matches `pattern`, as file names do: the module above
    `experts`, say 'model.layers.*.mlp'. The others are numbered anew, in their order. Cut are parameters of `experts`
    [E, ...], or of `experts.3`, with their states, and beside them what has a row for each expert: the router's matrix
    and biases. Ref: Kim et al., "Scalable and Efficient MoE Training for Multitask Multilingual Models", 2021, section
    4.3. Raises Error USAGE where no layer matches, or none of its experts would stay."""
    layers = sorted({layer for param in contents.params if (layer := _layer_of(param.name)) is not None})
    matching = [layer for layer in layers if fnmatch.fnmatchcase(layer, pattern)]
    if not matching:
        raise refused(
            "no layer of experts has such a name",
            code="USAGE",
            which=f"{contents.origin}, {pattern!r}",
            expected=", ".join(layers) or "parameters named *.experts.*",
        )
    for layer in matching:
        _prune(contents, layer, sorted(set(dropped)))


def _layer_of(name: str) -> str | None:
    found = _LISTED.match(name) or _STACKED.match(name)
    return None if found is None else found[1]


def _prune(contents: Contents, layer: str, dropped: list[int]) -> None:
    own = [param for param in contents.params if _layer_of(param.name) == layer]
    listed = [found for param in own if (found := _LISTED.match(param.name)) is not None]
    count = 1 + max(int(found[2]) for found in listed) if listed else own[0].shape[0]
    if not dropped or dropped[0] < 0 or dropped[-1] >= count or len(dropped) == count:
        raise refused(
            "these experts cannot be left out",
            code="USAGE",
            which=f"{contents.origin}, {layer}",
            expected=f"some of 0 to {count - 1}, and not all",
            got=", ".join(map(str, dropped)),
        )
    kept = [expert for expert in range(count) if expert not in dropped]
    gone = set()
    for param in contents.params:
        inside = param.name.startswith(layer + ".")
        found = _LISTED.match(param.name) if inside else None
        if found is not None and found[1] == layer:
            if int(found[2]) in dropped:
                gone.add(id(param))
            else:
                param.name = f"{layer}.experts.{kept.index(int(found[2]))}.{found[3]}"
        elif inside and param.shape[:1] == (count,) and "shared" not in param.name[len(layer) :]:
            _cut(param, kept)
    contents.params = [param for param in contents.params if id(param) not in gone]
    for name, lazy in contents.buffers.items():
        if name.startswith(layer + ".") and lazy.shape[:1] == (count,):
            contents.buffers[name] = _rows(lazy, kept)


def _cut(param: Param, kept: list[int]) -> None:
    count = param.shape[0]
    param.shape = (len(kept), *param.shape[1:])
    param.states = {
        name: _rows(lazy, kept) if lazy.shape[:1] == (count,) else lazy for name, lazy in param.states.items()
    }


def _rows(lazy: Lazy, kept: list[int]) -> Lazy:
    read = lazy.read
    return Lazy(
        shape=(len(kept), *lazy.shape[1:]),
        dtype=lazy.dtype,
        read=lambda: read().index_select(0, torch.tensor(kept)).contiguous(),
    )
