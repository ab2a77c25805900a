"""Linear layers and embeddings in tiles, each a unit of its own: at ZeRO stage 3 one tile is gathered at a time.

Ref: Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1.3 (memory-centric tiling).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroth import _C

__all__ = [
    "InTiles",
    "TiledEmbedding",
    "TiledLinear",
    "put_in_tiles",
    "tile",
    "tile_units",
    "tiled_state_dict",
    "tiles_of_tables",
    "untile",
    "untiled_state_dict",
    "uses_of_tiles",
]

_WHERE = "python.tiled"


class Tile(nn.Module):
    """A part of a matrix, and of a bias. Called as a linear layer, or for rows by number; so the tiles of an embedding
    may be those of the head, too."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, trains: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trains)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=trains)

    def forward(self, x: torch.Tensor, rows: bool = False, padding_idx: int | None = None) -> torch.Tensor:
        if rows:
            return functional.embedding(x, self.weight, padding_idx)
        return functional.linear(x, self.weight, self.bias)


class _Tiled(nn.Module):
    """A matrix [out, in] in tiles, row by row."""

    def __init__(self, tiles: Sequence[Tile], out_sizes: Sequence[int], in_sizes: Sequence[int]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.out_sizes, self.in_sizes = tuple(out_sizes), tuple(in_sizes)

    def whole_weight(self) -> torch.Tensor:
        """The matrix, [out, in]; a copy, without gradient. Not inside an engine of stage 3, whose tiles have no
        memory between uses."""
        return _joined(self, {name: value.detach() for name, value in self.named_parameters(remove_duplicate=False)})[
            "weight"
        ]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes the names of the plain layer, too."""
        plain = {name: state_dict.pop(prefix + name) for name in ("weight", "bias") if prefix + name in state_dict}
        if plain:
            parts = _parted(self, plain)
            for name, parameter in self.named_parameters(remove_duplicate=False):
                if name in parts:
                    with torch.no_grad():
                        parameter.copy_(parts[name])
                    state_dict[prefix + name] = parts[name]
        super()._load_from_state_dict(state_dict, prefix, *rest)


class TiledLinear(_Tiled):
    """nn.Linear in out_splits x in_splits tiles.

    x: [..., in_features]; returns [..., out_features]. With one part along `in` each
    output is the sum that nn.Linear forms, with several ((x_0 W_0 + b) + x_1 W_1) + ...; equal up to the order in which
    the matrix products add. At ZeRO stage 3 each tile is
    gathered by itself, so the largest gathered piece falls by the number of tiles. Parameters: `tiles.N.weight`, row by
    row, `tiles.N.bias` in the first tile of each row; load_state_dict() takes `weight` and `bias`, too."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initial values are drawn as nn.Linear's, tile by tile. Raises Error USAGE for more tiles than rows or
        columns."""
        out_sizes, in_sizes = (
            _sizes(out_features, out_splits, "out_splits"),
            _sizes(in_features, in_splits, "in_splits"),
        )
        bound = 1.0 / math.sqrt(in_features) if in_features > 0 else 0.0
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        tiles = []
        for rows in out_sizes:
            for column, columns in enumerate(in_sizes):
                has_bias = bias and column == 0
                one = Tile(torch.empty(rows, columns, **made), torch.empty(rows, **made) if has_bias else None)
                for parameter in one.parameters():
                    nn.init.uniform_(parameter, -bound, bound)
                tiles.append(one)
        super().__init__(tiles, out_sizes, in_sizes)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, in_splits: int = 1, out_splits: int = 1) -> "TiledLinear":
        """The tiles are copies, in the layer's dtype, device and training state of its parameters."""
        made = cls.__new__(cls)
        out_sizes = _sizes(linear.out_features, out_splits, "out_splits")
        in_sizes = _sizes(linear.in_features, in_splits, "in_splits")
        _Tiled.__init__(made, _tiles_of(linear, out_sizes, in_sizes), out_sizes, in_sizes)
        return made.train(linear.training)

    @classmethod
    def tied_to(cls, embedding: "TiledEmbedding") -> "TiledLinear":
        """A head without bias whose matrix is that of the embedding: the same tiles."""
        made = cls.__new__(cls)
        _Tiled.__init__(made, list(embedding.tiles), embedding.out_sizes, embedding.in_sizes)  # type: ignore[arg-type]
        return made.train(embedding.training)

    @property
    def in_features(self) -> int:
        """Size of the last dimension of inputs."""
        return sum(self.in_sizes)

    @property
    def out_features(self) -> int:
        """Size of the last dimension of outputs."""
        return sum(self.out_sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, list(self.in_sizes), -1) if len(self.in_sizes) > 1 else (x,)
        outputs, tiles = [], iter(self.tiles)
        for _ in self.out_sizes:
            total = next(tiles)(parts[0])
            for part in parts[1:]:
                total = total + next(tiles)(part)
            outputs.append(total)
        return torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]

    def to_linear(self) -> nn.Linear:
        """A plain layer with copies of the values. Not inside an engine of stage 3."""
        first = self.tiles[0]
        linear = nn.Linear(
            self.in_features,
            self.out_features,
            first.bias is not None,
            device=first.weight.device,
            dtype=first.weight.dtype,
        )
        return _filled(linear, self)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.tiles[0].bias is not None}, "
            f"in_splits={len(self.in_sizes)}, out_splits={len(self.out_sizes)}"
        )


