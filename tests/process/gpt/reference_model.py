"""The model of zeroth-gpt in plain PyTorch, written from its description, and a reader of safetensors files."""

import json
import pathlib
import struct
from collections.abc import Mapping

import torch
import torch.nn.functional as F

DTYPES = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16}


def read_safetensors(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """Tensors by name: eight bytes of header length, a JSON header, the data."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + length + begin : 8 + length + end])
        tensors[name] = torch.frombuffer(raw, dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x_BTNH: torch.Tensor) -> torch.Tensor:
    """Multiplies the pair (h, h + H/2) as a complex number by exp(i * t * 10000^(-2h/H))."""
    length, width = x_BTNH.shape[1], x_BTNH.shape[3]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    real, imaginary = x_BTNH.double().split(width // 2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)[None, :, None, :]
    return torch.cat([turned.real, turned.imag], dim=-1)


def attention(x_BTD: torch.Tensor, w: Mapping[str, torch.Tensor], prefix: str, heads: int) -> torch.Tensor:
    B, T, D = x_BTD.shape
    q, k, v = (x_BTD @ w[prefix + "qkv.weight"].T).split(D, dim=-1)
    q, k = (rotate(part.view(B, T, heads, -1)).transpose(1, 2) for part in (q, k))
    v = v.view(B, T, heads, -1).transpose(1, 2)
    scores = q @ k.transpose(-1, -2) / (D // heads) ** 0.5
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D) @ w[prefix + "out.weight"].T


def mlp(x: torch.Tensor, w: Mapping[str, torch.Tensor], prefix: str) -> torch.Tensor:
    gate, up = (x @ w[prefix + "gate_up.weight"].T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ w[prefix + "down.weight"].T


def loss(weights: Mapping[str, torch.Tensor], tokens: torch.Tensor, heads: int) -> float:
    """Mean cross entropy in nats of windows [B, T + 1], computed in float64."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    x = w["embedding"][tokens[:, :-1]]
    for i in range(layers):
        block = f"blocks.{i}."
        x = x + attention(rms_norm(x, w[block + "attention_norm.weight"]), w, block + "attention.", heads)
        x = x + mlp(rms_norm(x, w[block + "mlp_norm.weight"]), w, block + "mlp.")
    logits = rms_norm(x, w["last_norm.weight"]) @ w["embedding"].T
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
