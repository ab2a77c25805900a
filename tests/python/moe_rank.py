"""One of four ranks with layers of zeroth.nn.MoE on ep=2 x dp=2, beside a plain loop of torch over all batches; see
moe_test.py. Prints a line when all held."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

import zeroth
import zeroth.nn

MESH = {"ep": 2, "dp": 2}
BATCH = 12
STEPS = 4
LR = 1e-2


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self, loss: float = 0.0, first: int = 0, **arguments: Any) -> None:
        """`loss`: weight of the balance loss. `first`: experts of a layer before, from 1."""
        super().__init__()
        self.inner = nn.Linear(8, 12)
        self.before = zeroth.nn.MoE(12, Mlp(12), num_experts=first, seed=1, **arguments) if first else None
        self.moe = zeroth.nn.MoE(12, Mlp(12), num_experts=5, **arguments)
        self.out = nn.Linear(12, 1)
        self.balance = loss

    def layers(self) -> list[zeroth.nn.MoE]:
        return [layer for layer in (self.before, self.moe) if layer is not None]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if self.before is not None:
            h = h + self.before(h)[0]
        mixed, balance, counts = self.moe(h)
        assert counts.sum() == x.shape[0] * self.moe.k
        loss: torch.Tensor = ((self.out(h + mixed) - y) ** 2).mean() + self.balance * balance
        return loss


CASES: dict[str, dict[str, Any]] = {
    "balance": {"loss": 0.3, "k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False},
    "drops by position": {"k": 1, "capacity_factor": 0.5, "min_capacity": 1, "use_rts": False},
    "drops by draw": {"k": 1, "capacity_factor": 0.5, "min_capacity": 1},
    "second drawn": {"k": 2, "capacity_factor": 0.8, "min_capacity": 1, "use_residual": True},
    "jitter": {"k": 3, "drop_tokens": False, "noisy_gate_policy": "Jitter"},
    "noise": {"k": 1, "noisy_gate_policy": "RSample", "min_capacity": 2},
    "bias": {"balance": "bias", "balance_rate": 0.05, "k": 2, "score": "sigmoid", "drop_tokens": False},
    "fixed router, more choices": {"router": "fixed", "schedule": (1, 3, 3), "drop_tokens": False},
    "pyramid": {"first": 2, "k": 1, "use_residual": True, "capacity_factor": 1.0, "min_capacity": 1},
}


def made(case: dict[str, Any]) -> Net:
    torch.manual_seed(5)
    return Net(**case).double()


def batches() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each step and rank."""
    generator = torch.Generator().manual_seed(7)

    def one(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [[(one(BATCH, 8), one(BATCH, 1)) for _ in range(4)] for _ in range(STEPS)]


def by_hand(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What plain torch makes of it: for the balance all ranks' tokens are one batch; otherwise each rank's tokens are
    dropped alone."""
    model = made(case)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=LR, weight_decay=0.01)
    for step, of_ranks in enumerate(batches()):
        optimizer.zero_grad()
        if model.balance > 0 or "balance" in case:
            model(torch.cat([x for x, _ in of_ranks]), torch.cat([y for _, y in of_ranks])).backward()
        else:
            for rank, (x, y) in enumerate(of_ranks):
                for layer in model.layers():
                    layer.forwards.fill_(step)  # each rank's first forward of the step
                    layer._gate.place = rank  # ranks draw other numbers
                (model(x, y) / 4).backward()
        optimizer.step()
        for layer in model.layers():
            layer.begin_step()
    return model.state_dict()


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
        "zeroth": {"mesh": MESH},
    }


def train(engine: zeroth.Engine, rank: int, begin: int, end: int) -> None:
    for of_ranks in batches()[begin:end]:
        engine.backward(engine(*of_ranks[rank]))
        engine.step()


def check_case(name: str, world: zeroth.World, stage: int) -> None:
    expected = by_hand(CASES[name])
    engine = zeroth.Engine(made(CASES[name]), config(stage), world=world, log_level="error")
    train(engine, world.rank, 0, STEPS)
    got = engine.state_dict()  # whole on rank 0
    assert world.rank > 0 or got.keys() == expected.keys(), (name, got.keys() ^ expected.keys())
    for key, value in expected.items() if world.rank == 0 else ():
        if key.endswith(".forwards"):
            continue  # by hand a step has four
        apart = float((got[key].double() - value.double()).abs().max())
        assert apart <= 1e-12, f"{name}: {key} is off by {apart}"
    *before, use = engine.moe_report()
    assert use.name == "moe" and len(use.chosen) == 5 and len(use.rows) == (3 if world.rank % 2 == 0 else 2), use
    assert not before or len(before[0].rows) == 1, "two experts are one a rank"
    assert 0 < use.entropy <= 1, use
    choices = BATCH * CASES[name].get("k", 3)
    assert sum(use.chosen) + use.dropped == choices, use
    everywhere = engine.moe_report(everywhere=True)
    assert [one.name for one in everywhere] == [one.name for one in (*before, use)]
    total = torch.tensor([*use.chosen, use.dropped])
    for group in engine._experts.groups:
        total = zeroth._C.all_reduce(total, group)
    assert [*everywhere[-1].chosen, everywhere[-1].dropped] == total.tolist(), (everywhere, total)
    assert sum(everywhere[-1].rows) + everywhere[-1].dropped == 4 * choices
    drops = {"balance": False, "jitter": False, "drops by position": True, "drops by draw": True}
    assert drops.get(name, use.dropped > 0) == (use.dropped > 0), use
    engine.close(keep_parameters=False)


def check_resume(name: str, world: zeroth.World, folder: pathlib.Path) -> None:
    """What is drawn, the bias and the number of choices go on where they were."""
    states = []
    for resumed in (False, True):
        engine = zeroth.Engine(made(CASES[name]), config(2), world=world, log_level="error")
        train(engine, world.rank, 0, 2)
        if resumed:
            engine.save(folder)
            engine.close(keep_parameters=False)
            engine = zeroth.Engine(made(CASES[name]), config(3), world=world, log_level="error")
            engine.load(folder)
        train(engine, world.rank, 2, STEPS)
        states.append(engine.state_dict())
        engine.close(keep_parameters=False)
    for key, value in states[0].items():  # whole on rank 0
        assert torch.equal(states[1][key], value), key


class Listed(nn.Module):
    """Experts as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 5
        self.weight = nn.Parameter(torch.randn(5, 8, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        rows = torch.einsum("td,tkod->tko", x, self.weight[top_k_index])
        return (rows * top_k_weights.unsqueeze(-1)).sum(1)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 8, dtype=torch.float64))
        self.register_buffer("e_score_correction_bias", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        experts, weights, _ = zeroth.nn.route(x @ self.weight.T, 2, score="sigmoid", bias=self.e_score_correction_bias)
        return experts, weights


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = Listed()
        self.chosen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, weights = self.gate(x)
        self.chosen.append(experts)
        result: torch.Tensor = self.experts(x, experts, weights)
        return result


def check_bias_of_a_model(world: zeroth.World, ep: int) -> None:
    """Two micro-batches a step, and an evaluation that does not count; on ranks of ep, and where none share experts."""
    torch.manual_seed(2)
    block = Block()
    settings = {**config(1), "gradient_accumulation_steps": 2, "zeroth": {"mesh": {"ep": ep, "dp": 4 // ep}}}
    engine = zeroth.Engine(nn.Sequential(block), settings, world=world, log_level="error")
    expected = torch.zeros(5)
    for step in range(3):
        total = torch.zeros(5, dtype=torch.int64)
        for micro in range(2):
            x = torch.randn(6 + world.rank, 8, dtype=torch.float64)
            engine.backward(engine(x + 0.1 * (step + micro)).square().mean())
            total += torch.bincount(block.chosen[-1].flatten(), minlength=5)
            result = engine.step()
        engine.eval()
        engine(torch.randn(3, 8, dtype=torch.float64))
        engine.train()
        for group in engine._experts.groups:
            total = zeroth._C.all_reduce(total, group)
        (use,) = engine.moe_report(everywhere=True)
        assert use.name == "0.experts" and list(use.chosen) == total.tolist(), (use, total)
        assert result.boundary and zeroth.nn.update_balance_bias(engine.module, 0.25) == 1
        expected += 0.25 * (total.sum() - 5 * total).sign()
        assert torch.equal(block.gate.e_score_correction_bias, expected), (block.gate.e_score_correction_bias, expected)
    assert expected.any()
    engine.close(keep_parameters=False)


def check_kept_calls(world: zeroth.World) -> None:
    """A recompute without calls between ranks has the bits of one with them, and of none."""
    mesh = world.mesh({"dp": 2, "ep": 2})
    results = []
    for contexts in (None, torch.utils.checkpoint.noop_context_fn, zeroth.nn.keep_calls):
        torch.manual_seed(3)
        model = nn.ModuleDict({"moe": zeroth.nn.MoE(8, nn.Linear(8, 8), num_experts=4, k=2, min_capacity=1).double()})
        zeroth.experts(model, mesh)
        layer = model["moe"]
        layer.balance_over(mesh)  # type: ignore[operator]
        x = torch.randn(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
        if contexts is None:
            out, balance, _ = layer(x)
        else:
            again = torch.utils.checkpoint.checkpoint
            out, balance, _ = again(layer, x, use_reentrant=False, context_fn=contexts)
        (out.square().sum() + balance).backward()
        assert sum(layer.load.chosen) == 4 * 9 * 2  # type: ignore[union-attr, arg-type]
        results.append([out.detach(), balance.detach(), *(one.grad for one in model.parameters())])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def check_refused(world: zeroth.World) -> None:
    model = nn.Sequential(zeroth.nn.MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=4))
    try:
        zeroth.Engine(model, config(1), world=world, log_level="error")
    except zeroth.Error as error:
        assert all(word in str(error) for word in ("0: MoE(ep_size)", "ep_size=4", "ep_size=2")), error
        assert f"rank {world.rank}/4" in str(error), error
    else:
        raise AssertionError("another ep_size than the mesh's was taken")


def main() -> None:
    world = zeroth.World.from_environment()
    torch.set_num_threads(1)
    for index, name in enumerate(CASES):
        check_case(name, world, (0, 3, 2, 1)[index % 4])
    check_resume("drops by draw", world, pathlib.Path(sys.argv[1], "draw"))
    check_resume("bias", world, pathlib.Path(sys.argv[1], "bias"))
    check_resume("fixed router, more choices", world, pathlib.Path(sys.argv[1], "fixed"))
    check_bias_of_a_model(world, 2)
    check_bias_of_a_model(world, 1)
    check_kept_calls(world)
    check_refused(world)
    print(f"rank {world.rank}: all cases held", flush=True)


main()
