"""One rank of a mesh with ep; see experts_test.py. Losses, norms and weights are those of one process with all batches.

experts_rank.py families [NAME...]      default: all
experts_rank.py PART...                 tables of trainings, and functions
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import pathlib
import sys
from typing import Any

import safetensors.torch
import torch
import transformers
from experts_models import (
    EPS,
    FAMILIES,
    ROUTINGS,
    SMALL,
    STEPS,
    Doubles,
    Numbers,
    alone,
    batch,
    loss_of,
    made,
    route,
)
from refusing import refused
from torch import nn

import zeroth

BOUND = 1e-12


@dataclasses.dataclass(frozen=True)
class Row:
    stage: int
    ep: int = 2
    tp: int = 1
    sp: int = 1
    model: str = "Mixtral"
    micro_steps: int = 1
    clip: float = 0.0
    more: tuple[tuple[str, Any], ...] = ()
    """options of the model"""
    experts: str = "eager"
    """implementation of transformers; "": its default, which does not know float64"""
    recompute: bool = False
    routing: str = ""
    """see experts_models.ROUTINGS"""
    frozen: str = ""
    """part of the names of parameters"""
    dtype: str = ""
    """fp32, bf16 or fp16"""
    way: tuple[tuple[str, Any], ...] = ()
    """keys of zeroth.experts"""
    verify: str = ""
    """not the default"""


TABLES = {
    "few": [
        Row(0, ep=4, micro_steps=2, clip=0.1),
        Row(1, tp=2, model="Qwen3Moe", experts="", dtype="fp32"),
        Row(2, sp=2, routing="an expert that nobody uses"),
        Row(3, more=(("num_local_experts", 5),), recompute=True, clip=0.1),
    ],
    "few ways": [
        Row(2, tp=2, way=(("over", "ep,tp"), ("pieces", 2)), more=(("num_local_experts", 5),), verify="always"),
        Row(3, ep=4, way=(("meet", "tokens"), ("copies", 3)), recompute=True),
        Row(1, way=(("meet", "balance"), ("copies", 2), ("pieces", 0)), routing="all tokens to one", micro_steps=2),
    ],
    "ways": [
        Row(3, ep=1, tp=2, way=(("over", "ep,tp"),), micro_steps=2, clip=0.1),
        Row(0, tp=2, model="Qwen3Moe", experts="", dtype="fp32", way=(("over", "ep,tp"), ("meet", "tokens"))),
        Row(1, tp=2, verify="always"),
        Row(0, sp=2, model="Qwen3Moe", way=(("meet", "tokens"),), verify="always"),
        Row(2, ep=1, tp=2, way=(("over", "ep,tp"),), verify="always"),
        Row(3, sp=2, way=(("over", "ep,sp"), ("pieces", 2)), clip=0.1),
        Row(1, ep=1, sp=2, way=(("over", "ep,sp"), ("meet", "balance")), recompute=True),
        Row(2, ep=4, way=(("meet", "tokens"), ("copies", 1)), routing="an expert that nobody uses"),
        Row(3, way=(("pieces", 4),), more=(("num_local_experts", 5),), experts="", dtype="fp32"),
        Row(0, model="GptOss", experts="", dtype="fp32", way=(("meet", "tokens"), ("copies", 2), ("pieces", 2))),
        Row(3, way=(("meet", "balance"),), frozen=".experts.down_proj"),
        Row(2, ep=4, way=(("meet", "tokens"), ("copies", 4)), dtype="bf16"),
    ],
    "grid": [
        *(Row(stage, ep=4) for stage in (1, 2, 3)),
        *(Row(stage, ep=1, tp=2) for stage in (0, 3)),
        *(Row(stage, tp=2, micro_steps=2, clip=0.1) for stage in (0, 2, 3)),
        *(Row(stage, sp=2, model="Qwen3Moe", recompute=True) for stage in (0, 1, 3)),
        Row(3, micro_steps=3, more=(("num_local_experts", 7),), experts="", dtype="fp32"),
        Row(1, ep=4, more=(("num_local_experts", 5),), micro_steps=2, recompute=True),
        Row(2, model="DeepseekV3", experts="", dtype="fp32", clip=0.1),
        Row(3, ep=4, model="GptOss", experts="", dtype="fp32"),
        Row(0, model="Olmoe", experts="batched_mm"),
        Row(2, ep=4, more=(("output_router_logits", True), ("router_aux_loss_coef", 0.1))),
    ],
    "edges": [
        *(Row(number % 4, ep=4 - 2 * (number % 2), routing=name) for number, name in enumerate(ROUTINGS)),
        Row(3, ep=4, routing="all tokens to one", experts="", dtype="fp32", recompute=True),
        Row(2, routing="no choice at all", experts="", dtype="fp32", micro_steps=2),
        Row(3, frozen="gate.weight"),
        Row(2, frozen=".experts.", clip=0.1),
        Row(1, ep=4, frozen=".experts.down_proj"),
    ],
    "half": [
        Row(3, dtype="bf16"),
        Row(2, dtype="fp16", micro_steps=2, clip=0.1),
        Row(1, ep=4, dtype="fp16", experts=""),
        Row(2, ep=4, dtype="bf16", experts="", recompute=True),
    ],
    "eight": [
        Row(3, tp=2, sp=2),
        Row(2, ep=4, tp=2, micro_steps=2, clip=0.1),
        Row(1, ep=4, sp=2),
        Row(3, ep=8, more=(("num_local_experts", 8),)),
    ],
}
BOUNDS = {"": BOUND, "fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}
"""8 bits of bfloat16 and 11 of float16 in each product; weights are those of the float32 master"""


def config_of(row: Row, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": row.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": EPS}},
        "gradient_accumulation_steps": row.micro_steps,
        "gradient_clipping": row.clip,
        "zeroth": {
            "mesh": {"ep": row.ep, "tp": row.tp, "sp": row.sp},
            "experts": dict(row.way),
            # A comparison with the whole model gathers its layers once more, beyond the formula of a step.
            "parallel": {"verify": row.verify or ("never" if row.stage == 3 else "untested")},
        },
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if row.dtype == "fp16" else {}),
        **({"bf16": {"enabled": True}} if row.dtype == "bf16" else {}),
        **more,
    }


def model_of(row: Row) -> Any:
    dtype = torch.float32 if row.dtype else torch.float64
    model = made(row.model, dtype, experts=row.experts, **dict(row.more))
    if row.routing:
        route(model, row.routing)
    for name, parameter in model.named_parameters():
        if row.frozen and row.frozen in name:
            parameter.requires_grad_(False)
    if row.recompute:
        again: dict[str, Any] = {"use_reentrant": False}
        if not row.dtype:
            again["context_fn"] = lambda: (contextlib.nullcontext(), Doubles())
        model.train().gradient_checkpointing_enable(again)
    return model


@functools.cache
def expected(row: Row, count: int) -> Numbers:
    """Of one process that has all batches."""
    plain = Row(0, 1, model=row.model, more=row.more, experts="eager", routing=row.routing, frozen=row.frozen)
    return alone(model_of(plain), count, row.clip)


def run_steps(row: Row, engine: zeroth.Engine, world: zeroth.World) -> tuple[list[float], list[float]]:
    """Losses and norms."""
    inner = row.tp * row.sp
    ranks, own = world.size // inner, world.rank // inner
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(row.micro_steps):
            with Doubles():
                loss = engine(**batch(step, micro * ranks + own), use_cache=False).loss
            engine.backward(loss)
            total += loss.item()
            result = engine.step()
        losses.append(engine.average(total / row.micro_steps))
        norms.append(result.grad_norm)
    return losses, norms


def train(row: Row, world: zeroth.World) -> Numbers:
    """The same on the mesh; checks that planned memory is measured."""
    model = model_of(row)
    engine = zeroth.Engine(model, config_of(row), world=world, log_level="warning")
    losses, norms = run_steps(row, engine, world)
    report, wire = engine.memory_report(), engine.wire_report()
    # Eager experts use their matrices several times in a backward: sums of half precision are float32, beyond the plan.
    if row.dtype in ("", "fp32") or row.experts == "":
        assert report.planned == report.measured_peak, (row, report.planned, report.measured_peak)
    if not row.dtype and report.spills == 0:
        for name in ("all_gather", "reduce_scatter"):  # of what is frozen at stage 0 less may be gathered
            planned = STEPS * wire[f"planned_{name}"]
            trains = all(one.requires_grad for one in model.parameters())
            assert wire[name] == planned or (wire[name] < planned and not trains), (row, name, wire)
    weights = engine.state_dict(ranks=None)
    engine.close(keep_parameters=False)
    return losses, norms, weights


def require_close(what: Any, got: Numbers, wanted: Numbers, dtype: str = "") -> None:
    bound = BOUNDS[dtype]
    for one, other in zip(got[0], wanted[0], strict=True):
        assert abs(one - other) <= bound * max(1.0, abs(other)), (what, got[:2], wanted[:2])
    for one, other in zip(got[1], wanted[1], strict=True):
        assert abs(one - other) <= 4 * bound * max(1.0, abs(other)), (what, got[:2], wanted[:2])
    assert got[2].keys() <= wanted[2].keys(), (what, got[2].keys() - wanted[2].keys())
    assert any("experts" in name for name in got[2]), (what, got[2].keys())
    for name, value in got[2].items():
        assert value.shape == wanted[2][name].shape, (what, name)
        difference = (value - wanted[2][name]).abs().max()
        assert difference <= {"": bound, "fp32": 1e-3}.get(dtype, 2.1 * STEPS * 1e-2), (what, name, difference)


def check(row: Row, world: zeroth.World) -> None:
    mine = train(row, world)
    if world.rank == 0:
        require_close(row, mine, expected(row, world.size // (row.tp * row.sp) * row.micro_steps), row.dtype)


def stages(world: zeroth.World) -> None:
    """The same bits at each, and in pieces."""
    every = [train(Row(stage, micro_steps=2, clip=0.1), world) for stage in range(4)]
    every.append(train(Row(1, micro_steps=2, clip=0.1, way=(("pieces", 2),)), world))
    for other in every[1:]:
        assert other[:2] == every[0][:2], (every[0][:2], other[:2])
        assert all(torch.equal(value, other[2][name]) for name, value in every[0][2].items())


def ways_change_between_steps(world: zeroth.World) -> None:
    """A change of the way moves no byte, and the numbers stay; ranks that do not agree are told. One that sends only
    its share of the tokens, because the ranks of tp have the same, receives as many bytes less."""
    mesh = world.mesh({"dp": 1, "ep": 2, "tp": 2})
    whole, (split, folded) = layer()["experts"], (layer(), layer())
    found = zeroth.experts(split, mesh)
    both = zeroth.experts(folded, mesh, over="ep,tp")
    assert "experts experts (MixtralExperts): 4, 1 a rank of ep*tp=4" in str(both), str(both)
    ep, both_axes = mesh.axis("ep"), mesh.axes(["ep", "tp"])
    choices = []
    for coordinate in range(2):
        generator = torch.Generator().manual_seed(5 + coordinate)
        choices.append(torch.rand(12, 4, generator=generator).topk(2).indices)
        if coordinate == ep.rank:
            x, weights = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (16, 2))
    chosen = choices[ep.rank]
    wanted = whole(x, chosen, weights)
    for way in ({"meet": "tokens", "copies": 2}, {"meet": "balance", "copies": 1}, {"meet": "experts", "pieces": 2}):
        before = ep.received_bytes
        zeroth.parallel.set_expert_options(split, **way)
        assert ep.received_bytes == before
        assert torch.allclose(split["experts"](x, chosen, weights), wanted, rtol=0, atol=BOUND), way
    assert found.exchanges[0].options == {"meet": "experts", "copies": 1, "pieces": 2, "two_hops": False}

    own, before = both_axes.rank, both_axes.received_bytes
    assert torch.allclose(folded["experts"](x, chosen, weights), wanted, rtol=0, atol=BOUND)
    shares = [choices[rank // 2][6 * (rank % 2) :][:6] for rank in range(4)]
    came = sum(int((one == own).sum()) for rank, one in enumerate(shares) if rank != own)
    went = int((shares[own] != own).sum())
    assert both_axes.received_bytes - before == 8 * (1 + 2) * 3 + 8 * 16 * (came + went)
    zeroth.parallel.set_expert_options(split, pieces=1 + world.rank % 3)
    with refused("MISMATCH", "meet in other ways.*pieces=1.*pieces=2|pieces"):
        split["experts"](x, chosen, weights)


def layer() -> Any:
    """Experts by themselves, in a block of their own."""
    return nn.ModuleDict({"experts": made("Mixtral").model.layers[0].mlp.experts})


def tokens_of_ranks(world: zeroth.World) -> None:
    """Other numbers of tokens on each rank, none on some or all; choices below 0 and above the experts; bytes."""
    mesh = world.mesh({"dp": 1, "ep": world.size})
    group, size = mesh.axis("ep"), 16
    whole, split = layer()["experts"], layer()
    zeroth.experts(split, mesh)
    for numbers in ((5, 0, 3, 1), (0, 0, 0, 2), (0, 0, 0, 0), (4, 4, 4, 4)):
        generator = torch.Generator().manual_seed(7)
        parts = []
        for count in numbers[: world.size]:
            chosen = torch.randint(-1, 5, (count, 2), generator=generator)
            x, weights = (torch.randn(count, n, generator=generator, dtype=torch.float64) for n in (size, 2))
            parts.append((x.requires_grad_(), chosen, weights.requires_grad_()))
        x, chosen, weights = parts[group.rank]
        before = group.received_bytes
        out = split["experts"](x, chosen, weights)
        counts = group.received_bytes - before
        assert out.shape == x.shape, out.shape
        out.square().sum().backward()
        own = range(group.rank, group.rank + 1)  # 4 experts on 4 ranks
        came = sum(int((one[1] == own[0]).sum()) for rank, one in enumerate(parts) if rank != group.rank)
        went = int(((chosen >= 0) & (chosen < 4) & (chosen != own[0])).sum())
        wanted = 8 * (1 + 2) * (world.size - 1) + 8 * size * (came + went)
        assert counts == wanted, (numbers, counts, wanted)
        assert group.received_bytes - before == wanted + 8 * size * (came + went), (numbers, wanted)
        whole.zero_grad()
        for rank, (a, b, c) in enumerate(parts):
            inputs = a.detach().requires_grad_(), c.detach().requires_grad_()
            # An index below 0 has no meaning to transformers: its own word for "no expert" is an index above all.
            result = whole(inputs[0], b.masked_fill(b < 0, 4), inputs[1])
            if result.requires_grad:
                result.square().sum().backward()
            if rank == group.rank:
                assert torch.allclose(result, out, rtol=0, atol=BOUND), numbers
                for got, one in zip((x, weights), inputs, strict=True):
                    none = torch.zeros_like(one)
                    got_grad, one_grad = (none if each.grad is None else each.grad for each in (got, one))
                    assert torch.allclose(got_grad, one_grad, rtol=0, atol=BOUND), numbers
        for name, parameter in split["experts"].named_parameters():
            of_whole = whole.get_parameter(name).grad
            of_whole = parameter.new_zeros(4, *parameter.shape[1:]) if of_whole is None else of_whole
            assert parameter.grad is not None, (numbers, name)  # zeros: the ranks reduce the same gradients
            assert torch.allclose(parameter.grad, of_whole[own[0] : own[0] + 1], rtol=0, atol=1e-11), (numbers, name)
            parameter.grad = None


def gradients_stay_in_their_group(world: zeroth.World) -> None:
    """More elements in experts are more bytes of the ranks along dp that have the same experts, and of no others."""
    for ep in (2, world.size):
        counted, elements = [], []
        for width in (24, 48):
            model = made("Mixtral", intermediate_size=width)
            engine = zeroth.Engine(model, config_of(Row(2, ep)), world=world, log_level="error")
            engine.backward(engine(**batch(0, world.rank)).loss)
            engine.step()
            wire = engine.wire_report()
            counted.append(round(engine.average(float(wire["reduce_scatter"])) * world.size))
            elements.append(sum(one.size for one in sizes_of(engine, "experts")))
            engine.close(keep_parameters=False)
        more = (elements[1] - elements[0]) * 8 * (world.size // ep - 1)  # each element goes to its shard's rank once
        assert counted[1] - counted[0] == more, (ep, counted, elements, more)


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    size: int


def sizes_of(engine: zeroth.Engine, part: str) -> list[Size]:
    """Of the whole model's parameters with this in their names."""
    state = engine.state_dict(ranks=None)
    return [Size(name, value.numel()) for name, value in state.items() if part in name]


