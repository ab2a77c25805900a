"""One rank that trains with messages of one bit, or with quantized gathers and reductions; see slow_links_test.py.

slow_links_rank.py STAGE,DTYPE[,OPTIMIZER]... | codes KEYS...
OPTIMIZER = tp: LAMB of a model that two ranks split; low_rank: momenta that are sums of products.
"""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import zeroth

FREEZE, STEPS = 4, 40
ZERO_ONE_FREEZE, ZERO_ONE_SCALER, ZERO_ONE_LOCAL, ZERO_ONE_CLIPPER = 12, 4, 8, 4
ZERO_ONE_VARIANCES = (1, 2, 3, 4, 6, 8, 10, 12)
LR, BETAS, EPS, DECAY = 5e-3, (0.9, 0.99), 1e-8, 0.1
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters."
)


class Letters(nn.Module):
    """The next letter of four: small enough for one piece a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.hidden = nn.Linear(32, 24)
        self.head = nn.Linear(24, 32)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(torch.tanh(self.hidden(self.embed(x).flatten(1)))), y)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    letters = torch.tensor([ord(letter.lower()) % 32 for letter in TEXT])
    random = torch.Generator().manual_seed(1000 * step + rank)
    at = torch.randint(len(letters) - 4, (16,), generator=random)
    return torch.stack([letters[i : i + 4] for i in at]), letters[at + 4]


class Reference:
    """Tang et al. 2021, algorithm 1, with a scale for each parameter, of all ranks in one process."""

    def __init__(
        self, model: nn.Module, ranks: int, loss_of: Callable[[nn.Module, int, int], torch.Tensor] | None = None
    ) -> None:
        """`loss_of`: of the model, a step's number and a rank."""
        self.model = model
        self.ranks = ranks
        self.loss = loss_of or (lambda model, number, rank: model(*batch(number, rank)))
        like = [torch.zeros_like(parameter) for parameter in model.parameters()]
        self.m, self.v, self.server = ([one.clone() for one in like] for _ in range(3))
        self.worker = [[one.clone() for one in like] for _ in range(ranks)]

    def step(self, number: int) -> None:
        parameters = list(self.model.parameters())
        gradients = [torch.autograd.grad(self.loss(self.model, number, rank), parameters) for rank in range(self.ranks)]
        for i, parameter in enumerate(parameters):
            each = [one[i] for one in gradients]
            if number <= FREEZE:
                mean = sum(each) / self.ranks
                self.m[i] = BETAS[0] * self.m[i] + (1 - BETAS[0]) * mean
                self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * mean.square()
            else:
                self.m[i] = self.exchanged(i, each)
            corrected = (self.v[i] / (1 - BETAS[1] ** min(number, FREEZE))).sqrt() + EPS
            direction = torch.where(self.v[i] > 0, self.m[i] / corrected, 0.0) / (1 - BETAS[0] ** number)
            with torch.no_grad():
                parameter.mul_(1 - LR * DECAY).sub_(LR * direction)

    def exchanged(self, i: int, each: list[torch.Tensor]) -> torch.Tensor:
        return self.mean_of_signs(i, [BETAS[0] * self.m[i] + (1 - BETAS[0]) * gradient for gradient in each])

    def mean_of_signs(self, i: int, each: list[torch.Tensor]) -> torch.Tensor:
        packed = []
        for rank, value in enumerate(each):
            message = self.worker[rank][i] + value
            packed.append(signs(message))
            self.worker[rank][i] = message - packed[-1]
        total = sum(packed) / self.ranks + self.server[i]
        result = signs(total)
        self.server[i] = total - result
        return result


