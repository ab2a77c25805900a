"""One rank of four that train models of transformers split over tp and sp, at every ZeRO stage; see tensor_test.py.

Each line of a table is a training: its losses, norms and weights are those of one process with the whole batch, in
float64, and those of another stage with ==.

tensor_rank.py PART...     the parts of the table, or `all` of four ranks
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from typing import Literal

import torch
from tensor_models import MODELS, VOCAB, llama, qwen3
from torch import nn
from wide_norms import wide_norms

import zeroth

__all__ = ["MODELS", "llama", "qwen3"]

STEPS = 2


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    tp: int
    sp: int
    stage: int
    micro_steps: int = 1
    clip: float = 0.0
    norms: Literal["whole", "split"] = "whole"
    sequence: str = "ulysses"
    """method, and after a blank the order"""
    degrees: tuple[int, int, int] = (0, 0, 0)
    """of parameters, optimizer, gradients: shard groups smaller than the data ranks"""
    dtype: str = ""
    """bf16 or fp16"""
    recompute: bool = False


TABLES = {
    "few": [
        Row("llama", 2, 1, 3),
        Row("gpt2", 4, 1, 2, micro_steps=2),
        Row("t5", 2, 1, 0),
        Row("bert", 2, 1, 1),
        Row("mistral", 1, 2, 3),
        Row("gpt2", 1, 4, 1),
        Row("qwen3", 2, 2, 3, clip=0.1),
        Row("gemma", 2, 2, 2),
    ],
    "tp": [
        Row("llama", 2, 1, 3),
        Row("llama", 4, 1, 2),
        Row("qwen2", 2, 1, 1, clip=0.1),
        Row("qwen3", 2, 1, 0, micro_steps=2),
        Row("mistral", 4, 1, 3),
        Row("gemma", 2, 1, 3),
        Row("gpt2", 2, 1, 2),
        Row("t5", 2, 1, 3),
        Row("bert", 2, 1, 1),
    ],
    "sp": [
        Row("llama", 1, 2, 3, clip=0.1),
        Row("llama", 1, 4, 1),
        Row("qwen3", 1, 2, 2, micro_steps=2),
        Row("gpt2", 1, 2, 0),
        Row("mistral", 1, 2, 3),
    ],
    "both": [
        Row("llama", 2, 2, 3),
        Row("qwen3", 2, 2, 1, clip=0.1),
        Row("gpt2", 2, 2, 2, micro_steps=2),
        Row("gemma", 2, 2, 0),
    ],
    "ring": [
        Row("llama", 1, 4, 3, sequence="grid"),
        Row("qwen3", 1, 4, 1, sequence="grid token", micro_steps=2),
        Row("gpt2", 1, 4, 2, sequence="ring token"),
        Row("llama", 2, 2, 0, sequence="ring", norms="split"),
    ],
    "half": [
        Row("llama", 2, 1, 3, dtype="bf16"),
        Row("qwen3", 1, 2, 2, dtype="bf16", recompute=True),
        Row("llama", 2, 1, 2, dtype="fp16"),
        Row("llama", 2, 2, 1, dtype="fp16", clip=0.1, norms="split"),
    ],
    "mixes": [
        Row("llama", 2, 1, 3, recompute=True, micro_steps=2, clip=0.1),
        Row("llama", 1, 2, 2, recompute=True, micro_steps=2, clip=0.1),
        Row("gpt2", 2, 2, 3, recompute=True, norms="split"),
        Row("llama", 1, 2, 3, degrees=(2, 0, 0)),
        Row("llama", 1, 2, 3, degrees=(2, 2, 0), micro_steps=2, clip=0.1),
        Row("qwen3", 1, 2, 2, degrees=(0, 2, 2), micro_steps=2),
        Row("llama", 2, 1, 3, degrees=(1, 2, 0), norms="split"),
        Row("gpt2", 2, 1, 3, degrees=(1, 1, 1), micro_steps=2),
    ],
    "eight": [
        Row("llama", 2, 2, 3, recompute=True),
        Row("llama", 2, 1, 3, degrees=(2, 0, 0), micro_steps=2),
        Row("qwen3", 2, 2, 3, degrees=(2, 2, 2), norms="split", clip=0.1, micro_steps=2),
        Row("llama", 2, 4, 2, sequence="grid"),
    ],
    "few mixes": [
        Row("llama", 1, 4, 3, sequence="grid"),
        Row("gpt2", 2, 2, 3, recompute=True, norms="split"),
        Row("llama", 2, 1, 2, dtype="fp16", micro_steps=2),
        Row("llama", 1, 2, 3, degrees=(2, 2, 0), clip=0.1),
    ],
    "norms": [
        Row("llama", 2, 1, 3, norms="split"),
        Row("qwen3", 2, 2, 2, norms="split", clip=0.1),
        Row("gpt2", 2, 1, 0, norms="split", micro_steps=2),
        Row("gemma", 4, 1, 1, norms="split"),
        Row("bert", 2, 1, 3, norms="split"),
    ],
}


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(1, VOCAB, (2, 13), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """In float64: transformers' own loss of causal models is computed in float32."""
    if not hasattr(model, "lm_head") or model.config.is_encoder_decoder:
        return model(**inputs).loss
    logits = model(input_ids=inputs["input_ids"]).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]().to(dtype)
    if dtype == torch.float64:
        wide_norms(model)
    return model


