"""Images that are split along their height, and which grid of ranks moves least."""

from __future__ import annotations

import itertools
import random
import unittest

import job
import tier
import torch
from torch import nn

import zeroth
from zeroth.parallel import Window, grid_cost, image_layers, part_sizes, plan_grid, received_rows


class Windows(unittest.TestCase):
    def test_every_output_has_the_rows_under_its_window(self) -> None:
        draw = random.Random(2)
        for size, stride, padding, dilation, ranks in itertools.product(
            (1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2), (1, 2, 4)
        ):
            window = Window(size=size, stride=stride, before=padding, after=padding, dilation=dilation)
            heights = [draw.randint(0, 6) for _ in range(ranks)]
            rows = sum(heights)
            if rows == 0 or rows + 2 * padding < window.reach:
                continue
            cut = window.cut(heights)
            outputs = window.height(rows)
            self.assertEqual(list(cut.heights), part_sizes(outputs, ranks))
            number = 0
            for height, (begin, end), (before, after) in zip(cut.heights, cut.wanted, cut.padding, strict=True):
                self.assertTrue(0 <= begin <= end <= rows and before >= 0 and after >= 0)
                for place in range(height):  # rows as the local convolution sees them
                    local = [place * stride + dilation * tap for tap in range(size)]
                    whole = [number * stride - padding + dilation * tap for tap in range(size)]
                    self.assertLess(local[-1], before + end - begin + after)
                    for one, other in zip(local, whole, strict=True):
                        inside = before <= one < before + end - begin
                        self.assertEqual(inside, 0 <= other < rows)
                        if inside:
                            self.assertEqual(begin + one - before, other)
                    number += 1
            self.assertEqual(number, outputs)

    def test_a_plain_convolution_takes_one_row_of_each_neighbour(self) -> None:
        heights = part_sizes(16, 4)
        cut = Window(size=3, before=1, after=1).cut(heights)
        self.assertEqual(received_rows(heights, cut.wanted), [1, 2, 2, 1])
        with self.assertRaisesRegex(zeroth.Error, "larger than the image"):
            Window(size=5).height(4)


class Grids(unittest.TestCase):
    def test_costs(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 8 * 4, 10)
        )
        layers = image_layers(model, torch.zeros(1, 3, 16, 8))
        self.assertEqual([layer.kind for layer in layers], ["window", "norm", "window", "linear"])
        self.assertTrue(model.training)
        alone = grid_cost(layers, 4, 1, 4)
        small = 4 * 3 * (3 * 8 * 9 + 8 + 16) * 4  # up to 8 KiB: in one phase
        self.assertEqual((alone.total, alone.gradients), (small + 2 * 3 * 257 * 10 * 4,) * 2)
        split = grid_cost(layers, 4, 4, 1)
        self.assertEqual(split.halo, 6 * 4 * 3 * 8 * 4)  # six rows travel of the first, none of the pooling
        self.assertEqual(split.gradients, small)
        self.assertEqual(split.activations, 4 * 3 * (256 + 10) * 4 + 4 * 3 * 4 * 256 * 4)
        whole = grid_cost(layers, 4, 4, 1, splits_linear=False)
        self.assertEqual((whole.halo, whole.activations), (split.halo, 0))
        self.assertEqual(whole.gradients, 2 * 3 * (3 * 8 * 9 + 8 + 16 + 257 * 10) * 4)  # of all, over all ranks
        self.assertEqual([one.rows for one in plan_grid(layers, 1, 4)], [4])
        with self.assertRaisesRegex(zeroth.Error, "does not fit the batch"):
            grid_cost(layers, 1, 2, 2)


class OnFourRanks(job.RankTest):
    def test_split_images_have_the_values_and_gradients_of_one_process(self) -> None:
        self.assertEqual(self.run_well(4, "spatial_rank.py").count("spatial: ok"), 4)


class Engines(job.RankTest):
    def test_engines_over_shared_images_take_the_steps_of_plain_torch(self) -> None:
        self.assertEqual(self.run_well(4, "images_rank.py").count("images: ok"), 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tier.main()
