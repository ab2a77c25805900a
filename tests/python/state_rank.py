"""One rank that reads and writes the states of engines at every stage; see state_test.py.

state_rank.py WHAT...
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import nn

import zeroth

STAGES = (0, 1, 2, 3)
MICRO_STEPS = 2


class Net(nn.Module):
    """A tied weight, a frozen one, running statistics, one that is not row major, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.GELU()) for _ in range(3))
        self.mix = nn.Parameter(torch.randn(6, 12).t())
        self.head = nn.Linear(12, 23, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(12), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("table", torch.arange(12, dtype=torch.int64), persistent=False)
        self.register_buffer("kept", torch.arange(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), y) + (hidden @ self.mix).square().mean()


def make_net(dtype: torch.dtype, seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def make_engine(
    stage: int, dtype: torch.dtype = torch.float32, seed: int = 1, micro_steps: int = MICRO_STEPS, **optimizer: object
) -> zeroth.Engine:
    model = make_net(dtype, seed)
    return zeroth.Engine(
        model,
        {
            "zero_optimization": {"stage": stage},
            "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 0.01}},
            "gradient_accumulation_steps": micro_steps,
            "train_micro_batch_size_per_gpu": 8,
        },
        units=model.blocks,
        log_level="warning",
    )


def batch(rank: int, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + 10 * micro_step + rank)
    x = torch.randint(23, (8,), generator=random)
    return x, (x * 3 + 1) % 23


def backward(engine: zeroth.Engine, step: int, micro_step: int) -> None:
    engine.backward(engine(*batch(engine.rank, step, micro_step)))


def train(engine: zeroth.Engine, first: int, steps: int, micro_steps: int = MICRO_STEPS) -> None:
    for step in range(first, first + steps):
        for micro_step in range(micro_steps):
            backward(engine, step, micro_step)
            engine.step()


@contextlib.contextmanager
def refused(code: str, text: str) -> Iterator[None]:
    try:
        yield
    except zeroth.Error as error:
        assert error.code == code and text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert list(one) == list(other), (list(one), list(other))
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.stride() == other[name].stride(), name
        assert torch.equal(tensor, other[name]), name
    return True


TRAINED = ["mix", "embed.weight", "none"] + [
    f"blocks.{block}.{name}" for block in range(3) for name in ("0.weight", "0.bias", "1.weight", "1.bias")
]


def reads() -> None:
    """Every kind, at every stage: the same bits, and those of plain torch."""
    for dtype in (torch.float64, torch.bfloat16):
        expected: dict[str, dict[str, torch.Tensor]] = {}
        for stage in STAGES:
            engine = make_engine(stage, dtype)
            train(engine, 0, 1)
            assert engine.full("mix", "grad") is None
            for micro_step in range(MICRO_STEPS):
                backward(engine, 1, micro_step)
                if micro_step == 0:
                    with refused("USAGE", "gradients are not complete"):
                        engine.full("mix", "grad")
                    engine.step()
            with refused("USAGE", "not summed yet"):
                engine.local("grad")
            got = {"grad": {name: engine.full(name, "grad") for name in TRAINED if name != "none"}}
            for name, part in engine.local("grad").items():
                whole = memory_order(got["grad"][name])
                assert torch.equal(part.tensor, whole[part.begin : part.end]), name
            norm = sum(grad.double().square().sum() for grad in got["grad"].values()).sqrt()
            result = engine.step()
            assert abs(result.grad_norm - norm) < 1e-6 * norm, (result.grad_norm, norm)
            for kind in ("param", "master", "exp_avg", "exp_avg_sq"):
                names = [*TRAINED, "scale"] if kind in ("param", "master") else TRAINED
                got[kind] = {name: engine.full(name, kind) for name in names}
                for name, part in engine.local(kind).items():
                    assert part.shape == tuple(got[kind][name].shape)
                    whole = memory_order(got[kind][name])
                    assert torch.equal(part.tensor, whole[part.begin : part.end]), (name, kind)
            assert got["master"]["mix"].dtype == (dtype if dtype == torch.float64 else torch.float32)
            assert got["param"]["mix"].stride() == (1, 12)
            assert torch.equal(engine.full("head.weight"), got["param"]["embed.weight"])
            assert got["param"]["none"].shape == (0, 3)
            for name in TRAINED:
                # The parameter is the master rounded, ties away from zero; see docs/numbers.md.
                assert (got["master"][name].to(dtype) != got["param"][name]).sum() <= 1, name
            if dtype == torch.bfloat16:
                assert any((got["master"][name] != got["param"][name]).any() for name in TRAINED)
            only = engine.full("mix", ranks=1)
            assert (only is None) == (engine.rank != 1)
            assert (engine.full("mix", ranks=[0]) is None) == (engine.rank != 0)
            for kind, states in got.items():
                assert same(expected.setdefault(kind, states), states), (stage, kind)
            with refused("USAGE", 'did you mean "mix"?'):
                engine.full("mixx")
            with refused("USAGE", 'did you mean "exp_avg"?'):
                engine.full("mix", "exp_av")
            with refused("USAGE", "a parameter has no such state"):
                engine.full("scale", "exp_avg")
            with refused("USAGE", "there is no such rank"):
                engine.full("mix", ranks=7)
            with refused("USAGE", "no rank wants"):
                engine.full("mix", ranks=[])
            engine.close()
        if dtype == torch.float64:
            against_torch(expected["grad"])


def memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def against_torch(grads: dict[str, torch.Tensor]) -> None:
    """Of the second step, whose weights the first step has changed: with the update of the optimizer of torch."""
    world = zeroth.World.from_environment().size
    model = make_net(torch.float64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(world):
            for micro_step in range(MICRO_STEPS):
                (model(*batch(rank, step, micro_step)) / (world * MICRO_STEPS)).backward()
        if step == 0:
            optimizer.step()
    named = dict(model.named_parameters())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, named[name].grad, rtol=1e-6, atol=1e-6)


def updates() -> None:
    """What full(..., "grad") gives is what the update takes, to the bit; also where a further backward follows."""
    expected = None
    for stage in STAGES:
        engine = make_engine(stage, micro_steps=1, type="SGD", params={"lr": 1.0})
        before = engine.full("blocks.1.0.weight")
        backward(engine, 0, 0)
        first = engine.full("blocks.1.0.weight", "grad")
        backward(engine, 0, 1)
        both = engine.full("blocks.1.0.weight", "grad")
        assert not torch.equal(first, both)
        assert torch.equal(both, engine.full("blocks.1.0.weight", "grad"))
        engine.step()
        after = engine.full("blocks.1.0.weight")
        assert torch.equal(after, before - both)
        expected = after if expected is None else expected
        assert torch.equal(after, expected), stage
        # Without reads between: the same.
        unread = make_engine(stage, micro_steps=1, type="SGD", params={"lr": 1.0})
        backward(unread, 0, 0)
        backward(unread, 0, 1)
        unread.step()
        assert torch.equal(unread.full("blocks.1.0.weight"), expected)
        engine.close()
        unread.close()


def dictionaries() -> None:
    """state_dict() and load_state_dict() at every stage."""
    other = make_net(torch.float32, seed=5)
    plain = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    plain["kept"] = torch.tensor([7, 8, 9])
    expected = None
    for dtype in (torch.float32, torch.bfloat16):
        for stage in STAGES:
            engine = make_engine(stage, dtype)
            train(engine, 0, 1)
            moments = engine.full("mix", "exp_avg")
            got = engine.state_dict()
            if engine.rank == 0:
                assert list(got) == list(plain), list(got)
                assert got["head.weight"] is got["embed.weight"]
                make_net(dtype).load_state_dict(got)  # plain torch takes it
                assert all(not tensor.requires_grad for tensor in got.values())
                if dtype == torch.float32:
                    expected = got if expected is None else expected
                    assert same(got, expected)
            else:
                assert got == {}
            assert list(engine.state_dict(ranks=None)) == list(plain)
            assert set(engine.state_dict("exp_avg", ranks=None)) == {*TRAINED, "head.weight"}
            # Nothing is changed by what does not fit, and all ranks hear of it.
            kept = engine.state_dict("master", ranks=None)
            wrong = dict(plain, mix=torch.zeros(2, 2))
            for values, text in [
                (wrong, "mix: Float [2, 2] for"),
                (dict(plain, kept=torch.zeros(3)), "kept: Float [3] for Long [3]"),
                ({name: tensor for name, tensor in plain.items() if name != "mix"}, "missing mix"),
                (dict(plain, more=torch.zeros(1)), "beyond the model more"),
                (dict(plain, mix=[1, 2]), "no dense tensor"),
            ]:
                with refused("MODEL", text):
                    engine.load_state_dict(values if engine.rank == 0 else None)
            backward(engine, 1, 0)
            with refused("USAGE", "in the middle of a step"):
                engine.load_state_dict(plain)
            engine.zero_grad()
            now = engine.state_dict("master", ranks=None)
            # Forwards of rank 0 have moved its statistics; weights are as they were.
            assert all(
                torch.equal(now[name], kept[name]) for name in now if ".running_" not in name and "num_" not in name
            )
            part = {"scale": plain["scale"].double(), "unknown": plain["mix"]}
            report = engine.load_state_dict(part, strict=False)
            assert report.unexpected == ["unknown"] and "mix" in report.missing and "scale" not in report.missing
            report = engine.load_state_dict(iter(plain.items()) if engine.rank == 0 else None)
            assert report == zeroth.WeightReport(missing=[], unexpected=[])
            for name, tensor in engine.state_dict("master", ranks=None).items():
                float32 = plain[name].dtype == torch.float32 and name not in ("scale",) and "running" not in name
                want = plain[name] if float32 else plain[name].to(tensor.dtype)
                assert torch.equal(tensor, want), name
            for name, tensor in engine.state_dict(ranks=None).items():
                away = (tensor.double() - plain[name].double()).abs()
                assert (away <= plain[name].abs() * (2**-8 if dtype == torch.bfloat16 else 0)).all(), name
            assert torch.equal(engine.full("mix", "exp_avg"), moments)
            train(engine, 1, 1)
            engine.close()


def edits() -> None:
    """gathered(modify_on=...), at every stage."""
    for dtype in (torch.float32, torch.bfloat16):
        expected = None
        for stage in STAGES:
            engine = make_engine(stage, dtype)
            train(engine, 0, 2)
            weight, bias = engine.module.blocks[1][0].weight, engine.module.blocks[1][0].bias
            name = "blocks.1.0.weight"
            before = {kind: engine.full(name, kind) for kind in ("param", "master")}
            with engine.gathered(weight, modify_on=0), torch.no_grad():
                if engine.rank == 0:
                    weight[2, 3] = 0.5
            after = {kind: engine.full(name, kind) for kind in ("param", "master")}
            for kind in before:
                before[kind][2, 3] = 0.5
                assert torch.equal(before[kind], after[kind]), (stage, kind)  # all others kept their bits
            with engine.gathered(engine.module.blocks[1], modify_on="all"), torch.no_grad():
                weight.mul_(2.0)
                bias.zero_()
            assert torch.equal(engine.full(name), before["param"] * 2)
            assert not engine.full("blocks.1.0.bias", "master").any()
            kept = engine.full(name, "master")
            with refused("MISMATCH", "blocks.1.0.weight"):
                with engine.gathered(weight, modify_on="all"), torch.no_grad():
                    weight[0, 0] = float(engine.rank)
            assert torch.equal(engine.full(name, "master"), kept)
            if stage == 3:
                with refused("MODEL", "parameter"):
                    with engine.gathered(weight, modify_on=0), torch.no_grad():
                        if engine.rank == 1:
                            bias[0] = 1.0  # on another rank, and none that was asked for

                with refused("MODEL", "written in place"):
                    with engine.gathered(weight), torch.no_grad():
                        weight[0, 0] = 1.0
            with contextlib.suppress(ZeroDivisionError):
                with engine.gathered(weight, modify_on="all"), torch.no_grad():
                    weight[0, 0] = 3.0
                    raise ZeroDivisionError
            assert torch.equal(engine.full(name, "master"), kept)
            backward(engine, 2, 0)
            with refused("USAGE", "in the middle of a step"):
                with engine.gathered(weight, modify_on=0):
                    pass
            engine.zero_grad()
            train(engine, 2, 1)
            got = engine.full(name, "master")
            expected = got if expected is None else expected
            assert torch.equal(got, expected), stage
            engine.close()


def averages() -> None:
    """zeroth.Average: the formula, the same bits at every stage, evaluation, checkpoints."""
    for dtype in (torch.float32, torch.bfloat16):
        expected: dict[str, torch.Tensor] | None = None
        for stage in STAGES:
            engine = make_engine(stage, dtype)
            before = engine.memory_report().planned["optimizer"]
            average = zeroth.Average(engine, decay=0.75)
            assert engine.memory_report().planned["optimizer"] > before
            oracle = engine.state_dict("master", ranks=None)
            for step in range(3):
                train(engine, step, 1)
                average.update()
                masters = engine.state_dict("master", ranks=None)
                for name in ("mix", "embed.weight"):
                    oracle[name] = oracle[name] + 0.25 * (masters[name] - oracle[name])
            got = average.state_dict(ranks=None)
            assert torch.equal(got["mix"], oracle["mix"]) and got["mix"].dtype == torch.float32
            assert got["head.weight"] is got["embed.weight"] and torch.equal(
                got["embed.weight"], oracle["embed.weight"]
            )
            assert torch.equal(got["scale"], masters["scale"]) and list(got) == list(masters)
            if expected is None:
                expected = got
            assert same(got, expected), stage
            assert torch.equal(engine.full("mix", "average"), got["mix"])

            x, y = batch(5, 0, 0)
            engine.eval()
            with torch.no_grad():
                own = engine(x, y)
                with average.applied():
                    averaged = engine(x, y)
                    assert torch.equal(engine.full("mix", "master"), got["mix"])
                    with refused("USAGE", "while an average of weights is applied"):
                        engine.step()
                    with tempfile.TemporaryDirectory() as folder, refused("USAGE", "while an average"):
                        engine.save(folder)
                assert torch.equal(engine(x, y), own) and not torch.equal(averaged, own)
            engine.train()
            plain = make_net(dtype)
            plain.load_state_dict(
                {name: tensor.to(dtype) for name, tensor in got.items() if tensor.is_floating_point()}, strict=False
            )
            plain.eval()
            with torch.no_grad():
                torch.testing.assert_close(
                    averaged, plain(x, y), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
                )
            assert same(engine.state_dict("master", ranks=None), masters)  # bit for bit

            with refused("USAGE", "a name of its own"):
                zeroth.Average(engine)
            with refused("USAGE", "a name of its own"):
                zeroth.Average(engine, name="exp_avg")
            with refused("USAGE", "an average cannot decay so"):
                average.update(decay=1.5)
            backward(engine, 3, 0)
            with refused("USAGE", "in the middle of a step"):
                with average.applied():
                    pass
            engine.zero_grad()
            engine.close()


def saved_averages(folder: str) -> None:
    """save() and load() have them, at any stage; engines without one, and checkpoints without one."""
    engine = make_engine(3)
    average = zeroth.Average(engine, decay=0.5)
    train(engine, 0, 1)
    average.update()
    train(engine, 1, 1)
    got = average.state_dict(ranks=None)
    engine.save(folder)
    engine.close()

    engine = make_engine(1, seed=9)
    average = zeroth.Average(engine, decay=0.5)
    assert not engine.load(folder).unexpected
    assert same(average.state_dict(ranks=None), got)
    engine.close()

    engine = make_engine(2, seed=9)
    loaded = engine.load(folder)
    assert loaded.unexpected and all(name.endswith("/average") for name in loaded.unexpected), loaded.unexpected
    engine.close()

    engine = make_engine(0, seed=9)
    other = zeroth.Average(engine, name="slow")
    with refused("CHECKPOINT", "mix/slow"):
        engine.load(folder)
    loaded = engine.load(folder, strict=False)
    assert "mix/slow" in loaded.missing and "mix/average" in loaded.unexpected, loaded
    other.update(decay=0.0)
    assert torch.equal(engine.full("mix", "slow"), engine.full("mix"))
    engine.close()


def statistics() -> None:
    """After step() every rank has rank 0's running statistics, so an evaluation on any of them gives one answer."""
    for stage in (0, 3):
        engine = make_engine(stage)
        x, y = batch(9, 0, 0)
        for step in range(2):
            train(engine, step, 1)
            engine.eval()
            with torch.no_grad():
                loss = engine(x, y)
            mean = engine.average(loss.item())
            assert mean == loss.item(), (stage, step, mean, loss.item())
            kept = engine.full("blocks.0.1.running_mean")
            assert kept is not None and torch.equal(kept, engine.module.blocks[0][1].running_mean)
            count = int(engine.module.blocks[0][1].num_batches_tracked)
            assert count == MICRO_STEPS * (step + 1), count
            engine.train()
        engine.close()


def later() -> None:
    """Parameters that train from the third step on, in no group: as in plain torch, at every stage."""
    expected = None
    for stage in STAGES:
        model = make_net(torch.float64)
        model.blocks[1].requires_grad_(False)
        engine = zeroth.Engine(
            model,
            {
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "train_micro_batch_size_per_gpu": 8,
            },
            units=model.blocks,
            trainable_later=[model.blocks[1]],
            log_level="warning",
        )
        frozen = engine.full("blocks.1.0.weight")
        for step in range(4):
            if step == 2:
                assert torch.equal(engine.full("blocks.1.0.weight"), frozen)
                model.blocks[1].requires_grad_(True)
                model.blocks[0].requires_grad_(False)
                other = engine.full("blocks.0.0.weight")
            backward(engine, step, 0)
            engine.step()
        assert not torch.equal(engine.full("blocks.1.0.weight"), frozen)
        assert torch.equal(engine.full("blocks.0.0.weight"), other)
        with refused("MODEL", "name it in trainable_later"):
            model.scale.requires_grad_(True)
            backward(engine, 4, 0)
        model.scale.requires_grad_(False)
        got = engine.state_dict("master", ranks=None)
        if expected is None:
            expected = got
        assert same(got, expected), stage
        engine.close()
    # Plain torch: moments of what is frozen stay as they are.
    world = zeroth.World.from_environment().size
    model = make_net(torch.float64)
    model.blocks[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not model.scale], lr=0.01)
    for step in range(4):
        if step == 2:
            model.blocks[1].requires_grad_(True)
            model.blocks[0].requires_grad_(False)
        optimizer.zero_grad()
        for rank in range(world):
            (model(*batch(rank, step, 0)) / world).backward()
        optimizer.step()
    assert expected is not None
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.detach(), rtol=1e-6, atol=1e-6)

    for one in (model.scale, model.blocks[0]):  # instead of a list
        model = make_net(torch.float32).requires_grad_(False)
        one = model.scale if isinstance(one, nn.Parameter) else model.blocks[0]
        engine = zeroth.Engine(model, trainable_later=one, log_level="warning")
        one.requires_grad_(True)
        backward(engine, 0, 0)
        assert engine.step().committed
        engine.close()
    with refused("USAGE", "neither a parameter nor a module"):
        zeroth.Engine(make_net(torch.float32), trainable_later="scale")  # type: ignore[arg-type]
    with refused("USAGE", "none of the module's"):
        zeroth.Engine(make_net(torch.float32), trainable_later=[torch.nn.Parameter(torch.ones(1))])


