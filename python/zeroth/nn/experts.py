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

    _template: nn.Module
    _steps: list[tuple[str, nn.Module]]

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
        template = copy.deepcopy(expert).to("meta")
        object.__setattr__(self, "_template", template)
        object.__setattr__(self, "_steps", _stack_of(template))

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """tokens [T, D]; experts [T, k], from 0 to num_experts - 1, or -1 for none; weights [T, k]. Returns [T, D']:
        the weighted sum of the results of a token's experts."""
        exchange = _C.TokenExchange(experts, self.num_experts)
        return exchange.bring(self.of_rows(exchange.send(tokens), exchange.rows), weights)

    def of_rows(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """x [R, D]: rows[0] rows of expert 0, then those of expert 1, ...; returns [R, D']."""
        if self._steps:
            steps = [self._of_all(*step) for step in self._steps]
            return torch.cat([_stack(part, expert, steps) for expert, part in enumerate(torch.split(x, rows))])
        parts = {name: _C.ExpertParts(self.get_parameter(stacked)) for name, stacked in self._names.items()}
        self._template.train(self.training)
        results = []
        for expert, part in enumerate(torch.split(x, rows)):
            own = {name: of_experts.part(expert) for name, of_experts in parts.items()}
            results.append(functional_call(self._template, own, (part,)))
        return torch.cat(results)

    def _of_all(self, prefix: str, module: nn.Module) -> nn.Module | _C.ExpertMatrices:
        if not isinstance(module, nn.Linear):
            return module
        bias = None if module.bias is None else self.get_parameter(self._names[prefix + "bias"])
        return _C.ExpertMatrices(self.get_parameter(self._names[prefix + "weight"]), bias)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, expert={type(self._template).__name__}"


def _stack(x: torch.Tensor, expert: int, steps: list[nn.Module | _C.ExpertMatrices]) -> torch.Tensor:
    """What functional_call() does for a stack, without its work for each call, and with gradients in their place."""
    for step in steps:
        x = step.linear(x, expert) if isinstance(step, _C.ExpertMatrices) else step(x)
    return x


# Of each element alone, without a draw.
_ACTIVATIONS = (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid)


def _stack_of(expert: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of an expert that is nothing but linear layers and activations in a row, with the prefixes of their
    parameters' names; or none."""
    steps: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    if len(list(expert.parameters())) != len(list(expert.named_parameters(remove_duplicate=False))):
        return []
    for name, module in expert.named_modules(remove_duplicate=False):
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks) or id(module) in seen:
            return []
        seen.add(id(module))
        if type(module) is nn.Sequential:
            continue
        if type(module) is not nn.Linear and type(module) not in _ACTIVATIONS:
            return []
        steps.append((f"{name}." if name else "", module))
    return steps


def _reset(expert: nn.Module) -> None:
    for module in expert.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(module.parameters(recurse=False), None) is not None:
            raise ValueError(f"{type(module).__name__} has no reset_parameters(): give Experts(draw=...)")
