"""One of two or three ranks that wrote what of_others.tar.xz has of DeepSpeed 0.19.8. DeepSpeed is no dependency of a
test; this says how the files were made.

DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29600
deepspeed_rank.py OUT STAGE DTYPE [JSON of zero_optimization]

step3_universal was made of OUT/step3 by python -m deepspeed.checkpoint.ds_to_universal.
"""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import sys

import torch
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


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(11, (4,), generator=generator)
    return x, (x * 3 + 1) % 11


def main() -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    out, stage, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = Net()
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
    config["zero_optimization"].update(json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if dtype == "fp16":
        config[dtype]["initial_scale_power"] = 4
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups_of(model))
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(5 + rank)

    def step() -> float:
        loss = engine(*batch(generator))
        engine.backward(loss)
        engine.step()
        return loss.item()

    for _ in range(3):
        step()
    engine.save_checkpoint(out, tag="step3", client_state={"epoch": 2})
    losses = [None] * int(os.environ["WORLD_SIZE"])
    torch.distributed.all_gather_object(losses, [step(), step()])
    if rank == 0:
        with open(f"{out}/losses.json", "w") as file:
            json.dump(losses, file)
        truth = get_fp32_state_dict_from_zero_checkpoint(out)
        torch.save({name: tensor.clone() for name, tensor in truth.items()}, f"{out}/truth.pt")


if __name__ == "__main__":
    main()