class TiledEmbedding(_Tiled):
    """nn.Embedding in tiles of rows.

    x: integers, any shape; returns [*x.shape, embedding_dim], with the bits of nn.Embedding, gradients too. All tiles
    are called in every forward, so that ranks with other tokens gather alike. Parameters: `tiles.N.weight`;
    load_state_dict() takes `weight`, too."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        splits: int = 1,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Initial values are drawn as nn.Embedding's, tile by tile. Raises Error USAGE for more tiles than rows."""
        sizes = _sizes(num_embeddings, splits, "splits")
        tiles = [Tile(torch.empty(rows, embedding_dim, device=device, dtype=dtype), None) for rows in sizes]
        super().__init__(tiles, sizes, [embedding_dim])
        self.padding_idx = padding_idx
        for one in tiles:
            nn.init.normal_(one.weight)
        if padding_idx is not None:
            index, local = _place(sizes, padding_idx)
            with torch.no_grad():
                tiles[index].weight[local].zero_()

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, *, splits: int = 1) -> "TiledEmbedding":
        """The tiles are copies. Raises Error USAGE for max_norm, scale_grad_by_freq and sparse."""
        _require_plain(embedding)
        made = cls.__new__(cls)
        sizes, width = _sizes(embedding.num_embeddings, splits, "splits"), [embedding.embedding_dim]
        _Tiled.__init__(made, _tiles_of(embedding, sizes, width), sizes, width)
        made.padding_idx = embedding.padding_idx
        return made.train(embedding.training)

    @property
    def num_embeddings(self) -> int:
        """Rows of the whole matrix."""
        return sum(self.out_sizes)

    @property
    def embedding_dim(self) -> int:
        """Columns of the matrix."""
        return self.in_sizes[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _looked_up(self.tiles, self.out_sizes, x, self.padding_idx)

    def to_embedding(self) -> nn.Embedding:
        """A plain layer with copies of the values. Not inside an engine of stage 3."""
        weight = self.tiles[0].weight
        made = nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            device=weight.device,
            dtype=weight.dtype,
        )
        return _filled(made, self)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, splits={len(self.out_sizes)}"


