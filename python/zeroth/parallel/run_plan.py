"""Executes a batch plan: each rank its rows, in groups that change from row to row."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel.batch_plan import BatchPlan, Work
from zeroth.parallel.cut_batch import cut_batch, whole_batch
from zeroth.parallel.cuts import Layout
from zeroth.parallel.length_groups import LengthGroups
from zeroth.parallel.plan_models import PlanWatch, require_calls, require_splittable, split_row

__all__ = ["LossFunction", "PlanResult", "pack_sequences", "run_plan"]

LossFunction: TypeAlias = Callable[[dict[str, Any], _C.Communicator], torch.Tensor]
"""from this rank's part of a row and the group that shares it to this rank's part of the loss: the sum over its labels,
divided by batch["num_items_in_batch"]; of a whole row (cut=False, model) to the whole loss, so divided"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """What run_plan() computed."""

    loss: torch.Tensor
    """mean over all labels of the batch that count; float64, equal on all ranks"""
    num_valid: int
    """these labels"""
    rows: int
    """that this rank computed, without empty ones"""


def pack_sequences(sequences: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One row [1, sum of lengths] of several sequences: input_ids and whatever else they all have [length], one after
    another, and position_ids that start again at each. Raises Error USAGE for what is not as long as its input_ids."""
    for number, one in enumerate(sequences):
        for name, value in one.items():
            if value.shape != one["input_ids"].shape or value.dim() != 1:
                raise _C.make_error(
                    "USAGE",
                    "a sequence cannot be packed",
                    where="parallel.pack_sequences",
                    which=f"{name} of sequence {number}",
                    expected=f"[{one['input_ids'].numel()}], as input_ids",
                    got=str(list(value.shape)),
                )
    row = {name: torch.cat([one[name] for one in sequences])[None] for name in sequences[0]}
    row["position_ids"] = torch.cat([torch.arange(one["input_ids"].numel()) for one in sequences])[None]
    return row


