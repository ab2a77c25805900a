"""Lists of layers, specified and built, in parts; for pipe_chain_test.py."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import subprocess
import sys
import unittest
from typing import Any

import pipe_models
import torch
from pipe_models import CLASSES, WIDTH, Block, cross_entropy, pairs, whole
from pipe_parts import require_equal, run_parts
from refusing import refused
from torch import nn

import zeroth
from zeroth import pipe


class Lists(unittest.TestCase):
    def test_a_sequential_in_parts_is_the_whole_also_with_other_shapes(self) -> None:
        model = pipe_models.sequential()
        chain = pipe.chain_of(model, loss_fn=cross_entropy)
        self.assertEqual([layer.name for layer in chain.layers], ["0", "1", "2", "3", "4", "5"])
        self.assertEqual(chain.layers[2].modules, (model[2],))
        self.assertEqual(chain.uses["4.linear.weight"], (4,))
        require_equal(chain, whole(model), pairs(3, 5, 1))

    def test_tuples_and_dicts_pass_between_functions_and_modules(self) -> None:
        layers = [pipe_models.Fork(), pipe_models.Join(), lambda x: (x[0].tanh(), x[1]), pipe_models.TwoArguments()]
        chain = pipe.chain_of([layer.double() if isinstance(layer, nn.Module) else layer for layer in layers],
                              loss_fn=cross_entropy)  # fmt: skip
        self.assertEqual(chain.layers[2].modules, ())
        self.assertEqual(set(chain.uses), {f"{at}.linear.{name}" for at in (0, 1, 3) for name in ("weight", "bias")})
        require_equal(chain, whole(chain.model), pairs(2, 4))

    def test_a_module_list_is_a_chain_and_a_shared_member_belongs_to_both_layers(self) -> None:
        shared = Block()
        model = nn.ModuleList([nn.Linear(4, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared]).double()
        chain = pipe.chain_of(model, loss_fn=lambda h, y: cross_entropy(h[:, :CLASSES], y))
        self.assertEqual(chain.uses["1.linear.weight"], (1, 3))
        self.assertEqual(chain.uses["3.linear.weight"], (1, 3))
        plain = nn.Sequential(*model)
        require_equal(chain, lambda batch: cross_entropy(plain(batch[0])[:, :CLASSES], batch[1]), pairs(3))

    def test_a_function_that_holds_a_module_uses_it(self) -> None:
        embedding = pipe_models.TiedHead(CLASSES, WIDTH).double()
        layers = [embedding, Block().double(), functools.partial(pipe_models.head_of, embedding)]
        chain = pipe.chain_of(layers, loss_fn=cross_entropy)
        self.assertEqual(chain.uses["0.weight"], (0, 2))
        self.assertEqual(chain.layers[2].modules, (embedding,))
        require_equal(chain, whole(chain.model), [(y, y) for _, y in pairs(4)])
        with refused("MODEL", "uses a module that is no layer of the list.*layer 1"):
            pipe.chain_of([nn.Linear(4, 4), lambda x: embedding(x)])

    def test_a_batch_that_is_no_pair_goes_to_the_first_layer_and_to_the_loss(self) -> None:
        chain = pipe.chain_of([lambda batch: batch["x"] * 2], loss_fn=lambda h, batch: (h - batch["y"]).sum())
        batch = {"x": torch.ones(2), "y": torch.ones(2)}
        self.assertEqual(float(chain.run(0, 1, None, batch)), 2.0)
        self.assertEqual(pipe.chain_of([lambda x: x]).run(0, 1, None, batch), batch)


def specified() -> list[Any]:
    """As a user of DeepSpeed writes it."""
    return [
        pipe.TiedLayerSpec("embedding", pipe_models.TiedHead, CLASSES, WIDTH),
        pipe.LayerSpec(Block),
        torch.tanh,
        pipe.LayerSpec(nn.Dropout, 0.0),
        pipe.LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False),
        pipe.TiedLayerSpec("embedding", pipe_models.TiedHead, CLASSES, WIDTH, forward_fn=pipe_models.head_of),
    ]


class Specifications(unittest.TestCase):
    def labels(self) -> list[Any]:
        return [(y, y) for _, y in pairs(4, 2)]

    def built(self, **more: Any) -> pipe.Chain:
        model = pipe.PipelineModule(specified(), loss_fn=cross_entropy, **more).double()
        chain = pipe.chain_of(model)
        pipe.build(chain, 0, len(chain.layers))
        return chain

    def test_all_ranks_know_names_and_shapes_and_only_the_builder_has_values(self) -> None:
        chain = pipe.chain_of(specified(), loss_fn=cross_entropy)
        names = ["tied_modules.embedding.weight", "1.linear.weight", "1.linear.bias", "4.weight"]
        self.assertEqual([name for name, _ in chain.model.named_parameters()], names)
        self.assertEqual(chain.uses["tied_modules.embedding.weight"], (0, 5))
        self.assertTrue(all(one.is_meta for one in chain.model.parameters()))
        pipe.build(chain, 1, 3)
        self.assertEqual([one.is_meta for one in chain.model.parameters()], [True, False, False, True])
        h = torch.ones(2, WIDTH)
        self.assertEqual(chain.run(1, 3, h, None).shape, (2, WIDTH))
        with refused("USAGE", r"has not been built.*layer 4, LayerSpec\(Linear, 12, 12, bias=False\)"):
            chain.run(4, 5, h, None)
        with refused("USAGE", "has not been built.*layer 0"):
            chain.model(torch.zeros(1, dtype=torch.int64))

    def test_parts_of_specified_layers_with_a_tied_weight_are_the_whole(self) -> None:
        chain = self.built()
        self.assertEqual(chain.model(torch.zeros(1, dtype=torch.int64)).dtype, torch.float64)
        require_equal(chain, whole(chain.model), self.labels())

    def test_recomputed_layers_are_the_whole(self) -> None:
        for interval, kinds, forwards in (
            (1, None, 2),
            (2, None, 2),
            (1, ["Block"], 2),
            (4, ["Block"], 1),
            (0, None, 1),
        ):
            chain = self.built(activation_checkpoint_interval=interval, checkpointable_layers=kinds)
            require_equal(chain, whole(chain.model), self.labels())
            calls: list[None] = []
            chain.layers[1].modules[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
            run_parts(chain, [0, 3, 6], self.labels()[:1])
            self.assertEqual(len(calls), forwards, (interval, kinds))

    def test_initial_values_do_not_depend_on_who_builds_what(self) -> None:
        values = self.built().model.state_dict()
        for boundaries in ([0, 3, 6], [0, 5, 6], [0, 1, 2, 3, 4, 5, 6]):
            for first, last in reversed(list(itertools.pairwise(boundaries))):
                chain = pipe.chain_of(pipe.PipelineModule(specified()).double())
                torch.randn(first)
                state, numbers = torch.get_rng_state(), random.getstate()
                pipe.build(chain, first, last)
                self.assertTrue(torch.equal(torch.get_rng_state(), state))
                self.assertEqual(random.getstate(), numbers)
                for name, tensor in chain.model.state_dict().items():
                    self.assertTrue(tensor.is_meta or torch.equal(tensor, values[name]), name)

    def test_each_layer_is_seeded_by_its_number(self) -> None:
        torch.manual_seed(21)
        chain = pipe.chain_of([pipe.LayerSpec(nn.Linear, 3, 3)] * 2)
        pipe.build(chain, 0, 2)
        for number, layer in enumerate(chain.layers):
            torch.manual_seed(21 + number)
            self.assertTrue(torch.equal(layer.modules[0].weight, nn.Linear(3, 3).weight))  # type: ignore[arg-type]

    def test_a_deferred_build_gives_an_engine_the_same_values(self) -> None:
        values = self.built().model.state_dict()
        chain = pipe.chain_of(pipe.PipelineModule(specified(), loss_fn=cross_entropy).double())
        pipe.build(chain, 0, 6, deferred=True)
        self.assertTrue(all(one.is_meta for one in chain.model.parameters()))
        with contextlib.closing(zeroth.Engine(chain.model, log_level="error")) as engine:
            for name, value in values.items():
                self.assertTrue(torch.equal(engine.full(name), value), name)

    def test_a_layer_that_needs_values_to_be_built_has_a_shape_all_the_same(self) -> None:
        class Scaled(nn.Linear):
            def __init__(self) -> None:
                super().__init__(3, 3)
                self.largest = self.weight.abs().max().item()

        chain = pipe.chain_of([pipe.LayerSpec(Scaled), nn.Linear(3, 1)])
        self.assertTrue(chain.model.get_parameter("0.weight").is_meta)
        pipe.build(chain, 0, 1)
        self.assertEqual(chain.layers[0].modules[0].largest, chain.model.get_parameter("0.weight").abs().max().item())

    def test_shapes_of_layers_draw_nothing_for_which_torch_would_import_its_compiler(self) -> None:
        lines = [
            "import sys",
            "from torch import nn",
            "from zeroth import pipe",
            "class Drawn(nn.Linear):",
            "    def reset_parameters(self):",
            "        nn.init.trunc_normal_(self.weight)",
            "        self.bias.data.uniform_()",
            "kinds = [(nn.Embedding, 3, 4), (nn.Linear, 4, 4), (Drawn, 4, 4)]",
            "pipe.LayerList([pipe.LayerSpec(*kind) for kind in kinds])",
            "sys.exit('torch._dynamo' in sys.modules)",
        ]
        self.assertEqual(subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode, 0)

    def test_frozen_parameters_and_modes_stay_what_they_were(self) -> None:
        chain = pipe.chain_of([pipe.LayerSpec(nn.Linear, 3, 3)] * 2)
        chain.model.eval()
        chain.model.get_parameter("0.bias").requires_grad_(False)
        pipe.build(chain, 0, 2)
        self.assertFalse(chain.model.get_parameter("0.bias").requires_grad)
        self.assertTrue(chain.model.get_parameter("1.bias").requires_grad)
        self.assertFalse(any(module.training for module in chain.model.modules()))

    def test_specifications_of_deepspeed_itself_are_taken(self) -> None:
        class LayerSpec:  # as there
            def __init__(self, typename: Any, *args: Any, **kwargs: Any) -> None:
                self.typename, self.module_args, self.module_kwargs = typename, args, kwargs

        class TiedLayerSpec(LayerSpec):
            def __init__(self, key: str, typename: Any, *args: Any, forward_fn: Any = None) -> None:
                super().__init__(typename, *args)
                self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, ["weight"]

        tied = TiedLayerSpec("embedding", pipe_models.TiedHead, CLASSES, WIDTH)
        head = TiedLayerSpec("embedding", pipe_models.TiedHead, CLASSES, WIDTH, forward_fn=pipe_models.head_of)
        theirs = [tied, LayerSpec(Block), torch.tanh, nn.Dropout(0.0), LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False)]
        chain = pipe.chain_of(pipe.PipelineModule([*theirs, head], loss_fn=cross_entropy).double())
        pipe.build(chain, 0, 6)
        values = self.built().model.state_dict()
        self.assertEqual(list(chain.model.state_dict()), list(values))
        for name, tensor in chain.model.state_dict().items():
            self.assertTrue(torch.equal(tensor, values[name]), name)

    def test_wrong_specifications_are_refused(self) -> None:
        with refused("USAGE", "described by what makes it.*typename"):
            pipe.LayerSpec(nn.Linear(2, 2).weight)  # type: ignore[arg-type]
        with refused("MODEL", "has not the weights.*key: kernel"):
            pipe.chain_of([pipe.TiedLayerSpec("key", nn.Linear, 2, 2, tied_weight_attr="kernel")])
        with refused("USAGE", r"is no module.*LayerSpec\(dict\)"):
            pipe.chain_of([pipe.LayerSpec(dict)])  # type: ignore[arg-type]
        with refused("USAGE", "not known here.*topology"):
            pipe.PipelineModule([], topology=object())


def skips() -> list[Any]:
    torch.manual_seed(9)
    keep, use = pipe_models.Keep, pipe_models.Use
    layers = [nn.Linear(4, WIDTH), keep("outer"), keep("inner"), Block(), use("inner"), use("outer"),
              nn.Linear(WIDTH, CLASSES)]  # fmt: skip
    return [layer.double() for layer in layers]


class SkipConnections(unittest.TestCase):
    def test_stashed_values_travel_past_layers_and_gradients_back(self) -> None:
        for interval in (0, 1, 3):
            model = pipe.PipelineModule(skips(), loss_fn=cross_entropy, activation_checkpoint_interval=interval)
            require_equal(pipe.chain_of(model), whole(model), pairs(3, 2))

    def test_blocks_of_a_model_may_stash(self) -> None:
        model = pipe_models.Skips().double()
        chain = pipe.chain_of(model, sample=pairs(2)[0])

        def plain(batch: Any) -> torch.Tensor:
            with pipe.stashing() as held:
                loss = model(*batch)
                held.require_empty()
            return loss

        require_equal(chain, plain, pairs(3, 2))

    def test_values_that_do_not_match_are_refused(self) -> None:
        x = torch.ones(1)
        with refused("USAGE", "never popped.*which: a, b"):
            chain = pipe.chain_of([lambda x: pipe.stash("a", x), lambda x: pipe.stash("b", x)])
            chain.run(0, 2, None, x)
        model = pipe_models.Skips()
        model.blocks = nn.ModuleList([pipe_models.Keep("a"), Block(), Block()])
        blocks = pipe.chain_of(model.double(), sample=pairs(2)[0])
        with refused("USAGE", "never popped.*which: a"):
            blocks.run(2, 5, blocks.run(0, 2, None, pairs(2)[0]), pairs(2)[0])
        twice = pipe.chain_of([lambda x: pipe.stash("a", x), lambda x: pipe.pop("a"), lambda x: pipe.pop("a")])
        with refused("USAGE", "popped that is not stashed.*which: a.*each value is popped once"):
            twice.run(2, 3, twice.run(0, 2, None, x), x)
        with refused("USAGE", "has one already.*which: a"):
            pipe.chain_of([lambda x: pipe.stash("a", x)] * 2).run(0, 2, None, x)
        with refused("USAGE", "nothing carries stashed values here.*which: a"):
            pipe.stash("a", x)
