"""One rank that writes to weights beside the engine, reads those of other units, and ends accumulations early; see
writes_test.py.

writes_rank.py FOLDER
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import torch
from state_rank import STAGES, refused, same
from torch import nn

import zeroth

WIDTH = 40  # a unit of 2 * 40 * 40 elements lies on both ranks
CASTS = {torch.float32: {}, torch.bfloat16: {"bf16": {"enabled": True}}, torch.float16: {"fp16": {"enabled": True}}}


class Net(nn.Module):
    """`extra`: what its own forward adds to the loss, from its weights."""

    def __init__(self, extra: Callable[[Net], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)
        self.extra = extra
        self.first = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.extra(self) if self.extra is not None and self.first else None
        for block in self.blocks:
            x = x + block(x)
        loss = self.head(x).float().square().mean()
        if early is not None:
            return loss + early
        return loss if self.extra is None else loss + self.extra(self)


def make_engine(
    stage: int, dtype: torch.dtype = torch.float32, extra: Callable[[Net], torch.Tensor] | None = None, **more: object
) -> zeroth.Engine:
    torch.manual_seed(1)
    model = Net(extra)
    own = dict(more.pop("zeroth", {}))  # type: ignore[call-overload]
    zero = {"stage": stage, **more.pop("zero", {})}  # type: ignore[dict-item]
    settings = {
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zeroth": own,
        **CASTS[dtype],
        **more,
    }
    return zeroth.Engine(model, settings, units=model.blocks, log_level="warning")


def batch(engine: zeroth.Engine, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + engine.rank)).to(dtype)


def train(engine: zeroth.Engine, step: int, dtype: torch.dtype = torch.float32) -> zeroth.StepResult:
    engine.backward(engine(batch(engine, step, dtype)))
    return engine.step()


def frozen(folder: pathlib.Path) -> None:
    """Weights that do not train are replaced: the model computes with the new ones, wherever it has copies."""
    for copies in (False, True):
        for stage in (0, 2, 3):
            engine = make_engine(stage, zeroth={"compute_copies": copies})
            own = f"{stage}{copies}"
            engine.save(str(folder / own))
            engine.export_safetensors(str(folder / f"{own}.safetensors"))
            engine.close()
            model = Net().requires_grad_(False)
            model.head.requires_grad_(True)
            engine = zeroth.Engine(
                model,
                {"zero_optimization": {"stage": stage}, "zeroth": {"compute_copies": copies}},
                units=model.blocks,
                log_level="warning",
            )

            def doubled(engine: zeroth.Engine = engine, model: Net = model) -> None:
                with engine.gathered(model.blocks, modify_on="all"), torch.no_grad():
                    for parameter in model.blocks.parameters():
                        parameter.mul_(2.0)

            doors: dict[str, Callable[[], object]] = {
                "load_state_dict": lambda engine=engine: engine.load_state_dict(
                    {name: value + 0.5 for name, value in engine.state_dict().items()}
                ),
                "gathered": doubled,
                "load": lambda engine=engine, own=own: engine.load(str(folder / own)),
                "load_pretrained": lambda engine=engine, own=own: zeroth.load_pretrained(
                    engine, folder / f"{own}.safetensors"
                ),
            }
            for door, write in doors.items():
                if door == "load_pretrained":
                    doors["load_state_dict"]()
                write()
                plain = Net()
                plain.load_state_dict(engine.state_dict(ranks=None))
                x = batch(engine, 0)
                with torch.no_grad():
                    assert torch.equal(engine(x), plain(x)), (copies, stage, door)
            engine.close()


CHANGES: list[Callable[[torch.Tensor], object]] = [
    lambda value: value.clamp_(-0.05, 0.05),
    lambda value: value.mul_(0.5),
    lambda value: value.copy_(torch.where(torch.arange(value.numel()).view(value.shape) % 3 == 0, 0, value)),
    lambda value: value[:1].fill_(0.03125),
]


def by_data() -> None:
    """Writes by `.data`, of which autograd knows nothing: taken at stages 0 to 2."""
    for dtype in CASTS:
        expected: dict[str, torch.Tensor] | None = None
        for stage in (0, 1, 2):
            for copies in (False, True):
                engine = make_engine(stage, dtype, zeroth={"compute_copies": copies}, gradient_accumulation_steps=2)
                for step, change in enumerate(CHANGES):
                    train(engine, 2 * step, dtype)
                    assert train(engine, 2 * step + 1, dtype).boundary
                    for parameter in engine.module.parameters():
                        change(parameter.data)
                    written = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
                    read = engine.state_dict(ranks=None)
                    masters = engine.state_dict("master", ranks=None)
                    for name, value in written.items():
                        assert torch.equal(read[name], value), (dtype, stage, copies, step, name)
                        rounded = masters[name].to(dtype)
                        assert torch.equal(rounded, value) or dtype == torch.bfloat16, (dtype, stage, step, name)
                        assert (rounded - value).abs().max() <= value.abs().max() / 128 and masters[
                            name
                        ].isfinite().all()
                # Without a look in between: the update takes them by itself.
                engine.module.blocks[0][0].weight.data.fill_(0.0)
                train(engine, 90, dtype)
                train(engine, 91, dtype)
                assert engine.full("blocks.0.0.weight", "master").abs().max() < 0.02, (dtype, stage, copies)
                got = engine.state_dict("master", ranks=None)
                expected = got if expected is None else expected
                assert same(got, expected), (dtype, stage, copies)
                engine.close()


def masters_stay() -> None:
    """Where nobody writes, masters keep what their 16 bits do not show."""
    for dtype in (torch.float16, torch.bfloat16):
        engine = make_engine(1, dtype, optimizer={"type": "SGD", "params": {"lr": 1e-5}})
        shown = engine.full("blocks.1.0.weight")
        before = engine.full("blocks.1.0.weight", "master")
        for step in range(20):
            if train(engine, step, dtype).committed:  # a loss scale may be too large at first
                after = engine.full("blocks.1.0.weight", "master")
                assert not torch.equal(after, before), (dtype, step)
                before = after
        assert (engine.full("blocks.1.0.weight") == shown).float().mean() > 0.9, dtype
        engine.close()


def lost(folder: pathlib.Path) -> None:
    """Where parameters are gathered, a write is lost. The ranks that have the elements name it."""
    settings: list[dict[str, object]] = [{}, {"zeroth": {"compute_copies": True}}]
    settings.append({"zero": {"offload_param": {"device": "nvme", "nvme_path": str(folder)}}})
    for more in settings:
        engine = make_engine(3, **more)
        weight = engine.module.blocks[1][0].weight
        with refused("MODEL", "written in place"):
            with engine.gathered(weight):
                weight.data.mul_(2.0)
            engine.full("blocks.1.0.weight")

        def write(*_: object, weight: torch.Tensor = engine.module.blocks[2][0].weight) -> None:
            weight.data.mul_(2.0)

        handle = engine.module.blocks[2][1].register_forward_hook(write)
        with refused("MODEL", "written in place"):
            train(engine, 0)
        handle.remove()
        engine.zero_grad()
        with engine.gathered(weight, modify_on="all"), torch.no_grad():
            weight.mul_(1.0)
        assert train(engine, 1).committed
        engine.close()


def accumulations(folder: pathlib.Path) -> None:
    """end_accumulation() is a step with fewer micro-steps, and zero_grad() drops those that there were."""
    delayed = {"update": {"delayed_after": 1}}
    files = {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
    for number, more in enumerate(
        (
            {"zeroth": {"reduction_policy": "per_step"}},
            {"zeroth": {"reduction_policy": "per_micro_step"}, "gradient_clipping": 0.01},
            {"dtype": torch.float16, "zeroth": {"reduction_policy": "per_step"}},
            {"zeroth": delayed, "zero": files},
        )
    ):
        own = dict(more)
        dtype = own.pop("dtype", torch.float32)
        expected: dict[str, torch.Tensor] | None = None
        for stage in STAGES:
            whole = make_engine(stage, dtype, gradient_accumulation_steps=2, **own)
            short = make_engine(stage, dtype, gradient_accumulation_steps=4, **own)
            for step in range(3):
                results = []
                for engine in (whole, short):
                    for micro_step in range(2):
                        result = train(engine, 10 * step + micro_step, dtype)
                    results.append(result)
                if step == 1 and "update" not in own.get("zeroth", {}):  # a drop ends what is delayed
                    short.zero_grad()
                    train(short, 10 * step, dtype)
                    short.backward(short(batch(short, 10 * step + 1, dtype)))
                ended = short.end_accumulation()
                assert results[0].boundary and not results[1].boundary and ended.boundary
                assert ended.batches == results[0].batches == 2 * 2, ended.batches
                assert ended.grad_norm == results[0].grad_norm, (number, stage, step)
                nothing = short.end_accumulation()
                assert not nothing.boundary and nothing.step == ended.step
            for engine in (whole, short):
                engine.flush_update()
            got = short.state_dict("master", ranks=None)
            expected = got if expected is None else expected
            assert same(got, expected) and same(got, whole.state_dict("master", ranks=None)), (number, stage)
            train(short, 50, dtype)
            short.zero_grad()
            train(short, 51, dtype)
            with refused("USAGE", "drops every accumulation"):
                short.zero_grad()
            if stage in (0, 3):
                train(short, 52, dtype)
            else:
                short.end_accumulation()
            whole.close()
            if number == 0 and stage in (0, 3):
                optimizer = short.optimizer
                optimizer.zero_grad()  # of a loop that calls it beside each step()
                optimizer.zero_grad()
                assert short.end_accumulation().batches == 2 * 2
            short.close()


def joined() -> None:
    """The last step of an epoch is short, and rank 1 has a batch less."""
    for stage in (0, 3):
        engine = make_engine(stage, gradient_accumulation_steps=2, zeroth={"uneven": "join"})
        for _ in engine.batches(range(3 - engine.rank)):
            train(engine, 0)
        result = engine.end_accumulation()
        assert result.boundary and result.batches == 1 and engine.steps == 2, (result, engine.steps)
        # In the loop: a rank without a batch follows.
        seen: list[zeroth.StepResult] = []
        for number in engine.batches(range(3 - engine.rank), on_joined_step=seen.append):
            train(engine, 1)
            if number == 2:
                assert engine.end_accumulation().batches == 1
        assert engine.rank == 0 or [result.boundary for result in seen] == [False, True], seen
        assert engine.steps == 4 and not engine.end_accumulation().boundary
        engine.close()


def penalty(model: Net) -> torch.Tensor:
    return 0.1 * sum(parameter.square().sum() for parameter in model.parameters())  # type: ignore[return-value]


def all_at_once(model: Net) -> torch.Tensor:
    flat = torch.cat([parameter.flatten() for parameter in model.blocks.parameters()])
    norms = torch._foreach_norm(list(model.blocks.parameters()))
    return 0.1 * flat.square().sum() + 0.01 * torch.stack(norms).sum()


def products(model: Net) -> torch.Tensor:
    first, last = model.blocks[0][0].weight, model.blocks[3][0].weight
    return (first @ last.t()).square().mean() + first.data.abs().max() * last.sum()


def reads_of_others() -> None:
    """A forward reads weights of other units: they are gathered, in forward and in backward, with the same bits."""
    for extra, dtype, first in (
        (penalty, torch.float32, False),
        (penalty, torch.float32, True),
        (penalty, torch.bfloat16, False),
        (all_at_once, torch.float32, False),
        (products, torch.float32, True),
        (products, torch.float32, False),
    ):
        expected: dict[str, torch.Tensor] | None = None
        for stage in (0, 3):
            for copies in (False, True) if stage == 3 else (False,):
                engine = make_engine(stage, dtype, extra=extra, zeroth={"compute_copies": copies})
                engine.module.first = first
                for step in range(2):
                    train(engine, step, dtype)
                with torch.no_grad():
                    engine(batch(engine, 0, dtype))
                got = engine.state_dict("master", ranks=None)
                expected = got if expected is None else expected
                assert same(got, expected), (extra.__name__, dtype, stage, copies)
                if stage == 3:
                    with refused("USAGE", "not gathered now"):
                        engine.module.blocks[1][0].weight.sum()
                    text = repr(engine.module.blocks[1][0].weight)
                    assert "'blocks.1.0.weight' is not gathered now" in text and "size=(40, 40)" in text, text
                engine.close()
    # One rank alone, in evaluation: nobody has to take part.
    engine = make_engine(3, extra=penalty)
    if engine.rank == 0:
        with torch.no_grad():
            engine(batch(engine, 0))
    engine.barrier("rank 0 has read")
    engine.close()


def chains() -> None:
    """float16, the output of one call into another one: gradients of both ranks near those in float64, with the bits of
    stage 0 at stage 3, by either backward."""
    for plain_backward in (False, True):
        expected: dict[str, torch.Tensor] | None = None
        for stage in (0, 3):
            engine = make_engine(stage, torch.float16, fp16={"enabled": True, "loss_scale": 128})
            model = engine.module
            loss = engine.module.blocks[1](model.blocks[0](batch(engine, 1, torch.float16))).float().square().mean()
            if plain_backward:
                loss.backward()
            else:
                engine.backward(loss)
            got = {name: engine.full(f"blocks.{name}", "grad") for name in ("0.0.weight", "1.0.weight", "1.0.bias")}
            assert all(value is not None for value in got.values())
            torch.manual_seed(1)
            plain = Net().half().double()
            for rank in range(2):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 + rank)).half().double()
                (plain.blocks[1](plain.blocks[0](x)).square().mean() / 2).backward()
            for name, value in got.items():
                theirs = plain.blocks.get_parameter(name).grad
                assert theirs is not None and value is not None
                assert (value.double() - theirs).norm() <= 0.03 * theirs.norm(), (stage, name)
            expected = got if expected is None else expected  # type: ignore[assignment]
            assert same(got, expected), stage  # type: ignore[arg-type]
            engine.close()


def on_one_rank(folder: pathlib.Path) -> None:
    """What only one rank writes is refused on all of them, by name, until the ranks have the same values again."""
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (0, 1, 2):
            for copies in (False, True):
                engine = make_engine(stage, dtype, zeroth={"compute_copies": copies})
                train(engine, 0, dtype)
                before = engine.state_dict(ranks=None)
                if engine.rank == 0:  # as scripts load a checkpoint of another tool
                    engine.module.load_state_dict({name: value + 1 for name, value in before.items()})
                where = str(folder / f"one{stage}{dtype}{copies}")
                with refused("MISMATCH", "blocks.0.0.weight, blocks.0.0.bias, blocks.1.0.weight and 7 more"):
                    train(engine, 1, dtype)
                assert engine.steps == 1
                with refused("MISMATCH", "on one rank than on others"):
                    engine.full("head.bias")
                with refused("MISMATCH", "engine.load_state_dict(state) takes rank 0's"):
                    engine.save(where)
                assert not pathlib.Path(where).exists() or not list(pathlib.Path(where).glob("*/manifest*"))
                engine.load_state_dict({name: value + 1 for name, value in before.items()})
                assert train(engine, 1, dtype).committed
                engine.save(where)
                with torch.no_grad():
                    engine.module.head.bias.fill_(0.5)  # alike on all ranks
                assert engine.full("head.bias").eq(0.5).all()
                if engine.rank == 1:
                    engine.module.head.bias.data.fill_(0.25)  # no trace in autograd
                with refused("MISMATCH", "head.bias"):
                    engine.save(where, overwrite=True)
                engine.close()


def edits_at_any_stage(folder: pathlib.Path) -> None:
    """gathered(modify_on=0) where every rank could write: nothing is changed on any rank by what is not allowed."""
    for stage in (0, 1, 2, 3):
        engine = make_engine(stage)
        model = engine.module
        before = engine.state_dict(ranks=None)

        def unchanged(engine: zeroth.Engine = engine, before: dict[str, torch.Tensor] = before) -> None:
            assert same(engine.state_dict(ranks=None), before)

        def fails(engine: zeroth.Engine = engine, model: Net = model, stage: int = stage) -> None:
            with engine.gathered(model.head, modify_on=0), torch.no_grad():
                if engine.rank == 0 or stage < 3:
                    model.head.bias.fill_(1.0)
                raise RuntimeError("inside")

        try:
            fails()
        except RuntimeError as error:
            assert "inside" in str(error)
        unchanged()
        if stage < 3:
            with (
                refused("MODEL", "which: head.bias; expected: writes on rank 0"),
                engine.gathered(model.head, modify_on=0),
                torch.no_grad(),
            ):
                if engine.rank == 1:
                    model.head.bias.fill_(1.0)
            unchanged()
            # What the call does not name, on one rank.
            with (
                refused("MISMATCH", "head.weight"),
                engine.gathered(model.head.bias, modify_on=0),
                torch.no_grad(),
            ):
                model.head.bias.fill_(2.0)
                if engine.rank == 0:
                    model.head.weight.fill_(3.0)
            with engine.gathered(model.head.weight, modify_on=1):  # that rank has the values of before
                pass
            unchanged()
            # A write under read-only: that rank has an error at once, and all of them in the next call.
            try:
                with engine.gathered(model.head), torch.no_grad():
                    if engine.rank == 0:
                        model.head.weight.fill_(3.0)
            except zeroth.Error as error:
                assert engine.rank == 0 and error.code == "MODEL", error
            with refused("MISMATCH", "head.weight"):
                engine.full("head.weight")
            engine.load_state_dict(before)
            unchanged()
        engine.close()


def main() -> None:
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    calls: dict[str, Callable[[], None]] = {
        "frozen": lambda: frozen(folder),
        "by_data": by_data,
        "masters_stay": masters_stay,
        "lost": lambda: lost(folder),
        "accumulations": lambda: accumulations(folder),
        "joined": joined,
        "chains": chains,
        "on_one_rank": lambda: on_one_rank(folder),
        "edits_at_any_stage": lambda: edits_at_any_stage(folder),
        "reads_of_others": reads_of_others,
    }
    chosen = sys.argv[2:] or list(calls)
    for name in chosen:
        calls[name]()
        print(f"{zeroth.World.from_environment().rank} {name} done", flush=True)


if __name__ == "__main__":
    main()