def steps(engine: zeroth.Engine, first: int, world: zeroth.World) -> list[float]:
    losses = []
    for step in range(first, first + 2):
        with Doubles():
            loss = engine(**batch(step, world.rank), use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.average(loss.item()))
    return losses


def checkpoints(world: zeroth.World) -> None:
    """Saved at ep=2, loaded at ep=1 and 4, saved there and loaded at 2: as a training without an end. The whole of 5
    experts is in states and exports."""
    folder = pathlib.Path(sys.argv[-1])

    def engine_of(ep: int, stage: int) -> zeroth.Engine:
        model = made("Mixtral", num_local_experts=5)
        return zeroth.Engine(model, config_of(Row(stage, ep)), world=world, log_level="warning")

    engine = engine_of(2, 3)
    losses = steps(engine, 0, world)
    engine.save(folder / "2")
    saved, moments = engine.state_dict(ranks=None), {}
    plain = made("Mixtral", num_local_experts=5)
    for name, value in saved.items():
        assert value.shape == plain.get_parameter(name).shape, name
        moments[name] = engine.full(name, "exp_avg")
    engine.export_safetensors(str(folder / "2.safetensors"))
    if world.rank == 0:
        left = plain.load_state_dict(safetensors.torch.load_file(folder / "2.safetensors"), strict=False)
        assert not left.unexpected_keys and all("lm_head" in name for name in left.missing_keys), left
        assert all(torch.equal(plain.get_parameter(name), value) for name, value in saved.items())
    losses += steps(engine, 2, world) + steps(engine, 4, world)
    weights = engine.state_dict(ranks=None)
    engine.close(keep_parameters=False)
    for ep, stage in ((1, 3), (4, 1), (4, 3), (1, 0)):
        engine = engine_of(ep, stage)
        engine.load(folder / "2")
        mine = engine.state_dict(ranks=None)
        for name, value in saved.items():
            assert torch.equal(mine[name], value), (ep, name)
            assert torch.equal(engine.full(name, "exp_avg"), moments[name]), (ep, name)
        got = losses[:2] + steps(engine, 2, world)
        engine.save(folder / f"{ep} {stage}")
        engine.close(keep_parameters=False)
        engine = engine_of(2, 2)
        engine.load(folder / f"{ep} {stage}")
        got += steps(engine, 4, world)
        require_close((ep, stage), (got, [], engine.state_dict(ranks=None)), (losses, [], weights))
        engine.close(keep_parameters=False)


