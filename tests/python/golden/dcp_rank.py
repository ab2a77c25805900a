"""One of two ranks of FSDP that wrote what of_others.tar.xz has of DCP, with torch 2.11.

RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600 dcp_rank.py OUT
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3), nn.BatchNorm1d(3))
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": 2}, checkpoint_id=f"{sys.argv[1]}/dcp")
    truth = {name: whole(value) for name, value in weights.items()}
    truth |= {f"{name}/{key}": whole(v) for name, own in states["state"].items() for key, v in own.items()}
    if rank == 0:
        torch.save(truth, f"{sys.argv[1]}/truth.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