class Lamb(Reference):
    """You et al. 2020, algorithm 2; from FREEZE on Li et al. 2021, unless FREEZE is never reached."""

    def __init__(self, model: nn.Module, ranks: int, freeze: int) -> None:
        super().__init__(model, ranks)
        self.freeze = freeze
        self.ratio = [0.0 for _ in self.m]
        self.factor = [1.0 for _ in self.m]
        self.fresh = [one.clone() for one in self.v]

    def direction(self, i: int, number: int) -> torch.Tensor:
        corrected = (self.v[i] / (1 - BETAS[1] ** min(number, self.freeze))).sqrt() + EPS
        return torch.where(self.v[i] > 0, self.m[i] / (1 - BETAS[0] ** number) / corrected, 0.0)

    def step(self, number: int) -> None:
        parameters = list(self.model.parameters())
        gradients = [torch.autograd.grad(self.loss(self.model, number, rank), parameters) for rank in range(self.ranks)]
        for i, parameter in enumerate(parameters):
            each = [one[i] for one in gradients]
            if number <= self.freeze:
                mean = sum(each) / self.ranks
                self.m[i] = BETAS[0] * self.m[i] + (1 - BETAS[0]) * mean
                self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * mean.square()
                self.fresh[i] = self.v[i].clone()
                update = self.direction(i, number) + DECAY * parameter.detach()
                norms = parameter.detach().norm().item(), update.norm().item()
                ratio = min(max(norms[0] / norms[1], 0.01), 10.0) if min(norms) > 0 else 1.0
                self.ratio[i] = 0.9 * self.ratio[i] + 0.1 * ratio
            else:
                before = self.m[i]
                self.m[i] = self.exchanged(i, each)
                inside = (self.m[i] - BETAS[0] * before) / (1 - BETAS[0])
                self.fresh[i] = BETAS[1] * self.fresh[i] + (1 - BETAS[1]) * inside.square()
                frozen = (self.v[i] / (1 - BETAS[1] ** self.freeze)).sqrt() + EPS
                now = (self.fresh[i] / (1 - BETAS[1] ** number)).sqrt() + EPS
                greatest = torch.where(self.v[i] > 0, frozen / now, 0.0).max().item()
                last = self.factor[i]
                self.factor[i] = min(max(min(max(greatest, 0.5), 4.0), 0.9 * last), 1.1 * last)
                ratio = self.ratio[i] * self.factor[i]
                update = self.direction(i, number) + DECAY * parameter.detach()
            with torch.no_grad():
                parameter.sub_(LR * ratio * update)


