"""Errors of the trainer itself, in the form of the library's, and the line that every error ends a rank with."""

import functools
import re

import zeroth

make_error = functools.partial(zeroth.make_error, where="train.py")
"""An Error to be raised, with the text and the attributes of one of the library's."""


def errno_text(error: OSError) -> str:
    """ "No such file or directory (errno 2)"."""
    return f"{error.strerror} (errno {error.errno})"


def error_line(error: RuntimeError, who: str) -> tuple[str, int] | None:
    """ "ZEROTH ERROR [CODE] rank=r/n: text" and the exit code; None for what is no error of Zeroth. What torch passes
    on as a plain RuntimeError (a refusal of compiled autograd) is their text, then a stack trace."""
    found = re.match(r"\[([A-Z_]+)\] (.*)", str(error))
    if found is None:
        return None
    try:
        exit_code = zeroth.make_error(found[1], "").exit_code
    except zeroth.Error:
        return None  # no code of ours
    text = str(error).removeprefix(f"[{found[1]}] ") if isinstance(error, zeroth.Error) else found[2]
    return f"ZEROTH ERROR [{found[1]}] {who}: {text}\n", exit_code
