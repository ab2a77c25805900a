"""Every Python block of the README and of docs/python.md runs, in its order; so do the examples."""

from __future__ import annotations

import difflib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import job

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/python.md")


class DocsTest(unittest.TestCase):
    def test_code_blocks(self) -> None:
        for page in PAGES:
            with self.subTest(page=page), tempfile.TemporaryDirectory() as folder:
                blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
                self.assertTrue(blocks)
                done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=folder, capture_output=True, text=True,
                                      timeout=120, check=False)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_loop_and_its_twin_differ_in_few_lines_and_in_no_digit(self) -> None:
        folder = ROOT / "examples/torch_loop"
        plain = subprocess.run([sys.executable, str(folder / "plain.py")], capture_output=True, text=True, timeout=120, check=True)
        for ranks in (1, 2):  # the same data on every rank, so the mean is that of one
            done = subprocess.run([job.RUN, "-n", str(ranks), sys.executable, str(folder / "with_zeroth.py")],
                                  env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn(plain.stdout.strip(), done.stdout)
        bodies = [re.sub(r'^""".*?"""\n', "", (folder / name).read_text(), flags=re.DOTALL).splitlines()
                  for name in ("plain.py", "with_zeroth.py")]
        changed = [line for line in difflib.ndiff(*bodies) if line[0] in "+-" and line[1:].strip()]
        self.assertEqual(len(changed), 4, changed)  # import, engine instead of optimizer, no zero_grad


if __name__ == "__main__":
    unittest.main(verbosity=2)
