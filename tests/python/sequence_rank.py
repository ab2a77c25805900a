"""One rank of a group that splits a sequence; see sequence_test.py. Every rank makes the whole tensors from a seed,
runs plain attention on them, and compares its part.

sequence_rank.py few    Ulysses, ring, token and the grid against plain attention; states; bytes; dropout; refusals
sequence_rank.py all    with every case of an attention
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from refusing import refused
from torch.nn import functional

import zeroth
from zeroth import parallel
from zeroth.parallel import SequenceLayout, SequenceMask

BOUND = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""of the largest difference, relative to the largest number"""
Tensors = list[torch.Tensor]


@dataclasses.dataclass(kw_only=True)
class Case:
    """An attention of the whole sequence."""

    heads: int = 4
    kv_heads: int = 4
    length: int = 24
    batch: int = 2
    size: int = 8
    v_size: int = 8
    causal: bool = True
    scale: float | None = None
    mask: SequenceMask | None = None
    softcap: float | None = None
    bias_heads: int = 0
    """0: no bias"""
    dtype: torch.dtype = torch.float64

    def tensors(self) -> Tensors:
        """q, k, v, the gradient of the output, and the bias."""
        generator = torch.Generator().manual_seed(7)
        shapes = [
            (self.batch, self.heads, self.length, self.size),
            (self.batch, self.kv_heads, self.length, self.size),
            (self.batch, self.kv_heads, self.length, self.v_size),
            (self.batch, self.heads, self.length, self.v_size),
            (1, max(self.bias_heads, 1), self.length, self.length),
        ]
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]

    def plain(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) * (self.size**-0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if bias is not None:
            scores = scores + bias
        whole = range(self.length)
        mask = SequenceMask(is_causal=self.causal) & (self.mask or SequenceMask())
        seen = mask._evaluate(whole, whole, None)
        scores = scores.masked_fill(~seen, -torch.inf)
        chances = torch.where(seen.any(-1, keepdim=True), scores.softmax(-1), 0)
        return torch.nan_to_num(chances) @ v


def close(mine: torch.Tensor | None, plain: torch.Tensor | None, what: object, bound: float | None = None) -> None:
    assert mine is not None and plain is not None, what
    assert mine.shape == plain.shape and mine.dtype == plain.dtype, (what, mine.shape, plain.shape)
    limit = BOUND[mine.dtype] if bound is None else bound
    if mine.numel() == 0:
        return
    difference = (mine - plain).abs().max().item() / max(1.0, plain.abs().max().item())
    assert difference <= limit, f"{what}: {difference} > {limit}"


Run = Callable[..., torch.Tensor]


def check(
    case: Case, layout: SequenceLayout, rank: int, run: Run, name: str, group: zeroth.Communicator | None = None
) -> None:
    """run(q, k, v, bias) of this rank's tokens gives the rank's part of plain attention, and of its gradients."""
    *inputs, grad, bias = case.tensors()
    wide = torch.float32 if case.dtype == torch.bfloat16 else case.dtype
    whole = [tensor.to(wide, copy=True).requires_grad_() for tensor in (*inputs, bias)]
    expected = case.plain(*whole[:3], whole[3] if case.bias_heads else None)
    expected.backward(grad.to(wide))
    own = [layout.cut(tensor, 2, rank).clone().requires_grad_() for tensor in inputs]
    bias = bias.clone().requires_grad_()
    out = run(*own, bias if case.bias_heads else None)
    out.backward(layout.cut(grad, 2, rank))
    what = f"{name} {case} {layout.lengths}"
    close(out.detach(), layout.cut(expected.detach(), 2, rank).to(case.dtype), f"output of {what}")
    for tensor, all_of_it, letter in zip(own, whole, "qkv", strict=False):
        assert all_of_it.grad is not None
        close(tensor.grad, layout.cut(all_of_it.grad, 2, rank).to(case.dtype), f"gradient of {letter} of {what}")
    if case.bias_heads and group is not None:
        assert bias.grad is not None
        close(group.all_reduce(bias.grad), whole[3].grad, f"gradient of the bias of {what}")


def ulysses(case: Case, group: zeroth.Communicator, layout: SequenceLayout, grouped: bool) -> Run:
    """With an attention function of the whole sequence of some heads."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        local = dataclasses.replace(case, heads=q.shape[1], kv_heads=k.shape[1])
        return local.plain(q, k, v, bias)

    return lambda q, k, v, bias: parallel.ulysses_attention(
        q, k, v, attend, group, lengths=layout.lengths, bias=bias, grouped=grouped
    )


def ring(case: Case, group: zeroth.Communicator, layout: SequenceLayout, order: str) -> Run:
    return lambda q, k, v, bias: parallel.ring_attention(
        q, k, v, group, case.causal, case.scale, layout, order,  # type: ignore[arg-type]
        mask=case.mask, bias=bias, softcap=case.softcap,
    )  # fmt: skip


def documents(length: int, batch: int = 1) -> SequenceMask:
    rows = [sorted((position * (row + 3)) // length for position in range(length)) for row in range(batch)]
    return SequenceMask.documents(torch.tensor(rows))


def padding(length: int, batch: int) -> SequenceMask:
    kept = torch.ones(batch, length, dtype=torch.bool)
    kept[0, : length // 3] = False
    kept[-1, length - 2 :] = False
    return SequenceMask.keys(kept)


def cases(world_size: int) -> list[Case]:
    every = [
        Case(heads=6, kv_heads=2, length=23, batch=3, v_size=4),
        Case(heads=7, kv_heads=7, length=9, batch=1, causal=False, scale=0.3),
        Case(mask=padding(26, 2) & SequenceMask.window(7), length=26, causal=False),
        Case(softcap=2.0, kv_heads=2, length=22, mask=documents(22, 2)),
        Case(bias_heads=4, length=21),
        Case(dtype=torch.bfloat16, length=24, kv_heads=2),
    ]
    if sys.argv[1] == "few":
        return every
    return [
        *every,
        Case(),
        Case(causal=False, batch=1, scale=0.3),
        Case(heads=8, kv_heads=1, length=25),
        Case(heads=12, kv_heads=3, length=31, size=4),
        Case(mask=SequenceMask.window(5), length=29),
        Case(mask=documents(27, 2), length=27),
        Case(mask=padding(26, 2), length=26),
        Case(bias_heads=1, causal=False, length=20),
        Case(dtype=torch.float32, length=40),
        *(large() if world_size == 2 else []),
    ]


def large() -> list[Case]:
    """Several tiles of queries."""
    return [
        Case(heads=2, kv_heads=1, length=2500, batch=1, size=4, v_size=4, mask=SequenceMask.window(300)),
        Case(heads=2, kv_heads=2, length=2200, batch=1, size=4, v_size=4, softcap=3.0),
    ]


def check_attention(group: zeroth.Communicator) -> None:
    size, rank = group.size, group.rank
    for case in cases(size):
        whole = parallel.contiguous(case.length, size)
        zigzag = parallel.zigzag(case.length, size)
        for grouped in (False, True):
            if case.heads >= size:
                check(case, whole, rank, ulysses(case, group, whole, grouped), f"ulysses {grouped}", group)
        for layout in (whole, zigzag):
            for order in ("ring", "token"):
                check(
                    case if order == "ring" else dataclasses.replace(case),
                    layout,
                    rank,
                    without_grad_of_bias(ring(case, group, layout, order), order),
                    order,
                    group if order == "ring" else None,
                )
    few = Case(heads=1, kv_heads=1, length=size + 1)  # fewer heads than ranks; chunks without a token
    for layout in (parallel.contiguous(few.length, size), parallel.zigzag(few.length, size)):
        check(few, layout, rank, ring(few, group, layout, "ring"), "ring", group)
        check(few, layout, rank, ring(few, group, layout, "token"), "token", group)


def without_grad_of_bias(run: Run, order: str) -> Run:
    if order == "ring":
        return run
    return lambda q, k, v, bias: run(q, k, v, None if bias is None else bias.detach())


def check_forms_of_a_bias(group: zeroth.Communicator) -> None:
    """Split by heads already, or by queries."""
    case = Case(bias_heads=4, heads=4, length=18)
    layout, rank = parallel.contiguous(case.length, group.size), group.rank
    heads = parallel.split_heads(4, 4, group.size).q[rank]
    run = ulysses(case, group, layout, False)
    check(case, layout, rank, lambda q, k, v, b: run(q, k, v, b[:, heads.start : heads.stop]), "heads", group)
    check(case, layout, rank, lambda q, k, v, b: run(q, k, v, layout.cut(b, 2, rank)), "queries", group)
    case = dataclasses.replace(case, bias_heads=1)
    run = ulysses(case, group, layout, False)
    check(case, layout, rank, lambda q, k, v, b: run(q, k, v, layout.cut(b, 2, rank)), "queries, one head", group)


def check_cross(group: zeroth.Communicator) -> None:
    """Other keys than queries, without a mask."""
    case = Case(causal=False, length=20)
    q, k, v, _, _ = case.tensors()
    k, v = k[:, :, :13], v[:, :, :13]
    plain = functional.scaled_dot_product_attention(q, k, v)
    queries, keys = parallel.contiguous(20, group.size), parallel.contiguous(13, group.size)
    for order in ("ring", "token"):
        out = parallel.ring_attention(
            queries.cut(q, 2, group.rank), keys.cut(k, 2, group.rank), keys.cut(v, 2, group.rank), group,
            order=order, lengths=queries.lengths, key_lengths=keys.lengths,  # type: ignore[arg-type]
        )  # fmt: skip
        close(out, queries.cut(plain, 2, group.rank), f"cross {order}")


def check_grid(world: zeroth.World) -> None:
    mesh = world.mesh({"ring": 2, "ulysses": 2})
    outer, inner, group = mesh.axis("ring"), mesh.axis("ulysses"), mesh.world
    for case in cases(group.size):
        for kind in (parallel.contiguous, parallel.zigzag):
            row = kind(case.length, 2)
            layout = parallel.on_grid(row, 2)
            for order in ("ring", "token"):

                def run(
                    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
                    case: Case = case, row: SequenceLayout = row, lengths: Any = layout.lengths, order: Any = order,
                ) -> torch.Tensor:  # fmt: skip
                    return parallel.grid_attention(
                        q, k, v, inner, outer, case.causal, case.scale, row, order,
                        lengths=lengths, mask=case.mask, bias=bias, softcap=case.softcap,
                    )  # fmt: skip

                check(
                    case, layout, group.rank, without_grad_of_bias(run, order), f"grid {order}",
                    group if order == "ring" else None,
                )  # fmt: skip


def check_alone(world: zeroth.World) -> None:
    """In a group of one rank, and on grids with one rank along an axis: no message, forward and backward."""
    for ring_size in (1, world.size):
        mesh = world.mesh({"dp": 1, "ring": ring_size, "ulysses": world.size // ring_size, "one": 1})
        outer, inner, one = mesh.axis("ring"), mesh.axis("ulysses"), mesh.axis("one")
        case = Case(kv_heads=2, length=4 * world.size + 1)
        whole = parallel.zigzag(case.length, 1)
        for order in ("ring", "token"):
            check(case, whole, 0, ring(case, one, whole, order), f"{order} alone")
            row = parallel.zigzag(case.length, ring_size)
            layout = parallel.on_grid(row, inner.size)
            mesh.reset_received()

            def run(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
                row: SequenceLayout = row, layout: SequenceLayout = layout, order: Any = order,
                inner: zeroth.Communicator = inner, outer: zeroth.Communicator = outer,
            ) -> torch.Tensor:  # fmt: skip
                return parallel.grid_attention(q, k, v, inner, outer, True, None, row, order, lengths=layout.lengths)

            rank = inner.rank + outer.rank * inner.size
            if inner.size <= case.heads:
                check(case, layout, rank, run, f"grid of {ring_size} x {inner.size}, {order}")
        assert one.received_bytes == 0


def check_state(group: zeroth.Communicator) -> None:
    """Gated linear attention, chunk by chunk over the ranks, against a scan over all tokens."""
    batch, heads, length, size, v_size = 2, 3, 26, 4, 5
    generator = torch.Generator().manual_seed(11)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, gate = (numbers(batch, heads, length, size) for _ in range(3))
    v, grad = numbers(batch, heads, length, v_size), numbers(batch, heads, length, v_size)
    start, of_end = numbers(batch, heads, size, v_size), numbers(batch, heads, size, v_size)
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v, gate, start)]

    def scan(state: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, gate = tensors
        outs = []
        for t in range(q.shape[2]):
            state = torch.sigmoid(gate[:, :, t, :, None]) * state + k[:, :, t, :, None] * v[:, :, t, None]
            outs.append((q[:, :, t, None] @ state).squeeze(2))
        return torch.stack(outs, 2), state

    expected, end = scan(whole[4], whole[:4])
    (expected * grad).sum().backward(retain_graph=True)
    (end * of_end).sum().backward()

    layout, rank = parallel.contiguous(length, group.size), group.rank
    own = [layout.cut(tensor, 2, rank).clone().requires_grad_() for tensor in (q, k, v, gate)]
    first = (start if rank == 0 else torch.zeros_like(start)).requires_grad_()
    alone, local_state = scan(torch.zeros_like(start), own)  # all ranks at the same time
    decay = torch.sigmoid(own[3]).cumprod(2)
    before, after = parallel.pass_state(
        first, lambda state, decay, more: decay[..., None] * state + more, group, decay[:, :, -1], local_state
    )
    out = alone + (own[0] * decay) @ before
    loss = (out * layout.cut(grad, 2, rank)).sum()
    if rank == group.size - 1:
        close(after.detach(), end.detach(), "the last state")
        loss = loss + (after * of_end).sum()
    loss.backward()
    close(out.detach(), layout.cut(expected.detach(), 2, rank), "linear attention")
    for tensor, all_of_it, letter in zip(own, whole, "qkvg", strict=False):
        assert all_of_it.grad is not None
        close(tensor.grad, layout.cut(all_of_it.grad, 2, rank), f"gradient of {letter} of linear attention")
    close(first.grad, whole[4].grad if rank == 0 else torch.zeros_like(start), "gradient of the first state")


def check_bytes(group: zeroth.Communicator) -> None:
    """Elements that this rank receives are those of the formulas."""
    size = group.size
    received: list[int] = []
    exchange, move = parallel.ulysses.all_to_all, parallel.ring_steps._wire.move  # type: ignore[attr-defined]
    directions: list[list[int]] = []

    def counted(*arguments: Any, **named: Any) -> torch.Tensor:
        out = exchange(*arguments, **named)
        received.append(out.numel() * (size - 1) // size)
        return out

    def counted_moves(messages: Any, group: zeroth.Communicator) -> list[torch.Tensor]:
        received.extend(size // 8 for _, size, _ in messages)
        directions.append([by for _, _, by in messages])
        return move(messages, group)

    parallel.ulysses.all_to_all, parallel.ring_steps._wire.move = counted, counted_moves  # type: ignore[attr-defined]
    try:
        for kv_heads in (12, 4 if size == 4 else 6):
            for rows in (1, 2):  # tokens of a rank: as many on more ranks are the same elements
                case = Case(heads=12, kv_heads=kv_heads, length=6 * rows * size, batch=1, size=2, v_size=2)
                q, k, v = (tensor.requires_grad_() for tensor in case.tensors()[:3])
                layout = parallel.contiguous(case.length, size)
                own = [layout.cut(tensor, 2, group.rank).contiguous() for tensor in (q, k, v)]
                h = case.heads * case.size
                for name, run, forward in (
                    ("ulysses", ulysses(case, group, layout, True), (2 + 2 * kv_heads / 12) * case.length * h / size),
                    ("ring", ring(case, group, layout, "ring"), 2 * kv_heads / 12 * case.length * h),
                    ("token", ring(case, group, layout, "token"), 2 * case.length * (h + case.heads / 2)),
                ):
                    received.clear()
                    directions.clear()
                    out = run(*own, None)
                    assert sum(received) == forward * (size - 1) / size, (name, case, received, forward)
                    both = [[1], *([1, -step] for step in range(1, size - 1)), [1 - size]]
                    if name == "token":  # queries on, and results home, in one call
                        assert directions == both, directions
                        out.sum().backward()
                        assert directions == both * 2, directions
    finally:
        parallel.ulysses.all_to_all, parallel.ring_steps._wire.move = exchange, move  # type: ignore[attr-defined]


def check_dropout(group: zeroth.Communicator) -> None:
    """All ranks come with one state of the generator: heads and tokens have other masks, orders the same ones."""
    size, length = group.size, 16 * group.size
    torch.manual_seed(3)
    q = torch.zeros(1, size, length // size, 8)
    v = torch.eye(length).repeat(1, size, 1, 1)  # the output is the probabilities
    layout = parallel.contiguous(length, size)
    own = layout.cut(v, 2, group.rank)
    keys = q.new_zeros(own.shape[:3] + (8,))

    def masks(out: torch.Tensor) -> set[tuple[bool, ...]]:
        every = group.all_gather(out.contiguous())
        assert abs((every == 0).float().mean().item() - 0.5) < 0.1, "about half are dropped"
        close(every[every != 0], torch.full_like(every[every != 0], 2 / length), "the others are doubled")
        return {tuple(row.tolist()) for row in every.ne(0).reshape(-1, length)}

    attend = partial(functional.scaled_dot_product_attention, dropout_p=0.5)
    assert len(masks(parallel.ulysses_attention(q, keys, own, attend, group))) == size * length
    outs = []
    for order in ("ring", "token"):
        torch.manual_seed(4)
        outs.append(parallel.ring_attention(q, keys, own, group, order=order, dropout_p=0.5))  # type: ignore[arg-type]
        assert len(masks(outs[-1])) == size * length
        after = torch.rand(1)
        assert len(set(group.all_gather(after).tolist())) == 1
    close(*outs, "dropout of both orders")
    grads = []
    for order in ("ring", "token"):
        torch.manual_seed(4)
        leaf = own.clone().requires_grad_()
        out = parallel.ring_attention(q, keys, leaf, group, order=order, dropout_p=0.5)  # type: ignore[arg-type]
        out.backward(torch.ones_like(out))
        grads.append(leaf.grad)
    kept = group.all_gather(outs[0].movedim(2, 0).contiguous()).movedim(0, 2)  # every query's probabilities
    own_keys = layout.chunks[group.rank][0]
    expected = kept.sum(2)[..., own_keys.start : own_keys.stop, None].expand_as(own)
    for grad in grads:
        close(grad, expected, "gradient of v: the mask of backward is that of forward")


def check_attention_refusals(group: zeroth.Communicator) -> None:
    """Before any call of the group, so that ranks may go on."""
    size = group.size
    x = torch.zeros(2, 4, 6, 8)
    none = SequenceMask()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("more ranks than heads.*at most 1 ranks.*hint: use ring", lambda: parallel.split_heads(1, 1, size)),
        ("do not divide into groups.*which: heads",
         lambda: parallel.ulysses_attention(x, x[:, :3], x[:, :3], None, group)),
        ("other numbers of queries and keys.*got: q \\[2, 4, 6, 8\\], k \\[2, 4, 5, 8\\]",
         lambda: parallel.ulysses_attention(x, x[:, :, :5], x[:, :, :5], None, group)),
        ("several dtypes.*float32, torch.float64", lambda: parallel.ulysses_attention(x, x.double(), x, None, group)),
        ("other tokens than lengths say.*and 6 for this one", lambda: parallel.ulysses_attention(
            x, x, x, None, group, lengths=[5] * size)),
        ("fits neither.*which: bias", lambda: parallel.ulysses_attention(x, x, x, None, group, bias=x)),
        ("do not divide into groups", lambda: parallel.ring_attention(x, x[:, :3], x[:, :3], group)),
        ("several dtypes", lambda: parallel.ring_attention(x, x.half(), x, group)),
        ("a mask has no meaning.*which: causal.*expected: 6 keys.*got: 5",
         lambda: parallel.ring_attention(x, x[:, :, :5], x[:, :, :5], group, causal=True)),
        ("a mask has no meaning.*which: mask", lambda: parallel.ring_attention(
            x, x[:, :, :5], x[:, :, :5], group, mask=none)),
        ("no such layout.*got: spiral", lambda: parallel.ring_attention(
            x, x, x, group, layout="spiral")),  # type: ignore[arg-type]
        ("no such order.*got: back", lambda: parallel.ring_attention(
            x, x, x, group, order="back")),  # type: ignore[arg-type]
        ("other tokens than the layout gives them.*hint: cut", lambda: parallel.ring_attention(
            x, x, x, group, layout="zigzag", lengths=[6] * (size - 1) + [60])),
        ("other tokens than the layout gives it", lambda: parallel.ring_attention(x, x, x, group, lengths=[7] * size)),
        ("not of the whole sequence.*which: bias", lambda: parallel.ring_attention(
            x, x, x, group, bias=torch.zeros(1, 1, 6, 6))),
        ("no gradient in this order", lambda: parallel.ring_attention(
            x, x, x, group, order="token", bias=torch.zeros(1, 1, 6 * size, 6 * size, requires_grad=True))),
        ("not one a rank of the grid", lambda: parallel.grid_attention(x, x, x, group, group, lengths=[6])),
        ("boundaries of documents do not fit", lambda: parallel.documents_of_boundaries(torch.tensor([0, 5]), 6)),
        ("a matrix of a mask has another form", lambda: SequenceMask.matrix(torch.zeros(1, 2, 3, 3))),
    ]  # fmt: skip
    for text, call in calls:
        with refused("USAGE", text):
            call()
    with refused("USAGE", "returned another shape.*which: attend"):
        parallel.ulysses_attention(x, x, x, lambda q, k, v: q[:, :, :1], group)
    with refused("USAGE", "another form after the tokens.*which: combine"):
        parallel.pass_state(torch.zeros(2), lambda state: state[:1], zeroth.World.from_environment().mesh(
            {"dp": size, "sp": 1}).axis("sp"))  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    group = world.mesh({"sp": world.size}).axis("sp")
    check_attention(group)
    check_state(group)
    if world.size <= 4:
        check_forms_of_a_bias(group)
        check_cross(group)
        check_bytes(group)
        check_dropout(group)
        check_attention_refusals(group)
    if world.size == 4:
        check_grid(world)
    check_alone(world)
    print("as one rank: ok", flush=True)


if __name__ == "__main__":
    main()
