"""Torch's errors about parameters and gradients without memory, as errors of Zeroth.

A parameter that is not gathered has a storage that refuses every access with a text of Zeroth's. Torch makes a plain
RuntimeError of it, whatever the access. Where such an error passes through a call of the engine, or ends the script, it
becomes an Error."""

import re

from zeroth import _C

__all__ = ["error_of"]

_TEXT = re.compile(r"zeroth: ((?:parameter|the gradient of) '([^']*)'|the engine that held)[^\n]*")


def error_of(error: BaseException) -> _C.Error | None:
    """The Error behind `error`; None if it is another one."""
    if not isinstance(error, RuntimeError) or isinstance(error, _C.Error):
        return None
    try:
        found = _TEXT.search(str(error))
    except Exception:  # the user's own __str__
        return None
    if found is None:
        return None
    message, _, hint = found[0].removeprefix("zeroth: ").partition(". ")
    return _C.make_error(
        "USAGE", message.rstrip("."), where="libtorch.parameters", which=found[2] or "", hint=hint.rstrip(".")
    )
