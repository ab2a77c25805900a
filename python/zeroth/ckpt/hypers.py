"""Hyper-parameters of groups: as the manifest has them, and as torch's optimizers name them."""

import json
from collections.abc import Mapping
from typing import Any

from zeroth.ckpt.contents import Hypers
from zeroth.ckpt.refusals import refused

__all__ = ["from_json", "from_torch", "scaler_from_json", "scaler_to_json", "to_json", "to_torch"]

_DEFAULTS: Hypers = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "dampening": 0.0,
    "nesterov": False,
}


def from_json(text: str, which: str) -> Hypers:
    """Doubles are hexadecimal texts there. Raises Error CHECKPOINT."""
    try:
        values = json.loads(text)
        return {name: float.fromhex(value) if isinstance(value, str) else value for name, value in values.items()}
    except (ValueError, AttributeError) as error:
        raise refused("hyper-parameters of a checkpoint cannot be read", which=which, got=str(error)) from error


def to_json(hypers: Hypers) -> str:
    """To the bit."""
    full = {**_DEFAULTS, **hypers}
    return json.dumps({k: v if isinstance(v, bool) else float(v).hex() for k, v in full.items()})


def scaler_from_json(text: str, which: str) -> dict[str, Any]:
    """State of a loss scaler; empty for "". Raises Error CHECKPOINT."""
    if not text:
        return {}
    try:
        said = json.loads(text)
        counts = {name: int(said[name]) for name in ("steps", "last_overflow", "hysteresis")}
        return {"scale": float.fromhex(said["scale"]), **counts}
    except (ValueError, TypeError, KeyError) as error:
        raise refused("the loss scale of a checkpoint cannot be read", which=which, got=repr(error)) from error


def scaler_to_json(state: Mapping[str, Any]) -> str:
    """To the bit; "" for an empty one."""
    return json.dumps({**state, "scale": float(state["scale"]).hex()}) if state else ""


def from_torch(group: Mapping[str, Any], which: str) -> Hypers:
    """Of a group of torch.optim.Adam, AdamW or SGD, or of DeepSpeed's. Keys that are none of ours are left. Raises
    Error CHECKPOINT for a value that is no number."""
    hypers = dict(_DEFAULTS)
    try:
        for name in ("lr", "eps", "weight_decay", "momentum", "dampening"):
            if group.get(name) is not None:
                hypers[name] = float(group[name])
        if group.get("betas") is not None:
            hypers["beta1"], hypers["beta2"] = (float(beta) for beta in group["betas"])
        hypers["nesterov"] = bool(group.get("nesterov", False))
    except (TypeError, ValueError) as error:
        raise refused("a hyper-parameter is no number", which=which, got=str(error)) from error
    return hypers


def to_torch(hypers: Hypers, optimizer: str) -> dict[str, Any]:
    """With all keys that load_state_dict() of torch's optimizer wants."""
    full = {**_DEFAULTS, **hypers}
    common = {"lr": full["lr"], "weight_decay": full["weight_decay"], "maximize": False, "foreach": None}
    common |= {"differentiable": False}
    if optimizer == "SGD":
        own = {name: full[name] for name in ("momentum", "dampening", "nesterov")}
        return {**common, **own, "fused": None}
    adam = {"betas": (full["beta1"], full["beta2"]), "eps": full["eps"], "amsgrad": False, "capturable": False}
    return {**common, **adam, "fused": None, "decoupled_weight_decay": optimizer != "Adam"}
