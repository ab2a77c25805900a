"""Engine.save() and Engine.load(): the run that goes on is the one that was saved."""

from __future__ import annotations

import json
import pathlib
import tempfile
import unittest

import checkpoint_cases
import job
import torch

import zeroth

STEPS = 3
"""after the load"""

SavesAgain = checkpoint_cases.SavesAgain
HyperParameters = checkpoint_cases.HyperParameters
Pretrained = checkpoint_cases.Pretrained
CallersValues = checkpoint_cases.CallersValues
Compiled = checkpoint_cases.Compiled


class Checkpoints(job.RankTest):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_calls(self, ranks: int, *calls: tuple[str, str, int, str]) -> list[str]:
        """Each is what, a folder inside the test's, a stage and a dtype; all in one job."""
        arguments = [f"{what},{self.folder / folder},{stage},{dtype}" for what, folder, stage, dtype in calls]
        return self.run_well(ranks, "checkpoint_rank.py", *arguments).splitlines()

    def test_the_next_steps_are_those_of_the_run_that_went_on(self) -> None:
        cases = [("a", 3, 1, "float32"), ("b", 0, 3, "float32"), ("c", 2, 3, "bfloat16")]
        whole = self.run_calls(2, *[("whole", folder, stage, dtype) for folder, stage, _, dtype in cases])
        resumed = self.run_calls(2, *[("resume", folder, stage, dtype) for folder, _, stage, dtype in cases])
        of_rank = [[line for line in whole if f"{rank} step " in line] for rank in "01"]
        self.assertEqual([len(lines) for lines in of_rank], [len(cases) * STEPS] * 2)
        for rank, expected in zip("01", of_rank, strict=True):
            self.assertEqual([line for line in resumed if f"{rank} step " in line], expected)

    def test_a_save_behind_the_training_is_that_of_its_step(self) -> None:
        whole = self.run_calls(2, ("whole", "a", 2, "bfloat16"))
        behind = self.run_calls(2, ("behind", "b", 2, "bfloat16"), ("left", "c", 1, "float32"))
        for rank in "01":
            of_rank = [[line for line in lines if f"{rank} step " in line] for lines in (whole, behind)]
            self.assertEqual(of_rank[0], of_rank[1])
        for step in range(1, 7):
            folders = [self.folder / f"b{suffix}" / f"step-{step:08}" for suffix in ("", "-blocking")]
            for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
                self.assertEqual((folders[0] / name).read_bytes(), (folders[1] / name).read_bytes(), (step, name))
            texts = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
            for text in texts:
                del text["run"], text["digest"]
            self.assertEqual(texts[0], texts[1])
        # One that was under way when the program ended has been finished.
        self.assertTrue((self.folder / "c" / "step-00000002" / "manifest.json").exists())
        self.assertEqual([path.name for path in (self.folder / "c").glob("*tmp*")], [])

    def test_other_worlds_load_the_same_weights(self) -> None:
        from safetensors import safe_open

        self.run_calls(2, ("whole", "a", 3, "float32"), ("weights", "a", 3, "float32"))
        loaded = []
        for ranks, stage in [(2, 3), (1, 0), (3, 2)]:
            if ranks != 2:
                self.run_calls(ranks, ("weights", "a", stage, "float32"))
            with safe_open(self.folder / "a" / f"weights-{ranks}-{stage}.safetensors", "pt") as file:
                loaded.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        for other in loaded[1:]:
            self.assertEqual(other.keys(), loaded[0].keys())
            for name, tensor in loaded[0].items():
                self.assertTrue(torch.equal(tensor, other[name]), name)
        # And so does plain Python: ranges of the logical tensor, in the files of the ranks.
        checkpoint = self.folder / "a" / "step-00000003"
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
        calls = [("again", f"again-{stage}", stage, "bfloat16") for stage in (0, 3)]
        out = self.run_calls(2, ("refusals", "a", 3, "float32"), *calls)
        codes = ["CHECKPOINT", "USAGE", "USAGE", "IO", *["MISMATCH"] * 3, "USAGE", "USAGE"]
        for rank in "01":
            said = [line.split()[-1] for line in out if f"{rank} refused " in line]
            self.assertEqual(said, codes)
            said = [line.split()[-1] for line in out if f"{rank} again refused " in line]
            self.assertEqual(said, ["0"] * 4 + ["3"] * 4)

    def test_weights_in_one_order_of_memory_load_into_another(self) -> None:
        calls = [
            ("orders", f"orders-{stage}-{dtype}", stage, dtype) for stage, dtype in [(0, "float32"), (3, "bfloat16")]
        ]
        expected = [
            f"[0] orders {stage} {ordered}" for stage in (0, 3) for ordered in ("True format 2", "False format 1")
        ]
        self.assertEqual(self.run_calls(2, *calls), expected)
        for path in self.folder.glob("orders-*/step-*"):
            self.assertEqual(zeroth.ckpt.verify(path), [], path)

    def test_a_step_goes_on_between_its_micro_steps(self) -> None:
        def make(stage: int) -> zeroth.Engine:
            torch.manual_seed(7)
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
            settings = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 3}
            return zeroth.Engine(model, settings, log_level="off")

        def train(engine: zeroth.Engine, micro_steps: int) -> list[float]:
            norms = []
            for _ in range(micro_steps):
                engine.backward(engine(torch.randn(4, 8)).square().mean())
                norms.append(engine.step().grad_norm)
            return norms

        engine = make(2)
        train(engine, 5)
        path = engine.save(self.folder / "micro")
        self.assertTrue(path.endswith("step-00000001-2"))
        expected = train(engine, 7)
        for stage in (0, 3):
            engine = make(stage)
            loaded = engine.load(self.folder / "micro")
            self.assertEqual((loaded.step, loaded.micro_step, loaded.random_state), (1, 2, True))
            self.assertEqual(train(engine, 7), expected)

    def test_an_adapter_is_small_beside_its_frozen_base_and_names_may_change(self) -> None:
        def make() -> tuple[torch.nn.Module, zeroth.Engine]:
            torch.manual_seed(7)
            base = torch.nn.Linear(64, 64).requires_grad_(False)
            model = torch.nn.Sequential(base, torch.nn.Linear(64, 2, bias=False), torch.nn.BatchNorm1d(2))
            return model, zeroth.Engine(model, {"zero_optimization": {"stage": 3}}, log_level="off")

        folder = self.folder / "adapter"
        model, engine = make()
        for _ in range(4):
            engine.backward(engine(torch.randn(4, 64)).square().mean())
            engine.step()
            path = engine.save(folder, frozen="once", keep_last=2)
        sizes = [
            (folder / f"step-0000000{step}" / "rank-00000.safetensors").stat().st_size
            for step in (1, 3, 4)  # the first one stays
        ]
        self.assertLess(sizes[1], sizes[0] / 3)
        self.assertEqual(sorted(entry.name for entry in folder.iterdir())[1:], [f"step-0000000{n}" for n in (1, 3, 4)])
        engine.close()
        expected = model.state_dict()

        inner, other = make()
        other.close()
        torch.nn.init.zeros_(inner[0].weight)  # type: ignore[index, arg-type]
        wrapped = torch.nn.ModuleDict({"model": inner})
        wrapped.forward = lambda x: wrapped["model"](x)  # type: ignore[method-assign]
        engine = zeroth.Engine(wrapped, {"zero_optimization": {"stage": 1}}, log_level="off")
        with self.assertRaisesRegex(
            zeroth.Error, "USAGE.*no parameter or buffer of this name.*did you mean model.0.weight"
        ):
            engine.load(path, rename={"0.weight": "model.0.weigt"})
        loaded = engine.load(path, rename={name: f"model.{name}" for name in expected})
        self.assertEqual((loaded.missing, loaded.unexpected, loaded.step), ([], [], 4))
        for name, value in wrapped.state_dict().items():
            self.assertTrue(torch.equal(value, expected[name.removeprefix("model.")]), name)
        with self.assertRaisesRegex(zeroth.Error, "USAGE.*frozen.*copy.*once"):
            engine.save(folder / "b", frozen="never")  # type: ignore[call-overload]
        engine.close()


if __name__ == "__main__":
    unittest.main()
