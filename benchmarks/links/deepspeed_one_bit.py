"""DeepSpeed's own 1-bit Adam on ranks of a CPU over gloo.

DeepSpeed exchanges signs over NCCL or MPI with CuPy, over HCCL, or by "compressed", whose one operator packs bits on an
XPU. The last one needs two things here, and nothing of the algorithm is changed:
  - packbits and unpackbits by NumPy, with the bits of csrc/xpu/packbits/packing.cpp;
  - gloo gathers only tensors of one shape: the scale, of no dimensions, is viewed as the buffer that it goes to.
DeepSpeed's operator for shared memory is switched off: two hosts have none in common.
"""

from __future__ import annotations

import os
from typing import Any

import numpy
import torch
from torch import Tensor, nn

os.environ["DS_ACCELERATOR"] = "cpu"


class Packbits:
    """DeepSpeed's operator: a bit is 1 where the sign bit is not set, the first of eight is the highest."""

    def load(self) -> Packbits:
        return self

    def packbits(self, values: Tensor, count: int, rank: int) -> Tensor:
        return torch.from_numpy(numpy.packbits(~numpy.signbit(values.flatten().numpy())))

    def unpackbits(self, packed: Tensor, count: int, rank: int) -> Tensor:
        return torch.from_numpy(numpy.unpackbits(packed.numpy())).float().mul_(2).sub_(1)


class Gathers:
    """deepspeed.comm, whose all_gather views what it sends as what is received."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.calls, name)

    def all_gather(self, received: list[Tensor], sent: Tensor, group: Any = None) -> Any:
        return self.calls.all_gather(received, sent.reshape(received[0].shape), group=group)


def make_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    """A DeepSpeed engine whose optimizer is OneBitAdam with comm_backend_name "compressed"."""
    import deepspeed
    import deepspeed.ops
    from deepspeed.ops import op_builder

    for name in list(deepspeed.ops.__compatible_ops__):
        deepspeed.ops.__compatible_ops__[name] = False
    op_builder.PackbitsBuilder = Packbits
    from deepspeed.runtime.comm import compressed

    if not isinstance(compressed.dist, Gathers):
        compressed.dist = Gathers(compressed.dist)
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine
