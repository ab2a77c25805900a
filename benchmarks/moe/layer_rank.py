"""A rank of layer.py: layers of experts take turns, A B C C B A, a barrier before each; the time of a step is that of
the slowest rank, CPU time the sum over ranks."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.metadata
import json
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import zeroth
import zeroth.nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from live_bytes import peak_bytes  # noqa: E402

K = 2
BALANCE = 0.01
Layer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Mlp(nn.Module):
    """An expert of which only its forward is known."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.relu(self.up(x)))
        return out


def stack(width: int) -> nn.Module:
    """The same as modules in a row."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class Loop(nn.Module):
    """A loop over experts, as most model code has it. No token is dropped."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Mlp(width) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = functional.softmax(self.gate(x), dim=-1)
        weights, chosen = scores.topk(K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, choice].unsqueeze(-1))
        counts = functional.one_hot(chosen, len(self.experts)).sum((0, 1))
        return out, len(self.experts) * (counts / counts.sum() * scores.mean(0)).sum()


def made(name: str, width: int, experts: int, ranks: int) -> nn.Module:
    """A contestant; "capacity" in its name: an expert takes 1.25 times its share, else every token."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "k": K,
        "capacity_factor": 1.25,
        "drop_tokens": "capacity" in name,
        "use_rts": False,
        "top2_2nd_expert_sampling": False,
    }
    if name.startswith("loop"):
        return Loop(width, experts)
    if name.startswith("zeroth"):
        expert = Mlp(width) if "own forward" in name else stack(width)
        return zeroth.nn.MoE(width, expert, num_experts=experts, **options)
    from deepspeed.moe.layer import MoE  # type: ignore[import-not-found, unused-ignore]

    layer: nn.Module = MoE(width, Mlp(width), num_experts=experts, ep_size=ranks, **options)
    layer.set_deepspeed_parallelism()  # type: ignore[operator]
    return layer


def set_alike(layers: dict[str, nn.Module], width: int, experts: int, ranks: int, rank: int) -> None:
    """The same router and experts in all."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    gate = draw(experts, width)
    up, up_bias = draw(experts, 4 * width, width), draw(experts, 4 * width)
    down, down_bias = draw(experts, width, 4 * width), draw(experts, width)
    own = experts // ranks
    first = rank * own
    with torch.no_grad():
        for name, layer in layers.items():
            state = dict(layer.named_parameters())
            if name.startswith("zeroth"):
                state["gate.weight"].copy_(gate)
                for key, value in state.items():
                    kind = {"0": "up", "2": "down"}.get(
                        key.split(".")[-1].split("__")[0], key.split(".")[-1].split("__")[0]
                    )
                    if key.startswith("experts."):
                        whole = {"up": (up, up_bias), "down": (down, down_bias)}[kind][key.endswith("bias")]
                        value.copy_(whole)
                continue
            for key, value in state.items():
                if "experts" not in key:
                    value.copy_(gate)
                    continue
                number = int(next(part for part in key.split(".") if part.isdigit()))
                number += first if name.startswith("deepspeed") else 0
                whole = {"up": (up, up_bias), "down": (down, down_bias)}[key.split(".")[-2]][key.endswith("bias")]
                value.copy_(whole[number])


