#!/usr/bin/env python3
"""Checks that each planted fault turns red every test that claims to guard against it.

usage: mutations_test.py SOURCE_DIR PROGRAMS_DIR FILE ...

PROGRAMS_DIR holds each test once more, as NAME_faults, linked with FILEs that were compiled with faults: all files that
ask for one.

A guard is a list of patterns. Each must name at least one test; without a fault all of these must be green (so that red
means something), with it every single one must be red, by failed assertions or errors, not by a missing or skipped test
or by a crash. A guard that does not notice its fault is a failure of this test, whatever the other guards say.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

TIME_LIMIT_S = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """One planted fault, and tests that must see it."""

    fault: str
    target: str
    tests: tuple[str, ...]
    """Patterns as in --gtest_filter; every test that one of them names must go red."""


GUARDS = [
    Guard(
        fault="reduction_ulp",
        target="comm_collectives",
        tests=("Backends/Collectives.EveryCallMeetsEveryWorldCountAndPlace/*-*_1:*nccl*",),
    ),  # one rank has nobody's sum to spoil, and NCCL sums itself
    Guard(
        fault="tag_compare", target="comm_mismatch", tests=("Backends/Mismatch.EveryRankPrintsBothSides/*-*nccl*",)
    ),  # which compares fingerprints
    Guard(
        fault="tag_compare",
        target="zero_test",
        tests=(
            "ParameterStore.AnotherLayoutOfAUnitIsAMismatchThatNamesUnitAndRank",
            "GradientStore.ABucketOfAnotherLayoutIsAMismatchThatNamesUnitAndRank",
        ),
    ),
    Guard(fault="pull_reduction_ulp", target="toy_engine_test", tests=("ToyEngine.LossesHaveTheGoldenBits",)),
    Guard(
        fault="leaked_buffer",
        target="toy_engine_test",
        tests=("ToyEngine.MeasuredMemoryIsThePlannedMemory", "ToyEngine.NothingGrowsOverTwoHundredSteps"),
    ),
    # The ledger's word is one thing, the kernel's another: a buffer that nobody counts would still be seen here.
    Guard(
        fault="leaked_buffer",
        target="engine_faults_test",
        tests=("EngineProcesses.ResidentMemoryDoesNotGrowOverTwoHundredSteps",),
    ),
    Guard(
        fault="kernel_dispatch",
        target="kernels_test",
        tests=(
            "AdamW/*.EveryInstructionSetGivesTheSameBitsOnRandomPatterns",
            "AdamW/*.EveryTailLengthAndMisalignmentGivesTheSameBits",
            "AdamW/*.GoldenBits",
        ),
    ),
]


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIME_LIMIT_S,
        check=False,
    )


def files_that_ask(source: pathlib.Path) -> set[str]:
    files = [path for folder in ("src", "csrc") for path in (source / folder).rglob("*.cpp")]
    return {path.relative_to(source).as_posix() for path in files if "base/planted.h" in path.read_text()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Tests of one pattern in one run, by name, sorted."""

    green: list[str]
    red: list[str]
    other: list[str]
    """Skipped, or begun and not ended: a crash is neither green nor red."""
    output: str


def run_tests(program: pathlib.Path, pattern: str, fault: str) -> Outcome:
    environment = {**os.environ, "ZEROTH_MUTATION": fault}
    if fault:
        environment["ZEROTH_TEST_TIMEOUT_MS"] = (
            "2000"  # ranks that a fault keeps apart wait for each other over messages
        )
    output = run([str(program), f"--gtest_filter={pattern}", "--gtest_brief=0"], environment).stdout

    def ended_as(mark: str) -> set[str]:
        # Only the lines with a time: the summary at the end has none.
        return set(re.findall(rf"^\[ *{mark} *\] ([^\s,]+).* \(\d+ ms\)$", output, re.MULTILINE))

    begun = set(re.findall(r"^\[ RUN +\] (\S+)", output, re.MULTILINE))
    green, red = ended_as("OK"), ended_as("FAILED")
    return Outcome(green=sorted(green), red=sorted(red), other=sorted(begun - green - red), output=output)


def problem_of(guard: Guard, program: pathlib.Path, pattern: str) -> str | None:
    """Why this pattern is no guard against its fault, or None if it is one."""
    calm = run_tests(program, pattern, "")
    if not calm.green or calm.red or calm.other:
        return (
            f"not green without the fault: {len(calm.green)} green, red {calm.red}, skipped or crashed {calm.other}\n"
            f"{calm.output[-3000:]}"
        )
    struck = run_tests(program, pattern, guard.fault)
    if struck.red != calm.green:
        blind = sorted(set(calm.green) - set(struck.red))
        return f"NOT NOTICED by {', '.join(blind)}\n{struck.output[-3000:]}"
    print(
        f"{guard.fault}: noticed by {', '.join(struck.red[:4])}{' ...' if len(struck.red) > 4 else ''} ({len(struck.red)})"  # noqa: E501
    )
    return None


def main() -> int:
    source, programs = (pathlib.Path(argument) for argument in sys.argv[1:3])
    compiled = set(sys.argv[3:])
    if compiled != files_that_ask(source):
        print(f"compiled with faults: {sorted(compiled)}\nask for faults:       {sorted(files_that_ask(source))}")
        return 1
    bad = 0
    for guard in GUARDS:
        program = programs / f"{guard.target}_faults"
        for pattern in guard.tests:
            problem = problem_of(guard, program, pattern)
            if problem is not None:
                print(f"{guard.fault}: {guard.target} {pattern}: {problem}")
                bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
