"""Errors of the trainer itself, in the form of the library's, and the line that every error ends a rank with."""

import re

import zeroth

EXIT_CODES = {
    "USAGE": 64, "MODEL": 65, "NONFINITE": 65, "LAUNCH": 69, "INTERNAL": 70, "OUT_OF_MEMORY": 71, "RESOURCE": 71, "IO": 74,
    "MISMATCH": 76, "PEER_LOST": 76, "TIMEOUT": 76, "ABORTED": 76, "ENVIRONMENT": 77, "CONFIG": 78,
}
"""what a process that ends with an error of this code exits with; docs/errors/README.md"""


def make_error(
    code: str, message: str, *, where: str = "train.py", who: str = "", which: str = "", expected: str = "", got: str = "", hint: str = ""
) -> zeroth.Error:
    """An Error to be raised, with the text and the attributes of one of the library's."""
    context = {"where": where, "who": who, "which": which, "expected": expected, "got": got, "hint": hint}
    error = zeroth.Error("; ".join([f"[{code}] {message}", *(f"{name}: {text}" for name, text in context.items() if text)]))
    error.code, error.exit_code, error.message = code, EXIT_CODES[code], message
    for name, text in context.items():
        setattr(error, name, text)
    return error


def errno_text(error: OSError) -> str:
    """ "No such file or directory (errno 2)"."""
    return f"{error.strerror} (errno {error.errno})"


def error_line(error: RuntimeError, who: str) -> tuple[str, int] | None:
    """ "ZEROTH ERROR [CODE] rank=r/n: text" and the exit code; None for what is no error of Zeroth. Torch passes those that are raised
    inside backward on as a plain RuntimeError: their text, then a stack trace."""
    found = re.match(r"\[([A-Z_]+)\] (.*)", str(error))
    if found is None or found[1] not in EXIT_CODES:
        return None
    text = str(error).removeprefix(f"[{found[1]}] ") if isinstance(error, zeroth.Error) else found[2]
    return f"ZEROTH ERROR [{found[1]}] {who}: {text}\n", EXIT_CODES[found[1]]