class InTiles(nn.Embedding):
    """What put_in_tiles() makes of an embedding: its forward, on tiles."""

    tiles: nn.ModuleList
    tile_rows: tuple[int, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _looked_up(self.tiles, self.tile_rows, x, self.padding_idx)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        raise _C.make_error(
            "MODEL",
            "the matrix of an embedding in tiles is read as a whole",
            where=_WHERE,
            which=type(self).__name__,
            expected="calls of the embedding alone",
            hint="engine.full(name) has the whole matrix",
        )


@functools.cache
def _in_tiles(kind: Any) -> Any:
    """A class whose base is the given one, and whose look-up is that of tiles: the forward of a class that scales, say,
    calls nn.Embedding's for it."""
    bases = (InTiles,) if kind is nn.Embedding else (kind, InTiles)
    return type(kind.__name__, bases, {"__module__": kind.__module__})


def put_in_tiles(embedding: nn.Embedding, tiles: nn.ModuleList, rows: Sequence[int]) -> None:
    """Makes an embedding look its rows up in `tiles` of so many `rows`, or of fewer on ranks that do not call it. It
    stays the same object, with its hooks. Embeddings that share their matrix may share tiles."""
    del embedding._parameters["weight"]
    embedding.add_module("tiles", tiles)
    embedding.tile_rows = tuple(rows)  # type: ignore[assignment]
    object.__setattr__(embedding, "__class__", _in_tiles(type(embedding)))  # type: ignore[arg-type]


def tile(model: nn.Module, *, larger_than: int, cut: str = "out") -> list[str]:
    """Puts TiledLinear and TiledEmbedding in the place of every nn.Linear and nn.Embedding inside of `model` whose
    matrix has more than `larger_than` bytes, in as few tiles as make each at most so large. Returns their paths.

    `cut`: along "out" (the sums of nn.Linear) or "in" of linear layers. Embeddings and layers that share a matrix are
    cut along its rows, and share tiles. Before an engine is built. Subclasses stay, and layers whose parameters
    somebody else uses by name. Raises Error USAGE for values that ask for nothing possible."""
    if larger_than < 1 or cut not in ("out", "in"):
        raise _usage(
            "there is no such tiling",
            "larger_than and cut",
            'at least 1 byte, "out" or "in"',
            f"{larger_than}, {cut!r}",
        )
    uses: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) in (nn.Linear, nn.Embedding) and path and not _inside_others(model, path):
            uses.setdefault(id(module.weight), []).append((path, module))
    others = _uses_elsewhere(model)
    done = []
    for users in uses.values():
        weight: torch.Tensor = users[0][1].weight  # type: ignore[assignment]
        if weight.nbytes <= larger_than or id(weight) in others:
            continue
        for path, made in _made(users, larger_than, cut):
            _put(model, path, made)
            done.append(path)
    order = {path: number for number, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return sorted(done, key=order.__getitem__)


def untile(model: nn.Module) -> list[str]:
    """Undoes tile(), with the values that the tiles have now. Returns the paths. Matrices that were shared are shared
    again. Not inside an engine: after close()."""
    plain: dict[int, nn.Parameter] = {}
    done = []
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, _Tiled) or not path:
            continue
        made: nn.Linear | nn.Embedding
        if isinstance(module, TiledLinear):
            made = module.to_linear()
        else:
            assert isinstance(module, TiledEmbedding)
            made = module.to_embedding()
        weight = made.weight
        assert isinstance(weight, nn.Parameter)
        made.weight = plain.setdefault(id(module.tiles[0]), weight)
        _put(model, path, made)
        done.append(path)
    return done


def untiled_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """`state`, default model.state_dict(), with the names and matrices of the plain layers: what a model without tiles
    loads. For engine.state_dict(), too, on ranks that have whole values."""
    state = model.state_dict() if state is None else state
    result = dict(state)
    for prefix, module in _tiled_modules(model):
        names = {name: prefix + name for name, _ in module.named_parameters(remove_duplicate=False)}
        if not all(name in result for name in names.values()):
            continue
        whole = _joined(module, {name: result[full] for name, full in names.items()})
        for full in names.values():
            del result[full]
        result.update({prefix + name: value for name, value in whole.items()})
    return result


