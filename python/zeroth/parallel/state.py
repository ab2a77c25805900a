"""States that go from the tokens of one rank to those of the next: linear attention over a split sequence.

A recurrence with an associative form, such as gated linear attention, needs of all earlier tokens only a state. Each
rank sums up its own tokens first, all at the same time; then the states pass:

    rank 0: initial --combine--> state --> rank 1: --combine--> state --> rank 2 ...

Ref: Yang et al., Gated Linear Attention Transformers (2023), chunk form; Sun et al., Linear Attention Sequence
Parallelism (2024), the states' way over the ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from zeroth import _C
from zeroth.parallel._refuse import refuse, who

__all__ = ["pass_state"]

Combine = Callable[..., torch.Tensor]


def pass_state(
    initial: torch.Tensor, combine: Combine, group: _C.Communicator, *inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before this rank's tokens and the one after them, both known to autograd.

    initial: the state before the first token, of one shape and dtype on all ranks; its values are those of rank 0,
    where also its gradient is (elsewhere 0). combine(state, *inputs): the state after this rank's tokens, of the same
    shape and dtype, from the one before them and what sums them up (decay and keys times values); a function without
    other parameters, which backward runs once more. Gradients flow to inputs.

    Ranks work one after another here: combine should be cheap. Each receives one state in forward and one gradient in
    backward. A call of all ranks; in backward too, so on every rank the loss must depend on one of the two results.
    Blocks. Raises Error USAGE for a combine that returns another form."""
    for value in (initial, *inputs):
        if not isinstance(value, torch.Tensor):
            refuse(
                "a state or input is no tensor",
                where="parallel.pass_state",
                who=who(group),
                which="initial and inputs",
                expected="tensors",
                got=type(value).__name__,
            )
    before, after = _Pass.apply(combine, group, initial, *inputs)
    return before, after


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, combine: Combine, group: _C.Communicator, initial: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = initial.clone(memory_format=torch.contiguous_format)
        if group.rank > 0:
            group.recv(before, group.rank - 1)
        after = combine(before, *inputs)
        if after.shape != before.shape or after.dtype != before.dtype:
            refuse(
                "a state has another form after the tokens of a rank than before them",
                where="parallel.pass_state",
                who=who(group),
                which="combine",
                expected=f"{before.dtype} {list(before.shape)}",
                got=f"{after.dtype} {list(after.shape)}",
            )
        if group.rank + 1 < group.size:
            group.send(after.contiguous(), group.rank + 1)
        ctx.combine, ctx.group = combine, group
        ctx.save_for_backward(before, *inputs)
        return before, after.clone() if after is before else after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_before: torch.Tensor, of_after: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        before, *inputs = ctx.saved_tensors
        group: _C.Communicator = ctx.group
        of_after = of_after.clone(memory_format=torch.contiguous_format)
        if group.rank + 1 < group.size:
            of_after += group.recv(torch.empty_like(of_after), group.rank + 1)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in (before, *inputs)]
            after = ctx.combine(*leaves)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            grads = iter(torch.autograd.grad(after, wanted, of_after, allow_unused=True))
        of_leaves = [next(grads) if leaf.requires_grad else None for leaf in leaves]
        of_state = of_before if of_leaves[0] is None else of_before + of_leaves[0]
        if group.rank > 0:
            group.send(of_state.contiguous(), group.rank - 1)
            of_state = torch.zeros_like(of_state)
        return None, None, of_state, *of_leaves[1:]
