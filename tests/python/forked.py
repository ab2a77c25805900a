"""A Python that has imported torch already: python() is a command like sys.executable, for processes of a test's jobs.

    launcher ── python_that_is_there.py          a small process: what the launcher sees, signals and waits for
                     :  arguments, variables, descriptors, namespaces, exit code
    test ── server ── leader ── the process      forked from the server, which has imported torch and has run nothing

Importing torch takes 1.6 s of processor time, a fork 0.02 s. Below the program's frames is nothing but the interpreter,
as in a process of its own: uncaught exceptions, hooks and exit codes are what they are there. Zeroth is not imported
before the fork: it reads its own variables. What differs: the parent is the leader, not the launcher; SIGSTOP to the
small process does not reach the other one. A test of that takes sys.executable.

[Note: Exit of a forked process] Static destructors of LibTorch and the dictionaries of torch's modules take 0.3 s of
processor time, for nothing. So the process leaves torch's modules alone when the interpreter ends, and calls _exit()
with the interpreter's exit code before the destructors that were there when it was forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import NoReturn

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
import left_behind  # noqa: E402

PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "torch.utils.checkpoint", "safetensors.torch")
VARIABLE = "ZEROTH_TEST_FORKED"
"""names the socket of a server that another test has started, for suites that it runs"""
LEFT = "A PROCESS HAS LEFT"
"""begins the line for what a process leaves below it when its group has been ended; job.py looks for it"""
NAMESPACES = ("net", "uts", "mnt")


# --- the test's side --------------------------------------------------------------------------------------------------


class Server:
    """It ends with this process."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.folder = tempfile.mkdtemp(prefix="forked-")
        self.path = f"{self.folder}/socket"
        self.alive, theirs = socket.socketpair()
        with theirs, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.path)
            listening.listen(128)
            descriptors = [theirs.fileno(), listening.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "forked.py"), *map(str, descriptors), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        left_behind.STRANGERS.add(self.process.pid)
        atexit.register(self.close)

    def close(self) -> None:
        self.alive.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


_servers: list[Server] = []
_more: list[str] = []


def preload(*modules: str) -> None:
    """Before python(): what else its processes shall not import each for itself."""
    assert not _servers
    _more.extend(modules)


def python() -> list[str]:
    """In the place of [sys.executable]. What follows is a path or "-c" and a text, and arguments."""
    if VARIABLE not in os.environ and not _servers:
        _servers.append(Server([*PRELOADED, *_more]))
    path = os.environ.get(VARIABLE) or _servers[0].path
    return [sys.executable, "-I", "-S", str(HERE / "python_that_is_there.py"), path]


def program() -> str:
    """The same as one file, for who takes no more."""
    path = pathlib.Path(python()[-1]).with_name("python")
    if not path.exists():
        path.write_text(f'#!/bin/sh\nexec {shlex.join(python())} "$@"\n')
        path.chmod(0o755)
    return str(path)


