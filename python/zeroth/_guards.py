"""Errors of Zeroth that torch has made plain RuntimeErrors of, as errors of Zeroth again.

Operators on a parameter that is not gathered raise an Error. A view that somebody kept of it refuses by a text that
torch raises; the text is that of an Error. Where such an exception passes through a call of the engine, or ends the
script, it becomes one."""

import re

from zeroth import _C

__all__ = ["error_of"]

_TEXT = re.compile(r"\[([A-Z_]+)\] ([^\n]+)")
_FIELD = re.compile(r"; (where|who|which|expected|got|hint): ")
_CODES = {"USAGE", "MODEL", "PEER_LOST", "TIMEOUT", "MISMATCH", "ABORTED", "INTERNAL", "RESOURCE"}


def error_of(error: BaseException) -> _C.Error | None:
    """The Error behind `error`; None if it is another one."""
    if not isinstance(error, RuntimeError) or isinstance(error, _C.Error):
        return None
    try:
        found = _TEXT.match(str(error))
    except Exception:  # the user's own __str__
        return None
    if found is None or found[1] not in _CODES:
        return None
    message, *fields = _FIELD.split(found[2])
    return _C.make_error(found[1], message, **dict(zip(fields[::2], fields[1::2], strict=True)))
