"""The GPT of examples/gpt_cpp in Python: pre-norm RMSNorm, rotary positions, SwiGLU, tied embedding.

Shape letters: B batch, T sequence, D width, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(kw_only=True, frozen=True)
class Shape:
    layers: int
    d_model: int
    seq: int = 128
    vocab: int = 256

    @property
    def heads(self) -> int:
        return self.d_model // 64


SHAPES = {
    "3m": Shape(layers=4, d_model=256),
    "25m": Shape(layers=8, d_model=512),
    "120m": Shape(layers=17, d_model=768),
}


class Block(nn.Module):
    def __init__(self, shape: Shape, cos: Tensor, sin: Tensor) -> None:
        super().__init__()
        d, hidden = shape.d_model, (shape.d_model * 8 // 3 + 16) // 32 * 32
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(d, eps=1e-6)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.mlp_norm = nn.RMSNorm(d, eps=1e-6)
        self.gate_up = nn.Linear(d, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)
        self.cos, self.sin = cos, sin  # not buffers: no peer shall send them around

    def attention(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv_BT3NH = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads)
        first, second = qkv_BT3NH[:, :, :2].chunk(2, -1)
        cos, sin = self.cos[:T].to(x_BTD.dtype), self.sin[:T].to(x_BTD.dtype)
        qk = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        q_BNTH, k_BNTH = qk[:, :, 0].transpose(1, 2), qk[:, :, 1].transpose(1, 2)
        v_BNTH = qkv_BT3NH[:, :, 2].transpose(1, 2)
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        out_BTD: Tensor = self.out(y_BNTH.transpose(1, 2).reshape(B, T, D))
        return out_BTD

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        gate, up = self.gate_up(self.mlp_norm(h_BTD)).chunk(2, -1)
        down_BTD: Tensor = self.down(F.silu(gate) * up)
        return h_BTD + down_BTD


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.d_model)
        half = shape.d_model // shape.heads // 2
        with torch.device("cpu"):  # no parameter: it has values also where the model is built without
            angle = torch.outer(torch.arange(shape.seq), 1e4 ** (-torch.arange(half) / half))
        angle = angle.view(shape.seq, 1, 1, half)
        self.blocks = nn.ModuleList(Block(shape, angle.cos(), angle.sin()) for _ in range(shape.layers))
        self.last_norm = nn.RMSNorm(shape.d_model, eps=1e-6)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        h_BTD = self.embedding(x_BT)
        for block in self.blocks:
            h_BTD = block(h_BTD)
        logits_BTV = F.linear(self.last_norm(h_BTD), self.embedding.weight).float()
        return F.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
