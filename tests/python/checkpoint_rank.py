"""One rank that saves and goes on; see checkpoint_test.py.

checkpoint_rank.py WHAT,FOLDER,STAGE,DTYPE...
"""

from __future__ import annotations

import json
import pathlib
import random
import sys

import numpy as np
import safetensors.torch
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import zeroth
import zeroth.ckpt


class Net(nn.Module):
    """With everything that a step may depend on: a tied weight, a frozen one, running statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(12, 23, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(12), requires_grad=False)
        self.register_buffer("table", torch.arange(12, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), y)


def make_engine(stage: int, dtype: torch.dtype, seed: int) -> zeroth.Engine:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    return zeroth.Engine(
        model,
        {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "gradient_clipping": 1.0,
            "gradient_accumulation_steps": 2,
            "train_micro_batch_size_per_gpu": 8,
        },
        params=[
            {"params": [p for p in model.parameters() if p.dim() >= 2]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        units=model.blocks,
        log_level="warning",
    )


class Run:
    def __init__(self, stage: int, dtype: torch.dtype, seed: int) -> None:
        self.engine = make_engine(stage, dtype, seed)
        self.scheduler = CosineAnnealingLR(self.engine.optimizer, T_max=20)
        rank = self.engine.rank
        torch.manual_seed(100 + rank)  # dropout and data differ on every rank
        random.seed(200 + rank)
        np.random.seed(300 + rank)

    def step(self) -> str:
        losses = []
        for _ in range(2):
            shift = random.randrange(23) + int(np.random.randint(23))
            x = (torch.randint(23, (8,)) + shift) % 23
            loss = self.engine(x, (x * 3 + 1) % 23)
            self.engine.backward(loss)
            result = self.engine.step()
            losses.append(loss.item())
        self.scheduler.step()
        return f"{sum(losses).hex()} {result.grad_norm.hex()} {result.lr.hex()}"

    def save(self, folder: str) -> str:
        return self.engine.save(folder, client_state={"scheduler": self.scheduler.state_dict(), "epoch": 3})

    def load(self, folder: str) -> zeroth.Loaded:
        loaded = self.engine.load(folder)
        self.scheduler.load_state_dict(loaded.client_state["scheduler"])
        return loaded


def tell(run: Run, what: str) -> None:
    print(f"{run.engine.rank} {what}", flush=True)


def whole(folder: str, stage: int, dtype: torch.dtype) -> None:
    run = Run(stage, dtype, seed=1)
    for step in range(1, 7):
        line = run.step()
        if step > 3:
            tell(run, f"step {step} {line}")
        if step == 3:
            path = run.save(folder)
            assert path == str(pathlib.Path(folder) / "step-00000003"), path


def resume(folder: str, stage: int, dtype: torch.dtype) -> None:
    run = Run(stage, dtype, seed=9)
    loaded = run.load(folder)
    assert (loaded.step, loaded.client_state["epoch"], run.engine.steps) == (3, 3, 3), loaded
    assert loaded.random_state == (loaded.world_size == run.engine.world_size), loaded
    assert not (loaded.missing or loaded.unexpected or loaded.skipped), loaded
    for step in range(4, 7):
        tell(run, f"step {step} {run.step()}")


def behind(folder: str, stage: int, dtype: torch.dtype) -> None:
    """As whole(), with saves behind the training at every step, and a blocking one into another folder."""
    run = Run(stage, dtype, seed=1)
    handles = []
    for step in range(1, 7):
        line = run.step()
        if step > 3:
            tell(run, f"step {step} {line}")
        state = {"scheduler": run.scheduler.state_dict(), "epoch": 3}
        handles.append(run.engine.save(folder, client_state=state, async_=True))
        run.engine.save(folder + "-blocking", client_state=state)
    assert all(handle.done() for handle in handles[:-1])  # each later save of all ranks has told of the end of these
    for step, handle in enumerate(handles, 1):
        assert handle.wait() == handle.path == str(pathlib.Path(folder) / f"step-{step:08}"), handle.path
        assert handle.done()
    assert "copy for checkpoints" in str(run.engine.memory_report())


def left(folder: str, stage: int, dtype: torch.dtype) -> None:
    """The program ends while the save runs."""
    run = Run(stage, dtype, seed=1)
    run.step()
    run.save(folder)
    run.step()
    globals()["kept"] = run, run.engine.save(folder, async_=True)


def weights(folder: str, stage: int, dtype: torch.dtype) -> None:
    """After a load, in whatever world."""
    run = Run(stage, dtype, seed=5)
    run.load(folder)
    out = pathlib.Path(folder) / f"weights-{run.engine.world_size}-{stage}.safetensors"
    run.engine.export_safetensors(str(out))


def refusals(folder: str, stage: int, dtype: torch.dtype) -> None:
    run = Run(stage, dtype, seed=1)
    assert run.engine.load(folder, if_any=True) is None
    for make, text in [
        (lambda: run.engine.load(folder), "there is no checkpoint"),
        (
            lambda: run.engine.save(folder, client_state={"tokenizer": object()}),
            "client_state['tokenizer'] is a object",
        ),
        (lambda: run.engine.save(folder, client_state={1: [print]}), "client_state[1][0] is a builtin"),
        (lambda: run.engine.save("/proc/none"), "who: rank 0 of 2"),
        (lambda: run.engine.save(f"{folder}-{run.engine.rank}"), "ranks name other folders"),
        (lambda: run.engine.save(f"{folder}-{run.engine.rank}", async_=True), "ranks name other folders"),
        (lambda: run.engine.load(f"{folder}-{run.engine.rank}"), "ranks name other folders"),
    ]:
        try:
            make()
        except zeroth.Error as error:
            assert text in str(error) and "rank 0 of 1" not in str(error), error
            tell(run, f"refused {error.code}")
        else:
            raise AssertionError(text)
    run.step()
    run.save(folder)
    x = torch.arange(8)
    run.engine.backward(run.engine(x, x))
    try:
        run.save(folder)
    except zeroth.Error as error:
        assert "between a backward and its step()" in str(error), error
        tell(run, f"refused {error.code}")
    run.engine.zero_grad()
    try:
        run.engine.save(folder)
    except zeroth.Error as error:
        assert "has been saved there before" in str(error), error
        tell(run, f"refused {error.code}")
    # Any reader of safetensors and of JSON can look into it.
    manifest = json.loads((pathlib.Path(folder) / "step-00000001" / "manifest.json").read_text())
    names = {param["name"] for param in manifest["params"]}
    assert {"embed.weight", "scale", "blocks.0.0.weight"} <= names, names
    assert [param["aliases"] for param in manifest["params"] if param["name"] == "embed.weight"] == [["head.weight"]]


def again(folder: str, stage: int, dtype: torch.dtype) -> None:
    """Rolls back, and saves the same step again."""
    run = Run(stage, dtype, seed=1)
    for _ in range(3):
        run.step()
        run.save(folder)
    run.engine.load(f"{folder}/step-00000001")
    random.seed(11 + run.engine.rank)  # other data than before
    run.step()
    for async_ in (False, True):
        try:
            saved = run.engine.save(folder, async_=async_)  # type: ignore[call-overload]
            saved.wait()  # type: ignore[union-attr]
        except zeroth.Error as error:
            assert error.code == "USAGE" and "saved there before" in str(error), error
            assert "other weights" in str(error), error
            tell(run, f"again refused {stage}")
    path = run.engine.save(folder, overwrite=True, keep_last=2)
    assert run.engine.save(folder) == run.engine.save(folder, async_=True).wait() == path
    random.random()
    assert run.engine.save(folder, async_=True).wait() == path  # rank by rank: other random generators
    run.engine.barrier()
    there = sorted(entry.name for entry in pathlib.Path(folder).glob("step-*"))
    assert there == ["step-00000002", "step-00000003"], there
    assert zeroth.ckpt.entries(folder)[0].step == 2
    expected = run.engine.full("embed.weight")
    assert run.engine.load(folder).step == 2
    found = run.engine.full("embed.weight")
    assert expected is not None and found is not None and torch.equal(found, expected)
    # Of another model and optimizer: the same error on both ranks, and nothing is changed.
    model = nn.ModuleDict({"inner": Net()})
    for optimizer, strict, text in [
        ("SGD", True, "another optimizer"),
        ("AdamW", False, "no parameter of the model"),
    ]:
        settings = {"zero_optimization": {"stage": stage}, "optimizer": {"type": optimizer}}
        other = zeroth.Engine(Net() if strict else model, settings, log_level="off")
        try:
            other.load(folder, strict=strict)
        except zeroth.Error as error:
            assert error.code == "CHECKPOINT" and text in str(error), error
            assert other.steps == 0
            tell(run, f"again refused {stage}")
        other.close(keep_parameters=False)


class Images(nn.Module):
    """Weights that lie in memory in three orders, or all row major."""

    def __init__(self, seed: int, ordered: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 6, (3, 2))
        self.last = nn.Linear(6, 5)
        self.frozen = nn.Parameter(torch.randn(2, 3, 4), requires_grad=False)
        self.to(dtype)
        if ordered:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())
            self.frozen.data = self.frozen.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x).mean((2, 3)))


def orders(folder: str, stage: int, dtype: torch.dtype) -> None:
    """A checkpoint of weights in one order of memory, loaded into another, both ways; and read by the tools."""

    def make(seed: int, ordered: bool) -> tuple[Images, zeroth.Engine]:
        model = Images(seed, ordered, dtype)
        settings = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}
        return model, zeroth.Engine(model, settings, log_level="warning")

    def states(engine: zeroth.Engine) -> dict[str, torch.Tensor]:
        kinds = ("param", "master", "exp_avg", "exp_avg_sq")
        every: dict[str, torch.Tensor] = {}
        for kind in kinds:
            trained = ["conv.weight", "conv.bias", "last.weight", "last.bias"]
            names = [*trained, "frozen"] if kind == "param" else trained
            every |= {f"{name}/{kind}": engine.full(name, kind).contiguous() for name in names}
        return every

    def require_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
        for name, value in one.items():
            assert torch.equal(value, other[name]), (name, value, other[name])

    rank = zeroth.World.from_environment().rank
    try:
        make(1, ordered=rank == 1)
        raise AssertionError("ranks with other orders of memory")
    except zeroth.Error as error:
        assert error.code == "MISMATCH" and "dimensions in memory 2 0 1" in str(error), error
    for ordered in (True, False):
        place = f"{folder}-{int(ordered)}"
        model, engine = make(1, ordered)
        for _ in range(5):  # in the middle of a step: gradients are in the files, too
            engine.backward(engine(torch.randn(2, 3, 5, 4, dtype=dtype)).square().mean())
            engine.step()
        path = engine.save(place)
        before = states(engine)
        _, other = make(2, not ordered)
        other.load(place)
        for one in (engine, other):
            torch.manual_seed(5)
            one.backward(one(torch.zeros(2, 3, 5, 4, dtype=dtype)).square().mean())
        require_same(before, states(other))
        for name in ("conv.weight", "last.weight"):  # the images of this micro-step are zero
            ours, theirs = (one.full(name, "grad").double() for one in (engine, other))
            assert (ours - theirs).abs().max() <= 1e-2 * ours.abs().max() > 0, (name, ours, theirs)
        for one in (engine, other):
            one.step()
        expected = states(engine)
        again, same = make(3, ordered)
        final = engine.save(place)
        same.load(place)
        require_same(expected, states(same))
        assert again.conv.weight.stride() == model.conv.weight.stride()
        engine.export_safetensors(f"{place}.safetensors")
        if engine.rank == 0:
            files = zeroth.ckpt.open(final)
            for name in ("conv.weight", "last.weight"):
                assert torch.equal(files.tensor(name), expected[f"{name}/master"]), name
                assert torch.equal(files.tensor(name, "exp_avg"), expected[f"{name}/exp_avg"]), name
            assert torch.equal(files.tensor("frozen"), expected["frozen/param"])
            written = safetensors.torch.load_file(f"{place}.safetensors")
            for name in ("conv.weight", "last.weight", "frozen"):
                assert torch.equal(written[name], expected[f"{name}/param"]), name
            about = json.loads((pathlib.Path(path) / "manifest.json").read_text())
            print(f"orders {stage} {ordered} format {about['format']}", flush=True)
        for one in (engine, other, same):
            one.close(keep_parameters=False)


def main() -> None:
    torch.set_num_threads(1)
    calls = {
        "again": again,
        "behind": behind,
        "left": left,
        "orders": orders,
        "refusals": refusals,
        "resume": resume,
        "weights": weights,
        "whole": whole,
    }
    for call in sys.argv[1:]:
        what, folder, stage, dtype = call.split(",")
        calls[what](folder, int(stage), getattr(torch, dtype))


if __name__ == "__main__":
    main()
