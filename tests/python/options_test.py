"""What an engine is told: configurations, parameter groups, learning rates."""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import tempfile
import unittest
import warnings

import torch
import zoo
from alone import BATCH, config, make, train
from torch import nn

import zeroth


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
        with self.assertRaisesRegex(zeroth.ConfigError, "no JSON value; .*which: /optimizer; .*got: object"):
            zeroth.Engine(zoo.make("plain"), {"optimizer": object()})
        with self.assertRaisesRegex(zeroth.Error, "no such log level"):
            zeroth.Engine(zoo.make("plain"), log_level="loud")

    def test_overrides_win_and_are_named(self) -> None:
        document = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
        overrides = [
            zeroth.ConfigOverride("/train_micro_batch_size_per_gpu", 4),
            zeroth.ConfigOverride("/zero_optimization/stage", 3, "--zero-stage"),
            zeroth.ConfigOverride("/optimizer", {"type": "SGD", "params": {"lr": 0.5}}),
        ]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "zero.json"
            path.write_text(json.dumps(document))
            merged = zeroth.Config.from_file(path, overrides)
        self.assertEqual(merged, zeroth.Config.from_json(json.dumps(document), overrides=overrides))
        self.assertEqual((merged.zero_stage, merged.train_micro_batch_size_per_gpu), (3, 4))
        self.assertEqual(json.loads(merged.to_json())["optimizer"]["type"], "SGD")
        self.assertEqual(repr(overrides[1]), "--zero-stage: /zero_optimization/stage = 3")
        with self.assertRaisesRegex(zeroth.ConfigError, r"--zero-stage.*/zero_optimization/stage"):
            zeroth.Config.from_json(
                "{}", overrides=[zeroth.ConfigOverride("/zero_optimization/stage", 7, "--zero-stage")]
            )
        with self.assertRaisesRegex(zeroth.ConfigError, r"an override: no JSON value; .*which: /gradient_clipping"):
            zeroth.ConfigOverride("/gradient_clipping", object())
        with self.assertRaisesRegex(zeroth.ConfigError, r"an override: wrong value; .*got: NaN"):
            zeroth.Config.from_json("{}", overrides=[zeroth.ConfigOverride("/gradient_clipping", float("nan"))])

    def test_initialize_gives_four(self) -> None:
        model = zoo.make("plain")
        engine, optimizer, loader, scheduler = zeroth.initialize(model=model, config=config())
        self.assertEqual((loader, scheduler), (None, None))
        loss = engine(*BATCH)
        engine.backward(loss)
        self.assertTrue(optimizer.step().committed)
        with self.assertRaisesRegex(zeroth.Error, "lr_scheduler is not taken as an object"):
            zeroth.initialize(model=zoo.make("plain"), lr_scheduler=object())

    def test_initialize_takes_what_deepspeed_users_pass_or_says_where_it_belongs(self) -> None:
        arguments = argparse.Namespace(local_rank=0, deepspeed_config=config(stage=2))
        model = zoo.make("plain")
        engine, *_ = zeroth.initialize(
            args=arguments, model=model, units=[model.head], world=zeroth.World.from_environment(), log_level="off"
        )
        self.assertEqual(engine.config.zero_stage, 2)
        self.assertEqual([name for name, _, _ in engine._core.units], ["root", "head"])
        with self.assertRaisesRegex(zeroth.Error, "two configurations"):
            zeroth.initialize(args=arguments, model=zoo.make("plain"), config=config())
        for name in ("optimizer", "training_data", "collate_fn", "mpu", "dist_init_required", "config_params"):
            with self.assertRaisesRegex(zeroth.Error, f"{name} is not taken here.*hint: "):
                zeroth.initialize(model=zoo.make("plain"), **{name: object()})
            zeroth.initialize(model=zoo.make("plain"), config=config(), log_level="off", **{name: None})[0].close()
        with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'modle'"):
            zeroth.initialize(model=zoo.make("plain"), modle=None)


