"""What a PipelineModule says of the pipeline that it is in, beside the configuration."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from zeroth import _boxes
from zeroth._config import Config, ConfigOverride
from zeroth.parallel._refuse import refuse
from zeroth.pipe.layer_list import LayerList, PipelineModule

__all__ = ["built_parameters", "recomputes_chunks", "set_interval", "split_of", "with_stages"]

_WHERE = "pipe.PipelineModule"
_SPLITS = {"balanced": "auto"}
"""names of zeroth.pipeline.split that partition() calls otherwise"""
_DEFAULT_SPLIT = "balanced"
_DEFAULT_METHOD = "parameters"


def with_stages(model: Any, config: Config, given: int | None = None) -> Config:
    """The configuration with the stages that are asked for: `given`, by the call of zeroth.pipeline() that has cut the
    model, by a PipelineModule. Raises Error CONFIG if it says others; a zeroth.mesh.pp of 1 counts as not said."""
    cut = getattr(model, "_zeroth_pipeline", None)
    asked = {
        "stages": given,
        "stages of zeroth.pipeline()": None if cut is None else cut.mesh.size("pp"),
        "num_stages": model.num_stages if isinstance(model, PipelineModule) else None,
    }
    for name, wanted in asked.items():
        if wanted is not None:
            config = _with_stages(config, name, wanted)
    return config


def _with_stages(config: Config, name: str, wanted: Any) -> Config:
    stages = json.loads(config.to_json())["zeroth"]["mesh"]["pp"]
    if wanted == stages and not isinstance(wanted, bool):
        return config
    if stages != 1 or isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        refuse(
            "a model and the configuration differ in the number of stages",
            code="CONFIG",
            where=_WHERE,
            which=f"{name} and zeroth.mesh.pp",
            expected=f"{name}={stages}, or None",
            got=f"{name}={wanted!r}",
            hint="leave one of them out",
        )
    more = [ConfigOverride("/zeroth/mesh/pp", wanted, name)]
    return Config.from_json(config.to_json(), "the configuration", more)


def recomputes_chunks(model: Any, keys: Mapping[str, Any]) -> bool:
    """Whether a program computes forwards of chunks again. `keys`: Config.pipeline. The layers of a PipelineModule have
    an interval for it."""
    return bool(keys["recompute"]) or (keys["checkpoint_interval"] > 0 and not isinstance(model, PipelineModule))


def set_interval(model: Any, config: Config) -> None:
    """Gives a PipelineModule the interval of the configuration, as DeepSpeed's engine does."""
    interval = config.pipeline["checkpoint_interval"]
    if interval > 0 and isinstance(model, PipelineModule):
        model.activation_checkpoint_interval = interval


def split_of(model: Any, keys: Mapping[str, Any]) -> str:
    """How partition() is to cut the model. `keys`: Config.pipeline. Raises Error CONFIG if a PipelineModule's
    partition_method and zeroth.pipeline.split are both said, and differ."""
    configured = str(keys["split"])
    split = _SPLITS.get(configured, configured)
    if not isinstance(model, PipelineModule):
        return split
    method = model.partition_method.lower() if model.partition_method[:5].lower() != "type:" else model.partition_method
    if configured == _DEFAULT_SPLIT:
        return method
    if method not in (_DEFAULT_METHOD, split):
        refuse(
            "a model and the configuration split in different ways",
            code="CONFIG",
            where=_WHERE,
            which="partition_method and zeroth.pipeline.split",
            expected=split,
            got=model.partition_method,
            hint="leave one of them out",
        )
    return split


def built_parameters(model: nn.Module, params: Iterable[Any]) -> list[Any]:
    """Parameters, pairs of name and parameter, or groups of them, as Engine takes them, that were made from a model
    before its layers were built, or cut into several parameters."""

    def built(one: Any) -> list[Any]:
        if isinstance(one, Mapping):
            members = one["params"]
            given = [members] if isinstance(members, nn.Parameter) else members
            return [{**one, "params": built_parameters(model, given)}]
        if isinstance(one, tuple):
            return [(one[0], part) for part in built(one[1])]
        return [*_boxes.parts_of(model.built(one) if isinstance(model, LayerList) else one)]

    return [part for one in params for part in built(one)]
