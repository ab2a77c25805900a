"""The Python engine in a world of one, and how its ranks end: what it promises about a module, and what it refuses."""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import warnings

import job
import torch
import torch.distributed as dist
import zoo
from safetensors.torch import load_file
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import zeroth

BATCH = (torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1]))


def config(stage: int = 3, **more: object) -> dict[str, object]:
    return {"zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **more}


def make(name: str = "plain", stage: int = 3) -> tuple[nn.Module, zeroth.Engine]:
    model = zoo.make(name)
    return model, zeroth.Engine(model, config(stage), log_level="off")


def same_parameters(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one.parameters(), other.parameters(), strict=True))


def train(engine: zeroth.Engine, steps: int = 1) -> zeroth.StepResult:
    for _ in range(steps):
        engine.backward(engine(*BATCH))
        result = engine.step()
    return result


class Package(unittest.TestCase):
    def test_another_torch_is_refused_by_name(self) -> None:
        check = sys.modules["zeroth._preflight"].check_torch
        check("2.11.0+cu130", "2.11.0")
        with self.assertRaisesRegex(ImportError, r"built with torch 2\.11\.0\+cu130, and this is torch 2\.13\.0.*pip install"):
            check("2.13.0+cpu", "2.11.0+cu130")

    def test_the_stub_names_what_is_there(self) -> None:
        module = sys.modules["zeroth._C"]
        stub = ast.parse((pathlib.Path(zeroth.__file__).parent / "_C.pyi").read_text())
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        self.assertEqual(set(classes), {name for name in vars(module) if isinstance(getattr(module, name), type)})
        for name, node in classes.items():
            if issubclass(getattr(module, name), Exception):
                continue  # attributes of instances
            there = {member for member in vars(getattr(module, name)) if not member.startswith("_")}
            self.assertEqual({item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name != "__init__"}, there, name)

    def test_the_types_are_strict(self) -> None:
        package = pathlib.Path(zeroth.__file__).parent
        trainer = [str(path) for path in sorted((pathlib.Path(__file__).resolve().parents[2] / "examples/gpt").glob("*.py"))]
        self.assertTrue(trainer)
        with tempfile.TemporaryDirectory() as cache:
            for checked in (["-p", "zeroth"], trainer):
                done = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, *checked], cwd=package.parent,
                                      env={**os.environ, "MYPYPATH": str(package.parent)}, capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_version_is_that_of_the_project(self) -> None:
        self.assertRegex(zeroth.__version__, r"^\d+\.\d+\.\d+$")


class Units(unittest.TestCase):
    def test_the_longest_repeated_list_is_found(self) -> None:
        self.assertEqual([(unit.name, unit.type) for unit in zeroth.units(zoo.make("plain"))],
                         [("root", "Plain"), ("blocks.0", "Block"), ("blocks.1", "Block"), ("blocks.2", "Block")])
        self.assertEqual([unit.name for unit in zeroth.units(zoo.make("sequential"))],
                         ["root", "body.1", "body.2", "body.3"])
        self.assertEqual([unit.name for unit in zeroth.units(nn.Linear(2, 2))], ["root"])

    def test_sizes_are_those_of_the_engine(self) -> None:
        for name in zoo.MODELS:
            model = zoo.make(name)
            described = zeroth.units(model)
            sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
            engine = zeroth.Engine(model, config(), log_level="off")
            got = [(unit, sum(sizes[key] for key in names)) for unit, _, names in engine._core.units]
            self.assertEqual(got, [(unit.name, unit.num_params) for unit in described], name)
            engine.close()

    def test_the_user_may_choose(self) -> None:
        model = zoo.make("plain")
        engine = zeroth.Engine(model, config(), units=[model.blocks[1], model.head], log_level="off")
        self.assertEqual([name for name, _, _ in engine._core.units], ["root", "blocks.1", "head"])
        train(engine)
        with self.assertRaisesRegex(zeroth.Error, "not a module inside the model"):
            zeroth.Engine(zoo.make("plain"), config(), units=[nn.Linear(2, 2)], log_level="off")


