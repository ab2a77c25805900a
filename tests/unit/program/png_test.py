#!/usr/bin/env python3
"""`zeroth schedule --png` draws by Python's matplotlib, and says so where that is missing.

usage: png_test.py ZEROTH
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ZEROTH = ""


def draw(file: pathlib.Path, python: str) -> subprocess.CompletedProcess[str]:
    command = [ZEROTH, "schedule", "zb-v", "--stages", "3", "--micro", "6", "--png", str(file)]
    environment = dict(os.environ, ZEROTH_PYTHON=python)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


class PngTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_the_picture_is_a_png(self) -> None:
        file = self.folder / "step.png"
        result = draw(file, sys.executable)
        if importlib.util.find_spec("matplotlib") is None:
            self.assertEqual(result.returncode, 77)
            return
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn("step 38, bubble 0", result.stdout)  # the command prints the rest as well
        self.assertEqual(file.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

    def test_a_python_without_matplotlib_is_named(self) -> None:
        python = self.folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
        python.chmod(0o755)
        result = draw(self.folder / "step.png", str(python))
        self.assertEqual(result.returncode, 77)
        self.assertIn("[ENVIRONMENT] a PNG needs Python's matplotlib", result.stderr)
        self.assertIn("--svg FILE needs nothing", result.stderr)

    def test_no_python_is_an_error(self) -> None:
        result = draw(self.folder / "step.png", str(self.folder / "none"))
        self.assertEqual(result.returncode, 77)
        self.assertIn("no Python could be started", result.stderr)


if __name__ == "__main__":
    ZEROTH = sys.argv.pop(1)
    unittest.main()
