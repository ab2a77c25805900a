"""Tables in host memory against torch.nn.Embedding(sparse=True): values, gradients, rules, 8 bits, ranks, refusals."""

from __future__ import annotations

import unittest
from typing import Any

import job
import numpy as np
import torch
from refusing import refused
from torch import nn

import zeroth

R, D = 50, 20


def table(**options: Any) -> zeroth.HostTable:
    generator = torch.Generator().manual_seed(1)
    return zeroth.HostTable(R, D, values=torch.randn(R, D, generator=generator), **options)


def embedding(of: zeroth.HostTable) -> nn.Embedding:
    return nn.Embedding(R, D, sparse=True, _weight=of.values.clone())


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, R, (3, 7), generator=generator) for _ in range(count)]


def loss_of(rows: torch.Tensor) -> torch.Tensor:
    return (rows * torch.arange(rows.numel()).reshape(rows.shape).sin()).square().sum()


class Lookup(unittest.TestCase):
    def test_rows_and_gradients_are_those_of_an_embedding(self) -> None:
        own = table()
        theirs = embedding(own)
        for indices in (*batches(3), torch.tensor(4), torch.zeros(0, dtype=torch.int64), torch.tensor([5, 5, 5])):
            expected, got = theirs(indices), own(indices)
            self.assertTrue(torch.equal(expected, got))
            loss_of(expected).backward()
            loss_of(got).backward()
        assert theirs.weight.grad is not None
        grad = theirs.weight.grad.to_dense()
        rows, sums = own.gradients()
        self.assertEqual(rows.tolist(), sorted(set(rows.tolist())))
        self.assertTrue(torch.allclose(grad[rows], sums, rtol=1e-6, atol=1e-6))
        grad[rows] = 0
        self.assertEqual(grad.count_nonzero(), 0)
        self.assertEqual((own.traffic.rows, own.traffic.sent_bytes), (67, 67 * D * 4))

    def test_an_integer_index_of_any_width_will_do_and_no_grad_keeps_nothing(self) -> None:
        own = table()
        with torch.no_grad():
            self.assertTrue(torch.equal(own(torch.tensor([3, 1], dtype=torch.int32)), own.values[[3, 1]]))
        self.assertEqual(own.gradients()[0].numel(), 0)
        self.assertEqual(own.step(), 0)

    def test_lists_and_arrays_are_indices(self) -> None:
        own = table()
        expected = own(torch.tensor([[3, 1], [0, 3]]))
        for indices in ([[3, 1], [0, 3]], ((3, 1), (0, 3)), np.array([[3, 1], [0, 3]], dtype=np.int16)):
            self.assertTrue(torch.equal(own(indices), expected))
        self.assertEqual(own([]).shape, (0, D))
        self.assertTrue(torch.equal(own(3), expected[0, 0]))

    def test_the_same_bits_for_any_number_of_threads(self) -> None:
        results = []
        for threads in (1, 2, 5):
            own = table(threads=threads, rule="adam", quantize=True)
            for indices in (*batches(2), torch.arange(600) % R):
                loss_of(own(indices)).backward()
                own.step()
            results.append(own.values)
        for other in results[1:]:
            self.assertTrue(torch.equal(results[0], other))


class Rules(unittest.TestCase):
    def train(self, rule: str, make: Any) -> None:
        own = table(rule=rule, lr=0.1)
        theirs = embedding(own)
        optimizer = make(theirs.parameters())
        for indices in batches(6):
            optimizer.zero_grad()
            loss_of(theirs(indices)).backward()
            optimizer.step()
            loss_of(own(indices)).backward()
            self.assertEqual(own.step(), len(indices.unique()))
        self.assertTrue(torch.allclose(own.values, theirs.weight, rtol=1e-5, atol=1e-6))
        self.assertFalse(torch.equal(own.values, table().values))

    def test_sgd(self) -> None:
        self.train("sgd", lambda params: torch.optim.SGD(params, lr=0.1))

    def test_adam_is_that_of_sparse_gradients(self) -> None:
        self.train("adam", lambda params: torch.optim.SparseAdam(list(params), lr=0.1))

    def test_rowwise_adagrad_is_its_formula(self) -> None:
        own = table(rule="rowwise_adagrad", lr=0.1)
        weight, sums = own.values.double(), torch.zeros(R, dtype=torch.float64)
        for indices in batches(4):
            loss_of(own(indices)).backward()
            rows, grads = own.gradients()
            sums[rows] += grads.double().square().mean(1)
            weight[rows] -= 0.1 * grads.double() / (sums[rows].sqrt() + 1e-8)[:, None]
            own.step()
        self.assertTrue(torch.allclose(own.values.double(), weight, rtol=1e-5, atol=1e-6))

    def test_a_state_goes_on_in_another_table(self) -> None:
        for rule in ("sgd", "rowwise_adagrad", "adam"):
            first, second = table(rule=rule), zeroth.HostTable(R, D, rule=rule)
            for number, indices in enumerate(batches(4)):
                if number == 2:
                    second.load_state_dict({name: one.clone() for name, one in first.state_dict().items()})
                for one in (first, second)[: 1 + (number >= 2)]:
                    loss_of(one(indices)).backward()
                    one.step()
            self.assertTrue(torch.equal(first.values, second.values), rule)


