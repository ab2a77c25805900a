"""Whether a block whose matrices ranks share computes what it computed whole: its first forward looks.

    inputs of the block --+-- as it is, this rank's parts of the matrices -----------> outputs
                          |                                                              | compared
                          +-- as it was: whole matrices, put together of all ranks ----> outputs

No rank ever has more than one block whole, so it goes for models that never were whole on a rank, and for stages of a
pipeline. Parameters that are zeros have other values in both runs, else they would hide what they are multiplied by.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.norm_split import SplitNorms
from zeroth.parallel.tensor_cut import Cut, cut_of
from zeroth.parallel.verify_runs import (
    BOUND,
    BOUND_OF_HALVES,
    Result,
    SeesHalves,
    any_of_ranks,
    aside,
    copied,
    could_not_run,
    difference_of,
    floats_of,
    forward_of,
    free_bytes,
    is_of_transport,
    lent,
    same,
    shortened,
    substitute,
    wide,
)

__all__ = ["BlockCheck", "Change", "Undo"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A module that another one has taken the place of."""

    path: str
    before: nn.Module
    after: nn.Module


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """What a plan has changed of a model."""

    layers: tuple[Change, ...]
    attributes: tuple[tuple[str, nn.Module, str, Any], ...]
    """path of a module, itself, an attribute, its value from before"""

    def of(self, block: str) -> "Undo":
        """What is inside of a block."""
        inside = f"{block}."
        return Undo(
            tuple(one for one in self.layers if one.path.startswith(inside)),
            tuple(one for one in self.attributes if f"{one[0]}.".startswith(inside)),
        )


@dataclasses.dataclass(slots=True)
class _Run:
    """What a module has made of its inputs."""

    output: Any = None
    error: Exception | None = None


