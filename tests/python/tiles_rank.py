"""One rank of two: tiled MLPs and losses inside ZeRO-3 engines, against the untiled model in one process; see
tiles_test.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeroth
from zeroth.parallel import agree_on_tiles, tile_loss, tile_mlps, tiled_loss, tiled_mlp

CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
EXACT = 1e-12
HIDDEN, VOCABULARY = 16, 50


def model_of(dtype: torch.dtype = torch.float64, attention: str = "eager") -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype)


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of another length on every rank, with other labels that do not count."""
    ids = torch.randint(0, VOCABULARY, (1, 33 + 30 * rank), generator=torch.Generator().manual_seed(rank))
    labels = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].clone()
    labels[:, : 7 + 20 * rank] = -100
    return ids, labels


def plain_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In float64: transformers' own computes it in float32."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())


def expected(ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Each rank's loss, and the mean gradient."""
    model = model_of()
    losses = [plain_loss(model, *batch_of(rank)) for rank in range(ranks)]
    torch.stack(losses).mean().backward()
    return [loss.item() for loss in losses], {name: one.grad for name, one in model.named_parameters()}


def check_engine(
    world: zeroth.World, what: str, loss_of: Callable[[zeroth.Engine, Any], torch.Tensor], model: Any, units: Any = None
) -> None:
    losses, gradients = expected(world.size)
    engine = zeroth.Engine(model, CONFIG, world=world, units=units, log_level="off")
    for _ in range(2):  # the second time without a step between: the same numbers
        loss = loss_of(engine, model)
        assert abs(loss.item() - losses[world.rank]) < EXACT, f"{what}: {loss.item()} {losses}"
        engine.backward(loss)
        for name, gradient in gradients.items():
            got = engine.full(name, "grad")
            assert got is not None, f"{what}: no gradient of {name}"
            worst = (got - gradient).abs().max().item()
            assert worst < EXACT, f"{what}: {name} differs by {worst}"
        engine.zero_grad()
    engine.close()


def whole_model(engine: zeroth.Engine, model: Any) -> torch.Tensor:
    ids, labels = batch_of(engine.rank)
    result = engine(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False)
    assert result.logits is None
    return result.loss


def fused(engine: zeroth.Engine, model: Any) -> torch.Tensor:
    ids, labels = batch_of(engine.rank)
    hidden = engine(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
    with engine.gathered(model.lm_head):
        return tiled_loss(hidden, model.lm_head.weight, labels, 3)


def check_engines(world: zeroth.World, group: zeroth.Communicator) -> None:
    def tiled(model: Any, *, mlps: bool = True, loss: bool = True, with_group: bool = False) -> Any:
        if mlps:
            tile_mlps(model, group=group if with_group else None)
        if loss:
            tile_loss(model)
        return model

    check_engine(world, "loss and MLPs", whole_model, tiled(model_of()))
    check_engine(world, "fused head", fused, tiled(model_of(), loss=False))
    for reentrant in (False, True):
        model = tiled(model_of())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        check_engine(world, f"checkpoints, reentrant {reentrant}", whole_model, model)
    model = tiled(model_of(), with_group=True)
    inside = [
        part
        for block in model.model.layers
        for part in (block.self_attn, *block.mlp.children())
        if list(part.parameters())
    ]
    check_engine(world, "units inside of the MLP and the head", whole_model, model, [*inside, model.lm_head])


def check_agreement(group: zeroth.Communicator) -> None:
    x = torch.randn(1, 5 + 40 * group.rank, 4, requires_grad=True)
    seen: list[int] = []

    def mlp(tile: torch.Tensor) -> torch.Tensor:
        seen.append(tile.size(-2))
        return 2 * tile

    tiled_mlp(mlp, x, group=group).sum().backward()
    assert len(seen) == 2 * 12 and sum(seen) == 2 * x.size(1), seen  # ceil(45 / 4) tiles, once more in backward
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))
    assert agree_on_tiles(3, 1, group) == 3
    for tiles in (2 + group.rank, None if group.rank == 0 else 4):
        try:
            agree_on_tiles(tiles, 1, group)
        except zeroth.Error as error:
            assert error.code == "MISMATCH" and "different numbers of tiles" in str(error), error
        else:
            raise AssertionError("not refused")


