"""examples/hf_gpt2: a Hugging Face model in an ordinary loop, with the same bits at every stage and the numbers of
plain torch. examples/tensor_sequence: one that ranks share, with the losses of one process."""

from __future__ import annotations

import pathlib
import subprocess
import tempfile
import unittest

import forked
import job
import tier

forked.preload(
    "transformers",
    "transformers.generation",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
EXAMPLES = job.HERE.parents[1] / "examples"
TRAIN = EXAMPLES / "hf_gpt2/train.py"
SHARED = EXAMPLES / "tensor_sequence/train.py"
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

    def losses(self, ranks: int, *arguments: str) -> list[float]:
        """Of the example whose model ranks share."""
        small = ["--layers", "1", "--size", "32", "--length", "30", "--steps", "4", "--every", "2", "--batch", "2"]
        command = [*forked.python(), str(SHARED), self.folder, "--dtype", "float64", *small, *arguments]
        started = command if ranks == 1 else [job.RUN, "-n", str(ranks), *command]
        done = subprocess.run(started, capture_output=True, text=True, timeout=job.TIME_LIMIT_S, check=False)
        self.check(done)
        return [float(line.split()[-3]) for line in done.stdout.splitlines() if " loss " in line]

    def test_a_model_that_ranks_share_has_the_losses_of_one_process(self) -> None:
        self.assertLessEqual(job.statements(SHARED), 40)
        alone = self.losses(1, "--tp", "1", "--sp", "1", "--dp", "2")
        self.assertEqual(len(alone), 2)
        for mesh in (["--sp", "1"], ["--dp", "2"]):  # dp=2 x tp=2; sp=2 x tp=2, two batches one after the other
            for loss, expected in zip(self.losses(4, *mesh), alone, strict=True):
                self.assertAlmostEqual(loss, expected, delta=1e-6)  # alone it is transformers' own, in float32

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
