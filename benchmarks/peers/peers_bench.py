#!/usr/bin/env python3
"""Peers against the same floor as Zeroth: torch DDP and FSDP2 over gloo, in paired blocks of one job.

  torchrun --nproc-per-node 2 benchmarks/peers/peers_bench.py --peers ddp,fsdp2,fsdp2_keep --cycles 8 --json peers.json

or `zeroth-run -n 2 python benchmarks/peers/peers_bench.py ...`. Every rank holds the floor (plain torch, fused AdamW, no
communication) and one model for each peer; order A B C C B A, a barrier before every block, block time = slowest rank.
fsdp2: every block is its own unit and resharded after forward; fsdp2_keep: reshard_after_forward=False.
bf16: the floor casts the whole model and keeps fp32 masters as step_bench does; DDP has no parameters in bf16 with fp32
masters, so only FSDP2 (MixedPrecisionPolicy: bf16 parameters, fp32 reduction) has a bf16 row.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from gpt import SHAPES, Gpt  # noqa: E402
from record import Record  # noqa: E402

Step = Callable[[], None]


class Batches:
    """Eight batches that all contestants of a rank share."""

    def __init__(self, micro_batch: int, seq: int) -> None:
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        texts = [torch.randint(0, 256, (micro_batch, seq + 1), generator=generator) for _ in range(8)]
        self.batches = [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        return self.batches[step % len(self.batches)]


def trainer(model: nn.Module, batches: Batches) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    count = 0

    def step() -> None:
        nonlocal count
        loss = model(*batches.at(count))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1

    return step


def bf16_floor(model: nn.Module, batches: Batches) -> Step:
    """Parameters and gradients in bf16, fp32 masters, as in step_bench."""
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    model.to(torch.bfloat16)
    parameters = list(model.parameters())
    wide = [torch.empty_like(master) for master in masters]
    for master, gradient in zip(masters, wide):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, lr=3e-4, weight_decay=0.01, fused=True)
    count = 0

    def step() -> None:
        nonlocal count
        model(*batches.at(count)).backward()
        with torch.no_grad():
            torch._foreach_copy_(wide, [parameter.grad for parameter in parameters])
            optimizer.step()
            torch._foreach_copy_(parameters, masters)
        for parameter in parameters:
            parameter.grad = None
        count += 1

    return step


def make(name: str, arguments: argparse.Namespace, batches: Batches) -> Step:
    torch.manual_seed(1)
    model: nn.Module = Gpt(SHAPES[arguments.size])
    if name == "floor":
        return bf16_floor(model, batches) if arguments.dtype == "bf16" else trainer(model, batches)
    if name == "ddp":
        if arguments.dtype == "bf16":
            sys.exit("DDP has no bf16 parameters with fp32 masters; leave it out")
        return trainer(DistributedDataParallel(model, gradient_as_bucket_view=True), batches)
    if name in ("fsdp2", "fsdp2_keep"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy()
        if arguments.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=name == "fsdp2")
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=name == "fsdp2")
        return trainer(model, batches)
    sys.exit(f"peers are ddp, fsdp2 and fsdp2_keep, not {name}")


def run_block(step: Step, steps: int) -> tuple[float, float]:
    """Milliseconds per step: wall of the slowest rank, CPU of all."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    mine = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
    table = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(table, mine)
    return max(float(row[0]) for row in table) * 1e3 / steps, sum(float(row[1]) for row in table) * 1e3 / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="ddp,fsdp2,fsdp2_keep")
    parser.add_argument("--size", choices=sorted(SHAPES), default="25m")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--steps-per-block", type=int, default=2)
    parser.add_argument("--json", help="file for the result")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    record = Record(benchmark="peers/step")
    batches = Batches(arguments.micro_batch, SHAPES[arguments.size].seq)
    names = ["floor", *arguments.peers.split(",")]
    steps = {name: make(name, arguments, batches) for name in names}
    for step in steps.values():
        step()
        step()
    cycles: list[dict[str, tuple[float, float]]] = []
    for cycle in range(arguments.cycles):
        first = {name: run_block(steps[name], arguments.steps_per_block) for name in names}
        second = {name: run_block(steps[name], arguments.steps_per_block) for name in reversed(names)}
        cycles.append({n: ((first[n][0] + second[n][0]) / 2, (first[n][1] + second[n][1]) / 2) for n in names})
        if dist.get_rank() == 0:
            text = "  ".join(f"{name} {cycles[-1][name][0]:.1f} ms" for name in names)
            print(f"cycle {cycle + 1}/{arguments.cycles}:  {text}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        record.versions["torch"] = torch.__version__
        record.settings = {
            "size": arguments.size,
            "parameters": sum(parameter.numel() for parameter in Gpt(SHAPES[arguments.size]).parameters()),
            "dtype": arguments.dtype,
            "ranks": world,
            "micro_batch": arguments.micro_batch,
            "cycles": len(cycles),
            "steps_per_block": arguments.steps_per_block,
            "backend": "gloo",
        }
        for name in names:
            record.add(f"{name} wall", "ms", [cycle[name][0] for cycle in cycles])
        for name in names[1:]:
            for index, what in enumerate(["wall", "CPU"]):
                values = [100 * (cycle[name][index] / cycle["floor"][index] - 1) for cycle in cycles]
                record.add(f"{name} over floor, {what}", "%", values, "lower")
        record.notes.append(f"peak resident memory of rank 0, all models together: "
                            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
        record.notes.append(f"fastest floor cycle {min(cycle['floor'][0] for cycle in cycles):.1f} ms, "
                            f"median {statistics.median(cycle['floor'][0] for cycle in cycles):.1f} ms")
        record.write(arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
