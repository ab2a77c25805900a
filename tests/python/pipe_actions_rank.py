"""One rank of two whose programs have actions beside those of a schedule; see pipe_test.py. Bits are those of the plain
program.

pipe_actions_rank.py CASE...
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import cases
import torch
from refusing import refused
from torch import nn
from torch.nn import functional as F

import zeroth
from zeroth import _C
from zeroth.pipe.held import Held

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks/pipeline"))

from saved import Saved  # noqa: E402

STEPS, MICRO, WIDTH, ROWS = 2, 4, 48, 24


def world() -> zeroth.World:
    return zeroth.World.from_environment()


class Counting(nn.Module):
    """Counts its forwards in a buffer that they read, and that is another tensor each time."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x * (1 + 1 / self.count)


class Wide(nn.Linear):
    """The last operation is no product, which I need not run where its input has no gradient."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        Wide(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), Wide(), Counting(),
        Wide(), nn.BatchNorm1d(WIDTH), Wide(), nn.Dropout(0.3), Wide(),
    ).double()  # fmt: skip


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    drawn = [torch.randn(ROWS + number % 2, WIDTH, dtype=torch.float64, generator=generator) for number in range(MICRO)]
    return [(x, x.flip(1)) for x in drawn]


class Trained(NamedTuple):
    numbers: list[float]
    states: dict[str, torch.Tensor]
    """weights and buffers"""
    program: str
    peak: int
    """most bytes of what was kept for backward, at a time; 0 at ZeRO-3"""
    report: dict[str, int]
    gathered: int
    """bytes that came to this rank"""
    moved: dict[str, int]


def config(
    schedule: str, stage: int, section: Any = None, folder: str | None = None, device: str = "nvme", **keys: Any
) -> dict[str, Any]:
    files = {"device": device, "nvme_path": folder, "min_bytes": 1024}
    return {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": MICRO,
        "zeroth": {
            "mesh": {"pp": 2},
            "pipeline": {"schedule": schedule, "split": "uniform", **keys},
            **({"activations": files} if folder is not None else {}),
        },
        **({"pipeline": section} if section else {}),
    }


@contextlib.contextmanager
def watching(saved: Saved) -> Iterator[None]:
    """Also what the hooks of a FLUSH take."""
    take = Held._pack

    def see(held: Held, tensor: torch.Tensor) -> Any:
        return take(held, saved.see(tensor))

    with saved.watching():
        Held._pack = see  # type: ignore[method-assign]
        try:
            yield
        finally:
            Held._pack = take  # type: ignore[method-assign]


def train(schedule: str, stage: int, *, program: str | None = None, **keys: Any) -> Trained:
    """Also checks bytes on the wire and memory."""
    settings = config(schedule, stage, **keys)
    done = zeroth.pipeline(layers(), settings, world=world(), loss_fn=F.mse_loss, program=program)
    engine = zeroth.Engine(done.model, settings, world=world(), log_level="warning")
    engine.reset_counters()
    torch.manual_seed(11 + engine.rank)
    saved = Saved([] if stage == 3 else [*done.model.parameters(), *done.model.buffers()])
    numbers = []
    for step in range(STEPS):
        with contextlib.nullcontext() if stage == 3 else watching(saved):
            result, loss = engine.train_batch(batches(step))
        numbers += [loss, result.grad_norm]
    numbers.append(torch.rand(1).item())
    moved = engine.activation_report() if keys.get("folder") else {}
    wire, memory = engine.wire_report(), engine.memory_report()
    for kind in ("all_gather", "reduce_scatter"):
        assert wire[kind] == STEPS * wire[f"planned_{kind}"], (schedule, stage, kind, wire)
    assert memory.planned == memory.measured_peak, memory
    report = engine._pipeline.core.report()  # type: ignore[union-attr]
    states = {name: value.clone() for name, value in engine.state_dict(ranks=None).items()}
    engine.close(keep_parameters=False)
    return Trained(numbers, states, done.program, saved.peak + report["kept_peak_bytes"], report,
                   wire["all_gather"], moved)  # fmt: skip


def require_same(got: Trained, plain: Trained) -> None:
    assert got.numbers == plain.numbers, (got.program, got.numbers, plain.numbers)
    assert got.states.keys() == plain.states.keys() and "6.running_mean" in plain.states, plain.states.keys()
    for name, value in plain.states.items():
        assert torch.equal(got.states[name], value), (got.program, name)


def recomputed() -> None:
    """Random numbers are drawn and statistics move as if every forward ran once."""
    for schedule, stage, most in (("gpipe", 1, 0.65), ("zb-h1", 2, 0.9), ("zb-v", 1, 0.0)):
        plain = train(schedule, stage)
        again = train(schedule, stage, recompute=True)
        require_same(again, plain)
        assert "RECOMPUTE" not in plain.program and plain.report["recomputed"] == 0
        own = again.program.splitlines()[1 + world().rank]
        assert again.report["recomputed"] == STEPS * own.count("RECOMPUTE"), again.report
        print(f"{schedule}: {plain.peak} B kept for backward, {again.peak} B with RECOMPUTE", flush=True)
        if most > 0 and own.count("RECOMPUTE") == MICRO * own.count("REDUCE"):
            assert again.peak < most * plain.peak, (schedule, again.peak, plain.peak)
            assert again.report["live_peak"] < plain.report["live_peak"]
    of_deepspeed = train("gpipe", 1, section={"activation_checkpoint_interval": 2})
    require_same(of_deepspeed, train("gpipe", 1))
    assert "0RECOMPUTE0" in of_deepspeed.program


def gathered() -> None:
    """Four ranks: at ZeRO-3 the program says when parameters are gathered, and nothing is at any other time."""
    plain = train("zb-h1", 3)
    again = train("zb-h1", 3, recompute=True)
    kept = train("zb-h1", 3, unshard="step")
    for other in (again, kept, train("zb-h1", 1)):
        require_same(other, plain)
    assert 0 < kept.gathered < plain.gathered
    if world().rank < 2:  # no chunk of the last stage is computed again
        assert plain.gathered < again.gathered
    own = plain.program.splitlines()[1 + world().rank // 2].split()
    assert sum(word.endswith("UNSHARD") for word in own) == (2 * MICRO if world().rank < 2 else MICRO), own

    settings = config("zb-h1", 3)
    done = zeroth.pipeline(layers(), settings, world=world(), loss_fn=F.mse_loss)
    engine = zeroth.Engine(done.model, settings, world=world(), log_level="warning")
    open_spans, bytes_of = 0, {}
    with engine.pipeline_step(batches(0)) as running:
        for action in running.actions:
            before = engine.wire_report()["all_gather"]
            running.run(action)
            found = engine.wire_report()["all_gather"] - before
            open_spans += action.endswith("UNSHARD") - action.endswith("RESHARD")
            if action != "STEP":
                bytes_of.setdefault(action.lstrip("0123456789").rstrip("0123456789"), set()).add(found)
            assert action == "STEP" or found == 0 or open_spans == 1, (action, found)
    assert bytes_of["F"] == bytes_of["I"] and len(bytes_of["F"]) == 1 and 0 not in bytes_of["F"], bytes_of
    assert {kind for kind, found in bytes_of.items() if found != {0}} == {"F", "I"}, bytes_of
    engine.close(keep_parameters=False)

    long = plain.program.replace(" 0RESHARD 0UNSHARD", "")
    assert long != plain.program
    with refused(
        "USAGE", "keeps the parameters of a chunk for several micro-batches.*expected: zeroth.pipeline.unshard"
    ):
        zeroth.pipeline(layers(), settings, world=world(), loss_fn=F.mse_loss, program=long)


def moved() -> None:
    """FLUSH and FETCH of what autograd saved, and of the inputs that a RECOMPUTE needs: all that goes comes back."""
    plain = train("gpipe", 1)
    away = {}
    for recompute in (False, True):
        program = _C.make_program("gpipe", 2, MICRO, offload=True, recompute=recompute)
        got = train("gpipe", 1, program=program, folder=tempfile.gettempdir())
        require_same(got, plain)
        own = got.program.splitlines()[1 + world().rank].split()
        flushed = sum("FLUSH" in word for word in own)
        assert got.moved["live"] == 0 and got.moved["bytes_moved"] == got.moved["bytes_restored"], got.moved
        assert (got.moved["bytes_moved"] > 0) == (not recompute or world().rank == 1), got.moved
        assert flushed == sum("FETCH" in word for word in own) > 0
        away[recompute] = got.moved["bytes_moved"]
        print(f"recompute={recompute}: {plain.peak} B in memory, {got.peak} B with FLUSH", flush=True)
        assert got.peak < (0.3 if recompute else 0.75) * plain.peak, (got.peak, plain.peak)
    rows = STEPS * sum(len(x) for number, (x, _) in enumerate(batches(0)) if f"1FLUSH{number}" in program)
    assert away[True] == (rows * WIDTH * 8 if world().rank == 1 else 0), away
    assert away[False] > 4 * rows * WIDTH * 8
    by_keys = train("gpipe", 1, recompute=True, folder=tempfile.gettempdir())
    assert (by_keys.program, by_keys.moved["bytes_moved"]) == (got.program, got.moved["bytes_moved"])
    in_host = train("gpipe", 1, program=program, device="cpu", folder="")
    require_same(in_host, plain)
    with refused("USAGE", "there is no place for it; .*which: zeroth.activations.device"):
        train("gpipe", 1, program=program)


def cut() -> None:
    """By the configuration, with the stages of the call."""
    sample = batches(0)[0]
    settings = {"gradient_accumulation_steps": MICRO, "zeroth": {"pipeline": {"split": "memory"}}}
    make = functools.partial(zeroth.pipeline, world=world(), loss_fn=F.mse_loss)
    done = make(layers(), settings, stages=2, sample=sample)
    two = {"zeroth": {"mesh": {"pp": 2}}}
    expected = make(layers(), two, split="memory", sample=sample)
    assert list(done.bounds) == list(expected.bounds) != [0, 5, 10], done.bounds
    engine = zeroth.Engine(done.model, settings, world=world(), log_level="warning")
    assert engine.train_batch(batches(0))[0].committed
    engine.close(keep_parameters=False)
    with refused("USAGE", "measured on a micro-batch; .*which: memory; expected: sample="):
        make(layers(), settings, stages=2)
    with refused("CONFIG", "differ in the number of stages; .*which: stages and zeroth.mesh.pp"):
        make(layers(), two, stages=3)
    with refused("CONFIG", "differ in the number of stages.*expected: num_stages=2, or None; got: num_stages=1"):
        make(zeroth.pipe.PipelineModule([nn.Linear(2, 2)] * 2, num_stages=1), {}, stages=2)


def main() -> None:
    cases.run(globals(), sys.argv[1:])


if __name__ == "__main__":
    main()
