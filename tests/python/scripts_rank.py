"""One rank of two for scripts_test.py: what scripts of other systems do that only several ranks can do."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator

import forks
import torch
import zoo
from alone import config
from safetensors.torch import load_file
from told import told
from torch import nn

import zeroth

SHORT = {"zeroth": {"timeout_ms": 20_000}}


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return next(zoo.batches(2, 1, 1))[0][rank]


def layers(stage: int, rank: int) -> None:
    """LISA: layers are drawn anew every few steps, here without a common seed."""
    model = zoo.make("plain")
    engine = zeroth.Engine(model, config(stage, **SHORT), params=model.parameters(), log_level="off")

    def step(trained: int) -> zeroth.StepResult:
        for number, block in enumerate(model.blocks):
            block.requires_grad_(number == trained)
        engine.backward(engine(*batch(rank)))
        return engine.step()

    assert step(2).committed
    told(f"layers, stage {stage}", rank, lambda: step(rank))
    assert step(1).committed  # and it goes on
    assert engine.steps == 2
    engine.close()


def expanded(stage: int, rank: int) -> None:
    """Of a row that is shown several times, the row is shared."""

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("row", torch.full((1, 4), 1.0 + rank).expand(3, 4))
            self.register_buffer("value", torch.full((), 3.0 + rank).expand(2, 2))
            self.register_buffer("phase", torch.full((2,), 1.0 + rank, dtype=torch.complex64).conj())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x + self.row[0]).square().mean()

    model = Shown()
    engine = zeroth.Engine(model, config(stage, **SHORT), log_level="off")
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)))
        assert engine.step().committed
        assert torch.equal(model.row, torch.ones(3, 4)) and model.row.stride() == (0, 1), model.row
        assert torch.equal(model.value, torch.full((2, 2), 3.0)), model.value
        assert torch.equal(model.phase, torch.ones(2, dtype=torch.complex64)), model.phase
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.safetensors")
        engine.export_safetensors(path)
        if rank == 0:
            assert torch.equal(load_file(path)["row"], torch.ones(3, 4))
    engine.close()


def ragged(stage: int, jagged: bool, name: str, rank: int) -> None:
    model = nn.Linear(4, 4)
    layout = torch.jagged if jagged else torch.strided
    model.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))
    told(name, rank, lambda: zeroth.Engine(model, config(stage, **SHORT), log_level="off"))


def reference(stage: int, rank: int) -> None:
    """A frozen model: each rank evaluates its own batch, as often as it likes."""
    plain = zoo.make("plain")
    model = zoo.make("plain").requires_grad_(False)
    model.head.packed = nn.Parameter(torch.arange(5000).half(), requires_grad=False)
    engine = zeroth.Engine(model, config(stage, **SHORT), log_level="off")
    for _ in range(2):
        with torch.no_grad():
            assert engine(*batch(rank)).item() == plain(*batch(rank)).item()
    if stage == 3:
        whole = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        assert engine.memory_report().planned["parameters"] < 0.8 * whole
    engine.barrier()
    engine.close()
    assert torch.equal(model.head.packed, torch.arange(5000).half())


def cases() -> Iterator[tuple[str, Callable[[int], None]]]:
    for stage in (0, 3):
        yield f"layers, stage {stage}", functools.partial(layers, stage)
        yield f"expanded buffer, stage {stage}", functools.partial(expanded, stage)
        yield f"reference, stage {stage}", functools.partial(reference, stage)
        for jagged, kind in ((False, "nested"), (True, "jagged")):
            name = f"{kind} buffer, stage {stage}"
            yield name, functools.partial(ragged, stage, jagged, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    forks.run(dict(cases()))
