"""One rank: images that are split along their height, against whole ones; see spatial_test.py."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zeroth
from zeroth.parallel import (
    GridCost,
    Window,
    copy_to_group,
    fetch_rows,
    gather_from_group,
    halo_exchange,
    heights_of,
    image_layers,
    part_of_loss,
    part_sizes,
    plan_grid,
    received_rows,
    spatial_batch_norm,
    spatial_conv2d,
    spatial_pool2d,
    split_images,
    split_rows,
    whole_rows,
)

EXACT = 1e-12


def close(got: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert got.shape == expected.shape, f"{what}: {got.shape} {expected.shape}"
    if got.numel() > 0:
        worst = (got - expected).abs().max().item()
        assert worst < EXACT * max(1.0, expected.abs().max().item()), f"{what}: {worst}"


def rows_of(whole: torch.Tensor, heights: list[int], rank: int) -> torch.Tensor:
    return whole.split(heights, 2)[rank]


def check_window(
    group: zeroth.Communicator,
    heights: list[int],
    of_whole: Callable[..., torch.Tensor],
    of_part: Callable[..., Any],
    what: object,
) -> None:
    """Values, gradient of the rows and the sum of the gradients of the weights."""
    generator = torch.Generator().manual_seed(sum(heights))
    whole = torch.randn(2, 4, sum(heights), 7, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(6, 2, 3, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    expected = of_whole(whole, weight)
    toward = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(toward)
    sizes = part_sizes(expected.size(2), group.size)
    part = rows_of(whole.detach(), heights, group.rank).clone().requires_grad_()
    own = weight.detach().clone().requires_grad_()
    got = of_part(part, own, None)
    close(got, rows_of(expected.detach(), sizes, group.rank), what)
    got.backward(rows_of(toward, sizes, group.rank))
    assert part.grad is not None and whole.grad is not None
    close(part.grad, rows_of(whole.grad, heights, group.rank), what)
    if weight.grad is not None:
        total = own.grad if own.grad is not None else torch.zeros_like(own)
        close(group.all_reduce(total), weight.grad, what)
    again = of_part(part.detach(), own, heights)  # nobody asks for heights
    close(again, got, what)


def check_windows(group: zeroth.Communicator) -> None:
    P = group.size
    uneven = [[5, 2, 1, 3], [3, 0, 6, 2], part_sizes(11, 4), [1, 1, 1, 1]]
    for heights in [one[:P] if sum(one[:P]) > 3 else [4] * P for one in uneven]:
        for stride, padding, dilation in itertools.product((1, 2), (0, 1), (1, 2)):
            if sum(heights) + 2 * padding < 2 * dilation + 1:
                continue
            more: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation}
            check_window(
                group,
                heights,
                lambda x, w: F.conv2d(x, w, None, groups=2, **more),
                lambda x, w, h: spatial_conv2d(x, w, None, group, groups=2, heights=h, **more),
                ("conv", heights, more),
            )
            pool: dict[str, Any] = {"stride": stride, "padding": padding}
            for kind, extra in (("max", {"dilation": dilation}), ("avg", {}), ("avg", {"count_include_pad": False})):
                plain = F.max_pool2d if kind == "max" else F.avg_pool2d
                check_window(
                    group,
                    heights,
                    lambda x, w: plain(x, (3, 2), **pool, **extra),
                    lambda x, w, h: spatial_pool2d(x, kind, (3, 2), group, heights=h, **pool, **extra),  # type: ignore[arg-type]
                    (kind, heights, pool, extra),
                )
    check_window(
        group,
        part_sizes(11, P),
        lambda x, w: F.conv2d(x, w, None, groups=2, padding="same"),
        lambda x, w, h: spatial_conv2d(x, w, None, group, groups=2, padding="same", heights=h),
        "same",
    )


def check_halos(group: zeroth.Communicator) -> None:
    heights = ([3, 1, 4, 2] * 2)[: group.size]
    whole = torch.arange(float(sum(heights)), dtype=torch.float64)[:, None].expand(-1, 2).contiguous()
    part = whole.split(heights)[group.rank].clone().requires_grad_()
    begin = sum(heights[: group.rank])
    end = begin + heights[group.rank]
    got = halo_exchange(part, 0, 2, 1, group)
    close(got.detach(), whole[max(0, begin - 2) : end + 1], "halo")
    got.sum().backward()
    counts = torch.zeros(sum(heights))
    for rank in range(group.size):
        first = sum(heights[:rank])
        counts[max(0, first - 2) : first + heights[rank] + 1] += 1
    assert part.grad is not None
    close(part.grad[:, 0], counts[begin:end].double(), "a row's gradient is the sum over who has it")

    wanted = [(0, 2)] * group.size  # the first rows, for everybody
    close(fetch_rows(whole.split(heights)[group.rank], 0, heights, wanted, group), whole[:2], "fetch")
    for call, text in (
        (lambda: halo_exchange(part, 0, -1, 0, group), "rows from 0"),
        (lambda: fetch_rows(part, 0, heights, [(0, 99)] * group.size, group), "within 0 to"),
        (lambda: fetch_rows(part[1:], 0, heights, wanted, group), "rows along dimension 0"),
        (lambda: spatial_conv2d(torch.ones(1, 1, 1, 9), torch.ones(1, 1, 9, 9), None, group), "larger than the image"),
    ):
        try:
            call()
        except zeroth.Error as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")


def check_bytes(group: zeroth.Communicator) -> None:
    """What is received is what the formula says: only rows that travel."""
    heights = part_sizes(13, group.size)
    cut = Window(size=5, before=2, after=2).cut(heights)
    rows = received_rows(heights, cut.wanted)
    assert rows[0] == (2 if group.size > 1 else 0), rows
    part = torch.ones(2, 3, heights[group.rank], 7, dtype=torch.float64, requires_grad=True)
    group.reset_received()
    out = spatial_conv2d(part, torch.ones(3, 3, 5, 5, dtype=torch.float64), None, group, padding=2, heights=heights)
    assert group.received_bytes == rows[group.rank] * 2 * 3 * 7 * 8, (group.received_bytes, rows)
    out.sum().backward()


class GridNet(nn.Module):
    """Convolutions, then linear layers over whole images."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.rows = nn.Sequential(
            nn.Conv2d(3, channels, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(channels, 4, 3, padding=1),
            nn.BatchNorm2d(4, track_running_stats=False),
        )
        self.first, self.last = nn.Linear(4 * 8 * 4, features), nn.Linear(features, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rows(x).flatten(1)
        return self.last(torch.tanh(self.first(x)))


def own_linear(x: torch.Tensor, linear: nn.Linear, group: zeroth.Communicator) -> torch.Tensor:
    """With this rank's outputs computed here; the others' come."""
    sizes = part_sizes(linear.out_features, group.size)
    weight, bias = (one.split(sizes)[group.rank] for one in (linear.weight, linear.bias))
    return gather_from_group(F.linear(copy_to_group(x, group), weight, bias), 1, group, sizes)


def check_grid(
    world: zeroth.World,
    grid: GridCost,
    model: GridNet,
    images: torch.Tensor,
    labels: torch.Tensor,
    gradients: list[torch.Tensor],
) -> int:
    """One step on a grid. Returns the bytes that all ranks received."""
    mesh = world.mesh({"columns": grid.columns, "rows": grid.rows})
    columns, rows = mesh.axis("columns"), mesh.axis("rows")
    model = copy.deepcopy(model)
    split_images(model, rows)
    mine = [one.tensor_split(grid.columns)[columns.rank] for one in (images, labels)]
    part = split_rows(mine[0], rows)
    mesh.reset_received()
    x = model.rows(part)
    x = gather_from_group(x, 2, rows, heights_of(x, 2, rows)).flatten(1)
    x = own_linear(torch.tanh(own_linear(x, model.first, rows)), model.last, rows)
    (F.cross_entropy(x, mine[1], reduction="sum") / len(labels)).backward()
    small = [one.grad.reshape(-1) for one in model.rows.parameters()]
    total = mesh.world.all_reduce(torch.cat(small))
    linear = [
        one.grad.split(part_sizes(len(one), rows.size))[rows.rank].reshape(-1)
        for one in (*model.first.parameters(), *model.last.parameters())
    ]
    own = columns.all_reduce(torch.cat(linear))
    received = sum(mesh.received().values())
    if world.size not in mesh.sizes.values():  # else the world's calls are counted there
        received += mesh.world.received_bytes
    close(total, torch.cat([one.reshape(-1) for one in gradients[: len(small)]]), grid)
    parts = [other.split(part_sizes(len(other), rows.size))[rows.rank] for other in gradients[len(small) :]]
    close(own, torch.cat([one.reshape(-1) for one in parts]), grid)
    return int(world.mesh({"all": world.size}).world.all_reduce(torch.tensor([received])))


def check_grids(world: zeroth.World) -> None:
    """Each grid has the gradient of one process, and moves the bytes of its formula; the plan is the one that moves
    least."""
    chosen = []
    for channels, features, batch in ((24, 6, 8), (8, 16, 8), (4, 400, 4), (8, 6, 2)):
        torch.manual_seed(4)
        model = GridNet(channels, features).double()
        images, labels = torch.randn(batch, 3, 16, 8, dtype=torch.float64), torch.randint(0, 5, (batch,))
        layers = image_layers(model, images[:1])
        plan = plan_grid(layers, batch, world.size, 8)
        counted = {}
        for grid in plan:
            whole = copy.deepcopy(model)
            for own, label in zip(images.tensor_split(grid.columns), labels.tensor_split(grid.columns), strict=True):
                (F.cross_entropy(whole(own), label, reduction="sum") / batch).backward()  # statistics of a column
            gradients = [one.grad for one in whole.parameters()]
            counted[grid.rows] = check_grid(world, grid, model, images, labels, gradients)
            assert counted[grid.rows] == grid.total, f"{grid}: {counted[grid.rows]} counted"
        assert plan[0].rows == min(counted, key=lambda rows: (counted[rows], rows)), (plan, counted)
        chosen.append(plan[0].rows)
    assert chosen == [1, 2, 4, 2], chosen  # each is best somewhere; two images leave no grid of one row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.ReLU())
        self.last = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(8, 4, 3, padding="same", groups=2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.first(x))))
        return self.head(self.last(x + self.inner(x)))


