"""Whether a layer of experts computes on the ranks of ep what it computes whole: looked at in its first forward."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.verify_choice import foreign_code
from zeroth.parallel.verify_runs import (
    BOUND,
    BOUND_OF_HALVES,
    Result,
    SeesHalves,
    any_of_ranks,
    aside,
    could_not_run,
    difference_of,
    forward_of,
    free_bytes,
    is_of_transport,
    is_possible,
    lent,
    substitute,
    wide,
)

__all__ = ["OF_EXPERTS", "Checks", "ExpertsCheck", "to_verify"]

OF_EXPERTS = frozenset(
    "afmoe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe hunyuan_v1_moe jamba "
    "lfm2_moe minimax mixtral olmoe phimoe qwen2_moe qwen3_moe".split()
)
"""families of transformers whose experts tests put on ranks"""
_TOKENS = 64
"""at least, or as many as choose each expert once"""


def to_verify(name: str, module: nn.Module, mode: str) -> str:
    """Why a layer of experts is verified; "" if it is not. Before it is placed."""
    if mode == "never":
        return ""
    foreign = foreign_code(name, module, OF_EXPERTS)
    return foreign or ("as asked for" if mode == "always" else "")


@dataclasses.dataclass(slots=True)
class Checks:
    """Of the layers of one model: what came out is said once, when all have been looked at."""

    left: int
    announces: bool = False
    results: dict[str, Result] = dataclasses.field(default_factory=dict)

    @property
    def report(self) -> str:
        """ "" before the last layer's first forward."""
        if self.left > 0 or not self.results:
            return ""
        done = [one for one in self.results.values() if not one.left_out]
        text = f"verified {len(done)} of {len(self.results)} layers of experts over ep"
        if done:
            text += f", largest relative difference {max(one.difference for one in done):.2g}"
        left_out = [f"; left out: {name}, {one.left_out}" for name, one in self.results.items() if one.left_out]
        return text + "".join(left_out[:3])

    def add(self, name: str, result: Result) -> None:
        self.left -= 1
        self.results[name] = result
        if self.announces and self.left == 0:
            print(self.report, file=sys.stderr, flush=True)


class ExpertsCheck:
    """Of one layer. A call of all ranks that share it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: tuple[str, ...],
        num_experts: int,
        group: _C.Communicator,
        checks: Checks,
        alike: int = 1,
    ) -> None:
        """`parameters`: with this rank's experts along their first dimension. `alike`: so many neighbours in the group
        have the same tokens."""
        self.name = name
        self.checks = checks
        self._module: Any = module
        self._own = parameters
        self._num_experts = num_experts
        self._group = group
        self._alike = alike

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the layer is not verified."""
        return

    def look(
        self,
        placed: Callable[..., torch.Tensor],
        whole: Callable[..., torch.Tensor],
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> bool:
        """Inside of the layer's forward, where its parameters are there. `placed`: its forward over the ranks, `whole`:
        the module's own code. False: this forward is not one to look at. Raises Error MODEL on all ranks if a sample of
        tokens, which chooses all experts, gives something else."""
        if not is_possible((tokens, chosen, weights)) or torch._C._current_graph_task_id() != -1:
            return False
        with torch.no_grad(), aside(self._module):
            result = self._compare(placed, whole, tokens, chosen.shape[-1], weights.dtype)
        self.checks.add(self.name, result)
        return True

    def _compare(
        self,
        placed: Callable[..., torch.Tensor],
        whole: Callable[..., torch.Tensor],
        tokens: torch.Tensor,
        choices: int,
        dtype: torch.dtype,
    ) -> Result:
        parts = {name: self._module.get_parameter(name) for name in self._own}
        elements = sum(one.numel() for one in parts.values())
        device = tokens.device
        needed = 8 * elements * (1 + self._group.size)
        share = free_bytes(device) // (self._group.size if device.type == "cpu" else 1)
        absent, large = any_of_ranks(
            self._group, any(one.shape[0] != self._module.num_experts for one in parts.values()), needed > share
        )
        if absent or large:
            why = "its parameters are not there" if absent else f"there is no memory for it, {needed / 1e9:.1f} GB"
            return Result(left_out=why)
        sizes = _C.slice_sizes(self._num_experts, self._group.size)
        begin, count = sum(sizes[: self._group.rank]), self._module.num_experts
        of_whole: dict[int, torch.Tensor] = {}
        of_part: dict[int, torch.Tensor] = {}
        for number, one in enumerate(parts.values()):
            gathered = _C.gather_from_group(one.detach().contiguous(), 0, self._group, sizes)
            of_whole[id(one)] = substitute(wide(gathered), number)
            of_part[id(one)] = of_whole[id(one)][begin : begin + count].contiguous()
        others = {id(one): wide(one.detach()) for one in self._module.parameters() if id(one) not in of_whole}
        sample = self._sample(tokens, choices, dtype)
        with lent(self._module.modules(), of_part | others, wide):
            got = placed(*sample)
        halves = draws = False
        error: Exception | None = None
        with lent(self._module.modules(), of_whole | others, wide):
            self._module.num_experts = self._num_experts
            try:
                with SeesHalves() as sees:
                    expected = whole(*sample)
                halves = sees.seen
                draws = difference_of(expected, whole(*sample)) > BOUND
            except Exception as problem:
                if is_of_transport(problem):
                    raise
                error = problem
            finally:
                self._module.num_experts = count
        own = 0.0 if error is not None else difference_of(expected, got)
        found = self._group.all_reduce(torch.tensor([own], dtype=torch.float64), "max").item()
        failed, halves, draws = any_of_ranks(self._group, error is not None, halves, draws)
        bound = BOUND_OF_HALVES if halves else BOUND
        if failed:
            return Result(left_out=could_not_run(error))
        if draws:
            return Result(left_out="it draws random numbers in an evaluation")
        if not found <= bound:
            refuse(
                "a layer of experts does not compute on several ranks what it computes whole",
                code="MODEL",
                where="parallel.verify",
                who=who(self._group),
                which=f"{self.name}, {forward_of(self._module)}",
                expected=f"a relative difference of at most {bound:g}",
                got=f"{found:.2g}",
                hint="its forward(tokens, experts, weights) gets rows of this rank's experts by their numbers here, "
                "from 0, with weights of one: it computes each row by itself, uses num_experts for their number, and "
                "nothing of all tokens or of an expert's number in the whole layer",
            )
        return Result(found, bound)

    def _sample(
        self, tokens: torch.Tensor, choices: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, others on ranks that have others. They choose all experts, each as often as can be, with weights of
        their own."""
        every, rank = self._num_experts, self._group.rank // self._alike
        count = max(min(_TOKENS, len(tokens)), math.ceil(every / choices), 2)
        rows = tokens.detach()[:count]
        if len(rows) < count:
            generator = torch.Generator().manual_seed(rank)
            more = torch.randn(count - len(rows), tokens.shape[-1], generator=generator)
            rows = torch.cat([rows, more.to(rows)])
        number = torch.arange(count * choices).view(count, choices)
        chosen = (number + rank) % every
        weights = (0.3 + number % 7 / 10).to(wide(torch.empty(0, dtype=dtype)).dtype)
        return substitute(wide(rows), rank), chosen.to(rows.device), weights.to(rows.device)