class Called(nn.Module):
    """Experts one by one, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


class Joined(nn.Module):
    """Experts whose matrices are one matrix, as of DBRX."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.w1 = nn.Parameter(torch.zeros(4 * 8, 8))

    def forward(self, tokens: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def refusals(world: zeroth.World) -> None:
    def engine_of(model: nn.Module, **mesh: int) -> None:
        zeroth.Engine(model, {"zeroth": {"mesh": mesh}}, world=world, log_level="off")

    with refused("MODEL", "no experts that ranks could have.*mesh/ep = 2, LlamaForCausalLM.*num_experts"):
        engine_of(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), ep=2)
    with refused("MODEL", "some ranks would have no expert.*layers.0.*experts.*4 experts or more.*got: 3"):
        engine_of(made("Mixtral", num_local_experts=3), ep=4)
    model = made("Mixtral")
    if world.rank % 2 == 1:
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[3, 0, 0] += 1
    with refused("MISMATCH", "other weights.*layers.1.*experts.down_proj.*same seed"):
        engine_of(model, ep=2)
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape[0] == 4  # it is whole still
    with refused("CONFIG", "does not fit|do not multiply|multiple of 3"):
        engine_of(made("Mixtral"), ep=3)
    with refused("CONFIG", "ranks that share images share nothing else"):
        engine_of(made("Mixtral"), ep=2, rows=2)
    with refused("MODEL", "no experts.*experts: a ModuleList.*one module with parameters .num_experts, ...."):
        engine_of(Called(), ep=2)
    with refused("MODEL", "no experts.*experts: Joined has no parameter with one block an expert"):
        engine_of(nn.ModuleDict({"experts": Joined()}), ep=2)
    model = made("Mixtral")
    zeroth.parallelize(model, {"zeroth": {"mesh": {"ep": 2}}}, world=world)
    with refused("CONFIG", "model is split.*the configuration is not"):
        zeroth.Engine(model, {}, world=world, log_level="off")


