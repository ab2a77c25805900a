"""The end of a script: an uncaught exception is sent to the other ranks, a zeroth.Error sets the exit code, and saves
that run behind are finished. An interrupt and a sys.exit() with a code end no other rank, but the others hear of them
as the reason why this rank has left.

This runs in sys.excepthook, after the earlier hook has printed as before, and in sys.exit(), before it raises. Consoles
and notebooks are not changed."""

import atexit
import json
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import NoReturn

from zeroth import _C, _guards, _place

__all__ = ["CODES_OF_OTHERS", "finish_at_exit", "follow", "install", "stay_on_top", "stop"]

_LONGEST = 500
"""characters of an exception's text that the other ranks get, at most"""

_worlds: "weakref.WeakSet[_C.World]" = weakref.WeakSet()
"""worlds of several ranks with an engine; a strong reference would keep their connections open"""

os.register_at_fork(after_in_child=_worlds.clear)


def install() -> None:
    """Wraps the current sys.excepthook, unless it is already ours. Called for each engine, because torch sets a hook
    when it makes its first group. Does nothing in a console or a notebook."""
    if not _is_interactive() and not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def stay_on_top(error: str = "") -> None:
    """Wraps the hook of torch's init_process_group(), which is set whenever a group is made. It prints what the earlier
    hooks print, but returns, so the exit code would be 1. Called for each engine, each step, and each Error that comes
    to Python: so also for the one that ends the script. `error`: the text of that Error. A script may catch it and end:
    then it is what the other ranks hear, unless the engine was called once more."""
    if error and not error.startswith(_OF_OTHERS):
        for world in list(_worlds):
            world.ends_by(f"an exit after the script had caught {error[:_LONGEST]}")
    if getattr(sys.excepthook, "__module__", "") == _TORCH:
        install()


_TORCH = "torch.distributed.distributed_c10d"
CODES_OF_OTHERS = ("ABORTED", "MISMATCH", "PEER_LOST", "TIMEOUT")
"""of errors that are not of this rank's own program"""
_OF_OTHERS = tuple(f"[{code}]" for code in CODES_OF_OTHERS)


def follow(world: _C.World) -> None:
    """Registers `world`: its other ranks get the exception that ends this rank."""
    stay_on_top()
    if world.size * world.num_sites > 1:
        _worlds.add(world)
        if not _is_interactive() and not isinstance(sys.exit, _Exit):
            sys.exit = _Exit(sys.exit)


def stop(world: _C.World, error: BaseException) -> None:
    """Tells the other ranks of `error`, which leaves them without what they wait for, whether the script catches it or
    not. Nothing for what this rank has heard of another one."""
    own = _guards.error_of(error) or error
    if world.size * world.num_sites > 1 and getattr(own, "code", "") not in CODES_OF_OTHERS:
        world.abort(_told(own, error.__traceback__))


_saves: list[tuple[int, _C.SaveHandle]] = []
"""that may not have ended, with the process that writes them: a forked child has no part in them"""


def finish_at_exit(save: _C.SaveHandle) -> None:
    """The program does not end before this save has."""
    if not _saves:
        atexit.register(_finish_saves)
    _saves[:] = [(process, other) for process, other in _saves if process == os.getpid() and not other.done()]
    _saves.append((os.getpid(), save))


def _finish_saves() -> None:
    for process, save in _saves:
        if process == os.getpid():
            save.finish()


class _Hook:
    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            self._before(kind, error, traceback)
        finally:
            error = _guards.error_of(error) or error
            if isinstance(error, KeyboardInterrupt) and _has_ended():
                _tell_end("KeyboardInterrupt", _place.place_of(traceback))
            if not isinstance(error, KeyboardInterrupt) and _has_ended():
                for world in list(_worlds):
                    world.abort(_told(error, traceback))
                # A hook that was set later, and has called this one, may not have printed yet what it will.
                if isinstance(error, _C.Error) and sys._getframe().f_back is None:
                    raise SystemExit(getattr(error, "exit_code", 1))


class _Exit:
    """In the place of sys.exit(): no hook of Python is called for a SystemExit, and its code and text are gone when the
    interpreter ends."""

    def __init__(self, before: Callable[..., NoReturn]) -> None:
        self._before = before
        self.__doc__ = before.__doc__

    def __call__(self, code: object = None, /) -> NoReturn:
        if code not in (None, 0) and threading.current_thread() is threading.main_thread():
            _tell_end(f"sys.exit({_shown(code)})", _place.place_of_frame(sys._getframe(1)))
        self._before(code)


def _tell_end(how: str, place: str) -> None:
    """The other ranks hear it if the engine is not called once more."""
    for world in list(_worlds):
        world.ends_by(f"{how} at {place}" if place else how)


def _shown(code: object) -> str:
    try:
        text = json.dumps(code, ensure_ascii=False) if isinstance(code, str) else repr(code)
    except Exception:  # the user's own __repr__
        text = type(code).__name__
    return text[:_LONGEST].encode(errors="backslashreplace").decode()


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.inspect)


def _has_ended() -> bool:
    """True if the exception ends the script. False in a console, and for a cell that a program runs: that program is on
    the stack and continues."""
    if _is_interactive():
        return False
    frame: FrameType = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name not in ("<module>", "_run_module_as_main")


def _told(error: BaseException, traceback: TracebackType | None) -> _C.Error:
    """The error for the other ranks, with the line of the user's program. An error about another rank is passed on
    unchanged."""
    place = _place.place_of(traceback)
    if not isinstance(error, _C.Error) or not hasattr(error, "hint"):
        return _C.make_error("USER", _text(error), where=place)
    if error.code in CODES_OF_OTHERS:
        return error
    where = " at ".join(part for part in (error.where, place) if part)
    return _C.make_error(
        error.code,
        error.message,
        where=where,
        who=error.who,
        which=error.which,
        expected=error.expected,
        got=error.got,
        hint=error.hint,
    )


def _text(error: BaseException) -> str:
    """ "ValueError: no such token: 50257": the first line, for torch appends a stack trace; and what that trace says of
    an exception in another process."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the user's own __str__
        lines = []
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if quoted := _quoted(lines):
        text = f"{text.rstrip('.')}: {quoted}"
    return text[:_LONGEST].encode(errors="backslashreplace").decode()


_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)')


def _quoted(lines: Sequence[str]) -> str:
    """Of a traceback in the text of an exception, as a DataLoader writes it that raises anew what a worker has raised:
    the last exception, and the user's innermost line. "" without one."""
    if not any(line.endswith("Traceback (most recent call last):") for line in lines):
        return ""
    frames = [(number, found) for number, line in enumerate(lines) if (found := _FRAME.match(line))]
    last = frames[-1][0] if frames else len(lines)
    cause = next((line for line in lines[last:] if line and not line.startswith(" ")), "")
    place = next((text for _, found in reversed(frames) if (text := _place.place_in(*found.groups()))), "")
    return f"{cause} ({place})" if cause and place else cause


install()
