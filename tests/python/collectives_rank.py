"""One rank of four with a mesh of two axes; see collectives_test.py. Every rank computes what the others give, so each
result and each gradient is compared with a plain computation.

collectives_rank.py          every call, every dtype, checkpointed, with other shapes, refused
collectives_rank.py order WHAT    rank 1 makes another call than the others
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from refusing import refused
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroth
from zeroth import parallel

WORLD = 4
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATING, torch.int64, torch.int32, torch.uint8)
Tensors = list[torch.Tensor]


def values(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float64, turn: int = 0) -> torch.Tensor:
    """What a rank gives; any rank can say it. Small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randint(0, 8, tuple(shape), generator=generator).to(dtype)


def total(parts: Tensors) -> torch.Tensor:
    return torch.stack(parts).sum(0, dtype=parts[0].dtype)


def same(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert got is not None and got.dtype == expected.dtype and got.shape == expected.shape, (got, expected)
    assert torch.equal(got, expected), (got, expected)


class Case:
    """A call, what it makes of the tensors of all ranks, and what of their gradients."""

    def __init__(
        self,
        name: str,
        call: Callable[[torch.Tensor, zeroth.Communicator], torch.Tensor],
        shapes: Callable[[int], list[Sequence[int]]],
        forward: Callable[[Tensors], Tensors],
        backward: Callable[[Tensors], Tensors],
        sums: bool = True,
    ) -> None:
        self.name, self.call, self.shapes = name, call, shapes
        self.forward, self.backward, self.sums = forward, backward, sums


def alike(*shape: int) -> Callable[[int], list[Sequence[int]]]:
    return lambda size: [shape] * size


def uneven(size: int) -> list[int]:
    """Slices of ranks; rank 1 has none."""
    return [2 * rank if rank != 1 else 0 for rank in range(size)]


def replicated(parts: Tensors) -> Tensors:
    return [total(parts)] * len(parts)


def slices(whole: torch.Tensor, dim: int, sizes: Sequence[int]) -> Tensors:
    return list(whole.split(list(sizes), dim))


def cases(size: int) -> list[Case]:
    sizes = parallel.slice_sizes(5, size)
    own = uneven(size)
    turned = [[(row + column) % 3 for column in range(size)] for row in range(size)]  # [from][to]
    taken = [[turned[sender][to] for sender in range(size)] for to in range(size)]

    def exchange(parts: Tensors, split: int, concat: int, give: list[list[int]]) -> Tensors:
        cut = [slices(part, split, give[rank]) for rank, part in enumerate(parts)]
        return [torch.cat([row[to] for row in cut], concat) for to in range(size)]

    even = [parallel.slice_sizes(5, size)] * size
    back = [[3] * size] * size
    found = [
        Case("copy_to_group", parallel.copy_to_group, alike(2, 3), lambda parts: parts, replicated),
        Case("reduce_from_group", parallel.reduce_from_group, alike(2, 3), replicated, lambda grads: grads),
        Case("all_reduce", parallel.all_reduce, alike(2, 3), replicated, replicated),
        Case("all_reduce of none", parallel.all_reduce, alike(0, 3), replicated, replicated),
        Case("all_reduce of no dim", parallel.all_reduce, alike(), replicated, replicated),
        Case(
            "all_to_all of two dims",
            lambda x, group: parallel.all_to_all(x, 1, -1, group),
            alike(2, 5, 3),
            lambda parts: exchange(parts, 1, 2, even),
            lambda grads: exchange(grads, 2, 1, back),
            sums=False,
        ),
        Case(
            "all_to_all of equal slices",
            lambda x, group: parallel.all_to_all(x, 0, 0, group),
            alike(2 * size, 3),
            lambda parts: exchange(parts, 0, 0, [[2] * size] * size),
            lambda grads: exchange(grads, 0, 0, [[2] * size] * size),
            sums=False,
        ),
        Case(
            "all_to_all of any slices",
            lambda x, group: parallel.all_to_all(x, 0, 0, group, turned[group.rank], taken[group.rank]),
            lambda size: [(sum(turned[rank]), 3) for rank in range(size)],
            lambda parts: exchange(parts, 0, 0, turned),
            lambda grads: exchange(grads, 0, 0, taken),
            sums=False,
        ),
        Case(
            "ring_shift",
            lambda x, group: parallel.ring_shift([x], group)[0],
            alike(2, 3),
            lambda parts: [parts[-1], *parts[:-1]],
            lambda grads: [*grads[1:], grads[0]],
            sums=False,
        ),
    ]
    for dim in (0, 1, -1):
        shape = [2, 2, 2]
        shape[dim] = 5
        part = [[*shape[: dim % 3], n, *shape[dim % 3 + 1 :]] for n in own]
        found += [
            Case(
                f"split_to_group {dim}",
                lambda x, group, dim=dim: parallel.split_to_group(x, dim, group),
                alike(*shape),
                lambda parts, dim=dim: [slices(part, dim, sizes)[rank] for rank, part in enumerate(parts)],
                lambda grads, dim=dim: [torch.cat(grads, dim)] * size,
                sums=False,
            ),
            Case(
                f"reduce_scatter {dim}",
                lambda x, group, dim=dim: parallel.reduce_scatter(x, dim, group),
                alike(*shape),
                lambda parts, dim=dim: slices(total(parts), dim, sizes),
                lambda grads, dim=dim: [torch.cat(grads, dim)] * size,
            ),
            Case(
                f"gather_from_group {dim}",
                lambda x, group, dim=dim: parallel.gather_from_group(x, dim, group, own),
                lambda size, part=part: part,
                lambda parts, dim=dim: [torch.cat(parts, dim)] * size,
                lambda grads, dim=dim: [slices(grad, dim, own)[rank] for rank, grad in enumerate(grads)],
                sums=False,
            ),
            Case(
                f"all_gather {dim}",
                lambda x, group, dim=dim: parallel.all_gather(x, dim, group, own),
                lambda size, part=part: part,
                lambda parts, dim=dim: [torch.cat(parts, dim)] * size,
                lambda grads, dim=dim: slices(total(grads), dim, own),
                sums=False,
            ),
        ]
    return found


def not_contiguous(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 2:
        return x
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def check_case(case: Case, group: zeroth.Communicator) -> None:
    size, me = group.size, group.rank
    shapes = case.shapes(size)
    for dtype in DTYPES:
        if dtype == torch.uint8 and case.sums and case.name != "copy_to_group":
            continue
        parts = [values(rank, shapes[rank], dtype) for rank in range(size)]
        expected = case.forward(parts)[me]
        x = not_contiguous(parts[me])
        before = x.clone()
        got = case.call(x, group)
        same(got, expected)
        same(x, before)
        assert not got.requires_grad
        if dtype not in FLOATING:
            continue
        grads = [values(rank, out.shape, dtype, 1) for rank, out in enumerate(case.forward(parts))]
        wanted = case.backward(grads)[me]
        for way in ("plain", "reentrant", "not reentrant"):
            leaf = parts[me].clone().requires_grad_()
            x = not_contiguous(leaf * 1.0)
            if way == "plain":
                out = case.call(x, group)
            else:
                out = checkpoint(lambda x: case.call(x * 1.0, group) * 1.0, x, use_reentrant=way == "reentrant")
            same(out.detach(), expected)
            out.backward(not_contiguous(grads[me]))
            same(leaf.grad, wanted)
            with torch.no_grad():
                assert not case.call(x, group).requires_grad
        if dtype == torch.float64:  # the gradient is linear: its gradient is what the call makes
            leaf = parts[me].clone().requires_grad_()
            weight = grads[me].clone().requires_grad_()
            (grad,) = torch.autograd.grad(case.call(leaf, group), leaf, weight, create_graph=True)
            same(grad.detach(), wanted)
            grad.backward(parts[me])
            same(weight.grad, expected)


def check_shift(group: zeroth.Communicator) -> None:
    """Several tensors of several dtypes; one gets no gradient, one has none."""
    size, me = group.size, group.rank
    if size == 1:
        return
    shapes = ((2, 3), (0,), (4,), (5, 1))
    dtypes = (torch.float64, torch.float32, torch.int64, torch.bfloat16)
    for by in (1, -1, 2, size + 1):
        every = [[values(rank, s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes))] for rank in range(size)]
        own = [x.clone().requires_grad_(x.is_floating_point()) for x in every[me]]
        got = parallel.ring_shift(own, group, by)
        for one, expected in zip(got, every[(me - by) % size]):
            same(one.detach(), expected)
        if by % size == 0:
            assert all(one is other for one, other in zip(got, own))
            continue
        assert [one.requires_grad for one in got] == [True, True, False, True]
        (got[0] * (me + 1)).sum().backward()
        same(own[0].grad, torch.full((2, 3), float((me + by) % size + 1), dtype=torch.float64))
        same(own[3].grad, torch.zeros(5, 1, dtype=torch.bfloat16))
    assert parallel.ring_shift([], group) == []


def check_bytes(mesh: zeroth.Mesh) -> None:
    """What a rank receives is what the transport documents, counted for each axis."""
    mesh.reset_received()
    assert set(mesh.received().values()) == {0} and mesh.axis("tp").received() == {}
    for name in ("dp", "tp"):
        axis = mesh.axis(name)
        for elements in (256, 8192):  # one phase and two
            axis.reset_received()
            x = torch.ones(elements, dtype=torch.float64, requires_grad=True)
            y = parallel.all_reduce(x, axis)
            once = (
                8
                * elements
                * (axis.size - 1)
                * (1 if 8 * elements <= 8192 else 2)
                // (1 if elements == 256 else axis.size)
            )
            assert axis.received() == {"all_reduce": (1, once)}, (axis.received(), once)
            y.sum().backward()
            assert axis.received() == {"all_reduce": (2, 2 * once)}, axis.received()
            axis.reset_received()
            parallel.all_to_all(x, 0, 0, axis)
            assert axis.received_bytes == 8 * elements * (axis.size - 1) // axis.size
            parallel.all_gather(x.detach(), 0, axis)
            parallel.reduce_scatter(x.detach(), 0, axis)
            parallel.ring_shift([x.detach()], axis)
            got = {kind: count for kind, (_, count) in axis.received().items()}
            part = 8 * elements // axis.size
            assert got["all_gather"] == 8 * elements * (axis.size - 1) and got["recv"] == 8 * elements, got
            assert got["reduce_scatter"] == part * (axis.size - 1), got
    other = mesh.received()["tp"]
    assert mesh.received() == {"dp": mesh.axis("dp").received_bytes, "tp": other, "one": 0}, mesh.received()
    mesh.axis("dp").reset_received()
    assert mesh.received() == {"dp": 0, "tp": other, "one": 0}, mesh.received()


def check_loss(tp: zeroth.Communicator) -> None:
    """The loss of logits that ranks share, also of bfloat16 and with other reductions."""
    logits = (values(0, (2, 3, 7), turn=10) / 3).requires_grad_()
    targets = torch.tensor([[0, 6, 3], [-100, 5, 4]])
    sizes = parallel.slice_sizes(7, tp.size)
    for reduction in ("mean", "sum", "none"):
        flat = torch.nn.functional.cross_entropy(logits.reshape(6, 7), targets.reshape(6), reduction=reduction)
        (expected,) = torch.autograd.grad(flat.sum(), logits)
        own = logits.detach().split(sizes, -1)[tp.rank].clone().requires_grad_()
        loss = parallel.vocab_cross_entropy(own, targets, tp, reduction=reduction, vocab_sizes=sizes)
        torch.testing.assert_close(loss, flat.view(2, 3) if reduction == "none" else flat, rtol=1e-12, atol=1e-12)
        loss.sum().backward()
        torch.testing.assert_close(own.grad, expected.split(sizes, -1)[tp.rank], rtol=1e-12, atol=1e-12)
    half = logits.detach().split(sizes, -1)[tp.rank].bfloat16().requires_grad_()
    loss = parallel.vocab_cross_entropy(half, targets, tp, vocab_sizes=sizes)
    assert loss.dtype == torch.float32 and not loss.isnan()
    assert torch.autograd.grad(loss, half)[0].dtype == torch.bfloat16
    assert parallel.vocab_cross_entropy(half, targets * 0 - 100, tp, vocab_sizes=sizes).isnan()
    with refused("USAGE", "there is no such reduction.*mean, sum or none"):
        parallel.vocab_cross_entropy(half, targets, tp, reduction="max")


def check_pending(group: zeroth.Communicator) -> None:
    """Sums that are taken later, in plain code and inside a checkpointed region."""
    x = [values(rank, (3, 4), turn=11) for rank in range(group.size)]
    other = [values(rank, (2,), torch.bfloat16, turn=12) for rank in range(group.size)]
    leaf = x[group.rank].clone().requires_grad_()

    def block(leaf: torch.Tensor) -> torch.Tensor:
        first = parallel.reduce_from_group_async(leaf * 2, group)
        second = parallel.reduce_from_group_async(other[group.rank], group)
        same(second.wait(), total(other))
        return first.wait()

    for held in (False, True):
        leaf.grad = None
        y = checkpoint(block, leaf, use_reentrant=False) if held else block(leaf)
        same(y.detach(), 2 * total(x))
        y.backward(x[0])
        same(leaf.grad, 2 * x[0])
    weight = values(group.rank, (5, 4), turn=13)
    bias = values(0, (5,), turn=14)
    expected = total([x[rank] @ values(rank, (5, 4), turn=13).T for rank in range(group.size)]) + bias
    for chunks in (1, 2, 5):
        same(parallel.chunked_linear_reduce(x[group.rank], weight, bias, chunks, group), expected)
    own = [(x[group.rank] % 3).float().requires_grad_(), (weight % 3).float().requires_grad_()]  # exact in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel.chunked_linear_reduce(own[0].bfloat16(), own[1], None, 2, group)
    same(
        y.detach(),
        total([(x[rank] % 3) @ (values(rank, (5, 4), turn=13) % 3).T for rank in range(group.size)]).bfloat16(),
    )
    y.sum().backward()
    same(own[0].grad, own[1].detach().sum(0).expand(3, 4))


def check_gathered_linear(group: zeroth.Communicator) -> None:
    """A slice of the sequence is gathered for a product, and again in backward: values and gradients are those of a
    plain computation, only the slice is kept, and bytes are those of its formula."""
    size, me = group.size, group.rank
    for sizes in ([2] * size, parallel.slice_sizes(5, size)):
        for dim, shape in ((1, (3, sum(sizes), 4)), (-2, (3, sum(sizes), 4)), (0, (sum(sizes), 4))):
            whole = values(0, shape, turn=20)
            weights = [values(rank, (6, 4), turn=21) for rank in range(size)]
            bias = values(me, (6,), turn=22)
            grads = [values(rank, (*shape[:-1], 6), turn=23) for rank in range(size)]
            x_grad = slices(total([grad @ weight for grad, weight in zip(grads, weights)]), dim, sizes)[me]
            weight_grad = grads[me].flatten(0, -2).T @ whole.flatten(0, -2)
            for x_learns, weight_learns, held in (
                (True, True, False),
                (True, True, True),
                (True, False, False),
                (False, True, False),
            ):
                x = slices(whole, dim, sizes)[me].clone().requires_grad_(x_learns)
                weight = weights[me].clone().requires_grad_(weight_learns)
                own_bias = bias.clone().requires_grad_() if weight_learns else None
                kept: list[int] = []

                def call(
                    x: torch.Tensor, weight: torch.Tensor = weight, bias: torch.Tensor | None = own_bias
                ) -> torch.Tensor:
                    return parallel.gathered_linear(x, weight, bias, dim, group, sizes)

                def keep(one: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
                    kept.append(one.numel())
                    return one

                group.reset_received()
                if held:
                    y = checkpoint(call, x, use_reentrant=False)
                else:
                    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
                        y = call(x)
                    assert size == 1 or kept == [x.numel(), weight.numel()], kept
                same(y.detach(), whole @ weights[me].T + (0 if own_bias is None else bias))
                y.backward(grads[me])
                if x_learns:
                    same(x.grad, x_grad)
                if weight_learns:
                    same(weight.grad, weight_grad)
                    assert own_bias is not None
                    same(own_bias.grad, grads[me].flatten(0, -2).sum(0))
                gathers = 1 + weight_learns + held
                row = 8 * whole.numel() // sum(sizes)
                expected = {"all_gather": (gathers, gathers * row * (sum(sizes) - sizes[me]))}
                if x_learns:
                    expected["reduce_scatter"] = (1, row * sizes[me] * (size - 1))
                assert size == 1 or group.received() == expected, (group.received(), expected)
    x, weight = (values(0, shape, torch.float32, turn=24) % 3 for shape in ((2, 4), (6, 4)))  # exact in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel.gathered_linear(x.requires_grad_(), weight.requires_grad_(), None, 0, group)
    same(y.detach(), (x.detach() @ weight.detach().T).repeat(size, 1).bfloat16())
    y.sum().backward()
    same(x.grad, size * weight.detach().sum(0).expand(2, 4))
    same(weight.grad, size * x.detach().sum(0).expand(6, 4))
    assert not parallel.gathered_linear(x.detach(), weight.detach(), None, 0, group).requires_grad
    with refused("USAGE", "the features are whole.*dim of gathered_linear.*got: -1 for shape"):
        parallel.gathered_linear(x, weight, None, -1, group)
    for other in (weight[:, :3], weight[0], weight.double()):
        with refused("USAGE", "product of x and weight does not exist.*x of gathered_linear"):
            parallel.gathered_linear(x, other, None, 0, group)
    with refused("USAGE", "this rank's slice is not the dim.*sizes of gathered_linear"):
        parallel.gathered_linear(x, weight, None, 0, group, [3] * size)
    if size > 1:
        y = parallel.gathered_linear(x, weight, None, 0, group)
        with refused("USAGE", "no gradient of this gradient.*create_graph of gathered_linear, backward"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def laid(whole: torch.Tensor, sbp: parallel.Sbp, group: zeroth.Communicator, turn: int) -> torch.Tensor:
    """This rank's share of a tensor."""
    if sbp == parallel.Broadcast:
        return whole.clone()
    if sbp == parallel.Partial:
        parts = [values(rank, whole.shape, whole.dtype, turn) for rank in range(1, group.size)]
        rest = whole - total(parts) if parts else whole.clone()
        return rest if group.rank == 0 else parts[group.rank - 1]
    dim = 0 if sbp == parallel.Split(0) else 1
    return whole.split(parallel.slice_sizes(whole.shape[dim], group.size), dim)[group.rank].contiguous()


def check_conversions(group: zeroth.Communicator) -> None:
    """All nine conversions, with slices of two sizes: shares, shares of gradients, and bytes."""
    ways = (parallel.Split(0), parallel.Split(1), parallel.Broadcast, parallel.Partial)
    shape = (37, 38)  # more than 8 KiB
    whole, gradient = values(0, shape, turn=5), values(0, shape, turn=6)
    for source in ways:
        for to in ways:
            for alike in (False, True):
                sizes = None
                if source in ways[:2]:
                    sizes = parallel.slice_sizes(shape[ways.index(source)], group.size)

                def convert(x: torch.Tensor, source: parallel.Sbp = source, to: parallel.Sbp = to) -> torch.Tensor:
                    return parallel.redistribute(x, source, to, group, source_sizes=sizes, gradients_alike=alike)

                def received() -> int:
                    together = torch.tensor([group.received_bytes])
                    group.all_reduce(together)
                    group.reset_received()
                    return int(together.item())

                x = laid(whole, source, group, 7).requires_grad_()
                group.reset_received()
                y = convert(x)
                assert received() == parallel.conversion_bytes(source, to, shape, 8, group.size), (source, to)
                together = y.detach().clone()
                if to == parallel.Partial:
                    group.all_reduce(together)
                same(together, laid(whole, to if to != parallel.Partial else parallel.Broadcast, group, 8))
                grad_to, grad_source = to.gradient(alike), source.gradient(alike)
                group.reset_received()
                (x_grad,) = torch.autograd.grad(y, x, laid(gradient, grad_to, group, 9))
                assert received() == parallel.conversion_bytes(grad_to, grad_source, shape, 8, group.size), (source, to)
                if grad_source == parallel.Partial:
                    group.all_reduce(x_grad)
                    grad_source = parallel.Broadcast
                same(x_grad, laid(gradient, grad_source, group, 9))
    x = whole[:1]
    with refused("USAGE", "does not have this dim.*to of redistribute"):
        parallel.redistribute(x, parallel.Broadcast, parallel.Split(2), group)
    with refused("USAGE", "slice is not the dim.*source_sizes of redistribute"):
        parallel.redistribute(x, parallel.Split(0), parallel.Broadcast, group, source_sizes=[2] * group.size)


def check_model(tp: zeroth.Communicator) -> None:
    """A column-parallel and a row-parallel layer are like one process."""
    full = [values(0, (6, 4), turn=2).requires_grad_(), values(0, (3, 6), turn=3).requires_grad_()]
    x = values(0, (5, 4), turn=4).requires_grad_()
    torch.tanh(x @ full[0].T).matmul(full[1].T).square().mean().backward()
    expected_x = x.grad
    assert expected_x is not None
    for held in (False, True):
        own = [
            full[0].detach().chunk(tp.size, 0)[tp.rank].clone().requires_grad_(),
            full[1].detach().chunk(tp.size, 1)[tp.rank].clone().requires_grad_(),
        ]
        leaf = x.detach().clone().requires_grad_()

        def block(x: torch.Tensor, own: Tensors = own) -> torch.Tensor:
            inner = torch.tanh(parallel.copy_to_group(x, tp) @ own[0].T)
            return parallel.reduce_from_group(inner @ own[1].T, tp)

        y = checkpoint(block, leaf, use_reentrant=False) if held else block(leaf)
        y.square().mean().backward()
        for one, whole, dim in ((own[0], full[0], 0), (own[1], full[1], 1)):
            assert one.grad is not None and whole.grad is not None
            torch.testing.assert_close(one.grad, whole.grad.chunk(tp.size, dim)[tp.rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(leaf.grad, expected_x, rtol=1e-12, atol=1e-12)


def check_gil(group: zeroth.Communicator) -> None:
    """Other threads of this process run while it waits, in forward, in backward, and for a sum."""
    turns, ended = [0], threading.Event()

    def turn() -> None:
        while not ended.wait(0.005):
            turns[0] += 1

    def waits(call: Callable[[], object]) -> None:
        group.barrier()
        if group.rank == 0:
            time.sleep(0.1)
        turns[0] = 0
        call()
        assert group.rank == 0 or turns[0] >= 3, turns

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        x = torch.zeros(3, requires_grad=True)
        waits(lambda: parallel.all_reduce(x, group))
        y = parallel.copy_to_group(x, group).sum()
        waits(lambda: y.backward())
        waits(lambda: parallel.reduce_from_group_async(x, group).wait())
    finally:
        ended.set()
        thread.join()


class Cut(nn.Module):
    """A linear layer of which every rank computes a part of the outputs, with weights that an engine may shard."""

    def __init__(self, group: zeroth.Communicator | None) -> None:
        super().__init__()
        self.group = group
        self.linear = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return torch.tanh(self.linear(x))
        own = parallel.split_to_group(self.linear.weight, 0, self.group)
        bias = parallel.split_to_group(self.linear.bias, 0, self.group)
        out = torch.tanh(nn.functional.linear(parallel.copy_to_group(x, self.group), own, bias))
        return parallel.gather_from_group(out, -1, self.group)


def check_beside_an_engine(world: zeroth.World, group: zeroth.Communicator) -> None:
    """Calls stand between the units of a sharded model, whose engine makes calls of its own."""
    losses = []
    for cut in (None, group):
        torch.manual_seed(2)
        model = nn.Sequential(Cut(cut), nn.Linear(8, 6), Cut(cut), nn.Linear(8, 1))
        config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = zeroth.Engine(model, config, world=world, log_level="off")
        for step in range(3):
            loss = engine(values(0, (4, 6), torch.float32, 20 + step)).square().mean()
            engine.backward(loss)
            assert engine.step().committed
            losses.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[3:]), torch.stack(losses[:3]), rtol=1e-5, atol=1e-6)
    assert losses[2] < losses[0], losses


def check_refusals(group: zeroth.Communicator) -> None:
    x = torch.zeros(4, 4)
    with refused("USAGE", r"does not have this dim.*dim of all_gather.*expected: -2 to 1; got: 2 for shape \[4, 4\]"):
        parallel.all_gather(x, 2, group)
    with refused("USAGE", "concat_dim of all_to_all"):
        parallel.all_to_all(x, 0, -3, group)
    with refused("USAGE", "a tensor with dims"):
        parallel.split_to_group(torch.tensor(1.0), 0, group)
    with refused("USAGE", r"slices of all ranks are not the dim.*sizes of split_to_group.*4 in all.*\[1, 1\]"):
        parallel.split_to_group(x, 0, group, [1, 1])
    with refused("USAGE", r"sizes are not one a rank.*2 sizes, from 0; got: \[4\]"):
        parallel.reduce_scatter(x, 0, group, [4])
    with refused("USAGE", r"sizes are not one a rank.*got: \[5, -1\]"):
        parallel.reduce_scatter(x, 0, group, [5, -1])
    with refused("USAGE", "this rank's slice is not the dim.*sizes of gather_from_group"):
        parallel.gather_from_group(x, 0, group, [3, 3])
    with refused("USAGE", "concat_sizes of all_to_all.*both lists|both lists.*concat_sizes of all_to_all"):
        parallel.all_to_all(x, 0, 0, group, [2, 2])
    with refused("USAGE", "slice for itself has two sizes"):
        parallel.all_to_all(x, 0, 0, group, [2, 2], [3, 3])
    with refused("USAGE", "dtype.*x of all_reduce.*view_as_real"):
        parallel.all_reduce(x.to(torch.complex64), group)
    with refused("USAGE", "dtype.*uint8"):
        parallel.all_reduce(x > 0, group)
    with refused("USAGE", r"not dense.*tensors\[1\] of ring_shift"):
        parallel.ring_shift([x, x.to_sparse()], group)
    with refused("USAGE", "another device.*got: meta"):
        parallel.copy_to_group(x.to("meta"), group)
    with refused("USAGE", "all_reduce of.*uint8|uint8"):
        parallel.all_reduce(x.to(torch.uint8), group)
    for not_one in (None, "tp", 3):
        try:
            parallel.all_reduce(x, not_one)  # type: ignore[arg-type]
        except TypeError as error:
            assert "expected a zeroth.Communicator" in str(error), error
        else:
            raise AssertionError("not refused")
    y = parallel.copy_to_group(x.requires_grad_(), group)
    try:
        y += 1  # would change x, too
    except RuntimeError as error:
        assert "view" in str(error), error
    else:
        raise AssertionError("not refused")


def check_alone(group: zeroth.Communicator) -> None:
    x = values(0, (4, 4)).requires_grad_()
    for y in (
        parallel.copy_to_group(x, group),
        parallel.reduce_from_group(x, group),
        parallel.split_to_group(x, 0, group),
        parallel.gather_from_group(x, 1, group, [4]),
        parallel.all_reduce(x, group),
        parallel.all_gather(x, 0, group),
        parallel.reduce_scatter(x, 0, group),
        parallel.all_to_all(x, 0, 1, group),
        parallel.ring_shift([x], group)[0],
    ):
        assert y is x


def other_order(mesh: zeroth.Mesh) -> None:
    """The mismatch names the calls; the job ends with it."""
    group = mesh.world
    x = torch.zeros(4, 4, requires_grad=True)
    if sys.argv[2] == "grad":
        parallel.all_reduce(x.detach() if group.rank == 1 else x, group)
    elif sys.argv[2] == "shape":
        with refused(
            "MISMATCH", r"^\[MISMATCH\] ranks make.*redistribute of .*dims and sizes.*give source_sizes, one a"
        ):
            parallel.redistribute(x[: 3 - group.rank], parallel.Split(0), parallel.Broadcast, group)
        parallel.all_reduce(x, group)
    elif sys.argv[2] == "call":
        (parallel.reduce_from_group if group.rank == 1 else parallel.all_reduce)(x, group)
    else:
        y = parallel.copy_to_group(x, group)
        if group.rank == 1:
            parallel.all_reduce(x, group)
        y.sum().backward()


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    if sys.argv[1:]:
        other_order(world.mesh({"tp": world.size}))
        return
    mesh = world.mesh({"dp": 2, "tp": 2, "one": 1})
    for group in (mesh.world, mesh.axis("tp"), mesh.axis("dp")):
        for case in cases(group.size):
            try:
                check_case(case, group)
            except AssertionError as error:
                raise AssertionError(f"{case.name} in {group}: {error}") from error
        check_shift(group)
    check_model(mesh.axis("tp"))
    check_bytes(mesh)
    check_loss(mesh.axis("tp"))
    check_loss(mesh.world)
    check_pending(mesh.axis("dp"))
    for axis in ("tp", "one"):
        check_gathered_linear(mesh.axis(axis))
    check_gathered_linear(mesh.world)
    check_gil(mesh.world)
    check_beside_an_engine(world, mesh.world)
    check_pending(mesh.axis("one"))
    check_conversions(mesh.world)
    check_refusals(mesh.axis("tp"))
    check_alone(mesh.axis("one"))
    print("every call: ok", flush=True)


main()
