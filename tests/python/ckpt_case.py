"""What the suites of zeroth.ckpt share: a checkpoint with one of everything, and the command in this process."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

import torch

import zeroth.ckpt
from zeroth.ckpt import contents as parts
from zeroth.ckpt.command import main

Tensors = dict[str, torch.Tensor]


def param(name: str, weight: torch.Tensor, **facts: Any) -> zeroth.ckpt.Param:
    """Trained by AdamW in group 0, if its dtype can be."""
    trained = facts.setdefault("trainable", weight.is_floating_point())
    states = {"weight": parts.of_tensor(weight)}
    if trained:
        generator = torch.Generator().manual_seed(len(name) + weight.numel())
        for state in ("exp_avg", "exp_avg_sq"):
            states[state] = parts.of_tensor(torch.rand(weight.shape, generator=generator))
        facts = {"group": 0, "updates": 3, **facts}
    facts = {"dtype": weight.dtype, **facts}
    return zeroth.ckpt.Param(name=name, shape=tuple(weight.shape), states=states, **facts)


def example(seed: int = 0, step: int = 3) -> zeroth.ckpt.Contents:
    """Of everything one: a scalar, an empty tensor, a frozen one of bytes, tied names, a master, a buffer."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return zeroth.ckpt.Contents(
        origin=f"example {seed}",
        kind="torch",
        params=[
            param("embed.weight", rand(7, 5), aliases=["head.weight"]),
            param("block.weight", rand(6, 5), dtype=torch.bfloat16),
            param("scale", rand()),
            param("none", rand(0, 4)),
            param("base", torch.randint(256, (9,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)),
        ],
        buffers={"seen": parts.of_tensor(torch.tensor(seed)), "mean": parts.of_tensor(rand(3))},
        groups=[{"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}],
        optimizer="AdamW",
        step=step,
        loss_scaler={"scale": 2.0**15, "steps": 9, "last_overflow": 4, "hysteresis": 1},
        user={"client": {"epoch": 2, "names": ["a", "b"]}},
    )


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def ckpt(self, *arguments: object, code: int = 0) -> tuple[str, str]:
        """Runs the command and returns what it prints to stdout and stderr."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            got = main([str(argument) for argument in arguments])
        self.assertEqual(got, code, out.getvalue() + err.getvalue())
        return out.getvalue(), err.getvalue()

    def json_of(self, *arguments: object, code: int = 0) -> Any:
        return json.loads(self.ckpt(*arguments, "--json", code=code)[0])

    def refused(self, code: str, text: str, call: Callable[[], object]) -> None:
        with self.assertRaises(zeroth.Error) as caught:
            call()
        self.assertEqual(caught.exception.code, code, caught.exception)
        self.assertIn(text, str(caught.exception))

    def equal(self, a: Tensors, b: Tensors) -> None:
        self.assertEqual(a.keys(), b.keys())
        for name, tensor in a.items():
            self.assertEqual((tensor.dtype, tensor.shape), (b[name].dtype, b[name].shape), name)
            self.assertTrue(torch.equal(tensor, b[name]), name)
