"""Whether a model computes with split images what it computes with whole ones: at its first forward, on one image.

Both forwards run without gradients, in evaluation; buffers and random numbers are as before afterwards. If outputs
differ, both run once more, and what goes into each module and comes out of it is compared by sums along each dimension:

    Net( conv1( ) pool by a function conv2( ... )
                                    ^ the first values that differ: Net, between conv1 and conv2
"""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zeroth import _C
from zeroth._evaluation import evaluating
from zeroth.parallel._refuse import refuse
from zeroth.parallel.cuts import part_sizes
from zeroth.parallel.image_inputs import cut_images, gathered_rows, is_image, is_rows

if TYPE_CHECKING:
    from zeroth.parallel.split_images import SplitImages

__all__ = ["check_alike", "check_first_forward"]

_WHERE = "parallel.split_images"
_BOUND = {torch.float64: 1e-9, torch.float32: 1e-4}
"""largest difference, relative to the largest value; 16-bit types: 5 %"""
_DIMS = 6
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_first_forward(split: "SplitImages", model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises Error MODEL, the same on all ranks, for a model that gives other outputs for split images than for whole
    ones; and what the model itself raises for whole ones. A call of all ranks."""
    if split.group.size == 1:
        return
    check = _Check(split, model)
    with evaluating(model), _as_before(model):
        for batch in (1, None):  # some models want their batch
            whole, cut = check.samples(args, kwargs, batch)
            expected = check.run(whole, True)
            if not isinstance(expected, Exception):
                break
        if isinstance(expected, Exception):
            raise expected
        with _Running(model) as running:
            got = check.run(cut, False)
        if isinstance(got, _C.Error):
            check.refuse(running.text(), f"on other ranks something failed, or they make other calls: {got}", got)
        if isinstance(got, Exception):
            try:
                place = check.place(whole, cut)
            except _C.Error:  # only this rank failed, and the others wait in a call
                place = running.text()
            check.refuse(place, f"{type(got).__name__}: {got}", got)
        bound, worst = check.difference(expected, got)
        if worst <= bound:
            return
        again = check.run(whole, True, seed=1)
        if not isinstance(again, Exception) and not check.equal(expected, again, bound):
            warnings.warn(
                f"{type(model).__name__} draws random numbers in eval(), so its split images were not compared with "
                "whole ones",
                stacklevel=2,
            )
            return
        check.refuse(check.place(whole, cut), worst, None, bound)


def check_alike(output: Any, group: _C.Communicator) -> None:
    """Raises Error MODEL, on all ranks, if a rank has other values than the first where all should have the same,
    behind a mean over rows: after a forward in training, whose dropouts draw. A call of all ranks."""
    worst, bound = 0.0, 0.0
    for leaf in _tensors(output):
        if leaf.dim() <= 2 and leaf.is_floating_point() and leaf.numel() > 0:
            own = leaf.detach().contiguous()
            first = group.broadcast(own.clone(), 0)
            worst, bound = max(worst, _relative(own, first, first)), _BOUND.get(leaf.dtype, 0.05)
    worst = float(group.all_reduce(torch.tensor([worst], dtype=torch.float64), "max"))
    if worst > bound:
        refuse(
            "ranks that share images have other values where all should have the same",
            code="MODEL",
            where=_WHERE,
            which="outputs of a forward in training",
            expected=f"a relative difference of at most {bound}",
            got=worst,
            hint="nn.Dropout in the place of a function that draws random numbers for rows",
        )


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and random numbers are as before."""
    state = torch.get_rng_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for buffer, was in buffers:
                if buffer.shape == was.shape and not torch.equal(buffer, was):
                    buffer.copy_(was)


class _Check:
    def __init__(self, split: "SplitImages", model: nn.Module) -> None:
        self.split = split
        self.group = split.group
        self.model = model
        self.state = torch.get_rng_state()
        self.heights: list[list[int]] = []
        """rows of each rank of the images that are given"""

    def samples(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int | None
    ) -> tuple[_Arguments, _Arguments]:
        """The arguments with whole images, and with this rank's rows; of so many images."""
        count = next(one.size(0) for one in pytree.tree_leaves((args, kwargs)) if is_image(one))

        def few(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            value = value.detach()
            return value[:batch] if batch is not None and value.dim() > 0 and value.size(0) == count else value

        given = pytree.tree_map(few, args), pytree.tree_map(few, kwargs)
        if self.split.cuts:
            cut = cut_images(*given, self.group)
            whole = given
        else:
            whole = pytree.tree_map(lambda one: gathered_rows(one, self.group) if is_image(one) else one, given)
            cut = given
        rows = [one.size(2) for one in pytree.tree_leaves(cut) if is_image(one)]
        every = self.group.all_gather(torch.tensor([rows])).tolist()
        self.heights = [list(one) for one in zip(*every, strict=True)]
        return whole, cut

    def run(self, arguments: _Arguments, whole: bool, seed: int | None = None) -> Any:
        """What the model returns, or raised."""
        self.split.is_whole = whole
        torch.set_rng_state(self.state)
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        try:
            return self.model(*arguments[0], **arguments[1])
        except Exception as error:
            return error
        finally:
            self.split.is_whole = False

    def difference(self, expected: Any, got: Any) -> tuple[float, float]:
        """The bound, and the largest difference of all ranks; infinite for other forms."""
        wholes, parts = _tensors(expected), _tensors(got)
        shapes = torch.full((1, 1 + len(parts), _DIMS), -1, dtype=torch.int64)
        shapes[0, 0, 0] = len(parts)
        for place, part in enumerate(parts):
            shapes[0, 1 + place, : part.dim()] = torch.tensor(part.shape[:_DIMS], dtype=torch.int64)
        if len(parts) != len(wholes):  # on all ranks: they run the same program
            return 0.0, float("inf")
        every = self.group.all_gather(shapes)[:, 1:].tolist()
        worst = bound = 0.0
        for place, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
            own = self._own_slice(whole, part, [one[place][: part.dim()] for one in every])
            bound = max(bound, _BOUND.get(whole.dtype, 0.05))
            if own is None:
                worst = float("inf")
            elif own.is_floating_point() and own.numel() > 0:
                worst = max(worst, _relative(own, part, whole))
        found = self.group.all_reduce(torch.tensor([worst], dtype=torch.float64), "max")
        return bound, float(found)

    def _own_slice(self, whole: torch.Tensor, part: torch.Tensor, shapes: list[list[int]]) -> torch.Tensor | None:
        """What this rank should have of a whole output; None where the ranks' forms fit nothing."""
        if all(shape == list(whole.shape) for shape in shapes) and not (self.split.cuts and is_rows(part)):
            return whole
        if len(shapes[0]) != whole.dim():
            return None
        for dim in [2] if self.split.cuts else range(whole.dim()):
            sizes = [shape[dim] if dim < len(shape) else -1 for shape in shapes]
            rest = [shape[:dim] + shape[dim + 1 :] for shape in shapes]
            if sum(sizes) == (whole.size(dim) if dim < whole.dim() else -1) and all(
                one == [*whole.shape[:dim], *whole.shape[dim + 1 :]] for one in rest
            ):
                if self.split.cuts and not is_rows(part):
                    return None
                return whole.narrow(dim, sum(sizes[: self.group.rank]), sizes[self.group.rank])
        return None

    def equal(self, one: Any, other: Any, bound: float) -> bool:
        """Of two outputs for whole images; the same on all ranks."""
        pairs = list(zip(_tensors(one), _tensors(other), strict=False))
        worst = max((_relative(a, b, a) for a, b in pairs if a.is_floating_point() and a.shape == b.shape), default=0.0)
        return float(self.group.all_reduce(torch.tensor([worst], dtype=torch.float64), "max")) <= bound

    def place(self, whole: _Arguments, cut: _Arguments) -> str:
        """Where values begin to differ; the same on all ranks."""
        with _Events(self.model) as expected:
            self.run(whole, True)
        with _Events(self.model) as got:
            self.run(cut, False)
        first = len(expected.seen)
        for number, event in enumerate(expected.seen):
            other = got.seen[number] if number < len(got.seen) else None
            if other is None or not self._matches(event, other):
                first = number
                break
        agreed = int(self.group.all_gather(torch.tensor([first])).min())
        if agreed == len(expected.seen):
            return type(self.model).__name__
        return expected.text(agreed)

    def _matches(self, whole: "_Event", part: "_Event") -> bool:
        if (whole.enters, whole.path, len(whole.values)) != (part.enters, part.path, len(part.values)):
            return False
        return all(
            any(one.has(other, dim, begin) for dim, begin in self._places(one, other))
            for one, other in zip(whole.values, part.values, strict=True)
        )

    def _places(self, whole: "_Sums", part: "_Sums") -> Iterator[tuple[int, int]]:
        """Dimensions along which this rank may have a part of a tensor, from where; -1: it has all."""
        if whole.shape == part.shape:
            yield -1, 0
        for dim, size in enumerate(whole.shape):
            for sizes in [part_sizes(size, self.group.size), *(one for one in self.heights if sum(one) == size)]:
                if list(part.shape) == [*whole.shape[:dim], sizes[self.group.rank], *whole.shape[dim + 1 :]]:
                    yield dim, sum(sizes[: self.group.rank])

    def refuse(self, which: str, got: object, cause: Exception | None, bound: float | None = None) -> None:
        try:
            refuse(
                "a model computes other values with split images than with whole ones",
                code="MODEL",
                where=_WHERE,
                which=which,
                expected="the same values" if bound is None else f"a relative difference of at most {bound}",
                got=got,
                hint="layers in the place of functions over rows (Conv2d, MaxPool2d, AvgPool2d, BatchNorm2d, "
                "AdaptiveAvgPool2d(1)), a mean over rows before linear layers, and the same weights on all ranks; else "
                "zeroth.mesh.rows=1",
            )
        except _C.Error as error:
            raise error from cause


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _relative(one: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (one.double() - other.double()).abs())
    largest = whole.double().abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1e-30)
    worst = float((apart / largest).max()) if apart.numel() > 0 else 0.0
    return float("inf") if worst != worst else worst


@dataclasses.dataclass(slots=True)
class _Sums:
    """A tensor, by the sums of its values and of their sizes along each dimension."""

    shape: tuple[int, ...]
    sums: list[torch.Tensor]
    """[2, size] of each dimension"""
    bound: float

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Sums":
        values = tensor.detach().double().nan_to_num(0.0, 0.0, 0.0)
        both = torch.stack([values, values.abs()])
        dims = range(1, both.dim())
        sums = [both.sum([one for one in dims if one != dim]) if len(dims) > 1 else both for dim in dims]
        bound = 1000 * _BOUND[torch.float64] if tensor.dtype == torch.float64 else 10 * _BOUND[torch.float32]
        return _Sums(tuple(tensor.shape), sums, bound if tensor.dtype in _BOUND else 0.1)

    def has(self, part: "_Sums", dim: int, begin: int) -> bool:
        """Whether `part` is what lies from `begin` along a dimension; -1: all."""
        for at, (whole, own) in enumerate(zip(self.sums, part.sums, strict=True)):
            if dim in (-1, at):
                mine = whole[:, begin : begin + own.size(1)] if dim == at else whole
                scale = whole[1].amax().clamp(min=1e-30) if whole.size(1) > 0 else 1.0
                if mine.shape != own.shape or (
                    own.numel() > 0 and float((mine - own).abs().max() / scale) > self.bound
                ):
                    return False
        return True


@dataclasses.dataclass(slots=True)
class _Event:
    enters: bool
    path: str
    kind: str
    values: list[_Sums]
    functions: list[str]
    """that were called since the event before"""


_ALONG = {
    "adaptive_avg_pool2d", "adaptive_max_pool2d", "amax", "amin", "avg_pool2d", "batch_norm", "cat", "conv2d", "conv3d",
    "conv_transpose2d", "cumsum", "einsum", "flatten", "flip", "fold", "grid_sample", "group_norm", "instance_norm",
    "interpolate", "layer_norm", "linear", "local_response_norm", "lp_pool2d", "matmul", "max", "max_pool2d",
    "max_pool2d_with_indices", "mean", "min", "norm", "pad", "permute", "pixel_shuffle", "pixel_unshuffle", "reshape",
    "roll", "scaled_dot_product_attention", "softmax", "std", "sum", "unfold", "var", "view",
}  # fmt: skip
"""functions that may look along the rows"""


class _Functions(TorchFunctionMode):
    def __init__(self, called: list[str]) -> None:
        super().__init__()
        self.called = called

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _ALONG and name not in self.called:
            self.called.append(name)
        return function(*args, **(kwargs or {}))


class _Running:
    """The modules whose forwards run, or ran when one of them failed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: list[str] = []
        self.handles: list[Any] = []

    def __enter__(self) -> "_Running":
        for path, module in self.model.named_modules():
            name = f"{path} ({type(module).__name__})" if path else type(module).__name__
            self.handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.names.append(name)))
            self.handles.append(module.register_forward_hook(lambda *_: self.names.pop() and None))
        return self

    def __exit__(self, *about: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def text(self) -> str:
        return f"the forward of {self.names[-1]}" if self.names else type(self.model).__name__


class _Events:
    """What goes into the modules and comes out, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: list[_Event] = []
        self.called: list[str] = []
        self.mode = _Functions(self.called)
        self.handles: list[Any] = []

    def __enter__(self) -> "_Events":
        for path, module in self.model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave(path)))
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *about: Any) -> None:
        self.mode.__exit__(*about)  # type: ignore[no-untyped-call]
        for handle in self.handles:
            handle.remove()

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._see(True, path, module, (args, kwargs))

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._see(False, path, module, output)

        return hook

    def _see(self, enters: bool, path: str, module: nn.Module, values: Any) -> None:
        called = list(self.called)
        with torch._C.DisableTorchFunction():
            sums = [_Sums.of(one) for one in _tensors(values) if one.is_floating_point()]
        self.called.clear()
        self.seen.append(_Event(enters, path, type(module).__name__, sums, called))

    def text(self, number: int) -> str:
        """What was computed before an event and after the one before it."""
        event, before = self.seen[number], self.seen[number - 1] if number > 0 else None
        inside = next(iter(self._open(number)), None) if event.enters else event
        functions = f", which calls {', '.join(event.functions)}" if event.functions else ""
        if not event.enters and before is not None and before.enters and before.path == event.path:
            return f"{_name(event)}{functions}"
        places = []
        if before is not None and not before.enters:
            places.append(f"after {_name(before)}")
        if event.enters:
            places.append(f"before {_name(event)}")
        where = f" ({', '.join(places)})" if places else ""
        return f"the forward of {_name(inside) if inside is not None else 'the model'}{where}{functions}"

    def _open(self, number: int) -> Sequence[_Event]:
        """The modules that run at an event, the innermost first."""
        running: list[_Event] = []
        for event in itertools.islice(self.seen, number):
            if event.enters:
                running.append(event)
            elif running:
                running.pop()
        return running[::-1]


def _name(event: _Event) -> str:
    return f"{event.path} ({event.kind})" if event.path else event.kind
