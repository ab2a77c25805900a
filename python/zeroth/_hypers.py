"""Hyper-parameters of parameter groups, with the names of torch's optimizers."""

import math
from collections.abc import Mapping
from typing import Any

from zeroth import _C

__all__ = ["Hypers", "names_of", "of_group"]

Hypers = dict[str, float | bool | tuple[float, float]]
"""by name; a group of Engine(params=...) may leave some out"""

_ADAPTIVE = ("lr", "betas", "eps", "weight_decay")
_LION = ("lr", "betas", "weight_decay")
_SGD = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
_ELSEWHERE = {*_ADAPTIVE, *_SGD, "amsgrad", "maximize", "decoupled_weight_decay"}
"""names that some optimizer of torch's would follow"""

_ROUNDED = ("lr", "weight_decay")
"""which a schedule may bring to a little below 0, by rounding"""
_ROUNDING = 1e-12


def names_of(optimizer: str) -> tuple[str, ...]:
    """The hyper-parameters of an optimizer of the configuration, by its type: SGD, Lion, or one with two moments."""
    return {"SGD": _SGD, "Lion": _LION}.get(optimizer, _ADAPTIVE)


def of_group(group: Mapping[str, Any], optimizer: str, which: str) -> Hypers:
    """The hyper-parameters in `group`, as plain numbers. Keys that are no hyper-parameters are not looked at. Raises
    Error USAGE, with `which` and the key, for a value that the optimizer cannot have, and for one that it would not
    follow."""
    names = names_of(optimizer)
    for name in sorted(_ELSEWHERE & (set(group) - set(names))):
        if not _is_off(group[name]):
            raise _refused(f"{which}, {name!r}", "a key that the optimizer has", group[name], optimizer)
    return {name: _value(name, group[name], f"{which}, {name!r}", optimizer) for name in names if name in group}


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, int | float) and value == 0)


def _value(name: str, value: Any, which: str, optimizer: str) -> float | bool | tuple[float, float]:
    try:
        if name == "betas":
            first, second = (float(beta) for beta in value)
            if 0 <= first < 1 and 0 <= second < 1:
                return first, second
        elif name == "nesterov":
            return bool(value)
        else:
            number = float(value)
            lowest = -math.inf if name == "dampening" else -_ROUNDING if name in _ROUNDED else 0.0
            if math.isfinite(number) and number >= lowest:
                return number
    except (TypeError, ValueError):
        pass
    one = "a number" if name == "dampening" else "a number of at least 0"
    raise _refused(which, "two numbers of at least 0 and below 1" if name == "betas" else one, value, optimizer)


def _refused(which: str, expected: str, got: Any, optimizer: str) -> _C.Error:
    return _C.make_error(
        "USAGE",
        "a parameter group has a value that the optimizer cannot follow",
        where="python.optimizer",
        which=which,
        expected=expected,
        got=repr(got)[:80],
        hint=f"{optimizer} has {', '.join(names_of(optimizer))}",
    )
