"""One rank of four, two stages of two ranks that share matrices: each sends its slice of what they have alike, and
running statistics of a stage reach all ranks; see pipe_test.py."""

from __future__ import annotations

import torch
from pipe_rank import Row, config_of, made
from torch import nn

import zeroth

MICRO = 2


def trained(world: zeroth.World, scatter: bool) -> tuple[float, int]:
    """Loss of the second step, and the bytes that this rank sent in both."""
    config = config_of(Row("llama", 2, micro=MICRO, tp=2), 1)
    config["zeroth"]["pipeline"]["scatter"] = scatter  # type: ignore[index]
    engine = zeroth.Engine(made("llama"), config, world=world, log_level="warning")
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        tokens = torch.randint(1, 97, (4, 32), generator=generator)
        _, loss = engine.train_batch([{"input_ids": tokens, "labels": tokens}] * MICRO)
    sent = engine._pipeline.core.report()["sent_bytes"]  # type: ignore[union-attr]
    engine.close(keep_parameters=False)
    return loss, sent


def check_slices(world: zeroth.World) -> None:
    whole, slices = trained(world, False), trained(world, True)
    assert whole[0] == slices[0], (whole, slices)
    # Hidden states of 4 x 32 tokens in float64, and their gradients, in each of two steps.
    assert whole[1] == 2 * MICRO * 4 * 32 * 32 * 8, whole
    assert slices[1] * 2 == whole[1], (slices, whole)


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.append(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
            self[number][1].momentum = 0.5


def check_statistics(world: zeroth.World) -> None:
    torch.manual_seed(2)
    model = Normed()
    config = config_of(Row("llama", 2, micro=MICRO), 1)
    zeroth.pipeline(model, config, world=world, loss_fn=lambda y, target: (y - target).square().mean())
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    torch.manual_seed(3)
    batches = [(torch.randn(5, 6), torch.randn(5, 6)) for _ in range(MICRO)]
    engine.train_batch(batches)
    torch.manual_seed(2)
    alone = Normed()
    with torch.no_grad():
        for x, _ in batches:
            alone(x)
    for name, expected in alone.named_buffers():
        own = dict(model.named_buffers())[name]
        assert torch.allclose(own, expected, atol=1e-6), (world.rank, name, own, expected)
    engine.close(keep_parameters=False)


def main() -> None:
    world = zeroth.World.from_environment()
    check_slices(world)
    check_statistics(world)
    print("slices and statistics: ok")


if __name__ == "__main__":
    main()
