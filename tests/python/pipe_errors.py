"""What is refused of a pipeline before ranks meet; see pipe_test.py."""

from __future__ import annotations

import unittest

import torch
from torch import nn

import zeroth
from zeroth import _C
from zeroth.pipe import chain_of, partition


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Errors(unittest.TestCase):
    def test_a_mesh_of_one_stage(self) -> None:
        with self.assertRaisesRegex(zeroth.Error, "CONFIG.*the configuration has one stage.*zeroth.mesh.pp"):
            zeroth.pipeline(layers(4), {})

    def test_more_chunks_than_layers(self) -> None:
        with self.assertRaisesRegex(zeroth.Error, "every part of a pipeline needs a layer.*5 parts"):
            partition(chain_of(layers(4)), 5)

    def test_unknown_schedules(self) -> None:
        with self.assertRaisesRegex(zeroth.Error, "CONFIG.*/zeroth/pipeline/schedule"):
            zeroth.Engine(layers(4), {"zeroth": {"pipeline": {"schedule": "1f2b"}}})
        with self.assertRaisesRegex(zeroth.Error, "1f2b"):
            _C.make_program("1f2b", 2, 4)

    def test_a_program_that_would_hang(self) -> None:
        text = _C.make_program("1f1b", 2, 2)
        _C.verify_program(text)
        broken = text.replace("0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0F1 0RECV_B0 0SEND_F0 0SEND_F1 0B0")
        self.assertNotEqual(broken, text)
        with self.assertRaisesRegex(zeroth.Error, "ranks wait for each other.*rank 0 .*rank 1"):
            _C.verify_program(broken)

    def test_steps_without_a_pipeline_need_all_micro_batches(self) -> None:
        torch.manual_seed(0)
        model = layers(2)
        engine = zeroth.Engine(model, {"gradient_accumulation_steps": 2}, log_level="warning")
        with self.assertRaisesRegex(zeroth.Error, "too few micro-batches"):
            engine.train_batch([torch.ones(1, 4)])
        engine.close()


__all__ = ["Errors"]
