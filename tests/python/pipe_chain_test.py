"""A model that runs in layers, part after part, is the model: losses, gradients, initial values; and what is no chain
of layers is refused."""

from __future__ import annotations

import contextlib
import copy
import unittest

import pipe_hf_cases
import pipe_list_cases
import pipe_models
import pipe_partition_cases
import tier
import torch
import zoo
from pipe_models import CLASSES, WIDTH, cross_entropy, pairs, whole
from pipe_parts import require_equal, run_parts
from refusing import refused
from torch import nn

import zeroth
from zeroth import pipe

torch.set_num_threads(1)
Lists = pipe_list_cases.Lists
Specifications = pipe_list_cases.Specifications
SkipConnections = pipe_list_cases.SkipConnections
Partitions = pipe_partition_cases.Partitions
Transformers = pipe_hf_cases.Transformers


class Blocks(unittest.TestCase):
    def require_whole(self, model: nn.Module) -> pipe.Chain:
        chain = pipe.chain_of(model, sample=pairs(2)[0])
        require_equal(chain, lambda batch: model(*batch), pairs(3, 2))
        return chain

    def test_models_with_blocks_in_parts_are_the_whole(self) -> None:
        for name in ("plain", "sequential", "checkpoint_inside", "checkpoint_inside_reentrant", "frozen", "odd",
                     "root_mean_square"):  # fmt: skip
            with self.subTest(name):
                self.require_whole(zoo.make(name))

    def test_layers_are_what_lies_before_the_blocks_each_block_and_what_lies_after(self) -> None:
        model = zoo.make("plain")
        chain = self.require_whole(model)
        names = ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
        self.assertEqual([layer.name for layer in chain.layers], names)
        self.assertEqual([layer.modules for layer in chain.layers],
                         [(model.get_submodule(name),) for name in ("first", *names[1:4], "head")])  # fmt: skip
        self.assertEqual(chain.uses, {name: ({"first": 0, "head": 4}.get(name.split(".")[0], int(name[7]) + 1
                         if name.startswith("blocks") else -1),) for name, _ in model.named_parameters()})  # fmt: skip

    def test_tied_weights_have_two_layers_under_all_names(self) -> None:
        chain = self.require_whole(zoo.make("tied"))
        self.assertEqual(chain.uses["embedding.weight"], (0, 4))
        self.assertEqual(chain.uses["head.weight"], (0, 4))
        self.assertEqual(chain.uses["blocks.2.linear.weight"], (1, 3))

    def test_code_with_parameters_may_lie_around_blocks(self) -> None:
        model = pipe_models.Between().double()
        chain = self.require_whole(model)
        self.assertEqual(chain.uses["position"], (0, 5))
        self.assertEqual(chain.uses["bridge.weight"], (0, 3))
        self.assertEqual(chain.uses["scale"], (2, 3, 4, 5))
        self.assertEqual([len(layer.modules) for layer in chain.layers], [2, 1, 1, 2, 1, 2])
        model.float()  # after the look
        require_equal(chain, lambda batch: model(*batch), pairs(3, dtype=torch.float32), bound=1e-6)

    def test_blocks_may_pass_several_values_and_pass_no_others(self) -> None:
        chain = self.require_whole(pipe_models.Pairs().double())
        batch = pairs(2)[0]
        values = chain.run(0, 2, None, batch)
        self.assertEqual([getattr(one, "shape", one) for one in values], [(2, WIDTH), (2, WIDTH), WIDTH])

    def test_all_members_of_a_list_with_several_kinds_are_layers(self) -> None:
        chain = self.require_whole(pipe_models.Mixed().double())
        self.assertEqual(
            [layer.name for layer in chain.layers], ["embedding", *(f"blocks.{at}" for at in range(4)), "head"]
        )

    def test_a_model_may_look_at_values(self) -> None:
        self.require_whole(pipe_models.Choosing().double())

    def test_buffers_of_own_blocks_change_as_in_the_whole(self) -> None:
        model = zoo.make("normed")
        plain = copy.deepcopy(model)
        batch = pairs(4)[0]
        plain(*batch)
        chain = pipe.chain_of(model, sample=batch)
        run_parts(chain, [0, 2, 3, 5], [batch])
        self.assertEqual(chain.uses["blocks.1.norm.running_mean"], (2,))
        for (name, buffer), other in zip(model.named_buffers(), plain.buffers(), strict=True):
            self.assertTrue(torch.equal(buffer, other), name)

    def test_outside_of_a_run_the_model_is_as_before(self) -> None:
        model = zoo.make("plain")
        kinds = [type(module) for module in model.modules()]
        batch = pairs(2)[0]
        before = model(*batch)
        chain = pipe.chain_of(model, sample=batch)
        with self.assertRaises(RuntimeError):
            chain.run(2, 3, torch.ones(2, 5, dtype=torch.float64), batch)
        self.assertEqual([type(module) for module in model.modules()], kinds)
        self.assertTrue(torch.equal(model(*batch), before))
        self.assertTrue(all("_zeroth_call" not in vars(module) for module in model.modules()))

    def test_hooks_of_own_blocks_run_and_those_of_others_do_not(self) -> None:
        model = zoo.make("plain")
        called: list[str] = []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: called.append(f"<{name}"))
            module.register_forward_hook(lambda *_, name=name: called.append(f"{name}>"))
        chain = pipe.chain_of(model, sample=pairs(2)[0])
        called.clear()
        chain.run(2, 3, torch.ones(2, WIDTH, dtype=torch.float64), pairs(2)[0])
        self.assertEqual(called, ["<blocks.1", "<blocks.1.linear", "blocks.1.linear>", "blocks.1>"])
        chain.forward = lambda model, args, kwargs: model(*args, **kwargs)  # type: ignore[attr-defined]
        called.clear()
        chain.run(4, 5, torch.ones(2, WIDTH, dtype=torch.float64), pairs(2)[0])
        self.assertEqual(called, ["<", "<head", "head>", ">"])

    def test_a_loss_beside_the_model_takes_the_labels(self) -> None:
        class Logits(zoo.Plain):
            def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return self.head(self.through(self.first(x)))

        model = Logits().double()
        chain = pipe.chain_of(model, loss_fn=cross_entropy, sample=pairs(2)[0])
        require_equal(chain, whole(model), pairs(3))

    def test_a_deferred_model_is_looked_at_without_memory(self) -> None:
        model = zeroth.deferred(zoo.Tied)
        chain = pipe.chain_of(model, sample=pairs(2, dtype=torch.float32)[0])
        self.assertEqual(chain.uses["head.weight"], (0, 4))
        with contextlib.closing(zeroth.Engine(model, log_level="error")) as engine:
            self.assertEqual(engine.full("head.weight").shape, (CLASSES, WIDTH))

    def test_what_passes_besides_hidden_states_is_refused_by_name(self) -> None:
        for model, pattern in (
            (zoo.make("conditioned"), "which: memory, from what runs before the first block to blocks.1"),
            (zoo.make("translating"), "which: h, from what runs before the first block to decoder.0.*hint: an encoder"),
            (pipe_models.Residual(), "what add reads.*hint: .*what was there before its call: add it inside of the bl"),
            (pipe_models.Residual(scaled=True), "which: what add reads.*to the output of blocks.0.*add it inside of"),
            (zoo.make("capturing"), "which: what (t|mm) reads, from what runs before the first block to blocks.0"),
            (pipe_models.Biased(), "which: position_bias, from what runs before the first block to blocks.1"),
            (
                pipe_models.Gathering(),
                "which: what .* reads, from blocks.0 to .* after blocks.2.*hint: zeroth.pipe.sta",
            ),
            (zoo.make("reused"), "called twice.*which: blocks.0"),
            (zoo.make("viewed"), "which: what detach reads, from blocks.2 to what runs after blocks.2"),
            (zoo.make("slots"), "which: state, a Slotted, from what runs before the first block to blocks.0"),
            (zoo.make("nested"), "which: state, a State, from what runs before the first block to blocks.0"),
            (zoo.make("unused"), r"no layer uses a trainable parameter.*which: spare, blocks.1.linear.weight"),
        ):
            with self.subTest(type(model).__name__), refused("MODEL", pattern):
                pipe.chain_of(model.double(), sample=pairs(2)[0])
        model = zoo.make("unused")
        for parameter in (model.spare, *model.blocks[1].parameters()):  # type: ignore[union-attr,index]
            parameter.requires_grad_(False)  # type: ignore[union-attr]
        chain = self.require_whole(model)
        self.assertEqual(chain.uses["spare"], ())

    def test_models_without_a_chain_are_refused(self) -> None:
        sample = pairs(2)[0]
        with refused("MODEL", "nothing to split"):
            pipe.chain_of(nn.Linear(4, 4), sample=sample[0])
        with refused("USAGE", "has to be looked at with a batch.*sample="):
            pipe.chain_of(zoo.make("plain"))
        with refused("MODEL", "cannot be run for a look.*got: TypeError"):
            pipe.chain_of(zoo.make("plain"), sample=sample[0])
        with refused("USAGE", "nothing to split"):
            pipe.chain_of(nn.Sequential())
        with refused("USAGE", "layer cannot be called.*which: 1"):
            pipe.chain_of([nn.Linear(4, 4), 3])
        with refused("MODEL", "layer cannot be called.*which: 0"):
            pipe.chain_of(nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)])]))
        with refused("USAGE", "this is no model"):
            pipe.chain_of("model")

    def test_checkpoints_of_the_model_itself_may_lie_around_blocks(self) -> None:
        batches = pairs(3, 2)
        model = pipe_models.Around(use_reentrant=False).double()
        chain = pipe.chain_of(model, sample=batches[0])
        expected = [model(*batch) for batch in batches]
        for loss in expected:
            loss.backward()
        wanted = {name: one.grad.clone() for name, one in model.named_parameters()}  # type: ignore[union-attr]
        for boundaries in ([0, 2, 5], [0, 3, 5], [0, 2, 3, 4, 5], [0, 4, 5]):
            model.zero_grad()
            run_parts(chain, boundaries, batches)
            for name, parameter in model.named_parameters():
                self.assertTrue(torch.equal(parameter.grad, wanted[name]), (boundaries, name))  # type: ignore[arg-type]
            self.assertIsNone(torch._C._autograd._top_saved_tensors_default_hooks(True))

    def test_a_cut_that_recomputation_would_not_see_is_refused(self) -> None:
        batch = pairs(2)[0]
        h = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
        for model, first, last, block in (
            (pipe_models.Around(use_reentrant=False), 1, 3, "blocks.0"),
            (pipe_models.Around(use_reentrant=True), 2, 3, "blocks.0"),
            (pipe_models.Around(use_reentrant=True), 0, 2, "blocks.0"),
            (pipe_models.OneRegion(), 2, 4, "blocks.1"),
        ):
            chain = pipe.chain_of(model.double(), sample=batch)
            with refused("MODEL", f"inside an activation checkpoint.*which: {block}"):
                chain.run(first, last, h if first else None, batch)
        run_parts(chain, [0, 3, 5], [batch])

    def test_a_block_that_is_left_out_is_noticed(self) -> None:
        batch = pairs(2)[0]
        chain = pipe.chain_of(pipe_models.Dropping().double(), sample=batch)
        h = torch.ones(2, WIDTH, dtype=torch.float64)
        for first, last in ((2, 3), (3, 5)):
            with refused("MODEL", "has not called a block.*which: blocks.1"):
                chain.run(first, last, h, batch)

    def test_ranges_and_values_that_do_not_fit_are_refused(self) -> None:
        batch = pairs(2)[0]
        chain = pipe.chain_of(zoo.make("plain"), sample=batch)
        h = torch.ones(2, WIDTH, dtype=torch.float64)
        for first, last in ((-1, 2), (2, 2), (3, 2), (0, 6)):
            with refused("USAGE", "no such layers.*0 <= first < last <= 5"):
                chain.run(first, last, h, batch)
        with refused("USAGE", "begins without values.*which: blocks.1.*what blocks.0 returned"):
            chain.run(2, 3, None, batch)
        with refused("USAGE", "begins without values.*which: embedding.*expected: None"):
            chain.run(0, 3, h, batch)
        with refused("USAGE", "other values than the layer before.*which: blocks.1.*expected: 1 values; got: 2"):
            chain.run(2, 3, (h, h), batch)


if __name__ == "__main__":
    tier.main()
