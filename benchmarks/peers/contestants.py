"""One class for each way to train. A library is imported where its contestant is made: in a process with one contestant
the start-up and the memory are its own."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cells import MICRO_BATCH
from torch import Tensor, nn
from tracked import Tracker
from work import Work


class Contestant(abc.ABC):
    """A model and its way of training: a step is forward(), backward(), update()."""

    @abc.abstractmethod
    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        """The loss."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    @abc.abstractmethod
    def update(self) -> None:
        """The optimizer's step; no gradient is held after it."""

    def tracked_bytes(self, tracker: Tracker) -> int:
        """Of this rank: what the contestant holds now."""
        return tracker.live_bytes()

    def peak_bytes(self) -> int | None:
        """The highest of these since the first step, where the contestant counts itself."""
        return None

    def has_floors_activations(self) -> bool:
        """In the same dtypes, so that theirs can be subtracted."""
        return True

    def own_bytes(self) -> int:
        """Parameters, gradients and the optimizer's state as they are now; only plain torch tells."""
        return 0

    def bytes_by_state(self) -> dict[str, int]:
        """The same by what it is for, where the contestant tells."""
        return {}

    def wire_bytes(self) -> int | None:
        """Of this rank since the last call; None where only the network interface knows."""
        return None


def held_bytes(parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> int:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [value for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in [*parameters, *gradients, *states])


class Loop(Contestant):
    """The loop of everybody's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool = False) -> None:
        self.model = model
        self.optimizer = optimizer
        self.autocast = autocast

    def has_floors_activations(self) -> bool:
        return not self.autocast

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(*batch)
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def own_bytes(self) -> int:
        return held_bytes(list(self.model.parameters()), self.optimizer)


class Bf16Floor(Contestant):
    """Parameters and gradients in bf16, fp32 masters, as the floor of step_bench has them."""

    def __init__(self, work: Work) -> None:
        self.model = work.model()
        self.masters = [parameter.detach().clone().requires_grad_() for parameter in self.model.parameters()]
        self.model.to(torch.bfloat16)
        self.parameters: list[Tensor] = list(self.model.parameters())
        self.wide = [torch.empty_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.wide):
            master.grad = gradient
        self.optimizer = work.adamw(self.masters)

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_copy_(self.wide, [parameter.grad for parameter in self.parameters if parameter.grad is not None])
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None

    def own_bytes(self) -> int:
        """The masters among the parameters."""
        return held_bytes([*self.parameters, *self.masters], self.optimizer)


def make_floor(work: Work) -> Contestant:
    if work.bf16:
        return Bf16Floor(work)
    model = work.model()
    return Loop(model, work.adamw(model.parameters()))


def make_ddp(work: Work) -> Contestant:
    """bf16: autocast over fp32 parameters, which is what DDP has."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    return Loop(model, work.adamw(model.parameters()), autocast=work.bf16)


def make_zro(work: Work, *, bucket_view: bool) -> Contestant:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=bucket_view,
        lr=work.lr,
        weight_decay=0.01,
        fused=True,
    )
    return Loop(model, optimizer, autocast=work.bf16)


