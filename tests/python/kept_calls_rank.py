"""One rank of two: a checkpointed region makes its calls between ranks once; see experts_mixes_test.py.

kept_calls_rank.py AXIS...              of the models
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from experts_models import Doubles, batch, made
from refusing import refused
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroth
import zeroth.nn
from zeroth import _C

SIZE, CHOICES, EXPERTS = 16, 2, 4
Contexts = Callable[[], tuple[Any, Any]]


def again(region: Callable[..., torch.Tensor], *inputs: Any, kept: Contexts | None) -> torch.Tensor:
    more = {} if kept is None else {"context_fn": kept}
    return checkpoint(region, *inputs, use_reentrant=False, **more)


class Watched:
    """keep_calls(), whose regions can be looked at: held, or only whether they are there."""

    def __init__(self, holds: bool = True) -> None:
        self.holds = holds
        self.regions: list[_C.KeptCalls] = []
        self.contexts: list[weakref.ref[Any]] = []

    def __call__(self) -> tuple[Any, Any]:
        region = _C.KeptCalls()
        self.regions += [region] * self.holds
        contexts = region.record(), region.hand_out()
        self.contexts += map(weakref.ref, contexts)
        return contexts

    def is_alive(self) -> bool:
        return any(one() is not None for one in self.contexts)


def bytes_of_experts(group: zeroth.Communicator) -> None:
    """Of one layer: 8 all_to_all with a recompute, of which the counts are 2; 5 with kept calls. The same bits."""
    layer = nn.ModuleDict({"experts": made("Mixtral").model.layers[0].mlp.experts})
    zeroth.experts(layer, _MESH[0])
    generator = torch.Generator().manual_seed(group.rank)
    count = 5 + 3 * group.rank
    chosen = torch.randint(-1, EXPERTS, (count, CHOICES), generator=generator)
    x, weights = (torch.randn(count, n, generator=generator, dtype=torch.float64) for n in (SIZE, CHOICES))
    whole: Any = group.all_gather(torch.nn.functional.pad(chosen, (0, 0, 0, 8 - count), value=-1).contiguous())
    own = EXPERTS // 2 * group.rank
    of_others = whole.view(2, 8, CHOICES)[1 - group.rank]
    came = int(((of_others >= own) & (of_others < own + 2)).sum())
    went = int(((chosen >= 0) & ((chosen < own) | (chosen >= own + 2))).sum())
    counts, rows = 8 * (EXPERTS // 2 + 2), 8 * SIZE * (came + went)
    results = []
    watched = Watched()
    for way in ("none", "again", "kept"):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        layer.zero_grad()
        before = group.received_bytes
        if way == "none":
            out = layer["experts"](inputs[0], chosen, inputs[1])
        else:
            kept = watched if way == "kept" else None
            out = again(layer["experts"], inputs[0], chosen, inputs[1], kept=kept)
        forward = group.received_bytes - before
        if way == "kept":
            (region,) = watched.regions
            assert region.size == 3 and region.bytes == 2 * counts + 8 * SIZE * int(
                ((whole >= own) & (whole < own + 2)).sum() + (chosen >= 0).sum()
            ), (region.size, region.bytes)
        out.square().sum().backward()
        assert forward == counts + rows, (way, forward)
        backward = group.received_bytes - before - forward
        assert backward == rows + (way == "again") * (counts + rows), (way, backward, rows)
        results.append([out.detach(), *(one.grad for one in (*inputs, *layer.parameters()))])
    assert watched.regions[0].size == watched.regions[0].bytes == 0
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def every_call(group: zeroth.Communicator) -> None:
    """tp's, sp's and rings: bits and bytes. A call whose result nothing needs again may be left out by a recompute."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(group.rank))
    w = torch.randn(6, 6, dtype=torch.float64)
    _C.all_reduce(w, group)

    def summed(x: torch.Tensor) -> torch.Tensor:
        pending = _C.reduce_from_group_async(x, group)
        return _C.chunked_linear_reduce(pending.wait().tanh(), w, None, 2, group)

    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "all_reduce": lambda x: _C.all_reduce(x, group),
        "reduce_from_group": lambda x: _C.reduce_from_group(_C.copy_to_group(x, group), group),
        "gather": lambda x: _C.all_gather(x, 0, group),
        "gather_from_group": lambda x: _C.gather_from_group(x, 1, group),
        "reduce_scatter": lambda x: _C.reduce_scatter(x, 1, group),
        "all_to_all": lambda x: _C.all_to_all(x, 0, 1, group),
        "ring": lambda x: torch.cat(_C.ring_shift([x, 2 * x], group)),
        "gathered_linear": lambda x: _C.gathered_linear(x, w, None, 0, group),
        "pending": summed,
    }
    for name, call in calls.items():

        def region(x: torch.Tensor, call: Any = call) -> torch.Tensor:
            return call((x * x).tanh()).tanh() * 2

        seen = []
        for kept in (None, zeroth.nn.keep_calls):
            own = x.clone().requires_grad_()
            out = again(region, own, kept=kept)
            before = group.received_bytes
            out.square().sum().backward()
            seen.append((out.detach(), own.grad, group.received_bytes - before))
        (out, grad, plain), (kept_out, kept_grad, less) = seen
        assert torch.equal(out, kept_out) and torch.equal(grad, kept_grad), name
        assert less < plain or name == "pending", (name, less, plain)  # its sums are read from memory of the others


