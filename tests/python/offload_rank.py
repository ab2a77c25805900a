"""One rank of two whose optimizer states and parameters rest in files; see offload_test.py.

offload_rank.py FOLDER CASE...
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

import cases
import torch
from refusing import refused
from torch import nn

import zeroth

STEPS, WIDTH = 4, 48


@dataclasses.dataclass(frozen=True)
class Row:
    stage: int
    dtype: str = ""
    """bf16 or fp16"""
    ratio: float = 1.0
    slots: int = 3
    io: str = "probe"
    micro: int = 1
    optimizer: str = "AdamW"
    clip: float = 0.1
    param: bool = False
    """parameters too"""
    update: dict[str, Any] = dataclasses.field(default_factory=dict)
    """zeroth.update"""


ROWS = (
    Row(0),
    Row(1, "bf16", ratio=0.5, micro=2),
    Row(2, "fp16", slots=2, io="threads", param=True),
    Row(3, clip=0.0, optimizer="SGD", io="aio"),
    Row(3, "bf16", slots=6, micro=2, param=True),
)


def world() -> zeroth.World:
    return zeroth.World.from_environment()


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, 1))


def config(row: Row, folder: str) -> dict[str, Any]:
    document: dict[str, Any] = {
        "zero_optimization": {"stage": row.stage},
        "gradient_accumulation_steps": row.micro,
        "gradient_clipping": row.clip,
        "optimizer": {
            "type": row.optimizer,
            "params": {"lr": 1e-2, **({"momentum": 0.9} if row.optimizer == "SGD" else {})},
        },
        "zeroth": {"offload": {"block_elements": 1024, "io": row.io}, "update": row.update},
        "aio": {"block_size": 4096, "queue_depth": 8},
    }
    if row.dtype:
        document[row.dtype] = {"enabled": True, **({"initial_scale_power": 8} if row.dtype == "fp16" else {})}
    if folder:
        document["zero_optimization"]["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": folder,
            "buffer_count": row.slots,
            "ratio": row.ratio,
            "pin_memory": True,
        }
    if folder and row.param:
        document["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 6144}
    return document


def made(row: Row, folder: str) -> zeroth.Engine:
    return zeroth.Engine(model(), config(row, folder), world=world(), log_level="error")


def train(engine: zeroth.Engine, row: Row, first: int = 0, steps: int = STEPS) -> list[str]:
    """Losses and norms, as hexadecimal numbers."""
    seen = []
    for step in range(first, first + steps):
        for micro in range(row.micro):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + engine.rank)
            x = torch.randn(8, WIDTH, generator=generator).to(next(engine.module.parameters()).dtype)
            loss = (engine(x).float() - x.float().sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            result = engine.step()
        seen += [loss.item().hex(), result.grad_norm.hex()]
    return seen


def same_bits(folder: str) -> None:
    """In files as in memory: losses, norms, weights and moments; memory and disk as planned."""
    for row in ROWS:
        with torch.device("meta"):
            shapes = model()
        foreseen = [zeroth.plan_tiers(shapes, config(row, folder), world_size=2, rank=rank) for rank in range(2)]
        resident, filed = made(row, ""), made(row, folder)
        assert train(resident, row) == train(filed, row), row
        for kind in ("master", "exp_avg") if row.optimizer == "AdamW" else ("master", "momentum_buffer"):
            expected, got = resident.state_dict(kind=kind, ranks=None), filed.state_dict(kind=kind, ranks=None)
            assert expected.keys() == got.keys() and expected, (row, kind)
            assert all(torch.equal(got[name], value) for name, value in expected.items()), (row, kind)
        report = filed.memory_report()
        assert report.planned_files == report.measured_files > 0, report
        total = foreseen[filed.rank].total
        assert (total.memory, total.files) == (sum(report.planned.values()), report.planned_files), (row, foreseen)
        assert all(parameter.is_meta for parameter in shapes.parameters()) and "staging" in str(foreseen[0])
        assert report.planned["staging"] == report.live["staging"] > 0, report
        assert row.slots >= 4 or report.resident >= report.live["staging"], report  # all slots were used
        assert resident.memory_report().planned_files == 0
        at_rest = {
            report.planned.get("parameters", 0),
            report.live.get("parameters", 0),
        }  # states of 0 bytes have no row
        assert at_rest == {0} if row.param else 0 not in at_rest, report
        if row.ratio == 1.0 and row.slots < 4:  # else the slots have room for as much
            assert sum(report.planned.values()) < sum(resident.memory_report().planned.values()), report
        for engine in (resident, filed):
            engine.close(keep_parameters=False)


def checkpoints(folder: str) -> None:
    """From files to memory and back, at other stages."""
    row = Row(2, "bf16", param=True)
    place = str(pathlib.Path(folder) / "saved")
    whole = made(row, "")
    expected = train(whole, row, steps=2 * STEPS)
    first = made(row, folder)
    train(first, row)
    first.save(place)
    for stage, where in ((3, ""), (1, folder)):
        other = dataclasses.replace(row, stage=stage)
        second = made(other, where)
        second.load(place)
        assert train(second, other, first=STEPS) == expected[2 * STEPS :], (stage, where)
        second.close(keep_parameters=False)
    assert not [name for name in pathlib.Path(folder).iterdir() if name.name != "saved"], "files have no name"


def refusals(folder: str) -> None:
    row = Row(1)
    optimizer, missing = "which: /zero_optimization/offload_optimizer/nvme_path; ", "got: /nowhere/at/all; hint: mkdir"
    with refused("IO", f"{optimizer}.*{missing}"):
        made(row, "/nowhere/at/all")
    file = f"{folder}/file{zeroth.World.from_environment().rank}"
    with open(file, "w"), refused("IO", f"Not a directory.*{optimizer}.*got: {file}"):
        made(row, file)
    for key, tiers in (
        ("/zero_optimization/offload_param", {"offload_param": {"device": "nvme", "nvme_path": "/nowhere/at/all"}}),
        ("/zeroth/activations", {"device": "nvme", "nvme_path": "/nowhere/at/all"}),
    ):
        section = "zeroth" if key == "/zeroth/activations" else "zero_optimization"
        document = {section: {"activations": tiers} if section == "zeroth" else tiers}
        with refused("IO", f"which: {key}/nvme_path; .*{missing}"):
            zeroth.Engine(model(), document, world=world(), log_level="error")
    document = config(row, folder)
    del document["zero_optimization"]["offload_optimizer"]["nvme_path"]
    with refused("CONFIG", "have no folder.*which: /zero_optimization/offload_optimizer/nvme_path"):
        zeroth.Engine(model(), document, world=world(), log_level="error")
    document = config(row, folder)
    document["zero_optimization"]["offload_param"] = {"device": "nvme", "max_in_cpu": 1024}
    with refused("CONFIG", "max_in_cpu; unit .* has 3 blocks of at most 1024 .*expected: at least 3072 elements"):
        zeroth.Engine(model(), document, world=world(), log_level="error")
    del document["zero_optimization"]["offload_optimizer"]
    del document["zero_optimization"]["offload_param"]["max_in_cpu"]
    with refused("CONFIG", "have no folder.*which: /zero_optimization/offload_param/nvme_path"):
        zeroth.Engine(model(), document, world=world(), log_level="error")
    document = config(row, folder)
    document["zeroth"]["memory_limit_bytes"] = 70_000
    del document["zero_optimization"]["offload_optimizer"]
    with refused("OUT_OF_MEMORY", r"optimizer states in files \(offload_optimizer\)"):
        zeroth.Engine(model(), document, world=world(), log_level="error")


def reports(folder: str) -> None:
    """Counted bytes are those of the formula, the share is one, and the trace has rows by name."""
    row = Row(3, "bf16", slots=3, micro=2, param=True)
    engine = made(row, folder)
    assert set(engine.transfer_report().rows) == {"optimizer", "parameters"}
    train(engine, row, steps=2)
    engine.trace_transfers()
    for step in range(2, STEPS):
        before = engine.transfer_report()
        train(engine, row, first=step, steps=1)
        report = engine.transfer_report()
        for name, of_set in report.rows.items():
            counted = of_set.last_step
            assert (counted.needed_bytes, counted.changed_bytes) == (
                of_set.planned_read_bytes,
                of_set.planned_write_bytes,
            ), (step, name, str(report))
            assert counted.write_bytes == counted.changed_bytes > 0, (name, str(report))
            moved = counted.needed_bytes - counted.spared_read_bytes + counted.unused_bytes + counted.ahead_bytes
            assert counted.read_bytes + before.rows[name].last_step.ahead_bytes == moved, (name, str(report))
            assert of_set.all.write_bytes == before.rows[name].all.write_bytes + counted.write_bytes, str(report)
        assert report.all.in_flight_s > report.last_step.in_flight_s > 0
        assert 0 <= report.last_step.hidden_share <= 1
    events = json.loads(engine.transfer_trace())["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert any(name.startswith("forward ") for name in names) and "step" in names, names
    assert any(name.startswith("states of unit ") for name in names), names
    assert any(name.startswith("parameters of unit ") for name in names), names
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows >= {"training", "reads", "writes"}, rows
    engine.reset_counters()
    assert all(of_set.all.write_bytes == 0 for of_set in engine.transfer_report().rows.values())
    engine.close(keep_parameters=False)


def update_times(folder: str) -> None:
    """Inside backward with the bits of an update after the vote; delayed, and flushed, with those of one at once."""
    for row in (Row(1, clip=0.0), Row(3, "bf16", micro=2, update={"clip_by": "previous_norm"})):
        after, inside = (
            made(row, ""),
            made(dataclasses.replace(row, update={**row.update, "inside_backward": True}), folder),
        )
        assert train(after, row) == train(inside, row), row
        weights = [engine.state_dict(ranks=None) for engine in (after, inside)]
        assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items()), row
        for engine in (after, inside):
            engine.close(keep_parameters=False)
    row = Row(2, update={"delayed_after": 0})
    at_once, late = made(Row(2), ""), made(row, folder)
    for step in range(STEPS):
        assert train(at_once, row, step, 1) == train(late, row, step, 1), step
        late.flush_update()
    for engine in (at_once, late):
        engine.close(keep_parameters=False)
    with refused("CONFIG", "/zeroth/update/inside_backward.*previous_norm"):
        made(Row(1, update={"inside_backward": True}), folder)


def _damaged(folder: str) -> list[tuple[int, bytes]]:
    """Flips the bytes of this process's files in the folder, and returns descriptors of them with what there was."""
    kept = []
    for name in os.listdir("/proc/self/fd"):
        where = f"/proc/self/fd/{name}"
        try:
            if not os.path.realpath(where).startswith(os.path.realpath(folder)):
                continue
            file = os.open(where, os.O_RDWR)
        except OSError:  # the descriptor of the listing itself
            continue
        bytes_there = os.pread(file, os.fstat(file).st_size, 0)
        os.pwrite(file, bytes(byte ^ 255 for byte in bytes_there), 0)
        kept.append((file, bytes_there))
    assert kept
    return kept


