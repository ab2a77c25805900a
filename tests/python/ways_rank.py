"""One rank: backward reaches units in every way that scripts take to them, at stages 0 and 3 and beside plain torch.
Started by zeroth-run; see ways_test.py. Fails if stages differ in a single bit, or from plain torch by more than 1e-12
in float64.

Rows of NETS: pairwise, what a unit computes x what it returns x what the caller does to that in place x when it is
gathered x checkpoint x compile x number of forwards. WAYS: one function each, `loss(model, engine, x, y)`.
`engine` is None in plain torch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pairs
import tier
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroth

STEPS = 3
LR = 0.05
"""of SGD: Adam makes a step of one size of a gradient that is nothing but rounding"""
TOLERANCE = 1e-12
BATCH, TIME, WIDTH, CLASSES = 2, 3, 8, 5
torch.set_default_dtype(torch.float64)


# --- what a unit computes ---------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(WIDTH) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Bmm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.weight.expand(x.shape[0], -1, -1))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Lookup(nn.Module):
    """An embedding of what x rounds to."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(x.detach().mean(-1).abs().mul(4).long() % CLASSES)


OPS: dict[str, Callable[[], nn.Module]] = {
    "matmul": lambda: nn.Linear(WIDTH, WIDTH),
    "bmm": Bmm,
    "scale": Scale,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "conv": Conv,
    "embedding": Lookup,
    "prelu": nn.PReLU,
}
RETURNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda y: y,
    "view": lambda y: y.reshape(-1, WIDTH).view(BATCH, TIME, WIDTH),
    "squeeze": lambda y: y.unsqueeze(0).squeeze(0),
    "slice": lambda y: torch.cat([y, y], 1)[:, :TIME],
    "transpose": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
}


def set_part(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h[:, 0] = x[:, 0]
    return h


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "none": lambda h, x: h + x,
    "add": lambda h, x: h.add_(x),
    "mul": lambda h, x: h.mul_(0.5),
    "relu": lambda h, x: torch.relu_(h),
    "masked_fill": lambda h, x: h.masked_fill_(h.detach() < -1, 0.0),
    "set": set_part,
}


class Block(nn.Module):
    """Two of the operation, so that one weight is needed after the gradients of the other."""

    def __init__(self, op: str, returns: str) -> None:
        super().__init__()
        self.first, self.second = OPS[op](), OPS[op]()
        self.returns = RETURNS[returns]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.returns(self.second(torch.tanh(self.first(x))))


class Net(nn.Module):
    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__()
        self.row = row
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(row["op"], row["returns"]) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        for block in self.blocks:
            if row["compiled"]:
                block.compile(backend="aot_eager")

    def once(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(x) if self.row["enters"] else x
        for block in self.blocks:
            if self.row["checkpoint"] is None:
                out = block(h)
            else:
                out = checkpoint(block, h, use_reentrant=self.row["checkpoint"] == "reentrant")
            h = IN_PLACE[self.row["in_place"]](out, h)
        return self.head(h)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.once(x)
        for _ in range(self.row["forwards"] - 1):
            logits = logits + self.once(x.flip(0))
        return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1))


NETS = pairs.beside(
    pairs.pairwise(
        op=list(OPS),
        in_place=list(IN_PLACE),
        returns=list(RETURNS),
        checkpoint=[None, "reentrant", "not reentrant"],
        reshard=["default", "all", "none"],
        forwards=[1, 2],
        enters=[True, False],  # else the first block's input needs no gradient
    ),
    "compiled",
    [False] * 8 + [True],
)


def possible(row: dict[str, Any]) -> bool:
    # A reentrant checkpoint needs an input with a gradient; compiled blocks inside one are torch's own trouble.
    return row["checkpoint"] != "reentrant" or (row["enters"] and not row["compiled"])


# --- ways -------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Blocks that keep what they compute beside what they return."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(WIDTH, WIDTH), nn.PReLU(), nn.Linear(WIDTH, WIDTH)
            self.kept: torch.Tensor | None = None
            self.quiet = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.act(self.up(x))
            self.kept = self.down(h)
            return x.detach() if self.quiet else x + torch.tanh(self.kept)

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.first: Callable[[Plain, torch.Tensor], torch.Tensor] = lambda model, x: x
        self.last: Callable[[Plain, torch.Tensor], torch.Tensor] = lambda model, x: x
        """run in forward, before the blocks and after the loss"""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(self.first(self, x))
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.features(x)
        return h if y is None else self.last(self, loss_of(self.head(h), y))


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, CLASSES), y.reshape(-1))


Backward = Callable[[torch.Tensor], None]
Way = Callable[[Plain, "zeroth.Engine | None", torch.Tensor, torch.Tensor, Backward], torch.Tensor]
WAYS: dict[str, Way] = {}
SLOW = {"a_linearized_model"}
"""seven seconds a run, in torch: of the long tier"""


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def gathered(engine: zeroth.Engine | None, *what: nn.Module | nn.Parameter) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if engine is None else engine.gathered(*what)