def check_fp16(world: zeroth.World) -> None:
    """Gradients of tiles have the loss scale."""
    got = []
    for tiles in (None, 3):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 4)
        )
        if tiles:
            tile_mlps(model, tiles, mlps=[model[1]])  # type: ignore[list-item]
        engine = zeroth.Engine(model, CONFIG | {"fp16": {"enabled": True}}, world=world, log_level="off")
        x = torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(world.rank)).half()
        engine.backward(engine(x).float().square().mean())
        got.append(engine.full("1.0.weight", "grad"))
        engine.close()
    for one in got[1:]:
        assert one is not None and got[0] is not None
        assert torch.allclose(one, got[0], rtol=2e-3, atol=1e-5), got


def check_parts(group: zeroth.Communicator) -> None:
    """Ranks with parts of one loss, with other numbers of labels that count: the value is the whole loss, gradients add
    up to the whole one."""
    whole = model_of()
    batches = [batch_of(rank) for rank in range(group.size)]
    sums = [plain_loss(whole, ids, labels) * int((labels != -100).sum()) for ids, labels in batches]
    expected = torch.stack(sums).sum() / sum(int((labels != -100).sum()) for _, labels in batches)
    expected.backward()
    ids, labels = batches[group.rank]

    def of_head(model: Any) -> torch.Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return tiled_loss(hidden, model.lm_head.weight, labels, 3, group=group)

    def of_model(model: Any) -> torch.Tensor:
        tiled = tile_loss(model, 4, group=group)
        try:
            model(input_ids=ids, labels=labels)
        except zeroth.Error as error:
            assert "must be shifted before it is cut" in str(error), error
        loss = model(input_ids=ids, labels=labels, shift_labels=labels).loss
        assert tiled.calls == 1
        return loss

    for loss_of in (of_head, of_model):
        model = model_of()
        loss = loss_of(model)
        assert abs(loss.item() - expected.item()) < EXACT, (loss, expected)
        loss.backward()
        for (name, parameter), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            worst = (group.all_reduce(parameter.grad) - other.grad).abs().max().item()
            assert worst < EXACT, f"{name}: {worst}"


def check_split(world: zeroth.World) -> None:
    """With the sequence split, before or after: loss and gradients of one process, and nobody has logits."""
    ids = torch.randint(0, VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids < 9, -100)
    whole = model_of(attention="sdpa")  # the eager one has a softmax in float32
    expected = plain_loss(whole, ids, nn.functional.pad(labels, (0, 1), value=-100)[:, 1:])
    expected.backward()
    config = CONFIG | {"zeroth": {"mesh": {"sp": world.size}}}
    for tiles_first in (True, False):
        model = model_of(attention="sdpa")
        if not tiles_first:
            zeroth.parallelize(model, config, world=world)
        tile_mlps(model, 3)
        tiled = tile_loss(model, 4)
        engine = zeroth.Engine(model, config, world=world, log_level="off")
        result = engine(input_ids=ids, labels=labels)
        assert result.logits is None and tiled.calls == 1
        assert abs(result.loss.item() - expected.item()) < EXACT, (result.loss, expected)
        engine.backward(result.loss)
        for name, other in whole.named_parameters():
            got = engine.full(name, "grad")
            assert got is not None and other.grad is not None
            assert (got - other.grad).abs().max().item() < EXACT, name
        engine.close()


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    group = world.mesh({"dp": world.size}).axis("dp")
    check_agreement(group)
    check_parts(group)
    check_fp16(world)
    check_engines(world, group)
    check_split(world)
    print("tiles: ok", flush=True)


if __name__ == "__main__":
    sys.exit(main())
