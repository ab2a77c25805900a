"""Tiny models of transformers with experts, in float64, and what makes their own numbers those of float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

VOCAB = 61
STEPS = 3
EPS = 1e-4
"""of AdamW: gradients near 0 are not divided by their own noise, so that 1e-12 is a bound for weights too"""
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

# The family, as its classes are called, and its options: 4 experts in a layer, of which a token uses 2.
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**FEW, "num_experts": 4, "shared_expert_intermediate_size": 12},
    "Qwen3Moe": {**FEW, "num_experts": 4, "head_dim": 4, "norm_topk_prob": True},
    "DeepseekV3": {**FEW, **LATENT, **GROUPED, "num_key_value_heads": 4, "topk_group": 2},
    "Olmoe": {**FEW, "num_experts": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 6},
    "Glm4Moe": {**FEW, **GROUPED, "head_dim": 4},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1},
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2, "head_dim": 4},
    "GraniteMoe": {"num_local_experts": 4},
    "Lfm2Moe": {**FEW, "num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "Afmoe": {**FEW, "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 4},
    "MiniMax": {"num_local_experts": 4, "head_dim": 4, "block_size": 4},
    "Phimoe": {"num_local_experts": 4},
    "Jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False,
              "mamba_d_state": 4, "mamba_dt_rank": 2},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "Dots1": {**FEW, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "DeepseekV2": {**FEW, **LATENT, **GROUPED, "num_key_value_heads": 4, "topk_method": "group_limited_greedy",
                   "topk_group": 2},
}  # fmt: skip


class Doubles(TorchFunctionMode):
    """For forwards. Code that turns a tensor into float32, as losses and routers of transformers do, leaves one of
    float64 as it is: else the last bits of a sum are those of float32, and no bound is tight."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if call is torch.Tensor.float:
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        return call(*args, **kwargs)


def made(family: str, dtype: torch.dtype = torch.float64, experts: str = "eager", **more: Any) -> Any:
    """The same weights each time. Without dropout and noise of routers: eval()."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family], **more})
    config._attn_implementation = "eager"
    if experts:
        config._experts_implementation = experts
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    with torch.no_grad():  # else there is little between an expert and none
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


NOW = [0]
"""the number of the batch that was made last"""
ROUTINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an expert that nobody uses": lambda chosen: chosen.masked_fill(chosen == 3, 0),
    "an expert of one rank's tokens": lambda chosen: chosen.masked_fill(chosen == 3, 0 if NOW[0] != 1 else 3),
    "all tokens to one": lambda chosen: torch.full_like(chosen, 2),
    "choices of no expert": lambda chosen: chosen.masked_fill(chosen == 1, 4),
    "no choice at all": lambda chosen: torch.full_like(chosen, 4),
}
"""what becomes of the choices of a router, for layers of 4 experts; 4 is no expert"""


def route(model: nn.Module, routing: str) -> None:
    """Before the engine is made. The hook is called with the whole layer's choices."""

    def choose(_: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return given[0], ROUTINGS[routing](given[1]), given[2]

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(choose)


def batch(step: int, number: int) -> dict[str, torch.Tensor]:
    NOW[0] = number
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(3, VOCAB, (2, 7), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with Doubles():
        return model(**inputs, use_cache=False).loss


Numbers = tuple[list[float], list[float], dict[str, torch.Tensor]]


def alone(model: nn.Module, count: int, clip: float = 0.0, steps: int = STEPS) -> Numbers:
    """Losses, norms and weights of one process with plain torch: `count` batches a step."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, eps=EPS)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(count):
            loss = loss_of(model, **batch(step, number)) / count
            loss.backward()
            total += loss.item()
        for parameter in model.parameters():  # an expert without tokens: zeros, so that its weights decay
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        losses.append(total)
    return losses, norms, model.state_dict()
