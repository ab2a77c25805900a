"""A stack of GPT-2's blocks as a list of layers, and its data.

Shape letters: B batch, T sequence, D width, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from setups import Work
from torch import Tensor, nn

HEAD_WIDTH = 64
SEED = 1
"""layer n has random numbers of its own, from SEED + n, as DeepSpeed and Zeroth do it for layers in a list"""
BATCHES = 4
"""different ones; steps take them in turns"""


class Embedding(nn.Module):
    def __init__(self, width: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, x_BT: Tensor) -> Tensor:
        h_BTD: Tensor = self.token(x_BT) + self.position.weight[: x_BT.shape[1]]
        return h_BTD


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv_BTNH = [one.view(B, T, -1, HEAD_WIDTH) for one in self.qkv(self.attention_norm(x_BTD)).split(D, -1)]
        y_BNTH = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in qkv_BTNH), is_causal=True)
        h_BTD = x_BTD + self.out(y_BNTH.transpose(1, 2).reshape(B, T, D))
        out_BTD: Tensor = h_BTD + self.down(F.gelu(self.up(self.mlp_norm(h_BTD)), approximate="tanh"))
        return out_BTD


class Head(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, h_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.logits(self.norm(h_BTD))
        return logits_BTV


def loss_fn(logits_BTV: Tensor, y_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())


Spec = tuple[Callable[..., nn.Module], tuple[Any, ...]]


def specs(work: Work) -> list[Spec]:
    """What makes each layer."""
    first: Spec = (Embedding, (work.width, work.vocabulary, work.tokens))
    return [first, *[(Block, (work.width,))] * work.layers, (Head, (work.width, work.vocabulary))]


def chunk_of(work: Work, chunk: int) -> nn.Sequential:
    """The layers of a chunk, built with their values."""
    made = []
    for number in range(*work.bounds[chunk : chunk + 2]):
        torch.manual_seed(SEED + number)
        kind, arguments = specs(work)[number]
        made.append(kind(*arguments))
    return nn.Sequential(*made)


def batches(work: Work) -> list[list[tuple[Tensor, Tensor]]]:
    """BATCHES steps of micro-batches (inputs, labels), the same on all ranks."""
    source = torch.Generator().manual_seed(SEED)
    count = BATCHES * work.micro_batches
    text = torch.randint(0, work.vocabulary, (count, 1, work.tokens + 1), generator=source)
    pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in text]
    return [pairs[begin : begin + work.micro_batches] for begin in range(0, count, work.micro_batches)]
