"""One rank of four: batches of sequences of all lengths, cut and planned, against one process; see lengths_test.py."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zeroth
from zeroth.parallel import (
    BatchPlan,
    LengthGroups,
    SequenceBatches,
    SequenceCost,
    all_gather,
    plan_batch,
    reduce_from_group,
    run_plan,
    sequence_indices,
)

EXACT = 1e-12
VOCABULARY, SIZE = 30, 8
COST = SequenceCost(linear=1, attention=0.02, exchange=0.2, fixed=2, meeting=20)


class Model(nn.Module):
    """Blocks of causal attention over the documents of a row, whose tokens lie on the ranks of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)]) for _ in range(2))
        self.head = nn.Linear(SIZE, VOCABULARY)
        self.exchanged = 0
        """bytes that attention has received from other ranks"""

    def whole(self, part: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
        if group is None or group.size == 1:
            return part
        self.exchanged += (sum(sizes) - part.size(1)) * part.size(-1) * part.element_size()
        return all_gather(part, 1, group, sizes)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, group: Any = None) -> torch.Tensor:
        sizes = [input_ids.size(1)]
        if group is not None and group.size > 1:
            sizes = group.all_gather(torch.tensor(sizes)).tolist()
        positions = self.whole(position_ids[..., None].double(), group, sizes)[..., 0]
        order = torch.arange(sum(sizes))
        documents = F.pad((positions.diff(dim=-1) != 1).cumsum(-1), (1, 0))[0]
        begin = sum(sizes[: 0 if group is None else group.rank])
        own = slice(begin, begin + input_ids.size(1))
        seen = (documents[own, None] == documents) & (order[own, None] >= order)
        x = self.embedding(input_ids) + torch.sin(position_ids[..., None] / 7)
        for first, last in self.blocks:  # type: ignore[misc]
            q, k, v = first(x).chunk(3, -1)
            k, v = self.whole(torch.cat([k, v], -1), group, sizes).chunk(2, -1)
            scores = (q @ k.mT).masked_fill(~seen, -torch.inf)
            x = x + torch.tanh(last(scores.softmax(-1) @ v))
        return self.head(x)

    def loss(self, batch: Mapping[str, Any], group: Any) -> torch.Tensor:
        logits = self(batch["input_ids"], batch["position_ids"], group)
        total = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
        return total / batch["num_items_in_batch"]


def model_of() -> Model:
    torch.manual_seed(3)
    return Model().double()


