"""Copies of one module as experts, each of which computes the tokens that chose it."""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from zeroth import _C

__all__ = ["Experts"]


class Experts(nn.Module):
    """`num_experts` modules like `expert`: the parameters of all of them stacked, [num_experts, ...] each, under the
    names that they have in `expert`, with "__" for ".". So zeroth.experts() can place them along ep.

    `expert`: a module of one tensor [R, D] without buffers, whose result [R, D'] has a row for each row. The first
    expert has its values; the others are drawn anew by reset_parameters() of its modules, or by `draw(expert)`, which
    sets the values of a copy in place."""

    def __init__(self, expert: nn.Module, num_experts: int, draw: Callable[[nn.Module], None] | None = None) -> None:
        super().__init__()
        if next(expert.buffers(), None) is not None:
            raise ValueError(
                f"an expert with buffers: {type(expert).__name__} computes with values that are no parameters"
            )
        self.num_experts = num_experts
        drawn = [expert]
        for _ in range(num_experts - 1):
            other = copy.deepcopy(expert)
            (draw or _reset)(other)
            drawn.append(other)
        of_each = [dict(one.named_parameters()) for one in drawn]
        for name, parameter in of_each[0].items():
            stacked = torch.stack([one[name].detach() for one in of_each])
            self.register_parameter(name.replace(".", "__"), nn.Parameter(stacked, parameter.requires_grad))
        self._names = {name: name.replace(".", "__") for name in of_each[0]}
        # No submodule: it has no parameters of its own.
        object.__setattr__(self, "_template", copy.deepcopy(expert).to("meta"))

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """tokens [T, D]; experts [T, k], from 0 to num_experts - 1, or -1 for none; weights [T, k]. Returns [T, D']:
        the weighted sum of the results of a token's experts."""
        exchange = _C.TokenExchange(experts, self.num_experts)
        rows = exchange.send(tokens).split(exchange.rows)
        return exchange.bring(torch.cat([self._one(expert, part) for expert, part in enumerate(rows)]), weights)

    def _one(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        own = {name: self.get_parameter(stacked)[expert] for name, stacked in self._names.items()}
        self._template.train(self.training)
        result: torch.Tensor = functional_call(self._template, own, (rows,))
        return result

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, expert={type(self._template).__name__}"


def _reset(expert: nn.Module) -> None:
    for module in expert.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(module.parameters(recurse=False), None) is not None:
            raise ValueError(f"{type(module).__name__} has no reset_parameters(): give Experts(draw=...)")
