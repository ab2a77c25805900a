"""One rank: the parity matrix of the core through the Python package. Started by zeroth-run; see parity_test.py.

Every stage, reshard setting and execution mode must give the bits of stage 0, for each dtype, number of micro-steps and
reduction policy. Arguments: models, each with how much of this list it takes: late=all, foreign=some; or --short for
the rows of SHORT_LIST with as many ranks as there are.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pairs
import torch
import zoo
from torch import nn
from torch.nn import functional as F

import zeroth

STEPS = 3
PLANS = [(0, "default"), (1, "default"), (2, "default"), (3, "default"), (3, "all"), (3, "none")]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
REDUCTIONS = ((1, "per_step"), (3, "per_micro_step"), (3, "per_step"), (1, "per_micro_step"))
CASES = {
    "all": tuple(itertools.product(DTYPES, REDUCTIONS)),
    "some": ((torch.float64, REDUCTIONS[1]), (torch.float32, REDUCTIONS[2]), (torch.bfloat16, REDUCTIONS[3])),
}
"""dtypes with numbers of micro-steps and policies; in some of them, too, each occurs"""


class Late(zoo.Plain):
    """The last block runs twice, the second one only in some steps: gradients that come late, or not at all."""

    def __init__(self) -> None:
        super().__init__(blocks=5)
        self.step = 0

    def through(self, h: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != 1 or self.step % 2 == 0:
                h = block(h)
        self.step += 1
        last: torch.Tensor = self.blocks[-1](h)
        return last


class Foreign(zoo.Normed):
    """As the C++ matrix has one: a unit with batch norm runs twice, some ranks skip one, weights are tied and
    frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].conv.weight = self.blocks[0].conv.weight
        self.rotation = nn.Parameter(torch.randn(zoo.WIDTH, zoo.WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        image = self.first(x).reshape(-1, 3, 2, 2)
        for number in (0, 0, 1, 2):
            if number != 1 or x[0, 0] > 0:
                image = self.blocks[number](image)
        return F.cross_entropy(self.head(image.flatten(1) @ self.rotation), y)


MODELS: dict[str, Callable[[], nn.Module]] = {"late": Late, "foreign": Foreign}


def train(
    name: str, world: zeroth.World, dtype: torch.dtype, micro_steps: int, config: dict[str, object]
) -> tuple[object, ...]:
    torch.manual_seed(7)
    model = MODELS[name]().to(dtype)
    engine = zeroth.Engine(model, config, world=world, log_level="off")
    numbers: list[object] = []
    for micro_batches in zoo.batches(world.size, micro_steps, STEPS, dtype):
        for of_ranks in micro_batches:
            loss = engine(*of_ranks[world.rank])
            engine.backward(loss)
            result = engine.step()
            numbers.append(engine.average(loss.item()).hex())
        assert result.committed, result
        numbers.append(result.grad_norm.hex())
    engine.close()
    return (*numbers, *(value.double().numpy().tobytes() for _, value in sorted(model.state_dict().items())))


Row = dict[str, Any]
EXECUTIONS = ("inline", "chaos")
SHORT_LIST = pairs.pairwise(
    model=tuple(MODELS), world=(1, 2, 3, 4), dtype=DTYPES, reduction=REDUCTIONS, plan=PLANS, execution=EXECUTIONS
)


def grid(wanted: Sequence[str]) -> list[Row]:
    rows = []
    for name, part in (argument.split("=") for argument in wanted):
        for (dtype, reduction), plan, execution in itertools.product(CASES[part], PLANS, EXECUTIONS):
            rows.append({"model": name, "dtype": dtype, "reduction": reduction, "plan": plan, "execution": execution})
    return rows


def config_of(row: Row, seed: int) -> dict[str, object]:
    (micro_steps, policy), (stage, reshard) = row["reduction"], row["plan"]
    return {
        "bf16": {"enabled": row["dtype"] == torch.bfloat16},
        "fp16": {"enabled": row["dtype"] == torch.float16, "initial_scale_power": 6, "loss_scale_window": 2},
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "zeroth": {
            "threads": 1,
            "timeout_ms": 60_000,
            "reduction_policy": policy,
            "reshard": reshard,
            "execution": row["execution"],
            "chaos_seed": seed,
        },
    }


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    short = sys.argv[1:] == ["--short"]
    rows = [row for row in SHORT_LIST if row["world"] == world.size] if short else grid(sys.argv[1:])
    expected: dict[tuple[object, ...], tuple[object, ...]] = {}
    for count, row in enumerate(rows, 1):
        numbers = []
        of_first = (row["model"], row["dtype"], row["reduction"])
        first = row | {"plan": PLANS[0], "execution": EXECUTIONS[0]}
        for one in [row] if of_first in expected else [first, row]:
            numbers = train(one["model"], world, one["dtype"], one["reduction"][0], config_of(one, count))
            expected.setdefault(of_first, numbers)
        assert numbers == expected[of_first], f"{row}: other bits than at stage 0"
    if world.rank == 0:
        print(f"{len(rows)} runs: ok", flush=True)


if __name__ == "__main__":
    main()
