"""For the time of a run, other calls in the place of those of modules.

[Note: Stand-ins] The class of a module is replaced by one derived from it that has another __call__. So the module
stays the same object in all places that hold it, with its attributes, and what lies around the call (hooks, activation
checkpoints) belongs to the original call, which a stand-in makes or leaves out.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["original_call", "standing_in"]

_CALL = "_zeroth_call"
_set_class = object.__setattr__
"""without nn.Module's, which looks for parameters first"""


class _StandIn:
    def __init_subclass__(cls) -> None:
        """Not the class's own, which may wrap its forward once more."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_CALL](*args, **kwargs)


@functools.cache
def _derived(kind: Any) -> Any:
    return type(kind.__name__, (_StandIn, kind), {"__module__": kind.__module__})


def original_call(module: nn.Module) -> Callable[..., Any]:
    """The call of the module as it is without a stand-in."""
    kind = next(base for base in type(module).__mro__ if not issubclass(base, _StandIn))
    return functools.partial(kind.__call__, module)


@contextlib.contextmanager
def standing_in(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """In here a call of one of these modules is a call of what it is mapped to."""
    kinds: dict[nn.Module, Any] = {module: type(module) for module in calls}
    try:
        for module, call in calls.items():
            module.__dict__[_CALL] = call
            _set_class(module, "__class__", _derived(kinds[module]))
        yield
    finally:
        for module, kind in kinds.items():
            _set_class(module, "__class__", kind)
            module.__dict__.pop(_CALL, None)