def make_fsdp2(work: Work, *, reshard: bool = True, units: bool = True) -> Contestant:
    """bf16: parameters are gathered in bf16, gradients reduced in fp32, shards kept in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = work.model()
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if work.bf16
        else MixedPrecisionPolicy()
    )
    mesh = init_device_mesh("cpu", (work.cell.ranks,))
    for module in [*(work.units(model) if units else []), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return Loop(model, work.adamw(model.parameters()))


DEEPSPEED_TUNED = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 5_000_000,
    "allgather_bucket_size": 5_000_000,
}
DEEPSPEED_STRICT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


class DeepSpeed(Contestant):
    """`more`: sections of the configuration; with an optimizer among them DeepSpeed makes its own."""

    def __init__(self, work: Work, stage: int, options: dict[str, Any], more: dict[str, Any] | None = None) -> None:
        torch_linear = nn.functional.linear
        import deepspeed  # type: ignore[import-not-found, unused-ignore]

        deepspeed.init_distributed("gloo")
        model = work.model()
        config = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_clipping": 0.0,  # without the key it clips at 1.0, and trains another thing than everybody else
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": work.bf16},
            "zero_optimization": {"stage": stage, **options},
            **(more or {}),
        }
        optimizer = None if "optimizer" in config else work.adamw(model.parameters())
        self.engine: Any = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
        )[0]
        # Stage 3 replaces torch's linear for the whole process: it shall have its own, and others torch's.
        self.linear = nn.functional.linear
        nn.functional.linear = torch_linear

    @contextlib.contextmanager
    def _own_linear(self) -> Iterator[None]:
        torch_linear = nn.functional.linear
        nn.functional.linear = self.linear
        try:
            yield
        finally:
            nn.functional.linear = torch_linear

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        with self._own_linear():
            loss: Tensor = self.engine(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        with self._own_linear():
            self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


class Zeroth(Contestant):
    """`options`: of the section zero_optimization; `own`: of the section zeroth."""

    def __init__(
        self, work: Work, stage: int, options: dict[str, Any] | None = None, own: dict[str, Any] | None = None
    ) -> None:
        import zeroth

        config = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": work.lr, "weight_decay": 0.01}},
            "bf16": {"enabled": work.bf16},
            "zero_optimization": {"stage": stage, **(options or {})},
            "zeroth": {"threads": 1, **(own or {})},
        }
        model = work.model().to(torch.bfloat16 if work.bf16 else torch.float32)
        self.engine = zeroth.Engine(model, config, log_level="warning")

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss: Tensor = self.engine(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def tracked_bytes(self, tracker: Tracker) -> int:
        """From the engine's ledger: its memory is no tensor of Python's."""
        return sum(self.bytes_by_state().values())

    def peak_bytes(self) -> int | None:
        return sum(self.engine.memory_report().measured_peak.values())

    def bytes_by_state(self) -> dict[str, int]:
        return self.engine.memory_report().live

    def wire_bytes(self) -> int | None:
        """Every copy out of a peer's memory, counted where it happens."""
        wire = self.engine.wire_report()
        self.engine.reset_counters()
        return sum(count for kind, count in wire.items() if not kind.startswith("planned_"))


MAKERS: dict[str, Callable[[Work], Contestant]] = {
    "floor": make_floor,
    "ddp": make_ddp,
    "zro": lambda work: make_zro(work, bucket_view=False),
    "zro-tuned": lambda work: make_zro(work, bucket_view=True),
    "fsdp2": make_fsdp2,
    "fsdp2-keep": lambda work: make_fsdp2(work, reshard=False),
    "fsdp2-one": lambda work: make_fsdp2(work, units=False),
    "deepspeed-1": lambda work: DeepSpeed(work, 1, {}),
    "deepspeed-1-tuned": lambda work: DeepSpeed(work, 1, DEEPSPEED_TUNED),
    "deepspeed-2": lambda work: DeepSpeed(work, 2, {}),
    "deepspeed-2-tuned": lambda work: DeepSpeed(work, 2, DEEPSPEED_TUNED),
    "deepspeed-3": lambda work: DeepSpeed(work, 3, {}),
    "deepspeed-3-tuned": lambda work: DeepSpeed(work, 3, DEEPSPEED_TUNED),
    "deepspeed-3-strict": lambda work: DeepSpeed(work, 3, DEEPSPEED_STRICT),
    "zeroth-0": lambda work: Zeroth(work, 0),
    "zeroth-1": lambda work: Zeroth(work, 1),
    "zeroth-2": lambda work: Zeroth(work, 2),
    "zeroth-3": lambda work: Zeroth(work, 3),
}


def needs_group(name: str) -> bool:
    """Whether it talks through torch.distributed; DeepSpeed makes its group itself."""
    return name.startswith(("ddp", "zro", "fsdp2"))


def make(name: str, work: Work) -> Contestant:
    return MAKERS[name](work)
