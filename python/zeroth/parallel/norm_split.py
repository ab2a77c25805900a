"""Norms, dropouts and residual sums on slices of the sequence, between the layers that ranks share.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2. The sum
behind a row-parallel layer becomes a reduce_scatter along the sequence, and in front of the next column-parallel layers
comes an all_gather: together the bytes of the sum.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from zeroth import _C, _boxes
from zeroth._C import all_gather, gather_from_group, reduce_scatter, slice_sizes, split_to_group
from zeroth.parallel._random import mixed
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.norm_plan import NormPlan
from zeroth.parallel.tensor import ColumnLinear, RowLinear, SharedInput

__all__ = ["SplitNorms"]

_WHERE = "parallel.forward"


class SplitNorms:
    """A model whose blocks work on slices of the sequence: [B, S, size] is cut along S, as slice_sizes() does, in front
    of the first block, and made whole behind the last norm. Attention and MLP gather their input and scatter their
    sum. Parameters in between get parts of their gradients, which the engine sums over the ranks."""

    def __init__(self, model: nn.Module, group: _C.Communicator, axis: str, plan: NormPlan) -> None:
        """The layers of `plan` are shared already. `axis`: name of the group in the mesh."""
        self.group = group
        self._batch = 0
        self._sizes: list[int] | None = None
        """tokens of each rank, inside of a forward"""
        self._region: tuple[int, list[int]] = (1, [])
        """dimension and tokens of each rank, of what was gathered last"""
        self._random: torch.Tensor | None = None
        self.is_aside = False
        """no module is given the whole sequence: it has it"""
        for region in plan.regions:
            columns = [_layer(model, name, ColumnLinear) for name in region.columns]
            entry = _GatheredInput(model.get_submodule(region.entry), self, region.apart)
            for column in columns:
                column.shared_input = entry
            row = _layer(model, region.row, RowLinear)
            row.leave = self.leave
            if region.whole_input:
                model.get_submodule(region.entry).register_forward_pre_hook(entry.enter_first, with_kwargs=True)
        for name in plan.parts:
            _boxes.put_box(model.get_parameter(name), _C.ParameterBox(summed=[axis]))
        model.get_submodule(plan.first).register_forward_pre_hook(self._begin, with_kwargs=True)
        model.get_submodule(plan.last).register_forward_hook(self._end)
        model.get_submodule(plan.around).register_forward_hook(self._stop, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitNorms":
        """Groups are not copied; nothing is kept beyond a forward."""
        return self

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In here blocks run as they are without slices."""
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False

    def whole_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of a block, from those with this rank's slice. No gradient flows."""
        return _with_first(args, kwargs, lambda x: gather_from_group(x, 1, self.group, self._sizes))

    def own_output(self, output: Any) -> Any:
        """This rank's slice of what a block gives, from the whole."""

        def cut(whole: torch.Tensor) -> torch.Tensor:
            return split_to_group(whole, 1, self.group, self._sizes)

        return cut(output) if isinstance(output, torch.Tensor) else (cut(output[0]), *output[1:])

    def enter(self, x: torch.Tensor, apart: bool) -> torch.Tensor:
        """x, this rank's slice, whole. Its gradient is the slice of the sum of what the ranks compute. `apart`: tokens
        may come in any order. So they do where a block has made [B n, size] of [B, n, size]; leave() knows that."""
        if x.dim() == 2 and not apart:
            self._refuse("an attention is not given a sequence", "[batch, tokens, size]", x, "whole norms")
        self._region = self._slices_of(x)
        return all_gather(x, self._region[0], self.group, self._region[1])

    def leave(self, parts: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the sum over the ranks."""
        dim, sizes = self._region
        if parts.dim() != dim + 2 or parts.shape[dim] != sum(sizes):
            self._refuse(
                "a layer that ranks share does not give the whole sequence",
                f"{sum(sizes)} tokens",
                parts,
                "tiles of a sequence and calls from outside of the blocks need whole norms",
            )
        return reduce_scatter(parts, dim, self.group, sizes)

    def _slices_of(self, x: torch.Tensor) -> tuple[int, list[int]]:
        """Dimension, and tokens of each rank. Computed again for backward, x may be of another forward: ranks ask."""
        dim = x.dim() - 2
        if dim in (0, 1) and _is_recomputed():
            return dim, self.group.all_gather(torch.tensor([x.shape[dim]])).tolist()
        sizes = [(self._batch if dim == 0 else 1) * size for size in self._sizes or ()]
        if not sizes or dim not in (0, 1) or x.shape[dim] != sizes[self.group.rank]:
            self._refuse(
                "a block was not given this rank's slice of the sequence",
                "[batch, tokens, size] from the first block on" + (f", {sizes} tokens" if sizes else ""),
                x,
                "whole norms for models that call blocks in other ways",
            )
        return dim, sizes

    def _refuse(self, message: str, expected: str, got: torch.Tensor, hint: str) -> NoReturn:
        refuse(
            message,
            where=_WHERE,
            who=who(self.group),
            which='norms="split"',
            expected=expected,
            got=list(got.shape),
            hint=hint,
        )

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        def cut(x: torch.Tensor) -> torch.Tensor:
            if x.dim() != 3:
                self._refuse("the first block is not given a sequence", "[batch, sequence, size]", x, "whole norms")
            sizes = slice_sizes(x.shape[1], self.group.size)
            if not _is_recomputed():
                self._batch, self._sizes = x.shape[0], sizes
            return split_to_group(x, 1, self.group, sizes)

        if module.training:
            self._draw_apart()
        return _with_first(args, kwargs, cut)

    # A stage of a pipeline that has not the first block needs to know the slices, too.
    _begin.zeroth_stages = True  # type: ignore[attr-defined]

    def _draw_apart(self) -> None:
        """Dropouts of slices differ on the ranks, and follow from the generator that all have alike."""
        seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
        if not _is_recomputed():  # else checkpointing restores it
            self._random = torch.get_rng_state()
        torch.default_generator.manual_seed(mixed(seed, self.group.rank))

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._sizes is None and not _is_recomputed():  # called from elsewhere
            return None
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        whole = gather_from_group(hidden, 1, self.group, self._slices_of(hidden)[1])
        if not _is_recomputed():
            self._stop()
        return whole if isinstance(output, torch.Tensor) else (whole, *output[1:])

    def _stop(self, *_: Any) -> None:
        self._sizes = None
        if self._random is not None:
            torch.set_rng_state(self._random)
            self._random = None


class _GatheredInput(SharedInput):
    """The input of column layers, gathered once for all of them."""

    def __init__(self, entry: nn.Module, norms: SplitNorms, apart: bool) -> None:
        super().__init__(entry, norms.group)
        self._norms = norms
        self._apart = apart
        self._whole: list[torch.Tensor] = []

    def enter_first(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A hook: the module gets the whole sequence."""
        if self._norms.is_aside:
            return args, kwargs

        def gather(x: torch.Tensor) -> torch.Tensor:
            self._whole = [self._norms.enter(x, self._apart)]
            return self._whole[0]

        return _with_first(args, kwargs, gather)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if self._whole:  # gathered at the begin of the module: whatever it has made of it is whole
            return x
        return super().enter(x)

    def _entered_of(self, x: torch.Tensor) -> torch.Tensor:
        return self._norms.enter(x, self._apart)

    def _end(self, *_: Any) -> None:
        super()._end()
        self._whole.clear()


def _is_recomputed() -> bool:
    """Whether this is inside of backward: activation checkpointing."""
    return torch._C._current_graph_task_id() != -1


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with its first tensor changed: the hidden states."""
    for number, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            return (*args[:number], change(value), *args[number + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            return args, {**kwargs, name: change(value)}
    refuse("a module was called without hidden states", where=_WHERE, which='norms="split"', got=list(kwargs))


def _layer(model: nn.Module, name: str, kind: Any) -> Any:
    layer = model.get_submodule(name)
    assert isinstance(layer, kind), name
    return layer
