"""Whether a block whose sequences ranks share computes what it computes with whole ones, where no rank can run the
whole model: in a stage of a pipeline. A few tokens of each rank, as the block is given them, are taken for a sequence.

    the first tokens of each rank --+-- as it is -------------------------> outputs, gathered
                                    |                                           | compared
                                    +-- gathered, with a group of one rank --> outputs
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroth import _C
from zeroth.parallel import layout as layouts
from zeroth.parallel.cut import layout_of_sample
from zeroth.parallel.hf_attention import SplitMask
from zeroth.parallel.layout import SequenceLayout
from zeroth.parallel.masks import SequenceMask
from zeroth.parallel.split import SplitModel
from zeroth.parallel.verify_runs import (
    BOUND,
    Result,
    any_of_ranks,
    aside,
    copied,
    could_not_run,
    difference_of,
    floats_of,
    is_of_transport,
    largest_of_ranks,
    lent,
    substitute,
    wide,
)
from zeroth.parallel.verify_sequence import TOKENS, refuse_split
from zeroth.parallel.verify_talks import gathered, give_own_tokens, has_tokens, talking

__all__ = ["StageCheck"]


class StageCheck:
    """Of one block. A call of all ranks of `agree`, which run it together. `alone`: a group of this rank."""

    def __init__(
        self,
        path: str,
        block: nn.Module,
        split: SplitModel,
        meshes: Sequence[_C.Mesh],
        agree: _C.Communicator,
        alone: _C.Communicator,
    ) -> None:
        self.path = path
        self.block = block
        self._split = split
        self._group = split.group
        self._meshes = meshes
        self._agree = agree
        self._alone = alone

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """Raises Error MODEL on all ranks where the outputs differ."""
        length = min(min(self._split.layout.lengths), TOKENS) * self._group.size
        padded, layout, outer = layout_of_sample(length, self._split.binding, self._split.kind)
        if padded != length or len({*layout.lengths}) != 1:
            return Result(left_out="the ranks have too few tokens")
        try:
            inputs = copied(self._short((args, kwargs), layout, outer), wide)
            values = {
                id(one): substitute(wide(one.detach()), number) for number, one in enumerate(self.block.parameters())
            }
        except Exception as error:
            return Result(left_out=f"its arguments or parameters cannot be copied: {type(error).__name__}: {error}")
        named = dict(self.block.named_modules(prefix=self.path))
        with aside(self.block), lent(self.block.modules(), values, wide):
            inside = {path: module for path, module in named.items() if path != self.path}
            talks = talking(inside, lambda: self._run(inputs), self._meshes, self._split.binding, self._agree)
            with self._capturing(named) as got, _failing() as errors:
                self._run(inputs)
            with self._whole(talks, named, layout), self._capturing(named) as expected, _failing() as problems:
                self._run(self._gathered(inputs, layout))
            with self._whole(talks, named, layout), self._capturing(named) as other, _failing():
                self._run(self._gathered(inputs, layout), 2)
            draws = bool(expected) and any(difference_of(expected[path], other[path]) > BOUND for path in other)
            refused = any(isinstance(one, _C.Error) for one in errors)  # the forward itself may be refused, too
            failed, unknown, drawn = any_of_ranks(self._agree, bool(errors), bool(problems or refused), draws)
            if unknown:
                return Result(left_out=could_not_run(next(iter(problems or errors), None)))
            if drawn:
                return Result(left_out="it draws random numbers in an evaluation")
            found = self._differences(expected, got, layout)
        if not failed and self.path not in found:
            return Result(left_out="what it returns is not of tokens")
        worst = found.get(self.path, 0.0)
        if failed or worst > BOUND:
            self._fail(found, named, errors[0] if errors else None)
        return Result(worst)

    def _fail(self, found: dict[str, float], named: dict[str, nn.Module], error: Exception | None) -> NoReturn:
        path = next((path for path, difference in found.items() if difference > BOUND), self.path)
        refuse_split(path, named[path], self._group, BOUND, found.get(path, 0.0), error)

    def _short(self, value: Any, layout: SequenceLayout, outer: SequenceLayout) -> Any:
        """The first tokens of the first row, as if they were all."""
        own, count = self._split.layout.lengths[self._group.rank], layout.lengths[0]

        def short(one: Any) -> Any:
            if isinstance(one, SplitMask):
                mask = SequenceMask.causal() if one.mask.is_causal else SequenceMask()
                return SplitMask(mask, layout, outer)
            return one[:1, :count] if has_tokens(one, own) else one

        return tree_map(short, value)

    def _gathered(self, value: Any, layout: SequenceLayout) -> Any:
        """For a group of one rank."""
        whole = layouts.contiguous(layout.length, 1)

        def join(one: Any) -> Any:
            if isinstance(one, SplitMask):
                return SplitMask(one.mask, whole, whole)
            return gathered(one, layout, self._group) if has_tokens(one, layout.lengths[0]) else one

        return tree_map(join, value)

    def _run(self, inputs: Any, seed: int = 1) -> None:
        """By its forward: hooks on the block itself belong to the call that goes on, but the one that captures."""
        torch.manual_seed(seed)
        args, kwargs = copied(inputs, wide)
        output = self.block.forward(*args, **kwargs)
        if self._capture is not None:
            self._capture(self.path, output)

    _capture: Callable[[str, Any], None] | None = None

    @contextlib.contextmanager
    def _capturing(self, named: dict[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
        """Gives the first floating-point tensor of the first output of each module, in the order in which they end."""
        outputs: dict[str, torch.Tensor] = {}

        def capture(path: str, output: Any) -> None:
            floats = floats_of(output)
            if floats and path not in outputs:
                outputs[path] = floats[0].detach().clone()

        def hook(path: str) -> Callable[..., None]:
            return lambda module, args, output: capture(path, output)

        with contextlib.ExitStack() as stack:
            for path, module in named.items():
                if path != self.path:
                    stack.callback(module.register_forward_hook(hook(path)).remove)
            self._capture = capture
            try:
                yield outputs
            finally:
                self._capture = None

    @contextlib.contextmanager
    def _whole(self, talks: list[str], named: dict[str, nn.Module], layout: SequenceLayout) -> Iterator[None]:
        """In here an attention is that of one rank with all tokens."""
        binding = self._split.binding
        before = binding.method, binding.group
        with contextlib.ExitStack() as stack:
            for path in talks:
                give_own_tokens(named[path], layout, self._group, stack)
            try:
                binding.method, binding.group = "ulysses", self._alone
                yield
            finally:
                binding.method, binding.group = before

    def _differences(
        self, expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor], layout: SequenceLayout
    ) -> dict[str, float]:
        """Over the ranks, of what has this rank's tokens."""
        own = layout.lengths[0]
        found = {
            path: difference_of(expected[path], gathered(one, layout, self._group))
            for path, one in got.items()
            if path in expected and has_tokens(one, own)
        }
        return largest_of_ranks(self._agree, found)


@contextlib.contextmanager
def _failing() -> Iterator[list[Exception]]:
    """Gives what was raised inside, unless it is of the transport."""
    errors: list[Exception] = []
    try:
        yield errors
    except Exception as error:
        if is_of_transport(error):
            raise
        errors.append(error)
