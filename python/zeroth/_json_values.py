"""Python values as JSON and back, with their types: what a checkpoint keeps of a caller's state, and of a scheduler's.

Numbers, strings, lists and dictionaries with strings as keys are what they are in JSON. Everything else is an object
with the member `__zeroth__`, which names the type. There are no pickles: nothing of a file is run."""

import base64
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from zeroth import _C

__all__ = ["from_json", "plain_values", "to_json", "user_text"]

_TAG = "__zeroth__"
_SCALARS = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_FACTORIES: dict[str, Callable[[], Any]] = {
    "int": int,
    "float": float,
    "list": list,
    "dict": dict,
    "set": set,
    "str": str,
}
"""of a defaultdict"""


class _Unfit(Exception):
    """A value that cannot be kept; the message begins with its place."""


def to_json(value: Any, what: str) -> str:
    """`what`: how the user calls the value. Raises Error USAGE, with the place, for what cannot be kept."""
    try:
        return json.dumps(_encoded(value, what), allow_nan=True)
    except (_Unfit, ValueError, RecursionError) as error:
        got = f"{what} is nested too deep, or in itself" if isinstance(error, RecursionError) else str(error)
        raise _C.make_error(
            "USAGE",
            f"{what} cannot be saved",
            where="python.save",
            expected="None, numbers, strings, bytes, numpy scalars, and lists, tuples, sets and dictionaries of these",
            got=got,
            hint="a checkpoint has no pickles; save numbers that make the object again",
        ) from error


def from_json(text: str, path: str) -> Any:
    """What to_json() was given. `path`: the checkpoint, for errors. Raises Error CHECKPOINT."""
    return plain_values(json.loads(text), path)


def plain_values(parsed: Any, path: str) -> Any:
    """The same of JSON that has been parsed. Raises Error CHECKPOINT."""
    try:
        return _decoded(parsed)
    except (KeyError, TypeError, ValueError, ImportError, RecursionError) as error:
        raise _C.make_error(
            "CHECKPOINT",
            "a value of the caller's in a checkpoint cannot be read",
            where="python.load",
            which=path,
            got=repr(error)[:200],
        ) from error


def _encoded(value: Any, place: str) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return [_encoded(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if kind is dict:
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: _encoded(item, f"{place}[{key!r}]") for key, item in value.items()}
        return {_TAG: "dict", "items": _items(value, place)}
    if kind is tuple:
        return {_TAG: "tuple", "items": [_encoded(item, f"{place}[{index}]") for index, item in enumerate(value)]}
    if kind in (set, frozenset):
        members = [_encoded(item, f"a member of {place}") for item in value]
        return {_TAG: kind.__name__, "items": sorted(members, key=json.dumps)}  # the same text for the same set
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "data": base64.b64encode(value).decode()}
    if kind is complex:
        return {_TAG: "complex", "items": [value.real, value.imag]}
    if kind in (OrderedDict, Counter):
        return {_TAG: kind.__name__, "items": _items(value, place)}
    if kind is defaultdict:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if factory is not None and _FACTORIES.get(str(name)) is not factory:
            raise _Unfit(f"{place} is a defaultdict whose factory is {factory!r}")
        return {_TAG: "defaultdict", "factory": name, "items": _items(value, place)}
    if kind is deque:
        members = [_encoded(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return {_TAG: "deque", "maxlen": value.maxlen, "items": members}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind not in "OV":
        return {_TAG: "numpy", "dtype": value.dtype.str, "data": base64.b64encode(value.tobytes()).decode()}
    raise _Unfit(f"{place} is a {kind.__name__}{_way(value)}")


def _way(value: Any) -> str:
    """How to save it all the same."""
    if callable(getattr(value, "tolist", None)):
        return ": save .tolist()"
    for base in (str, int, float, list, tuple, dict):
        if isinstance(value, base):
            return f": save {base.__name__}(...)"
    return ""


def _items(value: Any, place: str) -> list[list[Any]]:
    return [
        [_encoded(key, f"the key {key!r} of {place}"), _encoded(item, f"{place}[{key!r}]")]
        for key, item in value.items()
    ]


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decoded(item) for key, item in value.items()}
    kind = value[_TAG]
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(value["data"])
        return data if kind == "bytes" else bytearray(data)
    if kind == "numpy":
        import numpy

        dtype = numpy.dtype(value["dtype"])
        if dtype.kind in "OV":
            raise ValueError(f"a numpy scalar of {dtype}")
        return numpy.frombuffer(base64.b64decode(value["data"]), dtype, count=1)[0]
    items = [_decoded(item) for item in value["items"]]
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](items)
    if kind == "complex":
        return complex(*items)
    if kind == "deque":
        return deque(items, value["maxlen"])
    pairs = {key: item for key, item in items}
    if kind == "defaultdict":
        factory = value["factory"]
        return defaultdict(None if factory is None else _FACTORIES[factory], pairs)
    return {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[kind](pairs)


_NAMES = {"client": "client_state", "scheduler": "the scheduler's state"}
"""what people call the parts of a checkpoint's `user`"""


def user_text(parts: Mapping[str, Any]) -> str:
    """What save() took of its caller: "client" and "scheduler". Raises as to_json()."""
    return (
        "{"
        + ", ".join(f"{json.dumps(key)}: {to_json(part, _NAMES.get(key, key))}" for key, part in parts.items())
        + "}"
    )
