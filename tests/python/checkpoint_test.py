"""Engine.save() and Engine.load(): the run that goes on is the one that was saved."""

from __future__ import annotations

import json
import pathlib
import tempfile
import unittest

import job
import torch

STEPS = 3
"""after the load"""


class Checkpoints(job.RankTest):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name, "runs")

    def lines(self, ranks: int, what: str, stage: int, *rest: str) -> list[str]:
        out = self.run_well(ranks, "checkpoint_rank.py", what, str(self.folder), str(stage), *rest)
        return sorted(line for line in out.splitlines() if " step " in line)

    def test_the_next_steps_are_those_of_the_run_that_went_on(self) -> None:
        for save, load, rest in [(3, 1, ()), (0, 3, ()), (2, 3, ("bfloat16",))]:
            with self.subTest(saved=save, loaded=load, dtype=rest):
                self.folder = self.folder.with_name(f"runs-{save}-{load}")
                whole = self.lines(2, "whole", save, *rest)
                self.assertEqual(len(whole), 2 * STEPS)
                self.assertEqual(self.lines(2, "resume", load, *rest), whole)

    def test_other_worlds_load_the_same_weights(self) -> None:
        from safetensors import safe_open

        self.lines(2, "whole", 3)
        loaded = []
        for ranks, stage in [(2, 3), (1, 0), (3, 2)]:
            self.run_well(ranks, "checkpoint_rank.py", "weights", str(self.folder), str(stage))
            with safe_open(self.folder / f"weights-{ranks}-{stage}.safetensors", "pt") as file:
                loaded.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        for other in loaded[1:]:
            self.assertEqual(other.keys(), loaded[0].keys())
            for name, tensor in loaded[0].items():
                self.assertTrue(torch.equal(tensor, other[name]), name)
        # And so does plain Python: ranges of the logical tensor, in the files of the ranks.
        checkpoint = self.folder / "step-00000003"
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        param = next(param for param in manifest["params"] if param["name"] == "blocks.1.0.weight")
        whole = torch.zeros(12 * 12)
        for about in manifest["files"]:
            with safe_open(checkpoint / about["name"], "pt") as file:
                ranges = json.loads(file.metadata()["zeroth"])
                key = "blocks.1.0.weight/weight"
                if key in ranges:
                    begin, end = ranges[key]["range"]
                    whole[begin:end] = file.get_tensor(key)
        self.assertTrue(torch.equal(whole.reshape(param["shape"]), loaded[0]["blocks.1.0.weight"]))

    def test_what_cannot_be_is_refused_on_all_ranks(self) -> None:
        out = self.run_well(2, "checkpoint_rank.py", "refusals", str(self.folder), "3")
        codes = ["CHECKPOINT", "USAGE", "USAGE", "IO", "USAGE", "USAGE"]
        for rank in "01":
            said = [line.split()[-1] for line in out.splitlines() if f"{rank} refused " in line]
            self.assertEqual(said, codes)


if __name__ == "__main__":
    unittest.main()
