"""A plain PyTorch loop. with_zeroth.py is the same file but for the lines that `diff plain.py with_zeroth.py` shows.

python examples/torch_loop/plain.py
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
weights = torch.randn(8, 1)

for step in range(50):
    x = torch.randn(32, 8)
    loss = nn.functional.mse_loss(model(x), x @ weights)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"last loss {loss.item():.4f}")
