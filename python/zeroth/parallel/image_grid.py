"""Domain x batch grids: how many ranks share an image, how many split the batch, by the bytes that each choice moves.

P = r c ranks are r rows by c columns. Ranks of a column have the same images: each has some rows of them in
convolutions and poolings (domain), and a part of the outputs of a linear layer (model). Ranks of a row have other
images (batch). Bytes are what all ranks together receive in a step; e: bytes of an element, B: images of the batch.

    halo of a window      B C W e * rows that travel (Window.cut()), once more in backward, but for the first layer
    batch norm            of each column, sums of C + 1 and of C elements over r ranks, once more in backward
    rows before a linear  B C H W e (r - 1)
    linear                B out e (r - 1), and in backward of each column a sum of its B in elements over r ranks
    gradients             a sum of all of convolutions and norms over P ranks, of each row's linear parts over c ranks
    heights               c * 8 r (r - 1) for each window: ranks tell each other their rows

A sum of n bytes over r ranks moves 2 (r - 1) n, a reduce_scatter and an all_gather; up to 8 KiB r (r - 1) n, in one
phase.
Source: Gholami, Azad, Jin, Keutzer, Buluc, Integrated Model, Batch and Domain Parallelism in Training Neural Networks,
2018, arXiv 1712.04432.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel.cuts import part_sizes
from zeroth.parallel.halo import received_rows
from zeroth.parallel.image_window import Window
from zeroth.parallel.spatial import _padding, _pair

__all__ = ["GridCost", "ImageLayer", "grid_cost", "image_layers", "plan_grid"]


_ONE_PHASE = 8192
"""bytes up to which an all_reduce is one phase (CommBackend::submit())"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImageLayer:
    """A layer of a model over images, by what its traffic depends on. A frozen value."""

    name: str
    kind: Literal["window", "norm", "linear"]
    channels: int
    """of its input; a linear layer's input features"""
    height: int = 1
    width: int = 1
    parameters: int = 0
    outputs: int = 0
    """of a linear layer"""
    window: Window | None = None
    """along the height"""
    is_first: bool = False
    """no gradient to its input is needed"""
    follows_rows: bool = False
    """a linear layer whose input is whole images: `channels` are all their elements"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GridCost:
    """Bytes of a step that all ranks together receive. A frozen value."""

    rows: int
    """ranks that share an image"""
    columns: int
    """ranks that split the batch"""
    halo: int
    statistics: int
    """of batch norms"""
    activations: int
    """of linear layers, and rows gathered before them"""
    gradients: int
    heights: int

    @property
    def total(self) -> int:
        return self.halo + self.statistics + self.activations + self.gradients + self.heights

    @property
    def mesh(self) -> dict[str, int]:
        """The grid as zeroth.mesh of a configuration."""
        return {"dp": self.columns, "rows": self.rows}

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {getattr(self, name)}" for name in ("halo", "statistics", "activations", "gradients", "heights")
        )
        return f"{self.rows}x{self.columns}: {self.total} bytes ({parts})"


def grid_cost(
    layers: Sequence[ImageLayer],
    batch: int,
    rows: int,
    columns: int,
    element_bytes: int = 4,
    *,
    splits_linear: bool = True,
) -> GridCost:
    """The cost of one grid. A pure function. `splits_linear`: False for an engine's grid, which leaves linear layers
    whole on all ranks, behind a mean. Raises Error USAGE for a batch with fewer images than columns."""
    if rows < 1 or columns < 1 or batch < columns:
        raise _C.make_error(
            "USAGE",
            "a grid does not fit the batch",
            where="parallel.grid_cost",
            which=f"{rows}x{columns}",
            expected="from 1 to as many columns as images",
            got=f"{batch} images",
        )
    e = element_bytes
    halo = statistics = activations = heights = alike = 0
    linear = [0] * rows  # parameters of each rank's own outputs
    for layer in layers:
        if layer.kind != "linear" or not splits_linear:
            alike += layer.parameters
        if layer.kind == "window":
            assert layer.window is not None
            parts = part_sizes(layer.height, rows)
            travel = sum(received_rows(parts, layer.window.cut(parts).wanted))
            halo += travel * batch * layer.channels * layer.width * e * (1 if layer.is_first else 2)
            heights += columns * 8 * rows * (rows - 1)
        elif layer.kind == "norm":
            once = _sum_bytes((layer.channels + 1) * e, rows) + _sum_bytes(layer.channels * e, rows)
            statistics += 2 * columns * once
        elif splits_linear:
            if layer.follows_rows:
                activations += batch * layer.channels * (rows - 1) * e
                heights += columns * 8 * rows * (rows - 1)
            activations += batch * (rows - 1) * layer.outputs * e
            activations += sum(_sum_bytes(part * layer.channels * e, rows) for part in part_sizes(batch, columns))
            for row, own in enumerate(part_sizes(layer.outputs, rows)):
                linear[row] += own * layer.parameters // max(1, layer.outputs)
    gradients = _sum_bytes(alike * e, rows * columns) + sum(_sum_bytes(own * e, columns) for own in linear)
    return GridCost(
        rows=rows,
        columns=columns,
        halo=halo,
        statistics=statistics,
        activations=activations,
        gradients=gradients,
        heights=heights,
    )


def _sum_bytes(nbytes: int, ranks: int) -> int:
    """What all ranks receive in an all_reduce."""
    return (ranks if nbytes <= _ONE_PHASE else 2) * nbytes * (ranks - 1)


def plan_grid(
    layers: Sequence[ImageLayer], batch: int, ranks: int, element_bytes: int = 4, *, splits_linear: bool = True
) -> list[GridCost]:
    """All grids of so many ranks that fit the batch, the one that moves least first; of equal ones the one with fewer
    rows. An engine builds one: {"zeroth": {"mesh": plan_grid(..., splits_linear=False)[0].mesh}}. A pure function.
    Raises Error USAGE if none fits."""
    grids = [
        grid_cost(layers, batch, rows, ranks // rows, element_bytes, splits_linear=splits_linear)
        for rows in range(1, ranks + 1)
        if ranks % rows == 0 and ranks // rows <= batch
    ]
    return sorted(grids, key=lambda one: (one.total, one.rows))


def image_layers(model: nn.Module, images: torch.Tensor) -> list[ImageLayer]:
    """The layers of a model in the order in which it calls them on `images` [1, C, H, W]: Conv2d, MaxPool2d, AvgPool2d,
    BatchNorm2d and Linear. One forward in evaluation mode, without gradients."""
    layers: list[ImageLayer] = []
    names = {module: name for name, module in model.named_modules()}

    def see(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        layers.append(_layer(names[module], module, inputs[0], output, layers))

    kinds = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.BatchNorm2d, nn.Linear)
    handles = [module.register_forward_hook(see) for module in model.modules() if isinstance(module, kinds)]
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(images)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return layers


def _layer(
    name: str, module: nn.Module, x: torch.Tensor, output: torch.Tensor, before: Sequence[ImageLayer]
) -> ImageLayer:
    parameters = sum(one.numel() for one in module.parameters() if one.requires_grad)
    if isinstance(module, nn.Linear):
        return ImageLayer(
            name=name,
            kind="linear",
            channels=x.size(-1),
            parameters=parameters,
            outputs=output.size(-1),
            follows_rows=not any(layer.kind == "linear" for layer in before),
        )
    size: dict[str, Any] = {"channels": x.size(1), "height": x.size(2), "width": x.size(3)}
    if isinstance(module, nn.BatchNorm2d):
        return ImageLayer(name=name, kind="norm", parameters=parameters, **size)
    assert isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d))
    kernel = _pair(module.kernel_size)  # type: ignore[arg-type]
    stride = _pair(module.stride)  # type: ignore[arg-type]
    dilation = _pair(getattr(module, "dilation", 1))
    top, bottom, _, _ = _padding(module.padding, kernel, stride, dilation)  # type: ignore[arg-type]
    window = Window(size=kernel[0], stride=stride[0], before=top, after=bottom, dilation=dilation[0])
    first = not any(layer.kind == "window" for layer in before)
    return ImageLayer(name=name, kind="window", parameters=parameters, window=window, is_first=first, **size)
