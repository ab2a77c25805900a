"""One rank of several that train models whose head the stages of a pipeline share; see pipe_test.py.

pipe_head_rank.py CASE...
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from pipe_more_rank import SHARED_HEAD
from pipe_rank import made
from pipe_rows import WAYS
from refusing import refused
from safetensors import safe_open
from tensor_models import VOCAB
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import WIDTH, Block

import zeroth
from zeroth.pipe.runner import loss_of
from zeroth.pipe.shared_head import find_head, run_to_head

WORDS, MICRO, STEPS = 61, 3, 2
"""no number of stages divides the words"""


def layers(*, bias: bool = True, tied: bool = False, count: int = 8) -> nn.Sequential:
    torch.manual_seed(2)
    head = nn.Linear(WIDTH, WORDS, bias=bias and not tied)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH, padding_idx=3), *(Block() for _ in range(count)), head).double()
    if tied:
        head.weight = model[0].weight
        torch.nn.init.normal_(head.weight, std=0.3)
    return model


def batch(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, of which another number counts in each."""
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(WORDS, (2, 5 + number % 3), generator=generator)
    labels = torch.randint(WORDS, tokens.shape, generator=generator)
    return tokens, labels.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.3 * (number % 3), -100)


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1))


def shifted_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """With the sizes that the logits say, in a module, divided by a number of the batch's, and with a constant."""
    rows = logits[:, :-1].float() if logits.dtype == torch.float32 else logits[:, :-1].contiguous()
    targets = labels[:, 1:].masked_fill(labels[:, 1:] == -100, 7).reshape(-1)
    loss = nn.CrossEntropyLoss(ignore_index=7, reduction="sum")
    return 0.5 * loss(rows.reshape(-1, rows.size(-1)), targets) / labels.shape[1] + 0.25


def masked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="sum") / 4