def run_plan(
    plan: BatchPlan,
    groups: LengthGroups,
    sequences: Sequence[Mapping[str, torch.Tensor]],
    loss_of: LossFunction,
    *,
    model: nn.Module | None = None,
    method: Literal["ulysses", "ring"] = "ulysses",
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    mean_over: int = 1,
    layout: Layout | None = None,
    multiple: int = 1,
    pad_id: int = 0,
    ignore_index: int = -100,
    cut: bool = True,
    same_rounds: bool = True,
) -> PlanResult:
    """Forward and backward of a whole batch: afterwards the sum of the ranks' gradients is that of the mean loss of all
    labels that count, as if one process had computed it.

    `sequences`: the batch, the same on all ranks: input_ids and labels int64 [length] of each, labels not shifted.
    `model`: of transformers, whole. It is split over the group of each row while that is computed, by split_sequence()
    and `method`; `loss_of` is given whole rows, and is lambda batch, group: model(**batch).loss, or that of the engine.
    Without it `loss_of` says how a row is computed, see LossFunction: with an attention that knows the group. A row of
    several sequences has position_ids that start again at each document. `backward`: engine.backward, with
    mean_over=engine.world_size, since ZeRO takes the mean over ranks; afterwards engine.step() once.
    `layout`: "contiguous" by default; with a model, what split_sequence() chooses. `pad_id`, `ignore_index`: as
    SequenceBatches. `multiple`: each rank's part of a row is padded to one. `cut`: False gives loss_of whole rows, for
    models that cut them themselves (split_sequence()); it returns the loss of the whole row, alike on all its ranks,
    and gradients are the ranks' parts. `same_rounds`: a rank with fewer rows computes a row of one token with weight
    zero for each that it lacks, so that all ranks run as many forwards and backwards: what a ZeRO-3 engine needs where
    gathers are collective. False: none, for engines over shared memory and for loops without one.

    Collective and blocking. Nobody hangs: all ranks compare plan, batch and options first, and every rank enters its
    groups from the largest to the smallest. Raises Error, on all ranks: MISMATCH for other plans, batches or options;
    USAGE for a plan of another batch; MODEL for a model that cannot be split, for an attention of transformers that
    does not know the group of a shared row, or its documents, and for a shared row whose ranks made no call to each
    other in its forward."""
    options = (method, mean_over, layout, multiple, pad_id, ignore_index, cut, same_rounds, model is None)
    groups.require_same(plan, sequences, options)
    _require_sequences(plan, sequences)
    if model is not None:
        require_splittable(model, method, plan, groups)
    valid = _count(sequences, ignore_index)
    cut = cut and model is None
    divisor = torch.tensor(max(1, valid) / mean_over, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    own = plan.of_rank(groups.rank)
    shared = [work for work in plan.works if work.size > 1]
    calls = torch.zeros(1, len(shared), 2, dtype=torch.float64)
    watch = PlanWatch(plan)
    for work in own:
        row = pack_sequences([sequences[number] for number in work.sequences])
        group = groups.of_work(work)
        whole = whole_batch(
            row, multiple=multiple * group.size if multiple > 1 else 1, pad_id=pad_id, ignore_index=ignore_index
        )
        batch = cut_batch(whole, group.size, group.rank, layout or "contiguous") if cut else whole
        with split_row(model, group, method, layout):
            before = group.received_bytes
            with watch.row(group):
                loss = loss_of(batch | {"num_items_in_batch": divisor}, group)
            value = loss.detach().double().cpu()
            if work.size > 1:
                calls[0, shared.index(work)] = torch.tensor([group.received_bytes - before, float(value)])
            if cut or group.rank == 0:  # a whole row counts once
                total += value
            backward(loss)
    for _ in range(plan.rounds - len(own) if same_rounds else 0):
        alone = groups.of_size(1)
        with split_row(model, alone, method, layout):
            with watch.row(alone):
                loss = loss_of(_nothing(divisor, pad_id, ignore_index), alone) * 0
            backward(loss)
    everyone = groups.of_size(groups.ranks)
    everyone.all_reduce(total)
    if shared:
        require_calls(plan, everyone.all_gather(calls), cut)
    return PlanResult(loss=total / mean_over, num_valid=valid, rows=len(own))


def _nothing(divisor: torch.Tensor, pad_id: int, ignore_index: int) -> dict[str, Any]:
    labels = torch.tensor([[ignore_index]])
    return {
        "input_ids": torch.tensor([[pad_id]]),
        "position_ids": torch.tensor([[0]]),
        "labels": labels,
        "shift_labels": labels,
        "num_items_in_batch": divisor,
    }


def _count(sequences: Sequence[Mapping[str, torch.Tensor]], ignore_index: int) -> int:
    """Labels that count: the first of a sequence is nobody's."""
    return sum(int((one["labels"][1:] != ignore_index).sum()) for one in sequences)


def _require_sequences(plan: BatchPlan, sequences: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """After ranks have compared both: all raise."""
    planned = sorted(number for work in plan.works for number in work.sequences)
    if planned != list(range(len(sequences))):
        raise _refusal("a plan is of another batch", "plan", f"{len(sequences)} sequences", f"{len(planned)}")
    for number, one in enumerate(sequences):
        for name in ("input_ids", "labels"):
            if name not in one or one[name].dim() != 1:
                raise _refusal("a sequence of the batch is not whole", f"{name} of sequence {number}", "[length]", "")
    for work in plan.works:
        tokens = sum(sequences[number]["input_ids"].numel() for number in work.sequences)
        if tokens != work.tokens:
            raise _refusal("a plan is of another batch", f"row of {_ranks(work)}", f"{work.tokens} tokens", f"{tokens}")


def _ranks(work: Work) -> str:
    return f"ranks {work.begin} to {work.begin + work.size - 1}"


def _refusal(message: str, which: str, expected: str, got: str) -> _C.Error:
    return _C.make_error("USAGE", message, where="parallel.run_plan", which=which, expected=expected, got=got)
