"""Experts of a model on the ranks of the mesh's axis ep: a token travels to the ranks of its experts."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from zeroth import _C, _deferred, _expert_use
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.sample import require_same
from zeroth.parallel.tensor import share
from zeroth.parallel.tensor_cut import Cut
from zeroth.parallel.verify_experts import Checks, ExpertsCheck, to_verify

__all__ = ["ExpertLayer", "Experts", "announce_checks", "experts"]

_WHERE = "parallel.experts"
_PLACED = "_zeroth_experts"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer of experts that a model has."""

    name: str
    """of its module"""
    module: nn.Module
    num_experts: int
    parameters: tuple[str, ...]
    """with one block an expert along their first dimension"""
    shared: tuple[str, ...]
    """other parameters inside: the same for all experts"""

    @property
    def elements(self) -> int:
        """Of the parameters of all experts."""
        return sum(self.module.get_parameter(name).numel() for name in self.parameters)


class Experts:
    """What experts() found, and where it put them."""

    def __init__(self, layers: list[ExpertLayer], others: list[tuple[str, str]], ranks: int) -> None:
        self.layers = layers
        self.others = others
        """modules that look like experts and are left whole, and why"""
        self.ranks = ranks
        self.checks = Checks(0)
        """of layers whose first forward is verified"""
        self.why = ""
        """they are"""

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            sizes = _C.slice_sizes(layer.num_experts, self.ranks)
            each = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[-1]} or {sizes[0]}"
            lines.append(
                f"experts {layer.name} ({type(layer.module).__name__}): {layer.num_experts}, {each} a rank of "
                f"ep={self.ranks}: {', '.join(layer.parameters)}"
            )
        lines += [f"whole   {name}: {why}" for name, why in self.others]
        if self.why:
            number = self.checks.left + len(self.checks.results)
            lines.append(f"verified in the first forward: {number} layers of experts ({self.why})")
        return "\n".join(lines)


def experts(
    model: nn.Module, mesh: _C.Mesh | None = None, *, verify: Literal["untested", "always", "never"] = "untested"
) -> Experts:
    """Finds the layers of experts of a model; with a mesh that has an axis "ep" it puts them there, in place.

    A layer of experts is a module with a forward(tokens [T, D], experts [T, k], weights [T, k]) and parameters whose
    first dimension are its `num_experts`: those of transformers (Mixtral, Qwen-MoE, DeepSeek, OLMoE, GPT-OSS, ...) and
    zeroth.nn.Experts. Each rank keeps its slice of slice_sizes(num_experts, ep) of every such parameter: the same
    Parameter object, with its part for data. In a forward the rows of tokens go to the ranks of their experts, the
    module's own code computes there, and the results come back; routers stay as they are. The sum is formed in the
    order of a token's choices. Experts that no token chose have a gradient of zeros.

    zeroth.Engine does it for a model and zeroth.mesh.ep > 1. Ranks along ep have batches, and so numbers of tokens, of
    their own. All ranks build the model from the same seed.

    Collective with a mesh. print(experts(model)) says what was found. Raises Error, before the model is changed: MODEL
    if there is no layer of experts, or fewer experts than ranks; MISMATCH if ranks along ep have other weights."""
    ranks = 1 if mesh is None or "ep" not in mesh.sizes else mesh.size("ep")
    layers, others = list(_layers_of(model)), list(_others_of(model))
    found = Experts(layers, others, ranks)
    if mesh is None or ranks == 1:
        return found
    group = mesh.axis("ep")
    if not layers:
        refuse(
            "the model has no experts that ranks could have",
            where=_WHERE,
            code="MODEL",
            who=who(group),
            which=f"/zeroth/mesh/ep = {ranks}, {type(model).__name__}",
            expected="modules with num_experts, parameters [num_experts, ...] and forward(tokens, experts, weights)",
            got="; ".join(f"{name}: {why}" for name, why in others),
        )
    for layer in layers:
        if (unclear := _unclear(layer)) is not None:
            refuse(
                "a parameter of experts has a number for each expert, or for each feature",
                where=_WHERE,
                code="MODEL",
                who=who(group),
                which=f"{layer.name}.{unclear}",
                expected="another number of features than experts, or a parameter [num_experts, 1]",
                got=f"[{layer.num_experts}], and {layer.num_experts} experts and features",
            )
        if layer.num_experts < ranks:
            refuse(
                "some ranks would have no expert",
                where=_WHERE,
                code="MODEL",
                who=who(group),
                which=layer.name,
                expected=f"{ranks} experts or more, one a rank of ep",
                got=str(layer.num_experts),
            )
    weights: dict[str, torch.Tensor] = {
        f"{layer.name}.{name}": parameter
        for layer in layers
        for name in layer.parameters
        if not (parameter := layer.module.get_parameter(name)).is_meta
    }
    states = _deferred.random_states_of(model)
    weights |= {f"random numbers of deferred module {at}": state for at, state in enumerate(states)}
    if weights:
        require_same(
            weights,
            group,
            where=_WHERE,
            what="ranks that take experts of one model have other weights",
            hint="build the model from the same seed on every rank: torch.manual_seed() before it is made",
        )
    for layer in layers:
        why = to_verify(layer.name, layer.module, verify)
        placed = _place(layer, group)
        if why:
            placed.check = ExpertsCheck(
                layer.name, layer.module, layer.parameters, layer.num_experts, group, found.checks
            )
            found.checks.left += 1
            found.why = found.why or why
    return found


