"""A head whose rows the stages of a pipeline share: which layer it is, and what the loss makes of its output.

The last stage runs the model up to the head, and the loss with a stand-in for the logits: numbers of rows in their
place. So a loss may take rows away and change their order ([:, :-1], view, flatten, masks), until it calls
torch.nn.functional.cross_entropy, which gives 0 there. Which rows count, their targets, and by which factor the sum of
the cross entropies becomes the loss is all that the stages need: no rank has the logits of other rows than its own.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zeroth import _C, _boxes
from zeroth._tiled import Tile, put_in_tiles
from zeroth.parallel._refuse import refuse
from zeroth.parallel.tensor import share
from zeroth.parallel.tensor_cut import Cut
from zeroth.parallel.vocab_loss import sum_of_parts
from zeroth.pipe import stashed
from zeroth.pipe.batches import parts_of
from zeroth.pipe.block_chain import BlockChain
from zeroth.pipe.chain import Chain
from zeroth.pipe.layer_list import LayerList
from zeroth.pipe.layer_specs import TiedLayerSpec
from zeroth.pipe.list_chain import ListChain
from zeroth.pipe.stand_in import standing_in

__all__ = ["SharedHead", "ToHead", "find_head", "run_to_head"]

_WHERE = "pipe.shared_head"
_KEY = "zeroth.pipeline.vocabulary"
_WHOLE = 'zeroth.pipeline.vocabulary = "whole" keeps the head on the last stage'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TiedTable:
    """The embeddings whose matrix is that of the head. A frozen value.

    [Note: A tied head] The stages that look rows up have the whole matrix, as tiles: tile r has the rows of stage r's
    head, and is a parameter of that stage, too. So each tile is an ordinary weight that several stages have, whose
    gradients are summed once a step, and whose states ZeRO shards over all of its ranks. No rows travel in a step."""

    modules: tuple[nn.Embedding, ...]
    paths: tuple[str, ...]
    """all that they have"""
    names: tuple[str, ...]
    """of the matrix in the whole model; the first one is that of checkpoints"""
    layers: tuple[int, ...]
    """that call them"""

    def tile_of(self, name: str) -> int | None:
        """The number of a tile, by the name of its parameter."""
        for path in self.paths:
            prefix = f"{path}.tiles."
            if name.startswith(prefix):
                return int(name.removeprefix(prefix).partition(".")[0])
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedHead:
    """A linear layer, the last one of a model. A frozen value."""

    path: str
    module: nn.Linear
    vocabulary: int
    """rows of all stages"""
    table: TiedTable | None = None
    """of a head that is tied"""

    def rows(self, mesh: _C.Mesh) -> list[int]:
        """Of each stage; where its ranks of tp share them, of each of these, stage after stage."""
        return self._cut(mesh).sizes(self.vocabulary)

    def has(self, name: str) -> bool:
        """Whether a parameter is the head's, by its name in the model."""
        return name.rpartition(".")[0] == self.path or (self.table is not None and name in self.table.names)

    def tile_of(self, name: str) -> int | None:
        """See TiedTable."""
        return None if self.table is None else self.table.tile_of(name)

    @property
    def table_layers(self) -> tuple[int, ...]:
        """The layers that look up rows."""
        return () if self.table is None else self.table.layers

    def name_of_rows(self, stage: int) -> str:
        """Of the parameter with a stage's rows of the weight."""
        prefix = self.path if self.table is None else f"{self.table.paths[0]}.tiles.{stage}"
        return f"{prefix}.weight" if prefix else "weight"

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the modules that have the weight."""
        return (self.path,) if self.table is None else (self.path, *self.table.paths)

    def beside(self, mesh: _C.Mesh) -> _C.Communicator | None:
        """Ranks of a stage that share its rows once more."""
        return mesh.axis("tp") if self._shares_over_tp(mesh) else None

    def share(self, mesh: _C.Mesh, *, looks_up: bool) -> None:
        """Leaves this rank's rows, and all rows as tiles where its stage looks up rows of them."""
        if self.table is not None:
            _put_tiles(self.module, self.table, self._cut(mesh), whole=looks_up)
            return
        for name in ("weight", "bias"):
            share(self.module, name, self._cut(mesh), 0)

    def _shares_over_tp(self, mesh: _C.Mesh) -> bool:
        """A table is whole on each rank of tp, and so are its tiles."""
        return self.table is None and mesh.size("tp") > 1

    def _cut(self, mesh: _C.Mesh) -> Cut:
        stage, stages = mesh.coordinate("pp"), mesh.size("pp")
        if not self._shares_over_tp(mesh):
            return Cut("pp", stage, stages)
        beside = mesh.size("tp")
        return Cut("tp", stage * beside + mesh.coordinate("tp"), stages * beside)


