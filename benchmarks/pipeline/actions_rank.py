"""A rank of actions.py: hardly any arithmetic, many micro-batches.

  zeroth-run -n 2 python actions_rank.py --report FILE --micro 64 --cycles N --steps N [--without deepspeed]

Two linears of 8 x 8, one a stage; a micro-batch is a row of 8. Blocks as in turns.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from setups import STAGES
from torch import Tensor, nn
from trainers import adamw, kind_of

WIDTH = 8
Step = Callable[[], None]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def layer(number: int) -> nn.Linear:
    torch.manual_seed(number)
    return nn.Linear(WIDTH, WIDTH)


def floor(rank: int, batch: list[tuple[Tensor, Tensor]]) -> Step:
    """A loop of forwards, backwards and the update of one stage, by plain torch."""
    own = layer(rank)
    optimizer = adamw(own.parameters())
    gradient = torch.ones(1, WIDTH)

    def step() -> None:
        for inputs, target in batch:
            output = own(inputs if rank == 0 else inputs.detach().requires_grad_())
            if rank == 0:
                output.backward(gradient)
            else:
                (loss_fn(output, target) / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_zeroth(batch: list[tuple[Tensor, Tensor]]) -> Any:
    import zeroth

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": len(batch),
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 1},
        "zeroth": {"threads": 1, "mesh": {"pp": STAGES}, "pipeline": {"schedule": "1f1b"}},
    }
    model = nn.Sequential(layer(0), layer(1))
    world = zeroth.World.from_environment()
    zeroth.pipeline(model, config, world=world, split=["1"], loss_fn=loss_fn)
    return zeroth.Engine(model, config, world=world, log_level="warning")


def make_torch(rank: int, batch: list[tuple[Tensor, Tensor]]) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    own = layer(rank)
    stage = PipelineStage(own, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, len(batch), loss_fn=loss_fn)
    optimizer = adamw(own.parameters())
    inputs, targets = torch.cat([one for one, _ in batch]), torch.cat([one for _, one in batch])

    def step() -> None:
        if rank == 0:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=targets, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def make_deepspeed(batch: list[tuple[Tensor, Tensor]]) -> Step:
    import deepspeed  # type: ignore[import-not-found, unused-ignore]
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found, unused-ignore]

    deepspeed.init_distributed("gloo")
    layers = [layer(0), layer(1)]
    model = PipelineModule(layers=layers, num_stages=STAGES, loss_fn=loss_fn, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": len(batch),
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
    }
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]

    def step() -> None:
        engine.train_batch(iter(batch))

    return step


def block(step: Step, steps: int) -> list[float]:
    """Seconds a step of the slowest rank, and processor seconds a step of the rank that spends most."""
    dist.barrier()
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    mine = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return [seconds / steps for seconds in mine.tolist()]


def by_kind(engine: Any, batch: list[tuple[Tensor, Tensor]], steps: int) -> dict[str, float]:
    """Median microseconds of each kind of action on this rank; "callback": what of a forward is in the chunk's own
    forward."""
    spent: defaultdict[str, list[float]] = defaultdict(list)
    chain = engine.pipeline.chain
    own_run = chain.run

    def run(*args: Any) -> Any:
        begin = time.perf_counter()
        result = own_run(*args)
        spent["callback"].append(time.perf_counter() - begin)
        return result

    chain.run = run
    try:
        for _ in range(steps):
            dist.barrier()
            with engine.pipeline_step(batch) as step:
                for action in step.actions:
                    begin = time.perf_counter()
                    step.run(action)
                    spent[kind_of(action)].append(time.perf_counter() - begin)
    finally:
        del chain.run
    return {kind: 1e6 * statistics.median(times) for kind, times in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    for option in ("micro", "cycles", "steps"):
        parser.add_argument(f"--{option}", required=True, type=int)
    parser.add_argument("--without", nargs="*", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    source = torch.Generator().manual_seed(1)
    batch = [(torch.randn(1, WIDTH, generator=source), torch.zeros(1, WIDTH)) for _ in range(given.micro)]
    engine = make_zeroth(batch)

    def zeroth_step() -> None:
        engine.train_batch(batch)

    makers: dict[str, Callable[[], Step]] = {
        "floor": lambda: floor(rank, batch),
        "zeroth": lambda: zeroth_step,
        "torch": lambda: make_torch(rank, batch),
        "deepspeed": lambda: make_deepspeed(batch),
    }
    steps = {}
    for name, make in makers.items():
        if name not in given.without:
            if rank == 0:
                with (given.report.parent / "progress").open("a", encoding="utf-8") as file:
                    print("building", name, file=file)
            steps[name] = make()
            block(steps[name], given.steps)
    cycles = []
    for _ in range(given.cycles):
        turns: dict[str, list[list[float]]] = {name: [] for name in steps}
        for name in [*steps, *reversed(steps)]:
            turns[name].append(block(steps[name], given.steps))
        cycles.append({name: [statistics.mean(times) for times in zip(*both)] for name, both in turns.items()})
    kinds: list[Any] = [None] * STAGES
    dist.all_gather_object(kinds, by_kind(engine, batch, given.steps))
    with engine.pipeline_step(batch) as last:
        for action in last.actions:
            last.run(action)
    if rank == 0:
        found = {"cycles": cycles, "kinds": kinds, "actions": len(last.actions), "torch": str(torch.__version__)}
        given.report.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
