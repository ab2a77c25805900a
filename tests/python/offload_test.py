"""Optimizer states and parameters in files, through Python: bits, checkpoints, refusals; and the main job."""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile
import unittest
import unittest.mock

import job
import tier


class Offload(job.RankTest):
    def test_states_in_files_have_the_bits_of_states_in_memory(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cases = ("same_bits", "checkpoints", "refusals", "update_times", "reports", "caught")
            self.run_well(2, "offload_rank.py", folder, *cases)

    def test_an_update_that_fails_stops_all_ranks(self) -> None:
        sites = ("engine.update", "engine.publish", "engine.committed")
        for site in sites if tier.LONG else sites[:1]:
            for where in ((), ("files",)):
                with self.subTest(site=site, where=where), tempfile.TemporaryDirectory() as folder:
                    faults = {"ZEROTH_FAULTS": f"{site}@rank=1,hit=3:throw"}
                    with unittest.mock.patch.dict(os.environ, faults):
                        self.run_well(2, "offload_rank.py", folder, "failing", *where)


class MainJob(unittest.TestCase):
    @tier.long
    def test_make_train_offload_has_the_losses_of_memory_in_both_languages(self) -> None:
        for language in ([], ["--cpp"]):
            with self.subTest(language), tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [str(job.HERE.parents[1] / "tools/train-offload"), *language, "--folder", folder, "--steps", "6"],
                    env=os.environ,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=600,
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                self.assertIn("is the same, bit for bit", done.stdout)
                self.assertEqual(list(pathlib.Path(folder).iterdir()), [])


if __name__ == "__main__":
    tier.main()
