"""Experts of a model on the ranks of the mesh's axis ep: a token travels to the ranks of its experts."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from operator import attrgetter
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

    def __init__(
        self, layers: list[ExpertLayer], others: list[tuple[str, str]], axes: list[str] | None = None, ranks: int = 1
    ) -> None:
        self.layers = layers
        self.others = others
        """modules that look like experts and are left whole, and why"""
        self.axes = axes or ["ep"]
        """of the mesh, whose ranks own other experts"""
        self.ranks = ranks
        self.exchanges: list[_C.ExpertRanks] = []
        """one a layer, where ranks share them"""
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
                f"{'*'.join(self.axes)}={self.ranks}: {', '.join(layer.parameters)}"
            )
        lines += [f"whole   {name}: {why}" for name, why in self.others]
        if self.why:
            number = self.checks.left + len(self.checks.results)
            lines.append(f"verified in the first forward: {number} layers of experts ({self.why})")
        return "\n".join(lines)


def experts(
    model: nn.Module,
    mesh: _C.Mesh | None = None,
    *,
    over: Literal["ep", "ep,tp", "ep,sp", "ep,sp,tp"] = "ep",
    meet: Literal["experts", "tokens", "balance"] = "experts",
    copies: int = 1,
    pieces: int = 1,
    two_hops: bool = False,
    verify: Literal["untested", "always", "never"] = "untested",
) -> Experts:
    """Finds the layers of experts of a model; with a mesh that has an axis of `over` it puts them there, in place.

    A layer of experts is a module with a forward(tokens [T, D], experts [T, k], weights [T, k]) and parameters whose
    first dimension are its `num_experts`: those of transformers (Mixtral, Qwen-MoE, DeepSeek, OLMoE, GPT-OSS, ...) and
    zeroth.nn.Experts. Each rank keeps its slice of slice_sizes(num_experts, ep) of every such parameter: the same
    Parameter object, with its part for data. In a forward the rows of tokens go to the ranks of their experts, the
    module's own code computes there, and the results come back; routers stay as they are. The sum is formed in the
    order of a token's choices. Experts that no token chose have a gradient of zeros.

    zeroth.Engine does it for a model and zeroth.mesh.ep > 1. Ranks along ep have batches, and so numbers of tokens, of
    their own. All ranks build the model from the same seed. `over` tp: its ranks own other experts, too, and each sends
    its share of the tokens, which they have alike.

    `meet`: "experts": rows travel. "tokens": each rank gets copies of the experts that its tokens chose, at most
    `copies` of a layer at a time, those with most rows first; other rows travel. "balance": copies where they lower the
    greatest number of rows of a rank. `pieces`: runs of a rank's experts whose rows travel while others are computed;
    0: measured. `two_hops`: rows travel inside nodes, then between them. See zeroth.experts.* in the configuration.

    Collective with a mesh. print(experts(model)) says what was found. Raises Error, before the model is changed: MODEL
    if there is no layer of experts, or fewer experts than ranks; MISMATCH if ranks along ep have other weights."""
    layers, others = list(_layers_of(model)), list(_others_of(model))
    shared = None
    if mesh is not None:
        shared = _C.ExpertRanks.of_mesh(mesh, over=over, meet=meet, copies=copies, pieces=pieces, two_hops=two_hops)
    if mesh is None or shared is None or (not layers and "ep" not in shared.axes):
        return Experts(layers, others)
    ranks = shared.size
    found = Experts(layers, others, shared.axes, ranks)
    group = mesh.axes(shared.axes)
    if not layers:
        refuse(
            "the model has no experts that ranks could have",
            where=_WHERE,
            code="MODEL",
            who=who(group),
            which=f"/zeroth/mesh/ep = {mesh.size('ep')}, {type(model).__name__}",
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
                expected=f"{ranks} experts or more, one a rank of {'*'.join(shared.axes)}",
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
        found.exchanges.append(shared.of_another_layer())
        why = to_verify(layer.name, layer.module, verify)
        placed = _place(layer, found.exchanges[-1])
        if why:
            placed.check = ExpertsCheck(
                layer.name, layer.module, layer.parameters, layer.num_experts, group, found.checks, shared.alike
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


def set_expert_options(
    model: nn.Module,
    *,
    meet: Literal["experts", "tokens", "balance"] | None = None,
    copies: int | None = None,
    pieces: int | None = None,
    two_hops: bool | None = None,
) -> None:
    """How tokens and experts of a model on ranks meet from the next forward on, see experts(); None: as before. No
    parameter moves. All ranks alike, between the same two forwards; else the next one is Error MISMATCH on all.
    Collective if it turns `two_hops` on."""
    placed = [vars(module).get("forward") for module in model.modules()]
    given = {"meet": meet, "copies": copies, "pieces": pieces, "two_hops": two_hops}
    changes = {key: value for key, value in given.items() if value is not None}
    for exchange in [one.ranks for one in placed if isinstance(one, _OnRanks)]:
        exchange.set_options(**exchange.options | changes)


def _unclear(layer: ExpertLayer) -> str | None:
    """A parameter of one dimension that may be all experts' own, where there are as many features as experts."""
    shapes = {name: tuple(layer.module.get_parameter(name).shape) for name in (*layer.parameters, *layer.shared)}
    if not any(layer.num_experts in shape[1:] for shape in shapes.values()):
        return None
    return next((name for name in layer.parameters if len(shapes[name]) == 1), None)


