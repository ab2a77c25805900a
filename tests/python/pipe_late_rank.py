"""One rank of several whose stages use late gradients, schedule "ouroboros"; see pipe_test.py. The reference is plain
torch in one process: stages by hand, with what is late kept in dicts.

pipe_late_rank.py FOLDER CASE...
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cases
import torch
from pipe_parts import loss_of, received, tensors
from pipe_rank import batch as tokens_of
from pipe_rank import loss_fn, made
from refusing import refused
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import zeroth
from zeroth import _C
from zeroth.pipe.make_chain import chain_of

WIDTH, ROWS, CLASSES, STEPS = 10, 6, 5, 6
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
Batch = Any
Part = Callable[[Any, Batch], Any]


def world() -> zeroth.World:
    return zeroth.World.from_environment()


class Counting(nn.Module):
    """Counts its forwards in a buffer that they read."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.count += 1
        return x * (1 + 1 / self.count)


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


def layers(drops: bool = True) -> nn.Sequential:
    torch.manual_seed(5)

    def between() -> list[nn.Module]:
        return [nn.Dropout(0.3), Counting()] if drops else [nn.Identity(), nn.Identity()]

    head = nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(Block(), *between(), Block(), Block(), *between(), Block(), head).double()


def batches(step: int, count: int, first: int = 0) -> list[Batch]:
    """With other numbers of rows in some."""
    drawn = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + number)
        rows = ROWS + number % 2
        drawn.append(
            (
                torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64),
                torch.randint(CLASSES, (rows,), generator=generator),
            )
        )
    return drawn


# --- by hand ----------------------------------------------------------------------------------------------------------


def seeded(stages: int) -> list[torch.Tensor]:
    """Random numbers of each stage, which draws on its own rank."""
    return [torch.Generator().manual_seed(7).get_state()] * stages


