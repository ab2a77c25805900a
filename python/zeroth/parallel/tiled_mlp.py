"""MLPs over tiles of the sequence: their activations never exist for more than one tile."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroth import _C
from zeroth.parallel.tile_runs import TileFunction, agree_on_tiles, run_tiles

__all__ = ["TiledMlps", "default_tiles", "tile_mlps", "tiled_mlp"]

_NAMES = ("mlp", "feed_forward", "ffn", "feedforward", "ff")
"""what Hugging Face's models call the MLP of a block"""


def default_tiles(length: int, hidden: int) -> int:
    """ceil(s / h): a tile has about as many positions as features, so its activations are as large as a weight.
    ALST, section 3.1."""
    return max(1, -(-length // max(1, hidden)))


def tiled_mlp(
    mlp: nn.Module | TileFunction,
    x: torch.Tensor,
    tiles: int | None = None,
    *,
    parameters: Iterable[torch.Tensor] | None = None,
    group: _C.Communicator | None = None,
) -> torch.Tensor:
    """mlp(x), computed over `tiles` of the sequence, and again in backward: the values and gradients of mlp(x) up to
    the order of sums.

    `x`: [..., s, h]. `mlp`: works on each position by itself; a module, or a function together with the `parameters`
    that it uses. `tiles`: default ceil(s / h). `group`: ranks that must use the same number, because there are calls
    between ranks inside the MLP, or units of a ZeRO-3 engine: the most that any rank wants, and then a rank with a
    shorter sequence has empty tiles. One small all_reduce a call. One tile is a checkpoint of the whole MLP.
    Each parameter's gradient comes once, after the last tile. Raises Error as run_tiles() and agree_on_tiles()."""
    if x.dim() < 2:
        raise _C.make_error(
            "USAGE",
            "there is no sequence to cut into tiles",
            where="parallel.tiled_mlp",
            which="x",
            expected="[..., s, h]",
            got=f"shape {list(x.shape)}",
        )
    count = agree_on_tiles(tiles, default_tiles(x.size(-2), x.size(-1)), group)
    own = list(mlp.parameters()) if isinstance(mlp, nn.Module) else []
    keep_empty = group is not None and group.size > 1
    return run_tiles(mlp, x, count, parameters=[*own, *(parameters or ())], keep_empty=keep_empty)


class TiledMlps:
    """MLPs of a model that are tiled since tile_mlps(); undo() ends it."""

    def __init__(self, model: nn.Module, paths: Sequence[str], tiles: int | None, group: _C.Communicator | None):
        self.paths = tuple(paths)
        """of the tiled modules"""
        self.calls = 0
        """tiled calls so far, recomputed ones too"""
        self._tiles, self._group = tiles, group
        self._agreed: int | None = None
        self._modules = [model.get_submodule(path) for path in paths]
        for path, module in zip(paths, self._modules, strict=True):
            _require_free(path, module)
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._begin)]
        for module in self._modules:
            forward = module.forward
            module.forward = functools.wraps(forward)(functools.partial(self._call, module, forward))

    def undo(self) -> None:
        """The modules are as before."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            vars(module).pop("forward", None)
        self._modules = []

    def _begin(self, *_: object) -> None:
        self._agreed = None  # once a forward, not once an MLP: checkpoints that compute again make no call

    def _call(
        self, module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        if self._agreed is None:
            self._agreed = agree_on_tiles(self._tiles, default_tiles(x.size(-2), x.size(-1)), self._group)
        keep_empty = self._group is not None and self._group.size > 1
        return run_tiles(forward, x, self._agreed, parameters=list(module.parameters()), keep_empty=keep_empty)


def tile_mlps(
    model: nn.Module,
    tiles: int | None = None,
    *,
    mlps: Sequence[nn.Module] | None = None,
    group: _C.Communicator | None = None,
) -> TiledMlps:
    """Switches tiled_mlp() on in a model, without a change to it: before or after an engine is built around it.

    `mlps`: the modules, each called with one tensor [..., s, h]; default: all submodules called mlp, feed_forward, ffn,
    feedforward or ff, as in the decoders of Hugging Face. `tiles`, `group`: as tiled_mlp(); ranks agree once a forward
    of the model. Raises Error USAGE if there is none, for a module that is tiled already, and in its call for one that
    gives no tensor (experts with a router). Without a `group`, ranks that share the MLPs' matrices agree."""
    if mlps is None:
        paths = [
            path
            for path, module in model.named_modules()
            if path.rpartition(".")[2] in _NAMES and next(module.parameters(), None) is not None
        ]
    else:
        chosen = {id(module) for module in mlps}
        paths = [path for path, module in model.named_modules() if id(module) in chosen]
    if not paths or (mlps is not None and len(paths) != len({id(module) for module in mlps})):
        raise _C.make_error(
            "USAGE",
            "these MLPs are not in the model",
            where="parallel.tile_mlps",
            expected="modules of the model" if mlps is not None else f"submodules called {', '.join(_NAMES)}",
            got=f"{len(paths)} found in {type(model).__name__}",
            hint="name them: tile_mlps(model, mlps=[...])",
        )
    return TiledMlps(model, paths, tiles, group or _group_inside(model, paths))


def _group_inside(model: nn.Module, paths: Sequence[str]) -> _C.Communicator | None:
    """The ranks that share matrices of the MLPs."""
    groups = (getattr(one, "group", None) for path in paths for one in model.get_submodule(path).modules())
    return next((group for group in groups if isinstance(group, _C.Communicator)), None)


def _require_free(path: str, module: nn.Module) -> None:
    if "forward" in vars(module):
        raise _C.make_error(
            "USAGE",
            "the forward of a module is replaced already",
            where="parallel.tile_mlps",
            which=path,
            hint="undo() the first tile_mlps()",
        )
