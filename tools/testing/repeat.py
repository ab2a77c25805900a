"""Runs suites many times beside other load, to find the tests whose end depends on the machine."""

from __future__ import annotations

import collections
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

from testing import results
from testing.schedule import Run

SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
"""ends with the process that started it, however that ends"""


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes compute all the time."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def repeated(times: int, run_all: Callable[[], list[Run]]) -> tuple[results.Count, list[str]]:
    """The cases of all rounds, and one line for each suite that failed: no second run pardons a failure here."""
    total = results.Count()
    failures: collections.Counter[str] = collections.Counter()
    for number in range(1, times + 1):
        print(f"\nround {number} of {times}", flush=True)
        outcomes = [results.Outcome.of(run) for run in run_all()]
        failures.update(outcome.run.name for outcome in outcomes if outcome.count.failed)
        total.add(results.count_outcomes(outcomes))
    return total, [f"failed {count} of {times} times: {name}" for name, count in failures.most_common()]
