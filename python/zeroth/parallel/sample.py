"""A sample of a language model, whole and the same on all ranks of a group, and what each rank keeps of it.

Shapes: B batch, S tokens of the whole sequence, n of this rank.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from zeroth import _C
from zeroth.parallel._bytes import bytes_of
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.layout import SequenceLayout

__all__ = ["IGNORED", "Sample", "pad_to", "require_same", "shifted"]

IGNORED = -100
"""label of a token that has no loss"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one forward of a split model needs to know of the whole sample. A frozen value."""

    layout: SequenceLayout
    """of all tokens, with those that fill it up to one for each chunk"""
    outer: SequenceLayout
    """of a grid: over the ring alone; else the same"""
    length: int
    """tokens that were given"""
    positions: torch.Tensor
    """int [..., S]: of all tokens"""
    documents: torch.Tensor | None
    """int [1 or B, S]: number of each token's document; None: one document"""
    labels: torch.Tensor | None
    """int64 [B, n]: of this rank's tokens, shifted: what each of them predicts"""
    valid: float
    """tokens of all ranks that have a loss"""


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """The label of the next token, for each; to be done before a sequence is split."""
    return functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def pad_to(tensor: torch.Tensor, dim: int, length: int, value: float = 0) -> torch.Tensor:
    """Values at the end of a dimension that is shorter."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    after = tensor.dim() - 1 - dim % tensor.dim()
    return functional.pad(tensor, [0, 0] * after + [0, missing], value=value)


_DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
_DIMS = 4


def _record(value: Any) -> list[int]:
    """Form and contents of an argument, in numbers: present, dtype, dimensions, sizes, sum of its bytes."""
    if value is None:
        return [0] * (_DIMS + 4)
    if not isinstance(value, torch.Tensor):
        return [2, 0, 0, *[0] * _DIMS, zlib.crc32(repr(value).encode())]
    dtype = _DTYPES.index(value.dtype) if value.dtype in _DTYPES else len(_DTYPES)
    shape = [*value.shape[:_DIMS], *[0] * (_DIMS - value.dim())]
    return [1, dtype, value.dim(), *shape, zlib.crc32(bytes_of(value))]


def _described(record: list[int]) -> str:
    present, dtype, dims, *shape, content = record
    if present != 1:
        return "none" if present == 0 else f"a value with checksum {content:08x}"
    name = str(_DTYPES[dtype]).removeprefix("torch.") if dtype < len(_DTYPES) else "another dtype"
    return f"{name} {shape[:dims]} with checksum {content:08x}"


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Masks of several kinds each by its name."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        flat[name] = None if isinstance(value, Mapping) else value
        if isinstance(value, Mapping):
            flat.update({f"{name}[{key!r}]": one for key, one in sorted(value.items())})
    return flat


def require_same(
    arguments: Mapping[str, Any],
    group: _C.Communicator,
    *,
    where: str,
    what: str = "ranks that share a sequence were given different samples",
    hint: str = "give all ranks of one sequence group the same whole sample; batches differ over dp only",
) -> None:
    """Compares arguments (tensors, values or None, under the same names on all ranks) over the group, by their form
    and a checksum of their bytes. Raises Error MISMATCH on all ranks, with the ranks and the first argument that
    differs. A call of all ranks; 64 bytes an argument and rank."""
    if group.size == 1:
        return
    arguments = _flat(arguments)
    own = torch.tensor([_record(value) for value in arguments.values()], dtype=torch.int64)
    every = group.all_gather(own.reshape(1, -1)).view(group.size, len(arguments), -1)
    for number, name in enumerate(arguments):
        records = every[:, number].tolist()
        others = [rank for rank in range(group.size) if records[rank] != records[0]]
        if not others:
            continue
        same = [rank for rank in range(group.size) if rank not in others]
        different = records[others[0]]
        have = "have another shape" if different[:-1] != records[0][:-1] else "have other values"
        refuse(
            what,
            code="MISMATCH",
            where=where,
            who=who(group),
            which=f"{name}: ranks {others} of {group.name} {have} than ranks {same}",
            expected=f"{_described(records[0])}, as on rank 0",
            got=f"{_described(different)} on rank {others[0]}",
            hint=hint,
        )
