"""Which tier of the tests this run is: `make test`, or with ZEROTH_TIER=long the cases that only `make test-all` has.

A test belongs to `make test` unless it says otherwise; together the two runs are all of them.
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Sequence
from typing import TypeVar

LONG = os.environ.get("ZEROTH_TIER") == "long"
Row = TypeVar("Row")
Marked = TypeVar("Marked")


def long(thing: Marked) -> Marked:
    """A test, or all of a class, that only the long tier has."""
    thing.tiers = {True}  # type: ignore[attr-defined]
    return thing


def both(thing: Marked) -> Marked:
    """A test that is in both tiers, with rows that rows() chooses."""
    thing.tiers = {False, True}  # type: ignore[attr-defined]
    return thing


def rows(every: Sequence[Row], few: Sequence[Row]) -> list[Row]:
    """For a loop in a test of both tiers: `few` of `every` row in `make test`, the others in the long tier."""
    unknown = [row for row in few if row not in every]
    assert not unknown, unknown
    return [row for row in every if (row not in few) == LONG]


def of_this_run(suite: unittest.TestSuite) -> unittest.TestSuite:
    kept = unittest.TestSuite()
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            part = of_this_run(test)
            if part.countTestCases() > 0:
                kept.addTest(part)
            continue
        method = getattr(test, getattr(test, "_testMethodName", ""), None)
        if LONG in getattr(method, "tiers", getattr(type(test), "tiers", {False})):
            kept.addTest(test)
    return kept


class _Loader(unittest.TestLoader):
    def loadTestsFromModule(self, module: object, *arguments: object, **named: object) -> unittest.TestSuite:
        return of_this_run(super().loadTestsFromModule(module, *arguments, **named))  # type: ignore[arg-type]

    def loadTestsFromNames(self, names: Sequence[str], module: object = None) -> unittest.TestSuite:
        """Tests that a person names run, whatever tier they belong to."""
        return super().loadTestsFromNames(names, module)  # type: ignore[arg-type]


def run() -> int:
    """In place of unittest.main(): the exit code. Without a case it fails, so that none is lost."""
    done = unittest.main(verbosity=2, exit=False, testLoader=_Loader())
    if done.result.testsRun == 0:
        print("FAILED: no case in this tier", file=sys.stderr)
    return 0 if done.result.wasSuccessful() and done.result.testsRun > 0 else 1


def main() -> None:
    sys.exit(run())
