"""Images that a forward is given and what it returns, where ranks share them.

Shapes: images [B, C, H, W]; rows of a rank [B, C, h, W]. Values that all ranks have alike: any others.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zeroth import _C
from zeroth.parallel._bytes import bytes_of
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.cuts import part_range
from zeroth.parallel.halo import heights_of
from zeroth.parallel.sample import require_same
from zeroth.parallel.spatial import whole_rows

__all__ = ["cut_images", "gathered_rows", "is_image", "is_rows", "require_rows", "whole_outputs"]


def is_image(value: Any) -> bool:
    """Whether it is an argument that is cut along its rows."""
    return isinstance(value, torch.Tensor) and value.dim() == 4


def is_rows(value: Any) -> bool:
    """Whether a value inside of a split model, or its output, is rows of this rank. What has one column is a mean."""
    return is_image(value) and value.size(3) > 1


def cut_images(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], group: _C.Communicator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with this rank's rows of whole images. The gradient of an image is whole."""

    def cut(value: Any) -> Any:
        if not is_image(value) or group.size == 1:
            return value
        if value.requires_grad:
            return _C.split_to_group(value, 2, group)
        begin, end = part_range(value.size(2), group.size, group.rank)
        return value.narrow(2, begin, end - begin)

    return pytree.tree_map(cut, args), pytree.tree_map(cut, dict(kwargs))


def gathered_rows(rows: torch.Tensor, group: _C.Communicator) -> torch.Tensor:
    """All rows of a tensor of any dtype, without a gradient. A call of all ranks."""
    if group.size == 1:
        return rows.detach()
    heights = heights_of(rows, 2, group)
    own = rows.detach().movedim(2, 0).contiguous()
    every = group.all_gather(own.view(torch.uint8) if own.dtype == torch.bool else own, counts=heights)
    return every.view(own.dtype).movedim(0, 2)


def whole_outputs(output: Any, group: _C.Communicator) -> Any:
    """Of what a model returned all rows, on every rank, and of the gradient each rank's part: a loss of it is that of
    whole images. A call of all ranks where it has rows. Raises Error MODEL for what has tensors that cannot be
    found."""

    def whole(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if not _is_plain(value):
                refuse(
                    "a model of split images returned what cannot be read",
                    code="MODEL",
                    where="parallel.split_images",
                    which=type(value).__name__,
                    expected="tensors, plain values, and tuples, lists and dictionaries of them",
                )
            return value
        if is_rows(value) and group.size > 1:
            value = whole_rows(value, group) if value.is_floating_point() else gathered_rows(value, group)
        return _C.part_of_loss(value, group) if value.requires_grad else value

    return pytree.tree_map(whole, output)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))


def require_rows(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], group: _C.Communicator, whole: bool, *, where: str
) -> None:
    """Raises Error, on all ranks of the group, for arguments that are not what a split model takes: `whole` images, the
    same on all ranks (MISMATCH), or rows of them (USAGE for the same images on all ranks). A call of all ranks, 64
    bytes an argument."""
    given = {pytree.keystr(path): one for path, one in pytree.tree_leaves_with_path((args, dict(kwargs)))}
    tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
    shapes = [list(one.shape) for one in tensors.values()]
    if not any(map(is_image, tensors.values())) or any(len(shape) > 4 for shape in shapes):
        refuse(
            "a model of split images is given none",
            where=where,
            who=who(group),
            which="arguments of the forward",
            expected="images [batch, channels, rows, columns]",
            got=shapes,
        )
    if group.size == 1:
        return
    if whole:
        require_same(
            tensors,
            group,
            where=where,
            what="ranks that share images were given different samples",
            hint="give all ranks of one image the same whole images; batches differ over dp only",
        )
        return
    images = [one.detach() for one in tensors.values() if is_image(one)]
    told = all(one.numel() == 0 or bool(one.min() == one.max()) for one in images)  # of one value: nobody can say
    digest = 0
    for one in images:
        digest = zlib.crc32(f"{list(one.shape)}".encode(), digest)
        digest = zlib.crc32(bytes_of(one), digest)
    every = group.all_gather(torch.tensor([[digest, told]])).tolist()
    if len({one for one, _ in every}) == 1 and not every[0][1]:
        refuse(
            "ranks that share images were given the same rows, as if they were whole images",
            where=where,
            who=who(group),
            which=", ".join(name for name, one in tensors.items() if is_image(one)),
            expected="this rank's rows",
            got=f"{[list(one.shape) for one in images]} with the same values on all {group.size} ranks",
            hint="split_rows(images, group), or split_images(model, group, cuts=True)",
        )
