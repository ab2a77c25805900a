"""The loop of plain.py with parameters, gradients and optimizer state partitioned (ZeRO-3).

zeroth-run -n 2 python examples/torch_loop/with_zeroth.py
"""

import torch
from torch import nn

import zeroth

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1)
)
optimizer = zeroth.Engine(
    model,
    {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}},
)
weights = torch.randn(8, 1)

for step in range(50):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(model(x), x @ weights)
    loss.backward()
    optimizer.step()
print(f"last loss {loss.item():.4f}")
