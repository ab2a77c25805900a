"""What the Python engine refuses, and the line that helps."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import re
import tempfile
import unittest
import unittest.mock

import forked
import job
import torch
import torch.distributed as dist
import zoo
from alone import BATCH, config, make, train
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeroth


class Refusals(unittest.TestCase):
    def test_gradients_that_somebody_looks_for_are_refused_by_name(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            engine.backward(engine(*BATCH))
            with self.assertRaisesRegex(
                RuntimeError,
                r"gradient of 'first\.weight' is in the engine.*engine\.full\(\"first\.weight\", \"grad\"\)",
            ):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with self.assertRaisesRegex(RuntimeError, r"gradient of 'head\.bias' is in the engine"):
                model.head.bias.grad.norm()
            engine.backward(engine(*BATCH))  # and they are out of the way of the next ones
            loss = engine(*BATCH)
            loss.backward(retain_graph=True)
            loss.backward()
            model.zero_grad()
            for use in (engine.step, lambda: engine(*BATCH), lambda: engine.backward(loss)):  # noqa: B023
                with self.assertRaisesRegex(
                    zeroth.Error, r"set or deleted.*which: first\.weight.*None.*engine\.zero_grad\(\)"
                ):
                    use()
            engine.zero_grad()
            self.assertTrue(train(engine).committed)
            model.zero_grad()  # after a step there is nothing to lose
            self.assertTrue(train(engine).committed)

    def test_an_optimizer_of_torchs_is_refused(self) -> None:
        model, engine = make()
        other = nn.Linear(2, 2)
        train(engine)
        with self.assertRaisesRegex(zeroth.Error, "steps over parameters that an engine owns.*which: SGD"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        engine.close()
        model(*BATCH).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    def test_losses_without_a_gradient(self) -> None:
        _, engine = make()
        with self.assertRaisesRegex(zeroth.Error, "no gradient can flow"), torch.no_grad():
            engine.backward(engine(*BATCH))
        with self.assertRaisesRegex(zeroth.Error, "without a backward"):
            engine.step()

    def test_models_that_cannot_be_partitioned(self) -> None:
        for model, text in (
            (nn.Linear(2, 2, device="meta"), "meta tensor"),
            (nn.Linear(2, 2).to(torch.float16), "no loss scale is configured"),
        ):
            with self.assertRaisesRegex(zeroth.Error, text):
                zeroth.Engine(model, config(), log_level="off")

    def test_a_module_that_was_moved_cast_or_refilled_is_named(self) -> None:
        def cast(model: nn.Module) -> None:
            with contextlib.suppress(RuntimeError):  # where a step has left guards in the gradients, these speak first
                model.float()

        def refill(model: nn.Module) -> None:
            model.blocks[1].linear.weight.data = torch.zeros(12, 12, dtype=torch.float64)

        for stage in (0, 2):
            for change, name in ((cast, r"first\.weight"), (refill, r"blocks\.1\.linear\.weight")):
                model, engine = make(stage=stage)
                train(engine)
                change(model)
                with self.assertRaisesRegex(zeroth.Error, rf"moved, cast or given other data.*which: {name}"):
                    engine(*BATCH)
        model, engine = make(stage=3)
        with self.assertRaisesRegex(RuntimeError, "is not gathered"):
            model.float()

    def test_parameters_over_one_memory_are_refused(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.data = model[0].weight.data.t()
        with self.assertRaisesRegex(zeroth.Error, r"share memory.*which: 0\.weight and 1\.weight"):
            zeroth.Engine(model, config(), log_level="off")
        whole = torch.randn(8, 4)
        model[0].weight.data, model[1].weight.data = whole[:4], whole[4:]  # but parts of one may be side by side
        zeroth.Engine(model, config(), log_level="off").close()

    def test_a_write_that_would_be_lost_is_named(self) -> None:
        for stage in (0, 3):
            normed = nn.Sequential(nn.Embedding(10, 4, max_norm=0.1), nn.Linear(4, 4), nn.Linear(4, 4))
            engine = zeroth.Engine(normed, config(stage), log_level="off")
            with self.assertRaisesRegex(zeroth.Error, r"written in place during a forward.*which: 0\.weight.*max_norm"):
                engine(torch.arange(10))

    def test_a_write_that_lasts_is_taken(self) -> None:
        # Weight clipping, where every rank has all parameters.
        def trained(stage: int | None, **more: object) -> list[torch.Tensor]:
            model = zoo.make("plain")
            engine = None if stage is None else zeroth.Engine(model, config(stage, **more), log_level="off")
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for _ in range(3):
                model(*BATCH).backward()
                if engine is not None:
                    self.assertTrue(engine.step().committed)
                else:
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.clamp_(-0.1, 0.1)
            if engine is not None:
                engine.close()
            return [parameter.detach() for parameter in model.parameters()]

        expected = trained(None)
        for stage in (0, 1, 2):
            for copies in (False, True):
                got = trained(stage, zeroth={"compute_copies": copies})
                for mine, theirs in zip(got, expected, strict=True):
                    self.assertLess((mine - theirs).abs().max().item(), 1e-12, (stage, copies))

    def test_a_module_that_was_replaced_is_named(self) -> None:
        class Wrapped(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, *args: object) -> object:
                return self.inner(*args)

        for stage in (0, 3):
            model, engine = make(stage=stage)
            train(engine)
            model.blocks[1] = Wrapped(model.blocks[1])  # the same parameters below
            self.assertTrue(train(engine).committed)
            head = model.head
            model.head = nn.Linear(12, 5, dtype=torch.float64)
            with self.assertRaisesRegex(zeroth.Error, r"replaced or removed.*which: head\.weight"):
                engine(*BATCH)
            model.head = nn.Sequential()  # for features alone, and back again
            with torch.no_grad():
                self.assertEqual(
                    model.head(model.through(model.first(BATCH[0]))).shape, (3, 12)
                ) if stage == 0 else None
            model.head = head
            self.assertTrue(train(engine).committed)
            model.probe = nn.Linear(2, 2).requires_grad_(False)
            self.assertTrue(train(engine).committed)
            model.more = nn.Linear(2, 2)
            with self.assertRaisesRegex(zeroth.Error, r"added after the engine was built.*which: more\.weight"):
                engine(*BATCH)

    def test_what_is_written_where_it_was_gathered_is_named(self) -> None:
        model, engine = make(stage=3)
        loss = engine(*BATCH)
        with torch.no_grad():
            model.head.bias.clamp_(-0.1, 0.1)  # gathered from forward to backward
        engine.backward(loss)
        with self.assertRaisesRegex(zeroth.Error, r"written in place.*which: head\.bias.*gathered from the shards"):
            engine.step()

    def test_a_loop_that_forgets_every_accumulation_is_named(self) -> None:
        engine = zeroth.Engine(zoo.make("plain"), config(gradient_accumulation_steps=2), log_level="off")
        engine.backward(engine(*BATCH))
        engine.zero_grad()
        train(engine)
        engine.zero_grad()
        self.assertFalse(train(engine).boundary)
        with self.assertRaisesRegex(
            zeroth.Error, r"drops every accumulation.*1 of 2 micro-steps.*second time.*end_accumulation\(\)"
        ):
            engine.zero_grad()
        self.assertTrue(train(engine).committed)

    def test_a_refused_module_is_as_it_was(self) -> None:
        model = nn.Linear(4, 4)
        model.register_buffer("graph", torch.eye(4).to_sparse())
        before = model.weight.detach().clone()
        engine = zeroth.Engine(model, config(), log_level="off")  # one rank shares nothing
        engine.close()
        with self.assertRaisesRegex(zeroth.Error, "no such log level"):
            zeroth.Engine(model, config(), log_level="loud")
        self.assertTrue(torch.equal(model.weight, before))

    def test_a_parameter_that_was_replaced_is_named(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            train(engine)
            model.blocks[2].linear.bias = nn.Parameter(torch.zeros(12, dtype=torch.float64))
            with self.assertRaisesRegex(zeroth.Error, r"replaced or removed.*which: blocks\.2\.linear\.bias"):
                engine(*BATCH)
            # The others get their values; nobody thinks that this one has, too.
            with self.assertRaisesRegex(
                zeroth.Error, r"replaced or removed.*where: python\.close; which: blocks\.2\.linear\.bias"
            ):
                engine.close()
            self.assertTrue(model.head.weight.abs().sum() > 0)
            engine.close()

    def test_an_export_of_what_was_cast_is_refused(self) -> None:
        for stage in (0, 2):
            model, engine = make(stage=stage)
            model.float()
            with tempfile.TemporaryDirectory() as folder:
                with self.assertRaisesRegex(zeroth.Error, r"moved, cast or given other data.*which: first\.weight"):
                    engine.export_safetensors(f"{folder}/model.safetensors")
                self.assertEqual(os.listdir(folder), [])

    def test_an_input_on_another_device_is_named(self) -> None:
        _, engine = make()
        with self.assertRaisesRegex(
            zeroth.Error, r"input is on another device.*input tensor 1.*expected: cpu; got: meta"
        ):
            engine(BATCH[0], y=BATCH[1].to("meta"))
        self.assertTrue(train(engine).committed)

    def test_tensors_that_stand_for_others_are_refused(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.data, mesh, [Shard(0)]))
            with self.assertRaisesRegex(
                zeroth.Error, r"tensor subclass; where: python\.engine; which: 1\.weight.*before fully_shard"
            ):
                zeroth.Engine(model, config(), log_level="off")
        finally:
            dist.destroy_process_group()

    def test_compiled_autograd_is_refused(self) -> None:
        for stage in (0, 3):
            _, engine = make(stage=stage)
            with (
                compiled_autograd._enable(lambda graph: graph),
                self.assertRaisesRegex(RuntimeError, "compiled autograd.*leave"),
            ):
                engine.backward(engine(*BATCH))
            engine.zero_grad()  # or step(), which is skipped
            self.assertTrue(train(engine).committed)

    def test_an_error_inside_backward_is_the_librarys(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4).half(), nn.Linear(4, 4).half())
        engine = zeroth.Engine(model, {**config(0), "fp16": {"enabled": True}}, log_level="off")
        x = torch.ones(2, 4).half()
        for run in (lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss])):
            with self.assertRaisesRegex(zeroth.Error, "would enter the model without the loss scale") as caught:
                run(engine(x).sum() + model[0].weight.sum())
            self.assertEqual((caught.exception.code, caught.exception.exit_code), ("MODEL", 65))
            self.assertEqual(caught.exception.which, "0.weight")
        engine.zero_grad()
        engine.backward(engine(x).sum())
        self.assertTrue(engine.step().boundary)

    def test_a_forked_child_is_told_and_the_parent_goes_on(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            train(engine)
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                told = []
                for use in (
                    lambda: model(*BATCH),
                    lambda: train(engine),
                    engine.step,
                    engine.close,
                    lambda: engine.average(1.0),
                    engine.memory_report,
                ):
                    try:
                        use()
                        told.append("nothing")
                    except zeroth.Error as error:
                        told.append(error.message)
                os.write(writer, json.dumps(told).encode())
                del engine
                gc.collect()
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as answers:
                told = json.loads(answers.read())
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(told, ["a forked child uses the engine of its parent"] * 6)
            self.assertTrue(train(engine).committed)


forked.preload("torch._dynamo", "torch.distributed.tensor")


class Settings(unittest.TestCase):
    """Values that contradict each other, or the job: an error with the key, and not a run that is something else."""

    def test_a_value_that_cannot_be_is_named(self) -> None:
        warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.001}}
        rows: list[tuple[object, str]] = [
            ({"data_parallel_size": 4}, r"another number of data ranks.*/data_parallel_size; expected: 4 data ranks"),
            (
                {"fp16": {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 1024}},
                r"smallest loss scale is above the first.*at most 16",
            ),
            ({"scheduler": warmup}, r"warmup begins above its end.*warmup_min_lr.*at most warmup_max_lr = 0\.001"),
            ([], "the configuration is no document.*got: list"),
            (42, "the configuration is no document.*got: int 42"),
        ]
        for given, text in rows:
            with self.subTest(given), self.assertRaisesRegex(zeroth.Error, f"CONFIG.*{text}"):
                zeroth.Engine(nn.Linear(4, 4), given, log_level="off")  # type: ignore[arg-type]
        long = zeroth.Config.from_json("{}", overrides=[zeroth.ConfigOverride("/bfloat16/enabled", True)])
        self.assertEqual(json.loads(long.to_json())["bf16"]["enabled"], True)
        with (
            unittest.mock.patch.dict("os.environ", {"ZEROTH_INTERFACE": "nosuch0"}),
            self.assertRaisesRegex(zeroth.Error, "no such interface"),
        ):
            zeroth.Engine(nn.Linear(4, 4), log_level="off")

    def test_groups_by_hand(self) -> None:
        def step_with(key: str, value: object) -> None:
            engine = zeroth.Engine(nn.Linear(4, 4), log_level="off")
            engine.optimizer.param_groups[0][key] = value
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()

        for key, value in (("lr", -1.0), ("lr", float("inf")), ("weight_decay", -0.1), ("weight_decay", float("nan"))):
            with self.subTest((key, value)), self.assertRaisesRegex(zeroth.Error, f"USAGE.*'{key}'.*at least 0"):
                step_with(key, value)
        step_with("lr", -1e-19)  # what a schedule rounds to
        for change in (
            lambda groups: groups.append({"params": []}),
            lambda groups: groups.clear(),
        ):
            engine = zeroth.Engine(nn.Linear(4, 4), log_level="off")
            change(engine.optimizer.param_groups)
            engine.backward(engine(torch.ones(1, 4)).sum())
            with self.assertRaisesRegex(zeroth.Error, "USAGE.*takes no further parameter groups.*expected: 1 group"):
                engine.step()

    def test_an_engine_is_no_value(self) -> None:
        engine = zeroth.Engine(nn.Linear(4, 4), log_level="off")
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with self.subTest(copied), self.assertRaisesRegex(zeroth.Error, "USAGE.*not copied or pickled"):
                copied(engine)


class Parts(unittest.TestCase):
    def test_a_layer_that_was_taken_out_is_named(self) -> None:
        for stage in (0, 3):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
            engine = zeroth.Engine(model, {"zero_optimization": {"stage": stage}}, units=list(model), log_level="off")
            del model[3]
            with self.assertRaisesRegex(zeroth.Error, r"MODEL.*replaced or removed.*which: 3\.weight"):
                engine(torch.ones(1, 4))
            model.eval()
            with torch.no_grad():
                engine(torch.ones(1, 4))  # without it, for a look
            engine.close()

    def test_functional_call_lends_other_tensors(self) -> None:
        for stage in (0, 3):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            plain = copy.deepcopy(model)
            engine = zeroth.Engine(model, {"zero_optimization": {"stage": stage}}, log_level="off")
            x = torch.ones(2, 4)
            found = []
            for call in (model, plain):
                given = {
                    name: (value.detach() * 2 if call is plain else plain.get_parameter(name).detach() * 2)
                    for name, value in call.named_parameters()
                }
                for value in given.values():
                    value.requires_grad_()
                out = torch.func.functional_call(call, given, (x,))
                out.square().sum().backward()
                found.append([out.detach(), *(value.grad for value in given.values())])
            for mine, theirs in zip(*found, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            engine.zero_grad()
            loss = engine(x).square().sum()
            engine.backward(loss)  # and it trains as before
            plain(x).square().sum().backward()
            self.assertEqual(loss, plain(x).square().sum())
            self.assertTrue(torch.equal(engine.full("0.weight", "grad"), plain[0].weight.grad))
            engine.close()


class OnTwoRanks(job.RankTest):
    def test_mistakes_of_both_ranks_and_of_one(self) -> None:
        told: dict[str, dict[str, str]] = {}
        lines = self.run_well(2, "refusals_rank.py", limit_s=120)
        for name, rank, text in re.findall(r"\[[01]\] (.*): rank ([01]) is told (.*)", lines):
            told.setdefault(name, {})[rank] = text
        replaced = r"\[MODEL\] a parameter was replaced or removed.*which: "
        for name, own in (
            ("cast", r"\[MODEL\] a parameter was moved, cast or given other data.*which: first\.weight"),
            ("meta at 0", r"\[USAGE\] the gradient of 'first\.weight' is in the engine"),
            ("meta at 3", r"\[USAGE\] parameter 'first\.weight' is not gathered now"),
            ("replaced", replaced + r"head\.bias"),
            ("written", r"\[MODEL\] a parameter was written in place.*which: head\.bias"),
        ):
            with self.subTest(name=name):
                both, alone = told[f"{name}, both"], told[f"{name}, rank 1"]
                for rank, other in (("0", "1"), ("1", "0")):  # whoever comes second may hear of the first
                    self.assertRegex(both[rank], rf"^{own}|^\[PEER_LOST\] rank {other} \(pid \d+ on \S+\) left early")
                self.assertRegex(" ".join(both.values()), own)
                self.assertRegex(alone["1"], f"^{own}")
                self.assertRegex(alone["0"], r"^\[PEER_LOST\] rank 1 \(pid \d+ on \S+\) left early")
        for name, size in (("size, both", 3), ("size, rank 1", 2)):
            for rank in ("0", "1"):
                self.assertRegex(
                    told[name][rank], rf"^\[MISMATCH\] rank 1 .* says that there are 4 ranks, rank 0 .* says {size}"
                )
        self.assertRegex(
            told["world, rank 1"]["1"],
            r"^\[ENVIRONMENT\] torch\.distributed and the environment speak of different worlds",
        )
        self.assertRegex(
            told["world, rank 1"]["0"], r"^\[PEER_LOST\] rank 1 \(pid \d+\) exited with code 0 before the ranks met"
        )
        self.assertEqual({len(ranks) for ranks in told.values()}, {2})


if __name__ == "__main__":
    unittest.main(verbosity=2)