def _place(layer: ExpertLayer, ranks: _C.ExpertRanks) -> "_OnRanks":
    first, *further = ranks.axes
    cut = Cut(first, ranks.rank, ranks.size, further=tuple(further))
    for name in layer.parameters:
        path, _, own = name.rpartition(".")
        share(layer.module.get_submodule(path), own, cut, 0, noted=False)
    _, count = cut.range_of(layer.num_experts)
    module: Any = layer.module
    module.num_experts = count
    object.__setattr__(module, _PLACED, layer.num_experts)
    module.forward = placed = _OnRanks(module, layer, ranks)
    return placed


class _OnRanks:
    """In the place of a module's forward: the module's own code runs where the experts are."""

    def __init__(self, module: nn.Module, layer: ExpertLayer, ranks: _C.ExpertRanks) -> None:
        self.module = module
        self.forward: Callable[..., torch.Tensor] = module.forward
        self.num_experts = layer.num_experts
        self.parameters = layer.parameters
        self.ranks = ranks
        self.check: ExpertsCheck | None = None

    def __call__(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if (check := self.check) is not None:
            self.check = None  # its own forwards come here
            if not check.look(self, self.forward, tokens.reshape(-1, tokens.shape[-1]), chosen, weights):
                self.check = check
        x = tokens.reshape(-1, tokens.shape[-1])
        # transformers: an index above all experts is that of no expert.
        exchange = _C.TokenExchange(chosen.masked_fill(chosen >= self.num_experts, -1), self.num_experts, self.ranks)
        _expert_use.note(self.module, exchange.chosen, exchange.rows)
        own: dict[str, torch.Tensor] = {name: attrgetter(name)(self.module) for name in self.parameters}
        blocks = {name: exchange.blocks_of_runs(parameter) for name, parameter in own.items()}

        def compute(rows: torch.Tensor, run: int, of_experts: list[int]) -> torch.Tensor:
            values = {name: of_runs[run] for name, of_runs in blocks.items() if of_runs[run] is not own[name]}
            if (of_rows := getattr(self.module, "of_rows", None)) is not None:  # zeroth.nn.Experts: no second sort
                with _in_place_of(self.module, values, len(of_experts)):
                    results: torch.Tensor = of_rows(rows, of_experts)
                return results
            if (count := rows.shape[0]) == 0:  # a row of zeros, so that the backward is that of the other ranks
                rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
                of_experts = [1, *of_experts[1:]]
            numbers = torch.arange(len(of_experts), device=rows.device).repeat_interleave(
                torch.tensor(of_experts, device=rows.device), output_size=rows.shape[0]
            )
            ones = torch.ones(rows.shape[0], 1, dtype=weights.dtype, device=rows.device)
            with _in_place_of(self.module, values, len(of_experts)):
                return self.forward(rows, numbers.unsqueeze(1), ones)[:count]

        brought = exchange.through(x, weights, compute)
        return brought.view(*tokens.shape[:-1], brought.shape[-1])


@contextlib.contextmanager
def _in_place_of(module: nn.Module, values: dict[str, torch.Tensor], num_experts: int) -> Iterator[None]:
    """The module has these values for its parameters, and so many experts."""
    if not values:
        yield
        return
    owner: Any = module
    before = owner.num_experts
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, value in values.items():
            path, _, last = name.rpartition(".")
            own = module.get_submodule(path)._parameters
            kept.append((own, last, own[last]))
            own[last] = value  # type: ignore[assignment]
        owner.num_experts = num_experts
        yield
    finally:
        owner.num_experts = before
        for own, last, parameter in kept:
            own[last] = parameter


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
