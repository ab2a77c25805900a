#!/usr/bin/env python3
"""Holds the formatting that `make format` writes.

usage: check_format.py ROOT [--tools FOLDER]

  clang-format  C++ and CUDA files are as .clang-format has them
  ruff          Python files are as `ruff format` writes them, and `ruff check` finds nothing
  width         no line is longer than 120 columns: of C++, CUDA, CMake, shell and make files, but for raw strings; of
                Markdown, but for tables, headings and code blocks. (Of Python `ruff check` says it.)
FOLDER has clang-format and ruff, of the versions that tools/requirements.txt names; without --tools they are looked for
in ROOT/build/venv/bin, then in the PATH. Prints one line for each violation; exit code 1 if there is one, else 77 where
the tools are not there and the widths alone were looked at.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys

COLUMNS = 120
CXX = {".h", ".cpp", ".cu", ".cuh", ".inl"}
NO_SUFFIX = re.compile(r"#!.*\b(bash|sh)$")
# What a walk through a folder without git leaves out; .gitignore says it where git is.
BUILT = {"build", "__pycache__", "node_modules"}
# The first of these that begins at a place decides what the text there is.
LITERALS = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^\s()\\]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'',
    re.DOTALL,
)


def files_of(root: pathlib.Path) -> list[str]:
    """Paths of our own files: those that git has or would take; without git all but what is built."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        listed = done.stdout.split("\0") if done.returncode == 0 else []
    except OSError:
        listed = []
    files = [path for path in listed if path and (root / path).is_file()]
    if not files:
        for folder, folders, names in os.walk(root):
            here = pathlib.Path(folder)
            folders[:] = [name for name in folders if name not in BUILT and (not name.startswith(".") or name == ".ci")]
            files += [(here / name).relative_to(root).as_posix() for name in names]
    return sorted(set(files))


def without_raw_strings(text: str) -> str:
    """The text of a C++ file in which every line that a raw string touches is empty."""
    lines = text.split("\n")
    for literal in LITERALS.finditer(text):
        if literal.group().startswith("R"):
            first = text.count("\n", 0, literal.start())
            for number in range(first, first + literal.group().count("\n") + 1):
                lines[number] = ""
    return "\n".join(lines)


def without_blocks(text: str) -> str:
    """The text of a page in which tables, headings and code blocks are empty lines."""
    lines = text.split("\n")
    fence = ""
    for number, line in enumerate(lines):
        mark = re.match(r"\s*(```|~~~)", line)
        if fence or mark or re.match(r"\s*\||#", line):
            lines[number] = ""
        if mark and fence in ("", mark.group(1)):
            fence = "" if fence else mark.group(1)
    return "\n".join(lines)


def too_wide(path: str, text: str) -> list[int]:
    """Numbers of the lines that are too long, in a file whose lines have a limit."""
    name, suffix = pathlib.PurePosixPath(path).name, pathlib.PurePosixPath(path).suffix
    if suffix in CXX:
        text = without_raw_strings(text)
    elif suffix == ".md":
        text = without_blocks(text)
    elif not (
        suffix in (".cmake", ".sh")
        or path.endswith(".cmake.in")
        or name in ("CMakeLists.txt", "Makefile")
        or (not suffix and NO_SUFFIX.match(text.split("\n", 1)[0]))
    ):
        return []
    return [number for number, line in enumerate(text.split("\n"), 1) if len(line) > COLUMNS]


def widths(root: pathlib.Path, files: list[str]) -> list[str]:
    violations = []
    for path in files:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a file of the fuzz targets' corpus
        violations += [f"{path}:{number}: width: more than {COLUMNS} columns" for number in too_wide(path, text)]
    return violations


def find_tool(root: pathlib.Path, name: str, folder: pathlib.Path | None) -> tuple[str, str]:
    """The program and "", or "" and why there is none that fits."""
    pinned = re.search(rf"^{name}==(\S+)$", (root / "tools/requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None:
        raise SystemExit(f"tools/requirements.txt names no version of {name}")
    venv = root / "build/venv/bin"
    program = (
        shutil.which(name, path=str(folder)) if folder else shutil.which(name, path=str(venv)) or shutil.which(name)
    )
    if program is None:
        return "", f"{name} is not there"
    found = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if re.search(rf"(?<![\d.]){re.escape(pinned.group(1))}(?![\d.])", found):
        return program, ""
    return "", f"{name} {pinned.group(1)} is wanted, there is {found}"


def format_violations(root: pathlib.Path, files: list[str], clang_format: str, ruff: str) -> list[str]:
    sources = [path for path in files if pathlib.PurePosixPath(path).suffix in CXX]
    jobs = os.cpu_count() or 1
    commands = [
        [clang_format, "--dry-run", "-Werror", *sources[job::jobs]] for job in range(jobs) if sources[job::jobs]
    ]
    commands += [[ruff, "format", "--check", "--no-cache", "."], [ruff, "check", "--no-cache", "--quiet", "."]]

    def run(command: list[str]) -> str:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return ""
        return (done.stdout + done.stderr).strip() or f"{command[0]} ended with {done.returncode}"

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return [said for said in pool.map(run, commands) if said]


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold the formatting.")
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--tools", type=pathlib.Path, help="folder with clang-format and ruff")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    files = files_of(root)
    violations = widths(root, files)
    found = [find_tool(root, name, arguments.tools) for name in ("clang-format", "ruff")]
    missing = [why for _, why in found if why]
    if not missing:
        violations += format_violations(root, files, found[0][0], found[1][0])
    if violations:
        print("\n".join(violations), "`make format` writes it.", sep="\n")
        return 1
    if missing:
        print(f"SKIPPED: no formatters: {'; '.join(missing)}")
        return 77
    print(f"{len(files)} files are formatted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
