"""One rank of four: engines over images that ranks share, against plain torch; see spatial_test.py."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from refusing import refused
from torch import nn

import zeroth
from zeroth.parallel import image_layers, part_of_loss, plan_grid, split_images, split_rows

EXACT = 1e-12


def close(got: torch.Tensor | None, expected: torch.Tensor | None, what: object) -> None:
    assert got is not None and expected is not None, what
    assert got.shape == expected.shape, f"{what}: {got.shape} {expected.shape}"
    worst = (got - expected).abs().max().item()
    assert worst < EXACT * max(1.0, expected.abs().max().item()), f"{what}: {worst}"


class Squeeze(nn.Module):
    """Of each channel a factor, from the mean over the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean, self.weigh = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.norm(self.weigh(self.mean(x))))


class Net(nn.Module):
    """A mean at the end; strides leave fewer rows than ranks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.ReLU())
        self.squeeze = Squeeze(8)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 4, 3, padding="same", groups=2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.first(x))))
        return self.head(self.last(self.drop(self.squeeze(x + self.inner(x)))))


class Maps(nn.Module):
    """Maps and a mean, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 5, 3, padding=1))
        self.mean = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        maps = self.rows(x * scale)
        return {"maps": maps, "mean": self.mean(maps).flatten(1), "best": maps.argmax(1, keepdim=True)}


Loss = Callable[[nn.Module | zeroth.Engine, torch.Tensor, torch.Tensor], torch.Tensor]


def of_classes(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


def of_maps(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    output = model(images, scale=torch.tensor(0.5, dtype=torch.float64))
    assert output["maps"].shape == (*images.shape[:1], 5, *images.shape[2:])
    assert output["best"].shape == output["maps"][:, :1].shape and torch.equal(
        output["best"], output["maps"].argmax(1, keepdim=True)
    )
    targets = labels[:, None, None].expand(-1, *images.shape[2:])
    return F.cross_entropy(output["maps"], targets) + F.cross_entropy(output["mean"], labels)


def config_of(stage: int, rows: int = 1) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zeroth": {"mesh": {"rows": rows}},
    }


def plain_step(model: nn.Module, loss_of: Loss, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> nn.Module:
    """One step of plain torch, with the mean over the data ranks; each has statistics of its own."""
    plain = copy.deepcopy(model)
    for images, labels in parts:
        (loss_of(plain, images, labels) / len(parts)).backward()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    return plain


def check_engines(world: zeroth.World) -> None:
    torch.manual_seed(2)
    net, maps = Net().double(), Maps().double()
    low = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), Net().head
    ).double()
    rows: list[tuple[nn.Module, Loss, int, int, int]] = [
        (net, of_classes, 37, 4, 0),
        (net, of_classes, 37, 2, 3),
        (maps, of_maps, 9, 2, 0),
        (maps, of_maps, 9, 4, 3),
        (low, of_classes, 3, 4, 0),  # fewer rows than ranks
        (low, of_classes, 3, 4, 3),
    ]
    for model, loss_of, height, ranks, stage in rows:
        data = world.size // ranks
        images = torch.randn(2 * data, 3, height, 16, dtype=torch.float64)
        labels = torch.randint(0, 5, (2 * data,))
        parts = list(zip(images.split(2), labels.split(2), strict=True))
        expected = plain_step(model, loss_of, parts)
        what = f"stage {stage}, {type(model).__name__} of {height} rows over {ranks} ranks"

        own = copy.deepcopy(model)
        engine = zeroth.Engine(own, config_of(stage, ranks), world=world, log_level="off")
        assert engine.mesh is not None and engine.mesh.size("rows") == ranks and engine.mesh.size("dp") == data
        place = engine.mesh.coordinate("dp")
        loss = loss_of(engine, *parts[place])
        close(loss.detach(), loss_of(copy.deepcopy(model), *parts[place]).detach(), f"loss of {what}")
        engine.backward(loss)
        assert engine.step().committed
        for name, parameter in expected.named_parameters():
            close(engine.full(name), parameter.detach(), f"{name} of {what}")
        if data == 1:  # else data ranks have statistics of their own
            for (name, one), other in zip(own.named_buffers(), expected.buffers(), strict=True):
                close(one.double(), other.double(), f"{name} of {what}")
            own.eval()
            expected.eval()
            with torch.no_grad():
                got, whole = engine(*_inputs(own, images)), expected(*_inputs(own, images))
            for one, other in zip(_values(got), _values(whole), strict=True):
                close(one.double(), other.double(), f"evaluation of {what}")
        engine.close()

        if loss_of is of_maps:
            continue
        by_hand = copy.deepcopy(model)  # as documented: rows in, and a part of the loss
        group = world.mesh({"dp": data, "rows": ranks}).axis("rows")
        split_images(by_hand, group)
        engine = zeroth.Engine(by_hand, config_of(stage), world=world, log_level="off")
        loss = part_of_loss(of_classes(engine, split_rows(parts[place][0], group), parts[place][1]), group)
        engine.backward(loss)
        assert engine.step().committed
        for name, parameter in expected.named_parameters():
            close(engine.full(name), parameter.detach(), f"{name} of {what}, by hand")
        engine.close()


