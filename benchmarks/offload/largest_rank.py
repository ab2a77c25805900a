"""A rank of largest.py: finds the largest GPT whose plan fits, and trains it. Rank 0 writes a JSON file.

  zeroth-run -n 2 python largest_rank.py files|resident --folder DIR --memory BYTES --disk BYTES --report FILE ...

Both bounds are of all ranks together. No model is tried: zeroth.plan_tiers() says of a model on the meta device what
every rank would need.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeroth

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
from gpt import Gpt, Shape  # noqa: E402

MICRO_BATCH = 1
BUFFER_BYTES = 8 << 20
"""for activations on their way"""


class Deep(Gpt):
    """With checkpoints around its blocks, and its loss."""

    def forward(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        h_BTD = self.embedding(x_BT)
        for block in self.blocks:
            h_BTD = checkpoint(block, h_BTD, use_reentrant=False)
        logits_BTV = nn.functional.linear(self.last_norm(h_BTD), self.embedding.weight).float()
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())


def config(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3},
        "zeroth": {"threads": 1, "memory_limit_bytes": arguments.memory},
    }
    if arguments.where == "files":
        place = {"device": "nvme", "nvme_path": arguments.folder}
        document["zero_optimization"] |= {"offload_optimizer": place, "offload_param": place}
        document["zeroth"] |= {
            "activations": {**place, "buffer_bytes": BUFFER_BYTES},
            "budget": {"file_bytes": arguments.disk // ranks},
        }
    return document


def build(layers: int, arguments: argparse.Namespace) -> Deep:
    return Deep(Shape(layers=layers, d_model=arguments.width, seq=arguments.seq))


def plans(layers: int, arguments: argparse.Namespace, ranks: int) -> list[zeroth.TierPlan]:
    """Of every rank."""
    with torch.device("meta"):
        model = build(layers, arguments)
    return [zeroth.plan_tiers(model, config(arguments, ranks), world_size=ranks, rank=rank) for rank in range(ranks)]


def largest(fits: Callable[[int], bool]) -> int:
    """The most layers that fit."""
    least = 1
    while fits(2 * least):
        least *= 2
    most = 2 * least  # does not fit
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def moved_bytes() -> tuple[int, int]:
    """That this process has read from disks, and written to them."""
    fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=["files", "resident"])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--disk", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--report", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()

    def fits(layers: int) -> bool:
        totals = [plan.total for plan in plans(layers, arguments, world.size)]
        return (
            sum(total.memory for total in totals) <= arguments.memory
            and max(total.files for total in totals) <= arguments.disk // world.size
        )

    begin = time.perf_counter()
    layers = largest(fits)
    planned = plans(layers, arguments, world.size)
    searched = time.perf_counter() - begin
    if world.rank == 0:
        print(f"{arguments.where}: {layers} layers by the plan; a rank:\n{planned[0]}", flush=True)

    begin = time.perf_counter()
    torch.manual_seed(1)
    model = zeroth.deferred(lambda: build(layers, arguments))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = zeroth.Engine(model, config(arguments, world.size), world=world, log_level="warning")
    made = time.perf_counter() - begin
    if world.rank == 0:
        arguments.report.with_suffix(".trains").touch()
    source = torch.Generator().manual_seed(1 + world.rank)
    steps: list[dict[str, float]] = []
    for _ in range(arguments.steps):
        text = torch.randint(0, 256, (MICRO_BATCH, arguments.seq + 1), generator=source)
        engine.barrier()
        before, start = moved_bytes(), time.perf_counter()
        loss = engine(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        engine.backward(loss)
        result = engine.step()
        assert result.committed, result.reason
        engine.barrier()
        seconds = time.perf_counter() - start
        read, written = (now - then for now, then in zip(moved_bytes(), before, strict=True))
        steps.append(
            {
                "seconds": seconds,
                "read": engine.average(read) * world.size,
                "written": engine.average(written) * world.size,
                "loss": engine.average(loss.item()),
            }
        )
        if world.rank == 0:
            print(f"  step {len(steps)}: {seconds:.1f} s, loss {steps[-1]['loss']:.4f}", flush=True)
        del loss
    report = engine.memory_report()
    own = planned[world.rank]
    if sum(report.planned.values()) != own.total.memory or report.planned_files != own.total.files:
        raise AssertionError(f"the engine plans {report.planned}, {report.planned_files}; before it was\n{own}")

    def of_all(value: float) -> int:
        return round(engine.average(float(value)) * world.size)

    found = {
        "layers": layers,
        "parameters": parameters,
        "search_seconds": searched,
        "build_seconds": made,
        "steps": steps,
        "planned_memory": of_all(own.total.memory),
        "measured_memory": of_all(sum(report.measured_peak.values())),
        "planned_files": of_all(own.total.files),
        "measured_files": of_all(report.measured_files),
        "activation_files": of_all(report.activation_files),
        "pss_after": of_all(report.pss),
        "rows": {
            name: {"device": row.device, "host": row.host, "files": row.files} for name, row in planned[0].rows.items()
        },
    }
    if world.rank == 0:
        arguments.report.write_text(json.dumps(found), encoding="utf-8")
    engine.close(keep_parameters=False)


if __name__ == "__main__":
    main()