@functools.cache
def plain(
    name: str, dp: int, micro_steps: int, clip: float
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and weights of one process."""
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        count = dp * micro_steps
        every = [loss_of(model, **batch(step, number)) / count for number in range(count)]
        for loss in every:
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        losses.append(sum(loss.item() for loss in every))
    return losses, norms, copy.deepcopy(dict(model.state_dict()))


def config_of(row: Row, stage: int) -> dict[str, object]:
    method, _, order = row.sequence.partition(" ")
    zeroth_keys: dict[str, object] = {
        "mesh": {"tp": row.tp, "sp": row.sp},
        "sequence": {"method": method, "order": order or "ring"},
        "tensor": {"norms": row.norms},
        "gradient_degree": row.degrees[2],
    }
    if stage == 3:
        zeroth_keys["parameter_degree"] = row.degrees[0]
    if stage > 0:
        zeroth_keys["optimizer_degree"] = row.degrees[1]
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_accumulation_steps": row.micro_steps,
        "gradient_clipping": row.clip,
        "zeroth": zeroth_keys,
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if row.dtype == "fp16" else {}),
        **({"bf16": {"enabled": True}} if row.dtype == "bf16" else {}),
    }


def train(row: Row, stage: int, world: zeroth.World) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same on the mesh; checks that planned memory is measured."""
    model = made(row.model, torch.float32 if row.dtype else torch.float64)
    if row.recompute:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    engine = zeroth.Engine(model, config_of(row, stage), world=world, log_level="warning")
    inner = row.tp * row.sp
    dp, own = world.size // inner, world.rank // inner
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(row.micro_steps):
            loss = engine(**batch(step, micro * dp + own)).loss
            engine.backward(loss)
            total += loss.item()
            result = engine.step()
        losses.append(engine.average(total / row.micro_steps))
        norms.append(result.grad_norm)
    report = engine.memory_report()
    assert report.planned == report.measured_peak, (row, report.planned, report.measured_peak)
    weights = engine.state_dict(ranks=None)
    engine.close(keep_parameters=False)
    return losses, norms, weights


def close(got: float, expected: float, bound: float = 1e-12) -> bool:
    return abs(got - expected) <= bound * max(1.0, abs(expected))


def check(row: Row, world: zeroth.World) -> None:
    dp = world.size // (row.tp * row.sp)
    losses, norms, weights = plain(row.model, dp, row.micro_steps, row.clip)
    mine = train(row, row.stage, world)
    # 8 bits of bfloat16 and 11 of float16 in each product; weights are those of the float32 master.
    bound = {"": 1e-12, "bf16": 0.05, "fp16": 0.01}[row.dtype]
    assert all(close(*pair, bound) for pair in zip(mine[0], losses, strict=True)), (row, mine[0], losses)
    assert all(close(*pair, 4 * bound) for pair in zip(mine[1], norms, strict=True)), (row, mine[1], norms)
    assert mine[2].keys() == weights.keys(), (row, mine[2].keys() ^ weights.keys())
    for name, value in weights.items():
        # AdamW divides by the root of squares: noise of gradients near 0 becomes larger.
        most = 1e-8 if not row.dtype else 2.1 * STEPS * 1e-2
        assert (mine[2][name] - value).abs().max() < most, (row, name, (mine[2][name] - value).abs().max())
    other = train(row, (row.stage + 2) % 4, world)  # without the degrees that it does not know
    assert mine[:2] == other[:2], (row, mine[:2], other[:2])
    assert all(torch.equal(mine[2][name], other[2][name]) for name in weights), row


def main() -> None:
    world = zeroth.World.from_environment()
    wanted = [name for name in TABLES if name != "eight"] if sys.argv[1:] == ["all"] else sys.argv[1:]
    for part in wanted:
        for row in TABLES[part]:
            check(row, world)
            if world.rank == 0:
                print(f"{row}: ok", flush=True)
    print(f"{sum(len(TABLES[part]) for part in wanted)} rows: ok")


if __name__ == "__main__":
    main()
