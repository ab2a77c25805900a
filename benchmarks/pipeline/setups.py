"""What is compared: the schedules, who has them, and the work of a step. Plain Python 3."""

from __future__ import annotations

import dataclasses
import json

STAGES = 2
LAYERS_AROUND = 2
"""the embedding before the blocks, and the head after them"""


@dataclasses.dataclass(kw_only=True, frozen=True, slots=True)
class Part:
    """One benchmark: a schedule, and who runs it."""

    name: str
    schedule: str
    """Zeroth's name of it"""
    chunks: int
    """on each rank"""
    torch: str
    """the class of torch.distributed.pipelining"""
    deepspeed: bool = False
    """DeepSpeed has 1F1B alone"""

    def trainers(self) -> list[str]:
        """Names, as `trainers.py` makes them; the floor first."""
        return ["floor", "zeroth", "torch", *(["deepspeed", "deepspeed-1"] if self.deepspeed else [])]


PARTS = {
    part.name: part
    for part in (
        Part(name="1f1b", schedule="1f1b", chunks=1, torch="Schedule1F1B", deepspeed=True),
        Part(name="gpipe", schedule="gpipe", chunks=1, torch="ScheduleGPipe"),
        Part(name="interleaved", schedule="interleaved", chunks=2, torch="ScheduleInterleaved1F1B"),
        Part(name="zero-bubble", schedule="zb-h1", chunks=1, torch="ScheduleInterleavedZeroBubble"),
    )
}

TITLES = {
    "floor": "computation alone",
    "zeroth": "**Zeroth**, ZeRO-1",
    "torch": "torch.distributed.pipelining",
    "deepspeed": "DeepSpeed",
    "deepspeed-1": "DeepSpeed, ZeRO-1",
}


@dataclasses.dataclass(kw_only=True, frozen=True, slots=True)
class Work:
    """Of a step: a stack of GPT-2's blocks, float32, and its micro-batches."""

    part: str
    layers: int = 8
    """blocks"""
    width: int = 512
    tokens: int = 256
    """of a sequence; a micro-batch is one sequence"""
    micro_batches: int = 8
    vocabulary: int = 256
    """small, so that stages take the same time"""

    @property
    def setup(self) -> Part:
        return PARTS[self.part]

    @property
    def bounds(self) -> list[int]:
        """Chunk c has the layers from bounds[c] to bounds[c + 1] - 1; each has the same number of blocks."""
        chunks = STAGES * self.setup.chunks
        if self.layers % chunks:
            raise ValueError(f"{self.layers} blocks cannot be cut into {chunks} equal chunks")
        inner = [1 + chunk * self.layers // chunks for chunk in range(1, chunks)]
        return [0, *inner, self.layers + LAYERS_AROUND]

    def chunks_of(self, rank: int) -> list[int]:
        return list(range(rank, STAGES * self.setup.chunks, STAGES))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Work:
        return Work(**json.loads(text))