def _put_tiles(head: nn.Linear, table: TiedTable, own_cut: Cut, *, whole: bool) -> None:
    weight: nn.Parameter = head.weight  # type: ignore[assignment]
    values, rows = weight.data, own_cut.sizes(weight.shape[0])
    tiles = []
    for number in range(len(rows)):
        cut = dataclasses.replace(own_cut, rank=number)
        there = whole or number == own_cut.rank
        part = cut.take(values, 0) if there else values.new_empty((0, *values.shape[1:]))
        # The user's object is this stage's.
        own = weight if number == own_cut.rank else nn.Parameter(part, requires_grad=weight.requires_grad)
        own.data = part
        if there and values.is_meta:
            _boxes.cut_later(own, values, functools.partial(cut.take, dim=0))
        offset = [sum(rows[:number]), *[0] * (values.dim() - 1)]
        _boxes.put_box(own, _C.ParameterBox(list(values.shape), offset, names=list(table.names)))
        tile = Tile(values.new_empty(0), None)
        tile.weight = own
        tiles.append(tile)
    _boxes.put_parts(weight, [tile.weight for tile in tiles])
    shared = nn.ModuleList(tiles)
    for module in table.modules:
        put_in_tiles(module, shared, rows)


def find_head(chain: Chain, ranks: int) -> SharedHead:
    """The layer whose rows so many ranks share, those of pp and tp. Its weight may be that of embeddings, and of
    nothing else. Raises Error MODEL for a model that does not end in a linear layer and a loss."""
    linear = [one for module in chain.layers[-1].modules for one in module.modules() if isinstance(one, nn.Linear)]
    module = linear[-1] if linear else None
    function = _tied_function(chain)
    if function is not None:
        return _head_of_function(chain, function, ranks)
    kind = type(chain.layers[-1].modules[-1]).__name__ if chain.layers[-1].modules else "a function"
    if module is None or type(module).forward is not nn.Linear.forward:
        _refuse(chain.layers[-1].name, "an nn.Linear as the last layer", kind)
    path = next(name for name, one in chain.model.named_modules() if one is module)
    if isinstance(chain, ListChain) and (chain.loss_fn is None or chain.layers[-1].modules != (module,)):
        _refuse(path, "an nn.Linear as the last layer, and a loss_fn", "no loss_fn" if chain.loss_fn is None else kind)
    table = _tied_table(chain, path, module)
    for name, parameter in module.named_parameters():
        _require_rows(f"{path}.{name}", parameter.shape[0], ranks)
    if _has_hooks(module):
        _refuse(path, "no hooks on the head, which is not called as a module", "hooks")
    return SharedHead(path=path, module=module, vocabulary=module.weight.shape[0], table=table)


def _tied_function(chain: Chain) -> TiedLayerSpec | None:
    """A last layer that is a function of a module of an earlier one."""
    spec = chain.model.specs[-1] if isinstance(chain.model, LayerList) else None
    return spec if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None else None


def _require_rows(name: str, rows: int, ranks: int) -> None:
    if rows < ranks:
        _refuse(name, f"{ranks} rows or more, one for each rank of pp and tp", f"{rows} rows")


def _head_of_function(chain: Chain, spec: TiedLayerSpec, ranks: int) -> SharedHead:
    layer = chain.layers[-1]
    (module,) = layer.modules
    if not isinstance(module, nn.Embedding) or not _is_product(spec.forward_fn):
        _refuse(layer.name, "linear(x, module.weight) as the function of a tied nn.Embedding", type(module).__name__)
    if chain.loss_fn is None:
        _refuse(layer.name, "a loss_fn", "none")
    _require_rows(layer.name, module.num_embeddings, ranks)
    head = nn.Linear(module.embedding_dim, module.num_embeddings, bias=False, device="meta")  # no part of the model
    head.weight = module.weight
    path = next(name for name, one in chain.model.named_modules() if one is module)
    table = _tied_table(chain, path, head, of_function=True)
    return SharedHead(path=path, module=head, vocabulary=module.num_embeddings, table=table)


