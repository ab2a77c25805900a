"""Tensors of several dtypes as one message between two ranks."""

import math
from collections.abc import Sequence

import torch

from zeroth import _C

__all__ = ["Form", "Message", "exchange", "form_of", "move", "pack", "size_of", "unpack"]

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


Message = tuple[torch.Tensor, int, int]
"""bytes that a rank gives; how many it gets; how many ranks further on they go, around"""


def move(messages: Sequence[Message], group: _C.Communicator) -> list[torch.Tensor]:
    """Gives each message to a rank further on, and returns what comes from as many ranks before: all of them are in
    flight at once, in both directions. A call of all ranks; blocks."""
    outs = [torch.empty(size, dtype=torch.uint8) for _, size, _ in messages]
    group.exchange(
        [(message, (group.rank + by) % group.size) for message, _, by in messages],
        [(out, (group.rank - by) % group.size) for out, (_, _, by) in zip(outs, messages, strict=True)],
    )
    return outs


def exchange(tensors: Sequence[torch.Tensor], form: Form, by: int, group: _C.Communicator) -> list[torch.Tensor]:
    """Gives the tensors to the rank `by` further on, around, and returns those of `form` that come from the rank `by`
    before. A call of all ranks; blocks."""
    return unpack(move([(pack(tensors), size_of(form), by)], group)[0], form)


def size_of(form: Form) -> int:
    """Bytes of a message."""
    return _places(form)[1]
