"""Tensors of several dtypes as one message between two ranks."""

import math
from collections.abc import Sequence

import torch

from zeroth import _C

__all__ = ["Form", "exchange", "form_of", "pack", "shift", "size_of", "unpack"]

Form = list[tuple[tuple[int, ...], torch.dtype]]
"""shape and dtype of each tensor of a message"""


def form_of(tensors: Sequence[torch.Tensor]) -> Form:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _places(form: Form) -> tuple[list[tuple[int, int]], int]:
    """First byte and number of bytes of each tensor, the widest dtypes first; and the bytes of all."""
    places, offset = [(0, 0)] * len(form), 0
    for number in sorted(range(len(form)), key=lambda number: -form[number][1].itemsize):
        shape, dtype = form[number]
        places[number] = (offset, math.prod(shape) * dtype.itemsize)
        offset += places[number][1]
    return places, offset


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One array of bytes, which unpack() takes apart."""
    places, size = _places(form_of(tensors))
    message = torch.empty(size, dtype=torch.uint8)
    for tensor, (start, length) in zip(tensors, places, strict=True):
        if length > 0:
            message[start : start + length].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return message


def unpack(message: torch.Tensor, form: Form) -> list[torch.Tensor]:
    """Views of the message's memory."""
    places, _ = _places(form)
    return [
        message[start : start + length].view(dtype).view(shape) if length > 0 else torch.empty(shape, dtype=dtype)
        for (shape, dtype), (start, length) in zip(form, places, strict=True)
    ]


def shift(message: torch.Tensor, size: int, by: int, group: _C.Communicator) -> torch.Tensor:
    """Gives the message to the rank `by` further on, around, and returns the one of `size` bytes that comes from the
    rank `by` before. A call of all ranks; blocks."""
    out = torch.empty(size, dtype=torch.uint8)
    to, source = (group.rank + by) % group.size, (group.rank - by) % group.size
    return group.send_recv(message, to, out, source)


def exchange(tensors: Sequence[torch.Tensor], form: Form, by: int, group: _C.Communicator) -> list[torch.Tensor]:
    """Gives the tensors to the rank `by` further on, around, and returns those of `form` that come from the rank `by`
    before. A call of all ranks; blocks."""
    return unpack(shift(pack(tensors), size_of(form), by, group), form)


def size_of(form: Form) -> int:
    """Bytes of a message."""
    return _places(form)[1]
