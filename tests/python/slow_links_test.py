"""Optimizers whose ranks exchange less than gradients: slow_links_rank.py."""

from __future__ import annotations

import csv
import json
import pathlib
import tempfile
import unittest

import job
import tier

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Optimizers(job.RankTest):
    def lines_of(self, *calls: str) -> list[list[str]]:
        output = self.run_well(2, "slow_links_rank.py", *calls)
        lines = [line.split("stage ")[1].split() for line in output.splitlines()]
        self.assertEqual(len(lines), len(calls))
        return lines

    def test_onebit_adam_is_the_papers_at_every_stage_with_the_bytes_of_its_formula(self) -> None:
        calls = [f"{stage},{dtype}" for dtype in ("float64", "float32", "bfloat16") for stage in (0, 2, 3)]
        lines = self.lines_of(*calls)
        for dtype in ("torch.float64", "torch.float32", "torch.bfloat16"):
            same = {tuple(line[3:]) for line in lines if line[1] == dtype}
            self.assertEqual(len(same), 1, (dtype, lines))
        for *_, first, last in lines:
            self.assertLess(float(last), float(first) - 0.4, lines)

    def test_the_others_are_their_papers_with_the_bytes_of_their_formulas(self) -> None:
        for optimizer in ("Lamb", "OneBitLamb", "ZeroOneAdam"):
            lines = self.lines_of(*(f"{stage},float64,{optimizer}" for stage in (0, 1, 3)))
            # At stage 0 ranks of 0/1 Adam also make steps of their own.
            same = {tuple(line[3:]) for line in lines if optimizer != "ZeroOneAdam" or line[0] != "0"}
            self.assertEqual(len(same), 1, lines)

    def test_lamb_measures_the_whole_of_what_ranks_of_tp_split(self) -> None:
        self.run_well(2, "slow_links_rank.py", "0,float64,tp", "3,float64,tp")

    def test_momenta_of_low_rank_messages_keep_the_directions_of_earlier_ones(self) -> None:
        self.run_well(2, "slow_links_rank.py", "0,float32,low_rank", "3,float32,low_rank")

    @tier.both
    def test_meshes_have_the_same_numbers_at_every_stage(self) -> None:
        """Parts of matrices, of sequences and of layers; tied weights; halves; states in files."""
        every = ["tp", "sp", "norms", "tied", "pp", "tied pp", "bf16", "fp16", "files", "chain"]
        names = tier.rows(every, ["norms", "tied pp", "files", "chain"])
        out = self.run_well(4, "slow_links_mesh_rank.py", *names)
        for name in names:
            self.assertIn(f"{name}:", out)

    @tier.long
    def test_text_is_learnt_as_by_adamw(self) -> None:
        """Validation losses after as many tokens: within 2 % for signs, and with the margins below for the others."""
        losses = {}
        shape = ["--layers", "2", "--d-model", "64", "--heads", "2", "--seq", "64", "--steps", "300", "--batch", "4"]
        with tempfile.TemporaryDirectory() as scratch:
            frozen = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 60}}
            plain = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
            settings = {"AdamW": plain, "OneBitAdam": {"optimizer": frozen}}
            shares = {"top_k": {"compression_ratio": 0.1}, "low_rank": {"compression_rank": 8}}
            for form in ("int8", "int4", "fp4", "top_k", "low_rank", "adaptive"):
                params = {**frozen["params"], "compression": form, **shares.get(form, {})}
                settings[form] = {"optimizer": {**frozen, "params": params}}
            switches = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
            settings["ZeRO++"] = {**plain, "zero_optimization": switches}
            for name, chosen in settings.items():
                config, record = pathlib.Path(scratch, "config.json"), pathlib.Path(scratch, "record.json")
                config.write_text(json.dumps(chosen))
                arguments = ["--data", str(ROOT / "docs"), "--suffix", ".md", *shape, "--config", str(config)]
                self.run_well(2, str(ROOT / "examples/gpt/train.py"), *arguments, "--json", str(record))
                last = [json.loads(line) for line in record.read_text().splitlines()][-1]
                losses[name] = last["validation_loss"]
        margins = {"int4": 0.03, "fp4": 0.03, "adaptive": 0.03, "ZeRO++": 0.03, "low_rank": 0.03, "top_k": 0.04}
        for name, loss in losses.items():
            self.assertLess(loss / losses["AdamW"] - 1, margins.get(name, 0.02), (name, losses))