def regions(group: zeroth.Communicator) -> None:
    """Nested ones; a recompute that ends early; a second backward; what nobody recomputes."""

    def region(x: torch.Tensor) -> torch.Tensor:
        return _C.all_reduce(x.sin(), group).sin()

    x = torch.randn(3, dtype=torch.float64)
    group.broadcast(x, 0)
    wanted = x.clone().requires_grad_()
    region(region(region(wanted))).sum().backward()
    one_call, all_bytes = 3 * 8, []
    for inner, outer in ((Watched(False), Watched(False)), (Watched(False), None), (None, Watched(False))):
        own = x.clone().requires_grad_()

        def nested(x: torch.Tensor, inner: Any = inner) -> torch.Tensor:
            return region(again(region, region(x), kept=inner))

        before = group.received_bytes
        again(nested, own, kept=outer).sum().backward()
        all_bytes.append((group.received_bytes - before) // one_call)
        assert torch.equal(own.grad, wanted.grad)
        for watched in (inner, outer):
            assert watched is None or (watched.contexts and not watched.is_alive())
    # 3 calls forward and 3 backward; more where a region that keeps nothing is computed again
    assert all_bytes[0] == 6 and all_bytes[1] == 6 + 3 and all_bytes[2] == 6 + 1, all_bytes

    watched = Watched()
    own = x.clone().requires_grad_()
    before = group.received_bytes
    out = again(lambda x: _C.all_reduce(_C.all_reduce(x.sin(), group).sin(), group), own, kept=watched)
    assert watched.regions[0].size == 2
    out.sum().backward(retain_graph=True)  # nothing behind the second sum needs it: it is not computed again
    assert watched.regions[0].size == watched.regions[0].bytes == 0
    assert group.received_bytes - before == 4 * one_call
    first, own.grad = own.grad, None
    out.sum().backward()
    assert torch.equal(own.grad, first)
    assert group.received_bytes - before == (4 + 3) * one_call  # the first sum is made again, and the two of backward

    watched = Watched(False)
    out = again(region, x.clone().requires_grad_(), kept=watched)
    assert watched.is_alive()
    del out
    assert not watched.is_alive()
    assert not _C.hands_out_calls()


def refusals(group: zeroth.Communicator) -> None:
    x = torch.ones(3, dtype=torch.float64)
    turns = [0]

    def other_call(x: torch.Tensor) -> torch.Tensor:
        turns[0] += 1
        y = x.sin()
        return (_C.all_gather(y, 0, group) if turns[0] == 1 else _C.all_reduce(y, group).repeat(2)).sin()

    def more_calls(x: torch.Tensor) -> torch.Tensor:
        turns[0] += 1
        y = _C.all_reduce(x.sin(), group)
        return (y if turns[0] == 1 else _C.all_reduce(y, group)).sin()

    def other_shape(x: torch.Tensor) -> torch.Tensor:
        turns[0] += 1
        return _C.all_reduce(x.sin()[: turns[0]], group).sum().sin()

    def in_place(x: torch.Tensor) -> torch.Tensor:
        return _C.all_reduce(x.sin(), group).mul_(2).sin()

    for region, text in (
        (other_call, "other calls.*call 1 of a region.*expected: all_gather of Double .3. in .*got: all_reduce of"),
        (more_calls, "other calls.*call 2 of a region.*expected: no call: the forward made 1.*got: all_reduce"),
        (other_shape, r"other calls.*expected: all_reduce of Double \[1\].*got: all_reduce of Double \[2\]"),
        (in_place, "written to in place.*call 1 of a region"),
    ):
        turns[0] = 0
        out = again(region, x.clone().requires_grad_(), kept=zeroth.nn.keep_calls)
        with refused("MISMATCH", text):
            out.sum().backward()
        turns[0] = 0
    total = group.all_reduce(torch.ones(1))  # no rank was called: the group goes on
    assert float(total) == 2


def doubled() -> tuple[Any, Any]:
    """keep_calls(), with a recompute that leaves tensors of float64 as they are."""
    record, hand_out = zeroth.nn.keep_calls()

    class Both:
        def __enter__(self) -> None:
            self.mode = Doubles()
            self.mode.__enter__()
            hand_out.__enter__()

        def __exit__(self, *error: Any) -> None:
            hand_out.__exit__(*error)
            self.mode.__exit__(*error)

    return record, Both()


def models(world: zeroth.World, axes: list[str]) -> None:
    """gradient_checkpointing_enable() of transformers, as without it: losses and weights, bit by bit."""

    for axis, family, stage in (("ep", "Mixtral", 3), ("tp", "Qwen3Moe", 1), ("sp", "Mixtral", 2)):
        if axis not in axes:
            continue
        seen = []
        for way in ("none", "kept", "again"):
            model = made(family).train()
            if way != "none":
                context = doubled if way == "kept" else lambda: (contextlib.nullcontext(), Doubles())
                model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": context})
            config = {
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zeroth": {"mesh": {axis: 2}, "parallel": {"verify": "never"}},
            }
            engine = zeroth.Engine(model, config, world=world, log_level="error")
            losses = []
            for step in range(2):
                with Doubles():
                    loss = engine(**batch(step, world.rank if axis == "ep" else 0), use_cache=False).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            weights = engine.state_dict(ranks=None)
            received = engine.mesh.axis(axis).received_bytes
            engine.close(keep_parameters=False)
            seen.append((losses, weights, received))
        for losses, weights, _ in seen[1:]:
            assert losses == seen[0][0], (axis, losses, seen[0][0])
            assert all(torch.equal(value, seen[0][1][name]) for name, value in weights.items()), axis
        assert seen[0][2] == seen[1][2] < seen[2][2], (axis, [one[2] for one in seen])


def main() -> None:
    world = zeroth.World.from_environment()
    torch.set_num_threads(1)
    _MESH.append(world.mesh({"ep": 2}))
    group = _MESH[0].axis("ep")
    for part in (bytes_of_experts, every_call, regions, refusals):
        part(group)
    models(world, sys.argv[1:])
    print(f"rank {world.rank}: kept calls held", flush=True)


_MESH: list[zeroth.Mesh] = []
if __name__ == "__main__":
    main()
