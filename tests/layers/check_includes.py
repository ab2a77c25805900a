#!/usr/bin/env python3
"""Holds the layers in the text of the sources.

usage: check_includes.py ROOT --levels base=0,device=1,...

Rules, each named in its messages:
  layer    a room includes itself and rooms of a lower level only
  torch    torch, ATen and c10 are included by the room libtorch only, and by examples and tests that are about it
  vendor   public headers include no outside library
  private  public headers include public headers only; nobody includes by a path with ".."
  if       preprocessor conditions are in base/platform.h, base/planted.h and kernels/common/arch.h only
  stage    the number of the ZeRO stage is turned into a plan in one place and compared nowhere else
Prints one line for each violation; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inl"}
TREES = ("include", "src", "csrc", "examples", "tests", "benchmarks")
TORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
VENDORS = re.compile(
    r"^(spdlog|fmt|nlohmann|CLI|gtest|gmock|benchmark|rapidcheck|cuda|openssl|liburing)(/|\.h|_)|^xxhash"
)
CONDITION_FILES = {"include/zeroth/base/platform.h", "src/base/planted.h", "csrc/kernels/common/arch.h"}
# Where the stage may be compared: the plan; and where a configuration is read, to refuse a stage that does not exist.
STAGE_FILES = {"src/zero/zero_plan.cpp", "src/engine/config/check.cpp", "src/engine/config/schema_honoured.cpp"}
# zero_stage, my_zero_stage, config.zero.stage, zero_optimization->stage
STAGE = r"(?:zero_stage\w*|zero\w*(?:\.|->)stage)\b(?:\(\))?"
COMPARISON = r"(?:==|!=|<=|>=|<(?!<)|>(?!>))"
STAGE_USES = re.compile(
    rf"\b{STAGE}\s*{COMPARISON}"
    rf"|(?<!-)(?<![<>]){COMPARISON}\s*(?:\w+(?:\.|->|::))*{STAGE}"
    rf"|\b(?:switch|if|while)\s*\([^;{{]*\b{STAGE}"
    rf"|\b{STAGE}\s*\?"
)
# Tests of the core: without torch also where torch is there.
TORCH_FREE_TESTS = re.compile(
    r"^tests/(conformance|layers|mutations|unit/(base|device|io|kernels|comm|shard|optim|zero|engine|launcher))/"
)


def code_of(text: str) -> str:
    """The text with comments and the insides of string and character literals blanked; line numbers stay."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"([^\s()\\]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'',
        re.DOTALL,
    )
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def room_of(path: str) -> str | None:
    """The room that a file of the library belongs to; None for examples, tests and benchmarks."""
    match = re.match(r"(?:include/zeroth|src)/([^/]+)/", path)
    if match:
        return match.group(1)
    return "kernels" if path.startswith("csrc/kernels/") else None


def room_of_include(name: str, quoted: bool, levels: dict[str, int]) -> str | None:
    if name.startswith("kernels/"):
        return "kernels"
    parts = name.split("/")
    if parts[0] == "zeroth" and len(parts) > 2:
        return parts[1]
    return parts[0] if quoted and len(parts) > 1 and parts[0] in levels else None


class Checker:
    def __init__(self, root: pathlib.Path, levels: dict[str, int]) -> None:
        self.root = root
        self.levels = levels
        self.violations: list[str] = []

    def report(self, path: str, line: int, rule: str, text: str) -> None:
        self.violations.append(f"{path}:{line}: {rule}: {text}")

    def run(self) -> list[str]:
        files = (file for tree in TREES for file in sorted((self.root / tree).rglob("*")))
        for file in files:
            if file.suffix in SUFFIXES and file.is_file():
                self.check(file.relative_to(self.root).as_posix(), file.read_text())
        return self.violations

    def check(self, path: str, text: str) -> None:
        room = room_of(path)
        if room is not None and room not in self.levels:
            self.report(path, 1, "layer", f"{room} is not a room")
            return
        code = code_of(text)
        code_lines = code.split("\n")
        for number, line in enumerate(text.split("\n"), 1):
            include = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
            # A commented-out include is blank in the code.
            if include and "include" in code_lines[number - 1]:
                self.check_include(path, number, room, include.group(2), include.group(1) == '"')
            condition = re.match(r"\s*#\s*(if|ifdef|ifndef|elif)\b", code_lines[number - 1])
            if condition and path not in CONDITION_FILES:
                self.report(
                    path,
                    number,
                    "if",
                    f"#{condition.group(1)} outside base/platform.h, base/planted.h and common/arch.h",
                )
        if room is not None and path not in STAGE_FILES:
            for use in STAGE_USES.finditer(code):
                line = code.count("\n", 0, use.start()) + 1
                self.report(path, line, "stage", f'compares the stage: "{" ".join(use.group().split())}"; ask the plan')

    def check_include(self, path: str, line: int, room: str | None, name: str, quoted: bool) -> None:
        public = path.startswith("include/")
        if ".." in name.split("/"):
            self.report(path, line, "private", f'includes "{name}" by a relative path')
            return
        if public and quoted:
            self.report(path, line, "private", f'a public header includes the private "{name}"')
        if public and VENDORS.search(name):
            self.report(path, line, "vendor", f"a public header includes <{name}>")
        if TORCH.match(name) and (room not in (None, "libtorch") or TORCH_FREE_TESTS.match(path)):
            self.report(path, line, "torch", f"<{name}> outside the room libtorch")
        other = room_of_include(name, quoted, self.levels)
        if room is None or other is None or other == room:
            return
        if other not in self.levels:
            self.report(path, line, "layer", f"<{name}> is of no room")
        elif self.levels[other] >= self.levels[room]:
            self.report(
                path,
                line,
                "layer",
                f"{room} (level {self.levels[room]}) includes <{name}> of {other} (level {self.levels[other]})",
            )


def parse_levels(text: str) -> dict[str, int]:
    return {name: int(level) for name, level in (pair.split("=") for pair in text.split(","))}


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold the layers in the text of the sources.")
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--levels", required=True, type=parse_levels)
    arguments = parser.parse_args()
    violations = Checker(arguments.root, arguments.levels).run()
    print("\n".join(violations) if violations else "the layers hold")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
