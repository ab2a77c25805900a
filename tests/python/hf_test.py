"""examples/hf_gpt2: a Hugging Face model in an ordinary loop, with the same bits at every stage and the numbers of
plain torch."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import unittest

import forked
import job
import tier

forked.preload("transformers", "transformers.models.gpt2.modeling_gpt2", "transformers.generation")
TRAIN = job.HERE.parents[1] / "examples/hf_gpt2/train.py"
TEXT = "It was a bright cold day in April, and the clocks of all ranks were striking thirteen.\n"


class HuggingFaceTest(unittest.TestCase):
    folder: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        pathlib.Path(cls.folder, "below").mkdir()
        for number in range(8):
            pathlib.Path(cls.folder, "below" if number % 2 else "", f"{number}.txt").write_text(
                f"{number}. {TEXT}" * 10
            )

    def check(self, done: subprocess.CompletedProcess[str]) -> None:
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_example_is_short(self) -> None:
        self.assertLessEqual(job.statements(TRAIN), 40)

    def test_stages_and_checkpointing_change_no_bit_on_two_ranks(self) -> None:
        self.check(job.run(2, "hf_rank.py", "stages", self.folder))

    @tier.long
    def test_a_bare_process_trains_like_plain_torch(self) -> None:
        self.check(
            subprocess.run(
                [*forked.python(), str(job.HERE / "hf_rank.py"), "plain", self.folder],
                capture_output=True,
                text=True,
                timeout=job.TIME_LIMIT_S,
                check=False,
            )
        )


if __name__ == "__main__":
    tier.main()
