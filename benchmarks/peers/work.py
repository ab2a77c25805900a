"""The work that every contestant of a cell does: the model with its units, and the data."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from cells import MICRO_BATCH, TINY_MODULES, Cell
from gpt import SHAPES, Gpt
from torch import Tensor, nn

CHAIN_WIDTH = 16


class Chain(nn.Module):
    """Tiny linears, near the identity so that values and gradients keep their size (and no denormals slow anything
    down)."""

    def __init__(self) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Linear(CHAIN_WIDTH, CHAIN_WIDTH) for _ in range(TINY_MODULES))
        start = torch.eye(CHAIN_WIDTH) + 1e-3 * torch.ones(CHAIN_WIDTH, CHAIN_WIDTH).tril(-1)
        for parameter in self.parameters():
            parameter.data = start.clone() if parameter.dim() == 2 else torch.zeros(CHAIN_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for link in self.links:
            x = link(x)
        return x.square().mean()


class Work:
    """What a rank does in a cell. Other data on every rank, the same for all contestants."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self.cell = cell
        self.bf16 = cell.dtype == "bf16"
        self.lr = 1e-5 if cell.work == "tiny" else 3e-4
        self.tokens = MICRO_BATCH * (1 if cell.work == "tiny" else SHAPES[cell.work].seq)
        """of one rank in one step"""
        self.parameters = 0
        """of the model, once it was made"""
        self.layers = 0
        """modules with parameters of their own, once it was made"""
        source = torch.Generator().manual_seed(1 + rank)
        self._batches: list[tuple[Tensor, ...]] = []
        for _ in range(8):
            if cell.work == "tiny":
                self._batches.append((torch.rand(MICRO_BATCH, CHAIN_WIDTH, generator=source) + 0.5,))
            else:
                text = torch.randint(0, 256, (MICRO_BATCH, SHAPES[cell.work].seq + 1), generator=source)
                self._batches.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))

    def model(self) -> nn.Module:
        """The same values in every rank and contestant."""
        torch.manual_seed(1)
        model = Chain() if self.cell.work == "tiny" else Gpt(SHAPES[self.cell.work])
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.layers = sum(1 for module in model.modules() if module._parameters)
        return model

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        return model.links if isinstance(model, Chain) else model.blocks  # type: ignore[return-value]

    def batch(self, step: int) -> tuple[Tensor, ...]:
        return self._batches[step % len(self._batches)]

    def adamw(self, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
        """The optimizer that all peers and the floor get."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.01, fused=True)
