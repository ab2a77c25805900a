"""Counts test cases from what suites have left: XML files of GoogleTest, exit codes and last words of scripts."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import xml.etree.ElementTree as xml

from testing.schedule import Run


@dataclasses.dataclass(slots=True)
class Count:
    """Test cases: how many passed, which failed and why, which were skipped and why."""

    passed: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)

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
    return count


def _count_script(run: Run) -> Count:
    if run.code == 0:
        return Count(passed=1)
    if run.suite.skip_code is not None and run.code == run.suite.skip_code:
        reason = re.search(r"^SKIPPED: (.*)$", run.output, re.MULTILINE)
        return Count(skipped=[(run.name, reason.group(1).strip() if reason else "no line SKIPPED: reason")])
    return Count(failed=[f"{run.name}: {run.ending}"])


def count_runs(runs: list[Run]) -> Count:
    """Also a failure: a suite that ran whole and holds no case."""
    total = Count()
    cases: dict[tuple[pathlib.Path, str], int] = {}
    shards: dict[tuple[pathlib.Path, str], int] = {}
    for run in runs:
        count = _count_script(run) if run.result_file is None else _count_gtest(run)
        key = (run.suite.build, run.suite.name)
        cases[key] = cases.get(key, 0) + count.passed + len(count.failed) + len(count.skipped)
        shards[key] = shards.get(key, run.piece.shards) - 1
        total.add(count)
    for (build, name), number in cases.items():
        if number == 0 and shards[build, name] == 0:
            total.failed.append(f"{build.name}/{name}: holds no test case")
    return total
