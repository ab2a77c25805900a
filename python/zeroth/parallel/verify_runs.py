"""Runs of a module beside the training, with other values in the place of its parameters, that leave nothing behind."""

import contextlib
import copy
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zeroth import _C
from zeroth._ending import CODES_OF_OTHERS
from zeroth._evaluation import evaluating

__all__ = [
    "BOUND",
    "BOUND_OF_HALVES",
    "Result",
    "SeesHalves",
    "any_of_ranks",
    "aside",
    "copied",
    "could_not_run",
    "difference_of",
    "floats_of",
    "forward_of",
    "free_bytes",
    "is_of_transport",
    "is_possible",
    "largest_of_ranks",
    "lent",
    "same",
    "shortened",
    "substitute",
    "wide",
]

BOUND = 5e-5
"""largest difference, relative to the largest value: parts of sums in another order differ by some 1e-6 in float32"""
BOUND_OF_HALVES = 0.05
"""where a module computes in 16 bit whatever it is given"""
_Key = TypeVar("_Key")
_HALVES = (torch.bfloat16, torch.float16)
_ROWS = 4
"""of the first dimension of the inputs. Not one: it may be the sequence"""


@dataclasses.dataclass(slots=True)
class Result:
    """Of a comparison."""

    difference: float = 0.0
    """between outputs, relative to the largest value"""
    bound: float = BOUND
    left_out: str = ""
    """why nothing was compared"""


def is_possible(values: Any) -> bool:
    """Whether this forward is one of numbers: not a look on the meta device, by a compiler or under torch.func."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    if any(one.is_meta or type(one) not in (torch.Tensor, nn.Parameter) for one in tensors):
        return False
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def free_bytes(device: torch.device) -> int:
    """Of a device, or of the host, which all of its ranks share."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    with contextlib.suppress(OSError, StopIteration):  # not Linux
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return sys.maxsize


def is_of_transport(error: BaseException) -> bool:
    """Whether it says something of other ranks, and nothing of the module that ran."""
    return getattr(error, "code", "") in CODES_OF_OTHERS


def any_of_ranks(group: _C.Communicator, *flags: bool) -> list[bool]:
    """Whether one of the ranks says so. A call of all of them."""
    values = group.all_reduce(torch.tensor([float(one) for one in flags]), "max")
    return [one > 0 for one in values.tolist()]


def largest_of_ranks(group: _C.Communicator, found: Mapping[_Key, float]) -> dict[_Key, float]:
    """The largest of the ranks, which have the same keys. A call of all of them."""
    if not found:
        return {}
    values = group.all_reduce(torch.tensor(list(found.values()), dtype=torch.float64), "max")
    return dict(zip(found, values.tolist(), strict=True))


def forward_of(module: nn.Module) -> str:
    """The class that has its forward, of a stand-in that of the module itself, and where it is from."""
    kind = next(one for one in type(module).__mro__ if "forward" in vars(one))
    return f"{kind.__qualname__} of {kind.__module__}"


def floats_of(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in it."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def could_not_run(error: BaseException | None) -> str:
    """Why something is left out. None: for what another rank has met."""
    return f"it could not run beside the training: {type(error).__name__}: {error}" if error else "another rank failed"


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """16 bit as float32."""
    return tensor.float() if tensor.dtype in _HALVES else tensor


def same(tensor: torch.Tensor) -> torch.Tensor:
    """As it is."""
    return tensor


def substitute(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Itself. One of zeros would hide what happens to it: small random values, the same on all ranks."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or bool(tensor.count_nonzero()):
        return tensor
    generator = torch.Generator().manual_seed(number)
    return torch.randn(tensor.shape, generator=generator).mul_(0.02).to(tensor)


def copied(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Arguments of a call whose tensors and objects may be written to. Raises what a deep copy raises."""
    leaves, form = tree_flatten(value)
    made = []
    for leaf in leaves:
        memo: dict[int, Any] = {}
        if not _is_kept(leaf):
            for tensor in _tensors_of(leaf, set()):  # torch copies no results of operators
                memo[id(tensor)] = change(tensor.detach()).clone()
        made.append(leaf if _is_kept(leaf) else copy.deepcopy(leaf, memo))
    return tree_unflatten(made, form)


def _is_kept(leaf: Any) -> bool:
    """Whether nobody writes to it."""
    frozen = getattr(type(leaf), "__dataclass_params__", None)
    return (
        isinstance(leaf, (str, int, float, complex, bool, type(None), torch.dtype, torch.device, nn.Module))
        or callable(leaf)
        or (frozen is not None and bool(frozen.frozen))
    )


def _tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Those in an object, its attributes and the collections in them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set)):
        inside += value
    elif _is_kept(value):
        return
    inside += getattr(value, "__dict__", {}).values()
    inside += [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
    for one in inside:
        yield from _tensors_of(one, seen)


def shortened(value: Any) -> Any:
    """Arguments with a few rows of each tensor along its first dimension; None where that cannot be said, or is all
    that there is."""
    leaves, form = tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    hidden = next((one for one in tensors if one.is_floating_point() and one.dim() > 2), None)
    if hidden is None or hidden.shape[0] <= _ROWS or any(len(one) not in (1, len(hidden)) for one in tensors):
        return None
    made = [leaf[:_ROWS] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else leaf for leaf in leaves]
    return tree_unflatten(made, form)


@contextlib.contextmanager
def aside(*modules: nn.Module) -> Iterator[None]:
    """In here the modules evaluate without gradients and autocast, and run eagerly. Afterwards the generators of random
    numbers, and the attributes of all modules inside, are as before."""
    every = {module: dict(vars(module)) for one in modules for module in one.modules()}
    started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if started else []
    kinds = ["cpu", *(["cuda"] if devices else [])]
    dynamo = "torch._dynamo" in sys.modules
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            stack.enter_context(evaluating(*modules))
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            if dynamo:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        for module, attributes in every.items():
            kept = {name: value for name, value in vars(module).items() if name.startswith("_zeroth")}
            vars(module).clear()
            vars(module).update(attributes | kept)


@contextlib.contextmanager
def lent(
    modules: Iterable[nn.Module],
    values: Mapping[int, torch.Tensor],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """In here the modules have `values`, by ids, for their parameters, and copies for their buffers."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in dict.fromkeys(modules):
            kept += [(one, dict(one)) for one in (module._parameters, module._buffers)]
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in values:
                    value = nn.Parameter(values[id(parameter)], requires_grad=False)
                    module._parameters[name] = value
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = change(buffer.detach()).clone()
        yield
    finally:
        for now, before in kept:
            now.clear()
            now.update(before)


def difference_of(expected: Any, got: Any) -> float:
    """The largest between floating-point tensors of two outputs, relative to the largest value of each; 0 for outputs
    without any, infinite if the first one has another form. What else has another one is each rank's own: probabilities
    or biases of some heads."""
    pairs = floats_of(expected), floats_of(got)
    if len(pairs[0]) != len(pairs[1]):
        return float("inf")
    return max(
        (
            _difference(one, other)
            for number, (one, other) in enumerate(zip(*pairs, strict=True))
            if number == 0 or one.shape == other.shape
        ),
        default=0.0,
    )


def _difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    if expected.shape != got.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    finite = expected.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("inf")
    expected, got = (torch.where(finite, one, 0).double() for one in (expected, got))
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


class SeesHalves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether something inside casts what is wider to 16 bit, to compute with it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports all of dynamo

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype in _HALVES:
            self.seen |= any(
                isinstance(one, torch.Tensor) and one.is_floating_point() and one.dtype not in _HALVES for one in args
            )
        return result
