"""Whether a model whose sequences ranks share computes what it computes with whole ones: its first forward looks, with
a few tokens of the sample.

    tokens --+-- cut, each rank its own -----> outputs of the blocks, gathered
             |                                       | compared, block by block
             +-- whole, on every rank -------> outputs of the blocks

Both runs go through the model's own call, so an engine gathers its parameters unit by unit. What a module computes by
calls of its own over sp is taken as it is: [Note: Modules that communicate].
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroth import _C
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.split import SplitModel
from zeroth.parallel.tensor_plan import blocks_of
from zeroth.parallel.verify_runs import (
    BOUND,
    BOUND_OF_HALVES,
    Result,
    SeesHalves,
    any_of_ranks,
    aside,
    could_not_run,
    difference_of,
    floats_of,
    forward_of,
    is_of_transport,
    largest_of_ranks,
    lent,
    same,
    substitute,
    wide,
)
from zeroth.parallel.verify_talks import give_own_tokens, has_tokens, talking

__all__ = ["TOKENS", "SequenceCheck", "refuse_split"]

TOKENS = 16
"""of each rank"""

Outputs = dict[tuple[str, int], torch.Tensor]
"""by the path of a module and the number of its call; in the order in which calls end"""


class SequenceCheck:
    """Of one model. A call of all ranks of `agree`, which run it together."""

    def __init__(self, model: nn.Module, split: SplitModel, mesh: _C.Mesh, agree: _C.Communicator) -> None:
        self._model = model
        self._split = split
        self._mesh = mesh
        self._agree = agree
        self._blocks = blocks_of(model)
        self._is_eager = True
        """whole sequences run by the attention of the model's own code"""
        self._talks: list[str] = []
        """paths of modules that communicate by themselves"""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        """Raises Error MODEL on all ranks where a block has other outputs, or only the split model cannot run."""
        inputs = self._sample(self._split.named(args, kwargs))
        if inputs is None:
            return Result(left_out="the sample has no tokens")
        halves = any(one.dtype in (torch.bfloat16, torch.float16) for one in self._model.parameters())
        reason = ""
        with aside(self._model):
            self._talks = self._talking(inputs)
            ways = [(change, eager) for change in ((wide, same) if halves else (wide,)) for eager in (True, False)]
            for change, self._is_eager in ways:
                result = self._compare(inputs, change)
                if not result.left_out:
                    return result
                reason = result.left_out
        return Result(left_out=reason)

    def _talking(self, inputs: dict[str, Any]) -> list[str]:
        modules = {path: one for path, one in self._model.named_modules() if path and path not in self._blocks}
        with contextlib.ExitStack() as stack:
            self._lend(wide, stack)
            run = functools.partial(self._model, **tree_map(torch.clone, inputs))
            return talking(modules, run, [self._mesh], self._split.binding, self._agree)

    def _sample(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """A few tokens of the first row, equally many on each rank. Padding would hide tokens: there is none."""
        name = "input_ids" if given.get("input_ids") is not None else "inputs_embeds"
        tokens = given.get(name)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2 or tokens.numel() == 0:
            return None
        ranks = self._split.group.size
        config: Any = self._model.config
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        own = TOKENS if not isinstance(most, int) else max(min(TOKENS, most // ranks), 2)
        inputs = {name: _repeated(tokens[:1].detach(), own * ranks)}
        types = given.get("token_type_ids")
        if isinstance(types, torch.Tensor):
            inputs["token_type_ids"] = _repeated(types[:1], own * ranks)
        if self._split.counts_positions:
            inputs["position_ids"] = torch.arange(own * ranks, device=tokens.device)[None]
        return inputs

    def _compare(self, inputs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]) -> Result:
        captured = {**self._blocks, "": self._model}
        got, error = self._run(inputs, change, captured, splits=True)
        expected, problem = self._run(inputs, change, captured, splits=False)
        bound = BOUND_OF_HALVES if change is same else BOUND
        refused = isinstance(error, _C.Error)  # by a check of this package, which the forward itself passes, or not
        failed, unknown = any_of_ranks(self._agree, error is not None, problem is not None or refused)
        if unknown:
            return Result(left_out=could_not_run(problem or error))
        worst = 0.0
        if not failed:
            differences = self._differences(expected, got)
            if not differences:
                return Result(left_out="nothing that it returns is of tokens")
            worst = max(differences.values())
            if worst <= bound:
                return Result(worst, bound)
            with SeesHalves() as sees:
                other, _ = self._run(inputs, change, captured, splits=False, seed=2)
            draws = any(difference_of(expected[key], one) > BOUND for key, one in other.items() if key in expected)
            halves, drawn = any_of_ranks(self._agree, sees.seen, draws)
            if drawn:
                return Result(left_out="it draws random numbers in an evaluation")
            bound = BOUND_OF_HALVES if halves else bound
            if worst <= bound:
                return Result(worst, bound)
        self._fail(inputs, change, bound, worst, error)

    def _fail(
        self,
        inputs: dict[str, Any],
        change: Callable[[torch.Tensor], torch.Tensor],
        bound: float,
        worst: float,
        error: Exception | None,
    ) -> NoReturn:
        """Looks for the first module that differs, first among the blocks and then inside, and raises."""
        every = dict(self._model.named_modules())
        near = {path: one for path, one in every.items() if not self._is_inside(path)}
        path, found = self._first(inputs, change, near, bound)
        if path in self._blocks:
            inside = {one: module for one, module in every.items() if one == path or one.startswith(f"{path}.")}
            path, found = self._first(inputs, change, inside, bound)
        module = self._model.get_submodule(path)
        refuse_split(path, module, self._split.group, bound, found or worst, error)

    def _is_inside(self, path: str) -> bool:
        """Of a block."""
        return any(path.startswith(f"{block}.") for block in self._blocks)

    def _first(
        self,
        inputs: dict[str, Any],
        change: Callable[[torch.Tensor], torch.Tensor],
        modules: Mapping[str, nn.Module],
        bound: float,
    ) -> tuple[str, float]:
        """The first of these modules whose output differs, by how much, or that fails; "" for the model."""
        got, error = self._run(inputs, change, modules, splits=True)
        expected, _ = self._run(inputs, change, modules, splits=False)
        for (path, _), difference in self._differences(expected, got).items():
            if difference > bound:
                return path, difference
        missing = [path for path, number in expected if (path, number) not in got]
        return missing[0] if error is not None and missing else "", 0.0

    def _differences(self, expected: Outputs, got: Outputs) -> dict[tuple[str, int], float]:
        """Of what was captured in both runs: the largest over the ranks."""
        tokens = self._split.layout.lengths[self._split.group.rank]
        found = {
            key: difference_of(expected[key], self._split.gather(own))
            for key, own in got.items()
            if key in expected and expected[key].dim() > 1 and has_tokens(own, tokens)
        }
        return largest_of_ranks(self._agree, found)

    def _run(
        self,
        inputs: dict[str, Any],
        change: Callable[[torch.Tensor], torch.Tensor],
        captured: Mapping[str, nn.Module],
        *,
        splits: bool,
        seed: int = 1,
    ) -> tuple[Outputs, Exception | None]:
        """The outputs of `captured`, the first floating-point tensor of each, and what was raised."""
        outputs: Outputs = {}
        counts: dict[str, int] = {}

        def capture(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                number = counts[path] = counts.get(path, -1) + 1
                if floats := floats_of(output):
                    outputs[path, number] = floats[0].detach().clone()

            return hook

        with contextlib.ExitStack() as stack:
            if not splits:
                stack.enter_context(self._split.aside(eager=self._is_eager))
                for path in self._talks:
                    give_own_tokens(self._model.get_submodule(path), self._split.layout, self._split.group, stack)
            for path, module in captured.items():
                handle = module.register_forward_hook(capture(path))
                stack.callback(handle.remove)
            self._lend(change, stack)
            torch.manual_seed(seed)
            try:
                more = {"use_cache": False} if self._split.has_cache and not splits else {}
                self._model(**tree_map(torch.clone, inputs), **more)
            except Exception as error:
                if is_of_transport(error):
                    raise
                return outputs, error
        return outputs, None

    def _lend(self, change: Callable[[torch.Tensor], torch.Tensor], stack: contextlib.ExitStack) -> None:
        """Each module has other values for its own parameters for the time of its call: in the run with whole
        sequences, too, no more is there than an engine has gathered."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._model.parameters())}
        for module in self._model.modules():
            if module is self._model or module._parameters or module._buffers:
                _lend_to(module, numbers, change, stack)


def refuse_split(
    path: str, module: nn.Module, group: _C.Communicator, bound: float, found: float, error: Exception | None
) -> NoReturn:
    """Raises Error MODEL for a module that looks along the sequence."""
    try:
        refuse(
            "a layer computes something else with its sequence split over sp: it looks along the sequence",
            code="MODEL",
            where="parallel.verify",
            who=who(group),
            which=f"{path or 'the model'}, {forward_of(module)}",
            expected=f"a relative difference of at most {bound:g}",
            got=f"{found:.2g}" if error is None else f"{type(error).__name__}: {error}",
            hint="exact are: all tokens of a part of the channels, by zeroth.parallel.all_to_all(); the state of a "
            "recurrence handed on, by zeroth.parallel.pass_state() with the weights among its inputs; whole "
            "sequences, sp=1 (docs/parallelism.md)",
        )
    except _C.Error as refusal:
        raise refusal from error


def _lend_to(
    module: nn.Module,
    numbers: Mapping[int, int],
    change: Callable[[torch.Tensor], torch.Tensor],
    stack: contextlib.ExitStack,
) -> None:
    calls: list[contextlib.ExitStack] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        values = {
            id(one): substitute(change(one.detach()), numbers.get(id(one), 0))
            for one in module._parameters.values()
            if one is not None
        }
        calls.append(contextlib.ExitStack())
        calls[-1].enter_context(lent([module], values, change))
        return _changed(args, change), _changed(kwargs, change)

    def after(*_: Any) -> None:
        if calls:
            calls.pop().close()

    stack.callback(after)
    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(after, always_call=True, prepend=True).remove)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map(lambda one: change(one) if isinstance(one, torch.Tensor) else one, value)


def _repeated(row: torch.Tensor, length: int) -> torch.Tensor:
    """The row [1, tokens, ...] again and again, up to a length."""
    times = -(-length // row.shape[1])
    return torch.cat([row] * times, 1)[:, :length].clone()
