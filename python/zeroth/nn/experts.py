"""Copies of one module as experts, each of which computes the tokens that chose it."""

import copy
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.func import functional_call

from zeroth import _C

__all__ = ["Experts", "listed_state", "stack_experts", "stacked_state"]


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
        drawn = [expert]
        for _ in range(num_experts - 1):
            other = copy.deepcopy(expert)
            (draw or _reset)(other)
            drawn.append(other)
        self._take(drawn)

    @classmethod
    def of(cls, experts: Iterable[nn.Module]) -> "Experts":
        """See stack_experts()."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(list(experts))
        return made

    def _take(self, experts: list[nn.Module]) -> None:
        self.num_experts = len(experts)
        of_each = [dict(one.named_parameters()) for one in experts]
        for name, parameter in of_each[0].items():
            stacked = torch.stack([one[name].detach() for one in of_each])
            self.register_parameter(name.replace(".", "__"), nn.Parameter(stacked, parameter.requires_grad))
        self._names = {name: name.replace(".", "__") for name in of_each[0]}
        # No submodule: it has no parameters of its own.
        template = copy.deepcopy(experts[0]).to("meta")
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
        parts = {name: _C.ExpertParts(getattr(self, stacked)) for name, stacked in self._names.items()}
        self._template.train(self.training)
        results = []
        for expert, part in enumerate(torch.split(x, rows)):
            own = {name: of_experts.part(expert) for name, of_experts in parts.items()}
            results.append(functional_call(self._template, own, (part,)))
        return torch.cat(results)

    def _of_all(self, prefix: str, module: nn.Module) -> nn.Module | _C.ExpertMatrices:
        if not isinstance(module, nn.Linear):
            return module
        bias = None if module.bias is None else getattr(self, self._names[prefix + "bias"])
        return _C.ExpertMatrices(getattr(self, self._names[prefix + "weight"]), bias)

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


def stack_experts(experts: Iterable[nn.Module]) -> Experts:
    """One module for a list of experts that a block calls one by one, with their values: nn.ModuleList as in
    block.experts of older models. The block's forward has to call it with what its loop used:

        block.experts = zeroth.nn.stack_experts(block.experts)
        ...
        out = self.experts(tokens, chosen, weights)      # [T, D], [T, k], [T, k], in the place of the loop

    Parameters are new, [experts, ...] each, in the order of those of one expert. stacked_state() and listed_state()
    take states of one form to the other. Raises ValueError with the first difference if the modules are not alike in
    structure, or have buffers."""
    modules = list(experts)
    if not modules:
        raise ValueError("there are no experts in the list")
    for place, module in enumerate(modules):
        if next(module.buffers(), None) is not None:
            raise ValueError(f"expert {place} has buffers: {type(module).__name__} computes with what is no parameter")
        for first, this in zip(_structure(modules[0]), _structure(module), strict=False):
            if first != this:
                raise ValueError(f"experts are not alike: expert 0 has {first}, and expert {place} has {this}")
        if len(_structure(modules[0])) != len(_structure(module)):
            raise ValueError(f"experts are not alike: expert {place} has other modules than expert 0")
    return Experts.of(modules)


def stacked_state(
    experts: Experts, state: Mapping[str, torch.Tensor], prefix: str = "experts."
) -> dict[str, torch.Tensor]:
    """A state of a model whose experts were a list, "experts.0.w1.weight", for the model with `experts` in its place,
    "experts.w1__weight" [experts, ...]. `prefix`: of the list in the names; others stay what they are, and so does the
    order. It serves gradients and moments, too. Raises KeyError for an expert that is missing."""
    result: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        place, _, own = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix) or not place.isdigit() or own not in experts._names:
            result[name] = value
        elif (stacked := prefix + experts._names[own]) not in result:
            result[stacked] = torch.stack([state[f"{prefix}{one}.{own}"] for one in range(experts.num_experts)])
    return result


def listed_state(
    experts: Experts, state: Mapping[str, torch.Tensor], prefix: str = "experts."
) -> dict[str, torch.Tensor]:
    """The reverse of stacked_state(). Values are views of those of `state`, which is whole: that of
    Engine.state_dict(), not of a rank's module."""
    names = {prefix + stacked: own for own, stacked in experts._names.items()}
    result = {name: value for name, value in state.items() if name not in names}
    count = max((len(value) for name, value in state.items() if name in names), default=0)
    for place in range(count):
        result |= {f"{prefix}{place}.{own}": state[name][place] for name, own in names.items() if name in state}
    return result


def _structure(expert: nn.Module) -> list[str]:
    """What experts have alike: classes with their options, and parameters."""
    found = [f"{name or 'itself'}: {type(one).__name__}({one.extra_repr()})" for name, one in expert.named_modules()]
    return found + [
        f"{name}: {list(one.shape)} of {one.dtype}, {'trained' if one.requires_grad else 'frozen'}"
        for name, one in expert.named_parameters()
    ]


def _reset(expert: nn.Module) -> None:
    for module in expert.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        elif next(module.parameters(recurse=False), None) is not None:
            raise ValueError(f"{type(module).__name__} has no reset_parameters(): give Experts(draw=...)")