def _is_product(function: Any) -> bool:
    """Whether a function of a module and x multiplies x with the module's weight and does nothing else, by a trial."""
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (5, 3))
    try:
        with torch.no_grad():
            found = function(types.SimpleNamespace(weight=weight), x)
    except Exception:  # it needs more of the module
        return False
    return isinstance(found, torch.Tensor) and found.shape == (3, 5) and torch.allclose(found, x @ weight.t())


def _tied_table(chain: Chain, path: str, head: nn.Linear, *, of_function: bool = False) -> TiedTable | None:
    last = len(chain.layers) - 1
    users: dict[str, nn.Module] = {}
    for other, module in chain.model.named_modules(remove_duplicate=False):
        if module is not head and any(one is head.weight for one in module._parameters.values()):
            users[other] = module
    modules = tuple(dict.fromkeys(one for one in users.values() if isinstance(one, nn.Embedding)))
    layers = tuple(
        number
        for number, layer in enumerate(chain.layers)
        if any(one in modules for module in layer.modules for one in module.modules())
        and not (of_function and number == last)
    )
    for name, _ in head.named_parameters():
        full = f"{path}.{name}" if path else name
        others = [layer for layer in chain.uses[full] if layer != last and (name != "weight" or layer not in layers)]
        if others:
            _refuse_tied(full, ", ".join(chain.layers[layer].name for layer in chain.uses[full]))
    if not users:
        return None
    full = f"{path}.weight" if path else "weight"
    for other, module in users.items():
        if not isinstance(module, nn.Embedding):
            _refuse_tied(full, f"{other}, {type(module).__name__}")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            _refuse(other, "an embedding without max_norm, scale_grad_by_freq and sparse", repr(module))
    if head.bias is not None:
        _refuse(path, "a head without a bias, where its weight is tied", "a bias")
    named = chain.model.named_parameters(remove_duplicate=False)
    names = tuple(name for name, parameter in named if parameter is head.weight)
    return TiedTable(modules=modules, paths=tuple(users), names=names, layers=layers)


def _refuse_tied(name: str, users: str) -> NoReturn:
    _refuse(
        name,
        "a weight that the head and embeddings alone use",
        f"one that is tied: of {users}",
        f"untie it (tie_word_embeddings=False), or {_WHOLE}",
    )


def _refuse(which: str, expected: str, got: str, hint: str = _WHOLE) -> NoReturn:
    refuse(
        "the stages of a pipeline cannot share the head of this model",
        code="MODEL",
        where=_WHERE,
        which=which,
        expected=expected,
        got=got,
        hint=hint,
    )


def _has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


@dataclasses.dataclass(slots=True)
class ToHead:
    """A run of the last chunk up to its head."""

    hidden: torch.Tensor
    rows: torch.Tensor
    """of the flat hidden states, those whose tokens count"""
    targets: torch.Tensor
    factor: float
    """of the sum of the cross entropies"""
    constant: float
    """the loss is that product, and this"""
    parts: int = 1
    """so many ranks have a part of that product; the loss is their sum"""
    result: Any = None
    """what the model returned, with stand-ins for logits and the loss"""
    logits: list[tuple[torch.Tensor, torch.dtype]] = dataclasses.field(default_factory=list)
    """stand-ins: numbers of rows of the flat logits, with a last dimension of one; and the dtype of what they stand
    for"""
    losses: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)
    """stand-ins, and what they are at a cross entropy of one"""
    own_factor: float = 1.0
    """of the cross entropy itself: one over the rows that count, or one"""

    def filled(self, result: Any, logits: torch.Tensor, group: _C.Communicator | None) -> Any:
        """`result` without stand-ins. `logits`: [..., vocabulary]; `group`: the ranks that have parts of the loss."""
        flat = logits.flatten(0, -2)
        there = [(one, flat[one.squeeze(-1)].to(dtype)) for one, dtype in self.logits]
        if self.losses:
            sums = flat[self.rows].double() if flat.dtype == torch.float64 else flat[self.rows].float()
            entropy = self.own_factor * functional.cross_entropy(sums, self.targets, reduction="sum")
            if self.parts > 1:
                assert group is not None
                entropy = sum_of_parts(entropy, group)
            there += [(one, (one + (at_one - one) * entropy).to(sums.dtype)) for one, at_one in self.losses]
        return _replaced(result, there)


