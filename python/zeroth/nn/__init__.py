"""Layers of experts: modules that a mesh's axis ep, or none, runs."""

from zeroth._C import (
    ExpertLoad,
    TokenExchange,
    choices_at,
    expert_capacity,
    grouped_linear,
    keep_within,
    route,
    router_z_loss,
    sequence_balance_loss,
)
from zeroth.nn.balance import update_balance_bias
from zeroth.nn.experts import Experts, listed_state, stack_experts, stacked_state
from zeroth.nn.mixlora import MixLora, add_mixlora
from zeroth.nn.moe import MoE
from zeroth.nn.recompute import keep_calls
from zeroth.nn.tasks import TaskPart, TaskShares, share_tasks

__all__ = [
    "ExpertLoad",
    "Experts",
    "MixLora",
    "MoE",
    "TaskPart",
    "TaskShares",
    "TokenExchange",
    "add_mixlora",
    "choices_at",
    "expert_capacity",
    "grouped_linear",
    "keep_calls",
    "keep_within",
    "listed_state",
    "route",
    "router_z_loss",
    "sequence_balance_loss",
    "share_tasks",
    "stack_experts",
    "stacked_state",
    "update_balance_bias",
]