class Names(unittest.TestCase):
    """Attributes that DeepSpeed's engine has, and this one under another name or not at all."""

    def test_each_is_an_attribute_error_that_says_where_the_thing_is(self) -> None:
        for stage in (0, 3):
            _, engine = make(stage=stage)
            for name, place in (
                ("save_checkpoint", r"engine\.save\(folder"),
                ("load_checkpoint", r"engine\.load\(folder\)"),
                ("save_16bit_model", r"engine\.export_safetensors\(path\)"),
                ("module_state_dict", r"engine\.state_dict\(\)"),
                ("is_gradient_accumulation_boundary", r"result\.boundary"),
                ("get_global_grad_norm", r"result\.grad_norm"),
                ("lr_scheduler", r"zeroth\.initialize\(\)"),
                ("no_sync", "zeroth.reduction_policy"),
                ("destroy", r"engine\.close\(\)"),
                ("compile", r"engine\.module\.compile\(\)"),
            ):
                with self.assertRaisesRegex(AttributeError, f"^zeroth.Engine has no '{name}': .*{place}"):
                    getattr(engine, name)
                self.assertFalse(hasattr(engine, name))
                self.assertIsNone(getattr(engine, name, None))

    def test_a_place_that_is_a_value_can_be_taken_as_it_stands(self) -> None:
        sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
        engine = zeroth.Engine(zoo.make("plain"), config(2, **sizes), log_level="off")
        train(engine, 2)
        expected: dict[str, object] = {
            "global_rank": 0,
            "local_rank": 0,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "train_batch_size": 6,
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "zero_optimization_stage": 2,
            "zero_optimization_partition_weights": False,
            "get_lr": [0.01],
            "get_mom": (0.9, 0.999),
            "fp16_enabled": False,
            "get_data_parallel_rank": 0,
            "get_sequence_parallel_group": None,
            "param_names": None,
        }
        scope = {"engine": engine, "zeroth": zeroth, "torch": torch}
        for name, value in expected.items():
            with self.subTest(name=name):
                with self.assertRaises(AttributeError) as caught:
                    getattr(engine, name)
                expression = str(caught.exception).split(": ", 1)[1].split(", or ")[0]
                found = eval(expression, scope)
                if value is not None:
                    self.assertEqual(found, value)
        with self.assertRaisesRegex(AttributeError, "engine.steps, which counts"):
            _ = engine.global_steps
        self.assertEqual((engine.steps, engine.loss_scale), (1, 1.0))
        with self.assertRaisesRegex(TypeError, r"engine\.loss_scale is a number"):
            engine.loss_scale()  # type: ignore[operator]

    def test_what_the_table_names_is_there(self) -> None:
        """Each attribute of the engine in the texts, and none of the names."""
        _, engine = make()
        places = sys.modules["zeroth._elsewhere"]._PLACES
        self.assertGreater(len(places), 80)
        for name, place in places.items():
            self.assertFalse(name in vars(zeroth.Engine), name)
            for used in re.findall(r"engine\.(\w+)", place):
                self.assertTrue(hasattr(engine, used), f"{name}: {place}")

    def test_states_of_the_optimizer_are_asked_of_the_engine(self) -> None:
        model, engine = make()
        train(engine)
        for look in (
            lambda: engine.optimizer.state[model.head.weight],
            lambda: engine.optimizer.state.get(model.head.weight),
            lambda: list(engine.optimizer.state.values()),
            lambda: model.head.weight in engine.optimizer.state,
            lambda: {**engine.optimizer.state},
        ):
            with self.assertRaisesRegex(zeroth.Error, r"which: optimizer\.state; .*engine\.full\(name, \"exp_avg\"\)"):
                look()
        self.assertEqual(len(engine.optimizer.state), 0)
        self.assertEqual(engine.full("head.weight", "exp_avg").shape, model.head.weight.shape)


