"""Starts the ranks of a job, watches them, and says why they failed. Plain Python 3."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from cells import Cell
from places import Places
from processes import children, pss

HERE = pathlib.Path(__file__).resolve().parent
SAMPLE_SECONDS = 0.02
SAMPLE_SHARE = 0.2
"""of a core at most: a look at a large process takes long, and the ranks need the cores"""
STALL_SECONDS = 600.0


class Failed(Exception):
    """A job ended without its result."""


@dataclasses.dataclass
class Ended:
    started: float
    """on the clock that all processes of a machine share"""
    peak_pss: int
    """highest sum over the ranks; 0 if it was not asked for"""
    late_failure: str
    """what went wrong after all results were written, if anything"""


def command(places: Places, cell: Cell, program: str, words: list[str]) -> list[str]:
    return [str(places.python), str(HERE / program), "--cell", cell.to_json(), *words]


def launched(places: Places, cell: Cell, program: str, words: list[str]) -> list[list[str]]:
    """By zeroth-run, whatever the contestant: torchrun and DeepSpeed's launcher import torch first."""
    return [[str(places.launcher), "-q", "--no-prefix", "-n", str(cell.ranks), *command(places, cell, program, words)]]


def bare(places: Places, cell: Cell, program: str, words: list[str]) -> list[list[str]]:
    return [command(places, cell, program, words)] * cell.ranks


def run(
    commands: list[list[str]], places: Places, folder: pathlib.Path, results: list[str], *, sample: bool = False
) -> Ended:
    """Starts one process for each command, as RANK 0, 1, ... (a launcher overrides that), and waits until all have
    ended. Raises Failed if one of `results` is not in `folder` then, or when there was no progress for
    STALL_SECONDS."""
    log = folder / "log"
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as output, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_started(words, places.environment() | {"RANK": str(rank)}, output))
            for rank, words in enumerate(commands)
        ]
        peak = _watch(processes, folder, sample)
    code = max((process.returncode for process in processes), key=abs)
    failure = reason(log.read_text(encoding="utf-8", errors="replace"), code) if code else ""
    missing = [name for name in results if not (folder / name).is_file()]
    if missing:
        raise Failed(failure or f"{missing[0]} was not written")
    return Ended(started=started, peak_pss=peak, late_failure=failure)


@contextlib.contextmanager
def _started(words: list[str], environment: dict[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # zeroth-run's ranks end with it
            process.wait()


def _watch(processes: list[subprocess.Popen[bytes]], folder: pathlib.Path, sample: bool) -> int:
    progress = folder / "progress"
    peak, lines, last = 0, 0, time.monotonic()
    while any(process.poll() is None for process in processes):
        looked = 0.0
        if sample:
            begin = time.monotonic()
            ranks = [pid for process in processes for pid in children(process.pid)]
            peak = max(peak, sum(map(pss, ranks)))
            looked = time.monotonic() - begin
        said = progress.read_text(encoding="utf-8").splitlines() if progress.is_file() else []
        for line in said[lines:]:
            print(f"  {line}", file=sys.stderr, flush=True)
            last = time.monotonic()
        lines = len(said)
        if time.monotonic() - last > STALL_SECONDS:
            raise Failed(f"no progress for {STALL_SECONDS:.0f} s")
        time.sleep(max(SAMPLE_SECONDS, looked * (1 / SAMPLE_SHARE - 1)) if sample else 0.1)
    return peak


def at_work(folder: pathlib.Path) -> str | None:
    """The contestant that a failed job of job.py was busy with."""
    progress = folder / "progress"
    lines = progress.read_text(encoding="utf-8").split("\n") if progress.is_file() else []
    named = [line.split()[-1] for line in lines if line]
    return named[-1] if named else None


def reason(log: str, code: int) -> str:
    """One line: the first error that a rank raised, else the last line. Without this machine's folders."""
    torch_prefix = re.compile(r"^\[rank\d+\]: ")  # of tracebacks, once there is a process group
    lines = [torch_prefix.sub("", line).strip() for line in log.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    text = (raised or lines[-1:] or ["no output"])[0]
    return f"exit code {code}: " + re.sub(r"(?<![\w.])/\S*/", "", text)[:300]