def penalties() -> None:
    """A penalty on weights outside their units, in one line, at every stage."""
    expected = None
    for stage in STAGES:
        engine = make_engine(stage, micro_steps=1)
        blocks = engine.module.blocks
        for step in range(2):
            loss = engine(*batch(engine.rank, step, 0))
            with engine.gathered(blocks):
                loss = loss + 0.5 * sum(parameter.square().sum() for parameter in blocks.parameters())
            engine.backward(loss)
            engine.step()
        got = engine.state_dict(ranks=None)
        engine.close()
        if expected is None:
            expected = got
        assert same(got, expected), stage
    world = zeroth.World.from_environment().size
    model = make_net(torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(world):
            (model(*batch(rank, step, 0)) / world).backward()
        (0.5 * sum(parameter.square().sum() for parameter in model.blocks.parameters())).backward()
        optimizer.step()
    assert expected is not None
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.detach(), rtol=1e-3, atol=1e-4)


class Fancy(Net):
    """Initialised as scripts do: over again after the layers' own way, with casts, copies, ties and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.lstm = nn.LSTM(4, 3)
        self.square = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 5)))
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(7, 7), std=0.02))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        for number, block in enumerate(self.blocks):
            nn.init.normal_(block[0].weight, std=0.1)
            with torch.no_grad():
                block[0].weight.mul_(1 / (number + 1))
                block[0].bias[3:].zero_()


def own_bytes() -> int:
    """Of this process, without files."""
    (line,) = [line for line in open("/proc/self/status", encoding="utf-8") if line.startswith("RssAnon:")]  # noqa: SIM115
    return int(line.split()[1]) << 10


def meta() -> None:
    """A deferred module has the weights of an ordinary build, and at most one unit of them at once."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        eager = {name: tensor.clone() for name, tensor in Fancy().to(dtype).state_dict().items()}
        later = torch.rand(4)
        for stage in (0, 3):
            torch.manual_seed(3)
            model = zeroth.deferred(lambda: Fancy().to(dtype))  # noqa: B023
            assert torch.equal(torch.rand(4), later)
            assert all(parameter.is_meta for parameter in model.parameters())
            objects = dict(model.named_parameters())
            with refused("CONFIG", "cannot be split"):
                zeroth.Engine(model, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}})
            assert all(parameter.is_meta for parameter in model.parameters())
            engine = zeroth.Engine(
                model, {"zero_optimization": {"stage": stage}}, units=model.blocks, log_level="warning"
            )
            assert all(parameter is objects[name] for name, parameter in model.named_parameters())
            assert same(engine.state_dict(ranks=None), eager)
            engine.backward(engine(*batch(engine.rank, 0, 0)))
            assert engine.step().committed
            engine.close()
    width = 256
    torch.manual_seed(3)
    model = zeroth.deferred(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(12))))
    engine = zeroth.Engine(model, {"zero_optimization": {"stage": 3}}, log_level="warning")
    unit = 4 * width * (width + 1)
    peak = engine.memory_report().construction_peak
    assert unit <= peak <= 2 * unit + 4096, (unit, peak)
    engine.close()
    torch.empty(8 << 20, dtype=torch.uint8)  # once it is gone, the heap has what is smaller
    before = own_bytes()
    model = zeroth.deferred(lambda: nn.ModuleList(nn.Linear(512, 512 * (1, 3, 5)[number % 3]) for number in range(60)))
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert own_bytes() - before < whole / 2, (own_bytes() - before, whole)
    with refused("MODEL", "has no values"):
        model = zeroth.deferred(lambda: nn.Linear(3, 3))
        zeroth.Engine(model.bfloat16())
    with refused("MODEL", "not on the meta device"):
        zeroth.deferred(lambda: nn.init.normal_(torch.Tensor(3)))  # type: ignore[type-var, arg-type, return-value]


