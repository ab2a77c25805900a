"""One of two ranks that runs the rank programs of benchmarks/pipeline on hardly any work, each in a child of its own.
Started by zeroth-run; see pipe_benchmarks_test.py. Arguments: the folder of the reports, the work."""

from __future__ import annotations

import pathlib
import sys

import forks

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / folder) for folder in ("pipeline", "support")]

import actions_rank  # noqa: E402
import alone  # noqa: E402
import sleeping_rank  # noqa: E402
import turns  # noqa: E402


def main() -> None:
    folder = sys.argv[1]
    work = ["--work", sys.argv[2], "--report", folder]
    jobs = {
        "alone": (alone.main, [*work, "--trainer", "zeroth"]),
        "turns": (turns.main, [*work, "--trainers", "floor,zeroth", "--cycles", "1", "--block-seconds", "0"]),
        "actions": (
            actions_rank.main,
            [f"--report={folder}/actions", "--micro=3", "--cycles=1", "--steps=1", "--without", "torch", "deepspeed"],
        ),
        "sleeping": (
            sleeping_rank.main,
            [f"--report={folder}/sleeping", "--schedule=1f1b", "--chunks=1", "--micro=4", "--times=5,5,5", "--steps=1"],
        ),
    }

    def case(name: str) -> None:
        run, sys.argv[1:] = jobs[name]
        run()

    forks.run({name: lambda _, name=name: case(name) for name in jobs})


if __name__ == "__main__":
    main()