class InEightBits(unittest.TestCase):
    def test_bytes_are_fewer_and_every_value_is_within_half_a_step(self) -> None:
        for block in (1, 8, 20, 64):
            own = table(quantize=True, block=block)
            own.values[7] = 0
            own.values[9, 3] = 1e30
            got = own(torch.arange(R))
            for begin in range(0, D, block):
                exact = own.values[:, begin : begin + block]
                scale = exact.abs().amax(1, keepdim=True) / 127
                error = (got[:, begin : begin + block] - exact).abs()
                self.assertTrue(bool((error <= scale * 0.500001).all()), block)
            blocks = -(-D // block)
            self.assertEqual(own.traffic.sent_bytes, R * (D + 4 * blocks))
            self.assertEqual(own.traffic.float32_bytes, R * D * 4)
            self.assertEqual(got[7].count_nonzero(), 0)

    def test_gradients_come_through_as_they_are(self) -> None:
        own, plain = table(quantize=True), table()
        for one in (own, plain):
            (one(torch.tensor([2, 4])) * 3.0).sum().backward()
        self.assertTrue(torch.equal(own.gradients()[1], plain.gradients()[1]))

    def test_a_value_that_is_not_finite_comes_as_nan(self) -> None:
        own = table(quantize=True, block=10)
        own.values[3, 2] = float("inf")
        got = own(torch.tensor([3]))
        self.assertTrue(bool(got[0, :10].isnan().all()) and bool(got[0, 10:].isfinite().all()))


class Refusals(unittest.TestCase):
    def test_an_index_that_is_no_row_is_named_with_its_position(self) -> None:
        for quantize in (False, True):
            own = table(quantize=quantize)
            for bad in (R, -1):
                with refused("USAGE", f"position 4 of 6; expected: 0 to 49; got: {bad}"):
                    own(torch.tensor([[0, 1, 2], [3, bad, 5]]))

    def test_what_makes_no_table_or_lookup(self) -> None:
        for options, text in (
            ({"rule": "lamb"}, "no such rule.*expected: sgd, rowwise_adagrad, adam"),
            ({"block": 0}, "empty blocks"),
            ({"lr": -0.1}, "which: lr; expected: a finite number from 0; got: -0.1"),
            ({"lr": float("nan")}, "which: lr"),
            ({"eps": -1.0}, "which: eps"),
            ({"betas": (0.9, 1.0)}, "which: betas"),
            ({"values": torch.zeros(2, 3)}, r"expected: \[50, 20\]; got: \[2, 3\]"),
        ):
            with refused("USAGE", text):
                zeroth.HostTable(R, D, **options)  # type: ignore[arg-type]
        with refused("USAGE", "no integers"):
            table()(torch.zeros(2))
        with refused("USAGE", "no integers.*float32"):
            table()([0.5])
        with refused("USAGE", "no tensor; .*lists of them that are equally long"):
            table()([[1, 2], [3]])
        own = table()
        own.lr = -1.0
        with refused("USAGE", "which: lr"):
            own.step()
        with refused("USAGE", "not that of a host table with this rule"):
            table(rule="adam").load_state_dict(table().state_dict())

    def test_where_it_lies_is_said(self) -> None:
        self.assertEqual((table().is_pinned, table().not_pinned), (False, "the model computes on the CPU"))


class Ranks(job.RankTest):
    def test_two_ranks_are_one_process_with_both_batches(self) -> None:
        self.run_well(2, "host_table_rank.py")


if __name__ == "__main__":
    unittest.main()
