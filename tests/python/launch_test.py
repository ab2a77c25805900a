"""Ranks under torchrun, under zeroth-run, and with srun's variables: they train with the same bits, and the first line
of the log says who started them."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest
from typing import Any
from unittest import mock

import forked
import job
import ports

PROGRAM = str(job.HERE / "launch_rank.py")
STEPS = 8


@functools.cache
def by_plain_torch() -> list[float]:
    """Losses that two ranks have."""
    done = subprocess.run([*forked.python(), PROGRAM, "plain"], capture_output=True, text=True, timeout=120, check=True)
    return [float.fromhex(loss) for loss in done.stdout.split()]


class Launchers(unittest.TestCase):
    def losses(self, done: subprocess.CompletedProcess[str]) -> dict[str, list[float]]:
        """What both ranks have told, by the kind of their world."""
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told: dict[str, str] = {}
        for rank, backend, losses in re.findall(r"([01]) of 2 over ([\w ]+): (.*)", done.stdout):
            self.assertEqual(told.setdefault(backend, losses), losses, f"rank {rank} over {backend}")
        self.assertEqual(len(re.findall("of 2 over", done.stdout)), 2 * len(told), done.stdout)
        return {backend: [float.fromhex(loss) for loss in losses.split()] for backend, losses in told.items()}

    def first_lines(self, done: subprocess.CompletedProcess[str]) -> list[str]:
        """Of each engine's log: the line before those of its configuration."""
        lines = re.findall(r"\[zeroth 0/2\] (.*)", done.stderr)
        self.assertEqual(lines[0], next(line for line in lines if " says " in line), done.stderr)
        return [line for line in lines if " says " in line]

    def check(self, losses: list[float]) -> None:
        self.assertLess(max(abs(mine - theirs) for mine, theirs in zip(losses, by_plain_torch(), strict=True)), 1e-12)
        self.assertLess(losses[-1], losses[0])

    def test_torchrun(self) -> None:
        variables = {
            name: value for name, value in os.environ.items() if name not in ("ZEROTH_JOB_ID", "RANK", "WORLD_SIZE")
        }
        with (
            tempfile.TemporaryDirectory() as logs,
            job.Family(
                [
                    *forked.python(),
                    "-c",
                    "import torch.distributed.run as launcher; launcher.main()",
                    "--no-python",
                    "--nproc-per-node",
                    "2",
                    "--master-addr",
                    "127.0.0.1",
                    "--master-port",
                    str(ports.free_port()),
                    "--log-dir",
                    logs,
                    forked.program(),
                    PROGRAM,
                    "group",
                ],
                {**variables, "OMP_NUM_THREADS": "1"},
            ) as torchrun,
        ):
            done = torchrun.end(120)
        losses = self.losses(done)
        self.assertEqual(list(losses), ["shm", "c10d gloo"])
        self.assertEqual(losses["shm"], losses["c10d gloo"])
        self.check(losses["shm"])
        self.assertEqual(
            self.first_lines(done),
            [
                "info: 2 ranks over shm, says RANK and WORLD_SIZE (torchrun)",
                "info: 2 ranks over c10d gloo, says torch.distributed",
            ],
        )

    def test_the_variables_of_srun(self) -> None:
        """As Slurm sets them; a real one is in slurm_test.py. Of two hosts, with a place to meet that the user has
        named."""
        self.check_srun("shm", "shm, says SLURM_PROCID and SLURM_NTASKS (srun)", SLURM_STEP_NUM_NODES="1")
        self.check_srun(
            "c10d gloo",
            "c10d gloo, says torch.distributed",
            SLURM_STEP_NUM_NODES="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(ports.free_port()),
        )

    def check_srun(self, backend: str, said: str, **variables: str) -> None:
        own = {name: value for name, value in os.environ.items() if name not in ("ZEROTH_JOB_ID", "RANK", "WORLD_SIZE")}
        own |= {
            "OMP_NUM_THREADS": "1",
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "8",
            "SLURM_STEP_ID": "3",
            "SLURM_JOB_ID": f"{os.getpid()}",
            **variables,
        }
        tasks = [
            subprocess.Popen(
                [*forked.python(), PROGRAM],
                env=own | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for task in range(2)
        ]
        try:
            texts = [task.communicate(timeout=120) for task in tasks]
        finally:
            for task in tasks:
                task.kill()
                task.wait()
        done = subprocess.CompletedProcess(
            PROGRAM, max(task.returncode for task in tasks), *("".join(stream) for stream in zip(*texts, strict=True))
        )
        losses = self.losses(done)
        self.assertEqual(list(losses), [backend])
        self.check(losses[backend])
        self.assertEqual(self.first_lines(done), [f"info: 2 ranks over {said}"])

    def test_zeroth_run_with_a_log_of_json(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            by_variable, by_argument = pathlib.Path(folder) / "variable", pathlib.Path(folder) / "argument"
            with mock.patch.dict(os.environ, ZEROTH_JSON_LOG=str(by_variable)):
                done = job.run(2, "launch_rank.py", str(by_argument))
            losses = self.losses(done)
            records = [
                [json.loads(line) for line in path.read_text().splitlines()] for path in (by_variable, by_argument)
            ]
        self.assertEqual(list(losses), ["shm"])
        self.check(losses["shm"])
        first = "2 ranks over shm, says RANK and WORLD_SIZE (zeroth-run)"
        self.assertEqual(self.first_lines(done), [f"info: {first}"])  # the second engine's log is off
        for of_engine in records:
            self.check_records(of_engine, first)

    def check_records(self, records: list[dict[str, Any]], first: str) -> None:
        """Those of one engine."""
        self.assertEqual(
            {key: records[0][key] for key in ("rank", "event", "level", "text")},
            {"rank": 0, "event": "log", "level": "info", "text": first},
        )
        self.assertEqual([record["text"] for record in records if " says " in record.get("text", "")], [first])
        steps = [record for record in records if record["event"] == "step"]
        self.assertEqual([step["step"] for step in steps], list(range(1, STEPS + 1)))
        for step in steps:
            self.assertEqual(
                (step["rank"], step["committed"], step["lr"], step["clip_coefficient"]), (0, True, 0.05, 1.0)
            )
            self.assertGreater(step["grad_norm"], 0)
            self.assertRegex(step["time"], r"^\d{4}-\d\d-\d\dT")

    def test_a_log_of_json_that_cannot_be_written_is_named(self) -> None:
        done = subprocess.run(
            [*forked.python(), "-c", "import torch, zeroth; zeroth.Engine(torch.nn.Linear(2, 2), log_level='off')"],
            env={**os.environ, "ZEROTH_JSON_LOG": "/no/such/folder/log"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertEqual(done.returncode, 74, done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], r"^zeroth\.Error: \[IO\] .*/no/such/folder/log")


if __name__ == "__main__":
    unittest.main(verbosity=2)
