"""Terms of a loss that a program computes by itself, on ranks that share sequences and matrices; see
tensor_more_rank.py."""

from __future__ import annotations

import json
import pathlib
import tempfile

import tensor_rank
import torch
from refusing import refused
from torch import nn

import zeroth
from zeroth import parallel

MESHES = ({"sp": 2}, {"sp": 2, "tp": 2}, {"tp": 2})


def engine_of(world: zeroth.World, mesh: dict[str, int], stage: int, **more: object) -> zeroth.Engine:
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zeroth": {"mesh": mesh},
    }
    options = {"log_level": "error", **more}
    return zeroth.Engine(tensor_rank.made("qwen3"), config, world=world, **options)  # type: ignore[arg-type]


def penalty_of(model: nn.Module) -> torch.Tensor:
    return 0.05 * sum(one.square().sum() for one in model.parameters())  # type: ignore[return-value]


def hidden_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(input_ids=tensor_rank.batch(0, number)["input_ids"], output_hidden_states=True).hidden_states[-1]


def terms(world: zeroth.World) -> None:
    """A penalty on weights and a mean over hidden states give the gradients of one process. Qwen 3 has norms of heads,
    whose gradients are summed over tp."""
    for mesh in MESHES:
        shared = mesh.get("sp", 1) * mesh.get("tp", 1)
        dp, own = world.size // shared, world.rank // shared
        plain = tensor_rank.made("qwen3")
        hidden = [hidden_of(plain, number).square() for number in range(dp)]
        penalty = penalty_of(plain)
        (sum(one.mean() for one in hidden) / dp + penalty).backward()
        norms = []
        for stage in (0, 3):
            engine = engine_of(world, mesh, stage)
            part = hidden_of(engine, own).square()
            mean = engine.part_of_loss(part.sum(), count=part.numel())
            with engine.gathered(engine._model):
                whole = engine.part_of_loss(penalty_of(engine._model))
            engine.backward(mean + whole)
            assert tensor_rank.close(mean.item(), hidden[own].mean().item()), (mesh, stage)
            assert "tp" in mesh or tensor_rank.close(whole.item(), penalty.item()), (mesh, stage)
            for name, parameter in plain.named_parameters():
                if parameter.grad is None:
                    continue
                got = engine.full(name, "grad")
                assert (got - parameter.grad).abs().max() < 1e-12, (mesh, stage, name)
            norms.append(engine.step().grad_norm)
            engine.close(keep_parameters=False)
        assert norms[0] == norms[1], (mesh, norms)


def weighted_by_tokens(world: zeroth.World) -> None:
    """num_items_in_batch over dp, micro-steps and sp: the gradient is that of the sum over all tokens, divided by their
    number."""
    steps = 2
    for mesh in ({"sp": 2}, {"tp": 2}):
        dp, own = world.size // 2, world.rank // 2

        def sample(number: int) -> dict[str, torch.Tensor]:
            tokens = tensor_rank.batch(1, number)["input_ids"]
            return {"input_ids": tokens, "labels": tokens.masked_fill(tokens < 20 * number, -100)}

        plain = tensor_rank.made("qwen3")
        tokens = sum(int((sample(number)["labels"][:, 1:] != -100).sum()) for number in range(steps * dp))
        for number in range(steps * dp):
            logits = plain(input_ids=sample(number)["input_ids"]).logits[:, :-1].flatten(0, 1)
            targets = sample(number)["labels"][:, 1:].flatten()
            (nn.functional.cross_entropy(logits, targets, reduction="sum") / tokens).backward()
        config = {"gradient_accumulation_steps": steps, "zeroth": {"mesh": mesh}}
        engine = zeroth.Engine(tensor_rank.made("qwen3"), config, world=world, log_level="error")
        for step in range(steps):
            batch = sample(step * dp + own)
            engine.backward(engine(**batch, num_items_in_batch=tokens / (steps * dp)).loss)
            if step + 1 < steps:
                engine.step()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert (engine.full(name, "grad") - parameter.grad).abs().max() < 1e-12, (mesh, name)
        engine.step()
        engine.close(keep_parameters=False)


