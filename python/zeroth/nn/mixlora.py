"""Experts of low rank beside a frozen MLP, with a router that is trained."""

import fnmatch
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zeroth import _C
from zeroth.nn.gated import GatedLayer

__all__ = ["MixLora", "add_mixlora"]

_LINEARS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""names of the three matrices of an MLP down(act(gate(x)) * up(x))"""
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


class MixLora(GatedLayer):
    """`num_experts` experts in the place of an MLP. The matrices of expert i are W + alpha / rank * B_i A_i, with the
    MLP's own frozen W:

        y = sum over a token's k experts of p_i down_i(act(gate_i(x)) * up_i(x))

    p is the softmax of the trained router over the k largest of its logits, so it sums to 1. B begins as zeros: then y
    is what the MLP gives. A is drawn as by nn.Linear, the router from a normal distribution of 0.02.

    `mlp`: a module with linear layers gate_proj, up_proj and down_proj, or w1, w3 and w2, and its activation act_fn.
    It becomes frozen. zeroth.experts() and zeroth.mesh.ep place the experts' A and B; W is on all ranks, sharded by the
    stage. `balance`: the loss of the last forward that is least when all experts get as many tokens; add a part of it,
    0.01 in the paper, to the loss.

    Ref: Li et al., "MixLoRA: Enhancing Large Language Models Fine-Tuning with LoRA-based Mixture of Experts", 2024,
    eq. 4 to 8."""

    def __init__(
        self, mlp: nn.Module, num_experts: int = 8, rank: int = 8, k: int = 2, alpha: float | None = None
    ) -> None:
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ValueError(f"k is from 1 to num_experts={num_experts}, not {k}")
        if rank < 1:
            raise ValueError(f"rank is from 1, not {rank}")
        mlp.requires_grad_(False)
        self.mlp = mlp
        self.k = k
        self.experts = _LoraExperts(mlp, num_experts, rank, (2.0 * rank if alpha is None else alpha) / rank)
        like = self.experts.get_parameter("gate_a")
        self.router = nn.Linear(like.shape[-1], num_experts, bias=False, dtype=like.dtype, device=like.device)
        nn.init.normal_(self.router.weight, std=0.02)
        self.balance: torch.Tensor | None = None
        self._gate = self._made_gate()

    def _made_gate(self) -> _C.Gate:
        return _C.Gate(self.router.out_features, k=self.k, drop_tokens=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., D] to [..., D']. Collective along ep and over the ranks of balance_over()."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        gated = self._gate.forward(x, self.router.weight, training=self.training)
        self.balance = gated.balance if self.training else None
        weights = gated.weights if self.k > 1 else torch.ones_like(gated.weights)  # they sum to 1
        out: torch.Tensor = self.experts(x, gated.kept, weights.to(x.dtype))
        return out.view(*hidden_states.shape[:-1], out.shape[-1])


class _LoraExperts(nn.Module):
    """Of the form that zeroth.experts() places: A [experts, rank, in] and B [experts, out, rank] of three matrices."""

    def __init__(self, mlp: nn.Module, num_experts: int, rank: int, scale: float) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.scale = scale
        names = next((names for names in _LINEARS if all(hasattr(mlp, name) for name in names)), None)
        layers = [] if names is None else [getattr(mlp, name) for name in names]
        act = next((one for name in _ACTIVATIONS if callable(one := getattr(mlp, name, None))), None)
        if act is None or names is None or not all(isinstance(layer, nn.Linear) for layer in layers):
            raise ValueError(
                f"{type(mlp).__name__} is no MLP of three linear layers gate_proj, up_proj and down_proj, or w1, w3 "
                "and w2, with act_fn"
            )
        for name, layer in zip(("gate", "up", "down"), layers, strict=True):
            like: dict[str, Any] = {"dtype": layer.weight.dtype, "device": layer.weight.device}
            a = torch.empty(num_experts, rank, layer.in_features, **like)
            for of_one in a if not a.is_meta else ():
                nn.init.kaiming_uniform_(of_one, a=math.sqrt(5))
            self.register_parameter(f"{name}_a", nn.Parameter(a))
            b = torch.zeros(num_experts, layer.out_features, rank, **like)
            self.register_parameter(f"{name}_b", nn.Parameter(b))
        # The MLP belongs to the module around: its parameters have one name.
        object.__setattr__(self, "_mlp", mlp)
        self._names, self._act = names, act

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        exchange = _C.TokenExchange(experts, self.num_experts)
        rows, of_expert = exchange.send(tokens), exchange.rows

        def product(name: str, own: str, x: torch.Tensor) -> torch.Tensor:
            a, b = getattr(self, f"{own}_a"), getattr(self, f"{own}_b")
            low = _C.grouped_linear(_C.grouped_linear(x, a, None, of_expert), b, None, of_expert)
            result: torch.Tensor = getattr(self._mlp, name)(x) + low * self.scale
            return result

        gate, up, down = self._names
        inside = self._act(product(gate, "gate", rows)) * product(up, "up", rows)
        return exchange.bring(product(down, "down", inside), weights)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, rank={self.get_parameter('gate_a').shape[1]}, scale={self.scale}"


def add_mixlora(
    model: nn.Module,
    num_experts: int = 8,
    rank: int = 8,
    k: int = 2,
    alpha: float | None = None,
    where: str | Callable[[str], bool] = "*.mlp",
) -> list[str]:
    """Freezes all parameters of a model and puts a MixLora in the place of each of its MLPs, whose names `where` fits.
    Returns the names. Only routers, A and B are trained, so only they have gradients and states of the optimizer.
    Raises ValueError, before the model is changed, if there is no such MLP or one has another form."""
    fits = where if callable(where) else lambda name: fnmatch.fnmatchcase(name, where)
    names = [name for name, _ in model.named_modules() if name and fits(name)]
    if not names:
        raise ValueError(f"the model has no MLP whose name is like {where!r}: give where=")
    made = {name: MixLora(model.get_submodule(name), num_experts, rank, k, alpha) for name in names}
    model.requires_grad_(False)
    for name, layer in made.items():
        path, _, own = name.rpartition(".")
        model.get_submodule(path).register_module(own, layer)
    return names
