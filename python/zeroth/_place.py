"""The current line of the user's program, for ranks that wait for this one and for errors.

A rank that hangs may hold the GIL, so the interpreter cannot be asked. The signal handler of `faulthandler` writes the
traceback of the interrupted thread with system calls only. The thread of the control plane sends that signal, reads the
pipe, and takes the first line outside of libraries."""

import faulthandler
import functools
import os
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch

from zeroth import _C

__all__ = ["announce", "place_in", "place_of", "place_of_frame"]

_registered: tuple[int, int, int] | None = None
"""signal and the two ends of the pipe, for the lifetime of the process"""


def announce(world: _C.World) -> None:
    """Lets the control plane of `world` find the current line, and spares notebooks and shells when the job has failed.
    Without a free real-time signal, reports have phases but no lines."""
    global _registered
    if world.size * world.num_sites == 1:
        return
    if hasattr(sys, "ps1") or sys.flags.interactive:
        world.spare()
    if _registered is None:
        number = next(
            (
                number
                for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN, -1)
                if signal.getsignal(number) is signal.SIG_DFL
            ),
            None,
        )
        if number is None:
            return
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        faulthandler.register(number, file=writing, all_threads=False, chain=False)
        _registered = (number, reading, writing)
    world.find_places(_registered[0], _registered[1], list(_not_the_users()), os.getcwd() + "/")


def place_of(where: TracebackType | None) -> str:
    """ "train.py:57 in load_batch": the innermost line outside of libraries; "" if there is none."""
    for frame in reversed(traceback.extract_tb(where)):
        if text := place_in(frame.filename, frame.lineno, frame.name):
            return text
    return ""


def place_of_frame(frame: FrameType | None) -> str:
    """The same of a running program: its innermost line outside of libraries."""
    while frame is not None:
        if text := place_in(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name):
            return text
        frame = frame.f_back
    return ""


def place_in(file: str, line: int | str | None, function: str) -> str:
    """ "train.py:57 in load_batch"; "" in a library."""
    return "" if file.startswith(_not_the_users()) else f"{file.removeprefix(os.getcwd() + '/')}:{line} in {function}"


@functools.cache
def _not_the_users() -> tuple[str, ...]:
    """Path prefixes of library files."""
    libraries = {Path(path).parent for path in (__file__, torch.__file__)}
    libraries |= {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*sorted({str(path) + "/" for folder in libraries for path in (folder, folder.resolve())}), "<frozen")
