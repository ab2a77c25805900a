"""One of four ranks, two of which share matrices or a sequence and differ in something: each fault is an error on all
ranks of the group, within seconds, that names the rank, the axis and the thing; see tensor_mixes_test.py."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import tensor_rank
import torch
import transformers
from refusing import refused

import zeroth
from zeroth.parallel import tile_loss, tile_mlps

SECONDS = 20.0
"""on a busy machine; a wait for a rank ends after 300"""


@contextlib.contextmanager
def named(code: str, *words: str) -> Iterator[None]:
    began = time.monotonic()
    with refused(code, ".*".join(words)):
        yield
    assert time.monotonic() - began < SECONDS, words


def config(axis: str) -> dict[str, Any]:
    return {"zeroth": {"mesh": {axis: 2}}}


def split(axis: str, world: zeroth.World, model: Any = None) -> Any:
    model = model or tensor_rank.made("llama")
    zeroth.parallelize(model, config(axis), world=world)
    return model


def check(axis: str, world: zeroth.World) -> None:
    second = world.rank % 2
    there = f"ranks \\[1\\] of world/mesh\\d+/{axis}"
    tokens = torch.arange(1, 13)[None]

    # Another seed. Along sp, as along dp, the engine gives all ranks rank 0's weights.
    if axis == "tp":
        torch.manual_seed(second)
        with named("MISMATCH", "other weights", "embed_tokens.weight", f"{there} have other values", "same seed"):
            zeroth.parallelize(tensor_rank.llama(), config(axis), world=world)

    # Another sample, length, label, mask.
    model = split(axis, world)
    for what, inputs, how in (
        ("input_ids", {"input_ids": tokens + second}, "other values"),
        ("input_ids", {"input_ids": tokens[:, : 12 - second]}, "another shape"),
        ("labels", {"input_ids": tokens, "labels": tokens + second}, "other values"),
        ("labels", {"input_ids": tokens, **({"labels": tokens} if second else {})}, "another shape"),
        ("attention_mask", {"input_ids": tokens, "attention_mask": (tokens > second).long()}, "other values"),
        ("position_ids", {"input_ids": tokens, "position_ids": tokens - 1 + second}, "other values"),
    ):
        with named("MISMATCH", "different samples", f"{what}: {there} have {how} than ranks \\[0\\]"):
            model(**inputs)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()  # the group goes on


def check_ways(world: zeroth.World) -> None:
    model = tensor_rank.made("llama")
    for words, sequence in (
        (("a grid does not fit", "divisor of sp=4: 1, 2, 4", "got: 3"), {"method": "grid", "ulysses": 3}),
        (("its method does not use", "method ring, ulysses 2"), {"method": "ring", "ulysses": 2}),
        (("its method does not use", "method ulysses, ulysses 0, order token"), {"order": "token"}),
        (("sequence/method", "star"), {"method": "star"}),
    ):
        with named("CONFIG", *words):
            zeroth.parallelize(model, {"zeroth": {"mesh": {"sp": 4}, "sequence": sequence}}, world=world)
    with named("USAGE", "no such method", "ulysses, ring, grid", "star"):
        zeroth.parallelize(model, {"zeroth": {"mesh": {"sp": 4}}}, world=world, method="star")  # type: ignore[arg-type]
    done = zeroth.parallelize(model, {"zeroth": {"mesh": {"sp": 4}}}, world=world, method="grid", ulysses=2)
    assert "sequences over 4 ranks: grid" in str(done), done


def check_random(world: zeroth.World) -> None:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=1, n_head=4)
    )
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    split("tp", world, model)
    torch.manual_seed(world.rank)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    model.train()
    with named("MISMATCH", "random numbers", "get_rng_state.*: ranks \\[1\\] of world/mesh\\d+/tp have other values"):
        model(input_ids=tokens)
    torch.manual_seed(1)
    model(input_ids=tokens)
    torch.manual_seed(world.rank)
    model.eval()(input_ids=tokens)  # nothing is drawn


def check_tiles(world: zeroth.World) -> None:
    second = world.rank % 2
    tokens = torch.arange(1, 13)[None]
    for tile in (tile_mlps, tile_loss):
        model = split("tp", world)
        tile(model, 2 + second)
        with named(
            "MISMATCH", "different numbers of tiles", "rank [01]/2 of world/mesh\\d+/tp", f"{2 + second} here, 2 to 3"
        ):
            model(input_ids=tokens, labels=tokens)
    # Ranks with parts of a sequence make no calls in tiles: any numbers give the loss.
    model = split("sp", world)
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    tile_mlps(model, 2 + second)
    tile_loss(model, 2 + second)
    assert abs(model(input_ids=tokens, labels=tokens).loss.item() - expected) < 1e-6


def check_seeds_of_sp(world: zeroth.World) -> None:
    torch.manual_seed(world.rank)
    engine = zeroth.Engine(tensor_rank.llama(), config("sp"), world=world, log_level="error")
    torch.manual_seed(0)
    expected = tensor_rank.llama().state_dict()
    got = engine.state_dict(ranks=None)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    engine.close()


def main() -> None:
    world = zeroth.World.from_environment()
    tensor_rank.made("llama")
    world.mesh({"dp": world.size}).axis("dp").barrier()  # all have imported everything
    for axis in ("tp", "sp"):
        check(axis, world)
    check_ways(world)
    check_random(world)
    check_tiles(world)
    check_seeds_of_sp(world)
    print("faults: ok")


if __name__ == "__main__":
    main()
