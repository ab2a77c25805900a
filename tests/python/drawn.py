"""Trainings drawn from a seed: any features that go together, for drawn_rank.py.

A training is what decides its numbers: model, mesh, schedule, order of sums, dtype, optimizer. A way to run it is the
rest: where states rest, what is kept and what is computed again, in what order ranks work. Another way has the same
bits. Nothing is drawn that an engine refuses."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
TWO_CHUNKS = ("interleaved", "zb-v", "v-half", "v-min", "dualpipev")
TILE_BYTES = 2500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A frozen value."""

    model: str
    pp: int
    tp: int
    sp: int
    layers: int
    tiled: bool
    schedule: str
    vocabulary: str
    split: str
    method: str
    norms: str
    policy: str
    micro: int
    clip: float
    dtype: str
    """float64 to compare with one process, float32, bf16 or fp16"""
    adamw: bool

    @property
    def is_shared(self) -> bool:
        """The ranks of tp and sp share a sample, so the model computes its loss."""
        return self.tp * self.sp > 1

    @property
    def steps_may_be_skipped(self) -> bool:
        return self.dtype == "fp16"


def draw_training(draw: random.Random, ranks: int) -> Training:
    meshes = [(pp, tp, sp) for pp in (1, 2, 4) for tp in (1, 2) for sp in (1, 2) if ranks % (pp * tp * sp) == 0]
    pp, tp, sp = draw.choice(meshes)
    schedule = draw.choice(SCHEDULES)
    tiled = tp == 1 and draw.random() < 0.2
    return Training(
        model=draw.choice(("gpt2", "qwen2", "llama")),
        pp=pp,
        tp=tp,
        sp=sp,
        layers=8 if pp == 4 and schedule in TWO_CHUNKS else 4,
        tiled=tiled,
        schedule=schedule,
        vocabulary="whole" if tiled else draw.choice(("whole", "two_barriers", "one_barrier")),
        split=draw.choice(("balanced", "parameters", "uniform")),
        method=draw.choice(("ulysses", "ring")),
        norms="whole" if tiled else draw.choice(("whole", "whole", "split")),
        policy=draw.choice(("per_step", "per_micro_step")),
        micro=draw.choice((1, 2, 3, 5)),
        clip=draw.choice((0.0, 0.1)),
        dtype=draw.choice(("float64", "float64", "float32", "bf16", "fp16")),
        adamw=draw.random() < 0.5,
    )


def draw_config(draw: random.Random, training: Training, ranks: int) -> dict[str, Any]:
    """A configuration that runs it: one of the ways."""
    stage = draw.randrange(4)
    files = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    offload = draw.choice(
        (
            {},
            {},
            {"offload_optimizer": files},
            {"offload_optimizer": {"device": "cpu"}},
            {"offload_optimizer": {**files, "ratio": 0.5}},
            {"offload_param": files},
            {"offload_optimizer": files, "offload_param": files},
        )
    )
    again = draw.random() < 0.4
    zeroth: dict[str, Any] = {
        "mesh": {"pp": training.pp, "tp": training.tp, "sp": training.sp},
        "tensor": {"norms": training.norms},
        "sequence": {"method": training.method},
        "reduction_policy": training.policy,
        "reshard": draw.choice(("default", "default", "all", "none")),
        "offload": {"block_elements": 1024, "gradients": draw.choice(("device", "device", "host"))},
        "prefetch_units": draw.choice((0, 1, 2)),
        "ring_slots": draw.choice((2, 2, 3)),
        "compute_copies": draw.random() < 0.2,
        "execution": draw.choice(("inline", "inline", "inline", "chaos")),
        "chaos_seed": draw.randrange(1000),
    }
    if training.pp > 1:
        zeroth["pipeline"] = {
            "schedule": training.schedule,
            "vocabulary": training.vocabulary,
            "split": training.split,
            "unshard": draw.choice(("micro_batch", "step")),
            "scatter": draw.random() < 0.5,
            "recompute": again,
        }
    elif training.clip == 0.0 and not training.steps_may_be_skipped:
        zeroth["update"] = {"inside_backward": draw.random() < 0.4}
    if (again or training.pp == 1) and draw.random() < 0.5:
        zeroth["activations"] = {
            "device": draw.choice(("nvme", "cpu")),
            "nvme_path": tempfile.gettempdir(),
            "saved": "checkpoints" if training.pp > 1 else draw.choice(("checkpoints", "all")),
            "min_bytes": 1,
        }
    if ranks // (training.pp * training.tp * training.sp) > 1:
        if stage == 3 and draw.random() < 0.4:
            zeroth |= {"parameter_degree": 2, **({"optimizer_degree": 2} if draw.random() < 0.5 else {})}
        elif 0 < stage < 3 and draw.random() < 0.4:
            zeroth["optimizer_degree"] = 2
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    return {
        "zero_optimization": {"stage": stage, **offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}} if training.adamw else optimizer,
        "gradient_accumulation_steps": training.micro,
        "gradient_clipping": training.clip,
        "zeroth": zeroth,
        **({"bf16": {"enabled": True}} if training.dtype == "bf16" else {}),
        **({"fp16": {"enabled": True, "initial_scale_power": 6}} if training.dtype == "fp16" else {}),
    }
