#!/usr/bin/env python3
"""Plants violations of every rule in copies of the sources and of made-up libraries, and sees the checks turn red.

usage: self_test.py ROOT CXX
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import unittest

import check_format
from check_includes import TREES

HERE = pathlib.Path(__file__).resolve().parent
ROOT = pathlib.Path(sys.argv[1])
CXX = sys.argv[2]
LEVELS = "base=0,device=1,hosts=1,kernels=2,comm=3,shard=4,optim=4,zero=5,engine=6,libtorch=7,launcher=7"

# (rule, file, line appended to it). Files that are not there are made.
PLANTED = [
    ("layer", "include/zeroth/base/text.h", "#include <zeroth/device/memory.h>"),
    ("layer", "src/comm/planted.cpp", "#include <zeroth/shard/flat_layout.h>"),
    ("layer", "csrc/kernels/adamw/planted.cpp", "#include <zeroth/comm/communicator.h>"),
    ("layer", "src/shard/planted.cpp", '#include "zero/planted.h"'),
    ("layer", "src/hosts/planted.cpp", '#include "launcher/options.h"'),
    ("layer", "src/launcher/planted.cpp", "#include <zeroth/libtorch/engine.h>"),
    ("layer", "src/surprise/planted.cpp", "int x;"),
    ("torch", "src/engine/planted.cpp", "#include <ATen/core/Tensor.h>"),
    ("torch", "csrc/kernels/planted.cpp", "#include <c10/util/Half.h>"),
    ("torch", "tests/unit/zero/planted_test.cpp", "#include <torch/torch.h>"),
    ("vendor", "include/zeroth/base/log.h", "#include <spdlog/spdlog.h>"),
    ("vendor", "include/zeroth/engine/planted.h", "#include <nlohmann/json.hpp>"),
    ("vendor", "include/zeroth/engine/planted.h", "#include <CLI/CLI.hpp>"),
    ("vendor", "include/zeroth/base/hmac.h", "#include <openssl/evp.h>"),
    ("private", "include/zeroth/device/memory.h", '#include "device/arena.h"'),
    ("private", "src/device/planted.cpp", '#include "../base/planted.h"'),
    ("if", "src/device/planted.cpp", "#if defined(__AVX2__)"),
    ("if", "include/zeroth/base/foreign.h", "#ifdef __cplusplus"),
    ("if", "tests/unit/base/planted_test.cpp", "  #  ifndef NDEBUG"),
    ("stage", "src/zero/planted.cpp", "bool f(int zero_stage) { return zero_stage == 3; }"),
    ("stage", "src/engine/planted.cpp", "bool f(C c) { return 3 <= c.options.zero_stage; }"),
    ("stage", "src/engine/planted.cpp", "void f(C c) { switch (c.zero_stage) {} }"),
    ("stage", "src/engine/planted.cpp", "void f(C c) { if (g(c.zero_stage)) h(); }"),
    ("stage", "src/engine/planted.cpp", "bool f(C c) { return c.zero.stage >= 2; }"),
    ("stage", "src/engine/planted.cpp", "bool f(C* c) { return 2 < c->zero_optimization->stage; }"),
    ("stage", "src/libtorch/planted.cpp", "int f(C c) { return c.zero_stage ? 1 : 0; }"),
]
# What looks like a violation and is none.
INNOCENT = [
    ("src/engine/planted.cpp", "#include <zeroth/base/text.h>\n#include <zeroth/zero/plan.h>"),
    ("src/engine/planted.cpp", "// #include <torch/torch.h>\n/* #if 0\n#if 1 */"),
    ("src/engine/planted.cpp", '// zero_stage == 3 is decided in the plan\nauto s = "zero_stage == 3";'),
    ("src/engine/planted.cpp", 'auto r = R"x(\n#if 1\nzero_stage > 2\n)x";'),
    (
        "src/engine/planted.cpp",
        "void f(C c) { out << c.zero_stage << '\\n'; auto p = zero_plan(c.zero.stage, {\"dp\"}); }",
    ),
    ("src/engine/planted.cpp", "void f(C* c) { int zero_stage = c->zero_stage; }"),
    ("src/libtorch/planted.cpp", "#include <ATen/core/Tensor.h>"),
    ("tests/unit/libtorch/planted_test.cpp", "#include <torch/torch.h>"),
    ("examples/gpt_cpp/planted.cpp", "bool f(int zero_stage) { return zero_stage <= 3; }"),
]


class Includes(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.copy = pathlib.Path(folder.name)
        for tree in TREES:
            (self.copy / tree).mkdir()

    def check(self, file: str, line: str) -> tuple[int, str]:
        """Of a tree of this file alone, with the line at its end."""
        path, real = self.copy / file, ROOT / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((real.read_text() if real.exists() else "") + "\n" + line + "\n")
        command = [sys.executable, HERE / "check_includes.py", self.copy, "--levels", LEVELS]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        path.unlink()
        return done.returncode, done.stdout

    def test_planted_violations_are_found(self) -> None:
        for rule, file, line in PLANTED:
            with self.subTest(rule=rule, file=file, line=line):
                code, output = self.check(file, line)
                self.assertEqual(code, 1)
                self.assertRegex(output, rf"(?m)^{file}:\d+: {rule}: ")

    def test_innocent_lines_pass(self) -> None:
        for file, line in INNOCENT:
            with self.subTest(file=file, line=line):
                code, output = self.check(file, line)
                found = [text for text in output.splitlines() if text.startswith(file)]
                self.assertEqual(found, [])


class Symbols(unittest.TestCase):
    """Libraries of three rooms: base, comm, and zero above them."""

    SOURCES = {
        "base": "namespace zeroth { inline int shared() { return 1; } int base() { return shared(); } }",
        "comm": "namespace zeroth { int base(); int comm() { return base(); } }",
        "zero": "namespace zeroth { inline int shared() { return 1; } int comm(); int zero() { return comm() + shared(); } }",  # noqa: E501
    }

    def check(self, object_name: str = "{}.o", **planted: str) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            libraries = []
            for room, source in self.SOURCES.items():
                source_file, object_file, library = (
                    folder / name.format(room) for name in ("{}.cpp", object_name, "{}.a")
                )
                source_file.write_text(f"{source}\n{planted.get(room, '')}\n")
                subprocess.run([CXX, "-O0", "-c", source_file, "-o", object_file], check=True)
                subprocess.run(["ar", "qc", library, object_file], check=True)
                libraries.append(f"{room}={library}")
            command = [sys.executable, HERE / "check_symbols.py", "--levels", LEVELS, "--optimised", *libraries]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout

    def test_clean_libraries_pass(self) -> None:
        self.assertEqual(self.check()[0], 0)

    def test_a_symbol_from_above_is_found(self) -> None:
        code, output = self.check(base="namespace zeroth { int zero(); int planted() { return zero(); } }")
        self.assertEqual(code, 1)
        self.assertIn("base (level 0): layer: wants zeroth::zero() of zero (level 5)", output)

    def test_a_symbol_of_torch_is_found(self) -> None:
        planted = {
            "torch": "namespace torch::autograd { void run(); }  void planted() { torch::autograd::run(); }",
            "at": "namespace at { struct T { int f() const; }; }  int planted(at::T* t) { return t->f(); }",
            "c10": "namespace c10 { struct T { T(); }; }  void planted() { c10::T t; }",
        }
        for name, source in planted.items():
            with self.subTest(name=name):
                code, output = self.check(zero=source)
                self.assertEqual(code, 1)
                self.assertRegex(output, f"zero: torch: wants {name}::")

    def test_a_function_of_mpi_is_found(self) -> None:
        code, output = self.check(comm='extern "C" int MPI_Finalize(); int planted() { return MPI_Finalize(); }')
        self.assertEqual(code, 1)
        self.assertEqual(output, "comm: mpi: wants MPI_Finalize\n")

    def test_a_library_of_mpi_is_found(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for library, links in (
                ("libmpi.so", []),
                ("libneeds.so", ["-L", folder, "-Wl,--no-as-needed", "-lmpi"]),
                ("libfree.so", []),
            ):
                soname = [f"-Wl,-soname,{library}.40"]
                subprocess.run(
                    [
                        CXX,
                        "-shared",
                        "-fPIC",
                        "-x",
                        "c++",
                        "/dev/null",
                        "-o",
                        folder / library,
                        *soname,
                        "-x",
                        "none",
                        *links,
                    ],
                    check=True,
                )
            files = [folder / "libneeds.so", folder / "libfree.so"]
            done = subprocess.run(
                [sys.executable, HERE / "check_needed.py", *files], capture_output=True, text=True, timeout=60
            )
        self.assertEqual((done.returncode, done.stdout), (1, f"{files[0]}: needs libmpi.so.40\n"))

    def test_an_inline_function_in_a_wide_object_is_found(self) -> None:
        code, output = self.check("{}_avx2.cpp.o")
        self.assertEqual(code, 1)
        self.assertIn("base: wide: base_avx2 defines the inline function zeroth::shared()", output)

    def test_std_vector_at_is_not_torch(self) -> None:
        source = "namespace own { struct B { int at(int); }; }  int planted(own::B* b) { return b->at(1); }"
        self.assertEqual(self.check(zero=source), (0, "the layers hold in 3 rooms\n"))


LONG = "x" * 121
WIDE = {
    "a.cpp": ["// " + LONG, f'auto text = "{LONG}";', f'auto raw = R"(a\nb)";\nint {LONG};'],
    "a.inl": ["// " + LONG],
    "CMakeLists.txt": ["# " + LONG],
    "cmake/A.cmake": [f"set(a {LONG})"],
    "cmake/A.cmake.in": ["# " + LONG],
    "tools/setup": [f"#!/usr/bin/env bash\n# {LONG}"],
    "Makefile": [f"\t@echo {LONG}"],
    "docs/a.md": [LONG, f"```text\n{LONG}\n```\n{LONG}", f"- {LONG}", f"> {LONG}"],
}
NARROW = {
    "a.cpp": [f'auto raw = R"({LONG})";', f'auto raw = R"x(\n{LONG}\n)" \n)x";', "// " + "x" * 117],
    "docs/a.md": [f"| {LONG} |", f"# {LONG}", f"```text\n{LONG}\n```", f"~~~text\n```\n{LONG}\n~~~"],
    "a.json": [LONG],
    "tests/fuzz/corpus/a": [LONG],
    "build/a.cpp": ["// " + LONG],
    "a.py": [f'"{LONG}"'],  # ruff's
}


class Format(unittest.TestCase):
    """A folder without git, with stand-ins for clang-format and ruff that find fault with files named bad."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name, "project")
        self.tools = pathlib.Path(folder.name, "bin")
        self.write("tools/requirements.txt", "clang-format==20.1.8\nruff==0.17.6\n")
        for name in ("clang-format", "ruff"):
            self.stand_in(name, "20.1.8" if name == "clang-format" else "0.17.6")

    def write(self, path: str, text: str) -> pathlib.Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def stand_in(self, name: str, version: str) -> None:
        self.tools.mkdir(exist_ok=True)
        program = self.tools / name
        program.write_text(
            f'#!/bin/sh\n[ "$1" != --version ] || {{ echo "{name} {version}"; exit 0; }}\n'
            f'case "$* $(ls)" in *{name}-bad*) echo "$*: not formatted"; exit 1;; esac\n'
        )
        program.chmod(0o755)

    def check(self) -> tuple[int, str]:
        command = [sys.executable, "-B", HERE / "check_format.py", self.root, "--tools", self.tools]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def widths(self, path: str, text: str) -> list[str]:
        file = self.write(path, f"{text}\n")
        found = check_format.widths(self.root, check_format.files_of(self.root))
        file.unlink()
        return found

    def test_wide_lines_are_found(self) -> None:
        for path, texts in WIDE.items():
            for text in texts:
                with self.subTest(path=path, text=text):
                    number = text.count("\n") + 1
                    self.assertEqual(self.widths(path, text), [f"{path}:{number}: width: more than 120 columns"])

    def test_lines_without_a_limit_pass(self) -> None:
        for path, texts in NARROW.items():
            for text in texts:
                with self.subTest(path=path, text=text):
                    self.assertEqual(self.widths(path, text), [])

    def test_what_the_tools_find_is_said(self) -> None:
        for name in ("clang-format", "ruff"):
            with self.subTest(name=name):
                file = self.write(f"{name}-bad.h", "int x;\n")
                code, output = self.check()
                file.unlink()
                self.assertEqual(code, 1)
                self.assertIn("not formatted", output)

    def test_without_the_tools_widths_alone_are_held(self) -> None:
        self.stand_in("ruff", "0.17.60")
        self.assertEqual(self.check(), (77, "SKIPPED: no formatters: ruff 0.17.6 is wanted, there is ruff 0.17.60\n"))
        (self.tools / "ruff").unlink()
        self.assertEqual(self.check(), (77, "SKIPPED: no formatters: ruff is not there\n"))
        self.write("Makefile", f"# {LONG}\n")
        self.assertEqual(self.check()[0], 1)


if __name__ == "__main__":
    sys.exit(unittest.main(argv=sys.argv[:1], verbosity=2))