class Module(unittest.TestCase):
    def test_parameters_stay_the_users_and_are_guarded(self) -> None:
        model, engine = make()
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        train(engine)
        self.assertEqual(before, {name: id(parameter) for name, parameter in model.named_parameters()})
        weight = model.blocks[1].linear.weight
        self.assertEqual(weight.shape, (zoo.WIDTH, zoo.WIDTH))
        for touch in (lambda: weight.sum(), lambda: weight.zero_(), lambda: weight.numpy(force=True), lambda: weight.tolist(),
                      lambda: weight.clone(), lambda: torch.save(weight, os.devnull)):
            with torch.no_grad(), self.assertRaisesRegex(RuntimeError, r"parameter 'blocks\.1\.linear\.weight' is not gathered"):
                touch()

    def test_state_dict_is_refused_where_parameters_are_sharded(self) -> None:
        model, engine = make(stage=3)
        with self.assertRaisesRegex(zeroth.Error, "has no state_dict.*export_safetensors"):
            model.state_dict()
        engine.close()
        self.assertIn("head.weight", model.state_dict())
        model, engine = make(stage=2)
        self.assertEqual(model.state_dict()["head.weight"].shape, (zoo.CLASSES, zoo.WIDTH))

    def test_hooks_of_the_user_run_before_and_after_ours(self) -> None:
        model = zoo.make("plain")
        seen: list[str] = []
        block = model.blocks[1]

        def note(text: str, value: torch.Tensor | None = None) -> None:
            seen.append(text if value is None else f"{text} {value.sum().isfinite().item()}")

        block.register_forward_pre_hook(lambda module, args: note("pre early", module.linear.weight))
        block.register_forward_hook(lambda module, args, output: note("post early", module.linear.weight))
        block.linear.weight.register_hook(lambda grad: note("grad early"))
        block.linear.bias.register_post_accumulate_grad_hook(lambda parameter: note("accumulated early", parameter.grad))
        engine = zeroth.Engine(model, config(), log_level="off")
        block.register_forward_pre_hook(lambda module, args: note("pre late", module.linear.weight))
        block.register_forward_hook(lambda module, args, output: note("post late", output))
        block.linear.weight.register_hook(lambda grad: note("grad late"))
        block.register_full_backward_hook(lambda module, grads, outs: note("backward late"))
        train(engine)
        for text in ("pre early True", "post early True", "grad early", "accumulated early True", "pre late True", "post late True",
                     "grad late", "backward late"):
            self.assertEqual(seen.count(text), 1, (text, seen))

    def test_a_hook_after_accumulation_that_comes_later_leaves_ours(self) -> None:
        model, engine = make()
        calls: list[str] = []
        handle = model.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("late"))
        first = train(engine)
        handle.remove()
        second = train(engine)
        self.assertTrue(first.committed and second.committed)
        self.assertGreater(second.grad_norm, 0)
        self.assertEqual(len(calls), 1)

    def test_training_goes_on_after_an_exception_in_forward(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            reference_model, reference = make(stage=stage)
            self.assertTrue(train(reference, 2).committed)
            train(engine)

            def refuse(module: nn.Module, args: object) -> None:
                raise ValueError("not today")

            handle = model.blocks[1].linear.register_forward_pre_hook(refuse)
            with self.assertRaisesRegex(ValueError, "not today"):
                engine(*BATCH)
            handle.remove()

            def interrupt(module: nn.Module, args: object) -> None:
                raise KeyboardInterrupt

            handle = model.blocks[1].linear.register_forward_pre_hook(interrupt)
            for forward in (engine, model):
                with self.assertRaises(KeyboardInterrupt):
                    forward(*BATCH)
            handle.remove()
            train(engine)
            engine.close()
            reference.close()
            self.assertTrue(same_parameters(model, reference_model))

    def test_an_exception_in_backward_skips_the_step(self) -> None:
        model, engine = make()

        def fail(grad: torch.Tensor) -> None:
            raise ValueError("bad gradient")

        handle = model.blocks[0].linear.weight.register_hook(fail)
        with self.assertRaisesRegex(ValueError, "bad gradient"):
            engine.backward(engine(*BATCH))
        self.assertFalse(engine.step().committed)
        with self.assertRaisesRegex(ValueError, "bad gradient"):
            engine(*BATCH).backward()
        handle.remove()
        self.assertFalse(engine.step().committed)
        self.assertTrue(train(engine).committed)

    def test_evaluation_in_between_changes_nothing(self) -> None:
        model, engine = make()
        other_model, other = make()
        for _ in range(3):
            loss = engine(*BATCH)
            engine.eval()
            with torch.no_grad():
                engine(*BATCH)
            with torch.inference_mode():
                engine(*BATCH)
            engine.train()
            self.assertTrue(engine.training)
            engine.backward(loss)
            engine.step()
            train(other)
        engine.close()
        other.close()
        self.assertTrue(same_parameters(model, other_model))

    def test_autocast_sees_the_new_values_in_every_step(self) -> None:
        # One region around many steps: its cache of casts must not outlive an update.
        def losses(one_region: bool) -> list[float]:
            model = zoo.make("plain", torch.float32)
            engine = zeroth.Engine(model, config(), log_level="off")
            x, y = BATCH[0].float(), BATCH[1]
            values = []
            if one_region:
                with torch.autocast("cpu", torch.bfloat16):
                    for _ in range(4):
                        loss = engine(x, y)
                        values.append(loss.item())
                        engine.backward(loss)
                        engine.step()
            else:
                for _ in range(4):
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = engine(x, y)
                    values.append(loss.item())
                    engine.backward(loss)
                    engine.step()
            return values

        self.assertEqual(losses(True), losses(False))
        self.assertGreater(len(set(losses(True))), 1)


class Lifetime(unittest.TestCase):
    def test_a_closed_engine_gives_the_values_back_and_another_stage_goes_on(self) -> None:
        model = zoo.make("tied")
        reference_model, reference = make("tied", 0)
        train(reference, 2)
        reference.close()
        for stage in (3, 0, 2, 1):
            engine = zeroth.Engine(model, config(stage), log_level="off")
            if stage == 3:
                train(engine, 2)
            engine.close()
            self.assertTrue(same_parameters(model, reference_model), stage)
        self.assertIs(model.head.weight, model.embedding.weight)
        nn.functional.mse_loss(model(*BATCH), torch.zeros((), dtype=torch.float64)).backward()  # works by itself again
        self.assertIsNotNone(model.head.weight.grad)

    def test_a_dropped_engine_says_so(self) -> None:
        model, engine = make()
        del engine
        gc.collect()
        with self.assertRaisesRegex(RuntimeError, "is not gathered"):
            model.head.weight.sum()

    def test_use_after_close(self) -> None:
        _, engine = make()
        engine.close()
        engine.close()
        for use in (engine.step, engine.memory_report, lambda: engine.export_safetensors("x")):
            with self.assertRaisesRegex(zeroth.Error, "the engine is closed"):
                use()

    def test_a_second_engine_on_a_module_is_refused(self) -> None:
        model, engine = make()
        with self.assertRaisesRegex(zeroth.Error, "in an engine already"):
            zeroth.Engine(model, config(), log_level="off")
        with self.assertRaisesRegex(zeroth.Error, "in an engine already.*which: 0"):
            zeroth.Engine(nn.Sequential(model), config(), log_level="off")
        with self.assertRaisesRegex(zeroth.Error, "in an engine already.*which: linear") as caught:
            zeroth.Engine(model.blocks[0], config(), log_level="off")
        self.assertEqual((caught.exception.code, caught.exception.where), ("USAGE", "python.engine"))
        self.assertTrue(train(engine).committed)

    def test_two_engines_alternate(self) -> None:
        model, engine = make("plain", 3)
        other_model, other = make("nested", 2)
        for _ in range(2):
            loss, other_loss = engine(*BATCH), other(*BATCH)
            engine.backward(loss)
            other.backward(other_loss)
            self.assertTrue(other.step().committed and engine.step().committed)


class Log(unittest.TestCase):
    def test_the_world_comes_first_and_progress_at_most_so_often(self) -> None:
        text = ("import sys, torch, zeroth\nengine = zeroth.Engine(torch.nn.Linear(2, 2), {}, progress_every_s=float(sys.argv[1]))\n"
                "for _ in range(50):\n    engine.backward(engine(torch.ones(1, 2)).sum())\n    engine.step()\n")
        for every_s, lines in (("0", 0), ("100", 0), ("0.001", 1)):
            done = subprocess.run([sys.executable, "-c", text, every_s], capture_output=True, text=True, timeout=120, check=True)
            self.assertRegex(done.stderr.splitlines()[0], r"^\[zeroth 0/1\] info: 1 rank over self, says no launcher's variables$")
            found = re.findall(r"step \d+: gradient norm [\d.e+-]+, lr 0.001, [\d.e+-]+ steps/s", done.stderr)
            self.assertEqual(min(len(found), 1), lines, done.stderr)

    def test_json_lines(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "log.jsonl"
            engine = zeroth.Engine(zoo.make("plain"), config(), log_level="off", json_log=str(path))
            result = train(engine, 2)
            events = [json.loads(line) for line in path.read_text().splitlines()]
            steps = [event for event in events if event["event"] == "step"]
            self.assertEqual([step["step"] for step in steps], [1, 2])
            self.assertEqual((steps[1]["grad_norm"], steps[1]["lr"], steps[1]["committed"]), (result.grad_norm, 0.01, True))
            self.assertTrue(any("gradient clipping is off" in event.get("text", "") for event in events))
            with self.assertRaisesRegex(zeroth.Error, "JSON log cannot be opened"):
                zeroth.Engine(zoo.make("plain"), config(), json_log=folder + "/not/there")


class Rates(unittest.TestCase):
    """Learning rates that the user sets."""

    def test_a_scheduler_of_torchs_drives_the_engine(self) -> None:
        for stage in (0, 3):
            plain = zoo.make("plain")
            groups = lambda model: [{"params": model.first.parameters(), "lr": 0.02},  # noqa: E731
                                    {"params": [*model.blocks.parameters(), *model.head.parameters()]}]
            optimizer = torch.optim.AdamW(groups(plain), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            model = zoo.make("plain")
            engine = zeroth.Engine(model, config(stage), params=groups(model), log_level="off")
            ours = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)
            for _ in range(6):
                plain(*BATCH).backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.backward(engine(*BATCH))
                self.assertEqual(engine.learning_rates, [group["lr"] for group in optimizer.param_groups])
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    self.assertEqual(engine.step().lr, engine.optimizer.param_groups[0]["lr"])
                    ours.step()
                    scheduler.step()
            engine.close()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                self.assertLess((mine - theirs).abs().max().item(), 1e-12)

    def test_initialize_makes_and_steps_a_scheduler(self) -> None:
        engine, optimizer, _, scheduler = zeroth.initialize(
            model=zoo.make("plain"), config=config(), lr_scheduler=lambda of: torch.optim.lr_scheduler.ExponentialLR(of, 0.5))
        self.assertIs(optimizer, engine.optimizer)
        self.assertEqual([train(engine).lr for _ in range(3)], [0.01, 0.005, 0.0025])
        self.assertEqual(scheduler.get_last_lr(), [0.00125])

    def test_rates_have_one_master(self) -> None:
        schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}}
        engine = zeroth.Engine(zoo.make("plain"), config(**schedule), log_level="off")
        train(engine)
        engine.optimizer.param_groups[0]["lr"] = 1.0
        with self.assertRaisesRegex(zeroth.Error, "the configuration has a scheduler"):
            train(engine)

    def test_the_optimizer_refuses_what_it_is_not(self) -> None:
        model, engine = make()
        with self.assertRaisesRegex(zeroth.Error, "no further parameter groups"):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with self.assertRaisesRegex(zeroth.Error, "no closure"):
            engine.optimizer.step(lambda: None)
        engine.backward(engine(*BATCH))
        engine.optimizer.zero_grad()
        self.assertTrue(engine.optimizer.step().committed)
        self.assertEqual(engine.steps, 1)
        engine.close()
        self.assertEqual((engine.rank, engine.world_size, engine.steps), (0, 1, 1))


