"""What reads a parameter that is not gathered, by its name or by an alias that somebody kept: an error with the name,
never a dead process, never another parameter's numbers. And torch's profiler, which looks at everything."""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
import unittest
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import numpy as np
import safetensors.torch
import torch
from alone import BATCH, make, train
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zeroth


def holding(weight: torch.Tensor) -> nn.Module:
    """A module whose buffer it is, for torch's archives of C++ modules."""
    module = nn.Module()
    module.register_buffer("weight", weight.detach())
    return module


READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": lambda w: w.sum(),
    "clone": lambda w: w.clone(),
    "matmul": lambda w: w @ w.T,
    "linear": lambda w: nn.functional.linear(torch.ones(1, w.shape[1], dtype=w.dtype), w),
    "numpy": lambda w: w.detach().numpy(),
    "tolist": lambda w: w.tolist(),
    "item": lambda w: w.reshape(-1)[0].item(),
    "data_ptr": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage().data_ptr(),
    "repr": repr,
    "deepcopy": lambda w: copy.deepcopy(w.detach()),
    "pickle": lambda w: pickle.dumps(w.detach()),
    "dlpack": lambda w: torch.from_dlpack(w.detach()).sum(),
    "to": lambda w: w.to(torch.float32),
    "isnan": lambda w: w.isnan().any(),
    "stack": lambda w: torch.stack([w, w]),
    "index": lambda w: w[w > 0],
    "write": lambda w: w.detach().zero_(),
    "copy into": lambda w: w.detach().copy_(torch.ones_like(w)),
    "optimizer": lambda w: torch._foreach_add_([w.detach()], 1.0),
    "share": lambda w: w.share_memory_(),
    "forking pickler": lambda w: ForkingPickler.dumps(w if w.is_leaf else w.detach()),
    "forking pickler of data": lambda w: ForkingPickler.dumps(w.data),
    "forking pickler of the storage": lambda w: ForkingPickler.dumps(w.untyped_storage()),
    "share storage": lambda w: w.untyped_storage().share_memory_(),
    "share by descriptor": lambda w: w.untyped_storage()._share_fd_cpu_(),
    "share by name": lambda w: w.untyped_storage()._share_filename_cpu_(),
    "torch.save": lambda w: torch.save(w, io.BytesIO()),
    "torch.save of data": lambda w: torch.save({"w": w.data}, io.BytesIO()),
    "old torch.save": lambda w: torch.save(w.detach(), io.BytesIO(), _use_new_zipfile_serialization=False),
    "torch.jit.save": lambda w: torch.jit.save(torch.jit.script(holding(w)), io.BytesIO()),
    "asarray": lambda w: np.asarray(w.detach()),
    "numpy by force": lambda w: w.numpy(force=True),
    "numpy's dlpack": lambda w: np.from_dlpack(w.detach()),
    "float": lambda w: float(w[0, 0]),
    "a byte of the storage": lambda w: w.untyped_storage()[0],
    "an element of the storage": lambda w: w.storage()[0],
    "storage as a list": lambda w: w.untyped_storage().tolist(),
    "clone of the storage": lambda w: w.untyped_storage().clone(),
    "storage filled": lambda w: w.untyped_storage().fill_(1),
    "storage resized": lambda w: w.untyped_storage().resize_(8),
    "copy from the storage": lambda w: torch.zeros(8).untyped_storage().copy_(w.untyped_storage()),
    "another tensor of the storage": lambda w: torch.empty(0, dtype=w.dtype).set_(w.untyped_storage()).sum(),
    "safetensors": lambda w: safetensors.torch.save({"w": w.detach()}),
}
ALIASES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "t": lambda w: w.t(),
    "view": lambda w: w.view(w.shape),
    "slice": lambda w: w[:, :2],
}