def pretrained(folder: str) -> None:
    """Files of Hugging Face's kind, whole and in shards, into engines at every stage and into a module."""
    from safetensors.torch import save_file

    path = pathlib.Path(folder)
    rank = zeroth.World.from_environment().rank
    other = make_net(torch.float32, seed=5)
    plain = {name: tensor.contiguous() for name, tensor in other.state_dict().items() if name != "head.weight"}
    plain["kept"] = torch.tensor([7, 8, 9])
    if rank == 0:
        (path / "one").mkdir(parents=True)
        (path / "two").mkdir()
        save_file(plain, path / "one" / "model.safetensors")
        save_file(
            {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in plain.items()},
            path / "half.safetensors",
        )
        names = sorted(plain)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, chosen in parts.items():
            save_file({"base." + name: plain[name] for name in chosen}, path / "two" / file)
        index = {"weight_map": {"base." + name: file for file, chosen in parts.items() for name in chosen}}
        (path / "two" / "model.safetensors.index.json").write_text(json.dumps(index))
        whole = (path / "one" / "model.safetensors").read_bytes()
        (path / "cut.safetensors").write_bytes(whole[:-4])
        (path / "odd.safetensors").write_bytes(whole.replace(b'"F32"', b'"F99"', 1))
        (path / "short.safetensors").write_bytes(b"abc")
    for dtype in (torch.float32, torch.bfloat16):
        for stage in STAGES:
            engine = make_engine(stage, dtype)
            if stage == 0:
                engine.barrier("the files are there")
            zeroth.load_pretrained(engine, path / "one")
            for name, tensor in engine.state_dict("master", ranks=None).items():
                value = plain[name if name != "head.weight" else "embed.weight"]
                assert torch.equal(tensor, value.to(tensor.dtype)), (name, stage, dtype)
            zeroth.load_pretrained(engine, path / "half.safetensors")
            assert torch.equal(engine.full("mix", "master"), plain["mix"].bfloat16().to(torch.float32))
            report = zeroth.load_pretrained(engine, path / "two", rename=lambda name: name.removeprefix("base."))
            assert report == zeroth.WeightReport(missing=[], unexpected=[])
            assert torch.equal(engine.full("embed.weight", "master"), plain["embed.weight"])
            for file, code, text in [
                ("cut.safetensors", "IO", "cut or corrupt"),
                ("odd.safetensors", "IO", "F99"),
                ("short.safetensors", "IO", "cut or corrupt"),
                ("none", "IO", "there are no weights"),
                ("two", "MODEL", "missing"),
            ]:
                with refused(code, text):
                    zeroth.load_pretrained(engine, path / file)
            with refused("IO", "rank 1"):
                zeroth.load_pretrained(engine, path / ("none" if rank == 1 else "one"))
            with refused("MISMATCH", "other weights"):
                zeroth.load_pretrained(engine, path / ("half.safetensors" if rank == 1 else "one"))
            assert torch.equal(engine.full("embed.weight", "master"), plain["embed.weight"])
            train(engine, 0, 1)
            engine.close()
    module = make_net(torch.float32)
    zeroth.load_pretrained(module, path / "one")
    assert torch.equal(module.mix, plain["mix"]) and torch.equal(module.head.weight, plain["embed.weight"])
    with refused("MODEL", "base.kept"):
        zeroth.load_pretrained(module, path / "two")


def main() -> None:
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], None]] = {
        call.__name__: call
        for call in (reads, updates, dictionaries, edits, averages, statistics, later, penalties, meta)
    }
    for what in sys.argv[1:]:
        name, _, folder = what.partition("=")
        if folder:
            {"saved_averages": saved_averages, "pretrained": pretrained}[name](folder)
        else:
            calls[name]()
        print(f"{zeroth.World.from_environment().rank} {name} done", flush=True)


if __name__ == "__main__":
    main()