@way
def a_loss_on_an_attribute(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    loss = model(x, y)
    return loss + sum(block.kept.square().mean() for block in model.blocks)


@way
def only_an_attribute(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    model(x, y)
    return model.blocks[1].kept.square().mean()


@way
def a_second_backward_on_an_attribute(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    loss = model(x, y)
    loss.backward(retain_graph=True)
    return model.blocks[0].kept.square().mean()


@way
def a_hook_that_keeps_outputs(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    kept: list[torch.Tensor] = []
    handles = [b.down.register_forward_hook(lambda m, i, out: kept.append(out)) for b in model.blocks]
    loss = model(x, y)
    for handle in handles:
        handle.remove()
    return loss + sum(out.abs().mean() for out in kept)


@way
def outputs_that_are_detached(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    for block in model.blocks:
        block.quiet = True
    model(x, y)
    for block in model.blocks:
        block.quiet = False
    return sum(block.kept.square().mean() for block in model.blocks)


@way
def siamese_checkpoints_of_units(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    def tower(h: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h

    return (tower(x) - tower(x.flip(0))).square().mean()


@way
def two_forwards_chosen_and_rejected(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return F.softplus(model(x.flip(0), y) - model(x, y))


@way
def two_losses_one_after_the_other(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    h = model(x)
    backward(h.square().mean() + 0.0 * model.blocks[0].kept.sum())
    return model(x.flip(0), y)


@way
def a_forward_derivative(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    value, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return value.square().mean() + tangent.square().mean()


@way
def a_linearized_model(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    """Its tangents are computed from the parameters again, by a graph of torch's and not by the module."""
    value, tangent_of = torch.func.linearize(model, x)
    with gathered(engine, model):
        return value.square().mean() + tangent_of(torch.ones_like(x)).mean()


@way
def a_mapped_model(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return torch.func.vmap(model)(x).square().mean()


@way
def a_gradient_of_the_input(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    """A penalty on it, as in WGAN-GP: backward of a backward."""
    x = x.clone().requires_grad_(True)
    loss = model(x, y)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.square().sum()


@way
def gradients_of_the_weights(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    """A penalty on them: the second backward goes through what the first one read of the weights."""
    loss = model(x, y)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    return loss + sum(grad.square().sum() for grad in grads if grad is not None)


@way
def a_gradient_by_functorch(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    grad = torch.func.grad(lambda at: model(at, y))(x)
    return grad.square().sum() + model(x, y)


@way
def a_pullback(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    value, pull = torch.func.vjp(model, x)
    return value.square().mean() + pull(torch.ones_like(value))[0].square().mean()


@way
def a_jacobian(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return torch.func.jacrev(lambda at: model(at).mean((0, 1)))(x).square().mean()


@way
def a_loss_fused_with_the_head(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    h = model(x)
    with gathered(engine, model.head):
        return loss_of(F.linear(h, model.head.weight, model.head.bias), y)


@way
def a_head_that_is_chunked_and_checkpointed(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    h = model(x)

    def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with gathered(engine, model.head.weight):
            return loss_of(h @ model.head.weight.T, y)

    return sum(checkpoint(part, h[:, t], y[:, t], use_reentrant=False) for t in range(TIME))


@way
def a_penalty_on_weights(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    loss = model(x, y)
    for block in model.blocks:
        with gathered(engine, block.up):
            loss = loss + 0.1 * block.up.weight.square().sum()
    return loss


@way
def a_penalty_of_orthogonality(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    """As AdaLoRA's: products of weights of all units."""
    loss = model(x, y)
    with gathered(engine, *model.blocks):
        for block in model.blocks:
            w = block.down.weight
            loss = loss + 0.1 * torch.norm(w @ w.T - torch.eye(WIDTH))
    return loss


class Product(torch.autograd.Function):
    """x times a weight that it saves itself: autograd has numbered the node when this forward runs."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


def penalty(model: Plain, loss: torch.Tensor) -> torch.Tensor:
    return loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())


def neighbour(model: Plain, x: torch.Tensor) -> torch.Tensor:
    """By a product, by a view of a view, by a row, in a list."""
    up, down = model.blocks[0].up, model.blocks[2].down
    h = F.linear(x, up.weight, up.bias) + x @ down.weight.T[:, :].T + down.weight[1]
    return h + torch.stack([up.bias, down.bias]).sum(0)


def with_forwards(model: Plain, engine: zeroth.Engine | None, x: torch.Tensor, y: torch.Tensor, **code: Any) -> Any:
    for name, function in code.items():
        setattr(model, name, function)
    return (engine or model)(x, y)


@way
def a_penalty_on_all_weights_in_the_forward(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return with_forwards(model, engine, x, y, last=penalty)


@way
def a_penalty_before_the_blocks_run(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return with_forwards(model, engine, x, y, first=lambda model, x: x + penalty(model, x.mean() * 0.0) / 100)


@way
def weights_of_other_units_in_the_forward(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return with_forwards(model, engine, x, y, first=neighbour)


@way
def weights_of_other_units_in_a_checkpoint(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    def first(model: Plain, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(neighbour, model, x, use_reentrant=False)

    return with_forwards(model, engine, x, y, first=first)


@way
def a_function_that_saves_the_weight_of_another_unit(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return with_forwards(model, engine, x, y, first=lambda model, x: Product.apply(x, model.blocks[1].up.weight))


@way
def weights_that_one_rank_reads(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    """Over memory that is shared each rank gathers for itself."""
    if engine is None or engine.rank == 0:
        return with_forwards(model, engine, x, y, last=lambda model, loss: loss + penalty(model, loss).detach() * 0.0)
    return with_forwards(model, engine, x, y)


@way
def units_that_are_called_alone(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    return model.blocks[2](model.blocks[0](x)).square().mean()


@way
def a_graph_that_runs_twice(model, engine, x, y, backward):  # type: ignore[no-untyped-def]
    loss = model(x, y)
    backward(functools.partial(loss.backward, retain_graph=True))  # type: ignore[arg-type]
    return loss


# --- training ---------------------------------------------------------------------------------------------------------


def batches(world: int, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for rank in range(world):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(BATCH, TIME, WIDTH, generator=generator)
        yield x, torch.randint(CLASSES, (BATCH, TIME), generator=generator)


def by_row(row: dict[str, Any]) -> tuple[Callable[[], nn.Module], Way]:
    return lambda: Net(row), lambda model, engine, x, y, backward: (engine or model)(x, y)


def trained_by_torch(make: Callable[[], nn.Module], one: Way, world: int) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        for x, y in batches(world, step):

            def backward(loss: torch.Tensor) -> None:
                loss() if callable(loss) else loss.backward()

            one(model, None, x, y, backward).backward()  # type: ignore[arg-type]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained_by_zeroth(
    make: Callable[[], nn.Module], one: Way, world: zeroth.World, stage: int, reshard: str = "default"
) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = make()
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        "zeroth": {"threads": 1, "timeout_ms": 30_000, "reshard": reshard},
    }
    engine = zeroth.Engine(model, config, world=world, log_level="off")
    for step in range(STEPS):
        x, y = list(batches(world.size, step))[world.rank]

        def backward(loss: torch.Tensor) -> None:
            loss() if callable(loss) else engine.backward(loss)  # noqa: B023

        loss = one(model, engine, x, y, backward)  # type: ignore[arg-type]
        engine.backward(loss)
        result = engine.step()
        assert result.committed, result
        del loss
    engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 1000  # type: ignore[attr-defined]
    world = zeroth.World.from_environment()
    chosen = sys.argv[1:]
    cases: list[tuple[str, Callable[[], nn.Module], Way, str]] = []
    for number, row in enumerate(row for row in NETS if possible(row)):
        make, one = by_row(row)
        cases.append((f"row{number} " + " ".join(f"{k}={v}" for k, v in row.items()), make, one, row["reshard"]))
    for name, one in WAYS.items():
        if name in SLOW and not tier.LONG and not chosen:
            continue
        cases += [(f"{name} reshard={reshard}", Plain, one, reshard) for reshard in ("default", "all")]
    failed = 0
    ran = 0
    impossible: list[str] = []
    for name, make, one, reshard in cases:
        if chosen and not any(word in name for word in chosen):
            continue
        try:
            expected = trained_by_torch(make, one, world.size)
        except RuntimeError as error:  # views that a checkpoint returns cannot be written to, for one
            impossible.append(f"{name}: {str(error)[:200]}")
            continue
        ran += 1
        try:
            at_0 = trained_by_zeroth(make, one, world, 0, reshard)
            at_3 = trained_by_zeroth(make, one, world, 3, reshard)
            same = all(torch.equal(a, b) for a, b in zip(at_0, at_3, strict=True))
            assert same, "stages 0 and 3 differ"
            worst = max(float((a - b).abs().max()) for a, b in zip(at_3, expected, strict=True))
            assert worst <= TOLERANCE, f"{worst} from plain torch"
        except zeroth.Error:
            raise
        except Exception as error:
            if "-v" in chosen:
                raise
            failed += 1
            print(f"rank {world.rank}: {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if world.rank == 0:
        for text in impossible:
            print(f"not possible in torch: {text}")
        print(f"{ran} ways: " + ("ok" if failed == 0 else f"{failed} FAILED"))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
