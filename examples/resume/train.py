"""Stops and goes on: saves while it trains, and begins where the newest whole checkpoint ends.

    zeroth-run -n 2 python examples/resume/train.py runs/a              # 40 steps
    zeroth-run -n 2 python examples/resume/train.py runs/a --stop 15    # ends by SIGKILL in step 15; run it again
    zeroth-run -n 3 python examples/resume/train.py runs/a --stage 1    # other ranks, another stage

Two ranks that are killed and started again print the losses of two that were not, to the last digit. On other ranks the
weights and moments are the same, and the loss goes on.
"""

import argparse
import os
import signal

import torch
from torch import nn

import zeroth

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--stop", type=int, default=0, help="the step in which rank 0 is killed")
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 64),
    *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)),
    nn.Linear(64, 1),
)
engine = zeroth.Engine(
    model,
    {"zero_optimization": {"stage": options.stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
    log_level="warning",
)
target = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
torch.manual_seed(
    100 + engine.rank
)  # of the data, and of dropout: a checkpoint has the state of every rank's generator

loaded = engine.load(options.folder, if_any=True)  # None where there is no checkpoint yet
first = loaded.client_state["step"] + 1 if loaded else 1
if loaded and engine.rank == 0:
    print(f"goes on from {loaded.path}, written by {loaded.world_size} ranks", flush=True)

for step in range(first, options.steps + 1):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(engine(x), x @ target)
    engine.backward(loss)
    if step == options.stop and engine.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step()
    mean = engine.average(loss.item())
    if engine.rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {mean.hex()}", flush=True)
    if step % 10 == 0:
        engine.save(options.folder, client_state={"step": step}, keep_last=2)