def sequences_of(lengths: list[int], seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    every = []
    for length in lengths:
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        every.append({"input_ids": ids, "labels": labels})
    return every


def alone(sequences: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of all labels that count, one sequence after the other, in one process."""
    model = model_of()
    total, valid = torch.zeros((), dtype=torch.float64), 0
    for one in sequences:
        logits = model(one["input_ids"][None], torch.arange(one["input_ids"].numel())[None])[0]
        total = total + F.cross_entropy(logits[:-1], one["labels"][1:], reduction="sum")
        valid += int((one["labels"][1:] != -100).sum())
    (total / valid).backward()
    return (total / valid).item(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def check_plan(
    plan: BatchPlan,
    sequences: list[dict[str, torch.Tensor]],
    groups: LengthGroups,
    world: zeroth.World,
    same_rounds: bool = True,
) -> None:
    loss, gradients = alone(sequences)
    everyone = groups.of_size(groups.ranks)
    model = model_of()
    result = run_plan(plan, groups, sequences, model.loss, same_rounds=False)
    assert abs(result.loss.item() - loss) < EXACT, (result.loss, loss)
    for name, parameter in model.named_parameters():
        got = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        worst = (everyone.all_reduce(got) - gradients[name]).abs().max().item()
        assert worst < EXACT, f"{name}: {worst}"
    shared = [work for work in plan.of_rank(groups.rank) if work.size > 1]
    assert (model.exchanged > 0) == bool(shared), (model.exchanged, shared)
    received = sum(
        (work.tokens - len(sequence_indices(work.tokens, work.size, groups.rank - work.begin))) * (1 + 2 * 2 * SIZE) * 8
        for work in shared
    )
    assert model.exchanged == received, (model.exchanged, received)  # none for what a rank has alone

    engine_model = model_of()
    config = {"zero_optimization": {"stage": 3}}
    engine = zeroth.Engine(engine_model, config, world=world, units=[*engine_model.children()][:1], log_level="off")
    loss_of = lambda batch, group: engine_loss(engine, batch, group)  # noqa: E731
    result = run_plan(
        plan, groups, sequences, loss_of, backward=engine.backward, mean_over=world.size, same_rounds=same_rounds
    )
    assert abs(result.loss.item() - loss) < EXACT, (result.loss, loss)
    for name, gradient in gradients.items():
        got = engine.full(name, "grad")
        assert got is not None and (got - gradient).abs().max().item() < EXACT, name
    assert engine.step().committed
    engine.close()


def engine_loss(engine: zeroth.Engine, batch: Mapping[str, Any], group: Any) -> torch.Tensor:
    logits = engine(batch["input_ids"], batch["position_ids"], group)
    total = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    return total / batch["num_items_in_batch"]


def check_plans(world: zeroth.World) -> None:
    groups = LengthGroups(world)
    assert (groups.ranks, groups.sizes, groups.rank) == (4, [1, 2, 4], world.rank)
    draw = random.Random(5)
    one_long = [400, *[draw.randint(4, 24) for _ in range(31)]]
    plan = plan_batch(one_long, 4, COST, memory_tokens=100)
    assert plan.imbalance < 1.1, str(plan)
    assert [work.size for work in plan.works if 0 in work.sequences] == [4], str(plan)
    assert all(work.size == 1 for work in plan.works if 0 not in work.sequences), str(plan)
    check_plan(plan, sequences_of(one_long, 1), groups, world)
    mixed = [90, 60, 33, 5, 2, 1, 47]
    plan = plan_batch(mixed, 4, COST, memory_tokens=40)
    assert {work.size for work in plan.works} == {1, 2, 4}, str(plan)
    check_plan(plan, sequences_of(mixed, 2), groups, world)
    check_plan(plan, sequences_of(mixed, 2), groups, world, same_rounds=False)
    few = [3]  # three ranks have nothing
    check_plan(plan_batch(few, 4, COST), sequences_of(few, 3), groups, world)

    other = plan_batch(mixed, 4, COST, memory_tokens=40 + 10 * (world.rank == 2))
    for plan_here, seed, text in ((other, 2, "other plans"), (plan, world.rank, "other batches")):
        try:
            run_plan(plan_here, groups, sequences_of(mixed, seed), model_of().loss)
        except zeroth.Error as error:
            assert error.code == "MISMATCH" and text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")


def check_batches(world: zeroth.World) -> None:
    """dp = 2, sp = 2: the mean over dp of the sums over sp is the token-weighted gradient."""
    mesh = world.mesh({"dp": 2, "sp": 2})
    dp, sp = mesh.axis("dp"), mesh.axis("sp")
    everyone = mesh.axes(["dp", "sp"])
    samples = [sequences_of([length], 7 + number)[0] for number, length in enumerate((21, 21, 34, 34))]
    rows = [{name: one[name][None] for name in one} for one in samples]
    expected_loss, expected = alone(samples)
    for dealt, layout in (("group", "contiguous"), ("rank", "contiguous")):
        mine = rows[dp.rank :: 2] if dealt == "group" else [rows[dp.rank + 2 * sp.rank]]
        loader = [tuple(row.values()) for row in mine] if dealt == "rank" else mine
        model, batches = model_of(), SequenceBatches(loader, sp, data=dp, dealt=dealt, layout=layout)  # type: ignore[arg-type]
        assert len(batches) == 2
        valid, loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for batch in batches:
            assert batch["input_ids"].size(1) == len(sequence_indices(21 if valid == 0 else 34, 2, sp.rank))
            part = model.loss(batch, sp) * batch["num_items_in_batch"]  # two steps make one: weights of both
            loss += reduce_from_group(part.detach(), sp)
            valid += 2 * batch["num_items_in_batch"]
            part.backward()
        assert abs(dp.all_reduce(loss).item() / valid.item() - expected_loss) < EXACT
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            worst = (everyone.all_reduce(parameter.grad) / valid - expected[name]).abs().max().item()
            assert worst < EXACT, f"{dealt}: {name}: {worst}"
    whole = next(iter(SequenceBatches(rows[:1], sp, cut=False)))
    assert whole["input_ids"].shape == (1, 21)
    zigzag = next(iter(SequenceBatches(rows[:1], sp, layout="zigzag", multiple=8)))
    assert torch.equal(zigzag["position_ids"][0], sequence_indices(24, 2, sp.rank, "zigzag"))

    refused = [
        (SequenceBatches([rows[sp.rank]], sp), "other samples.*rank [01]"),
        (SequenceBatches(rows[: 1 + sp.rank], sp), "some ranks have no batch.*none on rank 0"),
        (SequenceBatches(rows[: 1 + dp.rank], sp, data=dp), "some ranks have no batch.*none on rank 0"),
    ]
    for batches, text in refused:
        try:
            list(batches)
        except zeroth.Error as error:
            assert error.code == "MISMATCH" and re.search(text, str(error)), error
        else:
            raise AssertionError(f"not refused: {text}")
    assert len(list(SequenceBatches(rows[: 1 + dp.rank], sp, data=dp, uneven="drop"))) == 1


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    check_batches(world)
    check_plans(world)
    print("lengths: ok", flush=True)


main()