class ByDeepSpeed:
    """Payload bytes that its exchanges bring to this rank from others."""

    def __init__(self) -> None:
        self.bytes = 0
        import deepspeed.comm as comm  # type: ignore[import-not-found, unused-ignore]

        call = comm.all_to_all_single

        def counted(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            ranks = dist.get_world_size(kwargs.get("group"))
            self.bytes += output.numel() * output.element_size() * (ranks - 1) // ranks
            return call(output, tensor, *args, **kwargs)

        comm.all_to_all_single = counted


def status_bytes(key: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def resident_bytes(run: Callable[[], object]) -> int:
    """The most memory of this process that was resident while `run` ran, above what was before it. What the C library
    keeps of freed memory is given back first."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status_bytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    run()
    return max(0, status_bytes("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    for option in ("cycles", "tokens", "width", "experts"):
        parser.add_argument(f"--{option}", type=int, required=True)
    parser.add_argument("--result", type=pathlib.Path, required=True)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wire = None
    if any(name.startswith("deepspeed") for name in given.names):
        import deepspeed

        # An operation that it compiles, for calls that a layer of experts does not make.
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
        deepspeed.init_distributed("gloo")
        wire = ByDeepSpeed()
    else:
        dist.init_process_group("gloo")
    world = zeroth.World.from_environment()
    mesh = world.mesh({"ep": world.size})
    layers = {name: made(name, given.width, given.experts, world.size) for name in given.names}
    set_alike(layers, given.width, given.experts, world.size, world.rank)
    for name, layer in layers.items():
        if name.startswith("zeroth"):
            if world.size > 1:
                zeroth.experts(layer, mesh)
    x = torch.randn(given.tokens, given.width, generator=torch.Generator().manual_seed(2 + world.rank)).requires_grad_()
    target = torch.randn(given.tokens, given.width, generator=torch.Generator().manual_seed(9))

    def step(layer: nn.Module) -> torch.Tensor:
        layer.zero_grad()
        x.grad = None
        if isinstance(layer, zeroth.nn.MoE):
            layer.begin_step()
        result = layer(x)
        ((result[0] * target).sum() + BALANCE * result[1]).backward()
        out: torch.Tensor = result[0].detach()
        return out

    def gathered(values: list[float]) -> list[list[float]]:
        every: list[Any] = [None] * world.size
        dist.all_gather_object(every, values)
        return every

    outputs = {name: (step(layer), x.grad) for name, layer in layers.items()}
    facts: dict[str, dict[str, list[float]]] = {}
    for name, layer in layers.items():
        mesh.reset_received()
        if wire is not None:
            wire.bytes = 0
        step(layer)
        received = mesh.received().get("ep", 0) if name.startswith("zeroth") else wire.bytes if wire else 0
        layer.zero_grad()
        x.grad = None
        dist.barrier()
        resident = []
        for _ in range(3):
            layer.zero_grad()
            x.grad = None
            resident.append(float(resident_bytes(lambda one=layer: step(one))))
        layer.zero_grad()
        x.grad = None
        peak = peak_bytes(lambda one=layer: step(one))
        layer.zero_grad()
        of_ranks = gathered([float(received), float(peak), *resident])
        most = [max(of_one) for of_one in zip(*of_ranks, strict=True)]
        facts[name] = {"received": most[:1], "peak": most[1:2], "resident": most[2:]}
    notes = []
    for name, (out, grad) in outputs.items():
        first = next(one for one in outputs if ("capacity" in one) == ("capacity" in name))
        apart = float((out - outputs[first][0]).abs().max() / out.abs().max())
        of_grad = float((grad - outputs[first][1]).abs().max() / grad.abs().max())
        if max(apart, of_grad) > 1e-4:
            notes.append(f"{name}: output is {apart:.1e} from that of {first}, the gradient of x {of_grad:.1e}")
    cycles = []
    for _ in range(given.cycles):
        turns: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
        for name in [*layers, *reversed(layers)]:
            dist.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            step(layers[name])
            of_ranks = gathered([time.perf_counter() - start, time.process_time() - cpu])
            turns[name].append((max(one[0] for one in of_ranks), sum(one[1] for one in of_ranks)))
        cycles.append({name: {"wall": (a[0] + b[0]) / 2, "cpu": (a[1] + b[1]) / 2} for name, (a, b) in turns.items()})
    if world.rank == 0:
        packages = ["torch", *(["deepspeed"] if wire is not None else [])]
        found = {
            "cycles": cycles,
            "facts": facts,
            "versions": {name: importlib.metadata.version(name) for name in packages},
            "notes": notes,
        }
        given.result.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


main()
