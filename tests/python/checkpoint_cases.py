"""Checkpoints of scripts that save again, roll back, change the optimizer or compile the model; part of
checkpoint_test.py. On two ranks: checkpoint_rank.py, again()."""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import tempfile
import unittest
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

import zeroth
import zeroth.ckpt

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.5}}


def make(model: nn.Module | None = None, stage: int = 0, optimizer: Any = ADAMW, **more: Any) -> zeroth.Engine:
    torch.manual_seed(3)
    settings = {"zero_optimization": {"stage": stage}, "optimizer": optimizer}
    return zeroth.Engine(model or nn.Linear(4, 4), settings, log_level="off", **more)


def train(engine: zeroth.Engine, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()


def names(folder: str) -> list[str]:
    return sorted(path.name for path in pathlib.Path(folder).iterdir() if path.name != "LATEST")


def _is_link(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def same(one: Any, other: Any) -> bool:
    """With types, and the order of dictionaries."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (one != one and other != other)


class Cases(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def refused(self, code: str, text: str) -> Any:
        return self.assertRaisesRegex(zeroth.Error, rf"(?s)^\[{code}\].*{text}")

    def log(self) -> str:
        return self.folder + "/log.jsonl"

    def logged(self, text: str) -> list[str]:
        lines = pathlib.Path(self.log()).read_text().splitlines()
        return [line for line in lines if text in line]


class SavesAgain(Cases):
    def test_retention_counts_commits_and_a_load_takes_the_last(self) -> None:
        for async_ in (False, True):
            folder = f"{self.folder}/{async_}"
            engine = make()
            for _ in range(3):
                train(engine, 2)
                engine.save(folder)
            engine.close()
            engine = make(json_log=self.log())
            train(engine, 3)
            saved: Any = engine.save(folder, keep_last=2, async_=async_)  # type: ignore[call-overload]
            path = saved.wait() if async_ else saved
            self.assertEqual(len(self.logged("later steps than step-00000003")), 1 + async_)
            self.assertIn("step-00000006, step-00000004", self.logged("later steps")[-1])
            self.assertEqual(names(folder), ["step-00000003", "step-00000006"])
            loaded = make().load(folder)
            self.assertEqual((loaded.path, loaded.step), (path, 3))
            train(engine)
            engine.save(folder, keep_last=1)
            self.assertEqual(names(folder), ["step-00000004"])
            self.assertEqual(len(self.logged("later steps")), 1 + async_)  # once an engine
            engine.close()
        self.assertEqual([entry.commit for entry in zeroth.ckpt.entries(folder)], [5])

    def test_a_torn_one_is_passed_over_and_saved_again(self) -> None:
        engine = make()
        for _ in range(3):
            train(engine)
            path = engine.save(self.folder)
        pathlib.Path(path, "rank-00000.safetensors").unlink()
        other = make(json_log=self.log())
        loaded = other.load(self.folder)
        self.assertEqual((loaded.step, len(loaded.skipped)), (2, 1))
        self.assertIn("rank-00000.safetensors is missing", self.logged("not a whole checkpoint, skipped")[0])
        self.assertEqual(zeroth.ckpt.prune(self.folder, keep_last=1), [f"{self.folder}/step-00000001"])
        self.assertEqual(engine.save(self.folder), path)  # the same state, whose file was missing
        self.assertEqual(zeroth.ckpt.verify(path), [])
        engine.close()
        other.close()

    def test_a_failure_behind_the_training_is_raised_once(self) -> None:
        engine = make()
        train(engine)
        engine.save(self.folder, client_state=1)
        handle = engine.save(self.folder, client_state=2, async_=True)
        with self.refused("USAGE", "saved there before"):
            engine.save(self.folder, client_state=1)
        self.assertEqual(handle.wait(), "")
        engine.save(self.folder, overwrite=True, async_=True).wait()
        open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
        self.assertEqual([name for name in open_files if ".mark" in name], [])
        engine.close()

    def test_tied_names_and_names_of_files(self) -> None:
        for stage in (0, 3):
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
            model[1].weight = model[0].weight
            engine = make(model, stage)
            one, other = torch.ones(4, 4), torch.ones(4, 4)
            engine.load_state_dict({"0.weight": one, "1.weight": other})
            other[0, 0] = 2
            with self.refused("MODEL", "different values.*0.weight, 1.weight"):
                engine.load_state_dict({"0.weight": one, "1.weight": other})
            self.assertEqual(engine.full("0.weight").sum(), 16)  # type: ignore[union-attr]
            engine.close()
        odd = nn.Linear(4, 4)
        odd.register_parameter("__metadata__", nn.Parameter(torch.ones(1)))
        with self.refused("MODEL", "keep for themselves.*__metadata__"):
            make(odd)

    def test_the_same_step_again(self) -> None:
        for stage in (0, 3):
            folder = f"{self.folder}/{stage}"
            engine = make(stage=stage)
            train(engine, 2)
            first = engine.save(folder, client_state={"epoch": 1})
            manifest = pathlib.Path(first, "manifest.json").read_bytes()
            self.assertEqual(engine.save(folder, client_state={"epoch": 1}), first)
            self.assertEqual(engine.save(folder, client_state={"epoch": 1}, async_=True).wait(), first)
            self.assertEqual(pathlib.Path(first, "manifest.json").read_bytes(), manifest)
            torch.rand(1)  # as an evaluation may: the checkpoint gets the generators of now
            self.assertEqual(engine.save(folder, client_state={"epoch": 1}), first)
            self.assertNotEqual(pathlib.Path(first, "manifest.json").read_bytes(), manifest)
            with self.refused("USAGE", "saved there before.*another client_state.*overwrite"):
                engine.save(folder)
            handle = engine.save(folder, async_=True)
            with self.refused("USAGE", "saved there before.*another client_state"):
                handle.wait()
            self.assertEqual(engine.save(folder, overwrite=True), first)
            with engine.gathered(engine.module.weight, modify_on=0), torch.no_grad():
                engine.module.weight.zero_()
            with self.refused("USAGE", "other weights"):
                engine.save(folder)
            handle = engine.save(folder, overwrite=True, async_=True)
            self.assertEqual(handle.wait(), first)
            self.assertEqual(names(folder), ["step-00000002"])
            self.assertEqual(zeroth.ckpt.verify(first), [])
            other = make(stage=3 - stage)
            self.assertIsNone(other.load(folder).client_state)
            self.assertEqual(other.full("weight").abs().max(), 0)  # type: ignore[union-attr]

    def test_an_adapter_saves_its_first_step_twice(self) -> None:
        engine = make(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)))
        train(engine)
        path = engine.save(self.folder, frozen="once")
        self.assertEqual(engine.save(self.folder, frozen="once"), path)
        torch.rand(1)
        engine.save(self.folder, frozen="once")
        self.assertEqual(zeroth.ckpt.verify(path), [])  # it does not refer to itself
        train(engine)
        engine.save(self.folder, frozen="once")
        with self.refused("USAGE", "later checkpoints refer to it"):
            other = make(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)))
            other.load(path)
            engine.close()
            other.save(self.folder, overwrite=True, client_state=1)
        self.assertEqual([zeroth.ckpt.verify(entry.path) for entry in zeroth.ckpt.entries(self.folder)], [[], []])

    def test_two_engines_of_a_program_have_names(self) -> None:
        generator, critic = make(), make(nn.Linear(4, 2))
        train(generator)
        train(critic, 5)
        generator.save(self.folder, name="generator", keep_last=1)
        critic.save(self.folder, name="critic", keep_last=1)
        path = critic.save(self.folder + "/alone", keep_last=1)
        with self.refused("USAGE", r"another engine of this program.*name=\"critic\""):
            generator.save(self.folder + "/alone")
        with self.refused("CHECKPOINT", "there are some in folders inside of it: alone, critic, generator"):
            critic.load(self.folder)
        with self.refused("USAGE", "a name of an engine's checkpoints is none"):
            critic.save(self.folder, name="../critic")
        self.assertEqual(make().load(self.folder, name="generator").step, 1)
        self.assertEqual(make(nn.Linear(4, 2)).load(self.folder, name="critic").step, 5)
        critic.close()
        train(generator, 4)
        with self.refused("USAGE", "a checkpoint of another model.*overwrite"):  # as two programs may
            generator.save(self.folder + "/alone")
        self.assertEqual(zeroth.ckpt.verify(path), [])


class HyperParameters(Cases):
    def groups(self, model: nn.Linear, **of_bias: Any) -> list[dict[str, Any]]:
        return [{"params": [model.weight]}, {"params": [model.bias], **of_bias}]

    def test_a_checkpoint_of_another_optimizer_is_refused_by_name(self) -> None:
        engine = make()
        train(engine)
        engine.save(self.folder)
        for stage in (0, 3):
            engine = make(stage=stage, optimizer=SGD, json_log=self.log())
            with self.refused("CHECKPOINT", "of another optimizer.*expected: SGD.*got: AdamW"):
                engine.load(self.folder)
            self.assertEqual((engine.steps, engine.learning_rates), (0, [0.5]))
            self.assertEqual(engine.load(self.folder, strict=False).missing, [])
            self.assertEqual((engine.steps, engine.learning_rates), (1, [0.5]))
            self.assertEqual(len(self.logged("are of AdamW, and are not taken")), 1 + stage // 3)
        momentum = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}
        engine = make(optimizer=momentum)
        train(engine)
        engine.save(self.folder + "/momentum")
        with self.refused("CHECKPOINT", "momentum_buffer"):
            make(optimizer=SGD).load(self.folder + "/momentum")

    def test_other_parameter_groups_are_refused_and_what_changes_is_logged(self) -> None:
        engine = make()
        train(engine)
        engine.save(self.folder + "/one")
        model = nn.Linear(4, 4)
        engine = make(model, stage=3, params=self.groups(model, weight_decay=0.0, lr=0.25), json_log=self.log())
        with self.refused(
            "CHECKPOINT", r"were one group.*lr 1e-04, weight_decay 0.1 \(weight\), lr 0.25, weight_decay 0 \(bias\)"
        ):
            engine.load(self.folder + "/one")
        self.assertEqual(engine.learning_rates, [1e-4, 0.25])
        engine.load(self.folder + "/one", hypers=False)
        self.assertEqual(engine.learning_rates, [1e-4, 0.25])
        self.assertEqual(self.logged("hyper-parameters of the checkpoint replace"), [])
        engine.optimizer.param_groups[1]["lr"] = 0.5
        train(engine)
        engine.save(self.folder + "/two")
        with self.refused("CHECKPOINT", r"different hyper-parameters.*lr 1e-04, weight_decay 0.1 \(weight\)"):
            make().load(self.folder + "/two")
        other = nn.Linear(4, 4)
        groups = self.groups(other, weight_decay=0.0, lr=0.25)[::-1]  # numbered in another way
        engine = make(other, params=groups, json_log=self.log())
        engine.load(self.folder + "/two")
        self.assertEqual(engine.learning_rates, [0.5, 1e-4])
        told = self.logged("hyper-parameters of the checkpoint replace")
        self.assertEqual(len(told), 1)
        self.assertIn("configuration: group 1: lr 0.25 -> 0.5", told[0])

    def test_tied_weights_may_be_renamed_by_all_their_names(self) -> None:
        def tied() -> nn.Module:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            model[1].weight = model[0].weight
            return model

        engine = make(tied())
        train(engine)
        engine.save(self.folder)
        names_there = list(engine.state_dict())
        for rename in ({name: f"0.{name}" for name in names_there}, {f"0.{name}": name for name in names_there}):
            other = make(nn.Sequential(tied()), stage=3)
            self.assertEqual(other.load(self.folder, rename=rename).missing, [])
            self.assertTrue(torch.equal(other.full("0.1.weight"), engine.full("0.weight")))  # type: ignore[arg-type]

    def test_a_scheduler_stays_with_hypers_false(self) -> None:
        def build() -> Any:
            return zeroth.initialize(
                model=nn.Linear(4, 4),
                config={"optimizer": SGD},
                lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
                log_level="off",
            )

        engine, *_ = build()
        train(engine, 4)
        engine.save(self.folder)
        for hypers, rate in ((True, 0.1), (False, 0.5)):
            engine, *_ = build()
            engine.load(self.folder, hypers=hypers)
            self.assertAlmostEqual(engine.learning_rates[0], rate)

    def test_a_checkpoint_without_one_common_name_changes_nothing(self) -> None:
        engine = make()
        train(engine)
        engine.save(self.folder)
        for stage in (0, 3):
            engine = make(nn.Sequential(nn.Linear(4, 4)), stage=stage, optimizer=SGD)
            torch.manual_seed(9)
            before = torch.get_rng_state(), engine.full("0.weight")
            with self.refused("CHECKPOINT", "no parameter of the model.*0.weight, 0.bias.*got: bias, weight.*rename"):
                engine.load(self.folder, strict=False)
            self.assertEqual((engine.steps, engine.learning_rates), (0, [0.5]))
            self.assertTrue(torch.equal(torch.get_rng_state(), before[0]))
            self.assertTrue(torch.equal(engine.full("0.weight"), before[1]))  # type: ignore[arg-type]
            for rename in ({"weight": "0.weight"}, {"0.weight": "weight"}):  # either way round
                missing = engine.load(self.folder, strict=False, rename=rename).missing
                self.assertEqual(missing, ["0.bias/weight"])
            with self.refused("USAGE", "names of the checkpoint, each with the one that the model has.*0.weight?"):
                engine.load(self.folder, rename={"weight": "0.weigth"})


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


class Pretrained(Cases):
    def test_names_go_the_same_way_as_in_a_load(self) -> None:
        engine = make()
        path = self.folder + "/weights.safetensors"
        engine.export_safetensors(path)
        of_zeroth = engine.save(self.folder + "/run")
        names_of_both = {"weight": "0.weight", "bias": "0.bias"}
        for rename in (names_of_both, {of_model: name for name, of_model in names_of_both.items()}):
            for model in (nn.Sequential(nn.Linear(4, 4)), make(nn.Sequential(nn.Linear(4, 4)), stage=3)):
                report = zeroth.load_pretrained(model, path, rename=rename)
                self.assertEqual((report.missing, report.unexpected), ([], []))
        # All names of a tied weight, of which the file has one.
        names = {"0.weight": "weight", "0.bias": "bias", "1.weight": "weight_of_head"}
        for model in (_tied(), make(_tied(), stage=3)):
            report = zeroth.load_pretrained(model, path, rename=names, strict=False)
            self.assertEqual((report.missing, report.unexpected), (["1.bias"], []))
        for place in (of_zeroth, self.folder + "/run"):
            for target in (nn.Linear(4, 4), engine):
                with self.refused("IO", r"a checkpoint of Zeroth.*engine\.load\(path\) loads it"):
                    zeroth.load_pretrained(target, place)


class CallersValues(Cases):
    VALUES: tuple[Any, ...] = (
        None,
        {1: 2, "a": [1, 2.5, True, None], (1, "b"): {}},
        (1, (2, [3]), ()),
        {"__zeroth__": "tuple"},
        [math.inf, -math.inf, math.nan, -0.0, 10**40],
        {1, 2, 3},
        frozenset(("a", 1)),
        b"\0\xff",
        bytearray(b"ab"),
        1 + 2j,
        collections.Counter({30: 1, 60: 2}),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, {3: [1]}),
        collections.deque([1, 2], maxlen=3),
        [np.float64(0.1), np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("x"), np.datetime64("2026-01-02")],
    )

    def test_types_go_there_and_back(self) -> None:
        engine = make()
        train(engine)
        engine.save(self.folder, client_state=list(self.VALUES))
        loaded = make().load(self.folder).client_state
        for value, found in zip(self.VALUES, loaded, strict=True):
            self.assertTrue(same(value, found), (value, found))
        path = zeroth.ckpt.convert(self.folder, self.folder + "/copy", to="zeroth")
        self.assertEqual(zeroth.ckpt.diff(self.folder, path), [])
        zeroth.ckpt.convert(self.folder, self.folder + "/dcp", to="dcp")
        self.assertTrue(same(zeroth.ckpt.read(self.folder + "/dcp").user["client"][2], self.VALUES[2]))

    def test_what_cannot_be_kept_is_named_as_the_user_wrote_it(self) -> None:
        class Name(str):
            pass

        engine = make()
        train(engine)
        loop: list[Any] = []
        loop.append(loop)
        for state, text in (
            ({"v": torch.ones(2)}, r"client_state\['v'\] is a Tensor: save \.tolist\(\)"),
            ({1: [object()]}, r"client_state\[1\]\[0\] is a object"),
            ({"n": Name("x")}, r"client_state\['n'\] is a Name: save str\(\.\.\.\)"),
            (loop, "nested too deep, or in itself"),
            (collections.defaultdict(lambda: 3), "client_state is a defaultdict whose factory"),
        ):
            with self.refused("USAGE", text):
                engine.save(self.folder, client_state=state)
        self.assertEqual(names(self.folder), [])

    def test_schedulers_with_integer_keys_and_one_that_cannot_be_kept(self) -> None:
        def build(make_scheduler: Any) -> tuple[zeroth.Engine, Any]:
            engine, _, _, scheduler = zeroth.initialize(
                model=nn.Linear(4, 4), config={"optimizer": SGD}, lr_scheduler=make_scheduler, log_level="off"
            )
            return engine, scheduler

        engine, scheduler = build(lambda optimizer: MultiStepLR(optimizer, [2, 4]))
        train(engine, 3)
        engine.save(self.folder)
        other, loaded = build(lambda optimizer: MultiStepLR(optimizer, [7]))
        other.load(self.folder)
        self.assertEqual(loaded.state_dict(), scheduler.state_dict())
        self.assertIs(type(loaded.milestones), collections.Counter)
        train(engine, 2)
        train(other, 2)
        self.assertEqual(other.learning_rates, engine.learning_rates)

        class Odd(MultiStepLR):
            def state_dict(self) -> dict[str, Any]:
                return {"odd": object()}

        engine, _ = build(lambda optimizer: Odd(optimizer, [2]))
        train(engine)
        with self.refused(
            "USAGE", r"the scheduler's state cannot be saved.*the scheduler's state\['odd'\] is a object"
        ):
            engine.save(self.folder + "/odd")


class Compiled(Cases):
    def models(self) -> dict[str, nn.Module]:
        def plain() -> nn.Sequential:
            torch.manual_seed(3)
            return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))

        blocks = plain()
        blocks[0] = torch.compile(blocks[0], backend="eager")  # type: ignore[assignment]
        return {
            "plain": plain(),
            "blocks": blocks,
            "whole": torch.compile(plain(), backend="eager"),  # type: ignore[dict-item]
        }

    def test_names_are_those_of_the_model_that_was_compiled(self) -> None:
        expected = self.models()["plain"].state_dict()
        for stage in (0, 3):
            saved = {}
            for kind, model in self.models().items():
                folder = f"{self.folder}/{kind}-{stage}"
                engine = make(model, stage=stage)
                train(engine)
                engine.save(folder)
                engine.export_safetensors(folder + ".safetensors")
                saved[kind] = engine.state_dict()
                self.assertEqual(list(saved[kind]), list(expected))
                self.assertIsNotNone(engine.full("0._orig_mod.0.weight"))
                opened = zeroth.ckpt.open(folder)
                self.assertEqual(sorted([*opened.names, *opened.buffers]), sorted(expected))
                self.assertNotIn("_orig_mod", pathlib.Path(folder, "step-00000001/manifest.json").read_text())
                wrapped = {f"_orig_mod.{name}": torch.zeros_like(value) for name, value in saved[kind].items()}
                engine.load_state_dict(wrapped)
                self.assertEqual(engine.full("0.0.weight").abs().max(), 0)  # type: ignore[union-attr]
                zeroth.load_pretrained(engine, folder + ".safetensors")
                self.assertTrue(torch.equal(engine.full("0.0.weight"), saved[kind]["0.0.weight"]))  # type: ignore[arg-type]
            for kind, model in self.models().items():
                for other in saved:
                    engine = make(model, stage=stage)
                    engine.load(f"{self.folder}/{other}-{stage}")
                    for name, value in engine.state_dict().items():
                        self.assertTrue(torch.equal(value, saved[other][name]), (kind, other, name))
                    engine.close()

    def test_a_module_takes_weights_of_either(self) -> None:
        from safetensors.torch import save_file

        values = {name: torch.ones_like(value) for name, value in self.models()["plain"].state_dict().items()}
        for names_there in (values, {f"_orig_mod.{name}": value for name, value in values.items()}):
            save_file(names_there, self.folder + "/weights.safetensors")
            for model in self.models().values():
                zeroth.load_pretrained(model, self.folder + "/weights.safetensors")
                self.assertEqual(min(float(value.min()) for value in model.state_dict().values()), 1)

    def test_checkpoints_that_have_the_wrappers_names_load(self) -> None:
        """As they were written before: renamed by hand, file and manifest."""
        engine = make(self.models()["plain"])
        train(engine)
        engine.save(self.folder)
        contents = zeroth.ckpt.read(self.folder)
        contents.rename([(r"^0\.", "0._orig_mod.")])
        old = zeroth.ckpt.write(contents, self.folder + "/old")
        text = json.loads(pathlib.Path(old, "manifest.json").read_text())
        self.assertIn("0._orig_mod.0.weight", [param["name"] for param in text["params"]])
        for stage, model in zip((0, 3, 0), self.models().values(), strict=True):
            other = make(model, stage=stage)
            self.assertEqual(other.load(old).missing, [])
            for name, value in other.state_dict().items():
                self.assertTrue(torch.equal(value, engine.state_dict()[name]), name)
            self.assertTrue(torch.equal(*[one.full("0.0.weight", "exp_avg") for one in (other, engine)]))  # type: ignore[arg-type]
            other.close()
        opened = zeroth.ckpt.open(old)
        self.assertIn("0.0.weight", opened.names)
        self.assertTrue(torch.equal(opened.tensor("0.0.weight"), opened.tensor("0._orig_mod.0.weight")))
        self.assertEqual(opened.buffer("0.1.running_mean").shape, (4,))
        self.assertEqual(zeroth.ckpt.diff(self.folder, old), [])
        train(engine)
        engine.save(self.folder)
