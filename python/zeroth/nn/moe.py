"""A layer of experts with its router, with the arguments of DeepSpeed's MoE."""

import copy
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from zeroth import _C, _expert_use
from zeroth.nn.experts import Experts

__all__ = ["MoE"]


class MoE(nn.Module):
    """Each token goes to `k` of `num_experts` copies of `expert`, which a linear router chooses by softmax.

        layer = zeroth.nn.MoE(hidden_size=512, expert=Mlp(512), num_experts=8, k=2)
        out, balance, counts = layer(x)
        loss = loss + 0.01 * balance

    The arguments are those of deepspeed.moe.layer.MoE. `expert`: see zeroth.nn.Experts. Which ranks have which experts
    is said by zeroth.mesh.ep, not here: `ep_size` may only repeat it. In training an expert takes
    max(min_capacity, ceil(capacity_factor k T / num_experts)) of a rank's T tokens, in eval() with
    eval_capacity_factor; with drop_tokens=False all. `use_rts`: which tokens stay is drawn; else the first ones.
    `use_residual`: a token also has a module like `expert` for all tokens, and a learned mixture of both (residual).
    `noisy_gate_policy`: "Jitter" multiplies the router's input by 0.99 to 1.01, "RSample" adds Gumbel noise to what is
    compared. `top2_2nd_expert_sampling`: with k=2 the second expert is drawn so. `seed`: of these draws, beside the
    number of the forward; torch's generator has no part in them.

    Unlike DeepSpeed's: weights of k > 1 choices sum to 1 before tokens are dropped, the router computes in its
    parameters' dtype or float32, and the balance loss counts the tokens of all ranks and of the step's micro-batches so
    far (zeroth.nn.ExpertLoad), once Engine has placed the layer or balance_over() was called."""

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
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
        top2_2nd_expert_sampling: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(f'noisy_gate_policy is None, "Jitter" or "RSample", not {noisy_gate_policy!r}')
        if not 1 <= k <= num_experts:
            raise ValueError(f"k is from 1 to num_experts={num_experts}, not {k}")
        if not 1 <= ep_size <= num_experts:
            raise ValueError(f"MoE with ep_size={ep_size} and num_experts={num_experts}: a rank of ep has an expert")
        if enable_expert_tensor_parallelism:
            raise NotImplementedError("experts are whole on ranks of tp: leave out enable_expert_tensor_parallelism")
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.samples_second = top2_2nd_expert_sampling and k == 2
        self.seed = seed
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(expert, num_experts)
        self.residual: nn.Module | None = None
        self.coefficient: nn.Linear | None = None
        if use_residual:
            self.residual = copy.deepcopy(expert)
            self.coefficient = nn.Linear(hidden_size, 2)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))  # so that a resumed run draws what is next
        self._load = _C.ExpertLoad(num_experts)
        self._groups: tuple[_C.Communicator, ...] = ()

    def balance_over(self, mesh: _C.Mesh) -> None:
        """The ranks along dp, ep and sp have other tokens of one batch: the balance loss is over all of them."""
        self._groups = tuple(
            mesh.axis(axis) for axis in ("dp", "ep", "sp") if axis in mesh.sizes and mesh.size(axis) > 1
        )

    def begin_step(self) -> None:
        """The next forward is of a new batch: the balance loss forgets the micro-batches so far."""
        self._load.begin_step()

    @property
    def load(self) -> _C.ExpertLoad:
        """Choices of each expert in the step so far, over all ranks."""
        return self._load

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_states [..., hidden_size]; used_token [...]: False for tokens that go to no expert, as padding.
        Returns the sum of the experts' results, of the same shape, the balance loss, and the choices of each expert
        [num_experts], of this rank's tokens. Collective over the ranks of balance_over() and of ep."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        draw = self._generator() if self.training else None
        gate_input = x
        if draw is not None and self.noisy_gate_policy == "Jitter":
            noise = torch.rand(x.shape, generator=draw, dtype=torch.float32).mul_(0.02).add_(0.99)
            gate_input = x * noise.to(x)
        logits = functional.linear(gate_input, self.gate.weight.to(gate_input.dtype))
        experts, weights, scores = self._route(logits, draw)
        if used_token is not None:
            experts = experts.masked_fill(~used_token.reshape(-1, 1).bool(), -1)
        self._load.add(experts, self._groups)
        balance = self._load.balance_loss(scores)
        counts = torch.bincount(experts[experts >= 0].flatten(), minlength=self.num_experts)
        kept = experts
        if self.drop_tokens:
            factor = self.capacity_factor if self.training else self.eval_capacity_factor
            capacity = _C.expert_capacity(x.shape[0], self.num_experts, self.k, factor, self.min_capacity)
            by = "draw" if self.use_rts and self.training else "position"
            seed = (self.seed << 32) + int(self.forwards)
            kept = _C.keep_within(experts, weights, self.num_experts, capacity, by, seed)
        out = self.experts(x, kept, weights.to(x.dtype))
        if (on_ranks := _expert_use.noted(self.experts)) is not None:
            chosen, rows, _ = on_ranks
        else:
            chosen = rows = torch.bincount(kept[kept >= 0].flatten(), minlength=self.num_experts).tolist()
        _expert_use.note(self, chosen, rows, int((kept != experts).sum()))
        if self.residual is not None and self.coefficient is not None:
            mix = functional.softmax(self.coefficient(x), dim=-1)
            out = out * mix[:, :1] + self.residual(x) * mix[:, 1:]
        return out.view(hidden_states.shape), balance, counts

    def _generator(self) -> torch.Generator:
        self.forwards += 1
        return torch.Generator().manual_seed((self.seed << 32) + int(self.forwards))

    def _route(self, logits: torch.Tensor, draw: torch.Generator | None) -> tuple[Any, Any, Any]:
        """With noise in what is compared, where a policy says so; never in weights and scores."""
        if draw is not None and (self.noisy_gate_policy == "RSample" or self.samples_second):
            uniform = torch.rand(logits.shape, generator=draw, dtype=torch.float64).clamp_min_(1e-20)
            gumbel = -torch.log(-torch.log(uniform))
            compared = logits.detach().double() + gumbel.to(logits.device)
            if self.samples_second:
                first = (compared if self.noisy_gate_policy == "RSample" else logits.detach()).argmax(-1, keepdim=True)
                second = compared.scatter(-1, first, -torch.inf).argmax(-1, keepdim=True)
                experts = torch.cat([first, second], dim=-1)
            else:
                experts = compared.topk(self.k, dim=-1).indices
            scores = functional.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
            weights = scores.gather(-1, experts)
            return experts, weights / weights.sum(-1, keepdim=True) if self.k > 1 else weights, scores
        return _C.route(logits, self.k, renormalize=self.k > 1)
