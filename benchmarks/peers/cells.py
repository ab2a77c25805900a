"""What is compared and where: the contestants, and the cells of the comparison (work, dtype, ranks). Plain Python 3."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(kw_only=True, frozen=True, slots=True)
class Entry:
    name: str
    """how rows and commands call it"""
    title: str
    how: str
    """how it is configured, beyond what holds for all"""
    group: str
    """the state that it shares out; contestants of one group take turns in one job"""
    passes: int = 2
    """how often the whole model crosses the wire in a step, by the paper: gradients once, parameters (at stage 0 the
    summed gradients) once, or twice if they are given back between forward and backward"""
    only_tiny: bool = False


MICRO_BATCH = 4  # sequences of a rank in a step
TINY_MODULES = 500
TUNED = "overlap_comm, contiguous_gradients, buckets of 5e6 elements"

ENTRIES = [
    Entry(name="floor", title="plain torch", how="no communication: every rank trains alone", group="all"),
    Entry(name="ddp", title="DDP", how="gradient_as_bucket_view", group="nothing"),
    Entry(name="zeroth-0", title="**Zeroth 0**", how="", group="nothing"),
    Entry(name="zro", title="ZeroRedundancyOptimizer", how="under DDP", group="optimizer"),
    Entry(
        name="zro-tuned",
        title="ZeroRedundancyOptimizer, tuned",
        how="under DDP; parameters_as_bucket_view",
        group="optimizer",
    ),
    Entry(name="deepspeed-1", title="DeepSpeed 1", how="", group="optimizer"),
    Entry(name="deepspeed-1-tuned", title="DeepSpeed 1, tuned", how=TUNED, group="optimizer"),
    Entry(name="zeroth-1", title="**Zeroth 1**", how="", group="optimizer"),
    Entry(name="deepspeed-2", title="DeepSpeed 2", how="", group="gradients"),
    Entry(name="deepspeed-2-tuned", title="DeepSpeed 2, tuned", how=TUNED, group="gradients"),
    Entry(name="zeroth-2", title="**Zeroth 2**", how="", group="gradients"),
    Entry(
        name="fsdp2",
        title="FSDP2",
        how="fully_shard of every unit and the model, reshard_after_forward",
        group="parameters",
        passes=3,
    ),
    Entry(name="fsdp2-keep", title="FSDP2, keep", how="reshard_after_forward=False", group="parameters"),
    Entry(
        name="fsdp2-one",
        title="FSDP2, one unit",
        how="fully_shard of the model only",
        group="parameters",
        passes=3,
        only_tiny=True,
    ),
    Entry(
        name="deepspeed-3",
        title="DeepSpeed 3",
        how="at these sizes its limits keep parameters live until backward",
        group="parameters",
    ),
    Entry(name="deepspeed-3-tuned", title="DeepSpeed 3, tuned", how=TUNED, group="parameters"),
    Entry(
        name="deepspeed-3-strict",
        title="DeepSpeed 3, strict",
        how="no parameter persists or stays live: stage3_max_live_parameters, stage3_max_reuse_distance and "
        "stage3_param_persistence_threshold are 0",
        group="parameters",
        passes=3,
    ),
    Entry(name="zeroth-3", title="**Zeroth 3**", how="", group="parameters", passes=3),
]

BARE = Entry(
    name="bare", title="bare processes", how="the floor without a launcher; for the start-up only", group="all"
)


@dataclasses.dataclass(kw_only=True, frozen=True, slots=True)
class Cell:
    """One table: all contestants at one work, dtype and number of ranks."""

    name: str
    work: str
    """a size of gpt.SHAPES, or "tiny": a chain of TINY_MODULES linears of 16 x 16"""
    dtype: str = "fp32"
    ranks: int = 2
    cycles: int = 6
    """of two blocks for each contestant"""
    block_seconds: float = 2.0
    """a block is as many steps as this takes, at least one"""
    solo_steps: int = 4
    """steps of a process that holds one contestant"""
    startup_rounds: int = 2
    minutes: float = 0.0
    """about, on two quiet cores"""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Cell:
        return Cell(**json.loads(text))

    def quick(self) -> Cell:
        """Shows that it works; the numbers mean nothing."""
        work = self.work if self.work == "tiny" else "3m"
        return dataclasses.replace(self, work=work, cycles=2, block_seconds=0.0, solo_steps=2, startup_rounds=1)

    def entries(self) -> list[Entry]:
        return [entry for entry in ENTRIES if self.work == "tiny" or not entry.only_tiny]


CELLS = [
    Cell(name="peers-25m-2-ranks", work="25m", cycles=8, startup_rounds=6, minutes=30),
    Cell(name="peers-25m-4-ranks", work="25m", ranks=4, minutes=28),
    Cell(name="peers-25m-bf16-2-ranks", work="25m", dtype="bf16", cycles=8, minutes=20),
    Cell(name="peers-25m-bf16-4-ranks", work="25m", dtype="bf16", ranks=4, minutes=24),
    Cell(name="peers-120m-2-ranks", work="120m", cycles=4, minutes=45),
    Cell(name="peers-120m-4-ranks", work="120m", ranks=4, cycles=3, startup_rounds=1, minutes=75),
    Cell(name="peers-120m-bf16-2-ranks", work="120m", dtype="bf16", cycles=4, minutes=30),
    Cell(name="peers-120m-bf16-4-ranks", work="120m", dtype="bf16", ranks=4, cycles=3, startup_rounds=1, minutes=50),
    Cell(name="peers-tiny-2-ranks", work="tiny", cycles=8, block_seconds=1.0, minutes=13),
    Cell(name="peers-tiny-4-ranks", work="tiny", ranks=4, cycles=4, block_seconds=1.0, minutes=40),
]
