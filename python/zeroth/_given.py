"""The model that a caller gives an engine: a module, or what a call returned that has cut one."""

from typing import TYPE_CHECKING, Union

from torch import nn

from zeroth import _C
from zeroth._config import ConfigLike

__all__ = ["Given", "module_of"]

if TYPE_CHECKING:
    from zeroth.parallel.parallelize import Parallel
    from zeroth.pipe.pipeline import Pipelined

Given = Union[nn.Module, "Pipelined", "Parallel"]


def module_of(given: Given, config: ConfigLike) -> tuple[nn.Module, ConfigLike]:
    """The module, and the configuration: without one a pipeline has that with which it was cut. Raises Error MODEL for
    what is no module."""
    if isinstance(given, nn.Module):
        return given, config
    from zeroth.parallel.parallelize import Parallel  # they need what this module needs
    from zeroth.pipe.pipeline import Pipelined

    if isinstance(given, Pipelined):
        return given.model, given.config if config is None else config
    if isinstance(given, Parallel):
        return given.model, config
    raise _C.make_error(
        "MODEL",
        "an engine is given no module",
        where="python.engine",
        which="model",
        expected="a torch.nn.Module, or what zeroth.pipeline() or zeroth.parallelize() returned",
        got=f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}",
        hint=_hint(given),
    )


def _hint(given: object) -> str:
    if isinstance(given, (list, tuple)):
        return "nn.Sequential(*layers); or zeroth.pipeline(layers, config), which takes a list"
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"make one: {given.__name__}(...)"
    return "engine.module is that of an engine" if hasattr(given, "module") else ""
