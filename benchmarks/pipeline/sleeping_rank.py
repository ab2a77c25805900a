"""A rank of sleeping.py: a pipeline whose computations sleep for known times.

zeroth-run -n 2 python sleeping_rank.py --report FILE --schedule NAME --chunks N --micro N --times 20,20,20 --steps N
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from typing import Any

import torch
from torch import Tensor, nn
from trainers import kind_of

import zeroth

WIDTH = 4


class SleepsBackward(torch.autograd.Function):
    """The value; its backward sleeps."""

    @staticmethod
    def forward(context: Any, value: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A linear that sleeps in its forward, in the gradient of its input, and in that of its weight."""

    def __init__(self, forward: float, inputs: float, weight: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seconds = forward, inputs, weight

    def sleep_in_weight(self) -> None:
        """Once the parameter is there."""

        def sleep(gradient: Tensor) -> Tensor:
            time.sleep(self.seconds[2])
            return gradient

        self.linear.weight.register_hook(sleep)

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        slept: Tensor = SleepsBackward.apply(self.linear(value), self.seconds[1])  # type: ignore[no-untyped-call]
        return slept


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def timed_step(engine: zeroth.Engine, batch: list[Any]) -> dict[str, Any]:
    """Begin and end of this rank's computations, and the seconds that they took, on the clock of all processes."""
    busy, first, last = 0.0, None, 0.0
    with engine.pipeline_step(batch) as step:
        for action in step.actions:
            begin = time.monotonic()
            step.run(action)
            if kind_of(action) in ("F", "B", "I", "W"):
                first = begin if first is None else first
                last = time.monotonic()
                busy += last - begin
    return {"first": first, "last": last, "busy": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--times", required=True, help="milliseconds of F, I and W")
    for option in ("chunks", "micro", "steps"):
        parser.add_argument(f"--{option}", required=True, type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": given.micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "zeroth": {
            "threads": 1,
            "mesh": {"pp": world.size},
            "pipeline": {"schedule": given.schedule, "chunks": given.chunks},
        },
    }
    times = [float(one) / 1e3 for one in given.times.split(",")]
    torch.manual_seed(1)
    count = world.size * given.chunks
    model = nn.Sequential(*(Sleeper(*times) for _ in range(count)))
    done = zeroth.pipeline(model, config, world=world, split=[str(chunk) for chunk in range(1, count)], loss_fn=loss_fn)
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    for chunk in done.chunks_of(done.stage):
        model[chunk].sleep_in_weight()
    batch = [(torch.randn(1, WIDTH), torch.zeros(1, WIDTH)) for _ in range(given.micro)]
    engine.train_batch(batch)
    for number in range(given.steps):
        found = timed_step(engine, batch)
        path = given.report.parent / f"step{number}.rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(found), encoding="utf-8")
    if world.rank == 0:
        given.report.write_text(json.dumps({"torch": str(torch.__version__)}), encoding="utf-8")
    engine.close(keep_parameters=False)


if __name__ == "__main__":
    main()