class Results(unittest.TestCase):
    def test_results_can_be_read(self) -> None:
        _, engine = make()
        engine.backward(engine(*BATCH))
        self.assertRegex(
            repr(engine.step()),
            r"^zeroth\.StepResult\(step=1, committed=True, batches=1, grad_norm=\d\.\d+, lr=0\.01\)$",
        )
        engine.backward(engine(*BATCH) * float("nan"))
        result = engine.step()
        offender = r"zeroth\.FirstOffender\(param='[\w.]+', rank=0, micro_step=0, count=\d+\)"
        self.assertRegex(repr(result.first_offender), f"^{offender}$")
        self.assertRegex(
            repr(result),
            r"^zeroth\.StepResult\(step=1, committed=False, reason='.+', cause='non-finite', "
            rf"first_offender={offender}\)$",
        )
        accumulating = zeroth.Engine(zoo.make("plain"), config(0, gradient_accumulation_steps=2), log_level="off")
        self.assertEqual(repr(train(accumulating)), "zeroth.StepResult(boundary=False)")


def warmup(stage: int, **more: object) -> dict[str, object]:
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}
    return config(stage, scheduler={"type": "WarmupLR", "params": params}, **more)


class Schedules(unittest.TestCase):
    def test_that_of_the_configuration_is_read_and_stepped_by_the_engine(self) -> None:
        for stage in (0, 3):
            model = zoo.make("plain")
            engine, optimizer, _, scheduler = zeroth.initialize(model=model, config=warmup(stage), log_level="off")
            assert optimizer is not None
            rates = []
            for step in range(6):
                self.assertEqual(scheduler.get_last_lr(), engine.learning_rates)
                self.assertEqual(scheduler.get_lr(), [group["lr"] for group in optimizer.param_groups])
                self.assertEqual((scheduler.last_epoch, scheduler.state_dict()), (step, {"last_epoch": step}))
                rates += scheduler.get_last_lr()
                self.assertEqual(train(engine).lr, rates[-1])
            self.assertEqual(rates, sorted(rates))
            self.assertEqual((len(set(rates)), rates[-1]), (5, 0.4))
            self.assertIs(scheduler.optimizer, optimizer)
            with self.assertRaisesRegex(zeroth.Error, r"engine\.step\(\) steps the scheduler.*hint: leave out"):
                scheduler.step()
            scheduler.load_state_dict(scheduler.state_dict())
            with self.assertRaisesRegex(zeroth.Error, r"another step.*expected: 6; got: 3; hint: engine\.load\(path\)"):
                scheduler.load_state_dict({"last_epoch": 3})

    def test_its_place_is_in_a_checkpoint_and_other_values_of_groups_are_followed(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            engine, optimizer, _, scheduler = zeroth.initialize(
                model=zoo.make("plain"), config=warmup(3), log_level="off"
            )
            assert optimizer is not None
            train(engine, 2)
            engine.save(folder)
            expected = scheduler.get_last_lr()
            optimizer.param_groups[0]["weight_decay"] = 0.25  # beside a rate that the schedule has set
            self.assertEqual((train(engine).lr, engine._core.groups[0]["weight_decay"]), (expected[0], 0.25))
            self.assertEqual(engine._core.groups[0]["lr"], 0.4)
            optimizer.param_groups[0]["lr"] = 0.5
            with self.assertRaisesRegex(zeroth.Error, "the configuration has a scheduler"):
                train(engine)
            again, _, _, scheduler = zeroth.initialize(model=zoo.make("plain"), config=warmup(0), log_level="off")
            again.load(folder)
            self.assertEqual((scheduler.get_last_lr(), scheduler.last_epoch), (expected, 2))

    def test_a_step_by_hand_beside_the_engines_is_refused(self) -> None:
        for stage in (0, 3):
            engine, _, _, scheduler = zeroth.initialize(
                model=zoo.make("plain"),
                config=config(stage),
                lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
                log_level="off",
            )
            self.assertEqual([train(engine).lr for _ in range(2)], [0.01, 0.005])
            scheduler.step()
            with self.assertRaisesRegex(zeroth.Error, r"beside engine\.step\(\).*which: StepLR; hint: leave out"):
                train(engine)
            # Who makes the scheduler steps it.
            _, engine = make(stage=stage)
            own = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
            rates = []
            for _ in range(2):
                rates.append(train(engine).lr)
                own.step()
            self.assertEqual(rates, [0.01, 0.005])

    def test_without_any_there_is_none(self) -> None:
        self.assertIsNone(zeroth.initialize(model=zoo.make("plain"), config=config(), log_level="off")[3])
        frozen = zoo.make("plain").requires_grad_(False)
        self.assertEqual(zeroth.initialize(model=frozen, config=warmup(3), log_level="off")[1:], (None, None, None))


class Groups(unittest.TestCase):
    def test_groups_are_those_of_torch(self) -> None:
        model, reference = zoo.make("plain"), zoo.make("plain")

        def groups(of: nn.Module) -> list[dict[str, object]]:
            return [
                {"params": [p for p in of.parameters() if p.dim() < 2], "weight_decay": 0.0},
                {"params": [p for p in of.parameters() if p.dim() >= 2], "weight_decay": 0.5, "lr": 0.02},
            ]

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
            ([{"params": everything, "momentum": 0.5}], "not known; .*which: group 1, 'momentum'"),
            ([{"params": everything, "betas": (0, 1)}], "cannot follow; .*group 1, 'betas'.*below 1; got: .0, 1."),
            ([{"params": everything}, {"params": everything[0]}], "in two groups; which: first.weight, groups 1 and 2"),
            (
                [*everything, nn.Parameter(torch.ones(3))],
                r"none of the module's.*group 1, the parameter at 10.*shape \(3,\)",
            ),
            (
                [{"params": everything}, {"params": ["head.bias"]}],
                "none of the module's.*group 2, the parameter at 0.*got: str",
            ),
        ):
            with self.assertRaisesRegex(zeroth.Error, text):
                zeroth.Engine(model, config(), params=params, log_level="off")
        for params in (model.parameters(), model.named_parameters()):
            engine = zeroth.Engine(model, config(), params=params, log_level="off")
            self.assertTrue(train(engine).committed)
            engine.close()


