"""The suites of a build, as its ctest files declare them: command, limits, tier, cost, room."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import typing

TIERS = ("quick", "test", "long")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One ctest test. A GoogleTest executable is one, and so is a script."""

    build: pathlib.Path
    name: str
    command: tuple[str, ...]
    """empty where the executable is not built"""
    environment: dict[str, str]
    timeout_s: float
    labels: frozenset[str]
    """unit, conformance, parity, process"""
    tier: str
    cost: int
    """declared core-seconds"""
    room: str
    target: str
    """CMake target of the executable; empty for a script"""
    waits: bool
    """its processes sleep most of the time"""
    cores: int
    alone: bool
    """nothing runs beside it"""
    skip_code: int | None

    @property
    def result_file(self) -> pathlib.Path | None:
        """The XML file of a GoogleTest executable."""
        for argument in self.command:
            if argument.startswith("--gtest_output=xml:"):
                return pathlib.Path(argument.removeprefix("--gtest_output=xml:"))
        return None


def sanitizer_of(build: pathlib.Path) -> str:
    """ "thread", "address,undefined" or nothing."""
    cache = (build / "CMakeCache.txt").read_text()
    match = re.search(r"^ZEROTH_SANITIZE:[A-Z]+=(.*)$", cache, re.MULTILINE)
    return match.group(1) if match else ""


def _labelled(labels: list[str], key: str, default: str) -> str:
    return next((label.removeprefix(key + ":") for label in labels if label.startswith(key + ":")), default)


def _suite(build: pathlib.Path, test: dict[str, typing.Any]) -> Suite:
    properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
    labels = properties.get("LABELS", [])
    return Suite(
        build=build,
        name=test["name"],
        command=tuple(test.get("command", [])),
        environment=dict(entry.split("=", 1) for entry in properties.get("ENVIRONMENT", [])),
        timeout_s=float(properties.get("TIMEOUT", 120)),
        labels=frozenset(label for label in labels if ":" not in label and label != "waits"),
        tier=_labelled(labels, "tier", "test"),
        cost=int(_labelled(labels, "cost", "1")),
        room=_labelled(labels, "room", ""),
        target=_labelled(labels, "target", ""),
        waits="waits" in labels,
        cores=-(-int(properties.get("PROCESSORS", 3)) // 3),  # in thirds of a core: cmake/ZerothFunctions.cmake
        alone=bool(properties.get("RUN_SERIAL", False)),
        skip_code=int(properties["SKIP_RETURN_CODE"]) if "SKIP_RETURN_CODE" in properties else None,
    )


def suites_of(build: pathlib.Path) -> list[Suite]:
    """All of them, in the order of their names."""
    command = ["ctest", "--test-dir", str(build), "--show-only=json-v1"]
    listing = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return sorted((_suite(build, test) for test in listing["tests"]), key=lambda suite: suite.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Suites of a build that are asked for. Empty fields choose all."""

    labels: frozenset[str] = frozenset()
    tiers: frozenset[str] = frozenset()
    regex: str = ""
    rooms: frozenset[str] = frozenset()
    not_rooms: frozenset[str] = frozenset()

    def takes(self, suite: Suite) -> bool:
        return (
            (not self.labels or bool(self.labels & suite.labels))
            and (not self.tiers or suite.tier in self.tiers)
            and (not self.rooms or suite.room in self.rooms)
            and suite.room not in self.not_rooms
            and re.search(self.regex, suite.name) is not None
        )