def announce_checks(model: nn.Module) -> None:
    """What comes out of the first forwards is written to the log."""
    for module in model.modules():
        placed = vars(module).get("forward")
        if isinstance(placed, _OnRanks) and placed.check is not None:
            placed.check.checks.announces = True


def _unclear(layer: ExpertLayer) -> str | None:
    """A parameter of one dimension that may be all experts' own, where there are as many features as experts."""
    shapes = {name: tuple(layer.module.get_parameter(name).shape) for name in (*layer.parameters, *layer.shared)}
    if not any(layer.num_experts in shape[1:] for shape in shapes.values()):
        return None
    return next((name for name in layer.parameters if len(shapes[name]) == 1), None)


def _place(layer: ExpertLayer, group: _C.Communicator) -> "_OnRanks":
    cut = Cut("ep", group.rank, group.size)
    for name in layer.parameters:
        path, _, own = name.rpartition(".")
        share(layer.module.get_submodule(path), own, cut, 0)
    _, count = cut.range_of(layer.num_experts)
    module: Any = layer.module
    module.num_experts = count
    object.__setattr__(module, _PLACED, layer.num_experts)
    module.forward = placed = _OnRanks(module, layer.num_experts, group)
    return placed


class _OnRanks:
    """In the place of a module's forward: the module's own code runs where the experts are."""

    def __init__(self, module: nn.Module, num_experts: int, group: _C.Communicator) -> None:
        self.module = module
        self.forward: Callable[..., torch.Tensor] = module.forward
        self.num_experts = num_experts
        self.group = group
        self.check: ExpertsCheck | None = None

    def __call__(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if (check := self.check) is not None:
            self.check = None  # its own forwards come here
            if not check.look(self, self.forward, tokens.reshape(-1, tokens.shape[-1]), chosen, weights):
                self.check = check
        x = tokens.reshape(-1, tokens.shape[-1])
        # transformers: an index above all experts is that of no expert.
        exchange = _C.TokenExchange(chosen.masked_fill(chosen >= self.num_experts, -1), self.num_experts, self.group)
        _expert_use.note(self.module, exchange.chosen, exchange.rows)
        rows = exchange.send(x)
        expert_of_row = exchange.expert_of_row
        if (count := rows.shape[0]) == 0:  # a row of zeros, so that the backward is that of the other ranks
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            expert_of_row = expert_of_row.new_zeros(1)
        ones = torch.ones(rows.shape[0], 1, dtype=weights.dtype, device=rows.device)
        results = self.forward(rows, expert_of_row.unsqueeze(1), ones)[:count]
        brought = exchange.bring(results, weights)
        return brought.view(*tokens.shape[:-1], brought.shape[-1])


def _layers_of(model: nn.Module) -> Iterator[ExpertLayer]:
    for name, module in model.named_modules():
        if not _is_layer(module) or (number := _number_of(module)) is None:
            continue
        if own := _own_of(module):
            others = tuple(one for one, _ in module.named_parameters() if one not in own)
            yield ExpertLayer(name, module, number, own, others)


def _own_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters with one block an expert."""
    number = _number_of(module)
    return tuple(name for name, one in module.named_parameters() if one.dim() > 0 and one.shape[0] == number)


def _number_of(module: nn.Module) -> int | None:
    number = getattr(module, "num_experts", None)
    return number if isinstance(number, int) and number > 0 else None


def _is_layer(module: nn.Module) -> bool:
    """A forward with three tensors: tokens, experts and weights."""
    if _PLACED in vars(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    try:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
    except (TypeError, ValueError):
        return False
    return len(names) == 3 and any(word in names[1] for word in ("index", "indices", "experts"))


def _others_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Modules named like experts that are left whole."""
    inside: list[str] = []
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if any(name.startswith(one + ".") for one in inside) or last != "experts" or "shared" in name:
            continue
        inside.append(name)
        if any(_is_layer(one) and _number_of(one) is not None and _own_of(one) for one in module.modules()):
            continue
        if _is_layer(module) and _number_of(module) is not None:
            yield name, f"{type(module).__name__} has no parameter with one block an expert along its first dimension"
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield (
                name,
                f"a {type(module).__name__} of modules, which its block calls one by one: put "
                "zeroth.nn.stack_experts() of them in its place, one module with parameters [num_experts, ...], and "
                "let the block call it, forward(tokens, experts, weights)",
            )
        else:
            yield name, f"{type(module).__name__} has no num_experts, or no forward(tokens, experts, weights)"
