"""Models for pipe_chain_test.py: layers for lists, and modules whose blocks exchange this and that."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo import CLASSES, WIDTH, Block, Plain

import zeroth

cross_entropy = F.cross_entropy


def pairs(*rows: int, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of these sizes."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 4, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in rows
    ]


def whole(model: nn.Module) -> Any:
    """The plain call of a list with a loss."""
    return lambda batch: cross_entropy(model(batch[0]), batch[1])


def sequential() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), nn.Tanh(), Block(), nn.Linear(WIDTH, CLASSES)).double()


class Fork(nn.Module):
    """A dict with nested values, one of them no tensor, and one whose gradient nobody asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.linear(x)
        return {"h": [h, (h * 0.5, 3)], "rows": torch.arange(len(x)), "unused": h + 1}


class Join(nn.Module):
    """A tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        h, (half, factor) = x["h"]
        return self.linear(h) * factor + x["rows"][:, None], half


class TwoArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, left: torch.Tensor, right: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return self.linear(left + factor * right)


class Keep(Block):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(zeroth.pipe.stash(self.name, x * 0.5) * 2)


class Use(Block):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + zeroth.pipe.pop(self.name))


class Between(Plain):
    """Code with parameters before, between and after blocks, some of them read by the model itself; a module that runs
    at two places; a change in place of what comes before blocks; and something of its dtype, which all blocks need."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.bridge = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.LayerNorm(WIDTH)

    def through(self, h: torch.Tensor) -> torch.Tensor:
        h = self.bridge(h.mul_(1.5)) + self.position
        mixing = torch.eye(WIDTH, dtype=h.dtype, device=h.device)
        for number, block in enumerate(self.blocks):
            h = block(h @ mixing) * self.scale[number]
            if number == 1:
                h = h + self.bridge(h)
        return self.norm(h * self.position)


class PairBlock(nn.Module):
    """Two tensors and a number pass, another tensor that it returns is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, rest: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        out = torch.tanh(self.linear(h))
        return out, {"rest": h if rest is None else rest + h, "seen": out.mean(), "factor": self.linear.in_features}


class Pairs(Plain):
    def __init__(self) -> None:
        super().__init__(block=PairBlock)

    def through(self, h: torch.Tensor) -> torch.Tensor:
        rest: Any = None
        for block in self.blocks:
            h, more = block(h, rest=rest)
            rest = more["rest"] / more["factor"]
        return h + rest


class Skips(Plain):
    """Blocks that stash and pop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keep("outer"), Keep("inner"), Use("inner"), Use("outer")])


class Mixed(Plain):
    """Two kinds of blocks in one list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH), Block(), nn.Tanh()])


class Gathering(Plain):
    """The head reads what every block returned."""

    def through(self, h: torch.Tensor) -> torch.Tensor:
        states = []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        return torch.stack(states).sum(0)


class Residual(Plain):
    """The model, not the block, adds the input of a block to its output."""

    def __init__(self, *, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled

    def through(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = 0.5 * h + block(h) if self.scaled else h + block(h)
        return h


class Biased(Plain):
    """Every block takes what was made once from a parameter, as a relative position bias is."""

    def __init__(self) -> None:
        super().__init__(block=BiasedBlock)
        self.table = nn.Embedding(3, WIDTH)

    def through(self, h: torch.Tensor) -> torch.Tensor:
        bias = self.table(torch.zeros(len(h), dtype=torch.int64, device=h.device))
        for block in self.blocks:
            h = block(h, position_bias=bias)
        return h


class BiasedBlock(Block):
    def forward(self, x: torch.Tensor, position_bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) + position_bias


class OneRegion(Plain):
    """Two blocks in one activation checkpoint."""

    def through(self, h: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), h, use_reentrant=False)
        return self.blocks[2](h)


class Around(Plain):
    """Each block in an activation checkpoint of the model's."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def through(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.use_reentrant)
        return h


class Dropping(Plain):
    """In training a block may be left out, as by a layerdrop."""

    def through(self, h: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            h = h if number == 1 and self.training else block(h)
        return h


class Choosing(Plain):
    """Looks at values to choose its way."""

    def through(self, h: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(h[:, 0] > -1e9)[:, 0]
        h = h.index_add(0, rows, h[rows])
        return super().through(h * 2 if bool((h.abs() > 1e9).any()) else h)


class TiedHead(nn.Embedding):
    """An embedding of labels, whose weight is the head, too."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return super().forward(y % CLASSES)


def head_of(module: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return F.linear(h, module.weight)  # type: ignore[arg-type]
