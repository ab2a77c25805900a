"""What other forms have no place for, as a JSON text that they carry along; so what comes back is what was there."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from zeroth.ckpt import hypers
from zeroth.ckpt.contents import WEIGHT, Contents, weight_of
from zeroth.ckpt.dtypes import NAMES, name_of
from zeroth.ckpt.refusals import refused

__all__ = ["KEY", "adopt_facts", "facts_text", "tied_names"]

KEY = "zeroth"
"""of the text: in the metadata of safetensors files, and beside "model" in DCP and torch files"""


def facts_text(contents: Contents, names: Iterable[str] | None = None) -> str:
    """Dtype of computation, tied names, whether it trains; which are buffers; of those with these names, None: of
    all."""
    wanted = None if names is None else set(names)
    return json.dumps(
        {
            "params": {
                param.name: {
                    "dtype": name_of(param.dtype, param.name),
                    "trainable": param.trainable,
                    "aliases": param.aliases,
                }
                for param in contents.params
                if wanted is None or param.name in wanted
            },
            "loss_scaler": hypers.scaler_to_json(contents.loss_scaler),
            "buffers": [name for name in contents.buffers if wanted is None or name in wanted],
        }
    )


def tied_names(text: Any, which: str) -> dict[str, str]:
    """Other names and whose they are. Empty for None. Raises Error CHECKPOINT."""
    return {alias: name for name, about in _read(text, which).params.items() for alias in about["aliases"]}


def adopt_facts(contents: Contents, text: Any) -> None:
    """Gives the parameters what the text says of them, where a source had to guess. Nothing for None. Raises Error
    CHECKPOINT."""
    read = _read(text, contents.origin)
    said = read.params
    contents.loss_scaler = contents.loss_scaler or read.loss_scaler
    for param in [param for param in contents.params if param.name in read.buffers]:
        contents.params.remove(param)
        contents.buffers[param.name] = param.states[WEIGHT]
    for name in [name for name in contents.buffers if name in said]:
        contents.params.append(weight_of(name, contents.buffers.pop(name)))
    for param in contents.params:
        about = said.get(param.name)
        if about is None:
            continue
        param.dtype, param.trainable = NAMES[about["dtype"]], about["trainable"]
        param.aliases = [*dict.fromkeys([*param.aliases, *about["aliases"]])]
        if not param.trainable:
            param.states = {WEIGHT: param.states[WEIGHT]}


@dataclasses.dataclass(kw_only=True, slots=True)
class _Facts:
    params: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    buffers: set[str] = dataclasses.field(default_factory=set)
    loss_scaler: dict[str, Any] = dataclasses.field(default_factory=dict)


def _read(text: Any, which: str) -> _Facts:
    if text is None:
        return _Facts()
    try:
        said = json.loads(text)
        params, buffers = dict(said["params"]), {str(name) for name in said["buffers"]}
        loss_scaler = hypers.scaler_from_json(said["loss_scaler"], which)
        good = all(
            about["dtype"] in NAMES
            and isinstance(about["trainable"], bool)
            and all(isinstance(alias, str) for alias in about["aliases"])
            for about in params.values()
        )
    except (ValueError, TypeError, KeyError) as error:
        raise refused("what Zeroth wrote of parameters cannot be read", which=which, got=repr(error)) from error
    if not good:
        raise refused("what Zeroth wrote of parameters cannot be", which=which, got=str(text)[:100])
    return _Facts(params=params, buffers=buffers, loss_scaler=loss_scaler)
