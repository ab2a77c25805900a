"""Small models of transformers, one a family."""

from __future__ import annotations

from collections.abc import Callable

import transformers
from torch import nn

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
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=32,
            n_head=4,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            n_layer=SMALL["num_hidden_layers"],
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
