"""Models over images in an engine: the axis `rows` of the mesh."""

import sys

import torch
from torch import nn

from zeroth import _C, _boxes
from zeroth.parallel.split_images import SplitImages, split_images, split_images_of

__all__ = ["split_model", "with_rows"]

_ROWS = "/zeroth/mesh/rows"


def with_rows(model: nn.Module, config: _C.Config, world: _C.World) -> _C.Config:
    """The configuration with the ranks for which split_images() has split the model: gradients are summed over them.
    Raises Error CONFIG if it says others, and for ranks that do not follow each other; USAGE for a module inside that
    takes whole images. Collective over these ranks."""
    split = split_images_of(model)
    if split is None:
        return config
    group = split.group
    if split.cuts and split.model is not model and group.size > 1:
        raise _C.make_error(
            "USAGE",
            "a module inside of the engine's model gives whole outputs, and parameters outside of it count each rank's",
            where="python.engine",
            which=type(split.model).__name__,
            expected=f"split_images({type(model).__name__}, group, cuts=True), or cuts=False",
            got="cuts=True",
            hint="zeroth.mesh.rows has the engine split the whole model",
        )
    said = config.mesh(world.size).get("rows", 1)
    if said not in (1, group.size):
        raise _C.make_error(
            "CONFIG",
            "a model and the configuration differ in the ranks that share images",
            where="python.engine",
            which=_ROWS,
            expected=f"{group.size}, as the group of split_images(), or none",
            got=str(said),
        )
    if group.size == 1:
        return config
    ranks = group.all_gather(torch.tensor([world.rank])).tolist()
    first = ranks[0]
    if ranks != list(range(first, first + group.size)) or first % group.size != 0:
        raise _C.make_error(
            "CONFIG",
            "ranks that share images do not follow each other",
            where="python.engine",
            who=f"rank {group.rank}/{group.size} of {group.name}",
            which="the group of split_images()",
            expected=f"{group.size} ranks of the world, one after the other, the first a multiple of {group.size}",
            got=", ".join(map(str, ranks)),
            hint='the innermost axis of a mesh: world.mesh({"dp": ..., "rows": ...}).axis("rows")',
        )
    if said == group.size:
        return config
    more = [_C.ConfigOverride(_ROWS, group.size, "split_images()")]
    return _C.Config.from_json(config.to_json(), "the configuration", more)


def split_model(model: nn.Module, config: _C.Config, world: _C.World, announce: bool) -> SplitImages | None:
    """Splits the model for the axis `rows` of the configuration, unless that has been done, and returns what was done.
    `announce`: rank 0 prints it. Collective."""
    axes = config.mesh(world.size)
    split = split_images_of(model)
    if axes.get("rows", 1) > 1 and split is None:
        mesh = world.mesh(axes, config)
        split = split_images(model, mesh.axis("rows"), cuts=True)
        _boxes.mark(model, _boxes.Split(world, axes, mesh))
        if announce and world.rank == 0:
            sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
            print(f"mesh: {sizes}\n{split}", file=sys.stderr, flush=True)
    return split