def config_of(pp: int, way: str, schedule: str = "1f1b", stage: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_accumulation_steps": MICRO,
        "zeroth": {"mesh": {"pp": pp}, "pipeline": {"schedule": schedule, "vocabulary": way}},
        **more,
    }


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain(model: nn.Module, loss_fn: Any, own: int = 1, batch: Any = batch) -> list[float]:
    """Losses of one process, which changes the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(MICRO * own):
            tokens, labels = batch(step, number)
            loss = loss_fn(model(tokens), labels) / (MICRO * own)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def close(got: torch.Tensor | float, expected: torch.Tensor | float) -> bool:
    return bool((torch.as_tensor(got) - torch.as_tensor(expected)).abs().max() < 1e-12)


class Widths(TorchDispatchMode):
    """The columns that matrices have."""

    def __init__(self) -> None:
        super().__init__()
        self.all: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, torch.Tensor) and one.dim() == 2 and one.is_floating_point():
                self.all.add(one.shape[1])
        return result


def train(
    pp: int, way: str, schedule: str, stage: int, loss_fn: Loss, *, bias: bool = True, tied: bool = False
) -> None:
    """Losses and weights of one process; the rows and logits of this stage alone."""
    world = zeroth.World.from_environment()
    model = layers(bias=bias, tied=tied)
    alone = copy.deepcopy(model)
    dp = world.size // pp
    done = zeroth.pipeline(model, config_of(pp, way, schedule, stage), world=world, loss_fn=loss_fn)
    engine = zeroth.Engine(model, config_of(pp, way, schedule, stage), world=world, log_level="warning")
    rows = done.head.rows(done.mesh)
    assert sum(rows) == WORDS and max(rows) - min(rows) <= 1, rows
    assert f"9, {rows[0]}, {rows[1]}" in str(done), str(done)
    own, losses = world.rank % dp, []
    engine.reset_counters()
    with Widths() as seen:
        for step in range(STEPS):
            result, loss = engine.train_batch([batch(step, dp * number + own) for number in range(MICRO)])
            assert result.committed
            losses.append(loss)
    assert max(seen.all) == rows[done.stage], (seen.all, rows)
    wire = engine.wire_report()
    for kind in ("all_gather", "reduce_scatter"):
        assert wire[kind] == STEPS * wire[f"planned_{kind}"], (way, schedule, stage, kind, wire)
    expected = plain(alone, loss_fn, dp)
    assert all(map(close, losses, expected)), (way, schedule, stage, losses, expected)
    weights = engine.state_dict(ranks=None)
    for name, value in alone.state_dict().items():
        assert close(weights[name], value), (way, schedule, stage, name, (weights[name] - value).abs().max())
    with torch.no_grad():
        mean_loss = sum(loss_fn(alone(batch(9, number)[0]), batch(9, number)[1]).item() for number in range(5)) / 5
    assert close(engine.eval_batch([batch(9, number) for number in range(5)], micro_batches=5), mean_loss)
    weighted = engine.eval_batch([batch(9, 0), batch(9, 1)], micro_batches=2, weights=[3.0, 1.0])
    with torch.no_grad():
        two = [loss_fn(alone(batch(9, number)[0]), batch(9, number)[1]).item() for number in range(2)]
    assert close(weighted, (3 * two[0] + two[1]) / 4), (weighted, two)
    report = engine.memory_report()
    assert report.planned == report.measured_peak, (report.planned, report.measured_peak)
    logits_of_all_rows(engine, alone, [batch(9, number) for number in range(2)], loss_fn)
    engine.close(keep_parameters=False)


def logits_of_all_rows(engine: zeroth.Engine, alone: nn.Module, batches: list[Any], loss_fn: Loss) -> None:
    """What the model returns, of each micro-batch, with its loss or without."""
    mean_loss, results = engine.eval_batch(batches, True, micro_batches=len(batches))
    assert (results is None) == (not engine.is_last_stage())
    losses = []
    for number, (tokens, labels) in enumerate(batches):
        with torch.no_grad():
            expected = alone(tokens)
            losses.append(loss_fn(expected, labels).item())
        assert results is None or close(results[number], expected), number
        assert close(engine.outputs((tokens, labels)), expected), number
        assert close(engine.outputs((tokens, None)), expected), number
    assert close(mean_loss, sum(losses) / len(batches)), (mean_loss, losses)


def two() -> None:
    """Two stages."""
    train(2, "two_barriers", "1f1b", 3, mean)
    train(2, "one_barrier", "zb-h1", 1, shifted_sum)


def tied() -> None:
    """A head whose weight is that of the embedding."""
    train(2, "two_barriers", "1f1b", 1, mean, tied=True)
    train(2, "one_barrier", "1f1b", 3, mean, tied=True)


class Scaled(nn.Embedding):
    """As some language models have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def scaled() -> nn.Sequential:
    model = layers(tied=True)
    table = Scaled(WORDS, WIDTH, dtype=torch.float64)
    table.weight = model[9].weight
    model[0] = table
    return model


