"""One rank of several that train models in the stages of a pipeline, at every ZeRO stage; see pipe_test.py.

Each line of a table is a training: its losses, norms and weights are those of one process with the whole batch, in
float64, and those of another ZeRO stage with ==.

pipe_rank.py PART...     the parts of the table that have as many ranks as there are
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import tempfile

import torch
from pipe_rows import TABLES, Row
from tensor_models import MODELS, SMALL, VOCAB
from torch import nn
from wide_norms import wide_norms

import zeroth

STEPS = 2
SGD = {"lr": 0.1, "momentum": 0.9}
Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]
"""losses, norms, weights"""


def batch(step: int, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(1, VOCAB, (2, 9 + number % 3), generator=generator)
    return {"input_ids": tokens}, tokens


def loss_fn(output: object, tokens: torch.Tensor) -> torch.Tensor:
    """In float64: transformers' own loss is computed in float32."""
    logits = output.logits  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def made(name: str, dtype: torch.dtype = torch.float64, layers: int = 6) -> nn.Module:
    torch.manual_seed(1)
    before = SMALL["num_hidden_layers"]
    SMALL["num_hidden_layers"] = layers
    try:
        model = MODELS[name]().to(dtype)
    finally:
        SMALL["num_hidden_layers"] = before
    if dtype == torch.float64:
        wide_norms(model)
    return model.train()


@functools.cache
def plain(name: str, count: int, clip: float, layers: int, sgd: bool) -> Trained:
    """Losses, norms and weights of one process."""
    model = made(name, layers=layers)
    optimizer = torch.optim.SGD(model.parameters(), **SGD) if sgd else torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(count):
            inputs, tokens = batch(step, number)
            loss = loss_fn(model(**inputs), tokens) / count
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, copy.deepcopy(dict(model.state_dict()))


def config_of(row: Row, stage: int) -> dict[str, object]:
    nvme = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    files = {"offload_optimizer": nvme, "offload_param": nvme} if row.files else {}
    return {
        "zero_optimization": {"stage": stage, **files},
        "optimizer": {"type": "SGD", "params": SGD} if row.sgd else {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_accumulation_steps": row.micro,
        "gradient_clipping": row.clip,
        "zeroth": {
            "mesh": {"pp": row.pp, "tp": row.tp, "sp": row.sp},
            "pipeline": {
                "schedule": row.schedule,
                "chunks": row.chunks,
                "unshard": row.unshard,
                "vocabulary": row.vocabulary,
                "recompute": row.again,
            },
            "reduction_policy": row.policy,
            "reshard": row.reshard,
            "offload": {"block_elements": 1024},
        },
        **({"fp16": {"enabled": True, "initial_scale_power": 8}} if row.dtype == "fp16" else {}),
        **({"bf16": {"enabled": True}} if row.dtype == "bf16" else {}),
    }


def train(row: Row, stage: int, world: zeroth.World, *, measure: bool = True) -> Trained:
    """The same on the mesh; checks bytes on the wire and, with `measure`, that planned memory is measured."""
    model = made(row.model, torch.float32 if row.dtype else torch.float64, row.layers)
    if row.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = config_of(row, stage)
    shared = row.tp * row.sp > 1  # then the model computes its loss from what ranks share
    zeroth.pipeline(model, config, world=world, loss_fn=None if shared else loss_fn)
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    inner = row.tp * row.sp
    dp = world.size // row.pp // inner
    own = world.rank // inner % dp
    losses, norms = [], []
    engine.reset_counters()
    for step in range(STEPS):
        batches = [batch(step, micro * dp + own) for micro in range(row.micro)]
        if shared:
            batches = [{"input_ids": tokens, "labels": tokens} for _, tokens in batches]
        result, loss = engine.train_batch(batches)
        assert result.committed, result
        losses.append(loss)
        norms.append(result.grad_norm)
    if measure:
        report = engine.memory_report()
        assert report.planned == report.measured_peak, (row, report.planned, report.measured_peak)
    wire = engine.wire_report()
    for kind in ("all_gather", "reduce_scatter"):
        assert wire[kind] == STEPS * wire[f"planned_{kind}"], (row, stage, kind, wire)
    assert_files(row, engine.transfer_report())
    weights = engine.state_dict(ranks=None)
    engine.close(keep_parameters=False)
    return losses, norms, weights


def assert_files(row: Row, report: zeroth.TransferReport) -> None:
    assert set(report.rows) == ({"optimizer", "parameters"} if row.files else set()), (row, report)
    for name, of_set in report.rows.items():
        step = of_set.last_step
        assert (step.needed_bytes, step.changed_bytes) == (of_set.planned_read_bytes, of_set.planned_write_bytes), (
            row,
            name,
            str(report),
        )


def close(got: float, expected: float, bound: float = 1e-12) -> bool:
    return abs(got - expected) <= bound * max(1.0, abs(expected))


def compare(row: object, mine: Trained, expected: Trained, *, sgd: bool, dtype: str = "") -> None:
    losses, norms, weights = expected
    bound = {"": 1e-12, "bf16": 0.05, "fp16": 0.01}[dtype]
    assert all(close(*pair, bound) for pair in zip(mine[0], losses, strict=True)), (row, mine[0], losses)
    assert all(close(*pair, 4 * bound) for pair in zip(mine[1], norms, strict=True)), (row, mine[1], norms)
    assert mine[2].keys() == weights.keys(), (row, mine[2].keys() ^ weights.keys())
    for name, value in weights.items():
        most = (1e-12 if sgd else 1e-8) if not dtype else 2.1 * STEPS * 1e-2
        assert (mine[2][name] - value).abs().max() < most, (row, name, (mine[2][name] - value).abs().max())


def check(row: Row, world: zeroth.World) -> None:
    dp = world.size // (row.pp * row.tp * row.sp)
    mine = train(row, row.stage, world)
    expected = plain(row.model, dp * row.micro, row.clip, row.layers, row.sgd)
    compare(row, mine, expected, sgd=row.sgd, dtype=row.dtype)
    for stage in row.stages or ((row.stage + 2) % 4,):
        other = train(dataclasses.replace(row, files=False, again=False), stage, world)
        assert mine[:2] == other[:2], (row, stage, mine[:2], other[:2])
        assert all(torch.equal(value, other[2][name]) for name, value in mine[2].items()), (row, stage)


def check_once(row: Row, world: zeroth.World) -> None:
    """Without another ZeRO stage; by rank 0."""
    mine = train(row, row.stage, world, measure=False)
    if world.rank == 0:
        expected = plain(row.model, row.dp * row.micro, row.clip, row.layers, row.sgd)
        compare(row, mine, expected, sgd=row.sgd, dtype=row.dtype)


def main() -> None:
    world = zeroth.World.from_environment()
    for part in sys.argv[1:]:
        for row in TABLES[part]:
            if part.startswith("cover"):
                check_once(row, world)
            else:
                check(row, world)
            if world.rank == 0:
                print(f"{row}: ok", flush=True)
    print(f"{sum(len(TABLES[part]) for part in sys.argv[1:])} rows: ok")


if __name__ == "__main__":
    main()