class Rates(unittest.TestCase):
    """Learning rates that the user sets."""

    def test_a_scheduler_of_torchs_drives_the_engine(self) -> None:
        for stage in (0, 3):
            plain = zoo.make("plain")
            groups = lambda model: [  # noqa: E731
                {"params": model.first.parameters(), "lr": 0.02},  # noqa: E731
                {"params": [*model.blocks.parameters(), *model.head.parameters()]},
            ]
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
            model=zoo.make("plain"),
            config=config(),
            lr_scheduler=lambda of: torch.optim.lr_scheduler.ExponentialLR(of, 0.5),
        )
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
        with self.assertRaisesRegex(zeroth.Error, r"has no state_dict\(\).*engine\.save"):
            engine.optimizer.state_dict()
        with self.assertRaisesRegex(zeroth.Error, r"takes no state_dict\(\)"):
            engine.optimizer.load_state_dict({"state": {}, "param_groups": []})
        engine.backward(engine(*BATCH))
        engine.optimizer.zero_grad()  # as torch's does
        with self.assertRaisesRegex(zeroth.Error, "without a backward"):
            engine.optimizer.step()
        engine.backward(engine(*BATCH))
        self.assertTrue(engine.optimizer.step().committed)
        self.assertEqual(engine.steps, 1)
        engine.close()
        self.assertEqual((engine.rank, engine.world_size, engine.steps), (0, 1, 1))


if __name__ == "__main__":
    unittest.main(verbosity=2)