def tied_states() -> None:
    """Parameter groups, names, exports and loads of a tied head: those of the whole model."""
    world = zeroth.World.from_environment()
    model = scaled()
    alone = copy.deepcopy(model)
    config = config_of(2, "two_barriers", stage=3)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        table, *rest = model.parameters()
        return [{"params": [table], "lr": 0.1}, {"params": rest}]

    given = groups(model)  # of the model before it is cut
    zeroth.pipeline(model, config, world=world, loss_fn=mean)
    engine = zeroth.Engine(model, config, world=world, params=given, log_level="warning")
    optimizer = torch.optim.SGD(groups(alone), lr=0.5)
    own, dp = world.rank % (world.size // 2), world.size // 2
    engine.train_batch([batch(0, dp * number + own) for number in range(MICRO)])
    for number in range(dp * MICRO):
        (mean(alone(batch(0, number)[0]), batch(0, number)[1]) / (dp * MICRO)).backward()
    optimizer.step()
    expected = alone.state_dict()
    found = engine.state_dict(ranks=None)
    assert list(found) == list(expected), (list(found), list(expected))
    assert all(close(found[name], value) for name, value in expected.items())
    for name in ("0.weight", "9.weight"):
        assert torch.equal(engine.full(name), found["0.weight"]), name
    assert engine.full("9.weight", ranks=1) is None or world.rank == 1
    folder = tempfile.gettempdir()
    path = os.path.join(folder, f"zeroth-tied-{os.getppid()}.safetensors")
    engine.export_safetensors(path)
    if world.rank == 0:
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(expected) - {"9.weight"}, file.keys()
            assert file.metadata()["9.weight"] == "0.weight", file.metadata()
            assert torch.equal(file.get_tensor("0.weight"), found["0.weight"])
        os.remove(path)
    other = {name: value + 1 for name, value in found.items()}
    report = engine.load_state_dict(other)
    assert not report.missing and not report.unexpected, report
    again = engine.state_dict(ranks=None)
    assert all(torch.equal(again[name], value) for name, value in other.items())
    engine.close(keep_parameters=False)
    late = zeroth.deferred(lambda: layers(tied=True))
    zeroth.pipeline(late, config, world=world, loss_fn=mean)
    engine = zeroth.Engine(late, config, world=world, log_level="warning")
    made_late = engine.state_dict(ranks=None)
    assert all(torch.equal(made_late[name], value) for name, value in layers(tied=True).state_dict().items())
    engine.close(keep_parameters=False)


def tied_tiles() -> None:
    """Tiles that the first chunk and the last one use, on one rank: their gradients come in two backwards."""
    world = zeroth.World.from_environment()
    for schedule, stage in (("zb-v", 3), ("interleaved", 2)):
        model = layers(tied=True)
        alone = copy.deepcopy(model)
        zeroth.tile(model, larger_than=WIDTH * 8 * 16)
        config = config_of(2, "whole", schedule, stage)
        zeroth.pipeline(model, config, world=world, loss_fn=mean)
        engine = zeroth.Engine(model, config, world=world, log_level="warning")
        losses = [engine.train_batch([batch(step, number) for number in range(MICRO)])[1] for step in range(STEPS)]
        expected = plain(alone, mean)
        assert all(map(close, losses, expected)), (schedule, stage, losses, expected)
        engine.close(keep_parameters=False)
    for name, schedule in (("gpt2", "v-min"), ("llama", "zb-h1")):
        tiled_model(name, schedule)


def tiled_model(name: str, schedule: str) -> None:
    """Of transformers, with embedding and head in tiles: they are no blocks. The table of gpt2 is looked up in the
    first chunk, and multiplied with in the last one, by the same rank."""
    world = zeroth.World.from_environment()
    model, alone = made(name, layers=4), made(name, layers=4)
    assert len(zeroth.tile(model, larger_than=WIDTH * 8 * 16)) > 2
    config = config_of(2, "whole", schedule, 3)
    zeroth.pipeline(model, config, world=world, loss_fn=next_token)
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    given = [[labelled(step, number) for number in range(MICRO)] for step in range(STEPS)]
    engine.reset_counters()
    losses = [engine.train_batch([({"input_ids": one}, labels) for one, labels in batches])[1] for batches in given]
    wire, report = engine.wire_report(), engine.memory_report()
    for kind in ("all_gather", "reduce_scatter"):
        assert wire[kind] == STEPS * wire[f"planned_{kind}"], (name, kind, wire)
    assert report.planned == report.measured_peak, (name, report.planned, report.measured_peak)
    expected = plain(alone, next_token, batch=labelled)
    assert all(map(close, losses, expected)), (name, losses, expected)
    engine.close(keep_parameters=False)


def more() -> None:
    """More of the same."""
    train(2, "two_barriers", "gpipe", 2, masked, bias=False)
    train(2, "one_barrier", "1f1b", 0, mean)


def four() -> None:
    """Four stages, and two with two replicas."""
    train(4, "two_barriers", "1f1b", 1, shifted_sum)
    train(4, "one_barrier", "1f1b", 3, mean, bias=False)
    train(2, "one_barrier", "zb-v", 3, masked)


def grid() -> None:
    """All schedules, in both ways, at one ZeRO stage after the other."""
    size = zeroth.World.from_environment().size
    schedules = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
    for number, (way, schedule) in enumerate(itertools.product(WAYS, schedules)):
        loss_fn = (mean, shifted_sum, masked)[number % 3]
        train(size, way, schedule, (number + size) % 4, loss_fn, bias=number % 2 == 0)


def transformers_loss() -> None:
    """The loss that transformers computes, of labels in the batch, in float32."""
    world = zeroth.World.from_environment()
    model = made("llama", torch.float32, layers=2)
    alone = copy.deepcopy(model)
    engine = zeroth.Engine(model, config_of(2, "one_barrier"), world=world, log_level="warning")
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        tokens = [torch.randint(VOCAB, (2, 9), generator=generator) for _ in range(MICRO)]
        optimizer.zero_grad()
        total = sum(alone(input_ids=one, labels=one).loss / MICRO for one in tokens)
        total.backward()
        optimizer.step()
        _, loss = engine.train_batch([{"input_ids": one, "labels": one} for one in tokens])
        assert abs(loss - total.item()) < 1e-6 * 5, (loss, total.item())
    with torch.no_grad():
        expected = alone(input_ids=tokens[0], labels=tokens[0])
    _, results = engine.eval_batch([{"input_ids": tokens[0], "labels": tokens[0]}], True, micro_batches=1)
    found = [engine.outputs({"input_ids": tokens[0]}), engine.outputs({"input_ids": tokens[0], "labels": tokens[0]})]
    assert [one.get("loss") is None for one in found] == [True, False]
    if results is not None:
        assert type(results[0]) is type(expected)
        found += [results[0], {"logits": results[0][1], "loss": results[0].loss}]
    for one in found:
        assert one["logits"].dtype == expected.logits.dtype
        assert (one["logits"] - expected.logits).abs().max() < 1e-5
        assert one.get("loss") is None or abs(one["loss"] - expected.loss).item() < 1e-5
    for name, value in engine.state_dict(ranks=None).items():
        assert (value - alone.state_dict()[name]).abs().max() < 1e-6, name
    engine.close(keep_parameters=False)


def labelled(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of a language model that is long enough to be sent in slices: with labels for all tokens, for the second
    half of the sequence alone, and for some."""
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(VOCAB, (3, 25 + number % 2), generator=generator)
    some = torch.rand(tokens.shape, generator=generator) < 0.4
    half = (torch.arange(tokens.shape[1]) < 15).expand_as(tokens)
    return tokens, tokens.masked_fill((some & False, half, some)[number % 3], -100)


def next_token(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """In float64: transformers' own loss is computed in float32."""
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def on_mesh(
    way: str,
    schedule: str,
    stages: tuple[int, ...],
    *,
    tp: int = 1,
    sp: int = 1,
    norms: str = "whole",
    method: str = "ulysses",
) -> None:
    """Losses and weights of one process; ranks of tp have their own rows of the head, those of sp their own tokens.
    Bits are those of another ZeRO stage."""
    world = zeroth.World.from_environment()
    inner = tp * sp
    dp, own = world.size // (2 * inner), world.rank // inner % (world.size // (2 * inner))
    trained: list[tuple[list[float], dict[str, torch.Tensor]]] = []

    def batches(step: int) -> list[dict[str, torch.Tensor]]:
        given = [labelled(step, dp * number + own) for number in range(MICRO)]
        return [{"input_ids": tokens, "labels": labels} for tokens, labels in given]

    for stage in stages:
        config = config_of(2, way, schedule, stage)
        config["zeroth"]["mesh"] |= {"tp": tp, "sp": sp}
        config["zeroth"]["pipeline"]["scatter"] = True
        config["zeroth"] |= {"tensor": {"norms": norms}, "sequence": {"method": method}}
        model = made("llama", layers=2)
        done = zeroth.pipeline(model, config, world=world)
        engine = zeroth.Engine(model, config, world=world, log_level="warning")
        rows = done.head.rows(done.mesh)
        assert len(rows) == 2 * tp and sum(rows) == VOCAB and max(rows) - min(rows) <= 1, rows
        assert f"lm_head, {', '.join(map(str, rows))} rows of {VOCAB}" in str(done), str(done)
        mine = rows[done.stage * tp + done.mesh.coordinate("tp")]
        with Widths() as seen:
            losses = [engine.train_batch(batches(step))[1] for step in range(STEPS)]
        more = {VOCAB, sum(rows[:tp]), sum(rows[tp:])} - set(rows)  # of the model, and of a stage
        assert mine in seen.all and not seen.all & more, (seen.all, rows)
        evaluated = engine.eval_batch(batches(9), micro_batches=MICRO, weights=[3.0, 1.0, 2.0])
        trained.append(([*losses, evaluated], engine.state_dict(ranks=None)))
        tokens, labels = labelled(9, own)
        found = engine.outputs({"input_ids": tokens, "labels": labels})
        engine.close(keep_parameters=False)
    losses, weights = trained[0]
    for other in trained[1:]:
        assert losses == other[0], (way, schedule, losses, other[0])
        assert all(torch.equal(value, other[1][name]) for name, value in weights.items()), (way, schedule)
    alone = made("llama", layers=2)
    expected = plain(alone, next_token, dp, labelled)
    with torch.no_grad():
        given = [(labelled(9, number), (3.0, 1.0, 2.0)[number // dp]) for number in range(MICRO * dp)]
        total = sum(weight * next_token(alone(tokens), labels).item() for (tokens, labels), weight in given)
        whole = alone(tokens, labels=labels)
    assert all(map(close, losses, [*expected, total / (6 * dp)])), (way, schedule, tp, sp, losses, expected)
    for name, value in alone.state_dict().items():
        assert close(weights[name], value), (way, schedule, name, (weights[name] - value).abs().max())
    part = found["logits"].shape[1]  # of the sequence
    assert part in ((tokens.shape[1] + 1) // sp, tokens.shape[1] // sp), found["logits"].shape
    expected_logits = whole.logits[:, :part] if done.mesh.coordinate("sp") == 0 else whole.logits[:, -part:]
    assert method == "ring" or close(found["logits"], expected_logits), (way, schedule, tp, sp)
    assert torch.isnan(whole.loss) or abs(found["loss"] - whole.loss) < 1e-6, (way, schedule, found["loss"], whole.loss)


def tp_and_sp() -> None:
    """Two ranks of one axis beside two stages."""
    on_mesh("one_barrier", "1f1b", (1,), tp=2)
    on_mesh("two_barriers", "1f1b", (1,), sp=2)
    few = nn.Sequential(*layers()[:-1], nn.Linear(WIDTH, 3).double())
    config = config_of(2, "two_barriers")
    config["zeroth"]["mesh"]["tp"] = 2
    with refused("MODEL", "cannot share the head.*4 rows or more, one for each rank of pp and tp; got: 3 rows"):
        zeroth.pipeline(few, config, world=zeroth.World.from_environment(), loss_fn=mean)


def axes() -> None:
    """The same at all ZeRO stages, with slices of the sequence between layers that tp shares."""
    on_mesh("two_barriers", "1f1b", (0, 1, 2, 3), tp=2)
    on_mesh("two_barriers", "zb-h1", (3, 1), tp=2, norms="split")
    on_mesh("one_barrier", "gpipe", (0, 1, 2, 3), sp=2)
    on_mesh("two_barriers", "1f1b", (2,), sp=2, method="ring")


def eight() -> None:
    """Every axis beside another one."""
    on_mesh("two_barriers", "1f1b", (3, 0), tp=2, sp=2)
    on_mesh("one_barrier", "zb-h1", (2, 1), tp=2, sp=2, norms="split")
    on_mesh("one_barrier", "1f1b", (3, 1), tp=2)
    on_mesh("two_barriers", "gpipe", (2, 3), sp=2)


def _with_two_linear() -> nn.Sequential:
    model = layers(bias=False)
    model[0] = nn.Linear(WIDTH, WORDS, bias=False).double()
    model[0].weight = model[9].weight
    return model


def _tied_specs(function: Callable[[Any, torch.Tensor], torch.Tensor]) -> list[Any]:
    """The embedding again as the last layer, with a function of its own."""
    embedding = zeroth.pipe.TiedLayerSpec("table", nn.Embedding, WORDS, WIDTH)
    head = zeroth.pipe.TiedLayerSpec("table", nn.Embedding, WORDS, WIDTH, forward_fn=function)
    return [embedding, *(zeroth.pipe.LayerSpec(Block) for _ in range(6)), head]


def tied_specs() -> None:
    """A head that is a function of a layer that is built later."""
    world = zeroth.World.from_environment()
    torch.set_default_dtype(torch.float64)
    specs = _tied_specs(lambda module, x: functional.linear(x, module.weight))
    model, alone = (zeroth.pipe.PipelineModule(specs, loss_fn=mean) for _ in range(2))
    alone.build(0, len(alone))
    config = config_of(2, "one_barrier", stage=2)
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    losses = [engine.train_batch([batch(step, number) for number in range(MICRO)])[1] for step in range(STEPS)]
    expected = plain(alone, mean)
    assert all(map(close, losses, expected)), (losses, expected)
    found = engine.state_dict(ranks=None)
    assert all(close(found[name], value) for name, value in alone.state_dict().items())
    assert list(found) == list(alone.state_dict()), list(found)
    engine.close(keep_parameters=False)
    torch.set_default_dtype(torch.float32)


def refusals() -> None:
    """By name, and before the model is changed, or in the first step where it is the loss."""
    world = zeroth.World.from_environment()
    config = config_of(2, "two_barriers")

    def cut(model: nn.Module, loss_fn: Loss | None = mean, text: str = "", **more: Any) -> None:
        with refused("MODEL", "the stages of a pipeline cannot share the head of this model.*" + text):
            zeroth.pipeline(model, config, world=world, loss_fn=loss_fn, **more)

    cut(layers(), None, "no loss_fn")
    cut(nn.Sequential(*layers()[:-1]), mean, "an nn.Linear as the last layer")
    tied = layers()
    tied[9].weight = tied[0].weight
    cut(tied, mean, "9; expected: a head without a bias, where its weight is tied")
    tied = layers(tied=True)
    tied[0].scale_grad_by_freq = True
    cut(tied, mean, "0; expected: an embedding without max_norm, scale_grad_by_freq and sparse")
    cut(
        _with_two_linear(),
        mean,
        "9.weight; expected: a weight that the head and embeddings alone use; got: one that is",
    )
    halved = _tied_specs(lambda module, x: functional.linear(x, module.weight) / 2)
    cut(zeroth.pipe.PipelineModule(halved, loss_fn=mean), None, "as the function of a tied nn.Embedding")
    hooked = layers()
    hooked[9].register_forward_hook(lambda *_: None)
    cut(hooked, mean, "no hooks")
    cut(nn.Sequential(*layers()[:-1], nn.Linear(WIDTH, 1).double()), mean, "2 rows or more")
    losses: list[tuple[Loss, str]] = [
        (lambda logits, labels: mean(torch.softmax(logits, -1), labels), "softmax"),
        (lambda logits, labels: functional.cross_entropy(logits[..., :9].view(-1, 9), labels.view(-1)), "__getitem__"),
        (lambda logits, labels: functional.cross_entropy(logits.flatten(), labels.flatten()), "flatten"),
        (lambda logits, labels: mean(logits, labels) ** 2, "pow of it"),
        (lambda logits, labels: mean(logits, labels) + mean(logits, labels), "two"),
        (lambda logits, labels: functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1), label_smoothing=0.1),
         "label_smoothing"),
        (lambda logits, labels: logits.sum(), "sum"),
        (lambda logits, labels: torch.zeros(()), "no call of it"),
    ]  # fmt: skip
    for loss_fn, text in losses:
        chain = zeroth.pipe.chain_of(layers(), loss_fn=loss_fn)
        head = find_head(chain, 2)
        with refused("MODEL", "cannot share the head of this model.*9, what follows it.*" + text):
            run_to_head(chain, head, 0, None, batch(0, 0), loss_of)
    for loss_fn in (mean, shifted_sum, masked):
        chain = zeroth.pipe.chain_of(layers(), loss_fn=loss_fn)
        tokens, labels = batch(0, 1)
        run = run_to_head(chain, find_head(chain, 2), 0, None, (tokens, labels), loss_of)
        logits = chain.model[9](run.hidden).flatten(0, 1)[run.rows]
        total = functional.cross_entropy(logits, run.targets, reduction="sum")
        assert close(run.factor * total + run.constant, loss_fn(chain.model(tokens), labels))


def own_programs() -> None:
    """One of the caller's own says how the head is shared, and agrees with the configuration."""
    world = zeroth.World.from_environment()
    config = {**config_of(2, "whole"), "gradient_accumulation_steps": 1}
    model = layers()
    alone = copy.deepcopy(model)
    done = zeroth.pipeline(model, config, world=world, loss_fn=mean, program=SHARED_HEAD)
    assert done.program == SHARED_HEAD and done.head is not None
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    tokens, labels = batch(0, 1)
    assert close(engine.train_batch([(tokens, labels)])[1], mean(alone(tokens), labels).item())
    engine.close(keep_parameters=False)
    other = {**config_of(2, "one_barrier"), "gradient_accumulation_steps": 1}
    with refused("USAGE", "share the head in different ways.*expected: two_barriers; got: one_barrier"):
        zeroth.pipeline(layers(), other, world=world, loss_fn=mean, program=SHARED_HEAD)


def caught() -> None:
    """A loss that is refused in the first step. The last stage catches the error; the others get it, too, and all go on
    with an engine of a new world. The last case of a job, for the old world has ended."""
    world = zeroth.World.from_environment()
    config = config_of(2, "two_barriers", stage=3)

    def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1), label_smoothing=0.1)

    done = zeroth.pipeline(layers(), config, world=world, loss_fn=smoothed)
    engine = zeroth.Engine(done, log_level="warning")
    cause = (
        r"\[MODEL\] the stages of a pipeline cannot share the head.*label_smoothing=0.0; got: 0.1; hint: zeroth.pipe"
    )
    code, pattern = ("MODEL", f"^{cause}") if world.rank == 1 else ("ABORTED", f"rank 1 stopped the job: {cause}")
    with refused(code, pattern):
        engine.train_batch([batch(0, number) for number in range(MICRO)])
    engine.close(keep_parameters=False)
    engine = zeroth.Engine(zeroth.pipeline(layers(), config_of(2, "whole"), loss_fn=smoothed), log_level="warning")
    result, _ = engine.train_batch([batch(0, number) for number in range(MICRO)])
    assert result.committed
    engine.close(keep_parameters=False)


def main() -> None:
    for case in sys.argv[1:]:
        globals()[case]()
        print(f"{case}: ok", flush=True)


if __name__ == "__main__":
    main()
