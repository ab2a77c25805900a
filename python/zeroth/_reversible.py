"""Reversible blocks: the inputs of a block are rebuilt from its outputs in backward, so none are kept.

Ref: Gomez et al., "The Reversible Residual Network", NeurIPS 2017, algorithm 1; Brügger et al., "A Partially Reversible
U-Net", MICCAI 2019.
"""

import contextlib
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from zeroth import _C

__all__ = ["Reversible", "ReversibleSequence"]


class Reversible(nn.Module):
    """Additive coupling: y1 = x1 + f(x2), y2 = x2 + g(y1).

    x: [..., 2 c] along `dim`, whose halves are x1 and x2; returns the same shape. `f`, `g`: modules that keep the shape
    of a half. Backward rebuilds x2 = y2 - g(y1) and x1 = y1 - f(x2), and computes f and g again with gradients: the
    values of x up to rounding (1e-6 of the values in float32), gradients up to that. One block keeps its output; in a
    ReversibleSequence only the last block does. Random numbers of f and g are those of the forward."""

    def __init__(self, f: nn.Module, g: nn.Module, *, dim: int = -1) -> None:
        super().__init__()
        self.f, self.g, self.dim = f, g, dim

    def forward(self, x: torch.Tensor, part: Literal["f", "g"] | None = None) -> torch.Tensor:
        """`part`: f or g alone, on a half, as a call of this module: a unit of an engine is gathered by its calls."""
        if part is not None:
            return self.f(x) if part == "f" else self.g(x)  # type: ignore[no-any-return]
        return _run([self], x, self.dim)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """The input of the block, from its output, without gradient."""
        with torch.no_grad():
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
    """What a forward leaves for its backward: no tensor."""

    def __init__(self, blocks: list[Reversible], dim: int, device: torch.device) -> None:
        self.blocks, self.dim = blocks, dim
        self.autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self.states: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def note_random_state(self, device: torch.device) -> None:
        self.states.append((torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None))

    @contextlib.contextmanager
    def again(self, number: int, device: torch.device) -> Any:
        """With the random numbers and the autocast of part `number`: f of block i is 2i, g is 2i + 1."""
        cpu, cuda = self.states[number]
        enabled = self.autocast is not None
        with (
            torch.random.fork_rng(devices=[device] if cuda is not None else []),
            torch.autocast(device.type, self.autocast, enabled),
        ):
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, device)
            yield


class _Coupling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, past: _Forward, x: torch.Tensor, connected: torch.Tensor) -> torch.Tensor:
        x1, x2 = _halves(x, past.dim)
        for block in past.blocks:
            past.note_random_state(x.device)
            x1 = x1 + _same_shape(block(x2, part="f"), x1, "f")
            past.note_random_state(x.device)
            x2 = x2 + _same_shape(block(x1, part="g"), x2, "g")
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
        for number in reversed(range(len(past.blocks))):
            block = past.blocks[number]
            # y2 = x2 + g(y1), then y1 = x1 + f(x2): each is computed again, and its gradient goes to the other half.
            y2, own = _undo(block, "g", y1, y2, d2, past.again(2 * number + 1, y1.device))
            d1 = d1 + own
            y1, own = _undo(block, "f", y2, y1, d1, past.again(2 * number, y1.device))
            d2 = d2 + own
        return None, torch.cat([d1, d2], past.dim), None


def _undo(
    block: Reversible,
    part: Literal["f", "g"],
    read: torch.Tensor,
    written: torch.Tensor,
    gradient: torch.Tensor,
    again: contextlib.AbstractContextManager[Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of written = x + part(read), where part is the block's f or g: x, and the gradient of `read`. Gradients of
    parameters are accumulated, as in a reentrant checkpoint: hooks of an engine see them."""
    leaf = read.detach().requires_grad_()
    with torch.enable_grad(), again:
        output = block(leaf, part=part)
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
    return _Coupling.apply(_Forward(blocks, dim, x.device), x, connected)  # type: ignore[no-any-return,no-untyped-call]


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
