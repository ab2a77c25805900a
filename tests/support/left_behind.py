"""What a job of a test may leave: processes, shared memory, sockets, files. Sees what belongs to this test only.

usage: left_behind.py COMMAND...

runs a test, ends as it ends, but with 1 and a line for each thing where something is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

Found = TypeVar("Found", str, set[str])
Seen = TypeVar("Seen")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 5.0
LOOKS = 10
"""at least: a machine that stands still for seconds must not make one look of many"""
FAILED = "FAILED: the test has left"
PROC = pathlib.Path("/proc")


LIBC = ctypes.CDLL(None, use_errno=True)
STRANGERS: set[int] = set()
"""children of this process that are part of the test, not of what it has started; they look after what is below them"""


def prctl(option: int, value: int) -> None:
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def adopt_orphans() -> None:
    """From here on, whatever a job leaves becomes a child of this process and is found below it."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def read(path: pathlib.Path) -> str:
    """Text of a file of /proc, "" if its process has gone."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    return [int(child) for thread in threads_of(pid) for child in read(thread / "children").split()]


def state_of(process: pathlib.Path) -> str:
    """Letter of proc(5) for a folder of /proc, X if it has gone."""
    fields = read(process / "stat").rpartition(")")[2].split()
    return fields[0] if fields else "X"


def threads_of(pid: int) -> list[pathlib.Path]:
    try:
        return list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


def all_threads_ended(pid: int) -> bool:
    """Whether all its threads have: a process whose main thread has ended is a zombie that holds what it held."""
    return all(state_of(thread) in "ZX" for thread in threads_of(pid))


def living_descendants() -> set[int]:
    """Collects orphans that have ended, too: nobody else does."""
    living: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        parent = waiting.pop()
        for child in children_of(parent):
            if all_threads_ended(child):
                if parent == os.getpid():
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(child, os.WNOHANG)
            elif child not in living and child not in STRANGERS:
                living.add(child)
                waiting.append(child)
    return living


def kill_descendants() -> None:
    for pid in living_descendants():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended while this one looked


def found_in(pid: int, look: Callable[[pathlib.Path], Found]) -> Found:
    """What `look` finds in the folder of a process. Where its main thread has ended, that shows nothing, and the folder
    of another thread shows what they share."""
    found = look(PROC / str(pid))
    for thread in [] if found else threads_of(pid):
        found = look(thread)
        if found:
            break
    return found


def targets(pid: int) -> set[str]:
    """What the descriptors of a process lead to."""

    def look(holder: pathlib.Path) -> set[str]:
        found = set()
        with contextlib.suppress(OSError):
            for link in (holder / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(link))
        return found

    return found_in(pid, look)


def named_sockets() -> dict[str, str]:
    """Names of Zeroth's abstract sockets of this user, by "socket:[inode]"."""
    found = {}
    for line in read(PROC / "net" / "unix").splitlines():
        fields = line.split()
        if len(fields) > 7 and fields[7].startswith("@zeroth-") and f"-{os.getuid()}-" in fields[7]:
            found[f"socket:[{fields[6]}]"] = fields[7]
    return found


def name_of(line: str) -> str:
    """ " (its program)" for the line of a process. Not in the line itself: a process that stays may have become another
    program."""
    words = line.split()
    return f" ({read(PROC / words[1] / 'comm').strip()})" if words[0] == "process" else ""


def memory_files() -> set[str]:
    return {f"file {path}" for path in pathlib.Path("/dev/shm").glob("*zeroth*")}


def what_stays(look: Callable[[], set[Seen]], patience_s: float = PATIENCE_S) -> set[Seen]:
    """What look() sees each time until the end of the patience. What is seen once was on its way out, or in."""
    end = time.monotonic() + patience_s
    staying, looks, pause_s = look(), 1, 0.01
    while staying and (time.monotonic() < end or looks < LOOKS):
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, 0.1)
        staying &= look()
        looks += 1
    return staying


class LeftBehind:
    """Compares with what was there at its construction. `folder` is the TMPDIR that the job is given."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.sockets_before = set(named_sockets())
        self.files_before = memory_files()

    def look(self) -> set[str]:
        family = living_descendants()
        lines = set()
        for pid in family:
            lines.add(f"process {pid}")
            if "/memfd:zeroth" in found_in(pid, lambda holder: read(holder / "maps")):
                lines.add(f"process {pid} maps shared memory")
        sockets = {inode: name for inode, name in named_sockets().items() if inode not in self.sockets_before}
        if sockets:
            strangers = {int(path.name) for path in PROC.iterdir() if path.name.isdigit()} - family - {os.getpid()}
            for pid in sorted(strangers, reverse=True):  # jobs beside this one are younger than the system
                for inode in targets(pid) & sockets.keys():
                    del sockets[inode]
                if not sockets:
                    break
            lines |= {f"socket {name} {inode}" for inode, name in sockets.items()}
        lines |= {f"file {path}" for path in self.folder.rglob("*")}
        return lines | (memory_files() - self.files_before)

    def text(self, patience_s: float = PATIENCE_S) -> str:
        """One line for each thing that stays, "" if nothing does."""
        staying = what_stays(self.look, patience_s)
        return "\n".join(line + name_of(line) for line in sorted(staying))


def run(command: Sequence[str]) -> int:
    """Its exit code as a shell has it, 1 if it leaves something."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="zeroth-test-", ignore_cleanup_errors=True) as folder:
        temporary = pathlib.Path(folder, "tmp")
        temporary.mkdir()
        left = LeftBehind(temporary)
        environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
        }  # what torch keeps is no leaving
        try:
            code = subprocess.Popen(
                command, env=environment, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            ).wait()
            text = left.text()
        finally:
            kill_descendants()
    if text:
        print(f"{FAILED}\n{text}", flush=True)
        return 1
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