def tiled_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of untiled_state_dict(): a state of the plain model with the names of `model`. The values are views
    of those in `state`."""
    result = dict(state)
    for prefix, module in _tiled_modules(model):
        plain = {name: result.pop(prefix + name) for name in ("weight", "bias") if prefix + name in result}
        result.update({prefix + name: value for name, value in _parted(module, plain).items()})
    return result


def tile_units(model: nn.Module) -> dict[str, nn.Module]:
    """The tiles of a model, by path: each is a unit of an engine."""
    return {
        f"{prefix}tiles.{number}": one
        for prefix, module in _modules_of(model, (_Tiled, InTiles))
        for number, one in enumerate(module.tiles)
    }


def uses_of_tiles(model: nn.Module) -> Counter[int]:
    """By the id of a tile, how many layers have it: two where a head shares its matrix with the embedding."""
    layers = (module for module in model.modules() if isinstance(module, (_Tiled, InTiles)))
    return Counter(id(one) for layer in layers for one in layer.tiles)


def tiles_of_tables(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of the tiles that some of the modules look rows up in, and no linear layer among them has."""
    tables: set[int] = set()
    others: set[int] = set()
    for module in modules:
        if isinstance(module, (_Tiled, InTiles)):
            (others if isinstance(module, TiledLinear) else tables).update(map(id, module.tiles))
    return tables - others


def _tiled_modules(model: nn.Module) -> Iterator[tuple[str, _Tiled]]:
    return _modules_of(model, (_Tiled,))


def _modules_of(model: nn.Module, kinds: tuple[type[Any], ...]) -> Iterator[tuple[str, Any]]:
    """With the prefix of the names of what they have."""
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kinds):
            yield f"{path}." if path else "", module


