"""One rank of four with a mesh of two axes; see mesh_test.py. Every rank computes what the others give, so each result
is compared with a plain computation, with ==.

mesh_rank.py           the calls of every group in every dtype, and what is refused
mesh_rank.py raises    rank 1 raises where the others wait for it
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import torch
from refusing import refused
from torch import nn

import zeroth

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATING, torch.int64, torch.int32, torch.uint8)
WORLD = 4


def values(rank: int, rows: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    """What a rank gives; any rank can say it."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    if dtype in FLOATING:
        return (torch.randn(rows, 3, generator=generator) * 8).to(dtype)
    return torch.randint(0, 100, (rows, 3), generator=generator).to(dtype)


def total(parts: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, 16-bit values in float32 with one rounding at the end."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = result + part.to(wide)
    return result.to(dtype)


def same(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert got is not None and got.dtype == expected.dtype and got.shape == expected.shape, (got, expected)
    raw = [one.reshape(-1).view(torch.uint8) for one in (got, expected)]
    assert torch.equal(*raw), (got, expected)


def check_group(group: zeroth.Communicator, members: list[int], dtype: torch.dtype) -> None:
    """Every call of a group; `members`: ranks of the world."""
    size, me = group.size, members[group.rank]
    assert size == len(members)
    rows = [rank + 1 for rank in members]  # of another size on every rank
    given = [values(rank, 2 * size, dtype) for rank in members]
    uneven = [values(rank, rank + 1, dtype, 1) for rank in members]
    own = given[group.rank]

    tensor = own.clone()
    version = tensor._version
    if dtype != torch.uint8:
        assert group.all_reduce(tensor) is tensor and tensor._version > version
        same(tensor, total(given))
        same(group.all_reduce(own, out=torch.empty_like(own)), total(given))
        same(group.reduce_scatter(own), total(given).chunk(size)[group.rank])
        parts = [sum(rows), *([0] * (size - 1))]
        whole = [values(rank, sum(rows), dtype, 2) for rank in members]
        same(group.reduce_scatter(whole[group.rank], counts=parts), total(whole)[: parts[group.rank]])
    same(group.all_reduce(own.clone(), "max"), torch.stack(given).amax(0))
    same(group.reduce_scatter(own, "min"), torch.stack(given).amin(0).chunk(size)[group.rank])

    same(group.all_gather(own), torch.cat(given))
    same(group.all_gather(own[0, 0]), torch.stack([one[0, 0] for one in given]))  # of no dimension
    same(group.all_gather(uneven[group.rank], counts=rows), torch.cat(uneven))
    for root in range(size):
        expected = torch.cat(uneven)
        same(group.broadcast(own.clone(), root), given[root])
        out = torch.empty(sum(rows), 3, dtype=dtype)
        got = group.gather(uneven[group.rank], root, counts=rows, out=out if group.rank == root else None)
        assert got is (out if group.rank == root else None)
        if group.rank == root:
            same(got, expected)
        part = torch.empty(me + 1, 3, dtype=dtype)
        same(group.scatter(part, root, expected if group.rank == root else None, counts=rows), uneven[group.rank])

    same(group.all_to_all(own), torch.cat([one.chunk(size)[group.rank] for one in given]))
    counts = [(2 * size if to == 0 else 0) for to in range(size)]  # everything to the first
    recv_counts = [2 * size if group.rank == 0 else 0] * size
    same(
        group.all_to_all(own, counts=counts, recv_counts=recv_counts),
        torch.cat(given) if group.rank == 0 else own[:0],
    )
    after, before = (group.rank + 1) % size, (group.rank - 1) % size
    same(group.send_recv(own, after, torch.empty_like(own), before, tag=7), given[before])
    forth, back = torch.empty_like(own), torch.empty_like(own)
    group.exchange([(own, after), (own + 1, before)], [(forth, before), (back, after)], tag=8)
    same(forth, given[before])
    same(back, given[after] + 1)
    if group.rank == 0:
        group.send(own, size - 1, tag=3)
    if group.rank == size - 1:
        same(group.recv(torch.empty_like(own), 0, tag=3), given[0])
    group.barrier(f"after {dtype}")


def check_refusals(world: zeroth.World, mesh: zeroth.Mesh) -> None:
    """Each on all ranks, before anything is sent: the groups go on."""
    tp = mesh.axis("tp")
    good = torch.ones(4, 3)
    calls: list[tuple[str, Callable[[], object]]] = [
        (r"dtype; where: python\.communicator; who: rank \d/2 of world/mesh\d+/tp; which: tensor of all_reduce; "
         r"expected: float64, .* or uint8; got: Bool; hint: .*uint8", lambda: tp.all_reduce(torch.ones(2).bool())),
        ("another device.*expected: cpu; got: meta", lambda: tp.all_gather(torch.ones(2, device="meta"))),
        (r"not contiguous.*which: tensor of broadcast.*got: shape \[3, 4\] with strides \[1, 3\]",
         lambda: tp.broadcast(good.t(), 0)),
        ("not dense.*to_dense", lambda: tp.all_reduce(good.to_sparse())),
        ("no gradient flows.*detach", lambda: tp.all_reduce(good.clone().requires_grad_())),
        (r"other number of elements.*which: out of all_gather; expected: 24 elements; got: 12, shape \[4, 3\]",
         lambda: tp.all_gather(good, out=good.clone())),
        ("do not divide.*multiple of 2 rows.*got: 3", lambda: tp.reduce_scatter(good[:3])),
        (r"not those of the tensor.*expected: 4 rows in all; got: \[1, 2\]",
         lambda: tp.reduce_scatter(good, counts=[1, 2])),
        (r"not one a rank.*got: \[4\]", lambda: tp.all_gather(good, counts=[4])),
        (r"other rows than counts say.*expected: 4 for rank", lambda: tp.all_gather(good, counts=[5, 5])),
        ("need both counts.*which: recv_counts of all_to_all", lambda: tp.all_to_all(good, counts=[2, 2])),
        ('no such reduction.*expected: sum, min or max; got: "mean"', lambda: tp.all_reduce(good, "mean")),
        ("root is not in the group.*expected: 0 to 1", lambda: tp.broadcast(good, 2)),
        ("only the root has a result", lambda: tp.gather(good, 1 - tp.rank, out=good.clone())),
        ("only the root has something to scatter", lambda: tp.scatter(good.clone(), 1 - tp.rank, good)),
        ("sends to itself", lambda: tp.send(good, tp.rank)),
        ("no such axis; .*which: pp; expected: one of dp, tp", lambda: mesh.axis("pp")),
        ("name and a number of ranks.*got: 2.0", lambda: world.mesh({"dp": 2.0})),  # type: ignore[dict-item]
    ]  # fmt: skip
    for text, call in calls:
        with refused("USAGE", text):
            call()
    with refused("USAGE", "all_reduce"):
        tp.all_reduce(good.to(torch.uint8))
    with refused("CONFIG", "do not multiply to the world size; .*which: dp=2 tp=1; expected: 4; got: 2"):
        world.mesh({"dp": 2, "tp": 1})
    with refused("CONFIG", "between 1 and the world size.*which: dp; got: 0"):
        world.mesh({"dp": 0, "tp": 4})
    with torch.no_grad():
        same(tp.all_reduce(nn.Parameter(good.clone())).detach(), good * 2)

    child = os.fork()
    if child == 0:
        with refused("USAGE", "a forked child uses a communicator of its parent"):
            tp.barrier()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tp.barrier()


def check_gil(world: zeroth.World, mesh: zeroth.Mesh) -> None:
    """Other threads of this process run while it waits in a call."""
    turns, ended = [0], threading.Event()

    def turn() -> None:
        while not ended.wait(0.005):
            turns[0] += 1

    thread = threading.Thread(target=turn)
    thread.start()
    if world.rank == 0:
        time.sleep(0.2)
    turns[0] = 0
    mesh.world.barrier()
    if world.rank != 0:
        assert turns[0] >= 3, turns
    ended.set()
    thread.join()


def check_beside_an_engine(world: zeroth.World, mesh: zeroth.Mesh) -> None:
    torch.manual_seed(1)
    engine = zeroth.Engine(nn.Linear(3, 3), {"zero_optimization": {"stage": 3}}, world=world, log_level="off")
    for step in range(3):
        loss = engine(values(world.rank, 4, torch.float32, step)).square().mean()
        engine.backward(loss)
        assert engine.step().committed
        losses = mesh.world.all_gather(loss.detach())
        same(mesh.world.all_reduce(loss.detach().clone()), total(list(losses)))
    engine.close()


def check_mismatch(mesh: zeroth.Mesh) -> None:
    """The last call: no group of the job outlives it."""
    dp = mesh.axis("dp")
    with refused("MISMATCH", "expected: all_reduce.*tag [45].*got: all_reduce.*tag [45]"):
        dp.all_reduce(torch.ones(2), tag=4 + dp.rank)


def main() -> None:
    world = zeroth.World.from_environment()
    mesh = world.mesh({"dp": 2, "tp": 2})
    if sys.argv[1:] == ["raises"]:
        if world.rank == 1:
            raise ValueError("no such token")
        mesh.world.barrier()
    dp, tp = divmod(world.rank, 2)
    assert (mesh.coordinate("dp"), mesh.coordinate("tp"), mesh.size("tp")) == (dp, tp, 2)
    assert list(mesh.sizes.items()) == [("dp", 2), ("tp", 2)] and repr(mesh) == "zeroth.Mesh(dp=2 tp=2)", mesh
    groups = [
        (mesh.axis("dp"), [tp, tp + 2]),
        (mesh.axis("tp"), [2 * dp, 2 * dp + 1]),
        (mesh.axes(["tp", "dp"]), list(range(WORLD))),
        (mesh.world, list(range(WORLD))),
    ]
    for group, members in groups:
        for dtype in DTYPES:
            check_group(group, members, dtype)
    check_refusals(world, mesh)
    check_gil(world, mesh)
    check_beside_an_engine(world, mesh)
    check_mismatch(mesh)
    print("every call: ok", flush=True)


main()
