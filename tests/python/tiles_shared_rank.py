"""One rank of two: tiled MLPs and losses whose matrices, vocabulary or sequence the ranks share; see tiles_test.py."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import tiles_rank
import torch
from tiles_rank import EXACT, HIDDEN, VOCABULARY
from torch import nn

import zeroth
from zeroth.parallel import copy_to_group, reduce_from_group, slice_sizes, tile_loss, tiled_loss, tiled_mlp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks/support"))
from live_bytes import peak_bytes  # noqa: E402


def model_of() -> Any:
    model = tiles_rank.model_of()
    model.set_attn_implementation("sdpa")  # the softmax of eager attention is in float32
    return model


def check_shared_layers(group: zeroth.Communicator) -> None:
    """MLP and vocabulary whose matrices the ranks share: calls between ranks in every tile, forward and backward."""
    torch.manual_seed(6)
    x = torch.randn(2, 19, HIDDEN, dtype=torch.float64)
    up, down = (
        torch.randn(24, HIDDEN, dtype=torch.float64),
        torch.randn(HIDDEN, 24, dtype=torch.float64),
    )
    table, bias = (
        torch.randn(VOCABULARY + 1, HIDDEN, dtype=torch.float64),
        torch.randn(VOCABULARY + 1, dtype=torch.float64),
    )
    labels = torch.randint(0, VOCABULARY + 1, (2, 19))
    labels[0, :12] = -100
    whole = [one.clone().requires_grad_() for one in (x, up, down, table, bias)]
    logits = (whole[0] + torch.tanh(whole[0] @ whole[1].T) @ whole[2].T) @ whole[3].T + whole[4]
    expected = nn.functional.cross_entropy(3 * torch.tanh(logits / 3).flatten(0, 1), labels.flatten())
    expected.backward()

    rank, size = group.rank, group.size
    cuts = [
        slice_sizes(24, size),
        slice_sizes(24, size),
        slice_sizes(VOCABULARY + 1, size),
        slice_sizes(VOCABULARY + 1, size),
    ]
    dims = (0, 1, 0, 0)
    own = [
        one.split(cut, dim)[rank].contiguous().requires_grad_()
        for one, cut, dim in zip((up, down, table, bias), cuts, dims, strict=True)
    ]
    x = x.requires_grad_()

    def mlp(tile: torch.Tensor) -> torch.Tensor:
        return reduce_from_group(torch.tanh(copy_to_group(tile, group) @ own[0].T) @ own[1].T, group)

    y = x + tiled_mlp(mlp, x, 4, parameters=own[:2], group=group)
    loss = tiled_loss(y, own[2], labels, 5, bias=own[3], softcap=3.0, vocab_group=group)
    assert abs(loss.item() - expected.item()) < EXACT, (loss, expected)
    loss.backward()
    assert x.grad is not None and whole[0].grad is not None and (x.grad - whole[0].grad).abs().max() < EXACT
    for one, other, cut, dim in zip(own, whole[1:], cuts, dims, strict=True):
        assert (one.grad - other.grad.split(cut, dim)[rank]).abs().max().item() < EXACT  # type: ignore[union-attr]
    try:
        tiled_loss(y, own[2], labels, vocab_group=group, vocab_sizes=[VOCABULARY + 1, 0])
    except zeroth.Error as error:
        assert "not this rank's part of the vocabulary" in str(error), error
    else:
        raise AssertionError("not refused")


def check_split_models(world: zeroth.World) -> None:
    """Ranks that share the vocabulary, and ranks that share the sequence: loss and gradients of one process."""
    ids, _ = tiles_rank.batch_of(1)
    labels = ids.clone()
    labels[:, :20] = -100
    whole = model_of()
    expected = tiles_rank.plain_loss(whole, ids, nn.functional.pad(labels, (0, 1), value=-100)[:, 1:])
    expected.backward()
    for axis in ("tp", "sp"):
        model = model_of()
        config = {**tiles_rank.CONFIG, "zeroth": {"mesh": {axis: world.size}}}
        zeroth.parallelize(model, config, world=world)
        tiled = tile_loss(model, 4)
        engine = zeroth.Engine(model, config, world=world, log_level="off")
        result = engine(input_ids=ids, labels=labels)
        assert result.logits is None and tiled.calls == 1, (axis, result)
        assert abs(result.loss.item() - expected.item()) < EXACT, (axis, result.loss, expected)
        engine.backward(result.loss)
        for name, parameter in whole.named_parameters():
            got = engine.full(name, "grad")
            assert got is not None and parameter.grad is not None, f"{axis}: no gradient of {name}"
            worst = (got - parameter.grad).abs().max().item()
            assert worst < EXACT, f"{axis}: {name} differs by {worst}"
        with torch.no_grad():
            parts = engine(input_ids=ids).logits
        assert parts.shape == (1, 63 if axis == "tp" else 32 - world.rank, VOCABULARY), (axis, parts.shape)
        engine.close()


def check_peak(group: zeroth.Communicator) -> None:
    """Logits of a tile and of this rank's part of the vocabulary."""
    tokens, own, tiles = 512, 512, 4
    hidden = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight, labels = torch.randn(own, HIDDEN, requires_grad=True), torch.arange(tokens)
    sizes = [own] * group.size
    peak = peak_bytes(lambda: tiled_loss(hidden, weight, labels, tiles, vocab_group=group, vocab_sizes=sizes))
    rows, kept = tokens // tiles, 4 * (tokens + own) * HIDDEN  # kept: gradients
    assert 0 <= peak - kept - 4 * rows * own <= 64 * rows, (peak, kept, 4 * rows * own)


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    group = world.mesh({"dp": world.size}).axis("dp")
    check_shared_layers(group)
    check_split_models(world)
    check_peak(group)
    print("shared tiles: ok", flush=True)


if __name__ == "__main__":
    sys.exit(main())
