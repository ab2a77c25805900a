"""The Python engine in a world of one: what it promises about a module, its life, its log and its results."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest
import weakref

import forked
import torch
import zoo
from alone import BATCH, config, make, same_parameters, train
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroth


class Module(unittest.TestCase):
    def test_parameters_stay_the_users_and_are_guarded(self) -> None:
        model, engine = make()
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        train(engine)
        self.assertEqual(before, {name: id(parameter) for name, parameter in model.named_parameters()})
        weight = model.blocks[1].linear.weight
        self.assertEqual(weight.shape, (zoo.WIDTH, zoo.WIDTH))
        for touch in (
            lambda: weight.sum(),
            lambda: weight.zero_(),
            lambda: weight.numpy(force=True),
            lambda: weight.clone(),
        ):  # guards_test.py has many more
            with (
                torch.no_grad(),
                self.assertRaisesRegex(zeroth.Error, r"parameter 'blocks\.1\.linear\.weight' is not gathered"),
            ):
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
        block.linear.bias.register_post_accumulate_grad_hook(
            lambda parameter: note("accumulated early", parameter.grad)
        )
        engine = zeroth.Engine(model, config(), log_level="off")
        block.register_forward_pre_hook(lambda module, args: note("pre late", module.linear.weight))
        block.register_forward_hook(lambda module, args, output: note("post late", output))
        block.linear.weight.register_hook(lambda grad: note("grad late"))
        block.register_full_backward_hook(lambda module, grads, outs: note("backward late"))
        train(engine)
        for text in (
            "pre early True",
            "post early True",
            "grad early",
            "accumulated early True",
            "pre late True",
            "post late True",
            "grad late",
            "backward late",
        ):
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

    def test_a_backward_that_fails_before_the_model_skips_the_step(self) -> None:
        for micro_steps in (1, 2):
            model = zoo.make("plain")
            engine = zeroth.Engine(model, config(gradient_accumulation_steps=micro_steps), log_level="off")

            def fail(grad: torch.Tensor) -> None:
                raise ValueError("bad loss")

            for good_losses in (0, 1):  # of the same micro-step, before the bad one
                for micro_step in range(micro_steps):
                    for _ in range(good_losses):
                        engine.backward(engine(*BATCH))
                    loss = engine(*BATCH) * 2
                    loss.register_hook(fail)
                    with self.assertRaisesRegex(ValueError, "bad loss"):
                        engine.backward(loss)
                    result = engine.step()
                self.assertEqual((result.committed, result.reason), (False, "backward failed on rank 0"))
            for _ in range(micro_steps):
                result = train(engine)
            self.assertTrue(result.committed)

    def test_a_checkpoint_around_the_whole_model(self) -> None:
        x, y = BATCH[0].clone().requires_grad_(True), BATCH[1]  # a reentrant one wants an input with a gradient
        for use_reentrant in (False, True):
            plain = zoo.make("plain")
            optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
            for _ in range(3):
                sum(checkpoint(plain, part, y, use_reentrant=use_reentrant) for part in (x, x * 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
            for stage in (0, 3):
                model, engine = make(stage=stage)
                for _ in range(3):
                    engine.backward(
                        sum(checkpoint(engine, part, y, use_reentrant=use_reentrant) for part in (x, x * 2))
                    )
                    self.assertTrue(engine.step().committed)
                engine.close()
                for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    self.assertLess((mine - theirs).abs().max().item(), 1e-12)

    def test_an_interrupt_while_a_checkpoint_computes_again(self) -> None:
        for stage in (0, 3):
            for plain_backward in (False, True):
                model, engine = make("checkpoint", stage)
                calls = 0

                def interrupt(module: nn.Module, args: object) -> None:
                    nonlocal calls
                    calls += 1
                    if calls == 2:
                        raise KeyboardInterrupt

                handle = model.blocks[0].linear.register_forward_pre_hook(interrupt)
                loss = engine(*BATCH)
                with self.assertRaises(KeyboardInterrupt):
                    loss.backward() if plain_backward else engine.backward(loss)
                handle.remove()
                if plain_backward:
                    engine(*BATCH)
                self.assertFalse(engine.step().committed)
                self.assertTrue(train(engine).committed)
                engine.close()
                self.assertTrue(torch.isfinite(model.head.weight).all())

    def test_gradients_of_another_loss_can_be_forgotten(self) -> None:
        # The discriminator gets gradients in the generator's backward, and forgets them before its own.
        def trained(stage: int | None) -> list[torch.Tensor]:
            torch.manual_seed(5)
            generator, critic = (
                nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),
                nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)),
            )
            models = [model.double() for model in (generator, critic)]
            if stage is None:
                runs: list[nn.Module | zeroth.Engine] = list(models)
                optimizers: list[torch.optim.Optimizer] = [
                    torch.optim.AdamW(model.parameters(), lr=0.01) for model in models
                ]
            else:
                runs = [zeroth.Engine(model, config(stage), log_level="off") for model in models]
                optimizers = [run.optimizer for run in runs]
            for _ in range(3):
                optimizers[1].zero_grad()
                (runs[1](BATCH[0]) - runs[1](runs[0](BATCH[0]).detach())).mean().backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                runs[1](runs[0](BATCH[0])).square().mean().backward()
                optimizers[0].step()
            for run in runs:
                if isinstance(run, zeroth.Engine):
                    run.close()
            return [parameter.detach() for model in models for parameter in model.parameters()]

        expected = trained(None)
        for stage in (0, 1, 2, 3):
            for mine, theirs in zip(trained(stage), expected, strict=True):
                self.assertLess((mine - theirs).abs().max().item(), 1e-12, stage)

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
        for stage in (0, 3):
            model, engine = make(stage=stage)
            train(engine)
            del engine  # nothing else holds it, so nothing has to be collected
            with self.assertRaisesRegex(
                zeroth.Error, r"parameter 'head.weight' has no values any more.*which: head.weight.* dropped.*close\(\)"
            ):
                model.head.weight.sum()
            for dead in (model.forward, model):  # the hooks are gone, too
                with self.assertRaisesRegex(RuntimeError, "has no values any more"):
                    dead(*BATCH)
            with self.assertRaisesRegex(zeroth.Error, r"which: first\.weight.*without memory.*close\(\)"):
                zeroth.Engine(model, config(), log_level="off")

    def test_a_copy_of_the_module_is_a_module_of_its_own(self) -> None:
        for stage in (0, 2):
            model, engine = make(stage=stage)
            train(engine)
            average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)  # a deep copy
            average.update_parameters(model)
            self.assertEqual(average(*BATCH).item(), model(*BATCH).item())
            train(engine, 2)
            before = copy.deepcopy(model)
            engine.close()
            self.assertEqual(before(*BATCH).item(), model(*BATCH).item())
            self.assertEqual(set(before.state_dict()), set(model.state_dict()))
            other = zeroth.Engine(before, config(), log_level="off")
            train(other)

    def test_a_module_with_sharded_parameters_is_not_copied_saved_or_loaded(self) -> None:
        model, engine = make()
        values = zoo.make("plain").state_dict()
        with self.assertRaisesRegex(RuntimeError, "parameter 'first.weight' is not gathered"):
            copy.deepcopy(model)
        with self.assertRaisesRegex(RuntimeError, "parameter 'head.weight' is not gathered"):
            model.load_state_dict(values)
        with self.assertRaisesRegex(zeroth.Error, r"no state_dict\(\).*which: blocks \(ModuleList\)"):
            model.blocks.state_dict()
        for stage in (0, 3):
            model, engine = make(stage=stage)
            with self.assertRaisesRegex(zeroth.Error, r"cannot be pickled.*state_dict\(\)"):
                torch.save(model, io.BytesIO())
            engine.close()
            torch.save(model, io.BytesIO())

    def test_what_the_engine_has_not_is_said_to_be_in_the_module(self) -> None:
        _, engine = make()
        with self.assertRaisesRegex(AttributeError, r"has no 'buffers', its module has: engine\.module\.buffers"):
            engine.buffers()
        with self.assertRaisesRegex(AttributeError, "has no 'save_everything'$"):
            engine.save_everything("there")
        self.assertFalse(hasattr(engine, "parameters"))

    def test_a_cycle_through_a_hook_is_collected(self) -> None:
        model, engine = make()

        def hook(module: nn.Module, args: object, output: object) -> None:
            _ = engine  # so the block knows its engine, and the engine its module  # noqa: F821

        model.blocks[0].register_forward_hook(hook)
        train(engine)
        gone = weakref.ref(model)
        del model, engine, hook
        gc.collect()
        self.assertIsNone(gone())

    def test_a_scripted_module_inside(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("scale", torch.full((12,), 0.5, dtype=torch.float64))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(x) * self.scale

        for stage in (0, 3):
            torch.manual_seed(3)
            layers = [nn.Linear(4, 12), nn.Linear(12, 12), nn.Linear(12, 1)]
            model = nn.Sequential(layers[0], torch.jit.script(Scaled()), layers[1], layers[2]).double()
            engine = zeroth.Engine(model, config(stage), log_level="off")
            engine.backward(engine(BATCH[0]).sum())
            self.assertTrue(engine.step().committed)
            engine.close()

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
        text = (
            "import sys, torch, zeroth\nengine = zeroth.Engine(torch.nn.Linear(2, 2), {}, progress_every_s=float(sys.argv[1]))\n"  # noqa: E501
            "for _ in range(50):\n    engine.backward(engine(torch.ones(1, 2)).sum())\n    engine.step()\n"
        )
        # As in the script of an sbatch job of four ranks: one rank, and a line that says why.
        bare: dict[str, str] = {}
        batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}
        for every_s, lines, more in (("0", 0, bare), ("100", 0, batch), ("0.001", 1, bare)):
            done = subprocess.run(
                [*forked.python(), "-c", text, every_s],
                env={**os.environ, **more},
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            self.assertEqual(
                [line for line in done.stderr.splitlines() if "not taken" in line],
                [
                    "[zeroth 0/1] warning: SLURM_PROCID=0, SLURM_NTASKS=4 are not taken: no SLURM_STEP_ID of srun, so "
                    "this is the batch script of the job, which runs once. This is a world of one rank; hint: start 4 "
                    "ranks with srun PROGRAM, or zeroth-run -n 4 PROGRAM"
                ]
                if more
                else [],
                done.stderr,
            )
            self.assertRegex(
                done.stderr.splitlines()[0], r"^\[zeroth 0/1\] info: 1 rank over self, says no launcher's variables$"
            )
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
            self.assertEqual(
                (steps[1]["grad_norm"], steps[1]["lr"], steps[1]["committed"]), (result.grad_norm, 0.01, True)
            )
            texts = [event.get("text", "") for event in events]
            self.assertTrue(any("gradient clipping is off" in text for text in texts))
            # 3 blocks of 156 of 593 elements
            self.assertTrue(
                any(
                    text.startswith("units: 3 with 26 % of the parameters at most") and "root with 21 %" in text
                    for text in texts
                ),
                texts,
            )
            with self.assertRaisesRegex(zeroth.Error, "JSON log cannot be opened"):
                zeroth.Engine(zoo.make("plain"), config(), json_log=folder + "/not/there")


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

    def test_buffers_are_those_of_now(self) -> None:
        class Averaging(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.register_buffer("mean", torch.zeros(4))
                self.register_buffer("dropped", torch.zeros(4))
                self.register_buffer("late", None)
                self.register_buffer("mask", torch.ones(4, dtype=torch.complex64), persistent=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.mean = 0.5 * self.mean + x.mean(0).detach()
                self.dropped, self.late = None, torch.ones(3)
                if "later" not in self.linear._buffers:
                    self.linear.register_buffer("later", torch.ones(5))
                return self.linear(x - self.mean).sum()

        for stage in (0, 3):
            model = Averaging()
            engine = zeroth.Engine(model, config(stage), log_level="off")
            engine.backward(engine(torch.ones(2, 4)))
            engine.step()
            with torch.no_grad():
                model.eval()(torch.ones(2, 4))  # sees what the first forward has registered
            model.mean = torch.ones(4)
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.safetensors")
                engine.export_safetensors(path)
                weights = load_file(path)
            engine.close()
            self.assertEqual(set(weights), set(model.state_dict()))
            self.assertTrue(torch.equal(weights["mean"], torch.ones(4)))
            self.assertTrue(
                torch.equal(weights["late"], torch.ones(3)) and torch.equal(weights["linear.later"], torch.ones(5))
            )

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
        self.assertEqual(report.compute_copies, 0)
        self.assertEqual(engine.wire_report()["all_gather"], 0)
        engine = zeroth.Engine(zoo.make("plain"), config(3, zeroth={"compute_copies": True}), log_level="off")
        train(engine)
        report = engine.memory_report()
        self.assertEqual(report.compute_copies, report.planned["gathered"])  # the same places

    def test_lion_is_the_papers(self) -> None:
        """Chen et al. 2023, algorithm 2, with torch in double; a row without a gradient only decays."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 1)).double()
        plain = copy.deepcopy(model)
        params = {"lr": 1e-2, "weight_decay": 0.1}
        settings = {"optimizer": {"type": "Lion", "params": params}, "zero_optimization": {"stage": 2}}
        engine = zeroth.Engine(model, {**settings, "gradient_clipping": 0.0}, log_level="off")
        self.assertEqual(engine.optimizer.param_groups[0]["betas"], (0.9, 0.99))
        momenta = [torch.zeros_like(parameter) for parameter in plain.parameters()]
        for step in range(6):
            index = torch.tensor([step % 3, 3])
            engine.backward(engine(index).square().mean())
            engine.step()
            gradients = torch.autograd.grad(plain(index).square().mean(), list(plain.parameters()))
            with torch.no_grad():
                for parameter, gradient, momentum in zip(plain.parameters(), gradients, momenta, strict=True):
                    direction = torch.sign(0.9 * momentum + 0.1 * gradient)
                    parameter.mul_(1 - 1e-2 * 0.1).sub_(direction, alpha=1e-2)
                    momentum.mul_(0.99).add_(gradient, alpha=0.01)
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), other.detach(), rtol=0, atol=1e-12)
        with self.assertRaisesRegex(zeroth.ConfigError, "eps"):
            zeroth.Engine(plain, {"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, log_level="off")

    def test_few_models_need_memory_beyond_the_plan(self) -> None:
        # But where blocks are computed again while another one's backward is under way.
        several_at_once = {"checkpoint"}
        for name in zoo.MODELS:
            with self.subTest(name=name):
                _, engine = make(name)
                train(engine, 2)
                report = engine.memory_report()
                self.assertEqual(report.overflow_slots > 0, name in several_at_once)
                self.assertEqual("overflow" in report.measured_peak, name in several_at_once)

    def test_a_gradient_that_is_not_finite_is_named(self) -> None:
        model, engine = make()
        handle = model.blocks[1].linear.weight.register_hook(lambda grad: grad * float("nan"))
        result = train(engine)
        handle.remove()
        self.assertFalse(result.committed)
        self.assertEqual(result.first_offender.param, "blocks.1.linear.weight")
        self.assertEqual(result.first_offender.count, zoo.WIDTH**2)


class Trainability(unittest.TestCase):
    """Parameters that are frozen and thawed between steps."""

    def trained(self, stage: int | None, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """By torch if `stage` is None. Blocks thaw one after the other; the first layer is frozen again."""
        model = zoo.make("plain", dtype)
        model.blocks.requires_grad_(False)
        groups = [{"params": list(model.parameters())}]
        engine = (
            None
            if stage is None
            else zeroth.Engine(
                model, config(stage, bf16={"enabled": dtype == torch.bfloat16}), params=groups, log_level="off"
            )
        )
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
        with self.assertRaisesRegex(
            zeroth.Error, r"became trainable.*which: blocks\.1\.linear\.weight.*parameter group"
        ):
            engine(*BATCH)


if __name__ == "__main__":
    unittest.main(verbosity=2)
