"""One rank of two whose saved tensors rest in files, whose blocks are reversible, whose layers are in tiles; see
activations_test.py.

activations_rank.py FOLDER CASE...
"""

from __future__ import annotations

import sys
from typing import Any

import cases
import torch
from refusing import refused
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroth

WIDTH, DEPTH, STEPS = 32, 5, 3


def world() -> zeroth.World:
    return zeroth.World.from_environment()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(self.norm(x)))), 0.1, self.training)


class Deep(nn.Module):
    """`how`: None, or use_reentrant of the checkpoints around the blocks."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.how = nn.Linear(WIDTH, WIDTH), how
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, use_reentrant=self.how)
        return x.square().mean()


def config(stage: int, micro: int = 1, activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    zeroth_keys = dict(more.pop("zeroth", {}))
    if activations:
        zeroth_keys["activations"] = {"min_bytes": 1, "buffer_bytes": 65536, **activations}
    return {
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "aio": {"block_size": 4096},
        "zeroth": zeroth_keys,
        **more,
    }


def train(
    model: nn.Module, document: dict[str, Any], width: int = WIDTH, steps: int = STEPS, rows: int = 8
) -> tuple[list[str], zeroth.Engine]:
    """Losses and norms, as hexadecimal numbers."""
    engine = zeroth.Engine(model, document, world=world(), log_level="error")
    seen = []
    torch.manual_seed(100 + engine.rank)
    for step in range(steps):
        for micro in range(document["gradient_accumulation_steps"]):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + engine.rank)
            loss = engine(torch.randn(rows, width, generator=generator))
            engine.backward(loss)
            result = engine.step()
        seen += [loss.item().hex(), result.grad_norm.hex()]
    return seen, engine


def same_bits(folder: str) -> None:
    """In files as in memory: losses and norms; memory as planned, nothing live after a step."""
    rows = (
        (0, 1, True, "checkpoints"),
        (1, 2, False, "checkpoints"),
        (2, 2, None, "all"),
        (3, 1, False, "all"),
        (3, 2, True, "checkpoints"),
    )
    for stage, micro, how, saved in rows:
        expected, resident = train(Deep(how), config(stage, micro))
        got, filed = train(Deep(how), config(stage, micro, {"device": "nvme", "nvme_path": folder, "saved": saved}))
        row = (stage, micro, how, saved)
        assert got == expected, row
        report = filed.activation_report()
        assert report["live"] == 0 and report["on_demand"] <= report["moved"] // 2, (row, report)
        if saved == "checkpoints":
            one = 8 * WIDTH * 4
            assert report["moved"] == STEPS * micro * DEPTH, (row, report)
            assert (report["bytes_moved"], report["peak_live_bytes"]) == (report["moved"] * one, DEPTH * one), report
            assert report["bytes_written"] == report["moved"] * 4096 >= report["bytes_read"], report
        else:
            assert report["moved"] > STEPS * micro * DEPTH, (row, report)
            assert how is not None or report["kept"] > 0, (row, report)  # views of parameters
        memory = filed.memory_report()
        assert memory.activation_files >= report["peak_live_bytes"] > 0, memory
        assert memory.planned["staging"] == memory.live["staging"] == 65536, memory
        assert "saved tensors on disk" in str(memory), str(memory)
        assert resident.memory_report().activation_files == 0 and resident.activation_report() == {}
        filed.reset_counters()
        with torch.no_grad():
            filed(torch.zeros(8, WIDTH))
        assert filed.activation_report()["moved"] == 0
        for engine in (resident, filed):
            engine.close(keep_parameters=False)
    document = config(1, 1, {"device": "none"}, activation_checkpointing={"cpu_checkpointing": True})
    expected, _ = train(Deep(True), config(1))
    got, in_host = train(Deep(True), document)
    assert got == expected and in_host.activation_report() == {}, "the memory of a CPU is the host's"
    with refused("CONFIG", "have no folder.*which: /zeroth/activations/nvme_path"):
        train(Deep(True), config(1, 1, {"device": "nvme"}))
    with refused("OUT_OF_MEMORY", "does not fit"):
        small = {"memory_limit_bytes": 400_000}
        train(Deep(True), config(1, 1, {"device": "nvme", "nvme_path": folder}, zeroth=small))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def pipeline(folder: str) -> None:
    """Two stages, with the saved tensors of several micro-batches in files: the first of each is read on demand."""

    def run(activations: dict[str, Any] | None) -> tuple[list[float], zeroth.Engine]:
        torch.manual_seed(1)
        model = nn.Sequential(*(Checkpointed() for _ in range(6)), nn.Linear(WIDTH, 1))
        document = config(1, 4, activations, zeroth={"mesh": {"pp": 2}})
        laid = zeroth.pipe.PipelineModule(list(model), num_stages=2, loss_fn=lambda y, _: y.square().mean())
        engine = zeroth.Engine(laid, document, world=world(), log_level="error")
        losses = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            batches = [(torch.randn(8, WIDTH, generator=generator), torch.zeros(8)) for _ in range(4)]
            losses.append(engine.train_batch(iter(batches))[1])
        return losses, engine

    expected, resident = run(None)
    got, filed = run({"device": "nvme", "nvme_path": folder})
    assert got == expected, (got, expected)
    report = filed.activation_report()
    assert report["live"] == 0 and report["moved"] >= 8, report
    for engine in (resident, filed):
        engine.close(keep_parameters=False)


def choices_of(engine: zeroth.Engine) -> list[str]:
    assert engine._planned is not None
    return list(engine._planned.choices.values())


def planned(folder: str) -> None:
    """The engine's choice: the bits of memory before and after it, the same on all ranks, within the memory, its reason
    in the report; and modules as they were when the engine is closed."""
    one_input = 8 * WIDTH * 4
    for stage, micro, device, memory in (
        (3, 2, "nvme", 0),
        (1, 1, "nvme", 3 * one_input),
        (2, 1, "none", 2 * DEPTH * one_input),  # of rank 1, which has twice the rows: rank 0 could keep a unit
    ):
        row = (stage, micro, device, memory)
        rows = 8 * (1 + world().rank) if device == "none" else 8
        expected, resident = train(Deep(None), config(stage, micro), steps=5, rows=rows)
        keys = {"choice": "planned", "memory_bytes": memory, "device": device, "nvme_path": folder}
        model = Deep(None)
        got, engine = train(model, config(stage, micro, keys), steps=5, rows=rows)
        assert got == expected, row
        choices = choices_of(engine)
        numbers = [["keep", "recompute", "move", "recompute+move"].index(one) for one in choices]
        every = world().mesh({"dp": 2}).world.all_gather(torch.tensor([numbers]))
        assert len(choices) == DEPTH and every.unique(dim=0).shape[0] == 1, (row, every)
        kept = choices.count("recompute") * one_input * rows // 8
        if memory == 0:
            assert set(choices) == {"keep"}, (row, choices)
        else:
            assert "keep" not in choices and kept <= memory, (row, choices)
        if device == "nvme":
            assert engine.activation_report()["moved"] > 0 and engine.activation_report()["live"] == 0, row
        report = engine.memory_report()
        told = f"activations of {DEPTH} units: "
        assert told in report.activation_choice and report.activation_choice in str(report), report.activation_choice
        assert "blocks.3" in report.activation_choice and "memory " in report.activation_choice
        assert resident.memory_report().activation_choice == ""
        for one in (resident, engine):
            one.close(keep_parameters=True)
        assert all("_compiled_call_impl" not in vars(block) for block in model.blocks)

    def counting() -> Deep:
        model = Deep(None)
        for block in model.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]
        return model

    plain = counting()
    expected, resident = train(plain, config(0))
    for choice, memory in (("keep", 0), ("move", 1)):  # another forward would change the statistics
        model = counting()
        keys = {"choice": "planned", "memory_bytes": memory, "device": "nvme", "nvme_path": folder}
        got, engine = train(model, config(0, 1, keys))
        assert got == expected and set(choices_of(engine)) == {choice}, (choice, choices_of(engine))
        assert all(torch.equal(one, other) for one, other in zip(plain.buffers(), model.buffers(), strict=True))
        engine.close(keep_parameters=False)
    resident.close(keep_parameters=False)
    with refused("OUT_OF_MEMORY", "memory"):
        train(counting(), config(1, 1, {"choice": "planned", "memory_bytes": 2 * DEPTH * one_input}))
    with refused("OUT_OF_MEMORY", "memory"):
        train(Deep(None), config(1, 1, {"choice": "planned", "memory_bytes": one_input}))
    with refused("CONFIG", "which: /zeroth/activations/choice"):
        laid = zeroth.pipe.PipelineModule(list(Deep(None).blocks), num_stages=2, loss_fn=lambda y, _: y.mean())
        zeroth.Engine(laid, config(1, 1, {"choice": "planned"}, zeroth={"mesh": {"pp": 2}}), world=world())


def reversible(folder: str) -> None:
    """At every stage the same bits, and the gradients of the plain computation."""
    half = WIDTH // 2

    def part() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(half), nn.Linear(half, half), nn.Tanh(), nn.Dropout(0.2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.body = zeroth.ReversibleSequence(zeroth.Reversible(part(), part()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(self.first(x)).square().mean()

    assert "body.blocks.2" in [unit.name for unit in zeroth.units(Model())]
    expected = None
    for stage in range(4):
        got, engine = train(Model(), config(stage, 2))
        expected = expected or got
        assert got == expected, stage
        engine.close(keep_parameters=False)


def tiles(folder: str) -> None:
    """At stage 3 the largest gathered piece falls by the number of tiles; at every stage the same bits."""
    width, wide = 32, 512

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x))).square().mean()

    def tiled() -> nn.Module:
        model = Model()
        model.up = zeroth.TiledLinear.from_linear(model.up, out_splits=8)  # type: ignore[assignment]
        model.down = zeroth.TiledLinear.from_linear(model.down, in_splits=8)  # type: ignore[assignment]
        return model

    matrix = width * wide * 4
    expected, whole = train(Model(), config(3))
    gathered = whole.memory_report().planned["gathered"]
    assert gathered >= 2 * matrix
    losses = None
    for stage in (0, 3):
        got, engine = train(tiled(), config(stage))
        losses = losses or got
        assert got == losses, stage
        for one, other in zip(got, expected, strict=True):
            assert abs(float.fromhex(one) - float.fromhex(other)) < 1e-5, (one, other)
        if stage == 3:
            report = engine.memory_report()
            assert report.planned["gathered"] == report.measured_peak["gathered"] <= 2 * (matrix // 8 + 4096), report
            assert report.live_gathered_peak <= 2 * (matrix // 8 + 4096), report
            assert report.overflow_slots == 0, report
        engine.close(keep_parameters=False)
    whole.close(keep_parameters=False)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embedding, self.head = nn.Embedding(64, width), nn.Linear(width, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = (x * 10).long().remainder(64)
            return self.head(torch.tanh(self.embedding(tokens))).square().mean()

    whole_losses, whole = train(Tied(), config(3))
    model = Tied()
    assert zeroth.tile(model, larger_than=64 * width) == ["embedding", "head"]
    tied_losses, engine = train(model, config(3))
    for one, other in zip(tied_losses, whole_losses, strict=True):
        assert abs(float.fromhex(one) - float.fromhex(other)) < 1e-5, (one, other)
    planned = [one.memory_report().planned["gathered"] for one in (engine, whole)]
    assert planned == [64 * width, 4 * 64 * width], planned
    report = engine.memory_report()  # the backward of the head gives its tiles back, which that of the embedding awaits
    assert report.planned == report.measured_peak, (report.planned, report.measured_peak)
    assert report.overflow_slots == 0 and report.live_gathered_peak <= 64 * width + 4096, report
    for reshard in ("default", "all", "none"):  # what each tile is gathered for, as the formula says
        tied = Tied()
        zeroth.tile(tied, larger_than=64 * width)
        _, other = train(tied, config(3, 2, zeroth={"reshard": reshard}))
        wire = other.wire_report()
        assert wire["all_gather"] == STEPS * wire["planned_all_gather"] > 0, (reshard, wire)
        other.close(keep_parameters=False)
    state, reference = zeroth.untiled_state_dict(model, engine.state_dict()), whole.state_dict()
    assert state.keys() == reference.keys(), (state.keys(), reference.keys())
    for name, value in state.items():
        torch.testing.assert_close(value, reference[name])


def main() -> None:
    cases.run(globals(), sys.argv[2:], sys.argv[1])


if __name__ == "__main__":
    main()