class Late:
    """In step t stage k of K goes back through what step t - (K - 1 - k) gave it, with its weights of now, the random
    numbers and buffers of then, and the gradient that stage k + 1 had for it in step t - 1."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        optimizer: dict[str, Any],
        clip: float = 0.0,
        counters: Sequence[Sequence[Counting]] = (),
    ) -> None:
        self.model, self.parts, self.clip = model, parts, clip
        self.counters = counters or [()] * len(parts)
        made = torch.optim.AdamW if optimizer["type"] == "AdamW" else torch.optim.SGD
        self.optimizer = made(model.parameters(), **optimizer["params"])
        self.random = seeded(len(parts))
        self.begin()

    def begin(self) -> None:
        """Nothing is late."""
        self.time = 0
        self.kept: dict[tuple[int, int, int], Any] = {}  # stage, step, micro-batch
        self.sent: dict[tuple[int, int, int], list[torch.Tensor | None]] = {}

    def run(self, stage: int, given: Any, batch: Batch) -> Any:
        torch.set_rng_state(self.random[stage])
        result = self.parts[stage](given, batch)
        self.random[stage] = torch.get_rng_state()
        return result

    def again(self, stage: int, given: Any, batch: Batch, random: torch.Tensor, counts: list[torch.Tensor]) -> Any:
        now = self.random[stage], self.counts(stage)
        self.random[stage] = random
        self.set_counts(stage, counts)
        result = self.run(stage, given, batch)
        self.random[stage] = now[0]
        self.set_counts(stage, now[1])
        return result

    def counts(self, stage: int) -> list[torch.Tensor]:
        return [one.count.clone() for one in self.counters[stage]]

    def set_counts(self, stage: int, counts: list[torch.Tensor]) -> None:
        for one, count in zip(self.counters[stage], counts, strict=True):
            one.count.copy_(count)

    def step(self, micro_batches: Sequence[Batch], updates: bool = True) -> tuple[float, float]:
        """The loss and the norm. Without `updates` it is skipped, and begins anew."""
        last = len(self.parts) - 1
        total = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(micro_batches):
            values = None
            for stage in range(last + 1):
                given = tree_map(received, values)
                self.kept[stage, self.time, number] = given, batch, self.random[stage], self.counts(stage)
                values = self.run(stage, given, batch)
            loss = loss_of(values) / len(micro_batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            self.sent[last, self.time, number] = [one.grad for one in tensors(given)]
            del self.kept[last, self.time, number]
        for stage in range(last):
            then = self.time - (last - stage)
            for number in range(len(micro_batches) if then >= 0 else 0):
                given, batch, *state = self.kept.pop((stage, then, number))
                given = tree_map(received, given)
                made = tensors(self.again(stage, given, batch, *state))
                pairs = [
                    (one, grad)
                    for one, grad in zip(made, self.sent.pop((stage + 1, then, number)), strict=True)
                    if grad is not None
                ]
                torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
                self.sent[stage, then, number] = [one.grad for one in tensors(given)]
        if not updates:
            self.begin()
            return total, math.nan
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or math.inf).item()
        self.optimizer.step()  # leaves parameters without a gradient alone
        self.time += 1
        return total, norm


def by_hand(bounds: Sequence[int], optimizer: dict[str, Any], clip: float = 0.0, drops: bool = True) -> Late:
    model = layers(drops)
    slices = [model[first:last] for first, last in zip(bounds[:-1], bounds[1:], strict=True)]

    def part(stage: int) -> Part:
        def run(given: Any, batch: Batch) -> Any:
            result = slices[stage](batch[0] if stage == 0 else given)
            return F.cross_entropy(result, batch[1]) if stage + 1 == len(slices) else result

        return run

    counters = [[one for one in each if isinstance(one, Counting)] for each in slices]
    torch.manual_seed(7)  # layers() has drawn
    return Late(model, [part(stage) for stage in range(len(slices))], optimizer, clip, counters)


def weights_of(late: Late) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in late.model.named_parameters()}


# --- engines ----------------------------------------------------------------------------------------------------------


def config(
    stage: int = 1,
    micro: int = 2,
    *,
    pp: int = 0,
    optimizer: dict[str, Any] = ADAMW,
    clip: float = 0.0,
    pipeline: dict[str, Any] | None = None,
    policy: str = "per_step",
    **more: Any,
) -> dict[str, Any]:
    ours = dict(more.pop("zeroth", {}))
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": clip,
        "zeroth": {
            "mesh": {"pp": pp or world().size, **ours.pop("mesh", {})},
            "pipeline": {"schedule": "ouroboros", **(pipeline or {})},
            "reduction_policy": policy,
            **ours,
        },
        **more,
    }


def engine_of(
    settings: dict[str, Any], drops: bool = True, model: nn.Module | None = None, log_level: str = "warning"
) -> zeroth.Engine:
    done = zeroth.pipeline(model or layers(drops), settings, world=world(), loss_fn=F.cross_entropy)
    engine = zeroth.Engine(done, settings, world=world(), log_level=log_level)
    torch.manual_seed(7)
    return engine


def parameters_of(engine: zeroth.Engine) -> dict[str, torch.Tensor]:
    return {name: value for name, value in engine.state_dict(ranks=None).items() if not name.endswith("count")}


def report_of(engine: zeroth.Engine) -> dict[str, int]:
    assert engine._pipeline is not None
    return engine._pipeline.core.report()


def assert_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: object, bound: float = 1e-12
) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        error = (got[name] - value).abs().max().item()
        assert error <= bound, (what, name, error)


def assert_near(got: float, expected: float, what: object, bound: float = 1e-12) -> None:
    assert abs(got - expected) <= bound * max(1.0, abs(expected)), (what, got, expected)


@contextlib.contextmanager
def reused(given: list[Batch]) -> Iterator[list[Batch]]:
    """A loader's memory: it has other values after the step."""
    memory = [(x.clone(), y.clone()) for x, y in given]
    yield memory
    for x, y in memory:
        x.fill_(math.nan)
        y.fill_(0)


def trained(settings: dict[str, Any], steps: int = STEPS, replicas: int = 1) -> dict[str, torch.Tensor]:
    """Compares each step with the one by hand; returns the weights."""
    engine = engine_of(settings, drops=replicas == 1)
    micro = settings["gradient_accumulation_steps"]
    clip = settings["gradient_clipping"]
    before = {name: value.detach().clone() for name, value in layers()[: engine.pipeline.bounds[1]].named_parameters()}
    late = by_hand(engine.pipeline.bounds, settings["optimizer"], clip, drops=replicas == 1)
    own = engine.pipeline.mesh.coordinate("dp") if replicas > 1 else 0
    for step in range(steps):
        state = torch.get_rng_state()
        loss, norm = late.step(batches(step, micro * replicas))
        torch.set_rng_state(state)
        with reused(batches(step, micro * replicas)[own::replicas]) as given:
            result, got = engine.train_batch(iter(given))
        assert result.committed and result.step == step + 1, result
        assert_near(got, loss, (step, "loss"))
        assert_near(result.grad_norm, norm, (step, "norm"))
        got_weights = parameters_of(engine)
        assert_close(got_weights, weights_of(late), (settings, step))
        if step + 1 < engine.pipeline.mesh.size("pp"):  # nothing has come back to the first stage yet
            same_bits(before, got_weights)
    weights = parameters_of(engine)
    engine.close(keep_parameters=False)
    return weights


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def parity() -> None:
    """At every ZeRO stage, with the same bits; several micro-batches a step; both optimizers; clipped."""
    plain = [trained(config(stage, 2)) for stage in (0, 1, 2, 3)]
    for other in plain[1:]:
        same_bits(plain[0], other)
    same_bits(plain[0], trained(config(3, 2, pipeline={"unshard": "step"})))
    same_bits(plain[0], trained(config(2, 2, policy="per_micro_step")))
    trained(config(1, 1, optimizer=SGD))
    trained(config(1, 3, optimizer=SGD, clip=0.05))


