"""One rank: models of the zoo over torch's gloo group. Started by zeroth-run; see c10d_test.py.

Sums are formed in rank order there too, so the bits must be those of shared memory, at every stage. Models as
arguments, or `--short` for the rows of SHORT_LIST.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import pairs
import parity_rank
import torch
import torch.distributed as dist
import zoo

import zeroth

Row = dict[str, Any]
DTYPES = (torch.float64, torch.bfloat16)
SHORT_LIST = pairs.beside(
    pairs.pairwise(stage=(0, 1, 2, 3), dtype=DTYPES),
    "model",
    ("plain", "nested", "tied", "reused", "checkpoint", "odd", "normed", "partly_used"),
)
"""On two ranks; on four: mpi_rank.py"""


def grid(names: Sequence[str]) -> list[Row]:
    return [
        {"model": name, "dtype": dtype, "stage": stage}
        for name, dtype, stage in itertools.product(names, DTYPES, (0, 1, 2, 3))
    ]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here = zeroth.World.from_environment()
    group = zeroth.World.from_group()
    assert (group.rank, group.size, group.backend) == (here.rank, here.size, "c10d gloo"), group

    @functools.cache
    def over_shared_memory(name: str, dtype: torch.dtype) -> tuple[object, ...]:
        return parity_rank.bits(*parity_rank.trained_by_zeroth(name, 0, 2, here, dtype))

    short = sys.argv[1:] == ["--short"]
    rows = SHORT_LIST if short else grid(sys.argv[1:] or list(zoo.MODELS))
    for row in rows:
        expected = over_shared_memory(row["model"], row["dtype"])
        got = parity_rank.bits(*parity_rank.trained_by_zeroth(row["model"], row["stage"], 2, group, row["dtype"]))
        assert got == expected, f"{row}: other bits than over shared memory"
    if group.rank == 0:
        print(f"{len(rows)} trainings: ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
