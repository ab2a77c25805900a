"""A function of a long tensor, computed tile by tile and again in backward: autograd keeps the input, and no more.

Source: ALST, Bekman et al., Arctic Long Sequence Training, 2025, arXiv 2506.13996 (sequence tiling)."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from zeroth import _C
from zeroth.parallel.cuts import part_sizes

__all__ = ["TileFunction", "agree_on_tiles", "run_tiles", "wide_dtype"]

TileFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""from a tile of x to a tile of the result"""

_UNSEEN = "pass it in parameters=[...], or compute it inside of the function"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums over tiles are made: float32 for 16-bit values, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def agree_on_tiles(tiles: int | None, wanted: int, group: _C.Communicator | None) -> int:
    """The number of tiles that all ranks of a group use. `tiles`: this rank's choice, which must be that of all ranks;
    None: the most that any rank wants. One all_reduce of 24 bytes if there is a group of two or more. Raises Error
    USAGE for a number below 1; MISMATCH on all ranks if ranks chose different numbers."""
    if tiles is not None and tiles < 1:
        raise _C.make_error(
            "USAGE", "too few tiles", where="parallel.tiles", which="tiles", expected="1 or more", got=str(tiles)
        )
    if group is None or group.size == 1:
        return wanted if tiles is None else tiles
    chosen = tiles or 0
    said = torch.tensor([wanted, chosen, -chosen])
    most, largest, smallest = group.all_reduce(said, "max").tolist()
    if largest != -smallest:
        raise _C.make_error(
            "MISMATCH",
            "ranks cut the sequence into different numbers of tiles",
            where="parallel.tiles",
            who=f"rank {group.rank}/{group.size} of {group.name}",
            which="tiles",
            expected="the same number on all ranks of the group, or None on all of them",
            got=f"{tiles} here, {-smallest or None} to {largest} over the ranks",
        )
    return int(largest or most)


def run_tiles(
    fn: TileFunction,
    x: torch.Tensor,
    tiles: int,
    *,
    dim: int = -2,
    parameters: Sequence[torch.Tensor] = (),
    keep_empty: bool = False,
) -> torch.Tensor:
    """`fn` of x, tile after tile along `dim`: the same values and gradients as fn(x), up to the order of sums.

    `fn`: gives a tile's result, as long as the tile along `dim`; it may make calls between ranks. It runs once a tile
    in forward and once more in backward, with the same random numbers and the same autocast. `tiles`: slices as equal
    as can be; not more than x is long, unless `keep_empty` (ranks that must make the same calls). `parameters`: all
    tensors with a gradient that fn uses besides its tile. Each gets its gradient once, after the last tile; 16-bit ones
    are summed in float32.
    Memory: x, the result, and of one tile what fn keeps for backward. Raises Error USAGE in backward, by shape, if fn
    uses a tensor with a gradient that it does not know of; USAGE if a result is not as long as its tile."""
    dim = dim % x.dim() if x.dim() else 0
    count = tiles if keep_empty else max(1, min(tiles, x.size(dim)))
    trained = list({id(one): one for one in parameters if one.requires_grad}.values())
    result: torch.Tensor = _Tiled.apply(fn, part_sizes(x.size(dim), count), dim, x, *trained)
    return result


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fn: TileFunction, sizes: list[int], dim: int, x: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.fn, ctx.sizes, ctx.dim = fn, sizes, dim
        ctx.random = _random_state(x) if any(ctx.needs_input_grad) else None
        ctx.autocast = _autocast_state(x)
        ctx.save_for_backward(x)
        # Not saved tensors: what a checkpoint gives back for them are other objects than the ones that fn uses.
        ctx.parameters, ctx.versions = parameters, [one._version for one in parameters]
        result: torch.Tensor | None = None
        begin = 0
        for tile in torch.split(x, sizes, dim):
            part = fn(tile.contiguous())
            _require_length(part, tile, dim)
            if len(sizes) == 1:
                return part.clone() if part.data_ptr() == tile.data_ptr() else part
            if result is None:
                shape = list(part.shape)
                shape[dim] = x.size(dim)
                result = part.new_empty(shape)
            result.narrow(dim, begin, tile.size(dim)).copy_(part)
            begin += tile.size(dim)
            del part
        assert result is not None
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        parameters = list(ctx.parameters)
        _require_unwritten(parameters, ctx.versions)
        wants_x = ctx.needs_input_grad[3]
        of_x = torch.empty_like(x) if wants_x else None
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        begin = 0
        with _replayed(ctx.random, x), torch.enable_grad(), _autocast_as(ctx.autocast):
            for number, (tile, of_part) in enumerate(
                zip(torch.split(x, ctx.sizes, ctx.dim), torch.split(gradient, ctx.sizes, ctx.dim), strict=True)
            ):
                leaf = tile.detach().contiguous().requires_grad_(wants_x)
                part = ctx.fn(leaf)
                if number == 0:
                    _require_known(part, [leaf, *parameters])
                inputs = [leaf, *parameters] if wants_x else parameters
                grads = (
                    list(torch.autograd.grad(part, inputs, of_part, allow_unused=True)) if part.requires_grad else []
                )
                del part
                if of_x is not None:
                    own = grads.pop(0) if grads else None
                    into = of_x.narrow(ctx.dim, begin, tile.size(ctx.dim))
                    into.zero_() if own is None else into.copy_(own)
                for index, grad in enumerate(grads):
                    sums[index] = _added(sums[index], grad)
                begin += tile.size(ctx.dim)
        return (None, None, None, of_x, *sums)


