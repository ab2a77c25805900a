"""zeroth.ckpt and `zeroth ckpt` on checkpoints of Zeroth, in one process and without an engine."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import unittest

import torch
from ckpt_case import Case, example, param

import zeroth.ckpt
from zeroth.ckpt import contents as parts


class Reading(Case):
    def test_what_was_written_is_read_by_name_state_and_range(self) -> None:
        wrote = example()
        path = zeroth.ckpt.write(wrote, self.folder / "runs")
        self.assertTrue(path.endswith("runs/step-00000003"))
        found = zeroth.ckpt.open(self.folder / "runs")
        self.assertEqual(found.names, ["embed.weight", "block.weight", "scale", "none", "base"])
        self.assertEqual((found.step, found.world_size, found.client_state["epoch"]), (3, 1, 2))
        for one in wrote.params:
            self.assertEqual(found.states(one.name), list(one.states))
            for state, lazy in one.states.items():
                self.equal({one.name: found.tensor(one.name, state)}, {one.name: lazy.read()})
        self.equal({"w": found.tensor("head.weight")}, {"w": found.tensor("embed.weight")})
        self.equal({"mean": found.buffer("mean")}, {"mean": wrote.buffers["mean"].read()})
        flat = wrote.param("embed.weight").states["exp_avg"].read().reshape(-1)
        self.equal({"s": found.slice("embed.weight", 4, 11, "exp_avg")}, {"s": flat[4:11]})
        self.equal({"s": torch.cat(list(found.pieces("embed.weight", "exp_avg", 8)))}, {"s": flat})
        self.assertEqual([found.param("base").trainable, found.param("base").updates], [False, 0])
        self.assertEqual(found.groups[0]["lr"], 0.1)
        self.assertEqual(zeroth.ckpt.verify(path), [])

    def test_what_is_not_there_is_refused_by_name(self) -> None:
        zeroth.ckpt.write(example(), self.folder)
        found = zeroth.ckpt.open(self.folder)
        self.refused("USAGE", "no such parameter", lambda: found.tensor("embed"))
        self.refused("USAGE", "exp_avg, exp_avg_sq", lambda: found.tensor("embed.weight", "momentum_buffer"))
        self.refused("USAGE", "elements of [0, 35)", lambda: found.slice("embed.weight", 30, 36))
        self.refused("USAGE", "no such buffer", lambda: found.buffer("scale"))
        self.refused("USAGE", "saved there before", lambda: zeroth.ckpt.write(example(), self.folder))
        self.refused("CHECKPOINT", "there is no checkpoint", lambda: zeroth.ckpt.open(self.folder / "other"))
        self.ckpt("ls", self.folder / "other", code=74)

    def test_a_list_says_what_is_whole_and_why_another_is_not(self) -> None:
        for step in (1, 2, 30):
            zeroth.ckpt.write(example(step=step), self.folder)
        os.truncate(self.folder / "step-00000002/rank-00000.safetensors", 100)
        (self.folder / "step-00000030/manifest.json").unlink()
        listed = self.json_of("ls", self.folder)["checkpoints"]
        self.assertEqual([(one["step"], one["whole"]) for one in listed], [(30, False), (2, False), (1, True)])
        self.assertIn("has 100 bytes instead of", listed[1]["why"])
        self.assertEqual((listed[2]["optimizer"], listed[2]["elements"], listed[2]["world_size"]), ("AdamW", 75, 1))
        text, _ = self.ckpt("ls", self.folder)
        self.assertIn("torn: rank-00000.safetensors has 100 bytes", text)
        one, _ = self.ckpt("ls", self.folder / "step-00000001")
        for part in ("embed.weight = head.weight", "bfloat16 (master float32)", "weight_decay 0.01", "'epoch': 2"):
            self.assertIn(part, one)


class Damage(Case):
    def test_every_flipped_byte_is_found_and_the_state_is_named(self) -> None:
        path = pathlib.Path(zeroth.ckpt.write(example(), self.folder))
        file = path / "rank-00000.safetensors"
        good = file.read_bytes()
        for at in (3, 40, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            found = self.json_of("verify", path, code=65)
            damage = [one for one in found["checkpoints"][0]["damage"] if one["file"]]
            self.assertEqual([(one["file"], one["begin"], one["end"]) for one in damage], [(file.name, 0, len(good))])
        self.assertIn("extra/mean", damage[0]["keys"])
        file.write_bytes(good)
        self.assertEqual(self.ckpt("verify", path)[0], f"{path}: whole\n")

    def test_files_that_are_cut_or_gone_and_torn_manifests_are_found(self) -> None:
        for step in (1, 2, 3):
            zeroth.ckpt.write(example(step=step), self.folder)
        os.truncate(self.folder / "step-00000001/rank-00000.safetensors", 100)
        (self.folder / "step-00000002/rank-00000.safetensors").unlink()
        manifest = self.folder / "step-00000003/manifest.json"
        os.truncate(manifest, manifest.stat().st_size // 2)
        text, _ = self.ckpt("verify", self.folder, code=65)
        for part in ("is torn", "100 bytes", "cannot be opened", "a manifest is torn", "elements are in no file"):
            self.assertIn(part, text)
        self.ckpt("verify", self.folder / "none", code=74)

    def test_large_files_are_named_by_the_mebibyte(self) -> None:
        large = example()
        large.params.append(param("large", torch.arange(3 << 18, dtype=torch.float32)))
        path = pathlib.Path(zeroth.ckpt.write(large, self.folder))
        file = path / "rank-00000.safetensors"
        with open(file, "r+b") as opened:
            opened.seek((2 << 20) + 5)
            opened.write(b"\xff")
        damage = zeroth.ckpt.verify(path)
        self.assertEqual([(one.begin >> 20, one.end >> 20, one.keys) for one in damage], [(2, 3, ["large/weight"])])
        found = zeroth.ckpt.open(path)
        self.assertTrue(torch.equal(found.slice("large", 0, 5), torch.arange(5.0)))
        self.refused("CHECKPOINT", "bytes 2097152 to 3145728", lambda: found.tensor("large"))
        # What cannot be read is neither converted, nor does a part of a target stay.
        self.ckpt("convert", path, self.folder / "hf", "--to", "hf", code=65)
        self.ckpt("convert", path, self.folder / "again", "--to", "zeroth", code=65)
        self.assertEqual(sorted(one.name for one in self.folder.iterdir()), ["LATEST", "again", "step-00000003"])
        self.assertEqual(list((self.folder / "again").iterdir()), [])


class Differences(Case):
    def test_equal_ones_are_equal_and_each_difference_is_named(self) -> None:
        a = zeroth.ckpt.write(example(), self.folder / "a")
        b = zeroth.ckpt.write(example(), self.folder / "b")
        self.assertEqual(self.ckpt("diff", a, b)[0], "equal\n")
        other = example(step=4)
        weight = other.param("embed.weight").states["weight"].read().clone()
        weight[1, 2] += 0.25
        other.param("embed.weight").states["weight"] = parts.of_tensor(weight)
        other.param("scale").updates = 9
        other.groups[0]["lr"] = 0.2
        other.user = {"client": {"epoch": 3}}
        del other.param("block.weight").states["exp_avg"]
        del other.buffers["mean"]
        b = zeroth.ckpt.write(other, self.folder / "b")
        found = {one["what"]: one for one in self.json_of("diff", a, b, code=1)["differences"]}
        trained = [f"{name}: lr" for name in ("embed.weight", "block.weight", "scale", "none")]
        rest = ["embed.weight/weight", "scale: updates", "block.weight/exp_avg", "mean", "step", "client_state"]
        self.assertEqual(sorted(found), sorted([*trained, *rest]))
        self.assertEqual(found["embed.weight/weight"]["elements"], 1)
        self.assertAlmostEqual(found["embed.weight/weight"]["max_abs"], 0.25, places=6)
        self.assertEqual(found["block.weight/exp_avg"]["kind"], "missing in B")

    def test_a_tolerance_is_for_values_alone(self) -> None:
        a, b = example(), example()
        values = b.param("embed.weight").states["weight"].read() * (1 + 1e-6)
        b.param("embed.weight").states["weight"] = parts.of_tensor(values)
        self.assertEqual([one.what for one in zeroth.ckpt.diff(a, b)], ["embed.weight/weight"])
        self.assertEqual(zeroth.ckpt.diff(a, b, tolerance=1e-4), [])
        values[0, 0] = float("nan")
        (found,) = zeroth.ckpt.diff(a, b, tolerance=1e-4)
        self.assertEqual((found.elements, found.max_abs), (1, float("inf")))
        self.assertEqual(zeroth.ckpt.diff(b, b), [])
        b.param("embed.weight").states["weight"] = parts.of_tensor(values[:3])
        self.assertEqual([one.kind for one in zeroth.ckpt.diff(a, b)], ["shape"])
        self.ckpt("diff", "a", "b", "--tolerance", "-1", code=64)


class Averages(Case):
    def test_weights_are_the_sum_in_float64_rounded_once(self) -> None:
        sources = [zeroth.ckpt.write(example(seed), self.folder / str(seed)) for seed in range(3)]
        self.ckpt("average", *sources, "--out", self.folder / "mean", "--weights", "1,2,5")
        found = zeroth.ckpt.open(self.folder / "mean")
        loaded = [zeroth.ckpt.open(path) for path in sources]
        for name in ("embed.weight", "block.weight", "scale", "none"):
            exact = sum(w / 8 * one.tensor(name).double() for w, one in zip((1, 2, 5), loaded, strict=True))
            self.equal({name: found.tensor(name)}, {name: torch.as_tensor(exact).float()})
            self.assertEqual(found.states(name), ["weight"])  # no states of an optimizer, unless wanted
        self.equal({"base": found.tensor("base")}, {"base": loaded[0].tensor("base")})
        self.assertEqual(found.buffer("seen").item(), 0)
        self.assertEqual((found.step, found.groups[0]["lr"]), (3, 0.1))
        self.ckpt("average", *sources, "--out", self.folder / "kept", "--optimizer", "first", "--step", 7)
        kept = zeroth.ckpt.open(self.folder / "kept")
        self.equal({"m": kept.tensor("scale", "exp_avg")}, {"m": loaded[0].tensor("scale", "exp_avg")})
        self.assertEqual((kept.step, kept.param("scale").updates), (7, 3))

    def test_what_does_not_fit_is_refused(self) -> None:
        a = zeroth.ckpt.write(example(0), self.folder / "a")
        other = example(1)
        other.params.pop()
        b = zeroth.ckpt.write(other, self.folder / "b")
        self.assertIn("base", self.ckpt("average", a, b, "--out", self.folder / "c", code=65)[1])
        self.ckpt("average", a, a, "--out", self.folder / "c", "--weights", "1", code=64)
        self.ckpt("average", a, a, "--out", self.folder / "c", "--weights", "1,-1", code=64)
        self.ckpt("average", a, a, "--out", self.folder / "c", "--weights", "nan,1", code=64)
        self.assertFalse((self.folder / "c").exists())


class Pruning(Case):
    def test_the_newest_and_multiples_stay_and_nothing_of_others_goes(self) -> None:
        for step in (1, 2, 3, 4, 5, 6):
            zeroth.ckpt.write(example(step=step), self.folder)
        os.truncate(self.folder / "step-00000001/manifest.json", 9)
        (self.folder / "notes.txt").write_text("mine")
        (self.folder / "step-00000003/notes.txt").write_text("mine too")

        def names() -> list[str]:
            return sorted(path.name for path in self.folder.iterdir() if path.name.startswith("step-"))

        before = names()
        before_inside = sorted(os.listdir(self.folder / "step-00000003"))
        arguments = ["prune", self.folder, "--keep-last", 1, "--keep-every", 4]
        would = self.json_of(*arguments, "--dry-run")["removed"]
        self.assertEqual([pathlib.Path(path).name for path in would], [f"step-0000000{step}" for step in (5, 3, 2)])
        self.assertEqual(names(), before)
        self.assertEqual(self.json_of(*arguments)["removed"], would)
        left = names()
        self.assertEqual([name for name in left if "trash" not in name], [f"step-0000000{step}" for step in (1, 4, 6)])
        (trash,) = [name for name in left if "trash" in name]  # it has a file of others
        self.assertEqual(sorted(os.listdir(self.folder / trash)), before_inside)
        self.assertTrue((self.folder / "notes.txt").exists())
        self.ckpt("prune", self.folder, "--keep-last", 0, code=64)
        self.ckpt("prune", self.folder, code=64)


class OfAnEngine(Case):
    def test_a_tensor_without_elements_keeps_its_dtype(self) -> None:
        torch.save({"none": torch.empty(0, 3, dtype=torch.bfloat16), "w": torch.ones(2)}, self.folder / "none.pt")
        path = zeroth.ckpt.convert(self.folder / "none.pt", self.folder / "of-torch", to="zeroth")
        for to in ("hf", "torch", "dcp"):
            there = zeroth.ckpt.convert(path, self.folder / f"none-{to}", to=to, weights="master")
            (none,) = [one for one in zeroth.ckpt.read(there).params if one.name == "none"]
            self.assertEqual((none.dtype, none.states["weight"].dtype), (torch.bfloat16, torch.bfloat16), to)

    def test_weights_that_never_train_are_read_from_the_checkpoint_that_has_them(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4).requires_grad_(False), torch.nn.Linear(4, 2))
        base = model[0].weight.detach().clone()
        model[1].register_parameter("none", torch.nn.Parameter(torch.empty(0, 2)))
        groups = [{"params": list(model[1].parameters())}]
        engine = zeroth.Engine(model, {"zero_optimization": {"stage": 3}}, params=groups, log_level="off")
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
            path = engine.save(self.folder, frozen="once")
        engine.close()
        found = zeroth.ckpt.open(path)
        self.assertEqual(found.manifest.base, "step-00000001")
        self.equal({"0.weight": found.tensor("0.weight")}, {"0.weight": base})
        self.equal({"none": found.tensor("1.none")}, {"none": torch.empty(0, 2)})
        self.assertEqual(zeroth.ckpt.verify(path), [])
        self.assertIn("weights that never train are in step-00000001", self.ckpt("ls", path)[0])
        alone = zeroth.ckpt.convert(path, self.folder / "alone", to="zeroth")
        self.assertEqual(zeroth.ckpt.diff(path, alone), [])
        self.assertEqual(zeroth.ckpt.open(alone).manifest.base, "")
        # Retention keeps it; without it the others are not whole.
        removed = zeroth.ckpt.prune(self.folder, keep_last=1)
        self.assertEqual([pathlib.Path(one).name for one in removed], ["step-00000002"])
        file = self.folder / "step-00000001/rank-00000.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        self.assertIn("step-00000001/rank-00000.safetensors, bytes 0", self.ckpt("verify", path, code=65)[0])
        (self.folder / "step-00000001").rename(self.folder / "moved")
        self.assertIn("refers to another one", self.ckpt("verify", path, code=65)[0])
        self.assertIn("is missing", self.json_of("ls", self.folder)["checkpoints"][0]["why"])
        self.refused("CHECKPOINT", "refers to another one", lambda: zeroth.ckpt.open(path))

    def test_a_step_that_is_under_way_is_named_and_not_taken_along(self) -> None:
        model = torch.nn.Linear(3, 2)
        config = {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
        engine = zeroth.Engine(model, config, log_level="off")
        for micro_step in range(3):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
            if micro_step >= 1:
                path = engine.save(self.folder)
        engine.close()
        listed = self.json_of("ls", self.folder)["checkpoints"]
        self.assertEqual([(one["step"], one["micro_step"]) for one in listed], [(1, 1), (1, 0)])
        self.assertIn("between micro-steps: 1 of 2", self.ckpt("ls", path)[0])
        self.assertEqual(zeroth.ckpt.verify(path), [])
        different = [one.what for one in zeroth.ckpt.diff(listed[1]["path"], path)]
        self.assertIn("accumulation", different)
        self.assertIn("weight/step_sum", different)
        text, _ = self.ckpt("convert", path, self.folder / "z", "--to", "zeroth")
        self.assertIn("not taken: gradients of a step that was under way: 1 of 2 micro-steps", text)
        self.assertEqual(zeroth.ckpt.diff(listed[1]["path"], self.folder / "z"), [])


class Command(Case):
    def test_the_program_and_the_module_are_the_same_command(self) -> None:
        zeroth.ckpt.write(example(), self.folder)
        expected, _ = self.ckpt("ls", self.folder)
        program = pathlib.Path(os.environ["ZEROTH_RUN"]).with_name("zeroth")

        def run(python: str, *arguments: object) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [program, "ckpt", *arguments],
                env={**os.environ, "ZEROTH_PYTHON": python},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

        done = run(sys.executable, "ls", self.folder)
        self.assertEqual((done.returncode, done.stdout), (0, expected), done.stderr)
        done = run("/nowhere/python", "ls")
        self.assertEqual(done.returncode, 77, done.stderr)
        self.assertIn("[ENVIRONMENT] no Python could be started", done.stderr)


if __name__ == "__main__":
    unittest.main()
