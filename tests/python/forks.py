"""Many jobs in one: each rank that zeroth-run has started forks a child for every case, and these are the ranks of a
job of their own. So a case may end its rank, or leave its world in pieces, and none waits for another import of
torch."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping

LIMIT_S = 30.0
"""of a case, on one rank"""


def run(cases: Mapping[str, Callable[[int], None]]) -> None:
    """Calls each case with the rank, in its child. Exits with 1 if one raised or hung. Nothing may have been trained
    before: torch's threads are not there in a child."""
    rank, job = int(os.environ["RANK"]), os.environ["ZEROTH_JOB_ID"]
    bad = []
    for name, case in cases.items():
        child = os.fork()
        if child == 0:
            os.environ["ZEROTH_JOB_ID"] = f"{job}.{name.replace(' ', '_')}"
            _be_a_rank(case, rank)
        status = _end_of(child)
        if status != 0:
            bad.append(name)
            print(f"{name}: {'goes on for ever' if status is None else f'ended with {status}'}", flush=True)
    if bad:
        sys.exit(1)


def _be_a_rank(case: Callable[[int], None], rank: int) -> None:
    code = 1
    try:
        case(rank)
        code = 0
    except BaseException:  # what a case lets out is a failure, KeyboardInterrupt too
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_of(child: int) -> int | None:
    """Exit code, negative for a signal; None: had to be killed."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid != 0:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