def copies(world: zeroth.World) -> None:
    """A deep copy has parameters of its own, and the same ranks."""
    model = made("Mixtral")
    zeroth.parallelize(model, {"zeroth": {"mesh": {"ep": 2}}}, world=world)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        loss_of(one, **batch(0, world.rank)).backward()
    for (name, parameter), other in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert parameter is not other[1] and torch.equal(parameter.grad, other[1].grad), name
    assert sum("experts" in name for name, _ in model.named_parameters()) == 4


def deferred(world: zeroth.World) -> None:
    """Weights that an engine makes are cut."""
    wanted = made("Mixtral").state_dict()
    torch.manual_seed(1)
    model = zeroth.deferred(lambda: made("Mixtral"))
    engine = zeroth.Engine(model, config_of(Row(3, 4)), world=world, log_level="warning")
    got = engine.state_dict(ranks=None)
    assert all(torch.equal(got[name], wanted[name]) for name in got)
    engine.close(keep_parameters=False)


def stages_of_a_pipeline(world: zeroth.World) -> None:
    """pp=2 x ep=2."""
    row = Row(1, micro_steps=2, clip=0.1)
    for stage, unshard in ((1, "step"), (0, "step"), (3, "micro_batch")):
        config = config_of(dataclasses.replace(row, stage=stage))
        config["zeroth"] = {"mesh": {"pp": 2, "ep": 2}, "pipeline": {"unshard": unshard}}
        model = zeroth.pipeline(model_of(row), config, world=world)
        engine = zeroth.Engine(model, config, world=world, log_level="warning")
        losses, norms = [], []
        for step in range(STEPS):
            with Doubles():
                result, loss = engine.train_batch([batch(step, micro * 2 + world.rank % 2) for micro in range(2)])
            losses.append(engine.average(float(loss)))
            norms.append(result.grad_norm)
        mine = engine.state_dict(ranks=None)
        engine.close(keep_parameters=False)
        if world.rank == 0:
            wanted = expected(row, 4)
            require_close((stage, "pp"), (losses, norms, mine), wanted)


