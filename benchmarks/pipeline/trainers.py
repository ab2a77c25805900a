"""One class for each way to train the stack in stages. A library is imported where its trainer is made: in a process
with one trainer the start-up and the memory are its own."""

from __future__ import annotations

import abc
import re
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import stack
import torch
from setups import STAGES, Work
from torch import Tensor, nn

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01
Batch = list[tuple[Tensor, Tensor]]
"""the micro-batches of a step"""
Seconds = dict[str, float]
"""in which this rank computed in a step, by kind: F, B, I, W, and U for the update"""


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of the floor and all peers."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


class Trainer(abc.ABC):
    def __init__(self, work: Work, rank: int) -> None:
        self.work = work
        self.rank = rank
        self.loss = float("nan")
        """mean of the last step, where this rank knows it"""
        self._spent: defaultdict[str, float] = defaultdict(float)

    @abc.abstractmethod
    def step(self, batch: Batch) -> None:
        """As a user would call it."""

    @abc.abstractmethod
    def parameters(self) -> list[Tensor]:
        """Those of this rank."""

    def timed_step(self, batch: Batch) -> Seconds:
        """The same, with the seconds in which this rank computed; the rest of the step it waited or communicated."""
        self._spent.clear()
        self.step(batch)
        return dict(self._spent)

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts as computation."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._spent[kind] += time.perf_counter() - begin

        return call


class Floor(Trainer):
    """What a rank computes with communication left out: its chunks, by plain torch, on random values."""

    def __init__(self, work: Work, rank: int) -> None:
        super().__init__(work, rank)
        self.chunks = {chunk: stack.chunk_of(work, chunk) for chunk in work.chunks_of(rank)}
        self.optimizer = adamw(self.parameters())
        source = torch.Generator().manual_seed(rank)
        self.values = torch.randn(1, work.tokens, work.width, generator=source)
        self._by_chunk: defaultdict[str, float] = defaultdict(float)
        self._steps = 0

    def parameters(self) -> list[Tensor]:
        return [parameter for chunk in self.chunks.values() for parameter in chunk.parameters()]

    def take_times(self) -> Seconds:
        """Seconds a step since the last call: "2F", all forwards of chunk 2, and "U"."""
        found = {key: seconds / self._steps for key, seconds in self._by_chunk.items()}
        self._by_chunk.clear()
        self._steps = 0
        return found

    def step(self, batch: Batch) -> None:
        self._steps += 1
        for inputs, labels in batch:
            for number, chunk in self.chunks.items():
                is_last = number + 1 == len(self.work.bounds) - 1
                given = inputs if number == 0 else self.values.detach().requires_grad_()
                begin = time.perf_counter()
                output = chunk(given)
                if is_last:
                    output = stack.loss_fn(output, labels) / len(batch)
                middle = time.perf_counter()
                output.backward(None if is_last else self.values)
                end = time.perf_counter()
                for kind, seconds in (("F", middle - begin), ("B", end - middle)):
                    self._spent[kind] += seconds
                    self._by_chunk[f"{number}{kind}"] += seconds
        begin = time.perf_counter()
        self.optimizer.step()
        seconds = time.perf_counter() - begin
        self._spent["U"] += seconds
        self._by_chunk["U"] += seconds
        self.optimizer.zero_grad(set_to_none=True)


class Zeroth(Trainer):
    def __init__(self, work: Work, rank: int) -> None:
        super().__init__(work, rank)
        import zeroth
        from zeroth import pipe

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": work.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": 1},
            "zeroth": {
                "threads": 1,
                "mesh": {"pp": STAGES},
                "pipeline": {"schedule": work.setup.schedule, "chunks": work.setup.chunks},
            },
        }
        layers = [pipe.LayerSpec(kind, *arguments) for kind, arguments in stack.specs(work)]
        model = pipe.LayerList(layers, seed=stack.SEED)
        world = zeroth.World.from_environment()
        split = [str(layer) for layer in work.bounds[1:-1]]
        zeroth.pipeline(model, config, world=world, split=split, loss_fn=stack.loss_fn)
        self.engine = zeroth.Engine(model, config, world=world, log_level="warning")

    def parameters(self) -> list[Tensor]:
        return list(self.engine.pipeline.model.parameters())

    def step(self, batch: Batch) -> None:
        _, self.loss = self.engine.train_batch(batch)

    def timed_step(self, batch: Batch) -> Seconds:
        """By the same actions, one by one. The update is in STEP, in which ranks also wait for each other: the caller
        has to see how long the rank took that came last."""
        self._spent.clear()
        with self.engine.pipeline_step(batch) as step:
            for action in step.actions:
                kind = {"STEP": "U"}.get(kind_of(action), kind_of(action))
                (self.timed(kind, step.run) if kind in ("F", "B", "I", "W", "U") else step.run)(action)
        _, self.loss = step.result
        return dict(self._spent)


