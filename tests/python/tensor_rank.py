"""One rank of four that train models of transformers split over tp and sp, at every ZeRO stage; see tensor_test.py.

Each line of a table is a training: its losses, norms and weights are those of one process with the whole batch, in
float64, and those of another stage with ==.

tensor_rank.py PART...     the parts of the table, or `all`
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Literal

import torch
import transformers
from torch import nn
from wide_norms import wide_norms

import zeroth

STEPS = 2
VOCAB = 97
"""no multiple of any number of ranks"""
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(**more: object) -> nn.Module:
    options = {**SMALL, "intermediate_size": 56, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**options, **more}))


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**SMALL, intermediate_size=56, num_key_value_heads=2, head_dim=8)
    return transformers.Qwen3ForCausalLM(config)


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SMALL, intermediate_size=56, num_key_value_heads=4, tie_word_embeddings=True)
    )


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**SMALL, intermediate_size=56, num_key_value_heads=2, sliding_window=5)
    return transformers.MistralForCausalLM(config)


def gemma() -> nn.Module:
    config = transformers.GemmaConfig(**SMALL, intermediate_size=56, num_key_value_heads=1, head_dim=8)
    return transformers.GemmaForCausalLM(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **SMALL, intermediate_size=56, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "gemma": gemma,
    "gpt2": gpt2,
    "t5": t5,
    "bert": bert,
}


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    tp: int
    sp: int
    stage: int
    micro_steps: int = 1
    clip: float = 0.0
    norms: Literal["whole", "split"] = "whole"


TABLES = {
    "few": [
        Row("llama", 2, 1, 3),
        Row("gpt2", 4, 1, 2, micro_steps=2),
        Row("t5", 2, 1, 0),
        Row("bert", 2, 1, 1),
        Row("mistral", 1, 2, 3),
        Row("gpt2", 1, 4, 1),
        Row("qwen3", 2, 2, 3, clip=0.1),
        Row("gemma", 2, 2, 2),
    ],
    "tp": [
        Row("llama", 2, 1, 3),
        Row("llama", 4, 1, 2),
        Row("qwen2", 2, 1, 1, clip=0.1),
        Row("qwen3", 2, 1, 0, micro_steps=2),
        Row("mistral", 4, 1, 3),
        Row("gemma", 2, 1, 3),
        Row("gpt2", 2, 1, 2),
        Row("t5", 2, 1, 3),
        Row("bert", 2, 1, 1),
    ],
    "sp": [
        Row("llama", 1, 2, 3, clip=0.1),
        Row("llama", 1, 4, 1),
        Row("qwen3", 1, 2, 2, micro_steps=2),
        Row("gpt2", 1, 2, 0),
        Row("mistral", 1, 2, 3),
    ],
    "both": [
        Row("llama", 2, 2, 3),
        Row("qwen3", 2, 2, 1, clip=0.1),
        Row("gpt2", 2, 2, 2, micro_steps=2),
        Row("gemma", 2, 2, 0),
    ],
    "norms": [
        Row("llama", 2, 1, 3, norms="split"),
        Row("qwen3", 2, 2, 2, norms="split", clip=0.1),
        Row("gpt2", 2, 1, 0, norms="split", micro_steps=2),
        Row("gemma", 4, 1, 1, norms="split"),
        Row("bert", 2, 1, 3, norms="split"),
    ],
}


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(1, VOCAB, (2, 13), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """In float64: transformers' own loss of causal models is computed in float32."""
    if not hasattr(model, "lm_head") or model.config.is_encoder_decoder:
        return model(**inputs).loss
    logits = model(input_ids=inputs["input_ids"]).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    wide_norms(model)
    return model


@functools.cache
def plain(
    name: str, dp: int, micro_steps: int, clip: float
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and weights of one process."""
    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        count = dp * micro_steps
        every = [loss_of(model, **batch(step, number)) / count for number in range(count)]
        for loss in every:
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        losses.append(sum(loss.item() for loss in every))
    return losses, norms, copy.deepcopy(dict(model.state_dict()))


def train(row: Row, stage: int, world: zeroth.World) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same on the mesh; checks that planned memory is measured."""
    model = made(row.model)
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_accumulation_steps": row.micro_steps,
        "gradient_clipping": row.clip,
        "zeroth": {"mesh": {"tp": row.tp, "sp": row.sp}},
    }
    done = zeroth.parallelize(model, config, world=world, norms=row.norms)
    engine = zeroth.Engine(model, config, world=world, log_level="warning")
    dp, own = done.mesh.size("dp"), done.mesh.coordinate("dp")
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(row.micro_steps):
            loss = engine(**batch(step, micro * dp + own)).loss
            engine.backward(loss)
            total += loss.item()
            result = engine.step()
        losses.append(engine.average(total / row.micro_steps))
        norms.append(result.grad_norm)
    report = engine.memory_report()
    assert report.planned == report.measured_peak, (row, report.planned, report.measured_peak)
    weights = engine.state_dict(ranks=None)
    engine.close(keep_parameters=False)
    return losses, norms, weights


def close(got: float, expected: float, bound: float = 1e-12) -> bool:
    return abs(got - expected) <= bound * max(1.0, abs(expected))


def check(row: Row, world: zeroth.World) -> None:
    dp = world.size // (row.tp * row.sp)
    losses, norms, weights = plain(row.model, dp, row.micro_steps, row.clip)
    mine = train(row, row.stage, world)
    assert all(map(close, mine[0], losses)), (row, mine[0], losses)
    assert all(map(close, mine[1], norms)), (row, mine[1], norms)
    assert mine[2].keys() == weights.keys(), (row, mine[2].keys() ^ weights.keys())
    for name, value in weights.items():
        # AdamW divides by the root of squares: noise of gradients near 0 becomes larger.
        assert (mine[2][name] - value).abs().max() < 1e-8, (row, name, (mine[2][name] - value).abs().max())
    other = train(row, (row.stage + 2) % 4, world)
    assert mine[:2] == other[:2], (row, mine[:2], other[:2])
    assert all(torch.equal(mine[2][name], other[2][name]) for name in weights), row


def main() -> None:
    world = zeroth.World.from_environment()
    wanted = list(TABLES) if sys.argv[1:] == ["all"] else sys.argv[1:]
    for part in wanted:
        for row in TABLES[part]:
            check(row, world)
            if world.rank == 0:
                print(f"{row}: ok", flush=True)
    print(f"{sum(len(TABLES[part]) for part in wanted)} rows: ok")


if __name__ == "__main__":
    main()