# --- the server's side ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Process:
    """What a forked process is to become: what python_that_is_there.py says of itself."""

    pid: int
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    descriptors: list[int]

    def become(self) -> None:
        os.setpgid(0, 0)
        left_behind.prctl(left_behind.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.sched_setaffinity(0, self.cores)
        for name in NAMESPACES:
            theirs = f"/proc/{self.pid}/ns/{name}"
            if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{name}"):
                _enter(theirs)
        for number, descriptor in enumerate(self.descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        tempfile.tempdir = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path[:] = [path for path in _search_path(self.environment) if path]

    def play(self) -> None:
        """In the place of the interpreter's main module."""
        if self.arguments[0] == "-c":
            sys.argv = ["-c", *self.arguments[2:]]
            sys.path.insert(0, "")
            module = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            exec(compile(self.arguments[1], "<string>", "exec"), vars(module))
        else:
            sys.argv = list(self.arguments)
            sys.path.insert(0, str(pathlib.Path(sys.argv[0]).resolve().parent))
            runpy.run_path(sys.argv[0], run_name="__main__")


def _search_path(environment: dict[str, str]) -> list[str]:
    """With the PYTHONPATH of the process in the place of the server's."""
    ours = {*PYTHONPATH.split(":"), str(HERE), str(HERE.parent / "support")}
    return [*environment.get("PYTHONPATH", "").split(":"), *(path for path in sys.path if path not in ours)]


def _enter(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    if left_behind.LIBC.setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns {path}")
    os.close(descriptor)


def _serve(alive: socket.socket, listening: socket.socket) -> Process | None:
    """None when the test has ended; in a process that was forked, what that has to become."""
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.register(listening, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        ended = alive.fileno() in ready
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0 if ended else os.WNOHANG)[0] != 0:
                pass  # so that what they have taken is part of what the test has taken
        if ended:
            return None
        connection, _ = listening.accept()
        if os.fork() == 0:
            alive.close()
            listening.close()
            return _lead(connection)
        connection.close()


def _lead(connection: socket.socket) -> Process:
    """Starts the process and waits for it. Returns in the process alone."""
    left_behind.prctl(left_behind.PR_SET_PDEATHSIG, signal.SIGKILL)
    left_behind.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while message and not message.endswith(b"\n"):
        part = connection.recv(1 << 16)
        message = message + part if part else b""
    if not message:
        os._exit(1)
    process = Process(**json.loads(message), descriptors=descriptors)
    pid = os.fork()
    if pid == 0:
        connection.close()
        process.become()
        return process
    for descriptor in descriptors[:2]:
        os.close(descriptor)
    ending = os.pidfd_open(pid)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(f"{pid}\n".encode())
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(ending, select.POLLIN)
        if ending not in {descriptor for descriptor, _ in poll.poll()}:  # the launcher has killed the small process
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if left := _left():
            os.write(descriptors[2], f"{LEFT} {left}\n".encode())
        os.close(descriptors[2])
        connection.sendall(f"{status}\n".encode())
    left_behind.kill_descendants()
    os._exit(0)


def _left() -> str:
    """What stays below this process, " ".join of it."""
    staying = left_behind.what_stays(left_behind.living_descendants)
    return " ".join(f"process {pid}{left_behind.name_of(f'process {pid}')}" for pid in sorted(staying))


LIBC = ctypes.CDLL(None)
PYTHONPATH = os.environ.get("PYTHONPATH", "")


def _leave_alone(modules: list[str]) -> None:
    """[Note: Exit of a forked process]"""
    keep = ctypes.pythonapi.Py_IncRef
    keep.argtypes = [ctypes.py_object]
    for name in modules:
        module = sys.modules.pop(name, None)
        if module is not None:
            keep(module)


def _end_well(code: int) -> NoReturn:
    """As the interpreter ends: with the end of the program's objects, and without that of everything else, which would
    be taken down only to be gone a moment later."""
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if sys.modules["__main__"] is not _server_module:
        vars(sys.modules["__main__"]).clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.PyDLL(None).exit(code)  # what has been loaded since the fork is told, as MPI; a destructor may need the GIL
    os._exit(code)


def _import(names: list[str]) -> list[str]:
    """Modules that are no part of Python, and that are there after these have been imported."""
    for name in names:
        importlib.import_module(name)
    assert "zeroth" not in sys.modules
    return [name for name in sys.modules if name.partition(".")[0] not in {*sys.stdlib_module_names, "__main__"}]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("forked.py is for tests")
    _loaded: list[str] = []
    atexit.register(lambda: _leave_alone(_loaded))  # the first: so it is called last
    _loaded += _import(sys.argv[3:])
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit("an import has started a thread, which a forked process would miss")
    gc.collect()
    gc.freeze()
    _process = _serve(*(socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3]))
    if _process is None:
        os._exit(0)
    LIBC.on_exit(ctypes.cast(LIBC._exit, ctypes.c_void_p), None)
    LIBC.__cxa_atexit(ctypes.cast(LIBC.fflush, ctypes.c_void_p), None, None)
    _server_module, _code = sys.modules["__main__"], 0
    try:
        _process.play()
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        _code = error.code or 0
    _end_well(_code)  # where no traceback holds the program's frames any more
