"""One run of some layers of a model with blocks, by the model's own forward.

Blocks before the range return what was received, modules with parameters before it return zeros without memory, and the
last block of the range ends the forward. So masks, positions and rotations, which follow from the batch, are computed
on every rank again, and nothing but what blocks return is sent.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from zeroth.parallel._refuse import refuse
from zeroth.pipe.block_plan import BlockPlan, Places
from zeroth.pipe.forms import Form, separate
from zeroth.pipe.placeholders import Placeholders
from zeroth.pipe.stand_in import original_call

__all__ = ["BlockRun", "Leave", "zeros_for_loose"]

_WHERE = "pipe.run"


class Leave(Exception):  # noqa: N818
    """Ends a forward after the last layer of a run. It reaches no user."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = values


class BlockRun:
    """Layers first..last-1 of a plan; see BlockPlan for their numbers."""

    def __init__(self, plan: BlockPlan, placeholders: Placeholders, first: int, last: int, values: Any) -> None:
        self.plan = plan
        self.placeholders = placeholders
        self.first, self.last = first, last
        self.entered = first == 0
        """whether the forward has come to the range"""
        self.parts: tuple[Any, ...] = ()
        if first == 1:
            self.parts = separate(values, len(plan.entry.wanted), plan.blocks[0])
        elif first > 1:
            self.parts = separate(values, len(plan.forms[first - 2].wanted), self._name(first))
        self._start = self._entry = _region()
        """what activation checkpoint the forward was in at its begin, and when it came to the range"""

    def calls(self, places: Places) -> dict[nn.Module, Callable[..., Any]]:
        """The calls that stand in for those of modules."""
        calls: dict[nn.Module, Callable[..., Any]] = {}

        def block(number: int) -> nn.Module:
            return places[self.plan.blocks[number - 1]]

        for path, layers in self.plan.outside.items():
            if layers[0] < self.first:
                calls[places[path]] = self._outside(path, places[path])
        shapes: dict[Form, Callable[..., Any]] = {}
        for path, form in zip(self.plan.blocks[: max(self.first - 2, 0)], self.plan.forms, strict=False):
            if form not in shapes:
                shapes[form] = self._unused(form)
            calls[places[path]] = _with_stage_hooks(places[path], shapes[form])
        if self.first > 1:
            before = block(self.first - 1)
            calls[before] = _with_stage_hooks(before, self._before(self.plan.forms[self.first - 2]))
        if 1 <= self.first <= len(self.plan.blocks):
            calls[block(self.first)] = self._first(block(self.first))
        if self.last == 1:
            calls[block(1)] = self._leave_at_entry()
        elif self.last <= len(self.plan.blocks) + 1:
            own = block(self.last - 1)
            calls[own] = self._last(calls.get(own) or original_call(own))
        return calls

    def _unused(self, form: Form) -> Callable[..., Any]:
        """Of blocks whose output is replaced by what was received: what the model makes of it has to have a shape."""
        parts = [one.detach() if isinstance(one, torch.Tensor) else one for one in self.parts]
        output = form.build((parts * len(form.wanted))[: len(form.wanted)])
        return lambda *args, **kwargs: output

    def _before(self, form: Form) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            return form.build(self.parts)

        return call

    def _first(self, block: nn.Module) -> Callable[..., Any]:
        """[Note: Checkpoints] Inside of a model's own activation checkpoint, recomputation runs the code from where the
        checkpoint begins, without stand-ins. So own blocks must not begin in one that began before the range. To leave
        the forward inside of one is possible: recomputation ends with the last tensor that was kept."""
        original, name = original_call(block), self._name(self.first)

        def call(*args: Any, **kwargs: Any) -> Any:
            region = _region()
            if self.first == 1:
                self._enter()
                args, kwargs = self.plan.entry.replace(args, kwargs, self.parts)
            if region != self._start and region == self._entry:
                self._refuse_region(name)
            return original(*args, **kwargs)

        return call

    def _leave_at_entry(self) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> NoReturn:
            raise Leave(self.plan.entry.pick(args, kwargs))

        return call

    def _last(self, own: Callable[..., Any]) -> Callable[..., Any]:
        name = self._name(self.last - 1)

        def call(*args: Any, **kwargs: Any) -> NoReturn:
            output = own(*args, **kwargs)
            self._require_gradients(name)
            raise Leave(self.plan.forms[self.last - 2].pick(output, name))

        return call

    def _outside(self, path: str, module: nn.Module) -> Callable[..., Any]:
        original = original_call(module)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.entered:
                return original(*args, **kwargs)
            return self.placeholders.of(path, module, args, kwargs)

        return call

    def _enter(self) -> None:
        self._require_gradients(self._name(max(self.first - 1, 1)))
        self._entry = _region()
        self.entered = True

    def _require_gradients(self, block: str) -> None:
        """A reentrant checkpoint runs its forward without them."""
        if _region()[0] != self._start[0]:
            self._refuse_region(block)

    def _refuse_region(self, block: str) -> NoReturn:
        refuse(
            "a model calls a block inside an activation checkpoint of its own, and the pipeline is split there",
            code="MODEL",
            where=_WHERE,
            which=block,
            expected="a checkpoint inside of the block, around it alone without reentrance, or that of "
            "gradient_checkpointing_enable()",
            got="torch.utils.checkpoint around the split",
            hint="split elsewhere, or let the pipeline recompute",
        )

    def require_left(self) -> None:
        """After a forward that ended by itself. Raises Error MODEL if it should not have, or has not used what was
        received."""
        if self.last != len(self.plan.blocks) + 2 or not self.entered:
            number = self.last - 1 if self.entered else max(self.first - 1, 1)
            refuse(
                "a model has not called a block that it called when it was looked at",
                code="MODEL",
                where=_WHERE,
                which=self._name(number),
                expected="all blocks in every forward",
                hint="blocks that are left out at random, as by a layerdrop, cannot be split",
            )

    def _name(self, layer: int) -> str:
        if layer == 0:
            return "embedding"
        return self.plan.blocks[layer - 1] if layer <= len(self.plan.blocks) else "head"


def _with_stage_hooks(block: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Hooks of blocks do not run for their stand-ins, but for those that say so."""
    hooks = [hook for hook in block._forward_pre_hooks.values() if getattr(hook, "zeroth_stages", False)]
    if not hooks:
        return call

    def with_hooks(*args: Any, **kwargs: Any) -> Any:
        for hook in hooks:
            hook(block, args, kwargs)
        return call(*args, **kwargs)

    return with_hooks


def _region() -> tuple[bool, Any]:
    """What differs inside of an activation checkpoint."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def zeros_for_loose(model: nn.Module, plan: BlockPlan, first: int, last: int) -> Iterator[None]:
    """In here parameters that modules around blocks read by themselves, before layer `first` and not in the range, are
    zeros without memory."""
    kept: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, shape in plan.loose.items():
            layers = plan.uses[name]
            if layers[0] >= first or any(first <= layer < last for layer in layers):
                continue
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            parameter: Any = module._parameters[own]
            kept.append((module, own, parameter))
            zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            module._parameters[own] = zero.expand(shape)  # type: ignore[assignment]
        yield
    finally:
        for module, own, parameter in reversed(kept):
            module._parameters[own] = parameter
