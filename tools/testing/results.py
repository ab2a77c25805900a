"""Counts test cases from what suites have left: XML files of GoogleTest, exit codes and last words of scripts."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import xml.etree.ElementTree as xml

from testing.schedule import Run
from testing.suites import sanitizer_of

MOST_EXIT_CODE = 127
"""A shell reports what a signal has ended with a larger one."""


@dataclasses.dataclass(slots=True)
class Count:
    """Test cases: how many passed, which failed and why, which were skipped and why."""

    passed: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    whole: bool = True
    """False where something failed that no case accounts for"""

    def add(self, other: Count) -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


def known_reasons(path: pathlib.Path) -> list[str]:
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def _count_gtest(run: Run) -> Count:
    count = Count()
    assert run.result_file is not None
    try:
        cases = list(xml.parse(run.result_file).iter("testcase"))
    except (OSError, xml.ParseError):
        count.failed.append(f"{run.name}: ended without a result file (crash, time-out or early exit)")
        count.whole = False
        return count
    for case in cases:
        full_name = f"{run.name}: {case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            count.failed.append(full_name)
        elif skipped is not None:
            # The message is "file:line", a newline, the text of GTEST_SKIP().
            count.skipped.append((full_name, (skipped.get("message") or "").split("\n", 1)[-1].strip()))
        elif case.get("status") == "notrun":
            count.skipped.append((full_name, "disabled"))
        else:
            count.passed += 1
    if run.code != 0 and not count.failed:
        count.failed.append(
            f"{run.name}: every case passed, but the process ended with an error (leak, sanitizer, exit)"
        )
        count.whole = False
    return count


def _count_script(run: Run) -> Count:
    if run.code == 0:
        return Count(passed=1)
    if run.suite.skip_code is not None and run.code == run.suite.skip_code:
        reason = re.search(r"^SKIPPED: (.*)$", run.output, re.MULTILINE)
        return Count(skipped=[(run.name, reason.group(1).strip() if reason else "no line SKIPPED: reason")])
    return Count(failed=[f"{run.name}: {run.ending}"])


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A run and its cases, counted before another run of the suite writes its result file anew."""

    run: Run
    count: Count

    @staticmethod
    def of(run: Run) -> Outcome:
        return Outcome(run, _count_script(run) if run.result_file is None else _count_gtest(run))

    def may_be_chance(self) -> bool:
        """Whether a second run is fair: cases failed, a script says that it did, or its time was over.

        Not in a build with a sanitizer, whose findings a second run may miss; and not after a crash, nor where no case
        accounts for the failure: no results, an error after all cases had passed, nothing that could be started.
        """
        if not self.count.failed or sanitizer_of(self.run.suite.build):
            return False
        crashed = self.run.code < 0 or self.run.code > MOST_EXIT_CODE
        return self.run.late or (self.count.whole and not crashed)

    def passed_after(self, first: Outcome) -> bool:
        """Whether this run has no failure, and does not leave out what failed in the first."""
        left_out = {name for name, _ in self.count.skipped} & set(first.count.failed)
        return self.run.code == 0 and self.count.passed > 0 and not self.count.failed and not left_out


def count_outcomes(outcomes: list[Outcome]) -> Count:
    """Also a failure: a suite that ran whole and holds no case."""
    total = Count()
    cases: dict[tuple[pathlib.Path, str], int] = {}
    shards: dict[tuple[pathlib.Path, str], int] = {}
    for outcome in outcomes:
        run, count = outcome.run, outcome.count
        key = (run.suite.build, run.suite.name)
        cases[key] = cases.get(key, 0) + count.passed + len(count.failed) + len(count.skipped)
        shards[key] = shards.get(key, run.piece.shards) - 1
        total.add(count)
    for (build, name), number in cases.items():
        if number == 0 and shards[build, name] == 0:
            total.failed.append(f"{build.name}/{name}: holds no test case")
    return total
