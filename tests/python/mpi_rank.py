"""One rank that mpirun or zeroth-run starts: trains at every stage, and says over what and with which losses; or fails
in the third step as the argument says. With GROUP in the environment over a group of torch.distributed. See
mpi_test.py, apart_test.py and c10d_test.py."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import zoo
from sums_rank import order_of_sums

import zeroth

STEPS = 4


# Instead of the stages, in this order, with sums of micro-steps inside pairs of ranks.
DEGREES: list[dict[str, object]] = [
    {"stage": 0},
    {"stage": 2},
    {"stage": 3, "mics_shard_size": 2},
    {"stage": 3, "zero_hpz_partition_size": 2},
]


def trained(world: zeroth.World, stage: int, trouble: str) -> list[str]:
    """Mean losses in hexadecimal."""
    degrees = "DEGREES" in os.environ
    micro_steps = 2 if degrees else 1
    config = {
        "zero_optimization": DEGREES[stage] if degrees else {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "gradient_accumulation_steps": micro_steps,
        "zeroth": {
            "timeout_ms": 20_000,
            "ranks_per_node": int(os.environ.get("RANKS_PER_NODE", "0")),
            "gradient_degree": 2 if degrees else 0,
            "reduction": os.environ.get("REDUCTION", "rank_order"),
            "check_calls": "CHECK_CALLS" in os.environ,
        },
    }
    of_ranks = next(zoo.batches(world.size, 1, 1))[0]
    losses = []
    engine = zeroth.Engine(zoo.make("plain"), config, world=world, progress_every_s=0)
    engine.reset_counters()
    for step in itertools.count() if trouble == "for ever" else range(STEPS):
        if step == 2 and trouble == "for ever":
            print("trained", flush=True)
        if step == 2 and world.rank == 1 and trouble not in ("", "for ever"):
            have(trouble, world)
        for micro_step in range(micro_steps):
            loss = engine(*of_ranks[(world.rank + micro_step) % world.size])
            engine.backward(loss)
            assert engine.step().committed == (micro_step + 1 == micro_steps)
        losses.append(engine.average(loss.item()).hex())
    wire = engine.wire_report()
    os.write(
        2,
        f"rank {world.rank} stage {stage} payload {wire['all_gather'] + wire['reduce_scatter']} between nodes {wire['between_nodes']}\n".encode(),  # noqa: E501
    )
    engine.close()
    return losses


def have(trouble: str, world: zeroth.World) -> None:
    if trouble == "tell":
        world.abort("the data set has ended")
        sys.exit(3)
    if trouble == "raise":
        raise RuntimeError("the data set has ended")
    if trouble == "freeze":
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    if "GROUP" in os.environ:
        dist.init_process_group("gloo")
    world = zeroth.World.from_group() if "GROUP" in os.environ else zeroth.World.from_environment()
    for stage in range(4):
        losses = trained(world, stage, sys.argv[1] if len(sys.argv) > 1 else "")
        # In one write: mpirun passes on what ranks write without looking for lines.
        os.write(1, f"{world.rank} of {world.size} over {world.backend}, stage {stage}: {' '.join(losses)}\n".encode())
    if os.environ.get("RANKS_PER_NODE") == "2":
        degree = 2 if "DEGREES" in os.environ else 0
        found = [order_of_sums(world, plan, ranks_per_node=2, gradient_degree=degree) for plan in DEGREES]
        os.write(1, f"rank {world.rank} has sums of {set(found)}\n".encode())


if __name__ == "__main__":
    main()
