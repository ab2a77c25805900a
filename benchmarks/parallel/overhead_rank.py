"""A rank of overhead.py: its contestants in paired blocks, A B C C B A, a barrier before each; the time of a block is
that of the slowest rank, CPU time the sum over ranks."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, LlamaConfig, LlamaModel
from transformers.masking_utils import AttentionMaskInterface

import zeroth
from zeroth import parallel

HIDDEN, HEADS, INTERMEDIATE, HEAD = 512, 8, 1376, 64
MATRICES = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"} | {
    "gate_proj": "column",
    "up_proj": "column",
    "down_proj": "row",
}
Step = Callable[[], torch.Tensor]


def blocks(layers: int, tokens: int, attention: str = "sdpa", ranks: int = 1) -> Any:
    """The model, or what a rank has of it if `ranks` share its matrices."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 32,  # not used
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE // ranks,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS // ranks,
        "num_key_value_heads": HEADS // ranks,
        "head_dim": HEAD,
        "max_position_embeddings": tokens,
        "attn_implementation": attention,
    }
    return LlamaModel(LlamaConfig(**options))


def step_of(model: Any, tokens: torch.Tensor, **more: Any) -> Step:
    """Forward and backward of hidden states [1, S, HIDDEN]; returns the loss."""

    def step() -> torch.Tensor:
        model.zero_grad()
        out = model(inputs_embeds=tokens, use_cache=False, **more).last_hidden_state
        loss: torch.Tensor = out.square().sum()
        loss.backward()
        return loss.detach()

    return step


def heads_apart(attend: Callable[..., torch.Tensor], name: str) -> str:
    """Registers attend(q, k, v), all [1, H, n, D] of this rank's tokens."""

    def attention(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **_: Any) -> Any:
        return attend(q, k, v), None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    return name


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def tensor_steps(names: list[str], layers: int, tokens: torch.Tensor, world: zeroth.World) -> dict[str, Step]:
    steps = {}
    inputs = tokens.requires_grad_()  # so that the first block has a gradient to sum over ranks, too
    for name in names:
        model = blocks(layers, tokens.shape[1], ranks=world.size if name == "floor" else 1)
        if name == "zeroth":
            zeroth.parallelize(model, {"zeroth": {"mesh": {"tp": world.size}}}, world=world)
        if name == "dtensor":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            ways: dict[str, Any] = {"column": ColwiseParallel, "row": RowwiseParallel}
            plan = {
                f"layers.*.{'mlp' if one in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{one}": ways[way]()
                for one, way in MATRICES.items()
            }
            parallelize_module(model, init_device_mesh("cpu", (world.size,)), plan)
        steps[name] = step_of(model, inputs)
    return steps


def sequence_steps(names: list[str], layers: int, tokens: torch.Tensor, world: zeroth.World) -> dict[str, Step]:
    steps = {}
    length = tokens.shape[1]
    own = length // world.size
    positions = torch.arange(world.rank * own, (world.rank + 1) * own)[None]
    part = tokens[:, world.rank * own : (world.rank + 1) * own]
    for name in names:
        if name == "zeroth":
            model = blocks(layers, length)
            parallel.split_sequence(model, world.mesh({"sp": world.size}).axis("sp"))
            steps[name] = step_of(model, tokens)
            continue
        if name == "floor":
            form = (1, HEADS // world.size, length, HEAD)

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                out = causal(q.reshape(form), k.reshape(form), v.reshape(form))
                return out.reshape(q.shape).transpose(1, 2)

        else:
            from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-not-found, unused-ignore]

            local = lambda q, k, v: causal(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)  # noqa: E731
            exchange = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                out: torch.Tensor = exchange(*(one.transpose(1, 2).contiguous() for one in (q, k, v)), 0)
                return out

        model = blocks(layers, length, heads_apart(attend, name))
        steps[name] = step_of(model, part, position_ids=positions)
    return steps


def block(step: Step) -> dict[str, float]:
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    step()
    mine = torch.tensor([time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return {"wall": max(float(one[0]) for one in every), "cpu": sum(float(one[1]) for one in every)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["tensor", "sequence"])
    parser.add_argument("names", nargs="+")
    for option in ("cycles", "tokens", "layers"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--result", type=pathlib.Path, required=True)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if "deepspeed" in given.names:
        import deepspeed  # type: ignore[import-not-found, unused-ignore]

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    world = zeroth.World.from_environment()
    tokens = torch.randn(1, given.tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    make = tensor_steps if given.part == "tensor" else sequence_steps
    steps = make(given.names, given.layers, tokens, world)
    losses = {}
    for name, step in steps.items():
        losses[name] = step()
        if given.part == "sequence":
            dist.all_reduce(losses[name])
    peer = given.names[-1]
    equal = bool((losses["zeroth"] / losses[peer] - 1).abs() < 1e-4)
    cycles = []
    for _ in range(given.cycles):
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
        for name in [*steps, *reversed(steps)]:
            turns[name].append(block(steps[name]))
        cycles.append({name: {key: (a[key] + b[key]) / 2 for key in a} for name, (a, b) in turns.items()})
    if world.rank == 0:
        model = blocks(given.layers, given.tokens)
        packages = ["torch", "transformers", *(["deepspeed"] if "deepspeed" in given.names else [])]
        settings = {"part": given.part, "ranks": world.size, "tokens": given.tokens, "layers": given.layers}
        found = {
            "cycles": cycles,
            "settings": settings | {"parameters": sum(one.numel() for one in model.layers.parameters())},
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "notes": [f"zeroth and {peer} have {'the same loss' if equal else 'OTHER LOSSES'}"],
        }
        given.result.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


main()