class ZeroOne(Reference):
    """Lu et al. 2022, of all ranks in one process: the parameters of each, and those of the last synchronisation."""

    def __init__(self, model: nn.Module, ranks: int, clipper: int) -> None:
        super().__init__(model, ranks)
        self.models = [model] + [copy.deepcopy(model) for _ in range(ranks - 1)]
        self.momenta = [[one.clone() for one in self.m] for _ in range(ranks)]
        self.unsent = [[one.clone() for one in self.m] for _ in range(ranks)]
        self.common = [parameter.detach().clone() for parameter in model.parameters()]
        self.rates = 0.0
        self.clipper = clipper

    def step(self, number: int) -> None:
        gradients = [
            torch.autograd.grad(one(*batch(number, rank)), list(one.parameters()))
            for rank, one in enumerate(self.models)
        ]
        decay = 1 - LR * DECAY
        rate = LR / (1 - BETAS[0] ** number)
        self.rates += rate
        interval = (
            min(self.clipper, 2 ** ((number - ZERO_ONE_FREEZE - 1) // ZERO_ONE_LOCAL))
            if number > ZERO_ONE_FREEZE
            else 1
        )
        if number == ZERO_ONE_FREEZE + 1:
            for one in (*self.server, *(error for rank in self.worker for error in rank)):
                one.zero_()
        updates = sum(step in ZERO_ONE_VARIANCES for step in range(1, min(number, ZERO_ONE_FREEZE) + 1))
        for i in range(len(self.m)):
            each = [one[i] for one in gradients]
            if number <= ZERO_ONE_FREEZE:
                if number in ZERO_ONE_VARIANCES:
                    mean = sum(each) / self.ranks
                    self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * mean.square()
                else:
                    mean = self.mean_of_signs(i, each)
                for momenta in self.momenta:
                    momenta[i] = BETAS[0] * momenta[i] + (1 - BETAS[0]) * mean
            else:
                for rank, gradient in enumerate(each):
                    self.momenta[rank][i] = BETAS[0] * self.momenta[rank][i] + (1 - BETAS[0]) * gradient
                    self.unsent[rank][i] += rate * self.momenta[rank][i]
            corrected = (self.v[i] / (1 - BETAS[1] ** updates)).sqrt() + EPS
            self.common[i] *= decay
            for rank, model in enumerate(self.models):
                parameter = list(model.parameters())[i]
                moved = torch.where(self.v[i] > 0, self.momenta[rank][i] / corrected, 0.0)
                with torch.no_grad():
                    parameter.mul_(decay).sub_(rate * moved)
            if number <= ZERO_ONE_FREEZE:
                self.common[i] = list(self.models[0].parameters())[i].detach().clone()
            elif number % interval == 0:
                mean = self.mean_of_signs(i, [one[i] / self.rates for one in self.unsent])
                self.common[i] -= self.rates * torch.where(self.v[i] > 0, mean / corrected, 0.0)
                for rank, model in enumerate(self.models):
                    self.momenta[rank][i] = mean.clone()
                    self.unsent[rank][i].zero_()
                    with torch.no_grad():
                        list(model.parameters())[i].copy_(self.common[i])
        if number % interval == 0:
            self.rates = 0.0


def signs(values: torch.Tensor) -> torch.Tensor:
    scale = values.norm() / math.sqrt(values.numel())
    return torch.where(values < 0, -scale, scale)


def params_of(optimizer: str, stage: int) -> dict[str, object]:
    params: dict[str, object] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    if optimizer.startswith("OneBit"):
        params |= {"freeze_step": FREEZE, "cuda_aware": False, "comm_backend_name": "mpi"}
    if optimizer == "ZeroOneAdam":
        params |= {
            "var_freeze_step": ZERO_ONE_FREEZE,
            "var_update_scaler": ZERO_ONE_SCALER,
            "local_step_scaler": ZERO_ONE_LOCAL,
            "local_step_clipper": 1 if stage > 0 else ZERO_ONE_CLIPPER,
        }
    return params


def reference_of(optimizer: str, plain: nn.Module, ranks: int, stage: int) -> Reference:
    if optimizer == "ZeroOneAdam":
        return ZeroOne(plain, ranks, 1 if stage > 0 else ZERO_ONE_CLIPPER)
    if optimizer == "Lamb":
        return Lamb(plain, ranks, STEPS)
    return Lamb(plain, ranks, FREEZE) if optimizer == "OneBitLamb" else Reference(plain, ranks)


def train(stage: int, dtype: torch.dtype, optimizer: str) -> None:
    world = zeroth.World.from_environment()
    torch.manual_seed(1)
    model = Letters().to(dtype)
    plain = copy.deepcopy(model)
    settings = {
        "optimizer": {"type": optimizer, "params": params_of(optimizer, stage)},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine = zeroth.Engine(model, settings, world=world, log_level="warning")
    losses = []
    silent = 0
    for number in range(1, STEPS + 1):
        engine.reset_counters()
        loss = engine(*batch(number, world.rank))
        planned = engine.wire_report()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        wire = engine.wire_report()
        silent += wire["reduce_scatter"] == wire["all_gather"] == 0
        if optimizer.startswith("OneBit") and number > FREEZE + 1:  # the round before gathers the momenta of all owners
            assert wire["reduce_scatter"] == wire["planned_reduce_scatter"] > 0, (number, wire)
            assert wire["all_gather"] == wire["planned_all_gather"] > 0, (number, wire)
        if optimizer == "ZeroOneAdam" and number != ZERO_ONE_FREEZE + 1:
            assert wire["reduce_scatter"] == planned["planned_reduce_scatter"], (number, wire, planned)
            assert wire["all_gather"] == planned["planned_all_gather"], (number, wire, planned)
    # 8 steps with an interval of 1, 8 with one of 2, and 12 with one of 4.
    assert silent == (4 + 9 if optimizer == "ZeroOneAdam" and stage == 0 else 0), silent
    if dtype == torch.float64:
        reference = reference_of(optimizer, plain, world.size, stage)
        for number in range(1, STEPS + 1):
            reference.step(number)
        for name, expected in plain.named_parameters():
            got = engine.full(name)
            torch.testing.assert_close(got, expected.detach(), rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")
    digest = sum(float(engine.full(name).double().abs().sum()) for name, _ in plain.named_parameters())
    if world.rank == 0:
        print(
            f"stage {stage} {dtype} {optimizer} {digest.hex()} {losses[0]:.3f} {sum(losses[-5:]) / 5:.3f}", flush=True
        )
    engine.close(keep_parameters=False)


def train_split(stage: int) -> None:
    """Norms are those of the whole matrices, of which each rank has a part."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2)).double()
    plain = copy.deepcopy(model)
    world = zeroth.World.from_environment()
    settings = {
        "optimizer": {"type": "Lamb", "params": params_of("Lamb", stage)},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "zeroth": {"mesh": {"tp": 2}},
    }
    engine = zeroth.Engine(model, settings, world=world, log_level="warning")
    ids = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(3))
    reference = Lamb(plain, 1, STEPS)
    reference.loss = lambda model, number, rank: model(input_ids=ids, labels=ids).loss
    for number in range(1, 6):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        reference.step(number)
    for name, expected in plain.named_parameters():
        got = engine.full(name)
        torch.testing.assert_close(got, expected.detach(), rtol=1e-7, atol=1e-7, msg=lambda text: f"{name}: {text}")
    engine.close(keep_parameters=False)


def train_with_products(stage: int) -> None:
    """Products have one column; momenta, which are sums of them, have more."""
    world = zeroth.World.from_environment()
    torch.manual_seed(1)
    params = params_of("OneBitAdam", stage) | {"compression": "low_rank", "compression_rank": 1}
    settings = {
        "optimizer": {"type": "OneBitAdam", "params": params},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    engine = zeroth.Engine(Letters(), settings, world=world, log_level="warning")
    for number in range(1, 10 * FREEZE):
        engine.backward(engine(*batch(number, world.rank)))
        engine.step()
    values = torch.linalg.svdvals(engine.full("hidden.weight", "exp_avg"))
    assert values[1] > 0.01 * values[0], values
    engine.close(keep_parameters=False)


SWITCHES = {
    "weights": "zero_quantized_weights",
    "gradients": "zero_quantized_gradients",
}


def train_in_codes(call: str) -> None:
    """`call`: a stage, and the switches that are on: "3+weights+gradients"."""
    stage, *keys = call.split("+")
    world = zeroth.World.from_environment()
    torch.manual_seed(1)
    settings = {
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": int(stage)} | {SWITCHES[key]: True for key in keys if key in SWITCHES},
        "zeroth": {"codes": {"feedback": False}} if "forgets" in keys else {"gradient_degree": int("runs" in keys)},
        "gradient_clipping": 0.0,
    }
    engine = zeroth.Engine(Letters().to(torch.bfloat16), settings, world=world, log_level="warning")
    losses = []
    for number in range(1, STEPS + 1):
        engine.reset_counters()
        loss = engine(*batch(number, world.rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        wire = engine.wire_report()
        for kind in ("reduce_scatter", "all_gather"):
            assert wire[kind] == wire[f"planned_{kind}"] > 0, (call, kind, wire)
    digest = sum(float(engine.full(name).double().abs().sum()) for name, _ in Letters().named_parameters())
    if world.rank == 0:
        bytes_of = f"{wire['reduce_scatter']} {wire['all_gather']}"
        print(f"codes {call} {digest.hex()} {bytes_of} {sum(losses[-10:]) / 10:.4f}", flush=True)
    engine.close(keep_parameters=False)


def train_late(stage: int, late: int) -> None:
    """With a gradient code of two ranks, of which `late` (-1: none) is late in every step; stage -1: without a code."""
    world = zeroth.World.from_environment()
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": max(0, stage)},
    }
    if stage >= 0:
        settings |= {"gradient_accumulation_steps": 2, "zeroth": {"gradient_code": {"stragglers": 1}}}
    engine = zeroth.Engine(Letters(), settings, world=world, log_level="warning")
    for number in range(1, 11):
        for chunk in engine.chunks or [world.rank]:
            limit = time.monotonic() + 60
            while world.rank == late and not engine.ends_step:
                assert time.monotonic() < limit, "the other rank does not decide the step"
                time.sleep(0.001)
            engine.backward(engine(*batch(number, chunk)))
            result = engine.step()
            if result.boundary:
                break
        assert result.committed and result.batches == 2 and (late < 0 or late in result.left_out), result.left_out
    values = torch.cat([engine.full(name).reshape(-1) for name, _ in Letters().named_parameters()])
    if world.rank == 0:
        print(
            f"late {stage} {late} {values.double().sum().item().hex()} {values.double().norm().item():.6f}", flush=True
        )
    engine.close(keep_parameters=False)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "late":
        for call in sys.argv[2:]:
            stage, late = call.split(",")
            train_late(int(stage), int(late))
        return
    if sys.argv[1] == "codes":
        for call in sys.argv[2:]:
            train_in_codes(call)
        return
    for call in sys.argv[1:]:
        stage, dtype, *optimizer = call.split(",")
        if optimizer == ["tp"]:
            train_split(int(stage))
            continue
        if optimizer == ["low_rank"]:
            train_with_products(int(stage))
            continue
        train(int(stage), getattr(torch, dtype), *(optimizer or ["OneBitAdam"]))


if __name__ == "__main__":
    main()