def _replaced(value: Any, there: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The same structure with other tensors in the place of some."""
    if isinstance(value, torch.Tensor):
        return next((other for one, other in there if one is value), value)
    if isinstance(value, Mapping):  # the outputs of transformers are such
        items = {key: _replaced(one, there) for key, one in value.items()}
        return type(value)(**items) if dataclasses.is_dataclass(value) else items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(one, there) for one in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_replaced(one, there) for one in value)
    return value


def run_to_head(
    chain: Chain,
    head: SharedHead,
    first: int,
    values: Any,
    batch: Any,
    loss_of: Callable[[Any], torch.Tensor | None],
    *,
    needs_loss: bool = True,
) -> ToHead:
    """Layers from `first` on, without the head. Raises Error MODEL for a loss that is no cross entropy of the head's
    output, by what it does with it. Without `needs_loss` a model that computes none has no rows that count."""
    tail = _Tail(head)
    try:
        if isinstance(chain, ListChain):
            result = _run_list(chain, tail, first, values, batch)
        else:
            assert isinstance(chain, BlockChain)
            with standing_in({head.module: tail.begin}):
                result = chain.run(first, len(chain.layers), values, batch)
    finally:
        tail.end()
    return tail.found(result, loss_of, needs_loss)


def _run_list(chain: ListChain, tail: "_Tail", first: int, values: Any, batch: Any) -> Any:
    assert chain.loss_fn is not None
    last = len(chain.layers) - 1
    if first < last:
        values = chain.run(first, last, values, batch)
    hidden, held = stashed.unpacked(values)
    stashed.Stash(held).require_empty()
    return chain.loss_fn(tail.begin(hidden), parts_of(batch)[1])


_ROW_VIEWS = {
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.reshape,
    torch.Tensor.flatten,
    torch.flatten,
    torch.Tensor.__getitem__,
}
_AS_THEY_ARE = {
    torch.Tensor.float,
    torch.Tensor.double,
    torch.Tensor.to,
    torch.Tensor.type,
    torch.Tensor.contiguous,
    torch.Tensor.type_as,
}
"""dtypes and devices: the loss is computed in float32, of float64 in float64, where the slices are"""
_SUMS = ("add", "radd", "iadd", "sub", "rsub", "isub", "neg", "negative", "sum", "mean", "squeeze", "view", "reshape")
_PRODUCTS = ("mul", "rmul", "imul", "multiply")
_QUOTIENTS = ("div", "truediv", "idiv", "itruediv", "divide", "true_divide")


class _Tail(TorchFunctionMode):
    """What runs after the head, with a tensor [..., 1] of row numbers in the place of the logits."""

    def __init__(self, head: SharedHead) -> None:
        super().__init__()
        self.head = head
        self.hidden: torch.Tensor | None = None
        self._logits: list[tuple[torch.Tensor, torch.dtype]] = []
        """the stand-in and what was made of it, with the dtypes of the logits; kept, so that ids stay theirs"""
        self._losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        """the result of the cross entropy and what was made of it, as if it were 0, and as if it were 1"""
        self._given: tuple[torch.Tensor, torch.Tensor, float] | None = None
        """rows, targets, and the factor of their sum"""
        self._parts = 1
        self._entered = False

    def begin(self, hidden: Any) -> torch.Tensor:
        """In the place of the head's call."""
        if self._entered:
            self._refuse("one call of the head", "two calls")
        if not isinstance(hidden, torch.Tensor) or not hidden.is_floating_point():
            self._refuse("a floating tensor as the input of the head", type(hidden).__name__)
        self.hidden = hidden.view_as(hidden)
        numbers = torch.arange(hidden[..., 0].numel(), device=hidden.device).view(*hidden.shape[:-1], 1)
        self._logits.append((numbers, hidden.dtype))
        self.__enter__()  # type: ignore[no-untyped-call]
        self._entered = True
        return numbers

    def end(self) -> None:
        """After the run, also one that failed."""
        if self._entered:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is sum_of_parts and self._at_one(args[0]) is not None:
            return self._sum_of_parts(*args)
        if any(self._at_one(one) is not None for one in (*args, *kwargs.values())):
            return self._of_loss(func, args, kwargs)
        if not any(self._is_logits(one) for one in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if func is functional.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func in _AS_THEY_ARE:
            return self._cast(func, args, kwargs)
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if func in _ROW_VIEWS:
            return self._view(func, args, kwargs)
        if name == "__get__" and owner in ("shape", "dtype", "device", "ndim", "is_meta", "layout", "requires_grad"):
            return self._shape(args[0]) if owner == "shape" else self._attribute(owner, func, args)
        if func in (torch.Tensor.size, torch.Tensor.dim, torch.Tensor.is_floating_point):
            return self._size(func, args, kwargs)
        self._refuse("views of rows, and torch.nn.functional.cross_entropy", owner if name == "__get__" else name)

    def _at_one(self, value: Any) -> torch.Tensor | None:
        return next((other for loss, other in self._losses if value is loss), None)

    def _of_loss(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Sums and products of the loss, for both of its values."""
        name = getattr(func, "__name__", str(func)).strip("_")
        if name == "get":
            return func(*args, **kwargs)
        if func in _AS_THEY_ARE or name == "detach":
            return args[0]
        at_one = [self._at_one(one) for one in args]
        count = sum(one is not None for one in at_one)
        linear = (name in _SUMS) or (name in _PRODUCTS and count == 1) or (name in _QUOTIENTS and at_one[0] is not None)
        if not linear or any(self._at_one(one) is not None for one in kwargs.values()):
            self._refuse("a loss that is the cross entropy times a number, plus a number", f"{name} of it")
        at_zero = func(*args, **kwargs)
        others = [one if other is None else other for one, other in zip(args, at_one, strict=True)]
        self._losses.append((at_zero, func(*others, **kwargs)))
        return at_zero

    def _sum_of_parts(self, part: torch.Tensor, group: _C.Communicator) -> torch.Tensor:
        """Of the loss: each rank of the group has the tokens of its own rows."""
        at_one = self._at_one(part)
        assert at_one is not None
        total = sum_of_parts(part, group)
        self._losses.append((total, total + (at_one - part)))
        self._parts *= group.size
        return total

    def _is_logits(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self._dtype_of(value) is not None

    def _dtype_of(self, value: torch.Tensor) -> torch.dtype | None:
        return next((dtype for one, dtype in self._logits if one is value), None)

    def _like(self, value: Any) -> Any:
        """In the place of logits whose dtype and device alone count."""
        return torch.empty(0, dtype=self._dtype_of(value), device=value.device) if self._is_logits(value) else value

    def _cast(self, func: Any, args: Any, kwargs: Any) -> Any:
        logits, *rest = args
        if not self._is_logits(logits):
            return func(logits, *map(self._like, rest), **kwargs)
        with torch._C.DisableTorchFunction():
            dtype = func(self._like(logits), *map(self._like, rest), **kwargs).dtype
            made = logits.view_as(logits)
        self._logits.append((made, dtype))
        return made

    def _attribute(self, name: str, func: Any, args: Any) -> Any:
        return self._dtype_of(args[0]) if name == "dtype" else func(*args)

    def _shape(self, logits: torch.Tensor) -> torch.Size:
        """As of whole logits."""
        with torch._C.DisableTorchFunction():
            return torch.Size([*logits.shape[:-1], self.head.vocabulary])

    def _size(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.Tensor.is_floating_point:
            return True
        if func is torch.Tensor.dim:
            return func(*args)
        shape = self._shape(args[0])
        where = args[1] if len(args) > 1 else kwargs.get("dim")
        return shape if where is None else shape[where]

    def _view(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        logits, *rest = args
        kept = True
        if func is torch.Tensor.__getitem__:
            kept = _keeps_last(rest[0], logits.dim())
        elif func in (torch.Tensor.flatten, torch.flatten):
            start = rest[0] if rest else kwargs.get("start_dim", 0)
            end = rest[1] if len(rest) > 1 else kwargs.get("end_dim", -1)
            kept = end % logits.dim() < logits.dim() - 1 or start % logits.dim() == logits.dim() - 1
        else:
            sizes = list(rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest)
            kept = not kwargs and bool(sizes) and sizes[-1] == self.head.vocabulary
            rest = [*sizes[:-1], 1]
        if not kept:
            self._refuse("rows of the logits, with all of their columns", func.__name__)
        made: torch.Tensor = func(logits, *rest, **kwargs)
        dtype = self._dtype_of(logits)
        assert dtype is not None
        self._logits.append((made, dtype))
        return made

    def _cross_entropy(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        logits, target = given.arguments["input"], given.arguments["target"]
        for name, value in given.arguments.items():
            usual = _SIGNATURE.parameters[name].default
            if name in ("weight", "size_average", "reduce", "label_smoothing") and value != usual:
                self._refuse(f"cross_entropy with {name}={usual}", value if name != "weight" else "weights")
        reduction = given.arguments["reduction"]
        if reduction not in ("mean", "sum"):
            self._refuse('cross_entropy with reduction="mean" or "sum"', reduction)
        if self._given is not None:
            self._refuse("one cross entropy", "two")
        if not self._is_logits(logits) or logits.dim() != 2 or target.dtype != torch.int64 or target.dim() != 1:
            self._refuse("logits [N, vocabulary], and int64 targets [N]", f"{_form(logits)} and {_form(target)}")
        assert self.hidden is not None
        if len(target) != len(logits):
            self._refuse(f"{len(logits)} targets, one for each row of logits", len(target))
        counts = target != given.arguments["ignore_index"]
        rows, targets = logits[:, 0][counts].contiguous(), target.to(logits.device)[counts].contiguous()
        number = len(targets)
        factor = 1.0 if reduction == "sum" else 1.0 / number if number > 0 else float("nan")
        self._given = rows, targets, factor
        zero = torch.zeros((), dtype=torch.float64, device=self.hidden.device)
        self._losses.append((zero, zero + 1))
        return zero

    def found(self, result: Any, loss_of: Callable[[Any], torch.Tensor | None], needs_loss: bool) -> ToHead:
        """`result`: what the run returned."""
        if self.hidden is None:
            self._refuse("a model that calls its head", "no call")
        if not needs_loss and self._given is None:
            none = torch.empty(0, dtype=torch.int64, device=self.hidden.device)
            return ToHead(self.hidden, none, none, 0.0, 0.0, result=result, logits=self._logits)
        loss = loss_of(result)
        at_one = self._at_one(loss)
        if self._given is None or loss is None or at_one is None:
            self._refuse("torch.nn.functional.cross_entropy of the logits as the loss", "no call of it")
        if loss.numel() != 1 or loss.requires_grad:
            self._refuse("a loss of the logits alone", "one of other values of the model")
        rows, targets, own = self._given
        return ToHead(
            self.hidden,
            rows,
            targets,
            own * (at_one - loss).item(),
            loss.item(),
            self._parts,
            result=result,
            logits=self._logits,
            losses=self._losses,
            own_factor=own,
        )

    def _refuse(self, expected: str, got: object) -> NoReturn:
        _refuse(f"{self.head.path}, what follows it", expected, str(got))


_SIGNATURE = inspect.signature(functional.cross_entropy)


def _form(value: Any) -> str:
    with torch._C.DisableTorchFunction():
        return f"{list(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def _keeps_last(index: Any, dims: int) -> bool:
    """Whether an index takes rows, and leaves the last dimension as it is."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(one is Ellipsis for one in parts):
        at = next(place for place, one in enumerate(parts) if one is Ellipsis)
        behind = parts[at + 1 :]
        if behind and not (isinstance(behind[-1], slice) and behind[-1] == slice(None)):
            return False
        parts = parts[:at] + behind[:-1]
    elif len(parts) == dims and isinstance(parts[-1], slice) and parts[-1] == slice(None):
        parts.pop()
    used = sum(
        0 if one is None else one.dim() if isinstance(one, torch.Tensor) and one.dtype == torch.bool else 1
        for one in parts
    )
    return used < dims