def _sizes(elements: int, splits: int, name: str) -> list[int]:
    if not 1 <= splits <= elements:
        raise _usage("a matrix cannot be cut so often", name, f"1 to {elements}", str(splits))
    return [elements // splits + (number < elements % splits) for number in range(splits)]


def _parts(module_sizes: tuple[Sequence[int], Sequence[int]]) -> Iterator[tuple[int, slice, slice]]:
    """Of each tile its number, rows and columns."""
    number, first_row = 0, 0
    for rows in module_sizes[0]:
        first_column = 0
        for columns in module_sizes[1]:
            yield number, slice(first_row, first_row + rows), slice(first_column, first_column + columns)
            first_column += columns
            number += 1
        first_row += rows


def _parted(module: _Tiled, plain: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Values of a plain layer, as views by the names of the tiles."""
    parts = {}
    for number, rows, columns in _parts((module.out_sizes, module.in_sizes)):
        if "weight" in plain:
            parts[f"tiles.{number}.weight"] = plain["weight"][rows, columns]
        if "bias" in plain and columns.start == 0:
            parts[f"tiles.{number}.bias"] = plain["bias"][rows]
    return parts


def _joined(module: _Tiled, tiles: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    count = len(module.in_sizes)
    rows = [
        torch.cat([tiles[f"tiles.{row * count + column}.weight"] for column in range(count)], 1)
        for row in range(len(module.out_sizes))
    ]
    whole = {"weight": torch.cat(rows)}
    if "tiles.0.bias" in tiles:
        whole["bias"] = torch.cat([tiles[f"tiles.{row * count}.bias"] for row in range(len(rows))])
    return whole


def _tiles_of(module: nn.Module, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> list[Tile]:
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, torch.Tensor)
    tiles = []
    for _, rows, columns in _parts((out_sizes, in_sizes)):
        own = bias.detach()[rows].clone() if bias is not None and columns.start == 0 else None
        one = Tile(weight.detach()[rows, columns].clone(), own, weight.requires_grad)
        if one.bias is not None and bias is not None:
            one.bias.requires_grad_(bias.requires_grad)
        tiles.append(one)
    return tiles


def _filled(plain: nn.Module, tiled: _Tiled) -> nn.Module:
    values = {name: value.detach() for name, value in tiled.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        for name, value in _joined(tiled, values).items():
            parameter = getattr(plain, name)
            parameter.copy_(value)
            parameter.requires_grad_(getattr(tiled.tiles[0], name).requires_grad)
    return plain.train(tiled.training)


def _made(users: Sequence[tuple[str, nn.Module]], larger_than: int, cut: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules in tiles for the users of one matrix."""
    tied = len({id(module) for _, module in users}) > 1
    made: dict[int, _Tiled] = {}
    tiles: nn.ModuleList | None = None
    for path, module in users:
        if id(module) not in made:
            weight: torch.Tensor = module.weight  # type: ignore[assignment]
            along_in = cut == "in" and isinstance(module, nn.Linear) and not tied
            lines, across = reversed(weight.shape) if along_in else weight.shape
            each = max(1, larger_than // (across * weight.element_size()))
            count = -(-lines // each)
            if isinstance(module, nn.Linear):
                own: _Tiled = TiledLinear.from_linear(module, **{"in_splits" if along_in else "out_splits": count})
            else:
                own = TiledEmbedding.from_embedding(module, splits=count)  # type: ignore[arg-type]
            if tied:
                tiles = own.tiles if tiles is None else tiles
                own.tiles = tiles
            made[id(module)] = own
        yield path, made[id(module)]


def _uses_elsewhere(model: nn.Module) -> set[int]:
    """Ids of parameters that a module uses which cannot be tiled, or whose tiles could not be shared."""
    kinds = (nn.Linear, nn.Embedding)
    elsewhere = set()
    with_bias: dict[int, set[int]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if type(module) not in kinds or name not in ("weight", "bias") or not path or _inside_others(model, path):
                elsewhere.add(id(parameter))
        if type(module) in kinds:
            if isinstance(module, nn.Embedding) and not _is_plain(module):
                elsewhere.add(id(module.weight))
            with_bias.setdefault(id(module.weight), set()).add(id(getattr(module, "bias", None)))
    return elsewhere | {weight for weight, biases in with_bias.items() if len(biases) > 1}


def _inside_others(model: nn.Module, path: str) -> bool:
    """Inside of what uses its parts' parameters without calling them: nn.MultiheadAttention's out_proj."""
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:count])) for count in range(len(names))]
    return any(isinstance(module, (nn.MultiheadAttention, _Tiled)) for module in around)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _is_plain(embedding: nn.Embedding) -> bool:
    return embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse


def _require_plain(embedding: nn.Embedding) -> None:
    if not _is_plain(embedding):
        raise _usage(
            "an embedding with such options has no tiles",
            "max_norm, scale_grad_by_freq, sparse",
            "none of them",
            repr(embedding),
        )


def _looked_up(tiles: nn.ModuleList, sizes: Sequence[int], x: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """Rows of a matrix in tiles of so many rows. All tiles are called."""
    flat = x.reshape(-1)
    _require_inside(flat, sum(sizes))
    padding = None if padding_idx is None else _place(sizes, padding_idx)
    outputs, places, first = [], [], 0
    for index, rows in enumerate(sizes):
        if flat.is_meta:  # for shapes alone: the first tile has all
            here = flat if first == 0 else flat[:0]
        else:
            here = ((flat >= first) & (flat < first + rows)).nonzero().squeeze(-1)
        own = padding[1] if padding is not None and padding[0] == index else None
        outputs.append(tiles[index](flat[here] - first, rows=True, padding_idx=own))
        places.append(here)
        first += rows
    order = torch.cat(places).argsort()
    found = torch.cat(outputs)
    return found[order].view(*x.shape, found.shape[1])


def _place(sizes: Sequence[int], row: int) -> tuple[int, int]:
    """The tile of a row, and its number there."""
    row %= sum(sizes)
    for index, rows in enumerate(sizes):
        if row < rows:
            return index, row
        row -= rows
    raise AssertionError(row)


def _require_inside(rows: torch.Tensor, count: int) -> None:
    if rows.numel() > 0 and not rows.is_meta and not bool(((rows >= 0) & (rows < count)).all()):
        raise IndexError(f"index out of range in an embedding of {count} rows: {int(rows.min())} to {int(rows.max())}")


def _usage(message: str, which: str, expected: str, got: str) -> _C.Error:
    return _C.make_error("USAGE", message, where=_WHERE, which=which, expected=expected, got=got)
