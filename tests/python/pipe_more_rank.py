"""One rank of two that use a pipeline in the ways beside train_batch(); see pipe_test.py.

pipe_more_rank.py CASE...
"""

from __future__ import annotations

import copy
import functools
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import cases
import torch
from pipe_rank import Row, batch, config_of, loss_fn, made
from refusing import refused
from torch import nn

import zeroth
from zeroth import _C, pipe

WIDTH, WORDS, MICRO = 6, 11, 3
MIXED = {"first": torch.tensor([1, 2], dtype=torch.int32), "empty": torch.zeros(0, 3), "flag": torch.tensor(True)}


def world() -> zeroth.World:
    return zeroth.World.from_environment()


def gpt2(*, micro: int = MICRO, **row: Any) -> tuple[zeroth.Engine, nn.Module]:
    """With the model alone."""
    model = made("gpt2")
    alone = copy.deepcopy(model)
    config = config_of(Row("gpt2", 2, micro=micro, **row), 1)
    done = zeroth.pipeline(model, config, world=world(), loss_fn=loss_fn)
    return zeroth.Engine(done, world=world(), log_level="warning"), alone


def batches(step: int, count: int = MICRO, first: int = 0) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    return (batch(step, first + number) for number in range(count))


# --- outputs and evaluations ------------------------------------------------------------------------------------------


@torch.no_grad()
def outputs() -> None:
    """Every rank has what the model alone returns, with another length in each micro-batch."""
    engine, alone = gpt2()
    for number in range(3):
        inputs, tokens = batch(0, number)
        expected = alone(**inputs).logits
        for given in (inputs, (inputs, tokens)):
            got = engine.outputs(given)
            assert type(got) is dict and list(got) == ["logits"], got
            assert torch.equal(got["logits"], expected) and not got["logits"].requires_grad
    engine.set_batch_fn(lambda text: {"input_ids": torch.tensor([list(text)])})
    assert torch.equal(engine.outputs(b"\1\2\3")["logits"], alone(torch.tensor([[1, 2, 3]])).logits)
    engine.set_batch_fn(None)
    losses = [loss_fn(alone(**inputs), tokens).item() for inputs, tokens in batches(0, 4)]
    assert abs(engine.eval_batch(batches(0, 4), micro_batches=4) - sum(losses) / 4) < 1e-12
    weights = [2.0, 0.0, 1.0, 3.0]
    expected_mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / 6
    assert abs(engine.eval_batch(batches(0, 4), micro_batches=4, weights=weights) - expected_mean) < 1e-12
    for wrong in ([1.0], [1.0, -1.0, 0.0], [1.0, float("nan"), 0.0]):
        with refused("USAGE", "weights do not fit.*expected: 3 finite numbers from 0"):
            engine.eval_batch(batches(0), weights=wrong)
    with refused("USAGE", "have weight 0"):
        engine.eval_batch(batches(0), weights=[0.0] * 3)
    assert (engine.is_first_stage(), engine.is_last_stage()) == (engine.rank == 0, engine.rank == 1)


@torch.no_grad()
def outputs_of_pipelines() -> None:
    """dp=2: each pipeline has the outputs of its own batch, and a mean is over the windows of both."""
    engine, alone = gpt2(micro=1)
    own = engine.pipeline.mesh.coordinate("dp")
    inputs, _ = batch(0, own)
    assert torch.equal(engine.outputs(inputs)["logits"], alone(**inputs).logits)
    losses = [loss_fn(alone(**inputs), tokens).item() for inputs, tokens in batches(0, 2)]
    got = engine.eval_batch(batches(0, 1, own), weights=[1.0 + 2.0 * own])
    assert abs(got - (losses[0] + 3 * losses[1]) / 4) < 1e-12, (got, losses)
    assert (engine.is_first_stage(), engine.is_last_stage()) == (engine.rank < 2, engine.rank >= 2)


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.value(x * self.scale)


def of_list(value: Any, **more: Any) -> zeroth.Engine:
    config = {"zeroth": {"mesh": {"pp": 2}}}
    layers = [nn.Linear(WIDTH, WIDTH), Returns(value)]
    model = pipe.PipelineModule(layers, num_stages=2, partition_method="uniform", **more)
    return zeroth.Engine(model, config, world=world(), log_level="warning")


