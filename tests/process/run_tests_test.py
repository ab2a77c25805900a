#!/usr/bin/env python3
"""tools/run-tests on builds made up for the purpose: nothing that goes wrong in a test may end as a pass."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PASSED = '<testcase name="a" classname="A" status="run" result="completed" />'
FAILED = '<testcase name="b" classname="A" status="run"><failure message="f" /></testcase>'
DISABLED = '<testcase name="DISABLED_c" classname="A" status="notrun" result="suppressed" />'


def skipped(reason: str) -> str:
    return f'<testcase name="d" classname="A" status="run"><skipped message="x.cpp:1&#x0A;{reason}" /></testcase>'


class RunTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = pathlib.Path(folder.name)
        self.lines: list[str] = []
        self.sanitizer = ""
        self.budget = {"quick": 9, "test": 20, "slice": 9, "rooms": {"": 90, "comm": 9, "zero": 15}}

    def gtest(self, name: str, cases: str | None, code: int = 0, labels: str = "unit", properties: str = "") -> None:
        """A ctest test that writes `cases` where a GoogleTest would, or nothing for None, and exits with `code`."""
        file = self.build / "test-results" / f"{name}.xml"
        script = self.build / f"{name}.sh"
        there = "file=${1#--gtest_output=xml:}\n"
        write = "" if cases is None else f'cat >"$file" <<END\n<testsuites>{cases}</testsuites>\nEND\n'
        script.write_text(f"{there}{write}exit {code}\n")
        self.lines.append(f'add_test({name} "sh" "{script}" "--gtest_output=xml:{file}")')
        self.lines.append(f'set_tests_properties({name} PROPERTIES LABELS "{labels}" TIMEOUT 5 {properties})')

    def script(self, name: str, text: str) -> None:
        script = self.build / f"{name}.sh"
        script.write_text(text + "\n")
        self.lines.append(f'add_test({name} "sh" "{script}")')
        self.lines.append(f"set_tests_properties({name} PROPERTIES SKIP_RETURN_CODE 77)")

    def exits_with(self, name: str, text: str) -> None:
        """Puts shell `text` in place of the end of a gtest()."""
        script = self.build / f"{name}.sh"
        script.write_text(script.read_text().replace("exit 0", text))

    def fails_once(self, name: str) -> str:
        """Shell that exits with 1 when it comes by for the first time."""
        return f'[ -e "{self.build}/{name}.tried" ] || {{ : >"{self.build}/{name}.tried"; exit 1; }}'

    def run_tests(self, labels: str = "", *arguments: str) -> tuple[int, str]:
        """Exit code and last line."""
        (self.build / "CMakeCache.txt").write_text(f"ZEROTH_SANITIZE:STRING={self.sanitizer}\n")
        (self.build / "CTestTestfile.cmake").write_text("\n".join(self.lines) + "\n")
        (self.build / "reasons.txt").write_text("no AVX2  # comment\n")
        (self.build / "budget.json").write_text(json.dumps(self.budget))
        command = [
            ROOT / "tools" / "run-tests",
            f"{self.build}{labels}",
            "--reasons",
            self.build / "reasons.txt",
            "--budget",
            self.build / "budget.json",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.output = done.stdout + done.stderr
        return done.returncode, done.stdout.strip().split("\n")[-1]

    def test_counts_cases_not_executables(self) -> None:
        self.gtest("one", PASSED + PASSED)
        self.gtest("two", PASSED + skipped("no AVX2: this processor"))
        self.script("three", "exit 0")
        self.assertEqual(self.run_tests(), (0, "4 passed, 0 failed, 1 skipped"))
        self.assertRegex(self.output, r"skipped +1  no AVX2\n")

    def test_failed_case(self) -> None:
        self.gtest("one", PASSED + FAILED, code=1)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))
        self.assertIn("one: A.b", self.output)

    def test_unknown_reason_fails(self) -> None:
        self.gtest("one", PASSED + skipped("did not feel like it"))
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_disabled_case_fails(self) -> None:
        self.gtest("one", PASSED + DISABLED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_crash_without_results_fails(self) -> None:
        self.gtest("one", None, code=139)
        self.gtest("two", PASSED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_clean_exit_without_results_fails(self) -> None:
        self.gtest("one", None)
        self.gtest("two", PASSED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_stale_results_are_not_read(self) -> None:
        self.gtest("one", None)
        (self.build / "test-results").mkdir()
        (self.build / "test-results" / "one.xml").write_text(f"<testsuites>{PASSED}</testsuites>")
        self.assertEqual(self.run_tests(), (1, "0 passed, 1 failed, 0 skipped"))

    def test_error_exit_after_passing_cases_fails(self) -> None:
        self.gtest("one", PASSED, code=1)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_executable_without_cases_fails(self) -> None:
        self.gtest("one", "")
        self.gtest("two", PASSED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_missing_executable_fails(self) -> None:
        self.lines.append('add_test(one "/nowhere/test")')
        self.gtest("two", PASSED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_time_out_fails(self) -> None:
        self.script("one", "sleep 30")
        self.lines.append("set_tests_properties(one PROPERTIES TIMEOUT 1)")
        self.gtest("two", PASSED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_what_failed_is_tried_again_alone_after_all_others(self) -> None:
        running = self.build / "running"
        alone = f'[ ! -e "{running}" ] || exit 1'
        self.script("chance", f"{self.fails_once('chance')}\n{alone}")
        self.script("slow", f': >"{running}"; sleep 1; rm "{running}"')
        self.assertEqual(self.run_tests("", "--jobs", "2"), (0, "2 passed, 0 failed, 0 skipped"))
        self.assertIn("\npassed only when tried again alone: " + f"{self.build.name}/chance\n", self.output)
        self.assertRegex(self.output, r"(?s)NOT OK.*slow  ok.*tried again with nothing beside it.*1/1 .*chance  ok")

    def test_a_case_that_fails_once_passes_and_one_that_fails_twice_does_not(self) -> None:
        first = f'[ -e "{self.build}/one.tried" ]'
        self.gtest("one", f"$({first} && echo '{PASSED}' || echo '{FAILED}'){PASSED}")
        self.exits_with("one", self.fails_once("one"))
        self.gtest("two", PASSED + FAILED, code=1)
        self.assertEqual(self.run_tests(), (1, "3 passed, 1 failed, 0 skipped"))
        self.assertEqual(re.findall("passed only when tried again alone: .*/(.*)", self.output), ["one"])
        self.assertEqual(self.output.count("/two  NOT OK"), 2)

    def test_what_is_skipped_when_tried_again_has_not_passed(self) -> None:
        self.script("one", self.fails_once("one") + "; echo 'SKIPPED: no AVX2: here'; exit 77")
        self.gtest("two", PASSED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_a_time_out_is_tried_again(self) -> None:
        self.script("one", self.fails_once("one").replace("exit 1", "sleep 30"))
        self.lines.append("set_tests_properties(one PROPERTIES TIMEOUT 1)")
        self.assertEqual(self.run_tests(), (0, "1 passed, 0 failed, 0 skipped"))
        self.assertIn("time-out after 1 s", self.output)

    def test_neither_a_crash_nor_a_build_with_a_sanitizer_is_tried_again(self) -> None:
        self.script("crash", self.fails_once("crash").replace("exit 1", "kill -SEGV $$"))
        self.script("aborted", self.fails_once("aborted").replace("exit 1", "exit 134"))
        self.gtest("leak", PASSED)
        self.exits_with("leak", self.fails_once("leak"))
        self.gtest("two", PASSED)
        self.assertEqual(self.run_tests(), (1, "2 passed, 3 failed, 0 skipped"))
        self.assertNotIn("tried again", self.output)
        self.lines = []
        self.script("race", self.fails_once("race"))
        self.gtest("two", PASSED)
        self.sanitizer = "thread"
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))
        self.assertNotIn("tried again", self.output)

    def test_many_rounds_say_how_often_a_suite_failed_and_pardon_nothing(self) -> None:
        self.script("chance", self.fails_once("chance"))
        self.script("steady", "exit 0")
        self.assertEqual(self.run_tests("", "--repeat", "3", "--load", "1"), (1, "5 passed, 1 failed, 0 skipped"))
        self.assertIn(f"\nfailed 1 of 3 times: {self.build.name}/chance\n", self.output)
        self.assertNotIn("tried again", self.output)
        self.assertNotIn("steady  NOT OK", self.output)

    def test_skipped_script_needs_a_reason(self) -> None:
        self.script("one", "echo 'SKIPPED: no AVX2: here'; exit 77")
        self.script("two", "exit 77")
        self.gtest("three", PASSED)
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 1 skipped"))

    def test_only_the_labels(self) -> None:
        self.gtest("one", PASSED)
        self.gtest("two", FAILED, code=1, labels="process")
        self.gtest("three", PASSED, labels="conformance")
        self.assertEqual(self.run_tests(":unit"), (0, "1 passed, 0 failed, 0 skipped"))
        self.assertEqual(self.run_tests(":unit,conformance"), (0, "2 passed, 0 failed, 0 skipped"))

    def test_only_the_name(self) -> None:
        self.gtest("comm_one", PASSED)
        self.gtest("two", FAILED, code=1)
        self.assertEqual(self.run_tests("", "--regex", "comm_"), (0, "1 passed, 0 failed, 0 skipped"))

    def test_only_the_tier(self) -> None:
        self.gtest("one", PASSED, labels="unit;tier:quick")
        self.gtest("two", PASSED + PASSED, labels="unit")
        self.gtest("three", FAILED, code=1, labels="unit;tier:long")
        self.assertEqual(self.run_tests("", "--tier", "quick"), (0, "1 passed, 0 failed, 0 skipped"))
        self.assertEqual(self.run_tests("", "--tier", "quick,test"), (0, "3 passed, 0 failed, 0 skipped"))
        self.assertEqual(self.run_tests(), (1, "3 passed, 1 failed, 0 skipped"))

    def test_only_the_rooms(self) -> None:
        self.gtest("one", PASSED, labels="unit;room:comm")
        self.gtest("two", PASSED + PASSED, labels="unit;room:zero")
        self.assertEqual(self.run_tests(":unit:comm"), (0, "1 passed, 0 failed, 0 skipped"))
        self.assertEqual(self.run_tests("::-comm"), (0, "2 passed, 0 failed, 0 skipped"))

    def test_declared_costs_stay_within_the_budget(self) -> None:
        self.gtest("one", PASSED, labels="unit;room:comm;cost:9")
        self.gtest("two", PASSED, labels="unit;room:zero;cost:11")
        self.gtest("three", PASSED, labels="unit;room:zero;cost:500;tier:long")
        self.assertEqual(self.run_tests(), (0, "3 passed, 0 failed, 0 skipped"))
        self.gtest("four", PASSED, labels="unit;room:comm;cost:1")
        self.assertEqual(self.run_tests(), (1, "4 passed, 2 failed, 0 skipped"))
        self.assertIn("make test: 21 core-seconds are declared, 20 are allowed", self.output)
        self.assertIn("the room comm: 10 core-seconds are declared, 9 are allowed", self.output)

    def test_a_room_without_a_share_fails(self) -> None:
        self.gtest("one", PASSED, labels="unit;room:cellar")
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_a_cost_beyond_twice_its_declaration_is_told_and_does_not_fail(self) -> None:
        self.script("one", "python3 -c 'import time\nwhile time.process_time() < 1.3: pass'")
        self.lines.append('set_tests_properties(one PROPERTIES LABELS "cost:0")')
        self.assertEqual(self.run_tests()[0], 0)
        self.assertRegex(self.output, r"beyond twice their declaration.*\n.* 0 declared .*/one\n")

    def test_parts_hold_every_suite_once(self) -> None:
        names = [f"suite_{index}" for index in range(7)]
        for index, name in enumerate(names):
            self.gtest(name, PASSED, labels=f"unit;cost:{1 + index % 3}")
        found = []
        for part in range(3):
            self.assertEqual(self.run_tests("", "--part", f"{part}/3")[0], 0)
            found += re.findall(r"suite_\d+(?=  ok)", self.output)
        self.assertEqual(sorted(found), names)

    def test_a_dear_suite_is_cut_over_the_parts(self) -> None:
        self.gtest("one", PASSED.replace('"a"', '"a$GTEST_SHARD_INDEX"'), labels="unit;cost:20")
        for part in range(4):
            self.assertEqual(self.run_tests("", "--part", f"{part}/4"), (0, "1 passed, 0 failed, 0 skipped"))
            self.assertRegex(self.output, r"one [1-4]/4  ok")

    def test_a_suite_that_waits_is_cut_and_counted_once(self) -> None:
        one = PASSED.replace('"a"', '"a$GTEST_SHARD_INDEX"')
        self.gtest("one", one, labels="process;waits;cost:40")
        self.budget["test"] = 99
        self.assertEqual(self.run_tests(), (0, "4 passed, 0 failed, 0 skipped"))
        self.assertIn("one 4/4  ok", self.output)

    def test_an_empty_shard_is_no_failure_and_an_empty_suite_is(self) -> None:
        self.gtest("one", "$([ $GTEST_SHARD_INDEX = 0 ] && echo '" + PASSED + "')", labels="process;waits;cost:20")
        self.budget["test"] = self.budget["rooms"][""] = 99
        self.assertEqual(self.run_tests(), (0, "1 passed, 0 failed, 0 skipped"))
        self.gtest("two", "", labels="process;waits;cost:20")
        self.assertEqual(self.run_tests(), (1, "1 passed, 1 failed, 0 skipped"))

    def test_costs_and_targets_are_listed(self) -> None:
        self.gtest("one", FAILED, labels="unit;cost:5;target:one")
        self.gtest("two", FAILED, labels="unit;cost:6;target:shared")
        self.gtest("three", FAILED, labels="unit;cost:6;target:shared;tier:long")
        self.assertEqual(self.run_tests("", "--cost"), (0, "17"))
        self.run_tests("", "--targets", "--tier", "test")
        self.assertEqual(self.output.split(), ["one", "shared"])

    def test_a_suite_runs_with_its_environment(self) -> None:
        self.script("one", '[ "$COLOUR" = "red = warm" ]')
        self.lines.append('set_tests_properties(one PROPERTIES ENVIRONMENT "COLOUR=red = warm")')
        self.assertEqual(self.run_tests(), (0, "1 passed, 0 failed, 0 skipped"))

    def test_nothing_run_fails(self) -> None:
        self.gtest("one", PASSED)
        code, line = self.run_tests(":parity")
        self.assertEqual(code, 1)
        self.assertRegex(line, re.compile("^0 passed, 1 failed"))


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