class Guards(unittest.TestCase):
    def test_every_reader_of_a_parameter_gets_its_name(self) -> None:
        model, engine = make()
        train(engine)
        name, weight = next((name, p) for name, p in model.named_parameters() if name.startswith("blocks.1"))
        self.assertEqual(weight.dim(), 2)
        self.assertEqual(
            repr(weight).replace("\n", " "),
            f"Parameter containing: tensor(<parameter '{name}' is not gathered now, so it has no memory>, "
            f"size={tuple(weight.shape)}, dtype=torch.float64, requires_grad=True)",
        )
        for reader, read in READERS.items():
            if reader == "repr":
                continue
            with self.subTest(reader), self.assertRaisesRegex(zeroth.Error, f"parameter '{name}' is not gathered now"):
                read(weight)
        self.assertEqual(
            (weight.shape, weight.numel(), weight.dtype), (weight.t().T.shape, weight.numel(), torch.float64)
        )
        self.assertEqual(torch.zeros_like(weight).sum(), 0)
        engine.close()

    def test_every_reader_of_an_alias_gets_the_name(self) -> None:
        model, engine = make()
        name, weight = next((name, p) for name, p in model.named_parameters() if name.startswith("blocks.1"))
        kept: dict[str, torch.Tensor] = {}
        block = model.get_submodule("blocks.1")
        inside = block.get_submodule("linear")  # while the block is gathered
        inside.register_forward_hook(lambda *_: kept.update({key: alias(weight) for key, alias in ALIASES.items()}))
        train(engine)
        self.assertEqual(set(kept), set(ALIASES))
        for alias, tensor in kept.items():
            for reader, read in READERS.items():
                with (
                    self.subTest(alias=alias, reader=reader),
                    self.assertRaisesRegex(Exception, f"parameter '{name}' is not gathered now"),
                ):
                    read(tensor)
        seen = []
        last = dict(kept)
        inside.register_forward_hook(lambda *_: seen.append(torch.equal(last["t"], weight.t())))
        engine(*BATCH)
        self.assertEqual(seen, [True])
        engine.close()
        self.assertRaisesRegex(Exception, f"the engine that held parameter '{name}' is gone", last["t"].sum)

    def test_memory_behind_a_numpy_array_stays_readable(self) -> None:
        model, engine = make()
        kept = []
        inside = model.get_submodule("blocks.1.linear")
        weight = inside.weight
        inside.register_forward_hook(lambda *_: kept.append(weight.detach().numpy()))
        train(engine)
        self.assertEqual(kept[0].shape, tuple(weight.shape))
        float(kept[0].sum())
        engine.close()

    def test_gathered_gives_values_and_refuses_writes(self) -> None:
        model, engine = make()
        train(engine)
        with engine.gathered(model):
            values = [p.detach().clone() for p in model.parameters()]
        with (
            self.assertRaisesRegex(zeroth.Error, "no parameter of the engine's model"),
            engine.gathered(nn.Linear(2, 2)),
        ):
            pass
        with self.assertRaises(ZeroDivisionError), engine.gathered(model):
            _ = 1 / 0
        self.assertRaisesRegex(zeroth.Error, "is not gathered now", lambda: next(iter(model.parameters())).sum())
        with self.assertRaisesRegex(zeroth.Error, "written in place"), torch.no_grad(), engine.gathered(model):
            model.get_parameter("blocks.1.linear.weight").add_(1.0)
        engine.close()
        self.assertTrue(all(torch.equal(a, p) for a, p in zip(values, model.parameters(), strict=True)))


class Profiler(unittest.TestCase):
    """Traces as without an engine: nothing ends the process, and torch logs no exceptions of its observers."""

    def test_stacks_shapes_and_flops(self) -> None:
        for stage in (0, 3):
            with self.subTest(stage=stage), tempfile.TemporaryFile() as log:
                model, engine = make(stage=stage)
                engine.optimizer  # noqa: B018, which torch's tracer looks into, too
                train(engine)
                kept = os.dup(2)
                os.dup2(log.fileno(), 2)
                try:
                    with profile(
                        activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=True, with_flops=True,
                        with_modules=True, profile_memory=True,
                    ) as profiled:  # fmt: skip
                        train(engine, 2)
                finally:
                    os.dup2(kept, 2)
                    os.close(kept)
                log.seek(0)
                self.assertNotIn(b"Exception in RecordFunction callback", log.read())
                names = {event.key for event in profiled.key_averages()}
                self.assertIn("aten::addmm", names)
                self.assertTrue(any("Backward0" in name for name in names), names)
                engine.close()


if __name__ == "__main__":
    unittest.main(verbosity=2)
