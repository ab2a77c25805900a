"""A model that runs in layers, part after part, is the model: losses, gradients, initial values; and what is no chain
of layers is refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import resource
import time
import unittest
from typing import Any

import pipe_models
import tier
import torch
import zoo
from pipe_models import CLASSES, ROWS, WIDTH, Block, pairs
from pipe_parts import alone, require_equal, run_parts
from refusing import refused
from torch import nn
from torch.nn import functional as F

import zeroth
from zeroth import pipe

cross_entropy = F.cross_entropy
torch.set_num_threads(1)


def whole(model: nn.Module) -> Any:
    """The plain call of a list with a loss."""
    return lambda batch: cross_entropy(model(batch[0]), batch[1])


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


class Blocks(unittest.TestCase):
    def require_whole(self, model: nn.Module) -> pipe.Chain:
        chain = pipe.chain_of(model, sample=pairs(2)[0])
        require_equal(chain, lambda batch: model(*batch), pairs(ROWS, 2))
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
            (zoo.make("translating"), "which: h, from what runs before the first block to decoder.0"),
            (zoo.make("capturing"), "which: what (t|mm) reads, from what runs before the first block to blocks.0"),
            (pipe_models.Biased(), "which: position_bias, from what runs before the first block to blocks.1"),
            (pipe_models.Gathering(), "which: what .* reads, from blocks.0 to what runs after blocks.2"),
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


def tokens(rows: int, length: int, **more: Any) -> dict[str, Any]:
    """A micro-batch with padding on the right."""
    ids = torch.randint(2, 97, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    labels = torch.where(mask == 1, ids, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **more}


def decoder(name: str) -> nn.Module:
    """A small model of transformers, without dropout, in float64 where its experts allow it."""
    import tensor_families_rank
    import tensor_models
    import transformers

    torch.manual_seed(1)
    if name in tensor_models.MODELS:
        model = tensor_models.MODELS[name]()
    else:
        kind, options, _ = tensor_families_rank.FAMILIES[name]
        model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**options))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return (model if "Moe" in name or name in ("Mixtral", "GptOss") else model.double()).train()


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt2", "bert", "OPT", "GPTNeoX", "Bloom", "Falcon", "Phi",
            "Phi3", "StableLm", "Cohere", "Olmo", "Olmo2", "Gemma2", "Gemma3Text", "GPTJ", "Starcoder2", "GPTBigCode",
            "CodeGen", "Mixtral", "Qwen3Moe", "GptOss", "Granite", "SmolLM3", "Mpt", "Glm4", "Nemotron", "Persimmon",
            "BioGpt", "Llama4Text", "Roberta", "DistilBert")  # fmt: skip


class Transformers(unittest.TestCase):
    def require_whole(self, model: nn.Module, batches: list[Any]) -> pipe.Chain:
        chain = pipe.chain_of(model)
        require_equal(chain, lambda batch: model(**batch), batches)
        return chain

    @tier.both
    def test_a_family_in_parts_is_the_whole(self) -> None:
        for name in tier.rows(FAMILIES, ("llama", "qwen2", "gpt2", "Bloom")):
            with self.subTest(name):
                model = decoder(name)
                model.config.use_cache = False  # type: ignore[union-attr]  # some round what they put into it
                self.require_whole(model, [tokens(2, 8), tokens(1, 5)])

    def test_a_tied_head_has_two_layers(self) -> None:
        chain = pipe.chain_of(decoder("gpt2"))
        names = ["embedding", "transformer.h.0", "transformer.h.1", "head"]
        self.assertEqual([layer.name for layer in chain.layers], names)
        self.assertEqual(chain.uses["transformer.wte.weight"], (0, 3))
        self.assertEqual(chain.uses["lm_head.weight"], (0, 3))
        self.assertEqual(chain.uses["transformer.wpe.weight"], (0,))
        self.assertEqual(chain.uses["transformer.h.1.mlp.c_fc.weight"], (2,))
        self.assertEqual(chain.uses["transformer.ln_f.bias"], (3,))
        self.assertEqual(pipe.partition(chain, 3, ["transformer.h.1", "head"]), [0, 2, 3, 4])

    def test_recomputed_blocks_are_the_whole(self) -> None:
        for reentrant in (False, True):
            model = decoder("llama")
            plain = copy.deepcopy(model)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
            batch = tokens(2, 8)
            expected = plain(**batch).loss
            expected.backward()
            chain = pipe.chain_of(model)
            for boundaries in ([0, 2, 4], [0, 1, 2, 3, 4]):
                model.zero_grad()
                [loss] = run_parts(chain, boundaries, [batch])
                self.assertTrue(torch.equal(loss, expected.detach()))
                for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                    self.assertTrue(torch.equal(one.grad, other.grad), name)  # type: ignore[arg-type]

    def test_kernels_dtypes_and_positions_are_those_of_the_model(self) -> None:
        model = decoder("llama").to(torch.bfloat16)
        model.config._attn_implementation = "eager"  # type: ignore[union-attr]
        positions = torch.arange(8)[None] + 3
        chain = self.require_whole(model, [tokens(2, 8, position_ids=positions)])
        with alone(chain, 0, 2):
            self.assertEqual(chain.run(0, 2, None, tokens(1, 4)).dtype, torch.bfloat16)
        self.require_whole(model.float(), [tokens(2, 8)])  # after the look

    def test_evaluation_and_whole_calls_give_the_logits_of_the_model(self) -> None:
        model = decoder("qwen2").eval()
        chain = pipe.chain_of(model)
        batch = tokens(2, 8)
        del batch["labels"]
        with torch.no_grad():
            expected = model(**batch)
            self.assertIsNotNone(expected.past_key_values)
            output = chain.run(2, 4, chain.run(0, 2, None, batch), batch)
            self.assertTrue(torch.equal(output.logits, expected.logits))
            self.assertIsNone(output.past_key_values)
            self.assertTrue(torch.equal(model(**batch).logits, expected.logits))
        self.assertEqual(chain.notes, ("use_cache is off: a pipeline keeps no keys and values of earlier tokens",))

    def test_a_loss_of_the_user_takes_the_output_and_the_batch(self) -> None:
        model = decoder("llama")
        chain = pipe.chain_of(model, loss_fn=lambda output, batch: output.logits.sum() + batch["labels"].sum())
        batch = tokens(1, 4)
        expected = model(**batch).logits.sum() + batch["labels"].sum()
        self.assertTrue(torch.equal(run_parts(chain, [0, 2, 4], [batch])[0], expected.detach()))

    def test_what_needs_all_blocks_is_refused(self) -> None:
        model = decoder("llama")
        chain = pipe.chain_of(model)
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            with refused("USAGE", f"values of its own blocks only.*which: {name}"):
                chain.run(0, 1, None, tokens(1, 4, **{name: True}))
        with refused("USAGE", "keeps no keys and values"):
            chain.run(0, 1, None, tokens(1, 4, use_cache=True))
        model.config.output_hidden_states = True  # type: ignore[union-attr]
        with refused("USAGE", "values of its own blocks only.*which: output_hidden_states"):
            pipe.chain_of(model)
        with refused("MODEL", "more than the output of a block.*which: encoder_hidden_states, from decoder.block.0"):
            pipe.chain_of(decoder("t5"))

    @tier.long
    def test_shared_matrices_and_sequences_in_parts_are_the_whole(self) -> None:
        import job

        done = job.run(2, "pipe_mesh_rank.py")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout.count("mesh: ok"), 2)

    def test_tiles_of_the_loss_stay(self) -> None:
        model = decoder("llama")
        zeroth.parallel.tile_loss(model, tiles=3)
        chain = pipe.chain_of(model)
        require_equal(chain, lambda batch: model(**batch), [tokens(2, 8)])
        self.assertNotIn("logits", chain.run(0, 4, None, tokens(2, 8)))

    def test_a_block_of_a_model_is_measured(self) -> None:
        chain = pipe.chain_of(decoder("llama"))
        found = pipe.measure(chain, tokens(2, 8), "memory")
        self.assertEqual(found[1], found[2])
        self.assertGreater(found[1], 2 * 8 * 32 * 8 * 6)  # hidden states into norms, projections and the MLP
        self.assertEqual(len(pipe.measure(chain, tokens(2, 8), "time", repeats=1)), 4)

    def test_a_look_takes_no_memory(self) -> None:
        import transformers

        with torch.device("meta"):
            llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=6))
            mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(num_hidden_layers=2))
        for model, layers in ((llama, 8), (mixtral, 4)):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.assertEqual(len(pipe.chain_of(model).layers), layers)
            taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            self.assertLess(taken, sum(one.numel() for one in model.parameters()) * 4 / 20)


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


if __name__ == "__main__":
    tier.main()
