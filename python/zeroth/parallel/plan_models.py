"""Models of transformers in a batch plan: split over the group of each row, and refused where they are not."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.batch_plan import BatchPlan
from zeroth.parallel.cuts import Layout
from zeroth.parallel.hf_attention import BoundName
from zeroth.parallel.length_groups import LengthGroups
from zeroth.parallel.split import split_sequence
from zeroth.parallel.split_checks import require_heads, require_model

__all__ = ["PlanWatch", "require_calls", "require_splittable", "split_row"]

_WHERE = "parallel.run_plan"
_HINT = "give the model to run_plan(..., model=model), which splits it over the group of each row"


def require_splittable(model: nn.Module, method: str, plan: BatchPlan, groups: LengthGroups) -> None:
    """Raises Error, on all ranks alike, for a model that cannot be split over the largest group of the plan."""
    if method not in ("ulysses", "ring"):
        refuse("there is no such method", where=_WHERE, which="method", expected="ulysses or ring", got=method)
    require_model(model)
    largest = max((work.size for work in plan.works), default=1)
    if method == "ulysses":
        require_heads(model, groups.of_size(largest))


@contextlib.contextmanager
def split_row(
    model: nn.Module | None, group: _C.Communicator, method: Literal["ulysses", "ring"], layout: Layout | None
) -> Iterator[None]:
    """Inside, the model computes rows of `group`: forward and backward. None: nothing is done."""
    if model is None:
        yield
        return
    split = split_sequence(model, group, method, layout=layout)
    try:
        yield
    finally:
        split.remove()


class PlanWatch:
    """Looks at the models of transformers that the first row of a rank runs, and refuses attention that would be wrong
    in any row of the plan. So all ranks raise in their first row."""

    def __init__(self, plan: BatchPlan) -> None:
        self._shares = any(work.size > 1 for work in plan.works)
        self._packs = any(len(work.sequences) > 1 for work in plan.works)
        self._looks = "transformers" in sys.modules

    @contextlib.contextmanager
    def row(self, group: _C.Communicator) -> Iterator[None]:
        """Around the forward of a row."""
        if not self._looks:
            yield
            return

        def look(module: nn.Module, args: Any, output: Any) -> None:
            name = getattr(getattr(module, "config", None), "_attn_implementation", None)
            if name is None or not hasattr(module, "base_model_prefix"):
                return
            if isinstance(name, BoundName):
                self._require_group(module, name.binding.group, group)
            elif self._shares and _is_of_transformers(str(name)):
                refuse(
                    "an attention does not know the ranks that share a row",
                    code="MODEL",
                    where=_WHERE,
                    which=f"{type(module).__name__}, attention {str(name)!r}",
                    expected="a model that was split over the group of its row, or an attention of its own",
                    got="a plan with rows of several ranks",
                    hint=_HINT,
                )
            elif self._packs and _has_cache(output):
                refuse(
                    "a model with a cache does not tell the documents of a row apart",
                    code="MODEL",
                    where=_WHERE,
                    which=type(module).__name__,
                    expected="use_cache=False, or rows of one sequence: plan_batch(..., pack=False)",
                    got="a cache, and a plan with rows of several sequences",
                    hint=_HINT,
                )

        handle = nn.modules.module.register_module_forward_hook(look)
        try:
            yield
        finally:
            handle.remove()
        self._looks = False

    @staticmethod
    def _require_group(module: nn.Module, bound: _C.Communicator, group: _C.Communicator) -> None:
        if (bound.size, bound.rank) != (group.size, group.rank):
            refuse(
                "a model is split over other ranks than those of its row",
                code="MODEL",
                where=_WHERE,
                who=who(group),
                which=type(module).__name__,
                expected=f"the group of {group.size} ranks that loss_of is given",
                got=f"{bound.size} ranks of {bound.name}",
                hint=_HINT,
            )


def _is_of_transformers(name: str) -> bool:
    """Whether an attention is one that transformers brings; others have names of their own."""
    kinds = ("eager", "sdpa", "flash_attention", "flex_attention")
    return name.removeprefix("paged|").startswith(kinds)


def _has_cache(output: Any) -> bool:
    names = ("cache", "past_key_values")  # newer and older releases
    return isinstance(output, dict) and any(name in output.keys() and output[name] is not None for name in names)


def require_calls(plan: BatchPlan, calls: torch.Tensor, cut: bool) -> None:
    """`calls` [ranks, shared rows, 2], of all ranks: bytes that the forward of a row received from the ranks that share
    it, and its loss. Raises Error, on all ranks alike, for a row that its ranks cannot have computed together."""
    shared = [work for work in plan.works if work.size > 1]
    for place, work in enumerate(shared):
        own = calls[work.begin : work.begin + work.size, place]
        which = f"row of {work.tokens} tokens on ranks {work.begin} to {work.begin + work.size - 1}"
        if float(own[:, 0].max()) == 0.0:
            refuse(
                "ranks that share a row made no call to each other in its forward",
                code="MODEL",
                where=_WHERE,
                which=which,
                expected="an attention that uses the group that loss_of is given",
                got="each rank computed its own tokens alone, so the gradients are not those of the batch",
                hint="ulysses_attention() or ring_attention() over the group; of transformers: run_plan(..., model=)",
            )
        losses = own[:, 1]
        if not cut and bool(losses.isfinite().all()) and not torch.allclose(losses, losses[:1], rtol=1e-4, atol=1e-12):
            refuse(
                "ranks that share a whole row have other losses",
                code="MODEL",
                where=_WHERE,
                which=which,
                expected="with cut=False, or a model, the loss of the whole row on each of its ranks",
                got=[round(one, 6) for one in losses.tolist()],
                hint="split_sequence() gives it; parts of it are reduce_from_group(part, group)",
            )
