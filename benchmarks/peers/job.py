"""A rank of a job that holds several contestants: their steps in paired blocks.

  zeroth-run -n 2 python job.py --cell JSON --contestants floor,ddp,... --report DIR

Order A B C C B A, a barrier before every block, block time = slowest rank, CPU time = all ranks. Rank 0 writes
DIR/blocks.json, and before everything that it does a line of DIR/progress: the last one says who was at work when a job
ended badly.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time

import torch
import torch.distributed as dist
from cells import Cell
from contestants import Contestant, make
from work import Work

WARMUP_STEPS = 2
PHASES = ("forward", "backward", "update")
Block = dict[
    str, float
]  # seconds a step: "wall" of the slowest rank, "cpu" of all, each phase's wall as the mean over ranks


class Job:
    """The contestants of a job, and their turns."""

    def __init__(self, cell: Cell, names: list[str], report: pathlib.Path) -> None:
        self.cell = cell
        self.names = names
        self.report = report
        self.work = Work(cell, dist.get_rank())
        self.contestants: dict[str, Contestant] = {}
        self.steps_done = dict.fromkeys(names, 0)
        self.block_steps: dict[str, int] = {}

    def say(self, phase: str, name: str) -> None:
        if dist.get_rank() == 0:
            with (self.report / "progress").open("a", encoding="utf-8") as file:
                print(phase, name, file=file)

    def block(self, name: str, steps: int) -> Block:
        contestant = self.contestants[name]
        phases = [0.0, 0.0, 0.0]
        dist.barrier()
        cpu = time.process_time()
        start = time.perf_counter()
        for _ in range(steps):
            marks = [time.perf_counter()]
            loss = contestant.forward(self.work.batch(self.steps_done[name]))
            marks.append(time.perf_counter())
            contestant.backward(loss)
            marks.append(time.perf_counter())
            contestant.update()
            marks.append(time.perf_counter())
            del loss  # no graph outlives its step, as if a step were a function
            phases = [total + end - begin for total, begin, end in zip(phases, marks, marks[1:])]
            self.steps_done[name] += 1
        wall = time.perf_counter() - start
        mine = torch.tensor([wall, time.process_time() - cpu, *phases], dtype=torch.float64) / steps
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
        table = torch.stack(ranks)
        means = dict(zip(PHASES, table[:, 2:].mean(0).tolist()))
        return {"wall": float(table[:, 0].max()), "cpu": float(table[:, 1].sum()), **means}

    def prepare(self) -> None:
        for name in self.names:
            self.say("building", name)
            self.contestants[name] = make(name, self.work)
        for name in self.names:
            self.say("warming", name)
            self.block(name, WARMUP_STEPS)
            seconds = self.block(name, 1)["wall"]  # the same on every rank
            self.block_steps[name] = max(1, math.ceil(self.cell.block_seconds / seconds))

    def cycle(self, number: int) -> dict[str, Block]:
        """The mean of each contestant's two blocks."""
        blocks: dict[str, list[Block]] = {name: [] for name in self.names}
        for name in [*self.names, *reversed(self.names)]:
            self.say(f"cycle {number} of {self.cell.cycles}:", name)
            blocks[name].append(self.block(name, self.block_steps[name]))
        return {name: {field: (a[field] + b[field]) / 2 for field in a} for name, (a, b) in blocks.items()}

    def run(self) -> None:
        self.prepare()
        cycles = [self.cycle(number) for number in range(1, self.cell.cycles + 1)]
        if dist.get_rank() == 0:
            result = {
                name: {"cycles": [cycle[name] for cycle in cycles], "block_steps": self.block_steps[name]}
                for name in self.names
            }
            (self.report / "blocks.json").write_text(json.dumps(result), encoding="utf-8")
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", required=True, type=Cell.from_json)
    parser.add_argument("--contestants", required=True)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Job(arguments.cell, arguments.contestants.split(","), arguments.report).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
