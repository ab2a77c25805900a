"""What takes part in to_loss.py: ways to train one model at two sites. Each takes a batch of its site and makes a step.

A name is that of a table's row. The peers are plain torch (DDP, with the hooks that come with it) and DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
from gpt import Gpt, Shape  # noqa: E402

import zeroth  # noqa: E402

BETAS, DECAY = (0.9, 0.99), 0.01


@dataclasses.dataclass(kw_only=True, frozen=True)
class Settings:
    """The same for all of them."""

    layers: int
    width: int
    lr: float
    freeze: int
    """steps until 1-bit Adam exchanges signs, and PowerSGD low ranks"""
    warmup: int
    window: int
    """steps of local updates from one exchange of a part to the next"""

    def model(self) -> Gpt:
        torch.manual_seed(0)
        return Gpt(Shape(layers=self.layers, d_model=self.width))

    def schedule(self) -> dict[str, Any]:
        params = {"warmup_num_steps": self.warmup, "warmup_max_lr": self.lr, "warmup_type": "linear"}
        return {"type": "WarmupLR", "params": params}


class Method(Protocol):
    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Loss of this rank's batch, before the step."""

    def wire(self) -> tuple[int, int]:
        """Bytes that came in the last step by the library's own count, and by its formula; -1: it has none."""

    def close(self) -> None: ...


class Zeroth:
    def __init__(
        self,
        given: Settings,
        stage: int = 0,
        optimizer: str = "AdamW",
        params: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
        local: dict[str, Any] | None = None,
    ) -> None:
        """`params`: of the optimizer, beside all methods' own; `zero`: zero_optimization; `local`: local_updates()."""
        own = {"lr": given.lr, "betas": BETAS, "weight_decay": DECAY} | (params or {})
        config = {
            "zero_optimization": {"stage": stage} | (zero or {}),
            "optimizer": {"type": optimizer, "params": own},
            "scheduler": given.schedule(),
            "zeroth": {"threads": 1, "ranks_per_node": 1},
        }
        world = zeroth.World.from_group()
        ranks = world.site(2) if local else world
        self.engine = zeroth.Engine(given.model(), config, world=ranks, log_level="warning")
        self.local = zeroth.local_updates(self.engine, given.window, **local) if local else None
        self.planned = 0

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        self.engine.reset_counters()
        self.planned = self._planned()
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    def wire(self) -> tuple[int, int]:
        wire = self.engine.wire_report()
        counted = wire["reduce_scatter"] + wire["all_gather"] + wire["between_sites"]
        return counted, self.planned if self.local is None else self._planned() - self.planned

    def _planned(self) -> int:
        """Of the next step, or of all exchanges between sites so far."""
        if self.local is not None:
            return int(self.local.report()["received_bytes"])  # type: ignore[arg-type]
        wire = self.engine.wire_report()
        return wire["planned_reduce_scatter"] + wire["planned_all_gather"]

    def close(self) -> None:
        self.engine.close(keep_parameters=False)


class Ddp:
    def __init__(self, given: Settings, hook: str = "") -> None:
        """`hook`: "", "fp16" or "PowerSGD"."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        # Gloo has no order for the calls that PowerSGD makes of several buckets in callbacks: ranks would mix them up.
        most_mb = 1 << 20 if hook == "PowerSGD" else None
        self.model = nn.parallel.DistributedDataParallel(given.model(), bucket_cap_mb=most_mb)
        if hook == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                process_group=None, matrix_approximation_rank=8, start_powerSGD_iter=given.freeze
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=given.lr, betas=BETAS, weight_decay=DECAY, fused=True
        )
        rates = torch.optim.lr_scheduler.LambdaLR
        self.schedule = rates(self.optimizer, lambda step: min(1.0, max(0, step - 1) / given.warmup))  # as WarmupLR

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.model(inputs, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return float(loss)

    def wire(self) -> tuple[int, int]:
        return -1, -1

    def close(self) -> None:
        del self.model, self.optimizer


class DeepSpeed:
    def __init__(self, given: Settings) -> None:
        from deepspeed_one_bit import make_engine

        params = {"lr": given.lr, "betas": BETAS, "weight_decay": DECAY, "freeze_step": given.freeze}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "OneBitAdam", "params": params | {"comm_backend_name": "compressed"}},
            "scheduler": given.schedule(),
            "steps_per_print": 1 << 30,
        }
        self.engine = make_engine(given.model(), config)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    def wire(self) -> tuple[int, int]:
        return -1, -1

    def close(self) -> None:
        del self.engine


def zero_one(given: Settings) -> Zeroth:
    """Variances change in `freeze` steps at least; then every fourth step synchronises."""
    params = {
        "var_freeze_step": 2 * given.freeze,
        "var_update_scaler": given.freeze,
        "local_step_scaler": given.freeze // 2,
        "local_step_clipper": 4,
    }
    return Zeroth(given, optimizer="ZeroOneAdam", params=params)


CODES = {"zero_quantized_gradients": True}
ALL_CODES = {**CODES, "zero_quantized_weights": True}
OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}
STREAMING = {**OUTER, "fragments": 2, "delay": 5, "keep_local": 0.5, "payload": "fp4"}

METHODS: dict[str, Callable[[Settings], Method]] = {
    "AdamW": Zeroth,
    "OneBitAdam": lambda given: Zeroth(given, optimizer="OneBitAdam", params={"freeze_step": given.freeze}),
    "ZeroOneAdam": zero_one,
    "ZeRO++ gradients": lambda given: Zeroth(given, zero=CODES),
    "AdamW, stage 3": lambda given: Zeroth(given, stage=3),
    "ZeRO++, stage 3": lambda given: Zeroth(given, stage=3, zero=ALL_CODES),
    "DiLoCo": lambda given: Zeroth(given, local=OUTER),
    "Streaming DiLoCo": lambda given: Zeroth(given, local=STREAMING),
    "DDP": Ddp,
    "DDP, fp16": lambda given: Ddp(given, "fp16"),
    "DDP, PowerSGD": lambda given: Ddp(given, "PowerSGD"),
    "DeepSpeed OneBitAdam": DeepSpeed,
    "DeepSpeed, sums": lambda given: DeepSpeed(dataclasses.replace(given, freeze=1 << 30)),
}