class Trainability(unittest.TestCase):
    """Parameters that are frozen and thawed between steps."""

    def trained(self, stage: int | None, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """By torch if `stage` is None. Blocks thaw one after the other; the first layer is frozen again."""
        model = zoo.make("plain", dtype)
        model.blocks.requires_grad_(False)
        groups = [{"params": list(model.parameters())}]
        engine = None if stage is None else zeroth.Engine(
            model, config(stage, bf16={"enabled": dtype == torch.bfloat16}), params=groups, log_level="off")
        optimizer = torch.optim.AdamW(groups, lr=0.01) if engine is None else None
        x, y = BATCH[0].to(dtype), BATCH[1]
        for step in range(6):
            if step in (2, 3):
                model.blocks[step - 1].requires_grad_(True)
            if step == 4:
                model.first.requires_grad_(False)
            model(x, y).backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                self.assertTrue(engine.step().committed)
        if engine is not None:
            engine.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def test_thawed_parameters_train_as_in_torch(self) -> None:
        expected = self.trained(None)
        for stage in (0, 1, 2, 3):
            for mine, theirs in zip(self.trained(stage), expected, strict=True):
                self.assertLess((mine - theirs).abs().max().item(), 1e-12)
        narrow = [self.trained(stage, torch.bfloat16) for stage in (0, 3)]
        self.assertTrue(all(torch.equal(one, other) for one, other in zip(*narrow, strict=True)))

    def test_one_that_was_in_no_group_is_named(self) -> None:
        model = zoo.make("plain")
        model.blocks[1].requires_grad_(False)
        engine = zeroth.Engine(model, config(), log_level="off")
        train(engine)
        model.blocks[1].requires_grad_(True)
        with self.assertRaisesRegex(zeroth.Error, r"became trainable.*which: blocks\.1\.linear\.weight.*parameter group"):
            engine(*BATCH)


class Results(unittest.TestCase):
    def test_export_loads_in_plain_torch_with_equal_losses(self) -> None:
        for name in ("plain", "tied", "odd"):
            model, engine = make(name)
            train(engine, 2)
            with torch.no_grad():
                expected = engine(*BATCH)
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.safetensors")
                engine.export_safetensors(path)
                weights = load_file(path)
            fresh = zoo.make(name)
            fresh.load_state_dict(weights, strict=name != "tied")
            self.assertTrue(torch.equal(fresh(*BATCH), expected), name)

    def test_reports(self) -> None:
        _, engine = make()
        result = train(engine)
        self.assertTrue(result.boundary and result.committed)
        self.assertEqual((result.step, engine.steps, engine.rank, engine.world_size), (1, 1, 0, 1))
        self.assertIsNone(result.first_offender)
        report = engine.memory_report()
        self.assertEqual(report.planned, report.measured_peak)
        self.assertGreater(report.planned["optimizer"], 0)
        self.assertIn("optimizer", str(report))
        self.assertEqual(engine.wire_report()["all_gather"], 0)

    def test_a_gradient_that_is_not_finite_is_named(self) -> None:
        model, engine = make()
        handle = model.blocks[1].linear.weight.register_hook(lambda grad: grad * float("nan"))
        result = train(engine)
        handle.remove()
        self.assertFalse(result.committed)
        self.assertEqual(result.first_offender.param, "blocks.1.linear.weight")
        self.assertEqual(result.first_offender.count, zoo.WIDTH**2)


class Groups(unittest.TestCase):
    def test_groups_are_those_of_torch(self) -> None:
        model, reference = zoo.make("plain"), zoo.make("plain")

        def groups(of: nn.Module) -> list[dict[str, object]]:
            return [{"params": [p for p in of.parameters() if p.dim() < 2], "weight_decay": 0.0},
                    {"params": [p for p in of.parameters() if p.dim() >= 2], "weight_decay": 0.5, "lr": 0.02}]

        engine = zeroth.Engine(model, config(), params=groups(model), log_level="off")
        optimizer = torch.optim.AdamW(groups(reference), lr=0.01)
        for _ in range(3):
            train(engine)
            optimizer.zero_grad()
            reference(*BATCH).backward()
            optimizer.step()
        engine.close()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    def test_groups_that_do_not_fit_are_refused(self) -> None:
        model = zoo.make("plain")
        everything = list(model.parameters())
        for params, text in (
            ([{"params": everything[:-1]}], "trainable parameter is in no group; which: head.bias"),
            ([{"params": everything, "betas": (0, 0)}], "not known; which: group 1, 'betas'"),
            ([{"params": everything}, {"params": everything[0]}], "in two groups"),
        ):
            with self.assertRaisesRegex(zeroth.Error, text):
                zeroth.Engine(model, config(), params=params, log_level="off")
        self.assertEqual(zeroth.Engine(model, config(), params=model.parameters(), log_level="off").rank, 0)


class Configs(unittest.TestCase):
    def test_a_path_a_dict_and_a_config_are_one(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "zero.json"
            path.write_text(json.dumps(config(2)))
            from_path = zeroth.Engine(zoo.make("plain"), path, log_level="off").config
        from_dict = zeroth.Engine(zoo.make("plain"), config(2), log_level="off").config
        self.assertEqual(from_path, from_dict)
        self.assertEqual(zeroth.Engine(zoo.make("plain"), from_dict, log_level="off").config, from_dict)
        self.assertEqual(zeroth.Engine(zoo.make("plain"), log_level="off").config.zero_stage, 0)

    def test_mistakes_are_named(self) -> None:
        with self.assertRaisesRegex(zeroth.ConfigError, 'unknown key.*did you mean "stage"') as caught:
            zeroth.Engine(zoo.make("plain"), {"zero_optimization": {"stge": 3}})
        self.assertEqual((caught.exception.code, caught.exception.exit_code), ("CONFIG", 78))
        with self.assertRaisesRegex(zeroth.ConfigError, "no JSON document"):
            zeroth.Engine(zoo.make("plain"), {"optimizer": object()})
        with self.assertRaisesRegex(zeroth.Error, "no such log level"):
            zeroth.Engine(zoo.make("plain"), log_level="loud")

    def test_initialize_gives_four(self) -> None:
        model = zoo.make("plain")
        engine, optimizer, loader, scheduler = zeroth.initialize(model=model, config=config())
        self.assertEqual((loader, scheduler), (None, None))
        loss = engine(*BATCH)
        engine.backward(loss)
        self.assertTrue(optimizer.step().committed)
        with self.assertRaisesRegex(zeroth.Error, "lr_scheduler is not taken as an object"):
            zeroth.initialize(model=zoo.make("plain"), lr_scheduler=object())


class Refusals(unittest.TestCase):
    def test_gradients_that_somebody_looks_for_are_refused_by_name(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            engine.backward(engine(*BATCH))
            with self.assertRaisesRegex(RuntimeError, r"gradient of 'first\.weight' is in the engine.*gradient_clipping"):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with self.assertRaisesRegex(RuntimeError, r"gradient of 'head\.bias' is in the engine"):
                model.head.bias.grad.norm()
            engine.backward(engine(*BATCH))  # and they are out of the way of the next ones
            loss = engine(*BATCH)
            loss.backward(retain_graph=True)
            loss.backward()
            model.zero_grad()
            self.assertTrue(engine.step().committed)
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
            (nn.Linear(2, 2).to(torch.float16), "dtype"),
            (nn.Linear(2, 2).requires_grad_(False), "train"),
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

    def test_a_parameter_that_was_replaced_is_named(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            train(engine)
            model.blocks[2].linear.bias = nn.Parameter(torch.zeros(12, dtype=torch.float64))
            with self.assertRaisesRegex(zeroth.Error, r"replaced or removed.*which: blocks\.2\.linear\.bias"):
                engine(*BATCH)

    def test_an_input_on_another_device_is_named(self) -> None:
        _, engine = make()
        with self.assertRaisesRegex(zeroth.Error, r"input is on another device.*input tensor 1.*expected: cpu; got: meta"):
            engine(BATCH[0], y=BATCH[1].to("meta"))
        self.assertTrue(train(engine).committed)

    def test_tensors_that_stand_for_others_are_refused(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            model[1].weight = nn.Parameter(distribute_tensor(model[1].weight.data, mesh, [Shard(0)]))
            with self.assertRaisesRegex(zeroth.Error, r"tensor subclass; where: python\.engine; which: 1\.weight.*before fully_shard"):
                zeroth.Engine(model, config(), log_level="off")
        finally:
            dist.destroy_process_group()

    def test_compiled_autograd_is_refused(self) -> None:
        for stage in (0, 3):
            _, engine = make(stage=stage)
            with compiled_autograd._enable(lambda graph: graph), self.assertRaisesRegex(RuntimeError, "compiled autograd.*leave"):
                engine.backward(engine(*BATCH))
            self.assertTrue(train(engine).committed)

    def test_an_error_inside_backward_is_the_librarys(self) -> None:
        _, engine = make(stage=3)
        for run in (lambda loss: loss.backward(create_graph=True), lambda loss: torch.autograd.backward([loss], create_graph=True)):
            with self.assertRaisesRegex(zeroth.Error, "create_graph") as caught:
                run(engine(*BATCH))
            self.assertEqual((caught.exception.code, caught.exception.exit_code), ("MODEL", 65))
            self.assertIn("unit ", caught.exception.which)
        self.assertTrue(train(engine).committed)

    def test_a_forked_child_is_told_and_the_parent_goes_on(self) -> None:
        for stage in (0, 3):
            model, engine = make(stage=stage)
            train(engine)
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                told = []
                for use in (lambda: model(*BATCH), lambda: train(engine), engine.step, engine.close, lambda: engine.average(1.0),
                            engine.memory_report):
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

    def test_a_cycle_in_an_output_is_an_error(self) -> None:
        class Looped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(2, 2)

            def forward(self, x: torch.Tensor) -> list[object]:
                out: list[object] = [self.linear(x)]
                out.append(out)
                return out

        engine = zeroth.Engine(Looped(), config(), log_level="off")
        with self.assertRaisesRegex(zeroth.Error, "nested too deeply"):
            engine(torch.ones(2))


class Processes(job.RankTest):
    def test_an_exception_on_one_rank_is_named_first(self) -> None:
        done = job.run(3, "trouble_rank.py", "exception")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"zeroth-run: rank 1 \(pid \d+\) exited with code 1")

    def test_ranks_that_disagree_are_told_on_all_ranks(self) -> None:
        done = job.run(2, "trouble_rank.py", "disagree")
        self.assertNotEqual(done.returncode, 0)
        for rank in (0, 1):
            self.assertRegex(done.stdout, rf"rank {rank} is told: \[MISMATCH\]")

    def test_ctrl_c_ends_a_wait_and_the_rank_can_go_on(self) -> None:
        # Rank 0 waits for rank 1, in forward, backward, step and construction in turn; each time it gets SIGINT.
        for where in ("construction", "forward", "backward", "step"):
            with self.subTest(where=where):
                done = job.run(2, "trouble_rank.py", "interrupt", where, limit_s=120)
                text = done.stdout + done.stderr
                taken = re.search(r"KeyboardInterrupt after (\d+\.\d+) s", text)
                self.assertIsNotNone(taken, text)

    def test_buffers_are_rank_zeros_in_every_training_forward(self) -> None:
        self.run_well(3, "buffers_rank.py")

    def test_backward_does_not_take_the_gil(self) -> None:
        # Rank 1 goes on only while rank 0 does, whose GIL is taken for two seconds. A hook in Python has to wait for it: so the
        # test would see one. Should the thread take the GIL before backward has begun, the run says nothing: hence three of them.
        def seconds(hook: str) -> float:
            done = job.run(2, "trouble_rank.py", "gil", hook)
            taken = re.search(r"backward took (\d+\.\d+) s", done.stdout)
            assert taken is not None, done.stdout + done.stderr
            return float(taken[1])

        self.assertTrue(any(seconds("none") < 1.5 for _ in range(3)))
        self.assertGreater(seconds("python"), 1.5)

    def test_a_rank_that_gives_up_tells_the_others_why(self) -> None:
        done = job.run(3, "trouble_rank.py", "give_up")
        for rank in range(3):
            self.assertRegex(done.stdout, rf"rank {rank} is told: \[ABORTED\].*the data has run out.*rank 1/3", done.stderr)

    def test_a_killed_rank_is_named(self) -> None:
        done = job.run(2, "trouble_rank.py", "kill")
        self.assertEqual(done.returncode, 128 + signal.SIGKILL)
        self.assertRegex(done.stderr.strip().splitlines()[-1], r"rank 1 \(pid \d+\) was killed by signal 9")

    def test_a_bare_process_is_a_world_of_one(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-c", "import zeroth; print(zeroth.World.from_environment())"],
                              env=environment, capture_output=True, text=True, timeout=120, check=True)
        self.assertEqual(done.stdout.strip(), "zeroth.World(rank=0, size=1, backend='self')")
        self.assertLess(time.monotonic() - begin, 120)


if __name__ == "__main__":
    unittest.main(verbosity=2)