def kind_of(action: str) -> str:
    """ "SEND_F" of "2SEND_F0"."""
    return re.sub(r"\d", "", action)


class Torch(Trainer):
    def __init__(self, work: Work, rank: int) -> None:
        super().__init__(work, rank)
        from torch.distributed import pipelining

        numbers = work.chunks_of(rank)
        chunks = [stack.chunk_of(work, chunk) for chunk in numbers]
        count, device = len(work.bounds) - 1, torch.device("cpu")
        stages = [
            pipelining.PipelineStage(chunk, number, count, device)
            for number, chunk in zip(numbers, chunks, strict=True)
        ]
        self.is_first, self.is_last = numbers[0] == 0, numbers[-1] + 1 == count
        for stage in stages:
            for kind, name in (
                ("F", "forward_one_chunk"),
                ("B", "backward_one_chunk"),
                ("W", "backward_weight_one_chunk"),
                ("U", "perform_reduce_grad"),  # it divides the gradients by the number of micro-batches
            ):
                setattr(stage, name, self.timed(kind, getattr(stage, name)))
        kind = getattr(pipelining, work.setup.torch)
        many = work.setup.torch.startswith("ScheduleInterleaved")
        loss_fn = self.timed("F", stack.loss_fn)
        self.schedule = kind(stages if many else stages[0], work.micro_batches, loss_fn=loss_fn)
        self.chunks = nn.ModuleList(chunks)
        self.optimizer = adamw(self.chunks.parameters())
        self.update = self.timed("U", self.optimizer.step)
        self.more = {"return_outputs": False}

    def parameters(self) -> list[Tensor]:
        return list(self.chunks.parameters())

    def step(self, batch: Batch) -> None:
        inputs = (torch.cat([one for one, _ in batch]),) if self.is_first else ()
        losses: list[Tensor] = []
        last = {"target": torch.cat([one for _, one in batch]), "losses": losses} if self.is_last else {}
        self.schedule.step(*inputs, **last, **self.more)
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.is_last:
            self.loss = float(torch.stack(losses).mean())


DEEPSPEED_BUCKETS = {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000}
"""by itself it fills 4 GB of buckets in every step"""


class DeepSpeed(Trainer):
    def __init__(self, work: Work, rank: int, zero_stage: int) -> None:
        super().__init__(work, rank)
        import deepspeed  # type: ignore[import-not-found, unused-ignore]
        from deepspeed.pipe import LayerSpec, PipelineModule  # type: ignore[import-not-found, unused-ignore]
        from deepspeed.runtime.pipe import schedule  # type: ignore[import-not-found, unused-ignore]

        deepspeed.init_distributed("gloo")
        layers = [LayerSpec(kind, *arguments) for kind, arguments in stack.specs(work)]
        model = PipelineModule(
            layers=layers,
            num_stages=STAGES,
            loss_fn=stack.loss_fn,
            partition_method="uniform",
            seed_layers=True,
            base_seed=stack.SEED,
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": work.micro_batches,
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": zero_stage, **(DEEPSPEED_BUCKETS if zero_stage else {})},
        }
        self.engine: Any = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]
        kinds = {
            schedule.ForwardPass: "F",
            schedule.BackwardPass: "B",
            schedule.ReduceGrads: "U",
            schedule.ReduceTiedGrads: "U",
            schedule.OptimizerStep: "U",
        }
        own = self.engine._INSTRUCTION_MAP
        self.engine._INSTRUCTION_MAP = own | {one: self.timed(kind, own[one]) for one, kind in kinds.items()}

    def parameters(self) -> list[Tensor]:
        return list(self.engine.module.parameters())

    def step(self, batch: Batch) -> None:
        self.loss = float(self.engine.train_batch(iter(batch)))


MAKERS: dict[str, Callable[[Work, int], Trainer]] = {
    "floor": Floor,
    "zeroth": Zeroth,
    "torch": Torch,
    "deepspeed": lambda work, rank: DeepSpeed(work, rank, 0),
    "deepspeed-1": lambda work, rank: DeepSpeed(work, rank, 1),
}


def needs_group(name: str) -> bool:
    """Whether it takes torch's process group from its caller; DeepSpeed makes it."""
    return name == "torch"