def parts_of_groups(world: zeroth.World) -> None:
    """parallel.part_of_loss(): values and gradients, counts that differ, no element at all."""
    group = world.mesh({"sp": world.size}).axis("sp")
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    whole = parallel.part_of_loss((weight * 2).sum(), group)
    mean = parallel.part_of_loss((weight * (group.rank + 1)).sum() * group.rank, group, count=3 * group.rank)
    (whole + mean).backward()
    ranks = range(group.size)
    assert whole.item() == 6
    assert tensor_rank.close(mean.item(), sum((rank + 1) * rank for rank in ranks) / sum(ranks))
    assert weight.grad is not None
    total = group.all_reduce(weight.grad)
    expected = 2 + sum((rank + 1) * rank for rank in ranks) / (3 * sum(ranks))
    assert (total - expected).abs().max() < 1e-15
    assert parallel.part_of_loss(weight.sum() * 0, group, 0).item() == 0
    (of_sum,) = torch.autograd.grad(parallel.all_reduce(weight.sum(), group), weight)
    (of_reduce,) = torch.autograd.grad(parallel.reduce_from_group(weight.sum(), group), weight)
    assert of_sum[0] == group.size and of_reduce[0] == 1
    with refused("USAGE", "fewer than no elements.*count"):
        parallel.part_of_loss(weight.sum(), group, -1)
    with refused("USAGE", "no term of a loss"):
        parallel.part_of_loss(torch.tensor(3), group)


def warnings_of(world: zeroth.World, mesh: dict[str, int], kind: str) -> list[str]:
    """What rank 0 says of a loss with a term."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        engine = engine_of(world, mesh, 3, log_level="off", json_log=str(log))
        model = engine._model
        for _ in range(2):
            with engine.gathered(model):
                hidden = hidden_of(engine, 0)
                penalty = penalty_of(model)
                loss = hidden.square().mean()
                if kind == "plain":
                    loss = 2 * loss - 0.5 * penalty / 3
                elif kind == "part":
                    loss = loss + engine.part_of_loss(penalty)
                elif kind == "product":  # a loss that is fused with the head: its tokens are this rank's
                    loss = loss + (hidden.detach() @ model.get_parameter("lm_head.weight").t()).square().mean()
                elif kind == "scaled":  # weights times what the model gives
                    loss = loss * penalty
            engine.backward(loss)
            engine.step()
        engine.close(keep_parameters=False)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [one["text"] for one in lines if one.get("level") == "warning" and "from weights alone" in one["text"]]


def warned(world: zeroth.World) -> None:
    """A term of weights alone that is added as it is, is named once; nothing else is."""
    for mesh, times in (({"sp": 2}, 2), ({"sp": 2, "tp": 2}, 2), ({"tp": 2}, 2), ({}, 0)):
        said = warnings_of(world, mesh, "plain")
        if world.rank > 0 or times == 0:
            assert said == [], said
            continue
        assert len(said) == 1 and f"counts {times} times" in said[0], said
        name = "model.embed_tokens.weight" if "sp" in mesh else "model.layers.0.self_attn.q_norm.weight"
        assert "part_of_loss" in said[0] and ("sp" in mesh or name in said[0]), said
    for kind in ("none", "part", "product", "scaled"):
        said = warnings_of(world, {"sp": 2, "tp": 2}, kind)
        assert said == [], (kind, said)
    said = warnings_of(world, {"tp": 2}, "part")
    assert said == [], said
    engine = engine_of(world, {"sp": 2}, 0)
    with refused("USAGE", "no term that every rank has whole.*hint: part_of_loss.sum, count="):
        engine.part_of_loss(hidden_of(engine, 0).square().mean())
    with refused("USAGE", "fewer than no elements"):
        engine.part_of_loss(torch.ones(()), count=-1)
    engine.close(keep_parameters=False)
