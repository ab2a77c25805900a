#!/usr/bin/env python3
"""Checks that check_docs.py sees what it says that it sees: a small repository that is right, then one fault at a time."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from check_docs import HOW_TO_LINES, TO_BE_WRITTEN, Checker

PAGES = {
    "README.md": "See [the docs](docs/index.md).\n",
    "docs/index.md": "# Map\n[a](a.md#two-words), [b](how-to-add-b.md), [codes](codes/)\n",
    "docs/a.md": "# A\n## Two words\n`src/x.cpp`, `src/*.cpp`, `src/<room>/y.cpp`, `zero/stage`, `/dev/null`, `/proc/<pid>/smaps`\n"
                 "```\n[not a link](nowhere.md) `src/not_there.cpp`\n```\n",
    "docs/how-to-add-b.md": "short\n",
    "docs/codes/README.md": "[A](A.md) [web](https://example.org/x)\n",
    "docs/codes/A.md": "text\n",
    "src/x.cpp": "",
}


class CheckDocs(unittest.TestCase):
    def violations(self, changes: dict[str, str | None]) -> list[str]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {**PAGES, **changes}.items():
                if text is None:
                    continue
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            return Checker(root).run()

    def expect(self, changes: dict[str, str | None], place: str) -> None:
        found = self.violations(changes)
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(place), found)

    def added(self, text: str) -> dict[str, str | None]:
        return {"docs/a.md": PAGES["docs/a.md"] + text}

    def test_a_right_repository_has_no_violation(self) -> None:
        self.assertEqual(self.violations({}), [])

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
        self.expect({"docs/how-to-add-b.md": "line\n" * HOW_TO_LINES}, "docs/how-to-add-b.md:40: short")

    def test_paths_of_a_machine(self) -> None:
        for path in ("/home/me/x", "/tmp/x", "/usr/lib"):
            self.expect(self.added(f"look at {path}\n"), "docs/a.md:7: machine")
        self.expect(self.added("```\ncd /root\n```\n"), "docs/a.md:8: machine")

    def test_fences(self) -> None:
        self.expect(self.added("```\ncode\n"), "docs/a.md:1: fence")

    def test_pages_without_a_link(self) -> None:
        self.expect({"docs/b.md": "alone\n"}, "docs/b.md:1: reach")


if __name__ == "__main__":
    unittest.main()