def terms_of_weights(world: zeroth.World) -> None:
    """A penalty on the weights of experts counts once, though only some of the ranks with batches have them."""
    for mesh, way in (({"ep": 2}, {}), ({"ep": 2, "sp": 2}, {"over": "ep,sp"})):
        config = {
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zeroth": {"mesh": mesh, "experts": way},
        }
        model = made("Mixtral")
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        engine = zeroth.Engine(model, config, world=world, log_level="error")
        with Doubles():
            loss = engine(**batch(0, world.rank // mesh.get("sp", 1)), use_cache=False).loss * 0
        penalty = sum(one.square().sum() / 2 for name, one in model.named_parameters() if ".experts." in name)
        engine.backward(loss + engine.part_of_loss(penalty))
        engine.step()
        for name, value in engine.state_dict(ranks=None).items():
            wanted = torch.zeros_like(value) if ".experts." in name else before[name]
            assert torch.allclose(value, wanted, rtol=0, atol=BOUND), (mesh, name)
        engine.close(keep_parameters=False)


def families(names: list[str], world: zeroth.World) -> None:
    for number, name in enumerate(names):
        check(Row(stage=3 - number % 4, model=name), world)
        if world.rank == 0:
            print(f"{name}: ok", flush=True)


PARTS = (
    stages, ways_change_between_steps, tokens_of_ranks, gradients_stay_in_their_group, checkpoints, refusals, copies,
    deferred, terms_of_weights,
    stages_of_a_pipeline,
)  # fmt: skip


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    world = zeroth.World.from_environment()
    if sys.argv[1] == "families":
        return families(sys.argv[2:] or list(FAMILIES), world)
    functions = {one.__name__: one for one in PARTS}
    for part in sys.argv[1:]:
        if part in functions:
            functions[part](world)
        for row in TABLES.get(part, []):
            check(row, world)
            if world.rank == 0:
                print(f"{row}: ok", flush=True)
        if world.rank == 0:
            print(f"{part}: done", flush=True)
    print("experts: ok")
    return None


if __name__ == "__main__":
    main()