def check_model(world: zeroth.World, group: zeroth.Communicator, dp: zeroth.Communicator) -> None:
    """dp x domain: the sum over the domain and the mean over dp is the gradient of one process."""
    torch.manual_seed(2)
    model = Net().double()
    images = torch.randn(2 * dp.size, 3, 37, 16, dtype=torch.float64)
    labels = torch.randint(0, 5, (2 * dp.size,))
    plain = copy.deepcopy(model)
    losses = [
        F.cross_entropy(copy.deepcopy(model)(own), label)
        for own, label in zip(images.split(2), labels.split(2), strict=True)
    ]
    for own, label in zip(images.split(2), labels.split(2), strict=True):
        (F.cross_entropy(plain(own), label) / dp.size).backward()

    split = split_images(model, group)
    rows = split_rows(images.split(2)[dp.rank], group)
    loss = part_of_loss(F.cross_entropy(model(rows), labels.split(2)[dp.rank]), group)
    assert abs(loss.item() - losses[dp.rank].item()) < EXACT
    loss.backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(dp.all_reduce(group.all_reduce(one.grad.clone())) / dp.size, other.grad, name)
    if dp.size == 1:
        for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
            close(one.double(), other.double(), name)
        model.eval()
        plain.eval()
        close(model(rows), plain(images), "evaluation")
    split.undo()
    close(model.train()(images[:2]).detach(), copy.deepcopy(plain).train()(images[:2]).detach(), "undone")


def check_norms(group: zeroth.Communicator) -> None:
    norm = nn.BatchNorm2d(3, track_running_stats=False, affine=False)
    whole = torch.randn(2, 3, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    close(whole_rows(spatial_batch_norm(split_rows(whole, group), norm, group), group), norm(whole), "norm")
    for layer, text in (
        (nn.GroupNorm(1, 4), "looks along the rows"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode"),
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), "padding_mode circular"),
        (nn.AdaptiveAvgPool2d(2), "output_size 2"),
    ):
        try:
            split_images(nn.Sequential(nn.Conv2d(3, 3, 1), layer), group)
        except zeroth.Error as error:
            assert error.code == "MODEL" and text in str(error) and "1 (" in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    everyone = world.mesh({"domain": world.size}).axis("domain")
    one = world.mesh({"dp": 1, "domain": world.size})
    half = world.mesh({"dp": 2, "domain": world.size // 2})
    for group in (everyone, half.axis("domain")):
        check_halos(group)
        check_windows(group)
    check_norms(everyone)
    check_model(world, everyone, one.axis("dp"))
    check_model(world, half.axis("domain"), half.axis("dp"))
    check_bytes(everyone)
    check_grids(world)
    print("spatial: ok", flush=True)


main()
