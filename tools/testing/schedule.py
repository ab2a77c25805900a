"""Runs suites on the cores of this machine: busy ones a core each, then those that sleep side by side.

Suites that wait for deadlines come last and never run beside busy ones, because they promise an end within seconds.
Each is split into shards of GoogleTest, so that its sleeps overlap.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

from testing.suites import Suite, sanitizer_of

QUIET_WIDTH = 10
"""shards of waiting suites side by side"""
SHARD_S = 10.0
"""elapsed seconds that a shard of a waiting suite should take"""
MOST_OUTPUT = 60_000
"""characters of a failed suite's output that are shown"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A suite, or a shard of it."""

    suite: Suite
    shard: int = 0
    shards: int = 1

    @property
    def cost(self) -> float:
        """declared core-seconds"""
        return self.suite.cost / self.shards

    @property
    def name(self) -> str:
        whole = f"{self.suite.build.name}/{self.suite.name}"
        return whole if self.shards == 1 else f"{whole} {self.shard + 1}/{self.shards}"

    @property
    def result_file(self) -> pathlib.Path | None:
        file = self.suite.result_file
        if file is None or self.shards == 1:
            return file
        return file.with_name(f"{file.stem}-{self.shard + 1}-of-{self.shards}.xml")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a piece ended. `code` is its exit code, negative for a signal; `ending` says it in words."""

    piece: Piece
    code: int
    ending: str
    late: bool = False
    """it was killed because its time was over"""
    cpu_s: float
    """of all processes that it has waited for"""
    elapsed_s: float
    output: str

    @property
    def suite(self) -> Suite:
        return self.piece.suite

    @property
    def name(self) -> str:
        return self.piece.name

    @property
    def result_file(self) -> pathlib.Path | None:
        return self.piece.result_file


def _without_address_randomisation(build: pathlib.Path) -> list[str]:
    """The thread sanitizer of g++ 12 cannot start where the kernel randomises addresses by 32 bits."""
    if sanitizer_of(build) != "thread":
        return []
    try:
        usable = subprocess.run(["setarch", "-R", "true"], check=False, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        usable = False
    return ["setarch", "-R"] if usable else []


class _Processes:
    """Those that run now, so that an interrupt ends them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ids: set[int] = set()
        self.stopped = False

    def kill(self) -> None:
        with self.lock:
            self.stopped = True
            for process_id in self.ids:
                os.killpg(process_id, signal.SIGKILL)

    def start(self, command: list[str], environment: Mapping[str, str], output: int) -> int:
        """In a session of its own; the id of its leader."""
        with self.lock:
            if self.stopped:
                raise InterruptedError
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            process.returncode = 0  # wait() below takes its end, not subprocess
            self.ids.add(process.pid)
            return process.pid

    def wait(self, process_id: int) -> tuple[int, float]:
        """Exit code and processor seconds."""
        os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)
        with self.lock:  # from here on the id may be another's
            self.ids.discard(process_id)
            _, status, usage = os.wait4(process_id, 0)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _run(piece: Piece, prefix: list[str], processes: _Processes) -> Run:
    suite, file = piece.suite, piece.result_file
    if not suite.command:
        return Run(piece=piece, code=-1, ending="was not run: nothing is built", cpu_s=0, elapsed_s=0, output="")
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
    environment = {"UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "second_deadlock_stack=1"}
    environment |= dict(os.environ) | suite.environment
    if piece.shards > 1:
        environment |= {"GTEST_TOTAL_SHARDS": str(piece.shards), "GTEST_SHARD_INDEX": str(piece.shard)}
    output_of_gtest = f"--gtest_output=xml:{suite.result_file}"
    command = [f"--gtest_output=xml:{file}" if word == output_of_gtest else word for word in suite.command]
    with tempfile.TemporaryFile() as output:
        began = time.monotonic()
        try:
            process_id = processes.start(prefix + command, environment, output.fileno())
        except OSError as error:
            return Run(piece=piece, code=-1, ending=f"was not run: {error}", cpu_s=0, elapsed_s=0, output="")
        late = threading.Event()

        def end() -> None:
            late.set()
            with processes.lock:
                if process_id in processes.ids:
                    os.killpg(process_id, signal.SIGKILL)

        timer = threading.Timer(suite.timeout_s, end)
        timer.start()
        code, cpu_s = processes.wait(process_id)
        timer.cancel()
        elapsed_s = time.monotonic() - began
        output.seek(0)
        text = output.read().decode(errors="replace")
    ending = f"exit code {code}" if code >= 0 else f"signal {-code}"
    if late.is_set():
        ending = f"time-out after {suite.timeout_s:.0f} s"
        code = code or -1
    return Run(piece=piece, code=code, ending=ending, late=late.is_set(), cpu_s=cpu_s, elapsed_s=elapsed_s, output=text)


def pieces_of(suites: list[Suite], expected_s: Callable[[Suite], float]) -> list[Piece]:
    """Waiting suites of GoogleTest in shards, all others whole."""
    pieces = []
    for suite in suites:
        shards = 1
        if suite.waits and suite.result_file and not suite.alone:
            shards = min(QUIET_WIDTH, max(1, round(expected_s(suite) / SHARD_S)))
        pieces += [Piece(suite=suite, shard=shard, shards=shards) for shard in range(shards)]
    return pieces


def run_pieces(
    pieces: list[Piece], cores: int, expected_s: Callable[[Suite], float], report: Callable[[Run], None]
) -> list[Run]:
    """All of them, the longest first; `report` hears of each end."""
    prefixes = {build: _without_address_randomisation(build) for build in {piece.suite.build for piece in pieces}}

    def slots(piece: Piece) -> int:
        return cores if piece.suite.alone else min(cores, piece.suite.cores)

    def length(piece: Piece) -> float:
        return expected_s(piece.suite) / piece.shards

    busy = sorted((p for p in pieces if not p.suite.waits), key=lambda p: (-slots(p), -length(p), p.name))
    quiet = sorted((p for p in pieces if p.suite.waits), key=lambda p: (-length(p), p.name))
    processes = _Processes()
    runs: list[Run] = []

    def run_all(waiting: list[Piece], width: int, wide: Callable[[Piece], int]) -> None:
        queue, free = collections.deque(waiting), width
        running: dict[concurrent.futures.Future[Run], int] = {}
        with concurrent.futures.ThreadPoolExecutor(max_workers=width) as pool:
            try:
                while queue or running:
                    while queue and wide(queue[0]) <= free:
                        piece = queue.popleft()
                        free -= wide(piece)
                        running[pool.submit(_run, piece, prefixes[piece.suite.build], processes)] = wide(piece)
                    done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                    for future in done:
                        free += running.pop(future)
                        runs.append(future.result())
                        report(runs[-1])
            except BaseException:
                processes.kill()
                raise

    run_all(busy, cores, slots)
    run_all(quiet, QUIET_WIDTH, lambda piece: 1)
    return runs


def run_alone(pieces: list[Piece], report: Callable[[Run], None]) -> list[Run]:
    """All of them, one after the other, nothing beside it."""
    processes = _Processes()
    runs: list[Run] = []
    try:
        for piece in pieces:
            runs.append(_run(piece, _without_address_randomisation(piece.suite.build), processes))
            report(runs[-1])
    except BaseException:
        processes.kill()
        raise
    return runs
