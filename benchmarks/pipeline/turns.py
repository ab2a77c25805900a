"""A rank of a job that holds several trainers: their steps in paired blocks.

  zeroth-run -n 2 python turns.py --work JSON --trainers floor,zeroth,... --report DIR --cycles N --block-seconds S

Order A B C C B A, a barrier before every block, time of a block = slowest rank. Then each trainer has a timed step, for
its bubble. Rank 0 writes DIR/blocks.json, and before everything that it does a line of DIR/progress: the last one says
who was at work when a job ended badly.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time
from typing import Any

import stack
import torch
import torch.distributed as dist
from setups import STAGES, Work
from trainers import MAKERS, Floor, Seconds, Trainer

WARMUP_STEPS = 2
Block = dict[str, float]
"""seconds a step: "wall" of the slowest rank, "cpu" of all ranks"""


class Job:
    """The trainers of a job, and their turns."""

    def __init__(self, work: Work, names: list[str], report: pathlib.Path, block_seconds: float) -> None:
        self.work = work
        self.names = names
        self.report = report
        self.block_seconds = block_seconds
        self.rank = dist.get_rank()
        self.batches = stack.batches(work)
        self.trainers: dict[str, Trainer] = {}
        self.steps_done = dict.fromkeys(names, 0)
        self.block_steps: dict[str, int] = {}

    def say(self, phase: str, name: str) -> None:
        if self.rank == 0:
            with (self.report / "progress").open("a", encoding="utf-8") as file:
                print(phase, name, file=file)

    def batch(self, name: str) -> Any:
        batch = self.batches[self.steps_done[name] % len(self.batches)]
        self.steps_done[name] += 1
        return batch

    def block(self, name: str, steps: int) -> Block:
        dist.barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.trainers[name].step(self.batch(name))
        mine = {"wall": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
        ranks = gathered(mine)
        return {
            "wall": max(one["wall"] for one in ranks) / steps,
            "cpu": sum(one["cpu"] for one in ranks) / steps,
        }

    def timed(self, name: str) -> dict[str, Any]:
        """One step, and what each rank computed in it."""
        trainer = self.trainers[name]
        dist.barrier()
        begin = time.perf_counter()
        seconds = trainer.timed_step(self.batch(name))
        wall = time.perf_counter() - begin
        ranks = gathered({"wall": wall, "seconds": seconds})
        found: dict[str, Any] = {"wall": max(one["wall"] for one in ranks)}
        shortest = min(one["seconds"].get("U", 0.0) for one in ranks)
        found["computes"] = [computed(one["seconds"], shortest if name == "zeroth" else None) for one in ranks]
        return found

    def prepare(self) -> None:
        for name in self.names:
            self.say("building", name)
            self.trainers[name] = MAKERS[name](self.work, self.rank)
        for name in self.names:
            self.say("warming", name)
            self.block(name, WARMUP_STEPS)
            self.timed(name)
            seconds = self.block(name, 1)["wall"]  # the same on every rank
            self.block_steps[name] = max(1, math.ceil(self.block_seconds / seconds))

    def cycle(self, number: int, count: int) -> dict[str, Any]:
        """The mean of each trainer's two blocks, and its timed step; of the floor what it computed, by rank."""
        floors = [one for one in self.trainers.values() if isinstance(one, Floor)]
        for floor in floors:
            floor.take_times()
        blocks: dict[str, list[Block]] = {name: [] for name in self.names}
        for name in [*self.names, *reversed(self.names)]:
            self.say(f"cycle {number} of {count}:", name)
            blocks[name].append(self.block(name, self.block_steps[name]))
        means = {name: {field: (a[field] + b[field]) / 2 for field in a} for name, (a, b) in blocks.items()}
        found: dict[str, Any] = {name: means[name] | {"timed": self.timed(name)} for name in self.names}
        for floor in floors:
            found["floor"]["times"] = gathered(floor.take_times())
        return found

    def run(self, cycles: int) -> None:
        from zeroth import _C

        self.prepare()
        setup = self.work.setup
        result = {
            "cycles": [self.cycle(number, cycles) for number in range(1, cycles + 1)],
            "block_steps": self.block_steps,
            "program": _C.make_program(setup.schedule, STAGES, self.work.micro_batches, chunks=setup.chunks),
        }
        if self.rank == 0:
            (self.report / "blocks.json").write_text(json.dumps(result), encoding="utf-8")
        dist.barrier()


def computed(seconds: Seconds, update: float | None) -> float:
    """Of a rank in a step. `update`: where the time of the update has waiting in it, that of the rank that came last
    to it."""
    return sum(value for kind, value in seconds.items() if kind != "U" or update is None) + (update or 0.0)


def gathered(mine: Any) -> list[Any]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Work.from_json)
    parser.add_argument("--trainers", required=True)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    parser.add_argument("--cycles", required=True, type=int)
    parser.add_argument("--block-seconds", required=True, type=float)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Job(given.work, given.trainers.split(","), given.report, given.block_seconds).run(given.cycles)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
