"""States of torch's optimizers: of parameters by name, as DCP has them, and by number, as optimizer.state_dict()."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zeroth.ckpt import hypers
from zeroth.ckpt.contents import NO_GROUP, WEIGHT, Contents, Hypers, Lazy, Param, as_reals, of_tensor
from zeroth.ckpt.refusals import refused

__all__ = [
    "NamedState",
    "adopt",
    "by_name",
    "groups_of",
    "kind_of",
    "note_others",
    "scalar",
    "states_of",
    "to_numbered",
]

_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_UNKNOWN = "max_exp_avg_sq"
_AMSGRAD = f"{_UNKNOWN}: no engine has amsgrad"


@dataclasses.dataclass(kw_only=True, slots=True)
class NamedState:
    """Of one optimizer."""

    state: dict[str, dict[str, Any]]
    """by parameter: Lazy, tensors, numbers"""
    groups: list[tuple[Hypers, list[str]]]
    """with the names of their parameters"""
    kind: str = ""
    """"AdamW", "Adam", "SGD", or "", if it does not say"""


def kind_of(groups: Iterable[Mapping[str, Any]], decoupled: bool | None = None) -> str:
    """The optimizer that has such groups. `decoupled`: the weight decay of an Adam, if its groups do not say."""
    for group in groups:
        if "betas" in group:
            said = group.get("decoupled_weight_decay", decoupled)
            return "Adam" if said is False else "AdamW"
        if "dampening" in group:
            return "SGD"
    return ""


def scalar(value: Any) -> float | None:
    """A number, or a tensor with one."""
    if isinstance(value, Lazy):
        value = value.read()
    if isinstance(value, torch.Tensor):
        return float(value.reshape(-1)[0]) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def adopt(contents: Contents, named: NamedState) -> None:
    """Gives parameters of `contents` their states, updates and groups. Raises Error CHECKPOINT for a state of another
    shape than its parameter; what an engine does not have is noted in left_out."""
    names = {name: param for param in contents.params for name in (param.name, *param.aliases)}
    contents.groups = [group for group, _ in named.groups]
    contents.optimizer = named.kind
    for number, (_, members) in enumerate(named.groups):
        for name in members:
            if name in names:
                names[name].group = number
    found: set[str] = set()
    for name, states in named.state.items():
        if name not in names:
            contents.left_out.append(f"the optimizer's states of {name}, which is no parameter")
            continue
        found |= _adopt_one(contents, names[name], states)
    if not named.kind and found:
        contents.optimizer = "AdamW" if "exp_avg_sq" in found else "SGD"
    if contents.optimizer in ("AdamW", "Adam"):
        found |= {"exp_avg", "exp_avg_sq"}
    for param in contents.params:
        if param.group != NO_GROUP:  # one that was never updated has no states in torch, and zeros in an engine
            param.states |= {state: _zeros(param) for state in sorted(found - set(param.states))}
    contents.step = max([contents.step, *(param.updates for param in contents.params)])


def _zeros(param: Param) -> Lazy:
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    return Lazy(shape=param.shape, dtype=dtype, read=lambda: torch.zeros(param.shape, dtype=dtype))


def _adopt_one(contents: Contents, param: Param, states: Mapping[str, Any]) -> set[str]:
    for key, value in states.items():
        if key == "step":
            param.updates = int(scalar(value) or 0)
        elif key in _STATES and value is not None:
            lazy = as_reals(value if isinstance(value, Lazy) else of_tensor(value))
            if lazy.shape != param.shape:
                raise refused(
                    "a state has another shape than its parameter",
                    which=f"{contents.origin}, {param.name}/{key}",
                    expected=str(list(param.shape)),
                    got=str(list(lazy.shape)),
                    hint="the optimizer's parameters are in another order than the model's? give names",
                )
            if lazy.dtype in (torch.float16, torch.bfloat16):
                lazy = lazy.to(torch.float32, lambda tensor, dtype: tensor.to(dtype))
            param.states[key] = lazy
        elif key == _UNKNOWN and _AMSGRAD not in contents.left_out:
            contents.left_out.append(_AMSGRAD)
    if "momentum_buffer" in param.states and "step" not in states:
        # SGD of torch counts no steps; without an update an engine would begin the momentum anew.
        param.updates = max(param.updates, contents.step, 1)
    return set(_STATES) & set(param.states)


def groups_of(contents: Contents) -> list[tuple[Hypers, list[Param]]]:
    """Groups with their trained parameters, without those that have none. Parameters whose group nobody knows are in
    one of their own, at the end."""
    groups: list[tuple[Hypers, list[Param]]] = [(group, []) for group in contents.groups]
    homeless: list[Param] = []
    for param in contents.params:
        if not param.trainable:
            continue
        known = param.group != NO_GROUP and 0 <= param.group < len(groups)
        (groups[param.group][1] if known else homeless).append(param)
    if homeless:
        groups.append(({}, homeless))
    return [(values, params) for values, params in groups if params]


def note_others(contents: Contents) -> None:
    """States that no optimizer of torch has are left out of torch's forms; left_out says so."""
    others = sorted({state for param in contents.params for state in param.states} - {WEIGHT, *_STATES})
    contents.left_out += [f"the state {state}; --state {state} writes it as the weights" for state in others]


