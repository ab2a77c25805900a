"""A layer of experts with its router, with the arguments of DeepSpeed's MoE."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from zeroth import _C, _expert_use
from zeroth.nn.experts import Experts
from zeroth.nn.gated import GatedLayer

__all__ = ["MoE", "Rule"]

Rule = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""logits [T, E] and k to the experts [T, k], or -1 for none, their weights [T, k] and the scores [T, E]"""

_NOISES = {None: "none", "None": "none", "Jitter": "jitter", "RSample": "gumbel"}


class MoE(GatedLayer):
    """Each token goes to `k` of `num_experts` copies of `expert`, which a linear router chooses by softmax.

        layer = zeroth.nn.MoE(hidden_size=512, expert=Mlp(512), num_experts=8, k=2)
        out, balance, counts = layer(x)
        loss = loss + 0.01 * balance

    The first arguments are those of deepspeed.moe.layer.MoE. `expert`: see zeroth.nn.Experts. Which ranks have which
    experts is said by zeroth.mesh.ep, not here: `ep_size` may only repeat it, and zeroth.Engine refuses another one.
    In training an expert takes max(min_capacity, ceil(capacity_factor k T / num_experts)) of a rank's T tokens, in
    eval() with eval_capacity_factor; with drop_tokens=False all. `use_rts`: which tokens stay is drawn; else the first
    ones. `use_residual`: a token also has a module like `expert` for all tokens, and a learned mixture of both
    (residual). `noisy_gate_policy`: "Jitter" multiplies the router's input by 0.99 to 1.01, "RSample" adds Gumbel noise
    to what is compared. `top2_2nd_expert_sampling`: with k=2 the second expert is drawn so; None: where the choice is
    by softmax alone. `seed`: of these draws, beside the number of the forward and the rank's place among those with
    other tokens; torch's generator has no part in them. `use_tutel` has no effect, and a warning says so.

    Beyond DeepSpeed's:
    `score`: "softmax" or "sigmoid". `groups`, `groups_kept`: equal blocks of experts; the best are chosen from.
    `scale`: of the weights. See zeroth.nn.route().
    `balance`: "loss"; "bias": a buffer `balance_bias` is added to the scores for the choice, and moves by
    `balance_rate` a step towards experts with less than their part (zeroth.Engine.step(), or begin_step()), and the
    balance loss is 0; "both".
    `router`: "linear"; "fixed": the gate's weights are drawn from the seed and are not trained; or a function of the
    logits and k, see Rule.
    `schedule`: (first, last, steps): k grows linearly from first to last over so many steps, in the place of `k`. The
    buffer `steps` counts them.
    `shared_expert`: a module for all tokens, whose result is added.

    Unlike DeepSpeed's: weights of k > 1 choices sum to 1 before tokens are dropped, the router computes in its
    parameters' dtype or float32, and the balance loss counts the tokens of all ranks and of the step's micro-batches so
    far (zeroth.nn.ExpertLoad), once Engine has placed the layer or balance_over() was called. In C++ it is
    zeroth/libtorch/moe.h."""

    forwards: torch.Tensor
    balance_bias: torch.Tensor | None
    steps: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int | None = None,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: Literal["Jitter", "RSample"] | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool | None = None,
        seed: int = 0,
        *,
        score: Literal["softmax", "sigmoid"] = "softmax",
        groups: int = 1,
        groups_kept: int = 1,
        scale: float = 1.0,
        balance: Literal["loss", "bias", "both"] = "loss",
        balance_rate: float = 1e-3,
        router: Literal["linear", "fixed"] | Rule = "linear",
        schedule: tuple[int, int, int] | None = None,
        shared_expert: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in _NOISES:
            raise ValueError(f'noisy_gate_policy is None, "Jitter" or "RSample", not {noisy_gate_policy!r}')
        if not 1 <= k <= num_experts:
            raise ValueError(f"k is from 1 to num_experts={num_experts}, not {k}")
        if ep_size is not None and not 1 <= ep_size <= num_experts:
            raise ValueError(f"MoE with ep_size={ep_size} and num_experts={num_experts}: a rank of ep has an expert")
        if enable_expert_tensor_parallelism:
            raise NotImplementedError("experts are whole on ranks of tp: leave out enable_expert_tensor_parallelism")
        if not (callable(router) or router in ("linear", "fixed")):
            raise ValueError(f'router is "linear", "fixed" or a function, not {router!r}')
        is_plain = score == "softmax" and groups == 1 and balance == "loss" and not callable(router)
        if top2_2nd_expert_sampling is None:
            top2_2nd_expert_sampling = is_plain and k == 2 and schedule is None
        if use_tutel:
            warnings.warn("zeroth.nn.MoE: use_tutel has no effect, the exchange of tokens is Zeroth's", stacklevel=2)
        self.num_experts = num_experts
        self.ep_size = ep_size
        self._capacity = (capacity_factor, eval_capacity_factor, min_capacity)
        self._options: dict[str, Any] = {
            "k": k,
            "score": score,
            "groups": groups,
            "groups_kept": groups_kept,
            "scale": scale,
            "rule": router if callable(router) else None,
            "schedule": schedule,
            "drop_tokens": drop_tokens,
            "use_rts": use_rts,
            "noise": _NOISES[noisy_gate_policy],
            "top2_2nd_expert_sampling": top2_2nd_expert_sampling,
            "balance": balance,
            "bias_rate": balance_rate,
            "seed": seed,
        }
        self._gate = self._made_gate()
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        if router == "fixed":
            self.gate.weight.requires_grad_(False)
            self.gate.weight.copy_(_C.fixed_router_weight(num_experts, hidden_size, seed))
        self.experts = Experts(expert, num_experts)
        self.residual: nn.Module | None = None
        self.coefficient: nn.Linear | None = None
        if use_residual:
            self.residual = copy.deepcopy(expert)
            self.coefficient = nn.Linear(hidden_size, 2)
        self.shared = shared_expert
        # Buffers, so that a resumed run draws what is next, and goes on with its bias and its k.
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        # float64: small steps are not lost, and no engine casts it
        bias = torch.zeros(num_experts, dtype=torch.float64) if balance != "loss" else None
        self.register_buffer("balance_bias", bias)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64) if schedule is not None else None)

    def _made_gate(self) -> _C.Gate:
        factor, eval_factor, least = self._capacity
        capacity: dict[str, Any] = {
            "capacity_factor": factor,
            "eval_capacity_factor": eval_factor,
            "min_capacity": least,
        }
        return _C.Gate(self.num_experts, **self._options, **capacity)

    @property
    def k(self) -> int:
        """Experts of a token, now."""
        return self._gate.choices(self._step)

    def set_choices(self, k: int) -> None:
        """Experts of a token from now on, without a schedule. The same on all ranks; no part of a checkpoint."""
        self._gate.set_choices(k)
        self._options["k"] = k

    @property
    def capacity_factor(self) -> float:
        """In training."""
        return self._capacity[0]

    @capacity_factor.setter
    def capacity_factor(self, factor: float) -> None:
        self._set_capacity(factor, *self._capacity[1:])

    @property
    def eval_capacity_factor(self) -> float:
        """In eval()."""
        return self._capacity[1]

    @eval_capacity_factor.setter
    def eval_capacity_factor(self, factor: float) -> None:
        self._set_capacity(self._capacity[0], factor, self._capacity[2])

    @property
    def min_capacity(self) -> int:
        """Rows that an expert takes at least."""
        return self._capacity[2]

    @min_capacity.setter
    def min_capacity(self, rows: int) -> None:
        self._set_capacity(*self._capacity[:2], rows)

    def _set_capacity(self, factor: float, eval_factor: float, least: int) -> None:
        self._gate.set_capacity(factor, eval_factor, least)
        self._capacity = (factor, eval_factor, least)

    @property
    def _step(self) -> int:
        return 0 if self.steps is None else int(self.steps)

    def begin_step(self) -> None:
        """The next forward is of a new batch: the balance forgets the micro-batches so far, its bias and the schedule
        go on by a step."""
        self._gate.begin_step(self.balance_bias)
        if self.steps is not None:
            self.steps += 1

    @property
    def load(self) -> _C.ExpertLoad:
        """Choices of each expert in the step so far, over all ranks."""
        return self._gate.load

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_states [..., hidden_size]; used_token [...]: False for tokens that go to no expert, as padding.
        Returns the sum of the experts' results, of the same shape, the balance loss, and the choices of each expert
        [num_experts], of this rank's tokens. Collective over the ranks of balance_over() and of ep."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.training and not _C.Gate.is_repeated():
            self.forwards += 1
        gated = self._gate.forward(
            x,
            self.gate.weight,
            bias=self.balance_bias,
            used=used_token,
            training=self.training,
            number=int(self.forwards),
            step=self._step,
        )
        out = self.experts(x, gated.kept, gated.weights.to(x.dtype))
        if (on_ranks := _expert_use.noted(self.experts)) is not None:
            chosen, rows, _ = on_ranks
        else:
            kept = gated.kept
            counts = torch.bincount(kept[kept >= 0].flatten(), minlength=self.num_experts)
            chosen = rows = tuple(counts.tolist())
        _expert_use.note(self, chosen, rows, gated.dropped, self.training)
        if self.residual is not None and self.coefficient is not None:
            mix = functional.softmax(self.coefficient(x), dim=-1)
            out = out * mix[:, :1] + self.residual(x) * mix[:, 1:]
        if self.shared is not None:
            out = out + self.shared(x)
        return out.view(hidden_states.shape), gated.balance, gated.counts