def caught(folder: str) -> None:
    """An error of a file in step() that the script catches on one rank: all ranks refuse to go on from weights of which
    some are updated, until a checkpoint is loaded. Then the bits are those of a job that had no error."""
    for number, row in enumerate((Row(1), Row(3, "bf16", param=True), Row(2, "fp16", slots=2, io="threads"))):
        whole, engine = made(row, folder), made(row, folder)
        saved = str(pathlib.Path(folder) / f"saved{number}")
        train(engine, row, 0, 2)
        engine.save(saved)
        expected = train(whole, row, 0, 4)
        generator = torch.Generator().manual_seed(engine.rank)
        x = torch.randn(8, WIDTH, generator=generator).to(next(engine.module.parameters()).dtype)
        engine.backward(engine(x).float().square().mean())
        whole.close(keep_parameters=False)
        kept = _damaged(folder) if engine.rank == 1 else []
        with refused("IO" if engine.rank == 1 else "ABORTED", "" if engine.rank == 1 else "failed on another rank"):
            engine.step()
        for file, bytes_there in kept:
            os.pwrite(file, bytes_there, 0)
            os.close(file)
        steps = engine.steps
        with refused("USAGE", "torn by an update that failed.*got: rank 1"):
            engine(x)
        with refused("USAGE", "torn by an update that failed.*got: rank 1"):
            engine.save(saved)
        with refused("USAGE", "torn by an update that failed.*got: rank 1"):
            engine.step()
        with refused("USAGE", "torn"):
            engine.state_dict()
        assert engine.steps == steps == 2, engine.steps
        engine.load(saved)
        assert train(engine, row, 2, 2) == expected[4:], (row, expected)
        engine.close(keep_parameters=False)


def failing(folder: str) -> None:
    """At a place between the vote and the end of a step, by ZEROTH_FAULTS: rank 1 says what happened, rank 0 hears it,
    and neither goes on."""
    row = Row(1) if "files" in sys.argv else Row(1, ratio=0.0)
    engine = made(row, folder if "files" in sys.argv else "")
    train(engine, row, 0, 2)
    code = "INTERNAL" if engine.rank == 1 else "ABORTED"
    with refused(code, "planted failure"):
        train(engine, row, 2, 2)
    with refused("USAGE" if engine.rank == 1 or folder and "files" in sys.argv else "ABORTED", "planted failure"):
        train(engine, row, 2, 1)


def files(folder: str) -> None:
    """A word for failing()."""


def main() -> None:
    cases.run(globals(), sys.argv[2:], sys.argv[1])


if __name__ == "__main__":
    main()
