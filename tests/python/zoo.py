"""Models with everything that a user's module may do, small enough to be trained in float64 beside plain torch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 12
CLASSES = 5


class Block(nn.Module):
    """x + tanh(x W' + b)"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Plain(nn.Module):
    """Blocks in a ModuleList: the units that are found by themselves."""

    def __init__(self, blocks: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def through(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.through(self.first(x))), y)


class Sequential(nn.Module):
    """Blocks in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(x), y)


@dataclasses.dataclass
class State:
    h: torch.Tensor
    skip: torch.Tensor | None = None
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)


class Output(collections.OrderedDict[str, Any]):
    """As Hugging Face's ModelOutput: a dictionary with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Box:
    """Holds tensors in attributes; nobody has registered it."""

    def __init__(self, h: torch.Tensor, others: list[torch.Tensor]) -> None:
        self.h = h
        self.others = others


class NestedBlock(nn.Module):
    """Takes a dataclass, a keyword and None; gives in turn a dataclass, a ModelOutput, a plain object, a tuple with a
    list."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.ones(()))
        self.kind = kind

    def forward(self, state: State, *, scale: torch.Tensor, unused: None = None) -> Any:
        h = state.h + scale * self.gate * torch.tanh(self.linear(state.h))
        if self.kind == 0:
            return State(h=h, skip=h * 0.5, extras={"note": "text", "more": (h.mean(), [h.sum()])})
        if self.kind == 1:
            return Output(h=h, none=None, number=3)
        if self.kind == 2:
            return Box(h, [h * 2])
        return h, [{"again": h}], None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(NestedBlock(kind) for kind in (0, 1, 2, 3, 0))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        state = State(self.first(x))
        penalty = torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            out = block(state, scale=self.scale, unused=None)
            if isinstance(out, State):
                penalty = penalty + 1e-3 * out.extras["more"][1][0]
                state = out
            else:
                state = State(out[0] if isinstance(out, tuple) else out.h)
        return F.cross_entropy(self.head(state.h), y) + penalty


class Tied(nn.Module):
    """Embedding and head share a weight; two blocks share one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embedding(y.roll(1)) + x.mean()
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h), y)


class Reused(Plain):
    """Each block twice in one forward."""

    def through(self, h: torch.Tensor) -> torch.Tensor:
        return super().through(super().through(h))


class CheckpointedInside(nn.Module):
    """Part of a unit is checkpointed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(
            lambda h: torch.tanh(self.second(torch.tanh(self.linear(h)))), x, use_reentrant=self.use_reentrant
        )


class Checkpointed(Plain):
    """Whole units are checkpointed, each by itself and two together."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(blocks=4)
        self.use_reentrant = use_reentrant

    def through(self, h: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.blocks[0], h, use_reentrant=self.use_reentrant)
        h = checkpoint(lambda x: self.blocks[2](self.blocks[1](x)), h, use_reentrant=self.use_reentrant)
        return self.blocks[3](h)


class Frozen(Plain):
    """One block is frozen, and the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.first.requires_grad_(False)


class OddBlock(nn.Module):
    """0-dimensional, channels-last and empty parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + self.scale * torch.tanh(self.conv(image)) + self.nothing.sum()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.head = nn.Linear(3 * 4, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x.reshape(-1, 1, 2, 2).expand(-1, 3, -1, -1) * 1.0
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h.flatten(1)), y)


class NormedBlock(nn.Module):
    """A convolution after batch norm; the running mean is part of what comes out, so that ranks with other buffers have
    other losses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        mean = self.norm.running_mean
        assert mean is not None
        return image + torch.tanh(self.conv(self.norm(image) - mean[:, None, None]))


class Normed(Plain):
    """Buffers that every forward in training changes."""

    def __init__(self) -> None:
        super().__init__(block=NormedBlock)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        image = self.through(self.first(x).reshape(-1, 3, 2, 2))
        return F.cross_entropy(self.head(image.flatten(1)), y)


class RootMeanSquareBlock(Block):
    """A bfloat16 weight whose gradient is a float32 one, beside a matrix whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Unused(Plain):
    """A block that no forward uses, and a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def through(self, h: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[0](h))


class PartlyUsedBlock(Block):
    """One parameter never gets a gradient, another one not always."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, bias: bool = True) -> torch.Tensor:
        return x + torch.tanh(F.linear(x, self.linear.weight, self.linear.bias if bias else None))


