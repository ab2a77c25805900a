"""Configurations: one JSON document with DeepSpeed's key names, see docs/configuration.md."""

import json
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zeroth import _C
from zeroth._C import Config, ConfigOverride

__all__ = ["Config", "ConfigLike", "ConfigOverride", "json_text", "to_config"]

ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str] | None

Problem = tuple[str, str, str, str]
"""JSON pointer of the key, what is wrong, what was expected, what there is"""

_ORIGIN = "a dict"
_DEEPEST = 64
"""levels of a mapping; JSON text may have as many"""


def to_config(config: ConfigLike) -> Config:
    """Returns a Config: from a file for a path, from the document itself for a mapping, with all defaults for None.
    Values of a mapping may also be numbers and arrays of numpy and torch, paths, other mappings and sequences. Raises
    ConfigError with all problems of the document."""
    if isinstance(config, Config):
        return config
    if config is None:
        return Config.from_json("{}", "the defaults")
    if isinstance(config, Mapping):
        text, problems = json_text(config)
        if problems:
            raise _C.make_config_error(_ORIGIN, problems)
        return Config.from_json(text, _ORIGIN)
    if not isinstance(config, str | os.PathLike):
        what = [("", "the configuration is no document", "a path, a mapping, a Config or None", _said(config))]
        raise _C.make_config_error("an argument", what)
    return Config.from_file(os.fspath(config))


def json_text(value: Any) -> tuple[str, list[Problem]]:
    """`value` as JSON, with Infinity and NaN where Python has them, and the parts of it that JSON does not have."""
    problems: list[Problem] = []
    plain = _plain(value, "", (), lambda *problem: problems.append(problem))
    return json.dumps(plain), problems


def _plain(value: Any, pointer: str, around: tuple[int, ...], refuse: Callable[[str, str, str, str], None]) -> Any:
    """`value` as json.dumps() takes it. Calls refuse(*problem) for each part that JSON does not have. `around`: ids of
    what `value` lies in."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if len(around) == _DEEPEST or id(value) in around:
        refuse(pointer[:160], "nested too deep", f"at most {_DEEPEST} levels", type(value).__name__)
        return None
    inner = (*around, id(value))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                refuse(pointer, "a key is no text", "keys that are texts", repr(key)[:80])
        return {key: _plain(part, f"{pointer}/{_escaped(key)}", inner, refuse) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(part, f"{pointer}/{index}", inner, refuse) for index, part in enumerate(value)]
    lists = getattr(value, "tolist", None)  # numbers and arrays of numpy, tensors
    if callable(lists):
        try:
            inside = lists()
        except Exception:  # such as a tensor without memory
            inside = value
        if type(inside) is not type(value):
            return _plain(inside, pointer, inner, refuse)
    refuse(pointer, "no JSON value", "a number, a text, true, false, null, or a list or mapping of such", _said(value))
    return None


def _escaped(key: object) -> str:
    """As a part of a JSON pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def _said(value: Any) -> str:
    try:
        return f"{type(value).__name__} {repr(value)[:80]}"
    except Exception:  # the user's own __repr__
        return type(value).__name__
