"""One rank of two: the plan that zeroth.parallelize() finds for a family of transformers gives the loss and the
gradients of one process; see tensor_test.py.

tensor_families_rank.py [FAMILY...]     default: all
"""

from __future__ import annotations

import copy
import sys
from typing import Any, Literal

import torch
import transformers
from torch import nn

import zeroth

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {**SMALL, "intermediate_size": 56}
GQA = {**MLP, "num_key_value_heads": 2}
GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
HIDDEN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Prefix of the configuration's class: (class of the model, options, modules of the first block that stay whole).
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "OPT": ("OPTForCausalLM", {**SMALL, "ffn_dim": 56, "max_position_embeddings": 32, "word_embed_proj_dim": 32,
                               "dropout": 0.0}, ""),
    "GPTNeoX": ("GPTNeoXForCausalLM", MLP, ""),
    "Bloom": ("BloomForCausalLM", {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
              "dense query_key_value"),
    "Falcon": ("FalconForCausalLM", {**MLP, "ffn_hidden_size": 56, "multi_query": False}, ""),
    "Phi": ("PhiForCausalLM", MLP, ""),
    "Phi3": ("Phi3ForCausalLM", {**GQA, "pad_token_id": 0}, "o_proj qkv_proj"),
    "StableLm": ("StableLmForCausalLM", GQA, ""),
    "Cohere": ("CohereForCausalLM", GQA, ""),
    "Olmo": ("OlmoForCausalLM", MLP, ""),
    "Olmo2": ("Olmo2ForCausalLM", MLP, "k_proj o_proj q_proj v_proj"),
    "Gemma2": ("Gemma2ForCausalLM", {**GQA, "head_dim": 8}, ""),
    "Gemma3Text": ("Gemma3ForCausalLM", {**GQA, "head_dim": 8}, ""),
    "GPTJ": ("GPTJForCausalLM", {**GPT, **NO_DROPOUT, "rotary_dim": 4}, ""),
    "Starcoder2": ("Starcoder2ForCausalLM", {**GQA, "residual_dropout": 0.0, "embedding_dropout": 0.0}, ""),
    "GPTBigCode": ("GPTBigCodeForCausalLM", {**GPT, **NO_DROPOUT}, "c_attn c_proj"),
    "CodeGen": ("CodeGenForCausalLM", {**GPT, **NO_DROPOUT, "rotary_dim": 4}, "out_proj qkv_proj"),
    "Mixtral": ("MixtralForCausalLM", {**GQA, "num_local_experts": 4}, ""),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", {**GQA, **EXPERTS, "head_dim": 8}, ""),
    "GptOss": ("GptOssForCausalLM", {**GQA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, ""),
    "Granite": ("GraniteForCausalLM", GQA, ""),
    "SmolLM3": ("SmolLM3ForCausalLM", {**GQA, "pad_token_id": 0}, ""),
    "Mpt": ("MptForCausalLM", {"vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2,
                               "max_seq_len": 32}, "Wqkv out_proj"),
    "Glm4": ("Glm4ForCausalLM", {**GQA, "head_dim": 8, "pad_token_id": 0}, ""),
    "Nemotron": ("NemotronForCausalLM", GQA, ""),
    "Persimmon": ("PersimmonForCausalLM", MLP, ""),
    "BioGpt": ("BioGptForCausalLM", {**MLP, **HIDDEN}, ""),
    "Llama4Text": ("Llama4ForCausalLM", {**GQA, "head_dim": 8, "intermediate_size_mlp": 56, "num_local_experts": 2},
                   ""),
    "Roberta": ("RobertaForMaskedLM", {**MLP, **HIDDEN}, ""),
    "DistilBert": ("DistilBertForMaskedLM", {"vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 56,
                                             "dropout": 0.0, "attention_dropout": 0.0}, ""),
    "Bart": ("BartForConditionalGeneration", {
        "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56, "dropout": 0.0,
        "pad_token_id": 1}, ""),
}  # fmt: skip
BOUND = 1e-5
"""relative to the largest; losses of transformers are float32"""


def check(name: str, world: zeroth.World, norms: Literal["whole", "split"] = "whole") -> None:
    kind, options, whole = FAMILIES[name]
    torch.manual_seed(1)
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options))
    if "Moe" not in name and name not in ("Mixtral", "GptOss"):  # no experts in float64 there
        model = model.double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    plain = copy.deepcopy(model)
    tokens = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(5))
    expected = plain(input_ids=tokens, labels=tokens).loss
    expected.backward()
    config = {"zero_optimization": {"stage": 3}, "zeroth": {"mesh": {"tp": 2}}}
    done = zeroth.parallelize(model, config, world=world, norms=norms)
    assert done.plan is not None
    left = {
        share.name.rpartition(".")[2] for share in done.plan.shares if share.role == "whole" and ".0." in share.name
    }
    assert " ".join(sorted(left)) == whole, (name, left)
    engine = zeroth.Engine(model, config, world=world, log_level="error")
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    assert abs(loss.item() - expected.item()) < BOUND * expected.item(), (name, loss, expected)
    largest = max(float(one.grad.abs().max()) for one in plain.parameters() if one.grad is not None)
    for path, parameter in plain.named_parameters():
        if parameter.grad is not None:
            difference = float((engine.full(path, "grad") - parameter.grad).abs().max())
            assert difference < BOUND * largest, (name, path, difference, largest)
    engine.close(keep_parameters=False)


def main() -> None:
    world = zeroth.World.from_environment()
    for name in sys.argv[1:] or FAMILIES:
        check(name, world)
        if world.rank == 0:
            print(f"{name}: ok", flush=True)
    print("families: ok")


if __name__ == "__main__":
    main()
