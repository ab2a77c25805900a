"""What suites may cost, what they declare, and what they were measured to cost.

tests/budget.json holds the limits in core-seconds; a suite declares its cost in CMake (COST, LONG). The declared sums
are held within the limits without running anything, so the check is the same on every machine. Measured costs are
reported, never held; tests/measured.json keeps them (tools/run-tests --record), to start the longest suite first.
"""

from __future__ import annotations

import collections
import datetime
import json
import pathlib
import platform
import re
import typing

from testing.schedule import Run
from testing.suites import TIERS, Suite, sanitizer_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMITS = ROOT / "tests" / "budget.json"
MEASURED = ROOT / "tests" / "measured.json"
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- suites -->", "<!-- end of suites -->"


class Budget:
    def __init__(self, limits: pathlib.Path = LIMITS, measured: pathlib.Path = MEASURED) -> None:
        self.limits: dict[str, typing.Any] = json.loads(limits.read_text())
        self.measured_file = measured
        self.measured: dict[str, typing.Any] = json.loads(measured.read_text()) if measured.exists() else {"builds": {}}

    def expected_s(self, suite: Suite) -> float:
        """Elapsed seconds, from the last record, else from the declaration."""
        row = self.measured["builds"].get(suite.build.name, {}).get(suite.name)
        return float(row[1]) if row else float(suite.cost)

    def overdrawn(self, suites: list[Suite]) -> list[str]:
        """Of each build of `suites`, the declared sums that are above a limit. Suites of the long tier have none."""
        problems = []
        for build in sorted({suite.build for suite in suites}):
            counted = [suite for suite in suites if suite.build == build and suite.tier != "long"]
            by_room: collections.Counter[str] = collections.Counter()
            for suite in counted:
                by_room[suite.room] += suite.cost
            if sanitizer_of(build):
                problems += self._above(f"the suites of {build.name}", by_room.total(), self.limits["slice"])
                continue
            quick = sum(suite.cost for suite in counted if suite.tier == "quick")
            problems += self._above("the tier quick", quick, self.limits["quick"])
            problems += self._above("make test", by_room.total(), self.limits["test"])
            for room, cost in sorted(by_room.items()):
                problems += self._above(f"the room {room}", cost, self.limits["rooms"].get(room, 0))
        return problems

    @staticmethod
    def _above(who: str, declared: int, limit: int) -> list[str]:
        if declared <= limit:
            return []
        return [f"budget: {who}: {declared} core-seconds are declared, {limit} are allowed (tests/budget.json)"]

    def record(self, runs: list[Run]) -> None:
        """Writes processor and elapsed seconds of each suite, one line each."""
        costs: dict[tuple[str, str], list[float]] = {}
        for run in runs:
            cpu_s, elapsed_s = costs.get((run.suite.build.name, run.suite.name), [0.0, 0.0])
            costs[run.suite.build.name, run.suite.name] = [cpu_s + run.cpu_s, elapsed_s + run.elapsed_s]
        for (build, name), row in costs.items():
            self.measured["builds"].setdefault(build, {})[name] = [round(value, 1) for value in row]
        lines = [f'"date": "{datetime.date.today()}"', f'"processor": "{_processor()}"']
        builds = []
        for build, rows in sorted(self.measured["builds"].items()):
            body = ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in sorted(rows.items()))
            builds.append(f' "{build}": {{\n{body}\n }}')
        text = ",\n".join([*lines, '"builds": {\n' + ",\n".join(builds) + "\n}"])
        self.measured_file.write_text("{\n" + text + "\n}\n")


def _processor() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def dearest(runs: list[Run]) -> list[str]:
    """Lines for a reader: the ten suites of the most processor time, and those beyond twice their declaration."""
    suites = {(run.suite.build, run.suite.name): run.suite for run in runs}
    totals: dict[tuple[pathlib.Path, str], float] = dict.fromkeys(suites, 0.0)
    for run in runs:
        totals[run.suite.build, run.suite.name] += run.cpu_s
    order = sorted(totals.items(), key=lambda item: -item[1])
    lines = [f"{sum(totals.values()):.0f} core-seconds in all; the dearest:"]
    row = "  {:7.1f} core-seconds, {:4} declared  {}/{}"
    for key, cost in order[:10]:
        lines.append(row.format(cost, suites[key].cost, key[0].name, key[1]))
    beyond = [key for key, cost in order if cost > 2 * suites[key].cost + 1]
    if beyond:
        lines.append("beyond twice their declaration (COST in CMake):")
        lines += [row.format(totals[key], suites[key].cost, key[0].name, key[1]) for key in beyond]
    return lines


def table(suites: list[Suite]) -> str:
    """Markdown: of each room its suites in each tier, with their declared core-seconds."""
    rooms = sorted({suite.room for suite in suites})
    lines = ["| room | " + " | ".join(TIERS) + " |", "|---|---|---|---|"]
    for room in rooms:
        cells = []
        for tier in TIERS:
            found = [suite for suite in suites if suite.room == room and suite.tier == tier]
            total = f"**{sum(suite.cost for suite in found)}**: " if found else ""
            cells.append(total + ", ".join(f"`{suite.name}` {suite.cost}" for suite in found))
        lines.append(f"| {room} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page_problems(suites: list[Suite]) -> list[str]:
    """Suites that the table of docs/testing.md does not have, or in another place. It may have more: a machine may lack
    what they need."""
    text = PAGE.read_text()
    if BEGIN not in text or END not in text:
        return [f"{PAGE.name} has no {BEGIN} ... {END}"]
    found = set()
    for line in text.split(BEGIN)[1].split(END)[0].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        for tier, cell in zip(TIERS, cells[2:5], strict=False):
            found |= {(cells[1], tier, name, cost) for name, cost in re.findall(r"`(\w+)` (\d+)", cell)}
    return [
        f"{PAGE.name}: {suite.name} (room {suite.room}, tier {suite.tier}, cost {suite.cost}) is not in the table"
        for suite in suites
        if (suite.room, suite.tier, suite.name, str(suite.cost)) not in found
    ]


def write_page(suites: list[Suite]) -> None:
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(suites)}\n{END}{rest.split(END)[1]}")
