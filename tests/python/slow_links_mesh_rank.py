"""One rank of four that trains with messages of one bit on a mesh; see slow_links_test.py.

Until variances are frozen the numbers are AdamW's on the same mesh, with ==; after it losses, norms and weights are the
same at every ZeRO stage, with ==, and those of a chain in stages of a pipeline are the paper's. Replicas are compared
after each step.

slow_links_mesh_rank.py NAME...     of MESHES, or `chain`
"""

from __future__ import annotations

import copy
import math
import sys
import tempfile
from typing import Any

import slow_links_rank as alone
import torch
from tensor_models import MODELS, SMALL, VOCAB
from torch import nn

import zeroth

FREEZE, STEPS, MICRO = 2, 5, 2
NVME = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "stages": (3, 0), "clip": 0.1},
    "sp": {"mesh": {"sp": 2}, "stages": (3, 0)},
    "norms": {"mesh": {"tp": 2}, "tensor": {"norms": "split"}, "stages": (2, 0)},
    "tied": {"model": "gpt2", "mesh": {"tp": 2}, "stages": (3, 0)},
    "pp": {"mesh": {"pp": 2}, "stages": (3, 0)},
    "tied pp": {"model": "gpt2", "mesh": {"pp": 2}, "stages": (1, 0), "clip": 0.1},
    "bf16": {"mesh": {"tp": 2}, "stages": (3, 0), "keys": {"bf16": {"enabled": True}}},
    "fp16": {
        "mesh": {"tp": 2},
        "stages": (2, 0),
        "keys": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}},
    },
    "files": {"mesh": {"tp": 2}, "stages": (3, 0), "zero": {"offload_optimizer": NVME, "offload_param": NVME}},
}
Trained = tuple[list[float], list[float], list[bool], dict[str, torch.Tensor]]
"""losses, norms, whether a step exchanged messages, weights"""


def batch(step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(1, VOCAB, (2, 12), generator=generator)


def loss_fn(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def config_of(name: str, stage: int, optimizer: str) -> dict[str, Any]:
    about = MESHES[name]
    params: dict[str, object] = {"lr": 2e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}
    if optimizer == "OneBitAdam":
        params["freeze_step"] = FREEZE
    return {
        "zero_optimization": {"stage": stage, **about.get("zero", {})},
        "optimizer": {"type": optimizer, "params": params},
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": about.get("clip", 0.0),
        "zeroth": {
            "mesh": about["mesh"],
            "tensor": about.get("tensor", {}),
            "reduction_policy": "per_step",
            "compare_replicas": True,
            "offload": {"block_elements": 1024},
            "parallel": {"verify": "never"},
        },
        **about.get("keys", {}),
    }


def train(name: str, stage: int, world: zeroth.World, optimizer: str = "OneBitAdam") -> Trained:
    about = MESHES[name]
    torch.manual_seed(1)
    model = MODELS[about.get("model", "llama")]().to(torch.float32 if "keys" in about else torch.float64).train()
    config = config_of(name, stage, optimizer)
    dp = world.size // math.prod(about["mesh"].values())
    steps = FREEZE if optimizer == "AdamW" else STEPS
    pipe = "pp" in about["mesh"]
    own = world.rank % dp if pipe else world.rank // (world.size // dp)
    if pipe:
        zeroth.pipeline(model, config, world=world, loss_fn=loss_fn)
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    losses, norms, messages = [], [], []
    for step in range(steps + (4 if "fp16" in name else 0)):
        if pipe:
            inputs = [batch(step, micro * dp + own) for micro in range(MICRO)]
            result, loss = engine.train_batch([({"input_ids": tokens}, tokens) for tokens in inputs])
            losses.append(loss)
        else:
            total = 0.0
            for micro in range(MICRO):
                tokens = batch(step, micro * dp + own)
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                total += loss.item()
                result = engine.step()
            losses.append(engine.average(total / MICRO))
        norms.append(result.grad_norm)
        messages.append(result.messages)
        assert result.messages == (result.committed and optimizer == "OneBitAdam" and result.step > FREEZE), result
    report = engine.memory_report()
    assert report.planned == report.measured_peak, (name, stage, report.planned, report.measured_peak)
    weights = engine.state_dict(ranks=None)
    engine.close(keep_parameters=False)
    return losses, norms, messages, weights


def check(name: str, world: zeroth.World) -> None:
    first, *others = MESHES[name]["stages"]
    mine = train(name, first, world)
    assert mine[2][-1], (name, mine[2])
    assert all(torch.isfinite(value).all() for value in mine[3].values()), name
    for stage in others:
        other = train(name, stage, world)
        assert mine[:3] == other[:3], (name, stage, mine[:3], other[:3])
        assert all(torch.equal(mine[3][key], other[3][key]) for key in mine[3]), (name, stage)
    if "fp16" not in name:
        adam = train(name, first, world, "AdamW")
        assert (adam[0], adam[1]) == (mine[0][:FREEZE], mine[1][:FREEZE]), (name, adam[:2], mine[:2])
    else:
        assert mine[2].index(True) > FREEZE, "steps that were skipped move the change of phases"
    if world.rank == 0:
        print(f"{name}: {mine[0][0]:.4f} {mine[0][-1]:.4f} ok", flush=True)


def chain_loss(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return sum((model(x) - y).square().mean() for x, y in chain_batches(number, rank)) / MICRO


def chain_batches(number: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1000 * number + rank)
    return [
        (
            torch.randn(4, 10, dtype=torch.float64, generator=random),
            torch.randn(4, 10, dtype=torch.float64, generator=random),
        )
        for _ in range(MICRO)
    ]


def check_chain(world: zeroth.World) -> None:
    """Two stages of two ranks: each rank has a part of the layers, and messages of its stage."""
    for stage in (0, 1, 3):
        torch.manual_seed(1)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(10, 10), nn.Tanh()))).double()
        plain = copy.deepcopy(model)
        params = {"lr": alone.LR, "betas": alone.BETAS, "eps": alone.EPS, "weight_decay": alone.DECAY}
        config = {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "OneBitAdam", "params": {**params, "freeze_step": alone.FREEZE}},
            "gradient_accumulation_steps": MICRO,
            "zeroth": {"mesh": {"pp": 2}, "compare_replicas": True},
        }
        zeroth.pipeline(model, config, world=world, loss_fn=nn.functional.mse_loss)
        engine = zeroth.Engine(model, config, world=world, log_level="warning")
        reference = alone.Reference(plain, 2, chain_loss)
        for number in range(1, alone.FREEZE + 6):
            result, _ = engine.train_batch(chain_batches(number, world.rank % 2))
            assert result.messages == (number > alone.FREEZE), result
            reference.step(number)
        for name, value in engine.state_dict(ranks=None).items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-9, atol=1e-9)
        engine.close(keep_parameters=False)
    if world.rank == 0:
        print("chain: ok", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    assert SMALL["num_hidden_layers"] == 2
    for name in sys.argv[1:]:
        check_chain(world) if name == "chain" else check(name, world)


if __name__ == "__main__":
    main()
