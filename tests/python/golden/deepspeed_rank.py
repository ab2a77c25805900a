"""One of two or three ranks that wrote what of_others.tar.xz has of DeepSpeed 0.19.8. DeepSpeed is no dependency of a
test; this says how the files were made.

DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600
deepspeed_rank.py OUT STAGE DTYPE

step3_universal was made of OUT/step3 by python -m deepspeed.checkpoint.ds_to_universal.
"""

# mypy: ignore-errors
from __future__ import annotations

import os
import sys

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

SUB_GROUP = 40
"""elements; so that stage 3 has several sub-groups"""


class Net(nn.Module):
    """With a tied weight, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("seen", torch.arange(3.0))
        self.scale = nn.Parameter(torch.full((6,), 1.5), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).float(), y)


def main() -> None:
    out, stage, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": SUB_GROUP if int(os.environ["WORLD_SIZE"]) == 3 else 100,
        },
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config[dtype]["initial_scale_power"] = 4
    groups = [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups)
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(5 + rank)
    for _ in range(3):
        x = torch.randint(11, (4,), generator=generator)
        engine.backward(engine(x, (x * 3 + 1) % 11))
        engine.step()
    engine.save_checkpoint(out, tag="step3", client_state={"epoch": 2})
    torch.distributed.barrier()
    if rank == 0:
        truth = get_fp32_state_dict_from_zero_checkpoint(out)
        torch.save({name: tensor.clone() for name, tensor in truth.items()}, f"{out}/truth.pt")


if __name__ == "__main__":
    main()
