"""Who gets which layers; for pipe_chain_test.py."""

from __future__ import annotations

import copy
import itertools
import random
import time
import unittest
from typing import Any

import torch
import zoo
from pipe_models import pairs
from refusing import refused
from torch import nn

from zeroth import pipe


class Partitions(unittest.TestCase):
    def chain(self) -> pipe.Chain:
        return pipe.chain_of(nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4), nn.Linear(4, 8), nn.Tanh(),
                                           nn.Linear(8, 15)))  # fmt: skip

    def test_the_largest_part_is_as_small_as_in_any_split(self) -> None:
        generator = random.Random(4)
        for case in range(300):
            count = generator.randint(1, 9)
            parts = generator.randint(1, min(count, 4))
            costs = [generator.choice([0, 1, 2, 3, 5, 8, 0.25]) for _ in range(count)]
            speeds = [generator.choice([1, 1, 2, 0.5]) for _ in range(parts)]

            def times(cuts: Any, costs: Any = costs, speeds: Any = speeds, count: int = count) -> list[float]:
                ends = itertools.pairwise([0, *cuts, count])
                return [sum(costs[first:last]) / speed for (first, last), speed in zip(ends, speeds, strict=True)]

            every = [times(cuts) for cuts in itertools.combinations(range(1, count), parts - 1)]
            least = max(min(every, key=max))
            squares = min(sum(one**2 for one in each) for each in every if max(each) <= least)
            chain = pipe.chain_of([torch.tanh] * count)
            found = times(pipe.partition(chain, parts, weights=costs, speeds=speeds)[1:-1])
            self.assertEqual(max(found), least, (case, costs, speeds))
            self.assertAlmostEqual(sum(one**2 for one in found), squares, msg=f"{case} {costs} {speeds}")

    def test_methods_count_what_they_say(self) -> None:
        chain = self.chain()  # 200, 20, 40, 0, 135 parameters
        self.assertEqual(pipe.partition(chain, 2, "parameters"), [0, 1, 5])
        self.assertEqual(pipe.partition(chain, 2), [0, 3, 5])
        self.assertEqual(pipe.partition(chain, 3, "uniform"), [0, 2, 4, 5])
        self.assertEqual(pipe.partition(chain, 2, "uniform", speeds=[1, 4]), [0, 1, 5])
        self.assertEqual(pipe.partition(chain, 3, "type:LINEAR|nothing"), [0, 2, 3, 5])
        self.assertEqual(pipe.partition(chain, 2, ["3"]), [0, 3, 5])
        self.assertEqual(pipe.partition(chain, 3, ["0", "1", "4"]), [0, 1, 4, 5])
        self.assertEqual(pipe.partition(chain, 3, [1, 4]), [0, 1, 4, 5])
        self.assertEqual(pipe.partition(chain, 1, []), [0, 5])
        specs = pipe.chain_of([pipe.LayerSpec(nn.Linear, 2, 2), torch.tanh, pipe.LayerSpec(nn.Linear, 2, 2)])
        self.assertEqual(pipe.partition(specs, 2, "type:linear"), [0, 1, 3])
        self.assertEqual(pipe.partition(specs, 2, "type:tanh"), [0, 1, 3])

    def test_a_tied_table_counts_where_it_is_multiplied(self) -> None:
        chain = pipe.chain_of(zoo.make("tied"), sample=pairs(2)[0])  # 60, blocks of 156, 156, 156, and 60
        self.assertEqual(pipe.partition(chain, 2, "parameters"), [0, 2, 5])
        self.assertEqual(pipe.partition(chain, 2), [0, 3, 5])

    def test_measured_bytes_are_those_that_autograd_keeps(self) -> None:
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 2)).double()
        chain = pipe.chain_of(model, loss_fn=lambda h, _: h.sum())
        found = pipe.measure(chain, (torch.ones(5, 4, dtype=torch.float64, requires_grad=True), None), "memory")
        self.assertEqual(found, [8.0 * 5 * size for size in (4, 6, 6, 30, 30)])
        batch = (torch.ones(5, 4, dtype=torch.float64), None)
        self.assertEqual(pipe.partition(chain, 2, "memory", sample=batch), [0, 4, 5])

    def test_measured_times_are_those_of_the_layers_and_nothing_else_changes(self) -> None:
        def slow(x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return x

        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        chain = pipe.chain_of([model[0], slow, model[1], model[2], slow, slow], loss_fn=lambda h, _: h.sum())
        before = copy.deepcopy(model.state_dict())
        state = torch.get_rng_state()
        times = pipe.measure(chain, (torch.randn(3, 4, generator=torch.Generator()), None), "time")
        self.assertGreaterEqual(min(times[1], times[4], times[5]), 0.02)
        self.assertLess(times[0] + times[2] + times[3], times[1] + times[4] + times[5])
        self.assertTrue(all(torch.equal(value, before[name]) for name, value in model.state_dict().items()))
        self.assertTrue(torch.equal(torch.get_rng_state(), state))
        self.assertTrue(all(one.grad is None for one in model.parameters()))
        self.assertEqual(pipe.partition(chain, 3, "time", weights=[0, 2, 1, 0, 2, 2]), [0, 2, 5, 6])

    def test_bad_splits_are_refused(self) -> None:
        chain = self.chain()
        for parts, split, more, pattern in (
            (6, "auto", {}, "every part of a pipeline needs a layer.*1 to 5 parts"),
            (0, "auto", {}, "every part of a pipeline needs a layer"),
            (2, "best", {}, "no such way to split.*got: best"),
            (2, "best", {"weights": [1.0] * 5}, "no such way to split"),
            (2, ["9"], {}, "no such layer.*which: 9"),
            (3, ["2", "2"], {}, "does not name the first layers.*which: 2, 2"),
            (3, ["3", "2"], {}, "does not name the first layers"),
            (3, ["2"], {}, "does not name the first layers.*2 different layers"),
            (2, "type:Conv", {}, "no layer has a class with such a name.*Embedding, Linear, Tanh"),
            (2, "type:(", {}, "no regular expression"),
            (2, "time", {}, "measured on a micro-batch.*sample="),
            (2, "auto", {"weights": [1.0]}, "weights do not fit.*got: 1 numbers"),
            (2, "auto", {"weights": [1.0, -1.0, 1.0, 1.0, 1.0]}, "weights do not fit.*got: .-1.0"),
            (2, "auto", {"weights": [1.0, float("nan"), 1.0, 1.0, 1.0]}, "weights do not fit.*nan"),
            (2, "auto", {"speeds": [1.0, 0.0]}, "speeds do not fit.*above 0.*got: .0.0"),
        ):
            with self.subTest(f"{parts} {split} {more}"), refused("USAGE", pattern):
                pipe.partition(chain, parts, split, **more)  # type: ignore[arg-type]
        with refused("USAGE", "without values cannot be measured.*which: 0.weight"):
            pipe.measure(pipe.chain_of([pipe.LayerSpec(nn.Linear, 2, 2)]), torch.ones(1, 2), "time")
