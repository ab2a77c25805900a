"""One rank: models of the zoo over torch's gloo group. Started by zeroth-run; see c10d_test.py.

Sums are formed in rank order there too, so the bits must be those of shared memory, at every stage.
"""

from __future__ import annotations

import sys

import parity_rank
import torch
import torch.distributed as dist
import zeroth
import zoo


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here = zeroth.World.from_environment()
    group = zeroth.World.from_group()
    assert (group.rank, group.size, group.backend) == (here.rank, here.size, "c10d gloo"), group
    for name in sys.argv[1:] or zoo.MODELS:
        for dtype in (torch.float64, torch.bfloat16):
            expected = parity_rank.bits(*parity_rank.trained_by_zeroth(name, 0, 2, here, dtype))
            for stage in (0, 1, 2, 3):
                got = parity_rank.bits(*parity_rank.trained_by_zeroth(name, stage, 2, group, dtype))
                assert got == expected, f"{name}, {dtype}, stage {stage}: other bits than over shared memory"
        if group.rank == 0:
            print(f"{name}: ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