class PartlyUsed(Plain):
    """Which parameters get no gradient depends on the batch, so it is others on every rank: of blocks, also within
    checkpoints, and of what lies around them."""

    def __init__(self) -> None:
        super().__init__(blocks=5, block=PartlyUsedBlock)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        label = int(y[0])
        h = self.first(x)
        for index, block in enumerate(self.blocks):
            bias = (label + index) % 3 != 0
            if index in (1, 2):
                h = checkpoint(block, h, bias, use_reentrant=index == 1)
            else:
                h = block(h, bias)
        return F.cross_entropy(F.linear(h, self.head.weight, self.head.bias if label % 2 == 0 else None), y)


class ConditionedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h: torch.Tensor, memory: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(self.linear(h) + self.memory(memory)) * prompt


class Conditioned(nn.Module):
    """Every block takes the output of an encoder, and a leaf: their gradients are whole only after the last block's
    backward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, WIDTH)
        self.first = nn.Linear(4, WIDTH)
        self.prompt = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.blocks = nn.ModuleList(ConditionedBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        memory, h = torch.tanh(self.encoder(x)), self.first(x)
        for block in self.blocks:
            h = block(h, memory, prompt=self.prompt)
        return F.cross_entropy(self.head(h), y)


class Translating(nn.Module):
    """Encoder and decoder: two lists of units, of which the second takes the output of the first in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.prompt = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.decoder = nn.ModuleList(ConditionedBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        memory = h = self.first(x)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            h = block(h, memory, self.prompt)
        return F.cross_entropy(self.head(h), y)


class CapturingBlock(nn.Module):
    """Takes a tensor from an attribute, first of all, through a frozen layer, whose backward comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.context = torch.zeros(())

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        mixed = torch.tanh(self.mix(self.context))
        return h + torch.tanh(self.linear(h)) * mixed


class Capturing(Plain):
    def __init__(self) -> None:
        super().__init__(block=CapturingBlock)
        self.encoder = nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        context = self.encoder(x)
        for block in self.blocks:
            block.context = context
        return super().forward(x, y)


class Slotted:
    __slots__ = ("h", "more", "parent")

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h
        self.parent = [self]


class SlottedBlock(Block):
    def forward(self, state: Slotted) -> Slotted:
        return Slotted(super().forward(state.h))


class Slots(Plain):
    """Tensors in __slots__, of an object that lies in itself."""

    def __init__(self) -> None:
        super().__init__(block=SlottedBlock)

    def through(self, h: torch.Tensor) -> torch.Tensor:
        return super().through(Slotted(h)).h


class Viewed(Plain):
    """Changes outputs of units in place, takes views of them, detaches one."""

    def through(self, h: torch.Tensor) -> torch.Tensor:
        h = self.blocks[0](h)
        h = h.mul_(1.5)
        left, right = self.blocks[1](h).chunk(2, dim=-1)
        h = torch.cat([left * 2, right], dim=-1)
        return self.blocks[2](h) + self.blocks[2](h.detach())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "sequential": Sequential,
    "nested": Nested,
    "tied": Tied,
    "reused": Reused,
    "checkpoint_inside": lambda: Plain(block=lambda: CheckpointedInside(use_reentrant=False)),
    "checkpoint_inside_reentrant": lambda: Plain(block=lambda: CheckpointedInside(use_reentrant=True)),
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "checkpoint_reentrant": lambda: Checkpointed(use_reentrant=True),
    "frozen": Frozen,
    "odd": Odd,
    "normed": Normed,
    "root_mean_square": lambda: Plain(block=RootMeanSquareBlock),
    "unused": Unused,
    "partly_used": PartlyUsed,
    "conditioned": Conditioned,
    "translating": Translating,
    "capturing": Capturing,
    "slots": Slots,
    "viewed": Viewed,
}


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model with seeded values."""
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def batches(
    world: int, micro_steps: int, steps: int, dtype: torch.dtype = torch.float64
) -> Iterator[list[list[tuple[torch.Tensor, torch.Tensor]]]]:
    """For each step, for each micro-step, a batch a rank: all of one size, so that means of means are means."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        yield [
            [
                (
                    torch.randn(3, 4, generator=generator, dtype=torch.float64).to(dtype),
                    torch.randint(CLASSES, (3,), generator=generator),
                )
                for _ in range(world)
            ]
            for _ in range(micro_steps)
        ]
