"""Configurations: one JSON document with DeepSpeed's key names, see docs/configuration.md."""

import json
import os
from collections.abc import Mapping
from typing import Any

from zeroth import _C
from zeroth._C import Config, ConfigOverride

__all__ = ["Config", "ConfigLike", "ConfigOverride", "to_config"]

ConfigLike = Config | Mapping[str, Any] | str | os.PathLike[str] | None


def to_config(config: ConfigLike) -> Config:
    """Returns a Config: from a file for a path, from the document itself for a mapping, with all defaults for None.
    Raises ConfigError with all problems of the document."""
    if isinstance(config, Config):
        return config
    if config is None:
        return Config.from_json("{}", "the defaults")
    if isinstance(config, Mapping):
        try:
            text = json.dumps(config, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise _C.make_error("CONFIG", f"the configuration is no JSON document: {error}") from error
        return Config.from_json(text, "a dict")
    return Config.from_file(os.fspath(config))