def few() -> None:
    """What is least on more stages."""
    same_bits(trained(config(1, 2)), trained(config(3, 2)))


def replicas() -> None:
    """dp = 2."""
    stages = world().size // 2
    plain = [trained(config(stage, 2, pp=stages), 4, replicas=2) for stage in (0, 1, 2, 3)]
    for other in plain[1:]:
        same_bits(plain[0], other)


def tied() -> None:
    """A transformer of transformers, whose first and last stage share a weight: its gradient is the sum of one that is
    late and one that is not."""
    transformer(config(1, 2))


def axes() -> None:
    """Ranks of a stage share the matrices, or the sequences."""
    for stage, axis in ((1, "tp"), (3, "sp")):
        transformer(config(stage, 2, optimizer=SGD, zeroth={"mesh": {"pp": world().size // 2, axis: 2}}), shared=True)


def transformer(settings: dict[str, Any], shared: bool = False) -> None:
    """`shared`: the model computes its loss itself, from what ranks share, in float32."""
    model = made("gpt2")
    of_batch = None if shared else loss_fn
    chain = chain_of(copy.deepcopy(model), loss_fn=of_batch)
    done = zeroth.pipeline(model, settings, world=world(), loss_fn=of_batch)
    engine = zeroth.Engine(done, world=world(), log_level="warning")
    stages = done.mesh.size("pp")
    bound = 1e-6 if shared else 1e-12

    def part(stage: int) -> Part:
        first, last = done.bounds[stage], done.bounds[stage + 1]
        return lambda given, batch: chain.run(first, last, given, batch)

    late = Late(chain.model, [part(stage) for stage in range(stages)], settings["optimizer"])
    for step in range(4):
        given: list[Any] = [tokens_of(step, number) for number in range(2)]
        if shared:
            given = [{"input_ids": tokens, "labels": tokens} for _, tokens in given]
        loss, norm = late.step(given)
        result, got = engine.train_batch(given)
        assert_near(got, loss, (step, "loss"), bound)
        assert_near(result.grad_norm, norm, (step, "norm"), bound)
        states = engine.state_dict(ranks=None)
        expected = {name: value.detach() for name, value in chain.model.named_parameters()}
        assert_close({name: states[name] for name in expected}, expected, step, bound)
    engine.close(keep_parameters=False)


# --- beside the steps -------------------------------------------------------------------------------------------------


def skipped() -> None:
    """A step that is not finite is skipped on all stages, and what is late begins anew. The log says so."""
    engine = engine_of(config(1, 2), log_level="info")
    late = by_hand(engine.pipeline.bounds, ADAMW)
    bad = 3
    for step in range(bad + 5):
        given = batches(step, 2)
        if step == bad:
            given[1][0][0, 0] = math.inf
        state = torch.get_rng_state()
        loss, _ = late.step(given, updates=step != bad)
        torch.set_rng_state(state)
        result, got = engine.train_batch(given)
        assert result.committed == (step != bad), (step, result)
        if step != bad:
            assert_near(got, loss, step)
        assert_close(parameters_of(engine), weights_of(late), step)
    assert report_of(engine)["begun_anew"] == 1
    engine.close(keep_parameters=False)


def checkpoints() -> None:
    """What is late is in none: a training that goes on from one begins anew, also in the engine that runs; evaluations
    change nothing."""
    first = engine_of(config(1, 2))
    late = by_hand(first.pipeline.bounds, ADAMW)
    for step in range(3):
        step_both(first, late, step)
    held_out = first.eval_batch(iter(batches(50, 4)), micro_batches=4)
    late.model.eval()
    with torch.no_grad():
        expected = sum(F.cross_entropy(late.model(x), y).item() for x, y in batches(50, 4)) / 4
    late.model.train()
    assert_near(held_out, expected, "evaluation")
    step_both(first, late, 3)
    first.save(FOLDER)
    saved = copy.deepcopy((late.optimizer.state_dict(), late.model.state_dict(), late.random))
    step_both(first, late, 4)  # a save changes nothing

    def back() -> None:
        late.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        late.model.load_state_dict(saved[1])
        late.random = list(saved[2])  # a checkpoint has them
        late.begin()

    back()
    first.load(FOLDER)
    for step in range(5, 9):
        step_both(first, late, step)
    assert report_of(first)["begun_anew"] == 1
    first.close(keep_parameters=False)
    other = engine_of(config(3, 2))
    back()
    other.load(FOLDER)
    for step in range(5, 9):
        step_both(other, late, step)
    other.close(keep_parameters=False)


def step_both(engine: zeroth.Engine, late: Late, step: int) -> None:
    state = torch.get_rng_state()
    loss, _ = late.step(batches(step, 2))
    torch.set_rng_state(state)
    _, got = engine.train_batch(iter(batches(step, 2)))
    assert_near(got, loss, step)
    assert_close(parameters_of(engine), weights_of(late), step)


def scales() -> None:
    """A loss scale that grows between a gradient and its use: by powers of two, so the bits are those of a constant."""

    def run(loss_scale: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
        settings = config(1, 2, fp16={"enabled": True, "auto_cast": True, **loss_scale})
        engine = engine_of(settings, model=layers(drops=False).float())
        for step in range(STEPS):
            given = [(x.float(), y) for x, y in batches(step, 2)]
            result, _ = engine.train_batch(given)
            assert result.committed, result
        weights = parameters_of(engine)
        engine.close(keep_parameters=False)
        return weights, result.loss_scale

    constant, _ = run({"loss_scale": 256})
    growing, scale = run({"initial_scale_power": 8, "loss_scale_window": 1})
    assert scale == 256 * 2 ** (STEPS - 2), scale
    same_bits(constant, growing)


def kept() -> None:
    """Inputs of the micro-batches that are late are kept, and no graphs: as many bytes as the program says."""
    micro = 2
    engine = engine_of(config(1, micro), drops=False)
    for step in range(STEPS):
        engine.train_batch([batches(step, 1)[0] for _ in range(micro)])
    report = report_of(engine)
    stages, stage = world().size, engine.pipeline.stage
    late = stages - 1 - stage
    assert report["live_peak"] == 1, report
    pairs = (late + 1) * micro - min(stage, micro) if late else 0
    random = len(torch.get_rng_state())
    inputs = ROWS * WIDTH * 8 if stage else 0  # those of the first chunk are the caller's
    assert report["kept_peak_bytes"] == pairs * (inputs + random), (stage, report, pairs)
    assert report["recomputed"] == (STEPS - late) * micro if late else report["recomputed"] == 0
    engine.close(keep_parameters=False)


def programs() -> None:
    """Loops of the caller's own, a program as text, and inputs that rest elsewhere: the same bits."""
    plain = trained(config(1, 2), 4)
    engine = engine_of(config(1, 2))
    for step in range(4):
        with engine.pipeline_step(batches(step, 2)) as loop:
            for action in loop.actions:
                loop.run(action)
    same_bits(plain, parameters_of(engine))
    engine.close(keep_parameters=False)
    moved = {"activations": {"device": "cpu", "min_bytes": 0}}
    engine = engine_of(config(1, 2, pipeline={"recompute": True}, zeroth=moved))
    assert "FLUSH0" in engine.pipeline.program and "inexact" in str(engine.pipeline)
    for step in range(4):
        engine.train_batch(batches(step, 2))
    same_bits(plain, parameters_of(engine))
    engine.close(keep_parameters=False)


def refusals() -> None:
    with refused("USAGE", "stages share a head, and its gradients are late.*hint: zeroth.pipeline.vocabulary"):
        engine_of(config(pipeline={"vocabulary": "two_barriers"}))
    with refused("CONFIG", "updates are delayed, and gradients are late already.*delayed_after.*ouroboros"):
        engine_of(config(zeroth={"update": {"delayed_after": 1}}))
    onebit = {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 2}}
    with refused("CONFIG", "messages in the place of gradients.*OneBitAdam with schedule ouroboros"):
        engine_of(config(optimizer=onebit))
    text = _C.make_program("ouroboros", world().size, 2)
    with refused(
        "USAGE", r"a backward is late, and its forward is not computed again.*expected: 0RECOMPUTE0 before it"
    ):
        _C.runnable_program(text.replace(" 0RECOMPUTE0", ""), world().size, 2, True)
    with refused("USAGE", "inexact"):
        _C.runnable_program(text.replace(" inexact", ""), world().size, 2, True)


if __name__ == "__main__":
    FOLDER = sys.argv[1]
    cases.run(globals(), sys.argv[2:])