class BlockCheck:
    """Of one block. A call of all ranks of `group`, the axis tp, and of `agree`, those that run the block together."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        undo: Undo,
        regions: Sequence[str],
        group: _C.Communicator,
        agree: _C.Communicator,
        norms: SplitNorms | None = None,
    ) -> None:
        """`regions`: paths of the modules inside that have rows and the columns that belong to them. `norms`: where
        the block is given slices of the sequence."""
        self.path = path
        self.block = model.get_submodule(path)
        self._model = model
        self._undo = undo
        self._regions = tuple(regions) if norms is None else ()
        self._norms = norms
        self._group = group
        self._agree = agree

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """Raises Error MODEL on all ranks where the outputs differ, or only the block as it is cannot run."""
        if reason := self._hindrance():
            return Result(left_out=reason)
        short = shortened((args, kwargs)) if self._norms is None else None
        halves = any(one.dtype in (torch.bfloat16, torch.float16) for one in self.block.parameters())
        ways: list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = [((args, kwargs), wide)]
        ways += [((args, kwargs), same)] if halves else []
        ways = ([(short, wide)] if short is not None else []) + ways
        reason = ""
        for inputs, change in ways:
            try:
                copied(inputs, change)
            except Exception as error:
                reason = f"its arguments cannot be copied: {type(error).__name__}: {error}"
                continue
            with aside(self.block):
                result = self._compare(inputs, change)
            if not result.left_out:
                return result
            reason = result.left_out
        return Result(left_out=reason)

    def _hindrance(self) -> str:
        """Why its parameters cannot be put together; "" if they can. The same on all ranks."""
        elements, problem = 0, ""
        try:
            for parameter in self._parameters():
                parameter.detach().reshape(-1)[:1].clone()
                noted = cut_of(parameter)
                elements += parameter.numel() * (1 if noted is None else 1 + noted[0].ranks // noted[0].copies)
        except Exception as error:  # not gathered here: a unit of its own
            if is_of_transport(error):
                raise
            problem = f"a parameter has no values here: {type(error).__name__}: {error}"
        needed = 8 * elements  # float32 of the whole and of the parts, and what runs leave behind
        device = next(self.block.parameters()).device
        share = free_bytes(device) // (self._group.size if device.type == "cpu" else 1)
        unknown, large = any_of_ranks(self._agree, bool(problem), needed > share)
        if unknown:
            return problem or "another rank has no values of a parameter"
        return f"there is no memory for its whole matrices, {needed / 1e9:.1f} GB" if large else ""

    def _parameters(self) -> list[nn.Parameter]:
        """All inside, in an order that all ranks have."""
        found = {id(one): one for change in self._undo.layers for one in change.before.parameters()}
        return list((found | {id(one): one for one in self.block.parameters()}).values())

    def _compare(self, inputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Result:
        calls: list[tuple[str, Any]] = []
        values = self._values(change)
        with self._as_it_is(values, change), self._noting_calls(calls, change):
            got = _run(self.block, copied(inputs, change))
        with self._as_it_was(values, change):
            expected = self._run_whole(copied(inputs, change))
        failed, both, found = self._together(got, expected, change is same)
        if both:
            error = expected.error or got.error
            return Result(left_out=could_not_run(error))
        if not failed and not floats_of(expected.output):
            return Result(left_out="it returns no tensor of floating-point numbers")
        if not failed and found <= BOUND:
            return Result(found)
        bound = BOUND
        if not failed:
            bound, draws = self._bound(inputs, change, values)
            if draws:
                return Result(left_out="it draws random numbers in an evaluation")
            if found <= bound:
                return Result(found, bound)
        self._fail(calls, change, values, got.error, found, bound)

    def _run_whole(self, inputs: Any, seed: int = 1) -> _Run:
        if self._norms is None:
            return _run(self.block, inputs, seed)
        with self._norms.aside():
            run = _run(self.block, self._norms.whole_inputs(*inputs), seed)
        run.output = None if run.error is not None else self._norms.own_output(run.output)
        return run

    def _together(self, got: _Run, expected: _Run, halves: bool) -> tuple[bool, bool, float]:
        """Over the ranks: the block alone fails as it is, it could not run as it was, the largest difference."""
        found = 0.0
        if got.error is None and expected.error is None:
            found = difference_of(expected.output, got.output)
            if halves:  # nothing says more than that
                found *= BOUND / BOUND_OF_HALVES
        refused = isinstance(got.error, _C.Error)  # by a check of this package, which the forward itself passes, or not
        unknown = expected.error is not None or refused
        mine = torch.tensor([float(got.error is not None), float(unknown), found], dtype=torch.float64)
        failed, left_out, found = self._agree.all_reduce(mine, "max").tolist()
        return failed > 0, left_out > 0, found

    def _bound(
        self, inputs: Any, change: Callable[[torch.Tensor], torch.Tensor], values: "_Values"
    ) -> tuple[float, bool]:
        """Of a block that may compute in 16 bit whatever it is given; and whether it differs from itself."""
        with self._as_it_was(values, change), SeesHalves() as sees:
            one = self._run_whole(copied(inputs, change))
            other = self._run_whole(copied(inputs, change), 2)
        draws = difference_of(one.output, other.output) > BOUND
        halves, drawn = any_of_ranks(self._agree, sees.seen, draws)
        return BOUND_OF_HALVES if halves else BOUND, drawn

    def _fail(
        self,
        calls: list[tuple[str, Any]],
        change: Callable[[torch.Tensor], torch.Tensor],
        values: "_Values",
        error: Exception | None,
        found: float,
        bound: float,
    ) -> NoReturn:
        """Finds the first region that differs, and raises."""
        for path, inputs in calls:
            region = self._model.get_submodule(path)
            with self._as_it_is(values, change):
                got = _run(region, copied(inputs, same))
            with self._as_it_was(values, change):
                expected = _run(region, copied(inputs, same))
            failed, unknown, of_region = self._together(got, expected, False)
            if not unknown and (failed or of_region > bound):
                self._refuse(path, [f"{path}.*"], got.error, of_region, bound)
        layers = [one.path for one in self._undo.layers]
        self._refuse(self.path, layers, error, found, bound)

    def _refuse(self, path: str, layers: list[str], error: Exception | None, found: float, bound: float) -> NoReturn:
        module = self._model.get_submodule(path)
        names = dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", one) for one in layers)
        whole = "{" + ", ".join(f'"{name}": "whole"' for name in names) + "}"
        arguments = f"corrections={whole}" + (', norms="whole"' if self._norms is not None else "")
        try:
            refuse(
                "a layer does not compute with its matrices shared over tp what it computes whole",
                code="MODEL",
                where="parallel.verify",
                who=who(self._group),
                which=f"{path}, {forward_of(module)}",
                expected=f"a relative difference of at most {bound:g}",
                got=f"{found:.2g}" if error is None else f"{type(error).__name__}: {error}",
                hint="it computes over all that its layers give, or has counts of its own, which stay those of the "
                f"whole layer: zeroth.parallelize(model, ..., {arguments}) leaves it whole, which is exact",
            )
        except _C.Error as refusal:
            raise refusal from error

    @contextlib.contextmanager
    def _noting_calls(self, calls: list[tuple[str, Any]], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Notes with what the regions inside are called first."""

        def note(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if all(path != one for one, _ in calls):
                    with contextlib.suppress(Exception):
                        calls.append((path, copied((args, kwargs), same)))

            return hook

        inside = [path for path in self._regions if path != self.path]
        handles = [
            self._model.get_submodule(path).register_forward_pre_hook(note(path), with_kwargs=True) for path in inside
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _values(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "_Values":
        """Of all parameters inside: a call of the group."""
        parts: dict[int, torch.Tensor] = {}
        whole: dict[int, torch.Tensor] = {}
        for number, parameter in enumerate(self._parameters()):
            noted = cut_of(parameter)
            own = change(parameter.detach())
            if noted is None:
                whole[id(parameter)] = parts[id(parameter)] = substitute(own, number)
                continue
            cut, dim = noted
            joined = substitute(_joined(own, cut, dim, self._group), number)
            whole[id(parameter)], parts[id(parameter)] = joined, cut.take(joined, dim)
        return _Values(parts, whole)

    @contextlib.contextmanager
    def _as_it_is(self, values: "_Values", change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        with lent(self.block.modules(), values.parts, change):
            yield

    @contextlib.contextmanager
    def _as_it_was(self, values: "_Values", change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """In here the block has the layers and attributes from before it was split."""
        divided = [(module, name, getattr(module, name)) for _, module, name, _ in self._undo.attributes]
        try:
            for one in self._undo.layers:
                _put(self._model, one.path, one.before)
                one.before.eval()
            for _, module, name, value in self._undo.attributes:
                setattr(module, name, value)
            with lent(self.block.modules(), values.whole, change):
                yield
        finally:
            for one in self._undo.layers:
                _put(self._model, one.path, one.after)
            for module, name, value in divided:
                setattr(module, name, value)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """Of parameters by id."""

    parts: Mapping[int, torch.Tensor]
    whole: Mapping[int, torch.Tensor]


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    model.get_submodule(holder)._modules[name] = module


def _run(module: nn.Module, inputs: Any, seed: int = 1) -> _Run:
    """By its forward: hooks on the module itself belong to the call that goes on."""
    args, kwargs = inputs
    torch.manual_seed(seed)
    try:
        return _Run(module.forward(*args, **kwargs))
    except Exception as error:
        if is_of_transport(error):
            raise
        return _Run(error=error)


def _joined(part: torch.Tensor, cut: Cut, dim: int, group: _C.Communicator) -> torch.Tensor:
    """The whole tensor of the parts of all ranks; see Cut.take()."""
    dim %= part.dim()
    rows = part.movedim(dim, 0).contiguous()
    own = group.all_gather(torch.tensor([rows.shape[0]])).tolist()
    every = torch.split(_C.gather_from_group(rows, 0, group, own), own)
    different = [one.movedim(0, dim) for one in every[:: cut.copies]]
    blocks = [one.reshape(*one.shape[:dim], cut.parts, -1, *one.shape[dim + 1 :]) for one in different]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1).contiguous()