class WithLoss(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": x, "loss": x.square().mean()}


def outputs_beside_losses() -> None:
    """Of a model that returns both."""
    x = torch.ones(2, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), WithLoss())
    done = zeroth.pipeline(model, {"zeroth": {"mesh": {"pp": 2}}}, world=world(), split=["1"])
    engine = zeroth.initialize(model=done, config={"zeroth": {"mesh": {"pp": 2}}}, log_level="warning")[0]
    assert engine.module is model
    mean, kept = engine.eval_batch([x], True)
    expected = engine.outputs(x)
    assert abs(mean - expected["loss"].item()) < 1e-6
    assert (kept is not None) == engine.is_last_stage()
    assert kept is None or torch.equal(kept[0]["logits"], expected["logits"])
    engine.close(keep_parameters=False)


def outputs_of_every_kind() -> None:
    """Tuples, lists, dicts, plain values, several dtypes, nothing; and what cannot be sent is refused on all ranks."""
    x = torch.ones(2, WIDTH)
    torch.manual_seed(0)
    engine = of_list(lambda y: (y, [None, 3, "text", {"a": 2.5, **MIXED}], y.sum()))
    whole, (nothing, three, text, inner), total = engine.outputs(x)
    assert (nothing, three, text, inner["a"]) == (None, 3, "text", 2.5)
    assert whole.shape == (2, WIDTH) and total.shape == () and torch.equal(whole.sum(), total)
    for name, value in MIXED.items():
        assert inner[name].dtype == value.dtype and torch.equal(inner[name], value), name
    engine.close(keep_parameters=False)
    engine = of_list(lambda y: y.square().mean())  # no layer of stage 1 reads the micro-batch
    last = engine.is_last_stage()
    _, loss = engine.train_batch(None if last else [x])
    assert engine.eval_batch(None if last else [x]) < loss
    engine.close(keep_parameters=False)
    engine = of_list(lambda y: types.SimpleNamespace(y=y))
    with refused("MODEL", "cannot be sent to another rank.*which: SimpleNamespace"):
        engine.outputs(x)
    with refused("MODEL", "cannot be sent to another rank.*which: SimpleNamespace"):  # it goes on
        engine.outputs(x)


# --- steps that the caller runs ---------------------------------------------------------------------------------------


def steered() -> None:
    """The bits of train_batch(); after a wrong action the pipeline refuses to go on."""
    engines = [gpt2()[0], gpt2()[0]]
    for step in range(2):
        expected, expected_loss = engines[0].train_batch(batches(step))
        with engines[1].pipeline_step(batches(step)) as running:
            assert list(running.actions) == engines[1].pipeline.program.splitlines()[1 + engines[1].rank].split()[1:]
            for action in running.actions:
                with refused("USAGE", f"ends before its last action.*expected: {action}; got: the end"):
                    _ = running.result
                running.run(action)
        result, loss = running.result
        assert (loss, result.grad_norm, result.step) == (expected_loss, expected.grad_norm, expected.step)
    first, last = running.actions[0], running.actions[-1]
    assert engines[1].steps == 2
    with (
        refused(
            "USAGE", f"out of order; .*who: stage {engines[0].rank}; which: action 0 of .*expected: {first}; got: STEP"
        ),
        engines[0].pipeline_step(batches(2)) as running,
    ):
        running.run("STEP")
    with refused("USAGE", f"was left before its end.*which: {first};"):
        engines[0].train_batch(batches(2))
    with (
        refused("USAGE", f"ends before its last action.*expected: {last}; got: the end"),
        engines[1].pipeline_step(batches(2)) as running,
    ):
        for action in running.actions[:-1]:
            running.run(action)
    with refused("USAGE", "was left before its end.*which: STEP;"):
        engines[1].eval_batch(batches(2))


# --- DeepSpeed's shape ------------------------------------------------------------------------------------------------


def head(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = embedding.weight  # type: ignore[assignment]
    return hidden @ weight.T


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def layers() -> list[Any]:
    double = {"dtype": torch.float64}
    block = pipe.LayerSpec(nn.Linear, WIDTH, WIDTH, **double)
    return [
        pipe.TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, **double),
        block,
        torch.tanh,
        block,
        pipe.TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=head, **double),
    ]