def states_of(param: Param) -> dict[str, Any]:
    """As torch has them, tensors still to be read; empty for one that was never updated."""
    states: dict[str, Any] = {name: lazy for name, lazy in param.states.items() if name in _STATES}
    if not states or param.updates == 0:
        return {}
    if "exp_avg" in states:
        states = {"step": torch.tensor(float(param.updates)), **states}
    return states


def to_numbered(contents: Contents) -> dict[str, Any]:
    """optimizer.state_dict(), with "param_names" in its groups. Parameters are numbered group by group, as torch does;
    load_state_dict() takes them by number."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for values, params in groups_of(contents):
        numbers = list(range(number, number + len(params)))
        number += len(params)
        for index, param in zip(numbers, params, strict=True):
            own = states_of(param)
            if own:
                state[index] = {k: v.read().clone() if isinstance(v, Lazy) else v for k, v in own.items()}
        groups.append(
            {
                **hypers.to_torch(values, contents.optimizer),
                "params": numbers,
                "param_names": [param.name for param in params],
            }
        )
    return {"state": state, "param_groups": groups}


def by_name(state_dict: Mapping[str, Any], names: Sequence[str] | None, contents: Contents) -> NamedState:
    """Of an optimizer.state_dict() with numbers. `names`: of its parameters in its order; None: "param_names" of its
    groups, or else the order of the model, if there is one group and all shapes fit. Raises Error CHECKPOINT where the
    order cannot be told."""
    which = f"{contents.origin}, optimizer"
    try:
        raw = list(state_dict["param_groups"])
        numbers = [list(group["params"]) for group in raw]
        states = dict(state_dict["state"])
    except (KeyError, TypeError) as error:
        raise refused("a state of an optimizer cannot be read", which=which, got=repr(error)) from error
    order: dict[Any, str] = {}
    flat = [number for group in numbers for number in group]
    if names is None and all("param_names" in group for group in raw):
        names = [str(name) for group in raw for name in group["param_names"]]
    if names is None:
        names = _guess(contents, flat, states, len(raw))
    if names is None or len(names) != len(flat):
        raise refused(
            "it cannot be told which parameters an optimizer's states are of",
            which=which,
            expected=f"names of its {len(flat)} parameters",
            got=f"{len(names) if names is not None else 0} names, {len(raw)} groups",
            hint="--param-names FILE: a JSON list of names in the order of the groups",
        )
    order = dict(zip(flat, names, strict=True))
    for key in ("amsgrad", "maximize"):
        if any(group.get(key) for group in raw):
            contents.left_out.append(f"{key} of the optimizer's groups: no engine follows it")
    return NamedState(
        state={order[number]: dict(one) for number, one in states.items() if number in order},
        groups=[
            (hypers.from_torch(group, which), [order[number] for number in members])
            for group, members in zip(raw, numbers, strict=True)
        ],
        kind=kind_of(raw),
    )


def _guess(contents: Contents, flat: list[Any], states: Mapping[Any, Any], groups: int) -> list[str] | None:
    """The order of the model, if every shape fits."""
    params = [param for param in contents.params if param.trainable]
    if groups != 1 or len(params) != len(flat):
        return None
    for number, param in zip(flat, params, strict=True):
        for key, value in states.get(number, {}).items():
            if key in _STATES and isinstance(value, torch.Tensor) and tuple(value.shape) != param.shape:
                return None
    return [param.name for param in params]
