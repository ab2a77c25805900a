"""One rank of four with experts and another part of the library; see experts_mixes_test.py. Losses, norms and weights
are those of one process with all batches, without ep.

experts_mixes_rank.py PART... FOLDER
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import signal
import sys
import time
from typing import Any

import torch
import transformers
from experts_models import EPS, SMALL, STEPS, Doubles, Numbers, alone, batch, loss_of, made
from experts_rank import BOUND, Row, config_of, expected, model_of, require_close, run_steps
from kept_calls_rank import doubled
from refusing import refused
from torch import nn

import zeroth
import zeroth.nn


def train(row: Row, world: zeroth.World, config: dict[str, Any]) -> tuple[Numbers, zeroth.Engine]:
    """The engine is not closed."""
    engine = zeroth.Engine(model_of(row), config, world=world, log_level="error")
    losses, norms = run_steps(row, engine, world)
    return (losses, norms, engine.state_dict(ranks=None)), engine


def compare(row: Row, world: zeroth.World, config: dict[str, Any], what: str) -> zeroth.Engine:
    mine, engine = train(row, world, config)
    report = engine.memory_report()
    assert report.planned == report.measured_peak, (what, report.planned, report.measured_peak)
    if world.rank == 0:
        require_close(what, mine, expected(row, world.size // (row.tp * row.sp) * row.micro_steps))
    return engine


def files(world: zeroth.World, folder: str) -> None:
    """States and parameters of experts rest in files: the bits of a run in memory, and blocks are read ahead."""
    sizes = (("hidden_size", 32), ("intermediate_size", 64))
    row = Row(3, micro_steps=2, clip=0.1, more=sizes)
    config = config_of(row)
    in_memory, engine = train(row, world, config)
    resident = engine.state_dict(kind="exp_avg", ranks=None)
    engine.close(keep_parameters=False)
    config["zeroth"]["offload"] = {"block_elements": 1024}
    device = {"device": "nvme", "nvme_path": folder}
    config["zero_optimization"] |= {"offload_optimizer": device | {"buffer_count": 6}}
    config["zero_optimization"]["offload_param"] = device | {"max_in_cpu": 10 * 1024}
    in_files, engine = train(row, world, config)
    assert in_files[:2] == in_memory[:2], (in_files[:2], in_memory[:2])
    assert all(torch.equal(value, in_memory[2][name]) for name, value in in_files[2].items())
    moments = engine.state_dict(kind="exp_avg", ranks=None)
    assert resident.keys() == moments.keys()
    assert all(torch.equal(value, resident[name]) for name, value in moments.items())
    report = engine.memory_report()
    assert report.planned == report.measured_peak, (report.planned, report.measured_peak)
    assert report.planned_files == report.measured_files > 0, report
    for name, of_set in engine.transfer_report().rows.items():
        counted = of_set.all
        # What is read ahead is known from the second step on.
        least = counted.on_demand * (4 if name == "parameters" else 1)
        assert counted.prefetched + counted.late > least, (name, counted.prefetched, counted.late, counted.on_demand)
        assert of_set.last_step.needed_bytes == of_set.planned_read_bytes, name
    engine.close(keep_parameters=False)


def levels(world: zeroth.World, folder: str) -> None:
    """Groups of ranks that have all parameters, or gather inside of nodes of two ranks."""
    for what, more in (
        ("mics", {"mics_shard_size": 2}),
        ("hpz", {"zero_hpz_partition_size": 2}),
    ):
        row = Row(3, clip=0.1)
        config = config_of(row)
        config["zero_optimization"] |= more
        compare(row, world, config, what).close(keep_parameters=False)


def small_messages(world: zeroth.World, folder: str) -> None:
    """Momenta of one bit and codes of gradients. Exact messages: the numbers of a run with all experts on each rank.
    Others: its losses nearly, since messages are cut otherwise, and the same bits at two stages."""
    one_bit = {"type": "OneBitAdam", "params": {"lr": 1e-2, "eps": EPS, "freeze_step": 2}}
    exact = {"type": "OneBitAdam", "params": {**one_bit["params"], "compression": "exact"}}
    for what, ways, optimizer, codes in (
        ("exact", ((1, 1), (1, 2)), exact, False),
        ("one_bit", ((0, 1), (0, 2), (1, 2)), one_bit, False),
        ("codes", ((2, 1), (2, 2), (3, 2)), None, True),
    ):
        seen = []
        for stage, ep in ways:
            row = Row(stage, ep, dtype="fp32", experts="")
            config = config_of(row)
            config["optimizer"] = optimizer or config["optimizer"]
            config["zero_optimization"]["zero_quantized_gradients"] = codes
            (losses, _, weights), engine = train(row, world, config)
            seen.append((losses, weights))
            engine.close(keep_parameters=False)
        whole, split = seen[0], seen[1]
        bound = 1e-5 if what == "exact" else 0.05
        assert all(abs(one - other) <= bound for one, other in zip(whole[0], split[0], strict=True)), (what, seen)
        for name, value in split[1].items():
            if what == "exact":
                assert float((value - whole[1][name]).abs().max()) <= 1e-4, name
            else:
                assert torch.equal(value, seen[2][1][name]), (what, name)


def dense_first(world: zeroth.World, folder: str) -> None:
    """pp=2 x ep=2, where the first stage has no experts: DeepSeek-V3's first layer is dense."""
    row = Row(1, model="DeepseekV3", micro_steps=2)
    for stage in (3,):
        config = config_of(dataclasses.replace(row, stage=stage))
        config["zeroth"] = {"mesh": {"pp": 2, "ep": 2}}
        model = zeroth.pipeline(model_of(row), config, world=world)
        engine = zeroth.Engine(model, config, world=world, log_level="error")
        losses, norms = [], []
        for step in range(STEPS):
            with Doubles():
                result, loss = engine.train_batch([batch(step, micro * 2 + world.rank % 2) for micro in range(2)])
            losses.append(engine.average(float(loss)))
            norms.append(result.grad_norm)
        mine = engine.state_dict(ranks=None)
        engine.close(keep_parameters=False)
        if world.rank == 0:
            require_close(("dense first", stage), (losses, norms, mine), expected(row, 4))


