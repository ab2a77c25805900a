"""Values between ranks as tensors and a text: what one chunk gives to the next, and what a whole model returns.

A single tensor has the text "". Else the text is a JSON document: the tree of torch's pytree, and for each leaf that is
no tensor its place and its value.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.parallel._wire import form_of, pack, size_of, unpack

__all__ = ["Tensors", "flat", "nested", "shared"]

Tensors = list[torch.Tensor | None]

_WHERE = "pipe.values"
_PLAIN = (type(None), bool, int, float, str)
_EXPECTED = "tensors, None, numbers, strings, and tuples, lists and dicts of them"


def flat(values: Any) -> tuple[Tensors, str]:
    """The tensors, and the text of the rest. Raises Error MODEL for a value that cannot be sent."""
    if isinstance(values, torch.Tensor):
        return [values], ""
    leaves, tree = pytree.tree_flatten(values)
    tensors: Tensors = []
    plain: list[list[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            continue
        if not isinstance(leaf, _PLAIN):
            _refuse(type(leaf).__name__)
        plain.append([len(tensors) + len(plain), leaf])
    return tensors, json.dumps([_text_of(tree), plain])


def nested(tensors: Tensors, text: str) -> Any:
    """The reverse of flat()."""
    if text == "":
        return tensors[0]
    tree, plain = json.loads(text)
    leaves: list[Any] = list(tensors)
    for position, value in plain:
        leaves.insert(position, value)
    return pytree.tree_unflatten(leaves, _tree_of(tree))


@functools.lru_cache(maxsize=64)
def _text_of(tree: pytree.TreeSpec) -> str:
    """Raises Error MODEL for a tree that its text does not give back: other classes, keys that JSON does not have."""
    try:
        text = pytree.treespec_dumps(tree)
        if pytree.treespec_loads(text) == tree:
            return text
    except (NotImplementedError, TypeError, ValueError):
        pass
    _refuse(str(tree))


@functools.lru_cache(maxsize=64)
def _tree_of(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)


def _refuse(which: str) -> NoReturn:
    refuse(
        "a value of the model cannot be sent to another rank",
        code="MODEL",
        where=_WHERE,
        which=which,
        expected=_EXPECTED,
    )


def shared(value: Any, root: int, group: _C.Communicator, device: torch.device) -> Any:
    """What rank `root` of the group gives, on all of its ranks; others give anything. Tensors lose their graph, and are
    on `device`; mappings (the outputs of transformers are such) become dicts. Collective and blocking; first the text
    with all shapes, then all tensors as one array of bytes. Raises Error MODEL on all ranks for a value that cannot be
    sent."""
    here = group.rank == root
    text, tensors = _described(value) if here else ("", [])
    length = torch.tensor([len(text.encode())])
    group.broadcast(length, root)
    document = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if here else _bytes(int(length))
    group.broadcast(document, root)
    described = json.loads(bytes(document.tolist()))
    if "refused" in described:
        _refuse(described["refused"])
    form = [(tuple(shape), getattr(torch, dtype)) for shape, dtype in described["form"]]
    message = pack(tensors) if here else _bytes(size_of(form))
    if len(message) > 0:
        group.broadcast(message, root)
    return nested([tensor.to(device) for tensor in unpack(message, form)], described["tree"])


def _described(value: Any) -> tuple[str, list[torch.Tensor]]:
    """The text for other ranks, and the tensors, on the CPU."""
    try:
        found, tree = flat(_as_plain(value))
    except _C.Error as error:
        return json.dumps({"refused": error.which}), []
    tensors = [tensor.detach().cpu() for tensor in found if tensor is not None]
    form = [[shape, str(dtype).removeprefix("torch.")] for shape, dtype in form_of(tensors)]
    return json.dumps({"form": form, "tree": tree}), tensors


def _as_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_as_plain(one) for one in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)
