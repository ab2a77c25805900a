"""One rank that saves, or goes on from what `zeroth ckpt convert` has made; see convert_test.py.

convert_rank.py WHAT,FOLDER,STAGE,DTYPE...
"""

from __future__ import annotations

import pathlib
import sys

import checkpoint_rank
import torch
from golden import deepspeed_rank

import zeroth

STEPS = (3, 6)
"""saved after the first; the last one"""


class Run(checkpoint_rank.Run):
    """As there, but what a step draws depends on its number alone."""

    def step(self) -> str:
        torch.manual_seed(1000 * (self.engine.steps + 1) + self.engine.rank)
        losses = []
        for _ in range(2):
            x = torch.randint(23, (8,))
            loss = self.engine(x, (x * 3 + 1) % 23)
            self.engine.backward(loss)
            result = self.engine.step()
            losses.append(loss.item())
        self.scheduler.step()
        return f"{result.step} {sum(losses).hex()} {result.grad_norm.hex()} {result.lr.hex()}"


def whole(folder: str, stage: int, dtype: torch.dtype) -> None:
    """Trains, saves, exports, and goes on."""
    run = Run(stage, dtype, seed=1)
    for step in range(1, STEPS[1] + 1):
        line = run.step()
        if step > STEPS[0]:
            checkpoint_rank.tell(run, f"step {line}")
        if step == STEPS[0]:
            run.save(folder)
            run.engine.export_safetensors(str(pathlib.Path(folder) / "export.safetensors"))


def resume(folder: str, stage: int, dtype: torch.dtype) -> None:
    run = Run(stage, dtype, seed=9)
    loaded = run.load(folder)
    assert (loaded.step, loaded.client_state["epoch"], run.engine.steps) == (STEPS[0], 3, STEPS[0]), loaded
    assert not (loaded.missing or loaded.unexpected or loaded.skipped), loaded
    for _ in range(*STEPS):
        checkpoint_rank.tell(run, f"step {run.step()}")


def weights(folder: str, stage: int, dtype: torch.dtype) -> None:
    """Of a checkpoint without states of an optimizer."""
    run = Run(stage, dtype, seed=7)
    rates = run.engine.learning_rates
    try:
        run.engine.load(folder)
    except zeroth.Error as error:
        assert error.code == "CHECKPOINT" and "embed.weight/exp_avg" in str(error), error
    else:
        raise AssertionError("a checkpoint without an optimizer was loaded as one with")
    loaded = run.engine.load(folder, strict=False)
    params = [name.removesuffix("/exp_avg") for name in loaded.missing if name.endswith("/exp_avg")]
    assert len(set(params)) == len(params) == 14 and len(loaded.missing) == 28, loaded  # on every rank, of all ranks
    assert not loaded.unexpected and run.engine.learning_rates == rates, loaded
    run.engine.export_safetensors(str(pathlib.Path(folder) / "export.safetensors"))
    run.step()


def deepspeed(folder: str, stage: int, dtype: torch.dtype) -> None:
    """What a run of DeepSpeed has left, with its model, groups, data and clipping."""
    model = deepspeed_rank.Net().to(dtype)
    engine = zeroth.Engine(
        model,
        {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
            "gradient_clipping": 1.0,
        },
        params=deepspeed_rank.groups_of(model),
        log_level="warning",
    )
    loaded = engine.load(folder)
    assert (loaded.step, loaded.client_state, loaded.missing) == (3, {"epoch": 2}, []), loaded
    generator = torch.Generator().manual_seed(5 + engine.rank)
    for _ in range(3):
        deepspeed_rank.batch(generator)
    for _ in range(2):
        loss = engine(*deepspeed_rank.batch(generator))
        engine.backward(loss)
        engine.step()
        print(f"{engine.rank} loss {loss.item()!r}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    calls = {"whole": whole, "resume": resume, "weights": weights, "deepspeed": deepspeed}
    for call in sys.argv[1:]:
        what, folder, stage, dtype = call.split(",")
        calls[what](folder, int(stage), getattr(torch, dtype))


if __name__ == "__main__":
    main()