def _inputs(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (images, torch.tensor(0.5, dtype=torch.float64)) if isinstance(model, Maps) else (images,)


def _values(output: Any) -> list[torch.Tensor]:
    return list(output.values()) if isinstance(output, dict) else [output]


def check_planned(world: zeroth.World) -> None:
    """The grid that moves least is a mesh; a penalty on weights counts once."""
    torch.manual_seed(3)
    model = Net().double()
    images, labels = torch.randn(4, 3, 37, 16, dtype=torch.float64), torch.randint(0, 5, (4,))
    grid = plan_grid(image_layers(model, images[:1]), 2, world.size, 8, splits_linear=False)[0]
    assert grid.mesh == {"dp": grid.columns, "rows": grid.rows} and grid.rows > 1, grid
    parts = list(zip(images.chunk(grid.columns), labels.chunk(grid.columns), strict=True))

    def penalised(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return of_classes(model, images, labels) + model.head[3].weight.square().sum()

    expected = plain_step(model, penalised, parts)
    engine = zeroth.Engine(model, {**config_of(3), "zeroth": {"mesh": grid.mesh}}, world=world, log_level="off")
    assert engine.mesh is not None
    loss = of_classes(engine, *parts[engine.mesh.coordinate("dp")])
    with engine.gathered(model.head[3]):
        penalty = engine.part_of_loss(model.head[3].weight.square().sum())
        engine.backward(loss + penalty)
    assert engine.step().committed
    for name, parameter in expected.named_parameters():
        close(engine.full(name), parameter.detach(), f"{name} with a penalty")
    engine.close()


def check_dropout(world: zeroth.World) -> None:
    """Where values are whole ranks drop the same, on their rows others; ranks come with other generators."""
    group = world.mesh({"rows": world.size}).axis("rows")
    torch.manual_seed(5)
    model = Net(dropout=0.5).double()
    images = torch.randn(2, 3, 37, 16, dtype=torch.float64)
    rows = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5)).double()
    for one in (model, rows):
        split_images(one, group, cuts=True)
    torch.manual_seed(world.rank)
    before = torch.get_rng_state()
    outputs = [model(images) for _ in range(2)]
    for output in outputs:
        close(output, group.broadcast(output.detach().clone(), 0), "outputs of dropped values")
    assert not torch.equal(*outputs)
    assert not torch.equal(before, torch.get_rng_state())  # the next step draws others
    random = Functions(lambda x: F.dropout(x, 0.5)).double()
    split_alike(random, group)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        random(images)  # a mean over rows that drop others is the same on all ranks
        assert any("draws random numbers in eval" in str(one.message) for one in said), said
    random = Functions(lambda x: F.dropout(x, 0.5, random.training)).double()
    random.mean = nn.Sequential(random.mean, nn.Dropout(0.5))  # type: ignore[assignment]
    split_alike(random, group)
    with refused("MODEL", "have other values where all should have the same.*hint: nn.Dropout"):
        random(images)  # 37 rows: ranks have drawn more numbers or fewer
    kept = rows(torch.ones_like(images)[:, :, :8]).ne(0).unfold(2, 2, 2)  # two rows of each rank
    assert not torch.equal(kept[:, :, 0], kept[:, :, 1])
    assert abs(kept.double().mean().item() - 0.5) < 0.1


def split_alike(model: nn.Module, group: zeroth.Communicator) -> None:
    """With the weights of the first rank."""
    for parameter in model.parameters():
        group.broadcast(parameter.data, 0)
    split_images(model, group, cuts=True)


