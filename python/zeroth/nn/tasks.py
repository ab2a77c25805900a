"""Tasks of unlike size: which ranks have which part of their data, and what a rank's loss is."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from zeroth import _C

__all__ = ["TaskPart", "TaskShares", "share_tasks"]


@dataclasses.dataclass(frozen=True, slots=True)
class TaskPart:
    """Part `part` of `parts` equal parts of a task's data."""

    task: int
    part: int
    parts: int

    @property
    def share(self) -> float:
        return 1.0 / self.parts


@dataclasses.dataclass(frozen=True, slots=True)
class TaskShares:
    """Which rank has which tasks. A value, the same on all ranks."""

    loads: tuple[float, ...]
    of_ranks: tuple[tuple[TaskPart, ...], ...]

    @property
    def most(self) -> float:
        """The largest load of a rank: what a step takes."""
        return max(sum(self.loads[part.task] * part.share for part in parts) for parts in self.of_ranks)

    def rows(self, rank: int, samples: Sequence[int]) -> dict[int, slice]:
        """Of each of the rank's tasks, its samples; `samples`: of each task in this step, on all ranks."""
        result = {}
        for part in self.of_ranks[rank]:
            sizes = _C.slice_sizes(samples[part.task], part.parts)
            begin = sum(sizes[: part.part])
            result[part.task] = slice(begin, begin + sizes[part.part])
        return result

    def loss(
        self,
        losses: Mapping[int, torch.Tensor],
        samples: Sequence[int],
        weights: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """A rank's loss. `losses`: of each of its tasks, one for each of its samples. The mean over the ranks, which is
        what an engine makes of gradients, is the mean over all samples of all tasks; with `weights` the sum over tasks
        of weight times the task's mean. A rank without samples: backward from 0 * the sum of its outputs."""
        ranks, every = len(self.of_ranks), sum(samples)
        terms = []
        for task, of_samples in losses.items():
            scale = ranks / every if weights is None else ranks * weights[task] / max(1, samples[task])
            terms.append(of_samples.sum() * scale)
        if not terms:
            raise ValueError("a rank has no losses: give those of an empty batch, so that it takes part in backward")
        return torch.stack(terms).sum()


def share_tasks(loads: Sequence[float], ranks: int) -> TaskShares:
    """Shares tasks of unlike size on ranks, so that no rank waits long for others: a heavy one has several ranks, which
    split its data, and light ones are put together on a rank. `loads`: what each costs a step, say tokens.

        shares = zeroth.nn.share_tasks([2, 8, 2, 4], ranks=4)       # task 1 on ranks 0 and 1, tasks 0 and 2 on rank 3
        rows = shares.rows(rank, samples)                           # {task: slice of its samples}
        loss = shares.loss({task: losses_of(task, rows[task]) for task in rows}, samples)

    Ranks are those with batches of their own, dp times ep. The largest load is at most 4/3 of the least that such a
    plan can have. The same on all ranks, without a call. Ref: Shen et al., "SE-MoE", 2022, section 3.1."""
    plan = _C.share_tasks(list(loads), ranks)
    return TaskShares(tuple(loads), tuple(tuple(TaskPart(*part) for part in parts) for parts in plan))
