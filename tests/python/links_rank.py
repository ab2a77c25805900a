"""One of four ranks on two virtual nodes with a slow link between them: plans that are made for it bring fewer bytes
over it, and have the bits of stage 3. Started by zeroth-run; see parity_test.py."""

from __future__ import annotations

import torch
import zoo

import zeroth

MICRO_STEPS = 3
STEPS = 3
PLANS: dict[str, dict[str, object]] = {
    "stage 3": {"stage": 3},
    "hpZ": {"stage": 3, "zero_hpz_partition_size": 2},
    "MiCS": {"stage": 3, "mics_shard_size": 2},
}


def trained(world: zeroth.World, plan: dict[str, object], bytes_per_s: int) -> tuple[list[str], int]:
    """Mean losses in hexadecimal, and bytes from the other node."""
    config = {
        "zero_optimization": plan,
        "gradient_accumulation_steps": MICRO_STEPS,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zeroth": {"threads": 1, "timeout_ms": 60_000, "ranks_per_node": 2, "link_bytes_per_s": bytes_per_s},
    }
    of_ranks = next(zoo.batches(world.size, 1, 1))[0]
    engine = zeroth.Engine(zoo.make("plain"), config, world=world, log_level="warning")
    engine.reset_counters()
    losses = []
    for _ in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            loss = engine(*of_ranks[(world.rank + micro_step) % world.size])
            engine.backward(loss)
            engine.step()
            losses.append(engine.average(loss.item()).hex())
    far = engine.wire_report()["between_nodes"]
    engine.close()
    return losses, far


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    runs = {name: trained(world, plan, 10_000_000) for name, plan in PLANS.items()}
    fast = trained(world, PLANS["stage 3"], 0)
    losses, far = runs["stage 3"]
    assert fast == (losses, far), "the link takes time, and changes nothing else"
    for name, (other_losses, other_far) in runs.items():
        assert other_losses == losses, name
        assert name == "stage 3" or 0 < other_far < 0.8 * far, (name, other_far, far)
    if world.rank == 0:
        print(f"bytes between nodes: {', '.join(f'{name} {far}' for name, (_, far) in runs.items())}")


if __name__ == "__main__":
    main()
