"""What an engine is told: configurations, parameter groups, learning rates."""

from __future__ import annotations

import argparse
import json
import pathlib
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
