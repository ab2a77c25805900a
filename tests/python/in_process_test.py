"""Suites that compute in their own process, forked from one that has imported torch: each is a case. By itself a suite
is a script as the others: python engine_test.py."""

from __future__ import annotations

import os
import subprocess
import unittest

import forked
import job
import tier

SUITES = (
    "activations",
    "ckpt",
    "ckpt_others",
    "docs",
    "engine",
    "forward",
    "guards",
    "half",
    "lengths",
    "levels",
    "mesh",
    "notebook",
    "options",
    "package",
    "refusals",
    "reversible",
    "schedule",
    "scripts",
    "spatial",
    "tiles",
    "tiling",
)
WITH_LONG_TIER = ("activations", "forward", "lengths", "levels", "package", "schedule")

forked.preload("torch._dynamo", "torch.distributed.tensor", "transformers.models.llama.modeling_llama")


class InProcess(unittest.TestCase):
    def run_suite(self, name: str) -> None:
        done = subprocess.run(
            [*forked.python(), str(job.HERE / f"{name}_test.py")],
            env={**os.environ, forked.VARIABLE: forked.python()[-1]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        print(done.stdout, flush=True)
        self.assertEqual(done.returncode, 0)
        self.assertNotIn(forked.LEFT, done.stdout)


def add(name: str) -> None:
    def case(self: InProcess) -> None:
        self.run_suite(name)

    setattr(InProcess, f"test_{name}", tier.both(case) if name in WITH_LONG_TIER else case)


for suite in SUITES:
    add(suite)


if __name__ == "__main__":
    tier.main()
