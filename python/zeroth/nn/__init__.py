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
from zeroth.nn.experts import Experts
from zeroth.nn.moe import MoE

__all__ = [
    "ExpertLoad",
    "Experts",
    "MoE",
    "TokenExchange",
    "choices_at",
    "expert_capacity",
    "grouped_linear",
    "keep_within",
    "route",
    "router_z_loss",
    "sequence_balance_loss",
    "update_balance_bias",
]
