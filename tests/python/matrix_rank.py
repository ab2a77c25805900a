"""One rank: the parity matrix of the core through the Python package. Started by zeroth-run; see parity_test.py.

Every stage, reshard setting and execution mode must give the bits of stage 0, for each dtype, number of micro-steps and reduction
policy.
"""

from __future__ import annotations

import itertools

import torch
import zoo

import zeroth

STEPS = 3
PLANS = [(0, "default"), (1, "default"), (2, "default"), (3, "default"), (3, "all"), (3, "none")]


class Late(zoo.Plain):
    """The last block runs twice, the second one only in some steps: gradients that come late, or not at all."""

    def __init__(self) -> None:
        super().__init__(blocks=5)
        self.step = 0

    def through(self, h: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != 1 or self.step % 2 == 0:
                h = block(h)
        self.step += 1
        last: torch.Tensor = self.blocks[-1](h)
        return last


def train(world: zeroth.World, dtype: torch.dtype, micro_steps: int, config: dict[str, object]) -> tuple[object, ...]:
    torch.manual_seed(7)
    model = Late().to(dtype)
    engine = zeroth.Engine(model, config, world=world, log_level="off")
    numbers: list[object] = []
    for micro_batches in zoo.batches(world.size, micro_steps, STEPS, dtype):
        for of_ranks in micro_batches:
            loss = engine(*of_ranks[world.rank])
            engine.backward(loss)
            result = engine.step()
            numbers.append(engine.average(loss.item()).hex())
        assert result.committed, result
        numbers.append(result.grad_norm.hex())
    engine.close()
    return (*numbers, *(value.double().numpy().tobytes() for _, value in sorted(model.state_dict().items())))


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    count = 0
    for dtype, (micro_steps, policy) in itertools.product(dtypes, ((1, "per_step"), (3, "per_micro_step"), (3, "per_step"))):
        expected = None
        for (stage, reshard), execution in itertools.product(PLANS, ("inline", "chaos")):
            count += 1
            config = {
                "bf16": {"enabled": dtype == torch.bfloat16},
                "train_micro_batch_size_per_gpu": 3,
                "gradient_accumulation_steps": micro_steps,
                "gradient_clipping": 0.5,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
                "zero_optimization": {"stage": stage},
                "zeroth": {"threads": 1, "timeout_ms": 60_000, "reduction_policy": policy, "reshard": reshard,
                           "execution": execution, "chaos_seed": count},
            }
            numbers = train(world, dtype, micro_steps, config)
            expected = expected or numbers
            assert numbers == expected, f"{dtype}, {micro_steps} micro-steps, {policy}: stage {stage}, reshard {reshard}, {execution}"
    if world.rank == 0:
        print(f"{count} runs: ok", flush=True)


if __name__ == "__main__":
    main()