def _added(total: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The sum, in the memory of the first that came."""
    if grad is None:
        return total
    if total is None:
        return grad.to(wide_dtype(grad.dtype))
    return total.add_(grad)


def _require_length(part: torch.Tensor, tile: torch.Tensor, dim: int) -> None:
    if isinstance(part, torch.Tensor) and part.dim() > dim and part.size(dim) == tile.size(dim):
        return
    raise _C.make_error(
        "USAGE",
        "the result of a tile is not as long as the tile",
        where="parallel.tiles",
        expected=f"a tensor with {tile.size(dim)} elements along dimension {dim}",
        got=f"shape {list(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__,
        hint="only functions that work on each position by itself can be tiled",
    )


def _require_known(part: torch.Tensor, known: Sequence[torch.Tensor]) -> None:
    """No gradient may be lost: every leaf behind a tile's result is one of `known`."""
    leaves = {id(one) for one in known}
    seen = {one.grad_fn for one in known if one.grad_fn is not None}  # given, though not leaves
    open_nodes = [part.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and id(leaf) not in leaves:
            raise _C.make_error(
                "USAGE",
                "a tile uses a tensor whose gradient would be lost",
                where="parallel.tiles",
                which=f"{type(leaf).__name__} of shape {list(leaf.shape)}",
                expected="only x and the given parameters have gradients",
                hint=_UNSEEN,
            )
        open_nodes += [below for below, _ in node.next_functions]


def _require_unwritten(parameters: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    for one, version in zip(parameters, versions, strict=True):
        if one._version != version:
            raise _C.make_error(
                "USAGE",
                "a parameter was written to between forward and backward",
                where="parallel.tiles",
                which=f"{type(one).__name__} of shape {list(one.shape)}",
                expected=f"version {version}",
                got=f"version {one._version}",
                hint="call backward before step()",
            )


def _random_state(x: torch.Tensor) -> list[torch.Tensor]:
    state = [torch.get_rng_state()]
    if x.is_cuda:
        state.append(torch.cuda.get_rng_state(x.device))
    return state


@contextlib.contextmanager
def _replayed(state: list[torch.Tensor] | None, x: torch.Tensor) -> Iterator[None]:
    """The random numbers of the forward; those of the program go on behind it as if there were no replay."""
    assert state is not None
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.set_rng_state(state[0])
        if x.is_cuda:
            torch.cuda.set_rng_state(state[1], x.device)
        yield


def _autocast_state(x: torch.Tensor) -> tuple[str, bool, torch.dtype, bool]:
    kind = x.device.type
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def _autocast_as(state: tuple[str, bool, torch.dtype, bool]) -> torch.autocast:
    kind, enabled, dtype, cache = state
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