class Functions(nn.Module):
    """What a program may call in a forward between layers that are split."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.mean = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean(torch.relu(self.last(self.function(self.first(x))))).flatten(1)


class StandardConv(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


def check_refusals(world: zeroth.World) -> None:
    group = world.mesh({"rows": world.size}).axis("rows")
    images = torch.randn(2, 3, 16, 8, generator=torch.Generator().manual_seed(1))
    own = images.split(4, 2)[world.rank]
    torch.manual_seed(6)
    ends = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 16 * 8, 2))
    after = r"which: the forward of Functions \(after first \(Conv2d\), before last \(Conv2d\)\), which calls "
    cases: list[tuple[nn.Module, str]] = [
        (Functions(lambda x: F.max_pool2d(x, 3, 2)), after + "max_pool2d"),
        (Functions(lambda x: F.adaptive_avg_pool2d(x, 4)), after + "adaptive_avg_pool2d"),
        (Functions(lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear")), after + "interpolate"),
        (Functions(lambda x: x * x.mean((2, 3), keepdim=True)), after + "mean"),
        (Functions(lambda x: F.group_norm(x, 2)), after + "group_norm"),
        (Functions(lambda x: x.flip(2)), after + "flip"),
        (ends, r"which: 1 .Flatten.*cannot be multiplied"),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.LayerNorm([16, 8])), "which: 1 .LayerNorm"),
    ]
    for stage in (0, 3):
        for model, text in cases if stage == 0 else cases[:2]:
            model = copy.deepcopy(model)
            before = {name: one.clone() for name, one in model.named_buffers()}
            engine = zeroth.Engine(model, config_of(stage, world.size), world=world, log_level="off")
            for _ in range(2):  # and it is refused again
                with refused("MODEL", "computes other values with split images.*" + text):
                    engine(images)
            assert model.training and all(torch.equal(one, before[name]) for name, one in model.named_buffers())
            engine.close()
    for given, text in (([images], "whole images"), ([own, torch.zeros(2)], "")):
        model = copy.deepcopy(cases[0][0])
        model.function = lambda x: x  # type: ignore[assignment]
        split_images(model, group)
        if text:
            with refused("USAGE", "the same rows, as if they were whole images.*hint: split_rows"):
                model(*given)
        else:
            assert model(given[0]).shape == (2, 4)
    engine = zeroth.Engine(copy.deepcopy(model), {**config_of(0, world.size)}, world=world, log_level="off")
    engine.close()
    whole = copy.deepcopy(cases[0][0])
    whole.function = lambda x: x  # type: ignore[assignment]
    engine = zeroth.Engine(whole, config_of(3, world.size), world=world, log_level="off")
    with refused("MISMATCH", r"ranks that share images were given different samples.*ranks \[3\]"):
        engine(images + (world.rank == 3))
    with refused("USAGE", r"given none.*got: \[\[3, 16, 8\]\]"):
        engine(images[0])
    assert engine(images).shape == (2, 4)
    with refused("USAGE", "call split_images.. before the engine is built"):
        split_images(whole, group)
    engine.close()
    for config, text in (
        ({"zeroth": {"mesh": {"rows": 2, "sp": 2}}}, "share nothing else"),
        ({"zeroth": {"mesh": {"rows": 3}}}, "does not fit the number of ranks.*rows=3"),
    ):
        with refused("CONFIG", text):
            zeroth.Engine(Net(), config, world=world, log_level="off")
    with refused("MODEL", "no convolution over images"):
        zeroth.Engine(nn.Linear(2, 2), config_of(0, 2), world=world, log_level="off")
    outer = Net()
    split_images(outer, world.mesh({"rows": 2, "columns": 2}).axis("rows"))
    with refused("CONFIG", "do not follow each other.*hint: the innermost axis"):
        zeroth.Engine(outer, config_of(0), world=world, log_level="off")
    inner = Net()
    split_images(inner, group, cuts=True)
    with refused("USAGE", "a module inside of the engine's model.*which: Net"):
        zeroth.Engine(nn.Sequential(inner, nn.Linear(5, 2)), config_of(0), world=world, log_level="off")
    other = Net()
    split_images(other, group)
    with refused("CONFIG", "differ in the ranks that share images.*expected: 4"):
        zeroth.Engine(other, config_of(0, 2), world=world, log_level="off")
    for layer, text in (
        (nn.Conv3d(3, 3, 3), "looks along the rows"),
        (nn.BatchNorm3d(3), "looks along the rows"),
        (nn.ConvTranspose2d(3, 3, 3), "looks along the rows"),
        (StandardConv(3, 3, 3), "a forward of its own"),
    ):
        with refused("MODEL", f"which: 1 .*{text}"):
            split_images(nn.Sequential(nn.Conv2d(3, 3, 1), layer), group)


def check_failures(world: zeroth.World) -> None:
    """A function that fails on a rank without a row. The last: the ranks' calls differ then."""
    torch.manual_seed(7)
    model = Functions(lambda x: x * x.amax((2, 3), keepdim=True))
    split_images(model, world.mesh({"rows": world.size}).axis("rows"), cuts=True)
    where = "Functions.*IndexError: amax" if world.rank == 3 else r"last \(Conv2d\).*on other ranks something failed"
    with refused("MODEL", "which: the forward of " + where):
        model(torch.randn(2, 3, 3, 8))


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    check_engines(world)
    check_planned(world)
    check_dropout(world)
    check_refusals(world)
    check_failures(world)
    print("images: ok", flush=True)


main()
