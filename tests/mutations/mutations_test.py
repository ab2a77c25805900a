#!/usr/bin/env python3
"""Builds the core with planted faults and checks that each one turns the tests red that claim to guard against it.

usage: mutations_test.py SOURCE_DIR BUILD_DIR

Every guard is run twice: without a fault it must be green (so that red means something), with its fault it must be red, by
failed assertions or errors, not by a missing test. A fault that nobody notices is a failure of this test.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

TIME_LIMIT_S = 300


@dataclasses.dataclass(frozen=True)
class Guard:
    """One planted fault, and tests that must see it."""

    fault: str
    target: str
    tests: str  # a --gtest_filter


GUARDS = [
    Guard("reduction_ulp", "comm_collectives", "*Collectives.AllReduceSumsInRankOrder*"),
    Guard("tag_compare", "comm_mismatch", "*Mismatch.EveryRankPrintsBothSides*"),
    Guard("pull_reduction_ulp", "toy_engine_test", "*LossesHaveTheGoldenBits*"),
    Guard("leaked_buffer", "toy_engine_test", "*MeasuredMemoryIsThePlannedMemory*:*NothingGrowsOverTwoHundredSteps*"),
    Guard("kernel_dispatch", "kernels_test", "*Adam*"),
]


def run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=TIME_LIMIT_S * 4, check=False)


def find_program(build: pathlib.Path, target: str) -> pathlib.Path:
    found = [path for path in build.rglob(target) if path.is_file() and os.access(path, os.X_OK)]
    if len(found) != 1:
        sys.exit(f"expected one program {target} under {build}, got {found}")
    return found[0]


def failed_tests(program: pathlib.Path, tests: str, fault: str) -> tuple[int, list[str], str]:
    """Number of tests that ran, names of those that failed, and the output."""
    environment = {**os.environ, "ZEROTH_MUTATION": fault}
    done = run([str(program), f"--gtest_filter={tests}", "--gtest_brief=0"], environment)
    ran = re.search(r"\[=+\] (\d+) tests? from .* ran", done.stdout)
    failed = sorted(set(re.findall(r"^\[  FAILED  \] ([^\s,]+)", done.stdout, re.MULTILINE)))
    return int(ran.group(1)) if ran else 0, failed, done.stdout


def main() -> int:
    source, build = (pathlib.Path(argument) for argument in sys.argv[1:3])
    configure = run(["cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release",
                     "-DZEROTH_TORCH=OFF", "-DZEROTH_CUDA=OFF", "-DZEROTH_BENCHMARKS=OFF", "-DZEROTH_MUTATIONS=ON"])
    if configure.returncode != 0:
        print(configure.stdout)
        return 1
    targets = sorted({guard.target for guard in GUARDS})
    made = run(["cmake", "--build", str(build), "-j", str(os.cpu_count() or 1), "--target", *targets])
    if made.returncode != 0:
        print(made.stdout[-8000:])
        return 1
    bad = 0
    for guard in GUARDS:
        program = find_program(build, guard.target)
        ran, failed, output = failed_tests(program, guard.tests, "")
        if ran == 0 or failed:
            print(f"{guard.fault}: its guards are not green without the fault: {ran} ran, failed {failed}\n{output[-3000:]}")
            bad += 1
            continue
        ran, failed, output = failed_tests(program, guard.tests, guard.fault)
        if not failed:
            print(f"{guard.fault}: NOT NOTICED by {guard.tests} of {guard.target}\n{output[-3000:]}")
            bad += 1
        else:
            print(f"{guard.fault}: noticed by {', '.join(failed[:4])}{' ...' if len(failed) > 4 else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
