"""Skip connections: values that a layer keeps for a later one, past the layers between them.

    class Down(nn.Module):
        def forward(self, x):
            return self.conv(zeroth.pipe.stash("skip", x))

    class Up(nn.Module):
        def forward(self, x):
            return self.conv(x + zeroth.pipe.pop("skip"))

What is stashed travels beside the value that layers return, from chunk to chunk, and gradients travel back. The idea of
named skips is torchgpipe's (Kim et al. 2020, arXiv 2004.09910, section 3.3).
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zeroth.parallel._refuse import refuse

__all__ = ["Stash", "packed", "pop", "stash", "stashing", "unpacked"]

_VALUE, _STASH = "zeroth.pipe.value", "zeroth.pipe.stash"


class Stash:
    """What is stashed and not popped yet, by name."""

    def __init__(self, values: Mapping[str, Any], on_pop: Callable[[Any], None] | None = None) -> None:
        self.values = dict(values)
        self._on_pop = on_pop

    def put(self, name: str, value: Any) -> None:
        if name in self.values:
            refuse(
                "a value is stashed under a name that has one already",
                where="pipe.stash",
                which=name,
                expected="a pop() before the next stash() of the same name",
            )
        self.values[name] = value

    def take(self, name: str) -> Any:
        if name not in self.values:
            refuse(
                "a value is popped that is not stashed",
                where="pipe.pop",
                which=name,
                expected=f"one of {', '.join(self.values)}" if self.values else "a stash() in an earlier layer",
                got="nothing under this name",
                hint="each value is popped once: stash it again for another layer",
            )
        value = self.values.pop(name)
        if self._on_pop is not None:
            self._on_pop(value)
        return value

    def require_empty(self) -> None:
        """Raises Error USAGE, by name, for a value that no layer has popped."""
        if self.values:
            refuse(
                "a value was stashed and never popped",
                where="pipe.run",
                which=", ".join(self.values),
                expected="a pop() in a later layer for each stash()",
            )


# A context of one thread: ranks may be threads, each in a run of its own.
_current: contextvars.ContextVar[Stash | None] = contextvars.ContextVar("zeroth.pipe.stash", default=None)


@contextlib.contextmanager
def stashing(values: Mapping[str, Any] | None = None, on_pop: Callable[[Any], None] | None = None) -> Iterator[Stash]:
    """In here stash() and pop() work, beginning with `values`. Chains open it themselves; open it around a model that
    uses them and is called as a whole. `on_pop` is told every value that is popped."""
    held = Stash(values or {}, on_pop)
    token = _current.set(held)
    try:
        yield held
    finally:
        _current.reset(token)


def _held(where: str, name: str) -> Stash:
    held = _current.get()
    if held is None:
        refuse(
            "nothing carries stashed values here",
            where=where,
            which=name,
            expected="a layer that a pipeline runs",
            hint="with zeroth.pipe.stashing(): model(x) for a model that runs as a whole",
        )
    return held


def stash(name: str, value: Any) -> Any:
    """Keeps `value` (a tensor, or tuples, lists and dicts of tensors) for the layer that calls pop(name), and returns
    it. Raises Error USAGE outside of a run, and for a name that has a value."""
    _held("pipe.stash", name).put(name, value)
    return value


def pop(name: str) -> Any:
    """Returns what stash(name, ...) kept in an earlier layer, once. Raises Error USAGE if there is nothing."""
    return _held("pipe.pop", name).take(name)


def packed(value: Any, held: Stash) -> Any:
    """What passes to the next layer: the value alone where nothing is stashed."""
    return {_VALUE: value, _STASH: dict(held.values)} if held.values else value


def unpacked(values: Any) -> tuple[Any, dict[str, Any]]:
    """The reverse of packed()."""
    if isinstance(values, dict) and values.keys() == {_VALUE, _STASH}:
        return values[_VALUE], values[_STASH]
    return values, {}