class Example(unittest.TestCase):
    def test_two_sites(self) -> None:
        """The runs of examples/slow_link, short, and the line that says which of them is lossy."""
        with tempfile.TemporaryDirectory() as scratch:
            sizes = ["--steps", "8", "--freeze", "4", "--width", "32", "--layers", "1", "--mbit", "500", "--every", "4"]
            sizes += ["--window", "4", "--delay", "1"]
            done = job.run(2, str(ROOT / "examples/slow_link/train.py"), *sizes, "--out", scratch)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            with open(pathlib.Path(scratch, "slow_link.csv"), newline="") as file:
                rows = list(csv.DictReader(file))
            self.assertTrue(pathlib.Path(scratch, "slow_link.png").is_file())
        methods = ("AdamW", "OneBitAdam", "StreamingDiLoCo")
        sums, signs, streaming = ([row for row in rows if row["method"] == name] for name in methods)
        self.assertEqual([row["loss"] for row in sums[:4]], [row["loss"] for row in signs[:4]])
        self.assertLess(20 * int(signs[-1]["bytes"]), int(sums[-1]["bytes"]))
        total = sum(int(row["bytes"]) for row in streaming)
        self.assertGreater(total, 0)
        self.assertLess(20 * total, sum(int(row["bytes"]) for row in sums))
        for name in methods:
            line = rf"{name}: loss [\d.]+, [\d.]+ s, [\d.]+ MB a step over the link at last, [\d.]+ MB in all\n"
            self.assertRegex(done.stdout, line)
        said = (
            "the run is lossy: optimizer OneBitAdam, from step 5 on ranks exchange signs of momenta, one bit an element"
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "lossy" in line]
        self.assertEqual(len(lines), 1, done.stderr)
        self.assertIn(said, lines[0])


class QuantizedLinks(job.RankTest):
    def test_codes_train_like_numbers_and_send_less(self) -> None:
        calls = [
            "0", "3", "0+gradients", "2+gradients", "3+gradients", "3+weights", "3+weights+gradients",
            "3+gradients+forgets", "3+gradients+runs",
        ]  # fmt: skip
        lines = [
            line.split("codes ")[1].split()
            for line in self.run_well(2, "slow_links_rank.py", "codes", *calls).splitlines()
        ]
        self.assertEqual([line[0] for line in lines], calls)
        digest = {line[0]: line[1] for line in lines}
        reduced = {line[0]: int(line[2]) for line in lines}
        gathered = {line[0]: int(line[3]) for line in lines}
        loss = {line[0]: float(line[4]) for line in lines}
        self.assertEqual(len({digest[f"{stage}+gradients"] for stage in (0, 2, 3)}), 1, digest)
        self.assertEqual(digest["3+gradients+runs"], digest["3+gradients"], "runs of one rank, one micro-step")
        self.assertNotEqual(digest["3+gradients"], digest["3"])
        self.assertLess(reduced["3+gradients"], 0.3 * reduced["3"], "vectors travel as they are")
        self.assertLess(gathered["3+weights"], 0.7 * gathered["3"])
        for call in calls:
            self.assertLess(abs(loss[call] - loss["3"]), 0.02 * loss["3"], loss)


class GradientCode(job.RankTest):
    def test_a_step_does_not_wait_for_a_late_rank_and_has_the_same_bits(self) -> None:
        calls = ["0,-1", "0,0", "0,1", "2,0", "1,1", "-1,-1"]
        lines = [
            line.split("late ")[1].split()
            for line in self.run_well(2, "slow_links_rank.py", "late", *calls).splitlines()
        ]
        self.assertEqual([",".join(line[:2]) for line in lines], calls)
        self.assertEqual(len({line[2] for line in lines[:-1]}), 1, lines)
        self.assertAlmostEqual(float(lines[0][3]), float(lines[-1][3]), places=3, msg="all batches, each once")


class LocalUpdates(job.RankTest):
    def test_sites_train_apart_as_the_papers_say_at_every_stage_and_merge(self) -> None:
        cases = ["paper0", "paper3", "bits", "refusals", "branches"]
        with tempfile.TemporaryDirectory() as folder:
            lines = self.run_well(4, "local_updates_rank.py", folder, *cases).splitlines()
        self.assertEqual(sum("ok" in line for line in lines), 4 * len(cases), lines)

    def test_a_site_that_is_lost_is_left_out_and_comes_back(self) -> None:
        options = ["--sites", "2", "--max-restarts", "1"]
        with tempfile.TemporaryDirectory() as folder:
            command = job.command(4, "local_updates_rank.py", folder, "lost")
            with job.Family([command[0], *options, *command[1:]]) as family:
                ended = family.end(job.TIME_LIMIT_S)
        self.assertEqual(ended.returncode, 0, ended.stdout + ended.stderr)
        values = [line.split("values ")[1] for line in ended.stdout.splitlines() if "values " in line]
        self.assertEqual((len(values), len(set(values))), (4, 1), ended.stdout)
        self.assertIn(", going on with site 0", ended.stderr)
        self.assertIn("site 1 is back", ended.stderr)


if __name__ == "__main__":
    tier.main()
