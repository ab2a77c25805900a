"""Runs of zeroth-run beside each other, as on several hosts; what is left of them is known and ended."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "support"))
import left_behind  # noqa: E402

RUN = os.environ["ZEROTH_RUN"]
PROBE = os.environ["ZEROTH_PROBE"]
"""paths of zeroth-run and rank_probe, from CMake"""
PATIENCE_S = 30.0
SECRET = "a secret of enough bytes"


class Run:
    """One zeroth-run with its output in files."""

    def __init__(self, folder: pathlib.Path, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.files = {stream: folder / f"{name}.{stream}" for stream in ("out", "err")}
        with open(self.files["out"], "wb") as out, open(self.files["err"], "wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **environment},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def text(self, stream: str) -> str:
        return self.files[stream].read_text(errors="replace")

    @property
    def out(self) -> str:
        return self.text("out")

    @property
    def err(self) -> str:
        return self.text("err")

    def wait_for(self, text: str, count: int = 1, stream: str = "out", limit_s: float = PATIENCE_S) -> None:
        end = time.monotonic() + limit_s
        while self.text(stream).count(text) < count:
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{text!r} did not come {count} times\n{self.out}{self.err}")
            time.sleep(0.01)

    def pids(self, word: str, count: int) -> dict[int, int]:
        """rank -> number of the lines "[rank] <word> <rank> <number>"."""
        self.wait_for(word, count)
        fields = [line.split() for line in self.out.splitlines()]
        return {int(line[2]): int(line[3]) for line in fields if len(line) == 4 and line[1] == word}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def code(self, limit_s: float = PATIENCE_S) -> int:
        """128 + signal as a shell has it."""
        code = self.process.wait(limit_s)
        return 128 - code if code < 0 else code


class Stage:
    """`with Stage() as stage:` what still lives at its end is killed."""

    def __enter__(self) -> Stage:
        left_behind.adopt_orphans()
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.temporary.name)
        self.folder_of_runs = tempfile.TemporaryDirectory()
        self.behind = left_behind.LeftBehind(pathlib.Path(self.folder_of_runs.name))
        self.runs = 0
        return self

    def __exit__(self, *_: object) -> None:
        left_behind.kill_descendants()
        self.left()
        self.temporary.cleanup()
        self.folder_of_runs.cleanup()

    def run(self, *arguments: str, prefix: Sequence[str] = (), **environment: str) -> Run:
        self.runs += 1
        return Run(self.folder, str(self.runs), [*prefix, RUN, "-q", *arguments], {**self.environment, **environment})

    @property
    def environment(self) -> dict[str, str]:
        """For runs of this stage: what they leave is found."""
        return {"TMPDIR": self.folder_of_runs.name}

    def left(self, limit_s: float = 5.0) -> str:
        """Processes, shared memory, sockets and files of any run that do not go away, "" if there are none."""
        return self.behind.text(limit_s)
