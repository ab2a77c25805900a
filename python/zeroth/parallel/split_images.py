"""A convolutional model whose images are split along their height, unchanged: its layers along the height exchange
rows."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel.spatial import spatial_batch_norm, spatial_conv2d, spatial_mean, spatial_pool2d

__all__ = ["SplitImages", "split_images"]

_ALONG_ROWS: tuple[type[nn.Module], ...] = (
    nn.ConvTranspose2d,
    nn.GroupNorm,
    nn.InstanceNorm2d,
    nn.LocalResponseNorm,
    nn.FractionalMaxPool2d,
    nn.LPPool2d,
    nn.AdaptiveMaxPool2d,
    nn.MaxUnpool2d,
    nn.Upsample,
    nn.ZeroPad2d,
    nn.ConstantPad2d,
    nn.ReflectionPad2d,
    nn.ReplicationPad2d,
    nn.CircularPad2d,
    nn.PixelShuffle,
    nn.Unfold,
    nn.Fold,
    nn.SyncBatchNorm,
    nn.RNNBase,
    nn.MultiheadAttention,
)
"""layers that look along the rows, and that are not split here"""


class SplitImages:
    """A model whose images are split since split_images(); undo() ends it."""

    def __init__(self, changes: dict[nn.Module, Callable[..., torch.Tensor]]) -> None:
        self.modules = list(changes)
        """whose forwards exchange rows"""
        for module, forward in changes.items():
            module.forward = functools.wraps(module.forward)(forward)

    def undo(self) -> None:
        """The modules are as before."""
        for module in self.modules:
            vars(module).pop("forward", None)
        self.modules = []


def split_images(model: nn.Module, group: _C.Communicator) -> SplitImages:
    """From now on the model takes this rank's rows of the images, split_rows(images, group), instead of the whole: its
    Conv2d, MaxPool2d and AvgPool2d get the rows of neighbours that they need, BatchNorm2d takes the statistics of all
    rows, and AdaptiveAvgPool2d(1) gives the mean over all of them on every rank. So the model must end with such a
    mean, or give maps, of which each rank has its rows (whole_rows()); what follows the mean is computed on every rank
    alike, and its loss goes through part_of_loss().

    Before or after an engine is built around the model. The engine's gradients are summed over the group.
    Raises Error MODEL, with the module's name and nothing changed, for layers that look along the rows in another way,
    and for options that are not split: ceil_mode, return_indices, other paddings than zeros."""
    changes: dict[nn.Module, Callable[..., torch.Tensor]] = {}
    for path, module in model.named_modules():
        change = _change(path, module, group)
        if change is not None:
            if "forward" in vars(module):
                raise _error("USAGE", "the forward of a module is replaced already", path, module, "undo() it first")
            changes[module] = change
    return SplitImages(changes)


def _change(path: str, module: nn.Module, group: _C.Communicator) -> Callable[..., torch.Tensor] | None:
    if isinstance(module, nn.Conv2d):
        if module.padding_mode != "zeros":
            raise _refusal(path, module, f"padding_mode {module.padding_mode}", "zeros")
        return functools.partial(_convolve, module, group)
    if isinstance(module, (nn.MaxPool2d, nn.AvgPool2d)):
        divisor = getattr(module, "divisor_override", None)
        for option in ("ceil_mode", "return_indices"):
            if getattr(module, option, False):
                raise _refusal(path, module, option, "False")
        if divisor is not None:
            raise _refusal(path, module, "divisor_override", "None")
        kind = "max" if isinstance(module, nn.MaxPool2d) else "avg"
        more: dict[str, Any] = {
            name: getattr(module, name)
            for name in ("stride", "padding", "dilation", "count_include_pad")
            if hasattr(module, name)
        }
        return functools.partial(_pool, kind, module.kernel_size, group, more)
    if isinstance(module, nn.BatchNorm2d) and not isinstance(module, nn.SyncBatchNorm):
        return functools.partial(_normalise, module, group)
    if isinstance(module, nn.AdaptiveAvgPool2d):
        if module.output_size not in (1, (1, 1)):
            raise _refusal(path, module, f"output_size {module.output_size}", "1")
        return functools.partial(_average, group)
    if isinstance(module, _ALONG_ROWS):
        raise _refusal(path, module, "a layer that looks along the rows", "convolutions, poolings, batch norms")
    return None


def _convolve(module: nn.Conv2d, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    stride, padding, dilation = module.stride, module.padding, module.dilation
    return spatial_conv2d(
        x,
        module.weight,
        module.bias,
        group,
        stride=(stride[0], stride[-1]),
        padding=padding if isinstance(padding, str) else (padding[0], padding[-1]),  # type: ignore[arg-type]
        dilation=(dilation[0], dilation[-1]),
        groups=module.groups,
    )


def _pool(kind: Any, size: Any, group: _C.Communicator, more: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    return spatial_pool2d(x, kind, size, group, **more)


def _normalise(module: nn.BatchNorm2d, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    return spatial_batch_norm(x, module, group)


def _average(group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    return spatial_mean(x, group)


def _refusal(path: str, module: nn.Module, got: str, expected: str) -> _C.Error:
    return _C.make_error(
        "MODEL",
        "a layer cannot be split along the rows of images",
        where="parallel.split_images",
        which=f"{path or 'the model'} ({type(module).__name__})",
        expected=expected,
        got=got,
    )


def _error(code: str, message: str, path: str, module: nn.Module, hint: str) -> _C.Error:
    return _C.make_error(
        code, message, where="parallel.split_images", which=f"{path} ({type(module).__name__})", hint=hint
    )
