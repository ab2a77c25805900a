#!/usr/bin/env python3
"""Checks that check_docs.py sees what it says that it sees: a small repository that is right, then one fault at a
time."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from blocks import all_blocks
from check_docs import HOW_TO_LINES, TO_BE_WRITTEN, Checker

PAGES = {
    "README.md": "See [the docs](docs/index.md).\n",
    "docs/index.md": "# Map\n[a](a.md#two-words), [b](how-to-add-b.md), [b](b.md), [codes](codes/)\n",
    "docs/a.md": "# A\n## Two words\n`src/x.cpp`, `src/*.cpp`, `src/<room>/y.cpp`, `zero/stage`, `/dev/null`, `/proc/<pid>/smaps`\n"  # noqa: E501
    "```text\n[not a link](nowhere.md) `src/not_there.cpp`\n```\n",
    "docs/how-to-add-b.md": "short\n",
    "docs/codes/README.md": "[A](A.md) [web](https://example.org/x)\n",
    "docs/codes/A.md": "text\n",
    "docs/b.md": "```sh\nmake it   # now\n# and\nmake 1 && make it\n```\n"
    "```cpp\n1;\n```\n```cmake\n2\n```\n~~~cpp\n```\n~~~\n```python\n```\n```json\n```\n",
    "src/x.cpp": "",
    "tests/it_test.py": "make it",
    "tests/docs/b.cpp": '#include "docs/b-1.cpp"\n  #include "docs/b-2.cpp"\n',
    "tests/package/consumer/CMakeLists.txt": "include(${BLOCKS}/docs/b-1.cmake)\n",
}
COMMANDS = {"make it": ("tests/it_test.py", "make it"), "make 1": ("tests/it_test.py", "make")}


class CheckDocs(unittest.TestCase):
    def violations(self, changes: dict[str, str | None], commands: dict[str, tuple[str, str]] = COMMANDS) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**PAGES, **changes}.items():
                if text is None:
                    continue
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            return Checker(root, commands).run()

    def expect(
        self, changes: dict[str, str | None], place: str, commands: dict[str, tuple[str, str]] = COMMANDS
    ) -> None:
        found = self.violations(changes, commands)
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(place), found)

    def added(self, text: str) -> dict[str, str | None]:
        return {"docs/a.md": PAGES["docs/a.md"] + text}

    def test_a_right_repository_has_no_violation(self) -> None:
        self.assertEqual(self.violations({}), [])

    def test_proofs(self) -> None:
        self.assertEqual(self.violations(self.added("`tests/it_test.py: make`\n")), [])
        self.expect(self.added("`tests/it_test.py: mak`\n"), "docs/a.md:7: proof")
        self.expect(self.added("`tests/none.py: make`\n"), "docs/a.md:7: proof")
        self.assertEqual(self.violations(self.added("`tests/it_test.py: make it`\n")), [])
        self.expect(self.added("`tests/it_test.py: make its`\n"), "docs/a.md:7: proof")

    def test_rows_that_stand_twice(self) -> None:
        row = "| a | `tests/it_test.py: make` |\n"
        self.assertEqual(self.violations(self.added(row + "| b | `tests/it_test.py: make` |\n| a |\n| a |\n")), [])
        self.expect(self.added(row * 2), "docs/a.md:8: twice")

    def test_links(self) -> None:
        self.expect(self.added("[x](missing.md)\n"), "docs/a.md:7: link")
        self.expect(self.added("[x](../../outside.md)\n"), "docs/a.md:7: link")
        self.expect(self.added("[x](index.md#nothing)\n"), "docs/a.md:7: link")
        self.expect({"README.md": "[x](docs/none.md)\n"}, "README.md:1: link")

    def test_paths(self) -> None:
        self.expect(self.added("`src/gone.cpp`\n"), "docs/a.md:7: path")
        self.expect(self.added("`src/none_*.cpp`\n"), "docs/a.md:7: path")
        self.expect({"src/x.cpp": None, "src/y.cpp": ""}, "docs/a.md:3: path")

    def test_files_to_be_written(self) -> None:
        page, files = next(iter(TO_BE_WRITTEN.items()))
        name = next(file for file in sorted(files) if file.endswith(".cpp"))
        index = {"docs/index.md": PAGES["docs/index.md"] + f"[x]({page.removeprefix('docs/')})\n", page: f"`{name}`\n"}
        self.assertEqual(self.violations(index), [])
        self.expect({**index, name: ""}, f"{page}:1: path")

    def test_length_of_how_to_pages(self) -> None:
        self.assertEqual(self.violations({"docs/how-to-add-b.md": "line\n" * (HOW_TO_LINES - 1)}), [])
        self.expect({"docs/how-to-add-b.md": "line\n" * HOW_TO_LINES}, f"docs/how-to-add-b.md:{HOW_TO_LINES}: short")

    def test_paths_of_a_machine(self) -> None:
        for path in ("/home/me/x", "/tmp/x", "/usr/lib"):
            self.expect(self.added(f"look at {path}\n"), "docs/a.md:7: machine")
        self.expect(self.added("```text\ncd /root\n```\n"), "docs/a.md:8: machine")

    def test_fences(self) -> None:
        self.expect(self.added("```text\ncode\n"), "docs/a.md:7: fence")
        self.expect(self.added("> ```text\n"), "docs/a.md:7: fence")

    def test_blocks_that_no_test_runs(self) -> None:
        for language in ("", "bash", "c++"):
            self.expect(self.added(f"\n```{language}\ncode\n```\n"), "docs/a.md:8: block")
        self.expect(self.added("```cpp\n```\n"), "docs/a.md:7: block")
        self.expect(
            {"tests/docs/b.cpp": '#include "docs/b-1.cpp"\n// #include "docs/b-2.cpp"\n'}, "docs/b.md:12: block"
        )
        self.expect({"tests/package/consumer/CMakeLists.txt": None}, "docs/b.md:9: block")
        self.expect(self.added("```sh\nmake it\nmake 2  # make it\n```\n"), "docs/a.md:7: block")

    def test_commands_without_a_test_or_a_page(self) -> None:
        self.expect({"tests/it_test.py": "make"}, "tests/it_test.py:1: block")
        self.expect({}, "tests/gone.py:1: block", {**COMMANDS, "make it": ("tests/gone.py", "make it")})
        self.expect({}, "tests/it_test.py:1: block", {**COMMANDS, "make all": ("tests/it_test.py", "make")})

    def test_blocks_have_their_text(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "docs").mkdir()
            (pathlib.Path(folder) / "README.md").write_text("a\n```cpp\n1;\n```\n~~~cpp\n```\n~~~\n")
            self.assertEqual(
                [(block.file, block.line, block.text) for block in all_blocks(pathlib.Path(folder))],
                [("README-1.cpp", 2, "1;\n"), ("README-2.cpp", 5, "```\n")],
            )

    def test_pages_without_a_link(self) -> None:
        self.expect({"docs/c.md": "alone\n"}, "docs/c.md:1: reach")


if __name__ == "__main__":
    unittest.main()
