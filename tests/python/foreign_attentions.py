"""Attentions of no family that the tests cover, shared over tp: torch's own, and some that a user wrote. A part of
tensor_more_rank.py; two of the four ranks share matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensor_models import gpt2, llama
from torch import nn
from torch.nn import functional

import zeroth

SIZE, HEADS = 16, 4


class Attention(nn.Module):
    """Queries, keys and values of one matrix; it cuts them by its number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE), HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attn, self.up, self.down = attention(), nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks with an attention of the given class."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def encoder(norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 2 * SIZE, 0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def both() -> nn.Module:
    return nn.Transformer(SIZE, HEADS, 2, 2, 2 * SIZE, 0.0, batch_first=True)


def output_of(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    output = model(**inputs)
    return output.logits if hasattr(output, "logits") else output


def trains_as_whole(
    world: zeroth.World, what: str, build: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], stage: int,
    corrections: dict[str, Any] | None = None,
) -> zeroth.parallel.Parallel:  # fmt: skip
    """Outputs in training and in eval(), and gradients, are those of the model as it was."""
    torch.manual_seed(1)
    model = build().double()
    whole = copy.deepcopy(model)
    config = {"zero_optimization": {"stage": stage}, "zeroth": {"mesh": {"tp": 2}}}
    done = zeroth.parallelize(model, config, world=world, corrections=corrections)
    with torch.no_grad():
        difference = (output_of(model.eval(), inputs) - output_of(whole.eval(), inputs)).abs().max()
    assert difference < 1e-12, (what, "without an engine", difference)
    engine = zeroth.Engine(model, config, world=world, log_level="error")
    for training in (False, True):
        whole.train(training), model.train(training)
        with torch.set_grad_enabled(training):
            expected, got = output_of(whole, inputs), output_of(engine, inputs)
        assert (got - expected).abs().max() < 1e-12, (what, stage, training, (got - expected).abs().max())
    expected.square().mean().backward()
    engine.backward(got.square().mean())
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            difference = (engine.full(name, "grad") - parameter.grad).abs().max()
            assert difference < 1e-12, (what, stage, name, difference)
    engine.close(keep_parameters=False)
    return done


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 97, (2, 6), generator=torch.Generator().manual_seed(2))}


class Normed(nn.Module):
    """An MLP that computes over all that its first layer gives: no rule sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Softmax(-1), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def hidden(*names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(2, 6, SIZE, generator=generator, dtype=torch.float64) for name in names}


def attentions_of_torch(world: zeroth.World) -> None:
    """They stay whole, their MLP is shared, and an evaluation goes through the layers that ranks share."""
    for what, build, inputs, stage in (
        ("encoder", encoder, hidden("src"), 0),
        ("encoder, norms first", lambda: encoder(True), hidden("src"), 3),
        ("both", both, hidden("src", "tgt"), 3),
    ):
        done = trains_as_whole(world, what, build, inputs, stage)
        assert "without a call of a layer" in str(done), done
        assert done.plan is not None
        assert {one.role for one in done.plan.shares if one.name.endswith("linear2")} == {"row"}, done


def whole_by_correction(world: zeroth.World) -> None:
    """The counts of heads of an attention follow its layers; one layer that is whole makes all of it whole."""
    for what, build, inputs, corrections, stage in (
        ("own", Net, hidden("x"), {"blocks.*.attn.*": "whole"}, 0),
        ("own, one layer", Net, hidden("x"), {"blocks.0.attn.proj": "whole"}, 3),
        ("GPT-2", gpt2, tokens(), {"*.attn.*": "whole"}, 3),
        ("Llama", llama, tokens(), {"*.0.self_attn.k_proj": "whole"}, 0),
    ):
        done = trains_as_whole(world, what, build, inputs, stage, corrections)
        if "layer" in what:
            assert "blocks.*.attn.proj is whole" in str(done), done
