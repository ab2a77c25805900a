"""`zeroth ckpt convert` beside the engine: what plain torch loads is what the engine had, and what comes back goes on
with the same bits."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tarfile
import tempfile

import forked
import job
import tier

CONVERTED = ("torch", "dcp", "zeroth")
"""forms that keep everything that the next losses depend on"""


class Conversions(job.RankTest):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_calls(self, ranks: int, *calls: tuple[str, str, int, str]) -> list[str]:
        """Each is what, a folder inside the test's, a stage and a dtype; all in one job."""
        arguments = [f"{what},{self.folder / folder},{stage},{dtype}" for what, folder, stage, dtype in calls]
        return self.run_well(ranks, "convert_rank.py", *arguments).splitlines()

    def look(self, *arguments: str) -> None:
        """The part of the test that needs torch, in a process of its own."""
        done = subprocess.run(
            [*forked.python(), str(job.HERE / "convert_look.py"), str(self.folder), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_plain_torch_reads_it_and_what_comes_back_goes_on_with_the_same_bits(self) -> None:
        kinds = [("f", "float32", 3), ("b", "bfloat16", 1)]
        went_on = self.run_calls(2, *[("whole", name, stage, dtype) for name, dtype, stage in kinds])
        self.look("out", *[name for name, _, _ in kinds])
        back = self.run_calls(
            2,
            *[("resume", f"{name}-{form}", 2, dtype) for name, dtype, _ in kinds for form in CONVERTED],
            *[("weights", f"{name}-hf", 3, dtype) for name, dtype, _ in kinds],
        )
        self.look("back", *[name for name, _, _ in kinds])
        for rank in "01":
            expected = [line for line in went_on if f"{rank} step " in line]
            self.assertEqual(len(expected), 3 * len(kinds))
            found = [line for line in back if f"{rank} step " in line]
            self.assertEqual(found, [*expected[:3] * len(CONVERTED), *expected[3:] * len(CONVERTED)])

    def test_a_run_of_deepspeed_goes_on(self) -> None:
        with tarfile.open(job.HERE / "golden/of_others.tar.xz") as archive:
            archive.extractall(self.folder, filter="data")
        source = self.folder / "2-ranks-stage-2-fp32"
        self.look("deepspeed", source.name)
        out = self.run_calls(2, *[("deepspeed", f"{source.name}-zeroth", stage, "float32") for stage in (1, 3)])
        expected = json.loads((source / "losses.json").read_text())
        for rank in (0, 1):
            found = [float(line.split()[-1]) for line in out if f"{rank} loss " in line]
            self.assertEqual(found[:2], found[2:])
            for ours, theirs in zip(found[:2], expected[rank], strict=True):
                self.assertLess(abs(ours - theirs), 1e-5 * theirs)  # equal where the golden file was made


if __name__ == "__main__":
    tier.main()
