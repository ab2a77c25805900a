"""The errors of this package, all of one form."""

from zeroth import _C

__all__ = ["io_error", "refused"]


def refused(
    message: str, *, code: str = "CHECKPOINT", which: str = "", expected: str = "", got: str = "", hint: str = ""
) -> _C.Error:
    """To be raised. CHECKPOINT: what is in the files; USAGE: what was asked for."""
    return _C.make_error(code, message, where="ckpt", which=which, expected=expected, got=got[:400], hint=hint)


def io_error(message: str, error: OSError, which: str) -> _C.Error:
    """Error IO with errno."""
    return _C.make_error("IO", f"{message}: {error.strerror or error}", where="ckpt", which=which)
