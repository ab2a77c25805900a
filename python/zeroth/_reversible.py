"""Reversible blocks: the inputs of a block are rebuilt from its outputs in backward, so none are kept.

Ref: Gomez et al., "The Reversible Residual Network", NeurIPS 2017, algorithm 1; Brügger et al., "A Partially Reversible
U-Net", MICCAI 2019.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from zeroth import _C
from zeroth._kept_buffers import Before, run_noting, unchanged

__all__ = ["Reversible", "ReversibleSequence"]


class Reversible(nn.Module):
    """Additive coupling: y1 = x1 + f(x2), y2 = x2 + g(y1).

    x: [..., 2 c] along `dim`, whose halves are x1 and x2; returns the same shape. `f`, `g`: modules that keep the shape
    of a half. Backward rebuilds x2 = y2 - g(y1) and x1 = y1 - f(x2), and computes f and g again with gradients: the
    values of x up to rounding (1e-6 of the values in float32), gradients up to that. One block keeps its output; in a
    ReversibleSequence only the last block does. Random numbers of f and g are those of the forward, and so are the
    buffers that these write: statistics of batches count each forward once."""

    def __init__(self, f: nn.Module, g: nn.Module, *, dim: int = -1) -> None:
        super().__init__()
        self.f, self.g, self.dim = f, g, dim
        self._written: dict[tuple[str, bool], set[str]] = {}
        """the buffers of f and of g that forwards have written, in training or not; no key before the first forward"""

    def forward(self, x: torch.Tensor, part: Literal["f", "g"] | None = None) -> torch.Tensor:
        """`part`: f or g alone, on a half, as a call of this module: a unit of an engine is gathered by its calls."""
        if part is not None:
            return self.f(x) if part == "f" else self.g(x)  # type: ignore[no-any-return]
        return _run([self], x, self.dim)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """The input of the block, from its output, without gradient."""
        with torch.no_grad(), _as_before(self.f), _as_before(self.g):
            y1, y2 = _halves(y, self.dim)
            x2 = y2 - self.g(y1)
            return torch.cat([y1 - self.f(x2), x2], self.dim)


class ReversibleSequence(nn.Module):
    """Reversible blocks one after the other: memory for one output, whatever the number of blocks.

    Each block is called as a module, once for f and once for g, in forward and in backward: blocks are units of an
    engine as any others.
    """

    def __init__(self, blocks: Iterable[Reversible], *, dim: int = -1) -> None:
        """Raises Error USAGE for blocks that split another dimension."""
        super().__init__()
        self.blocks, self.dim = nn.ModuleList(blocks), dim
        if any(not isinstance(block, Reversible) or block.dim != dim for block in self.blocks):
            raise _usage("the blocks of a sequence are Reversible and split one dimension", "blocks", f"dim {dim}", "")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _run(list(self.blocks), x, self.dim) if len(self.blocks) else x  # type: ignore[arg-type]


class _Forward:
    """What a forward leaves for its backward: no activation."""

    def __init__(self, blocks: list[Reversible], dim: int, device: torch.device) -> None:
        self.blocks, self.dim = blocks, dim
        self.autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        # In one piece: small tensors that stay lie in the gaps that temporary ones of the size of a half leave, and no
        # later one fits into what is left of them.
        self._states = torch.empty(2 * len(blocks), torch.get_rng_state().numel(), dtype=torch.uint8)
        self._of_device: list[torch.Tensor | None] = []
        self._buffers: list[Before] = []

    def run(self, block: Reversible, part: Literal["f", "g"], x: torch.Tensor) -> torch.Tensor:
        """The next part: f of block i is number 2i, g is 2i + 1."""
        self._states[len(self._buffers)].copy_(torch.get_rng_state())
        self._of_device.append(torch.cuda.get_rng_state(x.device) if x.is_cuda else None)
        key = part, block.training
        known = block._written.get(key)
        result, written = run_noting(getattr(block, part), lambda: block(x, part=part), known)
        block._written[key] = (known or set()) | written.keys()
        self._buffers.append(written)
        return result  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def again(self, number: int, device: torch.device) -> Any:
        """With the random numbers and the autocast of part `number`."""
        cuda = self._of_device[number]
        enabled = self.autocast is not None
        with (
            torch.random.fork_rng(devices=[device] if cuda is not None else []),
            torch.autocast(device.type, self.autocast, enabled),
        ):
            torch.set_rng_state(self._states[number].clone())  # torch reads a slice at a wrong place
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)
            yield

    def buffers(self, block: Reversible, number: int) -> contextlib.AbstractContextManager[None]:
        """With the buffers of part `number`, as it read them."""
        return unchanged(block.g if number % 2 else block.f, self._buffers[number])


@contextlib.contextmanager
def _as_before(module: nn.Module) -> Any:
    """Buffers are afterwards what they are now."""
    before: Before = dict(module.named_buffers())
    with unchanged(module, before):
        yield


_PAGE = os.sysconf("SC_PAGESIZE")
_LEAST_SLACK = 16 << 20


class _Heap:
    """Memory of temporary tensors that stays with the process.

    [Note: Memory of temporaries] glibc takes large pieces from its heap, once some have been freed, and not from the
    system. A gap that a freed half leaves is a little too short for the next one as soon as something small, such as a
    parameter's gradient, lies in it. So each block took new memory, and all of it stayed. Where a backward has four
    halves more than at its beginning, the free pages go back to the system: that bounds what it takes, whatever the
    number of blocks, and costs the pages that are taken again."""

    def __init__(self, half: torch.Tensor) -> None:
        self._slack = max(4 * half.numel() * half.element_size(), _LEAST_SLACK)
        self._limit = _resident_bytes() + self._slack if half.device.type == "cpu" and sys.platform == "linux" else None

    def look(self) -> None:
        if self._limit is not None and _resident_bytes() > self._limit:
            _C.return_heap()
            self._limit = _resident_bytes() + self._slack


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE


class _Coupling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, past: _Forward, x: torch.Tensor, connected: torch.Tensor) -> torch.Tensor:
        x1, x2 = _halves(x, past.dim)
        heap = _Heap(x1)
        for block in past.blocks:
            x1 = x1 + _same_shape(past.run(block, "f", x2), x1, "f")
            x2 = x2 + _same_shape(past.run(block, "g", x1), x2, "g")
            heap.look()
        y = torch.cat([x1, x2], past.dim)
        ctx.past = past
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        past: _Forward = ctx.past
        y1, y2 = _halves(y, past.dim)
        d1, d2 = _halves(gradient, past.dim)
        del y
        heap = _Heap(y1)
        for number in reversed(range(len(past.blocks))):
            # y2 = x2 + g(y1), then y1 = x1 + f(x2): each is computed again, and its gradient goes to the other half.
            y2, own = _undo(past, 2 * number + 1, y1, y2, d2)
            d1 = d1 + own
            heap.look()
            y1, own = _undo(past, 2 * number, y2, y1, d1)
            d2 = d2 + own
            heap.look()
        return None, torch.cat([d1, d2], past.dim), None


def _undo(
    past: _Forward, number: int, read: torch.Tensor, written: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of written = x + part(read), where part is the f or g with this number: x, and the gradient of `read`. Gradients
    of parameters are accumulated, as in a reentrant checkpoint: hooks of an engine see them."""
    block = past.blocks[number // 2]
    leaf = read.detach().requires_grad_()
    with past.buffers(block, number):
        with torch.enable_grad(), past.again(number, read.device):
            output = block(leaf, part="g" if number % 2 else "f")
        with torch.no_grad():
            x = written - output
        if not output.requires_grad:
            return x, torch.zeros_like(read)
        torch.autograd.backward(output, gradient.to(output.dtype))
    return x, torch.zeros_like(read) if leaf.grad is None else leaf.grad


def _run(blocks: list[Reversible], x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.dim() == 0 or x.size(dim) % 2 or not x.is_floating_point():
        raise _usage(
            "a reversible block splits its input into two halves",
            "x",
            f"an even size of dim {dim}",
            f"shape {list(x.shape)}",
        )
    trains = any(parameter.requires_grad for block in blocks for parameter in block.parameters())
    connected = torch.empty(0, requires_grad=trains)  # so that there is a backward where x needs no gradient
    return _Coupling.apply(_Forward(blocks, dim, x.device), x, connected)  # type: ignore[no-any-return]


def _halves(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = x.chunk(2, dim)
    return one, other


def _same_shape(output: torch.Tensor, half: torch.Tensor, name: str) -> torch.Tensor:
    if output.shape != half.shape:
        raise _usage(
            "a part of a reversible block changes the shape", name, str(list(half.shape)), str(list(output.shape))
        )
    return output


def _usage(message: str, which: str, expected: str, got: str) -> _C.Error:
    return _C.make_error("USAGE", message, where="python.reversible", which=which, expected=expected, got=got)
