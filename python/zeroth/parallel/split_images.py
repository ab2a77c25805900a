"""A convolutional model whose images are split along their height, unchanged: its layers along the height exchange
rows.

    whole images --split_rows()--> rows of this rank --layers, with rows of neighbours--> mean over all rows, on all
                                                                                     '-> maps: rows of this rank
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import conv, instancenorm, padding, pooling

from zeroth import _C
from zeroth.parallel._random import mixed, split_random
from zeroth.parallel._refuse import who
from zeroth.parallel.image_check import check_alike, check_first_forward
from zeroth.parallel.image_inputs import cut_images, is_rows, require_rows, whole_outputs
from zeroth.parallel.spatial import is_alike, spatial_batch_norm, spatial_conv2d, spatial_mean, spatial_pool2d

__all__ = ["SplitImages", "split_images", "split_images_of"]

_MARK = "_zeroth_images"
_WHERE = "parallel.split_images"
_ALONG_ROWS: tuple[type[nn.Module], ...] = (
    conv._ConvTransposeNd,
    conv.Conv3d,
    pooling.MaxPool3d,
    pooling.AvgPool3d,
    pooling._AdaptiveMaxPoolNd,
    pooling.AdaptiveAvgPool3d,
    pooling._LPPoolNd,
    pooling._MaxUnpoolNd,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.BatchNorm3d,
    nn.GroupNorm,
    instancenorm._InstanceNorm,
    nn.LocalResponseNorm,
    nn.Upsample,
    padding._ConstantPadNd,
    padding._ReflectionPadNd,
    padding._ReplicationPadNd,
    padding._CircularPadNd,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.Unfold,
    nn.Fold,
    nn.SyncBatchNorm,
    nn.RNNBase,
    nn.MultiheadAttention,
)
"""layers that look along the rows, and that are not split here"""

Change = Callable[[nn.Module, _C.Communicator, torch.Tensor], torch.Tensor]


class _Forward:
    """In the place of a module's forward. A copy of the module has a copy of it."""

    def __init__(self, module: nn.Module, change: Change, split: "SplitImages") -> None:
        self._module, self._change, self._split = module, change, split
        functools.update_wrapper(self, module.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Forward":
        copied = object.__new__(_Forward)
        memo[id(self)] = copied
        copied._module = memo.get(id(self._module), self._module)
        copied._change, copied._split = self._change, self._split
        return copied

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # as torch's layers name it
        if self._split.is_whole:
            return type(self._module).forward(self._module, input)  # type: ignore[no-any-return]
        return self._change(self._module, self._split.group, input)


class SplitImages:
    """A model whose images are split since split_images(); undo() ends it."""

    def __init__(
        self, model: nn.Module, group: _C.Communicator, changes: Mapping[nn.Module, Change], cuts: bool
    ) -> None:
        self.model = model
        self.group = group
        self.cuts = cuts
        """the model takes whole images, and cuts them"""
        self.is_whole = False
        """for now each rank computes whole images by itself"""
        self.modules = list(changes)
        """whose forwards exchange rows"""
        self._checked = cuts and group.size == 1
        self._busy = False
        self._random: torch.Tensor | None = None
        self._drew = False
        for module, change in changes.items():
            module.forward = _Forward(module, change, self)
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        object.__setattr__(model, _MARK, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitImages":
        return self

    def __str__(self) -> str:
        return f"images over {self.group.size} ranks: {len(self.modules)} layers along their rows"

    def undo(self) -> None:
        """The modules are as before."""
        for module in self.modules:
            vars(module).pop("forward", None)
        for hook in self._hooks:
            hook.remove()
        vars(self.model).pop(_MARK, None)
        self.modules, self._hooks = [], []

    def check_first(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares the model with itself whole, once: see check_first_forward(). A hook before the model's forward."""
        if self._checked or self._busy:
            return
        self._require(args, kwargs)
        self._busy = True
        try:
            check_first_forward(self, model, args, kwargs)
        finally:
            self._busy = self.is_whole = False
        self._checked = True

    def _require(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        require_rows(args, kwargs, self.group, self.cuts, where=_WHERE)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._busy:
            return None
        if self._checked:
            self._require(args, kwargs)
        else:
            self.check_first(model, args, kwargs)
        if model.training and self.group.size > 1:  # dropouts of what all ranks have alike are alike
            seed = int(self.group.broadcast(torch.randint(1 << 62, (1,), dtype=torch.int64), 0))
            self._random = torch.get_rng_state()
            torch.default_generator.manual_seed(mixed(seed))
        return cut_images(args, kwargs, self.group) if self.cuts else None

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        trained = self._random is not None
        if self._random is not None:
            torch.set_rng_state(self._random)
            self._random = None
        if trained and output is not None and not self._drew:
            check_alike(output, self.group)
            self._drew = True
        if self._busy or output is None or not self.cuts:  # None: the forward raised
            return None
        return whole_outputs(output, self.group)


def split_images_of(model: nn.Module) -> SplitImages | None:
    """What split_images() did to the model, or to a module inside."""
    return next((vars(module)[_MARK] for module in model.modules() if _MARK in vars(module)), None)


def split_images(model: nn.Module, group: _C.Communicator, *, cuts: bool = False) -> SplitImages:
    """From now on the model takes this rank's rows of the images, split_rows(images, group), instead of the whole: its
    Conv2d, MaxPool2d and AvgPool2d get the rows of neighbours that they need, BatchNorm2d takes the statistics of all
    rows, and AdaptiveAvgPool2d(1) gives the mean over all of them on every rank. So the model must end with such a
    mean, or give maps, of which each rank has its rows (whole_rows()); what follows the mean is computed on every rank
    alike, and its loss goes through part_of_loss().

    `cuts`: the model takes whole images, the same on all ranks of the group, which is checked, and cuts them: every
    tensor of four dimensions that its forward is given. What it returns is whole on every rank, maps too, and losses of
    it are as without a split: no part_of_loss(). zeroth.Engine does this where the configuration has zeroth.mesh.rows.

    The first forward of the model compares it with itself whole, on the first image of the batch: a model with other
    outputs is an Error MODEL on all ranks, with the module after which values differ, and the functions that were
    called there. In training, dropouts draw the same numbers where values are whole, and others on each rank's rows;
    the first forward there compares the values that all ranks should have alike.

    Call it before an engine is built around the model: it sums the gradients over the group, whose ranks follow each
    other in the world.
    Raises Error MODEL, with the module's name and nothing changed, for a model without such layers, for layers that
    look along the rows in another way, and for options that are not split: ceil_mode, return_indices, other paddings
    than zeros. In a forward: MISMATCH for other images on ranks of the group (`cuts`), USAGE for whole images in the
    place of rows."""
    _refuse_engine(model)
    changes: dict[nn.Module, Change] = {}
    for path, module in model.named_modules():
        change = _change(path, module)
        if change is not None:
            if "forward" in vars(module):
                raise _error("USAGE", "the forward of a module is replaced already", path, module, "undo() it first")
            changes[module] = change
    if not any(isinstance(module, nn.Conv2d) for module in changes):
        raise _C.make_error(
            "MODEL",
            "a model has no convolution over images",
            where=_WHERE,
            who=who(group),
            which=type(model).__name__,
            expected="a Conv2d among its modules",
            hint="zeroth.mesh.sp shares sequences, zeroth.mesh.tp matrices",
        )
    return SplitImages(model, group, changes, cuts)


def _refuse_engine(model: nn.Module) -> None:
    from zeroth._engine import has_engine  # it needs what this module needs

    if has_engine(model):
        raise _C.make_error(
            "USAGE",
            "an engine has the model, and takes the mean over ranks that would share images",
            where=_WHERE,
            which=type(model).__name__,
            hint="call split_images() before the engine is built, or configure zeroth.mesh.rows",
        )


_SPLIT: dict[type[nn.Module], Change] = {}
"""what is done in the place of a layer's forward"""


def _change(path: str, module: nn.Module) -> Change | None:
    base = next((kind for kind in _SPLIT if isinstance(module, kind)), None)
    if base is None or isinstance(module, nn.SyncBatchNorm):
        if isinstance(module, _ALONG_ROWS) and not type(module).__name__.endswith("1d"):
            raise _refusal(path, module, "a layer that looks along the rows", "convolutions, poolings, batch norms")
        return None
    if type(module).forward is not base.forward or type(module).__call__ is not nn.Module.__call__:
        raise _refusal(path, module, "a forward of its own", f"that of {base.__name__}")
    for option, expected in _OPTIONS.items():
        value = getattr(module, option, expected[0])
        if value not in expected:
            raise _refusal(path, module, f"{option} {value}", str(expected[0]))
    return _SPLIT[base]


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "padding_mode": ("zeros",),
    "ceil_mode": (False,),
    "return_indices": (False,),
    "divisor_override": (None,),
    "output_size": (1, (1, 1)),
}
"""of layers: values that are split, the first one the usual one"""


def _of_whole(change: Change) -> Change:
    """A change but for values that all ranks have whole, as behind a mean: each computes them as without a split."""

    def either(module: nn.Module, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
        if is_alike(x, group):
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        return change(module, group, x)

    return either


@_of_whole
def _convolve(module: nn.Module, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(module, nn.Conv2d)
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


@_of_whole
def _pool(module: nn.Module, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    more: dict[str, Any] = {
        name: getattr(module, name)
        for name in ("stride", "padding", "dilation", "count_include_pad")
        if hasattr(module, name)
    }
    kind: Any = "max" if isinstance(module, nn.MaxPool2d) else "avg"
    return spatial_pool2d(x, kind, module.kernel_size, group, **more)  # type: ignore[arg-type]


@_of_whole
def _normalise(module: nn.Module, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(module, nn.BatchNorm2d)
    return spatial_batch_norm(x, module, group)


@_of_whole
def _average(module: nn.Module, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    return spatial_mean(x, group)


def _drop(module: nn.Module, group: _C.Communicator, x: torch.Tensor) -> torch.Tensor:
    """Of rows each rank draws numbers of its own."""
    if not module.training or not is_rows(x):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    p: float = module.p  # type: ignore[assignment]
    with split_random(group):
        drop = functional.dropout if isinstance(module, nn.Dropout) else functional.alpha_dropout
        return drop(x, p, True, bool(module.inplace))


_SPLIT |= {
    nn.Conv2d: _convolve,
    nn.MaxPool2d: _pool,
    nn.AvgPool2d: _pool,
    nn.BatchNorm2d: _normalise,
    nn.AdaptiveAvgPool2d: _average,
    nn.Dropout: _drop,
    nn.AlphaDropout: _drop,
}


def _refusal(path: str, module: nn.Module, got: str, expected: str) -> _C.Error:
    return _C.make_error(
        "MODEL",
        "a layer cannot be split along the rows of images",
        where=_WHERE,
        which=f"{path or 'the model'} ({type(module).__name__})",
        expected=expected,
        got=got,
    )


def _error(code: str, message: str, path: str, module: nn.Module, hint: str) -> _C.Error:
    return _C.make_error(code, message, where=_WHERE, which=f"{path} ({type(module).__name__})", hint=hint)