def uneven(world: zeroth.World, folder: str) -> None:
    """Ranks of one ep group have other numbers of batches: the loops end with the first, and a rank that would have to
    go on without a batch is refused, since the others' tokens need its experts."""
    counts = [3, 2, 4, 3]
    model = made("Mixtral")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    for number in range(min(counts)):
        optimizer.zero_grad()
        for rank in range(4):
            (loss_of(model, **batch(number, rank)) / 4).backward()
        optimizer.step()
    wanted = model.state_dict()
    config = config_of(Row(3))
    config["zeroth"]["uneven"] = "drop"
    engine = zeroth.Engine(made("Mixtral"), config, world=world, log_level="error")
    for inputs in engine.batches([batch(number, world.rank) for number in range(counts[world.rank])]):
        with Doubles():
            loss = engine(**inputs, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    assert engine.steps == min(counts)
    for name, value in engine.state_dict(ranks=None).items():
        assert float((value - wanted[name]).abs().max()) <= BOUND, name
    engine.close(keep_parameters=False)
    config["zeroth"]["uneven"] = "error"
    engine = zeroth.Engine(made("Mixtral"), config, world=world, log_level="error")
    with refused("MISMATCH", "rank 1"):
        for inputs in engine.batches([batch(number, world.rank) for number in range(counts[world.rank])]):
            engine.backward(engine(**inputs, use_cache=False).loss)
            engine.step()
    engine.close(keep_parameters=False)
    config["zeroth"]["uneven"] = "join"
    with refused("CONFIG", "would not take part in the calls of layers of experts.*uneven beside /zeroth/mesh/ep = 2"):
        zeroth.Engine(made("Mixtral"), config, world=world, log_level="error")


class Failing(nn.Module):
    """The experts' own code, which fails on rank 1 in the second step."""

    def __init__(self, world: zeroth.World, way: str) -> None:
        super().__init__()
        self.world, self.way, self.calls = world, way, 0

    def __call__(self, forward: Any) -> Any:
        def failing(*given: Any) -> torch.Tensor:
            self.calls += 1
            if self.world.rank == 1 and self.calls == 4:
                if self.way == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("planted in an expert")
            return forward(*given)

        return failing


def fails(world: zeroth.World, way: str) -> None:
    """Rank 1 raises, or dies, inside of a layer of experts, while another one waits for its rows."""
    model = made("Mixtral")
    failing = Failing(world, way)
    for layer in zeroth.experts(model).layers:
        module: Any = layer.module
        module.forward = failing(module.forward)
    config = config_of(Row(3))
    config["zeroth"]["timeout_ms"] = 60_000
    engine = zeroth.Engine(model, config, world=world, log_level="error")
    for step in range(STEPS):
        engine.backward(engine(**batch(step, world.rank)).loss)
        engine.step()
    raise AssertionError("nothing failed")


def raises(world: zeroth.World, folder: str) -> None:
    fails(world, "raises")


def dies(world: zeroth.World, folder: str) -> None:
    fails(world, "dies")


class Block(nn.Module):
    """As older models have it: experts in a list, which the block calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts: Any = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        if not isinstance(self.experts, nn.ModuleList):
            return self.experts(x, chosen, weights)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            out = out.index_add(0, token, expert(x[token]) * weights[token, choice].unsqueeze(-1))
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def rows_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def stacked(world: zeroth.World, folder: str) -> None:
    """A list of experts, stacked, on ranks; states of the list."""
    torch.manual_seed(3)
    listed = Blocks().double()
    model = copy.deepcopy(listed)
    for block in model.blocks:
        block.experts = zeroth.nn.stack_experts(block.experts)
    optimizer = torch.optim.AdamW(listed.parameters(), lr=1e-2, eps=EPS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        every = [listed(rows_of(step, rank)) / world.size for rank in range(world.size)]
        sum(every).backward()
        losses.append(sum(one.item() for one in every))
        optimizer.step()
    engine = zeroth.Engine(model, config_of(Row(3)), world=world, log_level="error")
    for step in range(STEPS):
        loss = engine(rows_of(step, world.rank))
        engine.backward(loss)
        engine.step()
        assert abs(engine.average(loss.item()) - losses[step]) <= BOUND
    state = engine.state_dict(ranks=None)
    for number, block in enumerate(model.blocks):
        state = zeroth.nn.listed_state(block.experts, state, f"blocks.{number}.experts.")
    wanted = listed.state_dict()
    assert state.keys() == wanted.keys()
    assert all(float((value - wanted[name]).abs().max()) <= BOUND for name, value in state.items())
    engine.close(keep_parameters=False)


def mixlora(world: zeroth.World, folder: str) -> None:
    """Trained parameters are routers, A and B; beside a loop of plain torch."""

    def of(family: str) -> Any:
        torch.manual_seed(1)
        sizes = {**SMALL, "num_hidden_layers": 2}
        model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
        model = model.double().eval()
        names = zeroth.nn.add_mixlora(model, num_experts=4, rank=3, k=2, alpha=4.0)
        assert names == ["model.layers.0.mlp", "model.layers.1.mlp"]
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (".experts." in name or ".router." in name), name
        with torch.no_grad():  # else the routers decide nothing at first
            for name, parameter in model.named_parameters():
                if name.endswith("_b"):
                    parameter.normal_(std=0.3)
                if "router" in name:
                    parameter.mul_(20)
        return model

    wanted = alone(of("Llama"), world.size)
    frozen = {name for name, one in of("Llama").named_parameters() if not one.requires_grad}
    for stage, ep in ((0, 2), (3, 2)):
        model = of("Llama")
        trained = {name: one.numel() for name, one in model.named_parameters() if one.requires_grad}
        engine = zeroth.Engine(model, config_of(Row(stage, ep)), world=world, log_level="error")
        losses, norms = [], []
        for step in range(STEPS):
            with Doubles():
                loss = engine(**batch(step, world.rank), use_cache=False).loss
            engine.backward(loss)
            assert all(one.grad is None for one in model.parameters() if not one.requires_grad)
            result = engine.step()
            losses.append(engine.average(loss.item()))
            norms.append(result.grad_norm)
        report = engine.memory_report()
        assert report.planned == report.measured_peak, (stage, report.planned, report.measured_peak)
        moments = engine.state_dict(kind="exp_avg", ranks=None)
        assert moments.keys() == trained.keys(), moments.keys() ^ trained.keys()
        # 2 moments of 8 bytes; the shards of 4 ranks, and of 4 / ep for experts, differ by some elements.
        experts = sum(count // ep for name, count in trained.items() if ".experts." in name)
        others = sum(count for name, count in trained.items() if ".experts." not in name)
        shards = (1, 1) if stage == 0 else (world.size // ep, world.size)
        states = engine.average(float(report.planned["optimizer"]))
        assert states == 16 * (experts / shards[0] + others / shards[1]), (stage, states, experts, others)
        state = engine.state_dict(ranks=None)
        assert all(torch.equal(state[name], wanted[2][name]) for name in frozen if name in state)
        require_close(("mixlora", stage, ep), (losses, norms, state), wanted)
        engine.close(keep_parameters=False)
    seen = []
    for ways in (
        None,
        doubled,
        lambda: (contextlib.nullcontext(), Doubles()),
    ):  # with the balance loss, whose counts a recompute does not add once more
        model = of("Llama").train()
        if ways is not None:
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": ways})
        engine = zeroth.Engine(model, config_of(Row(3)), world=world, log_level="error")
        for step in range(2):
            with Doubles():
                loss = engine(**batch(step, world.rank), use_cache=False).loss
            engine.backward(loss + 0.1 * sum(layer.mlp.balance for layer in model.model.layers))
            engine.step()
        seen.append(engine.state_dict(ranks=None))
        engine.close(keep_parameters=False)
    for other in seen[1:]:
        assert all(torch.equal(value, other[name]) for name, value in seen[0].items())
    assert any(float((value - wanted[2][name]).abs().max()) > 1e-3 for name, value in seen[0].items())


class Foreign(nn.Module):
    """Experts of no family that the tests cover, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 5
        self.scale = nn.Parameter(torch.randn(5, 8))
        self.bias = nn.Parameter(torch.randn(8))  # of all experts

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        of_choices = self.made(tokens.unsqueeze(1) * self.scale[experts.clamp(min=0)] + self.bias, experts)
        return (of_choices * (weights * (experts >= 0)).unsqueeze(-1)).sum(1)

    def made(self, values: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.tanh(values)


class Numbered(Foreign):
    """Computes with an expert's number in the layer."""

    def made(self, values: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.tanh(values) * (1 + experts).unsqueeze(-1)


class Quiet(Numbered):
    """Begins as nothing: zeros hide what happens to them."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.scale)
        nn.init.zeros_(self.bias)


class OfAllTokens(Foreign):
    """Looks at all tokens."""

    def made(self, values: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return torch.tanh(values - values.mean(0, keepdim=True))


class Routed(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 5)
        self.experts = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        return (x + self.experts(x, chosen, weights)).square().sum() / 72


def verified(world: zeroth.World, folder: str) -> None:
    """A layer that ranks change into something else is refused in its first forward; a look changes nothing."""

    def engine_of(kind: type[nn.Module], stage: int, verify: str, ep: int = 2) -> zeroth.Engine:
        torch.manual_seed(4)
        config = config_of(Row(stage, ep))
        config["zeroth"]["parallel"]["verify"] = verify
        return zeroth.Engine(Routed(kind).double(), config, world=world, log_level="error")

    for kind, stage, ep in ((Numbered, 0, 2), (Numbered, 3, 4), (Quiet, 1, 2), (OfAllTokens, 3, 2)):
        engine = engine_of(kind, stage, "untested", ep)
        with refused("MODEL", f"parallel.verify.*which: experts, {kind.__qualname__} of .*|which: experts, Foreign of"):
            engine(rows_of(0, world.rank))
        engine.close(keep_parameters=False)
    engine = engine_of(Numbered, 3, "never")
    engine(rows_of(0, world.rank))
    engine.close(keep_parameters=False)
    for kind, stage in ((Foreign, 3),):
        seen = []
        for verify in ("untested", "never"):
            engine = engine_of(kind, stage, verify)
            check = engine.module.experts.forward.check
            assert (check is None) == (verify == "never")
            losses = []
            for step in range(STEPS):
                # One rank has no tokens at first.
                x = rows_of(step, world.rank)[: 0 if world.rank == 1 and step == 0 else None]
                loss = engine(x)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            seen.append((losses, engine.state_dict(ranks=None)))
            assert engine.module.experts.forward.check is None
            if check is not None:
                (result,) = check.checks.results.values()
                assert not result.left_out and result.difference < 1e-12, result
                assert "verified 1 of 1 layers of experts over ep, largest" in check.checks.report
            engine.close(keep_parameters=False)
        assert seen[0][0] == seen[1][0]
        assert all(torch.equal(value, seen[1][1][name]) for name, value in seen[0][1].items())
    model = made("Mixtral")
    mesh = world.mesh({"dp": 2, "ep": 2})
    found = zeroth.experts(model, mesh, verify="always")
    assert "verified in the first forward: 2 layers of experts (as asked for)" in str(found), str(found)
    loss_of(model, **batch(0, world.rank))
    results = list(found.checks.results.values())
    assert (
        found.checks.left == 0
        and len(results) == 2
        and all(not one.left_out and one.difference < 1e-6 for one in results)
    ), results
    assert zeroth.experts(made("Mixtral"), mesh).checks.left == 0


class OfTasks(nn.Module):
    """What all tasks have, and an expert for each."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 8)
        self.experts = zeroth.nn.Experts(nn.Linear(8, 8), 4)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        """The loss of each sample."""
        h = torch.tanh(self.shared(x))
        ones = torch.ones(len(x), 1, dtype=x.dtype)
        return (self.out(torch.tanh(self.experts(h, task.unsqueeze(1), ones))).squeeze(1) - x.sum(1)).square()


def tasks(world: zeroth.World, folder: str) -> None:
    """Two ranks share a heavy task, one has two light ones."""
    shares = zeroth.nn.share_tasks([2, 8, 2, 4], world.size)
    assert [[(one.task, one.share) for one in parts] for parts in shares.of_ranks] == [
        [(1, 0.5)], [(1, 0.5)], [(3, 1.0)], [(0, 1.0), (2, 1.0)]
    ] and shares.most == 4  # fmt: skip
    samples = [2, 9, 3, 4]

    def data(step: int, task: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + task)
        return torch.randn(samples[task], 6, dtype=torch.float64, generator=generator)

    for stage, ep, weights in ((0, 2, None), (3, 4, [0.1, 0.2, 0.3, 0.4]), (2, 1, None)):
        torch.manual_seed(2)
        model = OfTasks().double()
        whole = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=EPS)
        engine = zeroth.Engine(model, config_of(Row(stage, ep)), world=world, log_level="error")
        rows = shares.rows(world.rank, samples)
        for step in range(STEPS):
            optimizer.zero_grad()
            every = [whole(data(step, task), torch.full((samples[task],), task)) for task in range(4)]
            mean = torch.cat(every).mean() if weights is None else sum(
                weight * one.mean() for weight, one in zip(weights, every, strict=True)
            )  # fmt: skip
            mean.backward()
            optimizer.step()
            x = torch.cat([data(step, task)[part] for task, part in rows.items()])
            counts = [part.stop - part.start for part in rows.values()]
            losses = engine(x, torch.cat([torch.full((n,), task) for task, n in zip(rows, counts, strict=True)]))
            loss = shares.loss(dict(zip(rows, losses.split(counts), strict=True)), samples, weights)
            engine.backward(loss)
            engine.step()
            assert abs(engine.average(loss.item()) - mean.item()) <= BOUND, (stage, step)
        wanted = whole.state_dict()
        for name, value in engine.state_dict(ranks=None).items():
            difference = float((value - wanted[name]).abs().max())
            assert difference <= BOUND, (stage, name, difference)
        engine.close(keep_parameters=False)


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    for part in sys.argv[1:-1]:
        began = time.process_time()
        globals()[part](world, sys.argv[-1])
        if world.rank == 0:
            print(f"{part}: done in {time.process_time() - began:.2f} s of a processor", flush=True)
    print(f"rank {world.rank}: mixes held", flush=True)


if __name__ == "__main__":
    main()