def samples(step: int, first: int = 0, count: int = MICRO) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randint(WORDS, (2, 5), generator=generator) for _ in range(first + count)]
    return ((words, words.roll(-1, 1)) for words in drawn[first:])


def module(**more: Any) -> pipe.PipelineModule:
    return pipe.PipelineModule(layers(), loss_fn=cross_entropy, **more)


def config(**more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_accumulation_steps": MICRO,
        "zeroth": more,
    }


@functools.cache
def losses_of_one_process(steps: int, count: int = MICRO) -> list[float]:
    model = module()
    model.build(0, len(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = sum(cross_entropy(model(words), labels) / count for words, labels in samples(step, count=count))
        assert isinstance(total, torch.Tensor)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(total.item())
    return losses


def deepspeed(stages: int) -> None:
    """A script in the shape of DeepSpeed's, with stages of the module alone; recomputed in backward."""
    model = module(num_stages=stages)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, optimizer, _, _ = zeroth.initialize(
        model=model,
        config={**config(), "pipeline": {"activation_checkpoint_interval": 1}},
        model_parameters=parameters,
        world=world(),
        log_level="warning",
    )
    assert optimizer is not None and model.activation_checkpoint_interval == 1
    engine.set_batch_fn(lambda sample: (sample["words"], sample["labels"]))
    for step, expected in enumerate(losses_of_one_process(3)):
        data = [{"words": words, "labels": labels} for words, labels in samples(step)]
        evaluated, logits = engine.eval_batch(iter(data), True, num_micro_batches=MICRO)
        assert (logits is not None) == engine.is_last_stage()
        for sample, own in zip(data, logits or [None] * MICRO, strict=True):
            expected_own = engine.outputs(sample)
            assert own is None or (own.shape == (2, 5, WORDS) and torch.equal(own, expected_own))
        engine.set_dataloader(data)
        result, loss = engine.train_batch()
        assert result.committed and abs(loss - expected) < 1e-12, (loss, expected)
        assert abs(evaluated - expected) < 1e-12, (evaluated, expected)
        assert engine.outputs(data[0]).shape == (2, 5, WORDS)
    with refused("MISMATCH", "too few micro-batches"):  # it has come to the end of the loader
        engine.train_batch()
    for more in ({"compute_loss": False}, {"reduce_output": None}):
        with refused("USAGE", f"gives the mean of losses; .*which: {next(iter(more))}"):
            engine.eval_batch(iter(data), **more)
    assert engine.is_first_stage() == (engine.rank < world().size // stages)
    names = {"tied_modules.words.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert engine.state_dict(ranks=None).keys() == names
    engine.close()


def deepspeed_module() -> None:
    """In two stages; which layers they have, and what contradicts itself."""
    deepspeed(2)
    for method, bounds in (("uniform", [0, 3, 5]), ("type:linear", [0, 2, 5]), ("parameters", [0, 2, 5])):
        done = zeroth.pipeline(module(partition_method=method, num_stages=2), config(), world=world())
        assert list(done.bounds) == bounds, (method, done.bounds)
    done = zeroth.pipeline(module(), config(mesh={"pp": 2}, pipeline={"split": "uniform"}), world=world())
    assert list(done.bounds) == [0, 3, 5]
    with refused("CONFIG", "differ in the number of stages; .*expected: num_stages=2, or None; got: num_stages=3"):
        zeroth.Engine(module(num_stages=3), config(mesh={"pp": 2}), world=world())
    with refused("CONFIG", "does not fit the number of ranks"):
        zeroth.Engine(module(num_stages=3), config(), world=world())
    with refused("CONFIG", "split in different ways; .*expected: uniform; got: type:linear"):
        zeroth.pipeline(
            module(partition_method="type:linear"),
            config(mesh={"pp": 2}, pipeline={"split": "uniform"}),
            world=world(),
        )


def cast_inputs() -> None:
    """bf16.auto_cast: the inputs of a list of layers are cast, and its labels are not."""
    torch.manual_seed(0)
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def error(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append((output.dtype, labels.dtype))
        return (output.float() - labels).square().mean()

    losses = []
    for stages in (1, 2):
        torch.manual_seed(0)
        model = pipe.PipelineModule(
            [pipe.LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh, pipe.LayerSpec(nn.Linear, WIDTH, WIDTH)],
            loss_fn=error,
            num_stages=stages,
        )
        document = {**config(), "bf16": {"enabled": True, "auto_cast": True}}
        engine = zeroth.Engine(model, document, world=world(), log_level="warning")
        data = [(torch.randn(2, WIDTH), torch.randn(2, WIDTH)) for _ in range(MICRO)]
        losses.append(engine.train_batch(data)[1])
        assert engine.outputs(data[0]).dtype == torch.bfloat16
        engine.close()
    assert set(seen) == {(torch.bfloat16, torch.float32)}, seen
    assert all(0 < loss < 10 for loss in losses), losses


def one_stage() -> None:
    """Of a module, on two ranks with batches of their own, which take turns."""
    model = module(num_stages=1)
    engine = zeroth.Engine(model, config(), world=world(), log_level="warning")
    assert engine.is_first_stage() and engine.is_last_stage()
    for step, expected in enumerate(losses_of_one_process(2, 2 * MICRO)):
        _, loss = engine.train_batch(samples(step, engine.rank * MICRO))
        assert abs(loss - expected) < 1e-12, (loss, expected)
    assert engine.outputs(next(samples(0))).shape == (2, 5, WORDS)
    weights = [1.0, 2.0, 3.0 * engine.rank]
    with torch.no_grad():
        every = [cross_entropy(model(words), labels).item() for words, labels in samples(9, count=2 * MICRO)]
    expected = (every[0] + 2 * every[1] + every[3] + 2 * every[4] + 3 * every[5]) / 9
    assert abs(engine.eval_batch(samples(9, engine.rank * MICRO), weights=weights) - expected) < 1e-12
    with refused("MISMATCH", "too few micro-batches.*expected: 3 micro-batches; got: 2"):
        engine.train_batch(samples(0, count=2))
    with refused("USAGE", "a model of one stage has no schedule"):
        engine.pipeline_step(samples(0))
    engine.close()


# --- evaluations ------------------------------------------------------------------------------------------------------


class DroppingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels is None or labels.numel() == 0:
            raise ValueError("no labels")
        return nn.functional.mse_loss(self.dropout(output), labels)


def evaluations() -> None:
    """No dropout in eval_batch() and outputs(), with stages and without; then each module trains, or does not, as
    before, also after an error."""
    torch.manual_seed(7)
    x, y = torch.rand(4, WIDTH, dtype=torch.float64), torch.zeros(4, WIDTH, dtype=torch.float64)
    for pp in (2, 1):
        for stage in (0, 3):
            torch.manual_seed(2)
            layers = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)]
            plain = nn.Sequential(*copy.deepcopy(layers)).double().eval()
            loss_fn = DroppingLoss()
            model = pipe.PipelineModule([layer.double() for layer in layers], loss_fn=loss_fn)
            keys = {"zero_optimization": {"stage": stage}, "zeroth": {"mesh": {"pp": pp} if pp > 1 else {}}}
            engine = zeroth.Engine(model, keys, world=world(), log_level="warning")
            model.train()
            loss_fn.train()
            layers[3].eval()  # by the user's own hand
            modes = [(one, one.training) for one in (*model.modules(), *loss_fn.modules(), *layers)]
            assert not all(mode for _, mode in modes)
            expected = nn.functional.mse_loss(plain(x), y).item()
            for _ in range(3):
                assert abs(engine.eval_batch(iter([(x, y)])) - expected) < 1e-12, (pp, stage)
                assert (engine.outputs((x, y)) - plain(x)).abs().max() < 1e-12, (pp, stage)
                mean, kept = engine.eval_batch(iter([(x, y)]), True)
                assert abs(mean - expected) < 1e-12
                assert kept is None or (kept[0] - plain(x)).abs().max() < 1e-12
            assert [(one, one.training) for one, _ in modes] == modes, (pp, stage)
            with refused("MISMATCH", "too few micro-batches"):
                engine.eval_batch(iter([]))
            assert [(one, one.training) for one, _ in modes] == modes, (pp, stage)
            if pp == 1:
                try:
                    engine.eval_batch(iter([(x, torch.zeros(0))]))
                except ValueError:
                    assert [(one, one.training) for one, _ in modes] == modes, stage
                else:
                    raise AssertionError("no error")
            result, loss = engine.train_batch(iter([(x, y)]))
            assert result.committed and loss != expected  # it drops again
            engine.close(keep_parameters=False)


# --- cuts by what layers cost, programs of the caller's own -----------------------------------------------------------


class Sleeps(nn.Linear):
    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


def measured() -> None:
    """Ranks cut alike where they measure other times: rank 0's count."""
    sample = (torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    loss = nn.functional.mse_loss
    two = {"zeroth": {"mesh": {"pp": 2}}}
    slow = 0 if world().rank == 0 else 4
    stack = [Sleeps(0.01 if number == slow else 0.0) for number in range(5)]
    done = zeroth.pipeline(nn.Sequential(*stack), two, world=world(), split="time", loss_fn=loss, sample=sample)
    assert list(done.bounds) == [0, 1, 5], done.bounds
    engine = zeroth.Engine(done.model, two, world=world(), log_level="warning")
    engine.train_batch([sample])
    engine.close(keep_parameters=False)
    wide = [nn.Linear(WIDTH, 50), nn.ReLU(), nn.Linear(50, WIDTH), nn.Linear(WIDTH, WIDTH)]  # keep 6, 50, 50, 6
    done = zeroth.pipeline(nn.Sequential(*wide), two, world=world(), split="memory", loss_fn=loss, sample=sample)
    assert list(done.bounds) == [0, 2, 4], done.bounds
    with refused("USAGE", "measured on a micro-batch; .*which: time; expected: sample="):
        zeroth.pipeline(nn.Sequential(*wide), two, world=world(), split="time", loss_fn=loss)
    with refused("USAGE", "without values cannot be measured.*which: tied_modules.words.weight"):
        zeroth.pipeline(module(), config(mesh={"pp": 2}), world=world(), split="time", sample=next(samples(0)))


BREADTH_FIRST = """\
zeroth-program 1 schedule=by_hand ranks=2 micro_batches=2 chunks=0,1,0,1
0: 0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 \
2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1 2REDUCE 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE STEP
1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 \
3B0 3SEND_B0 3B1 3SEND_B1 3REDUCE 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1REDUCE STEP
"""
"""(Lamy-Poirier 2022), written by hand: no schedule of Zeroth's"""


SHARED_HEAD = """\
zeroth-program 1 schedule=gpipe ranks=2 micro_batches=1 chunks=0,1
0: 0F0 0SEND_F0 V_INPUT0 V_S0 V_SUM0 V_T0 V_GRAD0 0RECV_B0 0B0 0REDUCE STEP
1: 1RECV_F0 1F0 V_INPUT0 V_S0 V_SUM0 V_T0 V_GRAD0 1B0 1SEND_B0 1REDUCE STEP
"""


def programs() -> None:
    """One that no schedule makes trains as one process does; others are refused before anything is changed."""
    two = {**config(mesh={"pp": 2}), "gradient_accumulation_steps": 2}
    done = zeroth.pipeline(module(), two, world=world(), program=BREADTH_FIRST)
    assert done.program == BREADTH_FIRST and len(done.stage_of_chunk) == 4
    engine = zeroth.Engine(done.model, two, world=world(), log_level="warning")
    for step, expected in enumerate(losses_of_one_process(3, 2)):
        _, loss = engine.train_batch(samples(step, count=2))
        assert abs(loss - expected) < 1e-12, (loss, expected)
    engine.close(keep_parameters=False)

    simple = _C.make_program("1f1b", 2, 2)
    model = module()

    def refuse(given: str, pattern: str, **more: Any) -> None:
        with refused("USAGE", pattern):
            zeroth.pipeline(model, {**two, **more}, world=world(), program=given)
        assert zeroth.pipe.pipeline.pipelined_of(model) is None and all(one.is_meta for one in model.parameters())

    waits = simple.replace("0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0F1 0RECV_B0 0SEND_F0 0SEND_F1 0B0")
    assert waits != simple
    refuse(waits, "ranks wait for each other.*rank 0 .*rank 1")
    refuse(simple.replace("0B1", "0B0"), r"\[USAGE\].*0B0")
    refuse(simple.replace("0F1", "0FORWARD1"), "0FORWARD1")
    not_yet = "can be read and simulated, and not run yet; .*which: {}"
    had, has = "0REDUCE STEP", "0REDUCE 0FETCH STEP 0FLUSH"
    assert had in simple
    refuse(simple.replace(had, has), not_yet.format("0FETCH"))
    with refused("MODEL", "stages of a pipeline cannot share the head of this model.*an nn.Linear as the last layer"):
        other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        zeroth.pipeline(other, {**two, "gradient_accumulation_steps": 1}, world=world(), program=SHARED_HEAD)
    assert zeroth.pipe.pipeline.pipelined_of(other) is None and len(other[0].weight) == WIDTH
    refuse(simple.replace("chunks=0,1", "chunks=0,1 inexact"), not_yet.format("1f1b, which is inexact"))
    refuse(_C.make_program("1f1b", 2, 2, step=False), "does not update the parameters")
    refuse(_C.make_program("1f1b", 2, 3), "another number of micro-batches.*expected: .* 2; got: 3")
    refuse(_C.make_program("1f1b", 3, 2), "another number of stages.*expected: 2; got: 3")
    kept = {"zero_optimization": {"stage": 3}, "zeroth": {"mesh": {"pp": 2}, "pipeline": {"unshard": "step"}}}
    refuse(simple, "does not say when parameters are gathered.*which: zeroth.pipeline.unshard", **kept)


# --- what is refused --------------------------------------------------------------------------------------------------


def refusals() -> None:
    """With nothing changed: the engine trains afterwards."""
    engine, alone = gpt2()
    few = r"too few micro-batches.*who: rank \d/\d, stage \d of 2; which: micro-batch 2, of action \dF2; expected: 3"
    with refused("MISMATCH", few):
        engine.train_batch(batches(0, 2))
    with refused("MISMATCH", "too few micro-batches.*expected: 4 micro-batches; got: 3"):
        engine.eval_batch(batches(0, 3), micro_batches=4)
    with refused("USAGE", "a stage that needs micro-batches is given none.*expected: an iterator"):
        engine.train_batch(None)  # blocks take masks from it
    inputs, _ = batch(0, 0)
    with refused("USAGE", r"a forward of the whole model.*engine\.train_batch\(batches\) and engine\.eval_batch"):
        engine(**inputs)
    with refused("USAGE", r"backward\(\) of a pipeline.*engine\.train_batch"):
        engine.backward(torch.ones((), requires_grad=True))
    with refused("USAGE", r"step\(\) of a pipeline.*engine\.train_batch"):
        engine.step()
    losses = [loss_fn(alone(**inputs), tokens).item() for inputs, tokens in batches(0)]
    _, loss = engine.train_batch(batches(0))
    assert abs(loss - sum(losses) / 3) < 1e-12

    cut = functools.partial(zeroth.pipeline, world=world(), loss_fn=loss_fn)
    two = config_of(Row("gpt2", 2), 1)
    with refused("USAGE", "there is no such way to split.*expected: auto, parameters, .*got: halves"):
        cut(made("gpt2"), two, split="halves")
    with refused("USAGE", "there is no such layer; .*which: transformer.h.9; expected: one of embedding, "):
        cut(made("gpt2"), two, split=["transformer.h.9"])
    with refused("USAGE", "does not name the first layers of the parts.*expected: 1 different layers"):
        cut(made("gpt2"), two, split=["transformer.h.1", "transformer.h.2"])
    with refused("USAGE", "every part of a pipeline needs a layer.*expected: 1 to 1 parts, for 1 layers; got: 2"):
        zeroth.pipeline([nn.Linear(2, 2)], {"zeroth": {"mesh": {"pp": 2}}}, world=world())
    with refused("USAGE", "the model is a pipeline already"):
        cut(engine.module, two)
    with refused("CONFIG", "the configuration has one stage"):
        cut(made("gpt2"), {})


def no_loss() -> None:
    """The last stage says so, and the job ends."""
    of_list(lambda y: {"logits": y}).train_batch(iter([torch.ones(2, WIDTH)]))


def not_to_be_sent() -> None:
    """The stage that would send it says so, and the job ends."""
    model = nn.Sequential(Returns(lambda y: types.SimpleNamespace(y=y)), Returns(lambda y: y))
    cut = {"zeroth": {"mesh": {"pp": 2}, "pipeline": {"split": "uniform"}}}
    engine = zeroth.Engine(model, cut, world=world(), log_level="warning")
    engine.train_batch(iter([torch.ones(2, WIDTH)]))


def main() -> None:
    cases.run(globals(), sys.argv[1:])


if __name__ == "__main__":
    main()
