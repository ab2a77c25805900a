"""What scripts do that were written for other systems: it works as there, or is refused with the line that helps. In a
world of one at stages 0 and 3; what needs two ranks is in scripts_rank.py."""

from __future__ import annotations

import collections
import contextlib
import fractions
import json
import os
import pathlib
import re
import subprocess
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import forked
import job
import numpy as np
import torch
import torch.distributed as dist
import zoo
from alone import BATCH, config, make, train
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

import zeroth

STAGES = (0, 3)
STEPS = 6
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "AdamW": (
        {"type": "AdamW", "params": {"lr": 0.01}},
        lambda of: torch.optim.AdamW(of, lr=0.01, weight_decay=0.01),
    ),
    "Adam": (
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}},
        lambda of: torch.optim.Adam(of, lr=0.01, weight_decay=0.1),
    ),
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.5}},
        lambda of: torch.optim.SGD(of, lr=0.01, momentum=0.5),
    ),
}


class Hypers(unittest.TestCase):
    """Hyper-parameters that somebody writes into param_groups."""

    def check(
        self,
        name: str,
        make_writer: Callable[[torch.optim.Optimizer], Callable[[int], object]],
        groups_of: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    ) -> None:
        settings, of_torch = OPTIMIZERS[name]
        plain = zoo.make("plain")
        optimizer = of_torch(groups_of(plain))
        write = make_writer(optimizer)
        for step in range(STEPS):
            plain(*BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
            write(step)
        for stage in STAGES:
            model = zoo.make("plain")
            engine = zeroth.Engine(model, config(stage, optimizer=settings), params=groups_of(model), log_level="off")
            write = make_writer(engine.optimizer)
            for step in range(STEPS):
                train(engine)
                write(step)
            engine.close()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)

    def test_what_is_written_is_followed(self) -> None:
        def writes(**values: Any) -> Callable[[torch.optim.Optimizer], Callable[[int], object]]:
            def make_writer(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
                def write(step: int) -> None:
                    for group in optimizer.param_groups:
                        for key, value in values.items():
                            group[key] = value(step) if callable(value) else value

                return write

            return make_writer

        betas = writes(betas=lambda step: (0.5 + 0.05 * step, 0.9), eps=1e-3, lr=lambda step: 0.01 * (step + 1))
        self.check("AdamW", betas)
        self.check("Adam", betas)
        self.check("SGD", writes(momentum=lambda step: 0.1 * step, nesterov=lambda step: step > 2, weight_decay=0.01))
        self.check("SGD", writes(momentum=lambda step: 0.9 * (step % 2)))  # none in every second step

    def test_schedulers_that_cycle_momentum(self) -> None:
        def one_cycle(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
            scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1)
            return lambda step: scheduler.step()

        def cyclic(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
            scheduler = lr_scheduler.CyclicLR(optimizer, base_lr=0.001, max_lr=0.05, step_size_up=2)
            return lambda step: scheduler.step()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in OPTIMIZERS:
                self.check(name, one_cycle)
                self.check(name, cyclic)

    def test_groups_may_have_all_of_them(self) -> None:
        def nothing(optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
            return lambda step: None

        def parts(model: nn.Module) -> list[list[nn.Parameter]]:
            return [[p for p in model.parameters() if p.dim() < 2], [p for p in model.parameters() if p.dim() >= 2]]

        def adaptive(model: nn.Module) -> list[dict[str, Any]]:
            vectors, matrices = parts(model)
            return [{"params": vectors, "betas": (0.5, 0.9), "eps": 1e-4}, {"params": matrices, "lr": 0.02}]

        def sgd(model: nn.Module) -> list[dict[str, Any]]:
            vectors, matrices = parts(model)
            return [{"params": vectors, "momentum": 0.9, "nesterov": True}, {"params": matrices, "momentum": 0.0}]

        self.check("AdamW", nothing, adaptive)
        self.check("SGD", nothing, sgd)

    def test_what_cannot_be_followed_is_refused(self) -> None:
        for stage in STAGES:
            settings = {"type": "SGD", "params": {"lr": 0.01}}
            engine = zeroth.Engine(zoo.make("plain"), config(stage, optimizer=settings), log_level="off")
            group = engine.optimizer.param_groups[0]
            for key, value, text in (
                ("momentum", 0.9, "keeps no momentum.*which: momentum of parameter group 0.*optimizer.params.momentum"),
                ("betas", (0.9, 0.95), "cannot follow.*group 0, 'betas'.*SGD has lr, momentum"),
                ("maximize", True, "cannot follow.*group 0, 'maximize'"),
                ("momentum", -1, "cannot follow.*group 0, 'momentum'.*expected: a number of at least 0; got: -1"),
                ("lr", float("nan"), "cannot follow.*group 0, 'lr'"),
            ):
                before = group.get(key)
                group[key] = value
                with self.assertRaisesRegex(zeroth.Error, text):
                    train(engine)
                engine.zero_grad()
                group[key] = before
            self.assertTrue(train(engine).committed)


class Backwards(unittest.TestCase):
    def trained(
        self, stage: int | None, backwards: Callable[[torch.Tensor, torch.Tensor, zeroth.Engine | None], object]
    ) -> list[torch.Tensor]:
        """By torch if there is no stage. `backwards(loss, inner, engine)`: with a feature inside the model."""
        model = zoo.make("plain")
        engine = None if stage is None else zeroth.Engine(model, config(stage), log_level="off")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        inner: list[torch.Tensor] = []
        model.first.register_forward_hook(lambda module, args, output: inner.append(output))
        for _ in range(2):
            backwards(model(*BATCH), inner[-1], engine)
            if engine is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                self.assertTrue(engine.step().committed)
        if engine is not None:
            engine.close()
        return [parameter.detach().clone() for parameter in model.parameters()]

    def assert_as_in_torch(self, stage: int, by_engine: Callable[..., object], by_torch: Callable[..., object]) -> None:
        for mine, theirs in zip(self.trained(stage, by_engine), self.trained(None, by_torch), strict=True):
            self.assertLess((mine - theirs).abs().max().item(), 1e-12)

    def test_a_graph_may_be_retained(self) -> None:
        def by_torch(loss: torch.Tensor, inner: torch.Tensor, engine: None) -> None:
            loss.backward(retain_graph=True)
            loss.backward(torch.full_like(loss, 0.5))

        def by_engine(loss: torch.Tensor, inner: torch.Tensor, engine: zeroth.Engine) -> None:
            engine.backward(loss, retain_graph=True)
            engine.backward(loss, gradient=torch.full_like(loss, 0.5))

        for stage in STAGES:
            self.assert_as_in_torch(stage, by_engine, by_torch)

    def test_a_second_backward_from_inside_works(self) -> None:
        def by_torch(loss: torch.Tensor, inner: torch.Tensor, engine: zeroth.Engine | None) -> None:
            for one in (loss, inner.square().sum()):
                one.backward(retain_graph=True)

        def by_engine(loss: torch.Tensor, inner: torch.Tensor, engine: zeroth.Engine) -> None:
            for one in (loss, inner.square().sum()):
                engine.backward(one, retain_graph=True)

        for stage in STAGES:
            for backwards in (by_torch, by_engine):
                self.assert_as_in_torch(stage, backwards, by_torch)


class Configurations(unittest.TestCase):
    def test_numbers_and_paths_of_other_libraries_are_taken(self) -> None:
        mapping = types.MappingProxyType
        document: Any = collections.ChainMap(
            {
                "gradient_accumulation_steps": np.int64(1),
                "gradient_clipping": torch.tensor(0.5),
                "zero_optimization": mapping({"stage": np.array(3)}),
                "optimizer": mapping(
                    {
                        "type": np.str_("AdamW"),
                        "params": {"lr": np.float32(0.25), "betas": np.array([0.5, 0.75]), "eps": np.float64(1e-8)},
                    }
                ),
                "zeroth": {"broadcast_buffers": np.bool_(False), "threads": torch.tensor([1])[0]},
            },
            {"train_micro_batch_size_per_gpu": fractions.Fraction(3)},
        )
        engine = zeroth.Engine(zoo.make("plain"), document, log_level="off")
        read = json.loads(engine.config.to_json())
        self.assertEqual(read["optimizer"]["params"]["lr"], 0.25)
        self.assertEqual(read["optimizer"]["params"]["betas"], [0.5, 0.75])
        self.assertEqual((read["gradient_clipping"], read["zero_optimization"]["stage"]), (0.5, 3))
        self.assertEqual((read["zeroth"]["broadcast_buffers"], read["train_micro_batch_size_per_gpu"]), (False, 3))
        override = zeroth.ConfigOverride("/optimizer/params/lr", np.float64(0.5))
        self.assertEqual(repr(override), "an override: /optimizer/params/lr = 0.5")
        with self.assertRaisesRegex(zeroth.ConfigError, r'which: /zero_optimization; .*got: "over/there"'):
            zeroth.Engine(zoo.make("plain"), {"zero_optimization": pathlib.Path("over/there")}, log_level="off")

    def test_what_json_does_not_have_is_named(self) -> None:
        round_and_round: list[Any] = []
        round_and_round += [round_and_round, round_and_round]
        meta = torch.ones(1, device="meta")
        document = {
            "optimizer": {"params": {"betas": {0.9, 0.95}, "eps": meta}},
            "zeroth": {"threads": object()},
            "aio": round_and_round,
            7: 8,
        }
        with self.assertRaisesRegex(zeroth.ConfigError, "6 problems in a dict") as caught:
            zeroth.Engine(zoo.make("plain"), document)
        for text in (
            "/optimizer/params/betas: no JSON value; .*got set",
            "/optimizer/params/eps: no JSON value; .*got Tensor",
            "/zeroth/threads: no JSON value; .*got object",
            "/aio/0: nested too deep",
            "a key is no text; .*got 7",
        ):
            self.assertRegex(str(caught.exception), f"\n  - a dict: {text}")
        for number, text in ((float("nan"), "NaN"), (np.float32("-inf"), "-Infinity")):
            with self.assertRaisesRegex(zeroth.ConfigError, f"wrong value.*which: /optimizer/params/lr.*got: {text}"):
                zeroth.Engine(zoo.make("plain"), {"optimizer": {"params": {"lr": number}}})

    def test_what_accelerate_writes_is_taken(self) -> None:
        """DeepSpeedPlugin() of accelerate 1.15, and what its prepare() fills in."""
        offload = {"device": "none", "nvme_path": None}
        document: dict[str, Any] = {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": offload,
                "offload_param": offload,
                "stage3_gather_16bit_weights_on_model_save": False,
            },
            "gradient_clipping": 1.0,
            "steps_per_print": float("inf"),
            "bf16": {"enabled": False},
            "fp16": {"enabled": False},
            "zero_allow_untested_optimizer": True,
        }
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "written.json"
            path.write_text(json.dumps(document))
            for stage in (0, 3):
                document["zero_optimization"]["stage"] = stage
                model = zoo.make("plain")
                engine = zeroth.Engine(model, document, log_level="off")
                same = zeroth.Engine(
                    zoo.make("plain"),
                    zeroth.Config.from_file(path, [zeroth.ConfigOverride("/zero_optimization/stage", stage)]),
                    log_level="off",
                )
                self.assertEqual(engine.config, same.config)
                self.assertTrue(train(engine).committed)
        self.assertEqual(zeroth.Config.from_json("{}", overrides=[zeroth.ConfigOverride("/wandb", None)]).zero_stage, 0)

    def test_all_faults_are_in_the_text(self) -> None:
        faults = {f"key{number}": number for number in range(16)}
        with self.assertRaises(zeroth.ConfigError) as caught:
            zeroth.Engine(zoo.make("plain"), faults)
        text = str(caught.exception)
        self.assertIn("[CONFIG] 16 problems in a dict", text)
        for key in faults:
            self.assertRegex(text, rf"(?m)^  - a dict:1: /{key}: unknown key")
        many = {f"key{number}": number for number in range(60)}
        with self.assertRaisesRegex(zeroth.ConfigError, r"(?s)60 problems.*and 10 more; where: ") as caught:
            zeroth.Engine(zoo.make("plain"), many)


class Adam(unittest.TestCase):
    """Names of DeepSpeed's optimizers mean what they mean there."""

    def trained(self, stage: int, type_: str, **params: Any) -> tuple[nn.Module, str]:
        model = zoo.make("plain")
        settings = {"type": type_, "params": {"lr": 0.01, "weight_decay": 0.1, **params}}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "log"
            engine = zeroth.Engine(model, config(stage, optimizer=settings), log_level="off", json_log=str(path))
            train(engine, 3)
            engine.close()
            return model, path.read_text()

    def test_each_has_its_rule_and_the_log_says_it_once(self) -> None:
        rules: dict[bool, list[torch.Tensor]] = {}
        for decoupled, of in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
            plain = zoo.make("plain")
            optimizer = of(plain.parameters(), lr=0.01, weight_decay=0.1)
            for _ in range(3):
                plain(*BATCH).backward()
                optimizer.step()
                optimizer.zero_grad()
            rules[decoupled] = list(plain.parameters())
        says, plainly = "Adam with decoupled weight decay", "added to the gradient, as torch.optim.Adam does"
        for stage, type_, params, decoupled, note in (
            (0, "Adam", {}, True, says),
            (3, "Adam", {"adam_w_mode": False}, False, ""),
            (0, "FusedAdam", {"torch_adam": False}, True, says),
            (3, "CPUAdam", {"torch_adam": True, "adam_w_mode": True}, True, says),
            (3, "DeepSpeedCPUAdam", {"adamw_mode": False, "fp32_optimizer_states": True}, False, plainly),
            (0, "fusedadam", {"adam_w_mode": False}, False, plainly),
            (3, "AdamW", {"adam_w_mode": False}, True, "type AdamW decouples the weight decay all the same"),
            (0, "AdamW", {}, True, ""),
        ):
            with self.subTest(type_, params=params):
                model, log = self.trained(stage, type_, **params)
                for mine, theirs in zip(model.parameters(), rules[decoupled], strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
                self.assertEqual(log.count(note) if note else log.count("hint /optimizer/type"), int(bool(note)), log)


class Wrapped(unittest.TestCase):
    def test_what_is_no_module_is_refused_by_its_kind(self) -> None:
        engine = zeroth.Engine(nn.Linear(2, 2), log_level="warning")
        for given, text in (
            ([nn.Linear(2, 2)], r"a list; hint: nn.Sequential\(\*layers\)"),
            (nn.Linear, r"the class Linear; hint: make one: Linear\(...\)"),
            (engine, "an? Engine; hint: engine.module"),
            ("model.pt", "a str"),
        ):
            with self.assertRaisesRegex(zeroth.Error, rf"^\[MODEL\].*no module.*zeroth.pipeline\(\).*got: {text}"):
                zeroth.Engine(given)  # type: ignore[arg-type]
        engine.close()
        split = zeroth.parallelize(nn.Linear(2, 2), {})
        with contextlib.closing(zeroth.Engine(split, log_level="warning")) as engine:
            self.assertIs(engine.module, split.model)

    def test_a_module_in_another_wrapper_is_refused_when_the_engine_is_built(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            parallel = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            sharded = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
            for model, which, text in (
                (parallel, "the model itself", r"DistributedDataParallel; hint: pass model\.module"),
                (nn.Sequential(parallel), "0", "DistributedDataParallel"),
                (nn.DataParallel(nn.Linear(2, 2)), "the model itself", "DataParallel; hint: pass model.module"),
                (sharded, "the model itself", r"FSDPModule; hint: .*before fully_shard\(\)"),
            ):
                for stage in STAGES:
                    with self.assertRaisesRegex(zeroth.Error, rf"^\[MODEL\].*which: {which}; .*got: {text}"):
                        zeroth.Engine(model, config(stage), log_level="off")
            zeroth.Engine(parallel.module, config(), world=zeroth.World.from_group(), log_level="off").close()
        finally:
            dist.destroy_process_group()


class Frozen(unittest.TestCase):
    def test_a_reference_model_is_gathered_and_evaluated(self) -> None:
        expected = zoo.make("plain")(*BATCH).item()
        for stage in (0, 1, 2, 3):
            model = zoo.make("plain").requires_grad_(False)
            engine = zeroth.Engine(model, config(stage), log_level="off")
            with torch.no_grad():
                self.assertEqual(engine(*BATCH).item(), expected)
            self.assertEqual(engine(*BATCH).item(), expected)
            x = BATCH[0].clone().requires_grad_(True)  # as for adversarial examples
            engine.backward(engine(x, BATCH[1]))
            self.assertGreater(x.grad.abs().max().item(), 0)
            for use in (engine.step, lambda: engine.optimizer):  # noqa: B023
                with self.assertRaisesRegex(zeroth.Error, r"^\[USAGE\].*no trainable parameter"):
                    use()
            self.assertNotIn("optimizer", engine.memory_report().planned)
            self.assertEqual(engine(*BATCH).item(), expected)
            engine.close()
            self.assertEqual(model(*BATCH).item(), expected)
        engine, optimizer, _, _ = zeroth.initialize(model=zoo.make("plain").requires_grad_(False), config=config())
        self.assertIsNone(optimizer)
        self.assertEqual(engine(*BATCH).item(), expected)

    def test_frozen_parameters_may_have_any_dtype(self) -> None:
        class Quantised(nn.Module):
            def __init__(self, dtype: torch.dtype) -> None:
                super().__init__()
                values = torch.arange(12).reshape(3, 4).to(dtype)
                self.weight = nn.Parameter(values, requires_grad=False)
                self.scale = nn.Parameter(torch.ones(4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight = self.weight
                return x @ (weight.real if weight.is_complex() else weight).float() * self.scale

        dtypes = (torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
        dtypes += (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.complex64)
        for dtype in dtypes:
            for stage in STAGES:
                with self.subTest(dtype, stage=stage):
                    torch.manual_seed(0)
                    model = nn.Sequential(*(Quantised(dtype) for _ in range(2)), nn.Linear(4, 1))
                    model[1].forward = lambda x: x  # a unit that is not used
                    before = model[0].weight.detach().clone()
                    x = torch.randn(2, 3)
                    expected = model(x)
                    params = model.parameters() if dtype == torch.uint8 else None
                    engine = zeroth.Engine(model, config(stage), params=params, log_level="off")
                    loss = engine(x)
                    self.assertTrue(torch.equal(loss, expected))
                    engine.backward(loss.sum())
                    self.assertTrue(engine.step().committed)
                    engine.close()
                    self.assertEqual(model[0].weight.dtype, dtype)
                    self.assertTrue(torch.equal(model[0].weight.view(torch.uint8), before.view(torch.uint8)))
                    self.assertGreater((model[0].scale - 1).abs().max().item(), 0)

    def test_what_cannot_be_kept_is_named(self) -> None:
        model = nn.Linear(2, 2)
        model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128), requires_grad=False)
        with self.assertRaisesRegex(zeroth.Error, "frozen parameter.*which: phase; expected: elements of 1, 2, 4 or 8"):
            zeroth.Engine(model, config(), log_level="off")
        model.phase = nn.Parameter(torch.ones(2, dtype=torch.float8_e4m3fn), requires_grad=False)
        with self.assertRaisesRegex(zeroth.Error, "not trained here.*which: phase.*leave it out of the .*groups"):
            zeroth.Engine(model, config(), params=model.parameters(), log_level="off")


class Exports(unittest.TestCase):
    def test_every_dtype_that_the_format_has_is_written(self) -> None:
        dtypes = {
            "C64": torch.complex64,
            "F8_E4M3": torch.float8_e4m3fn,
            "F8_E5M2": torch.float8_e5m2,
            "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
            "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
            "F8_E8M0": torch.float8_e8m0fnu,
            "U16": torch.uint16,
            "U32": torch.uint32,
            "U64": torch.uint64,
            "I16": torch.int16,
            "BOOL": torch.bool,
        }
        for stage in STAGES:
            model = nn.Linear(2, 2)
            for name, dtype in dtypes.items():
                values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 1.0, 2.0]]).to(dtype)
                model.register_buffer(f"buffer_{name}", values)
                model.register_parameter(f"weight_{name}", nn.Parameter(values.clone(), requires_grad=False))
            model.register_buffer("turned", torch.complex(torch.ones(2), torch.ones(2)).conj())
            expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
            engine = zeroth.Engine(model, config(stage), log_level="off")
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.safetensors")
                engine.export_safetensors(path)
                with safe_open(path, "pt") as file:
                    self.assertEqual(set(file.keys()), set(expected))
                    for name, value in expected.items():
                        tagged = name.partition("_")[2]
                        if tagged in dtypes:
                            self.assertEqual(file.get_slice(name).get_dtype(), tagged)
                        if tagged == "F8_E8M0":  # which the library writes, and torch's side of it does not read
                            continue
                        found = file.get_tensor(name)
                        self.assertEqual(found.dtype, value.dtype)
                        bits = [one.resolve_conj().contiguous().view(torch.uint8) for one in (found, value)]
                        self.assertTrue(torch.equal(*bits), name)
            engine.close()

    def test_what_the_format_has_not_is_named(self) -> None:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        for stage in STAGES:
            for buffer, got in (
                (torch.ones(2, dtype=torch.complex128), "ComplexDouble"),
                (torch.eye(2).to_sparse(), "Sparse"),
                (nested, "a nested tensor"),
            ):
                model = nn.Linear(2, 2)
                model.register_buffer("odd", buffer)
                engine = zeroth.Engine(model, config(stage), log_level="off")
                text = rf"no place in a safetensors file.*which: odd.*got: \w*{got}"
                with tempfile.TemporaryDirectory() as folder:
                    with self.assertRaisesRegex(zeroth.Error, text):
                        engine.export_safetensors(os.path.join(folder, "model.safetensors"))
                    self.assertEqual(os.listdir(folder), [])
                engine.close()


class Attributes(nn.Module):
    """Blocks that lie in no list."""

    def __init__(self, blocks: int, leaves: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, zoo.WIDTH)
        self.names = [f"layer{number}" for number in range(blocks)]
        for name in self.names:
            self.add_module(name, nn.Linear(zoo.WIDTH, zoo.WIDTH) if leaves else zoo.Block())
        self.head = nn.Linear(zoo.WIDTH, zoo.CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for name in self.names:
            h = self.get_submodule(name)(h)
        return nn.functional.cross_entropy(self.head(h), y)


class InDictionary(Attributes):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleDict({name: zoo.Block() for name in ("red", "green", "blue")})
        self.names = [f"blocks.{name}" for name in self.blocks]


class Parametrised(Attributes):
    """A class of its own for every layer, as parametrizations make them, or as somebody derives them."""

    def __init__(self, make_layer: Callable[[int], nn.Module]) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(make_layer(number) for number in range(3))
        self.names = [f"blocks.{number}" for number in range(3)]


class Units(unittest.TestCase):
    MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
        "weight_norm": (
            lambda: Parametrised(lambda _: parametrizations.weight_norm(nn.Linear(zoo.WIDTH, zoo.WIDTH))),
            ["blocks.0", "blocks.1", "blocks.2"],
        ),
        "spectral_norm": (
            lambda: Parametrised(lambda _: parametrizations.spectral_norm(nn.Linear(zoo.WIDTH, zoo.WIDTH))),
            ["blocks.0", "blocks.1", "blocks.2"],
        ),
        "a class each": (
            lambda: Parametrised(lambda number: type(f"Block{number}", (zoo.Block,), {})()),
            ["blocks.0", "blocks.1", "blocks.2"],
        ),
        "ModuleDict": (InDictionary, ["blocks.red", "blocks.green", "blocks.blue"]),
        "attributes": (lambda: Attributes(4), ["layer0", "layer1", "layer2", "layer3"]),
    }

    def test_blocks_are_found_by_structure_and_train_as_in_torch(self) -> None:
        for name, (make_model, expected) in self.MODELS.items():
            with self.subTest(name):
                torch.manual_seed(1)
                plain = make_model().double()
                optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
                for _ in range(2):
                    plain(*BATCH).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                for stage in STAGES:
                    torch.manual_seed(1)
                    model = make_model().double()
                    self.assertEqual([unit.name for unit in zeroth.units(model)], ["root", *expected])
                    engine = zeroth.Engine(model, config(stage), log_level="off")
                    self.assertEqual(
                        [unit for unit, repeated, _ in engine._core.units if repeated], expected, "they share a ring"
                    )
                    train(engine, 2)
                    whole = 8 * sum(parameter.numel() for parameter in model.parameters())
                    if stage == 3:
                        self.assertLess(engine.memory_report().live_gathered_peak, 0.8 * whole)
                    engine.close()
                    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                        self.assertLess((mine - theirs).abs().max().item(), 1e-12)

    def test_what_is_not_found_is_named_in_the_log(self) -> None:
        # Layers of torch's by themselves: who knows whether they are called.
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "log"
            model = Attributes(4, leaves=True).double()
            engine = zeroth.Engine(model, config(3), log_level="off", json_log=str(path))
            self.assertEqual([unit.name for unit in zeroth.units(model)], ["root"])
            self.assertIn("units=[model.first, model.layer0, model.layer1, ...]", path.read_text())
            engine.close()
        tables = nn.ModuleDict({name: nn.Embedding(9, 4) for name in ("words", "places")})  # one may be a head's weight
        self.assertEqual([unit.name for unit in zeroth.units(tables)], ["root"])


class Guards(unittest.TestCase):
    def test_inside_a_call_of_the_engine_they_are_errors_of_zeroth(self) -> None:
        losses = []
        for stage in (0, 3):  # in a forward they are gathered
            model, engine = make(stage=stage)
            bias = model.blocks[1].linear.bias
            handle = model.first.register_forward_hook(lambda module, args, output, bias=bias: output + bias.sum())
            losses.append(engine(*BATCH).item())
            handle.remove()
        self.assertEqual(*losses)
        with self.assertRaisesRegex(zeroth.Error, r"parameter 'blocks\.1\.linear\.bias' is not gathered") as caught:
            bias.sum()
        error = caught.exception
        self.assertEqual((error.code, error.exit_code, error.which), ("USAGE", 64, "blocks.1.linear.bias"))
        self.assertIn("units=[...]", error.hint)
        weight = model.blocks[0].linear.weight
        handle = model.head.weight.register_hook(lambda grad: grad + weight.sum())
        with self.assertRaisesRegex(zeroth.Error, "parameter 'blocks.0.linear.weight' is not gathered"):
            engine.backward(engine(*BATCH))
        handle.remove()
        self.assertFalse(engine.step().committed)
        self.assertTrue(train(engine).committed)

    def test_a_script_that_ends_with_one_has_its_exit_code(self) -> None:
        for stage, touch in ((3, "model.weight.sum()"), (0, "model.weight.grad.sum()")):
            text = (
                "import torch, zeroth\nmodel = torch.nn.Linear(2, 2)\n"
                f"engine = zeroth.Engine(model, {config(stage)!r}, log_level='off')\n"
                f"engine.backward(engine(torch.ones(1, 2)).sum())\n{touch}\n"
            )
            done = subprocess.run(
                [*forked.python(), "-c", text], capture_output=True, text=True, timeout=120, check=False
            )
            self.assertEqual(done.returncode, 64, done.stderr)
            self.assertIn("'weight' is", done.stderr)


class OnTwoRanks(job.RankTest):
    def test_what_ranks_do_together_and_apart(self) -> None:
        lines = self.run_well(2, "scripts_rank.py", limit_s=120)
        told: dict[str, set[str]] = {}
        for name, text in re.findall(r"\[[01]\] (.*?): rank [01] is told (.*)", lines):
            told.setdefault(name, set()).add(text)
        for stage in STAGES:
            for text in told[f"layers, stage {stage}"]:
                self.assertRegex(
                    text,
                    r"^\[MISMATCH\] ranks train different parameters; .*which: blocks\.0\.linear\.weight; "
                    r"expected: trainable \(rank 0\); got: frozen \(rank 1\)",
                )
            (nested,) = told[f"nested buffer, stage {stage}"]
            self.assertRegex(nested, r"^\[MODEL\] a buffer cannot be shared.*which: ragged; .*got: a nested tensor")
            (jagged,) = told[f"jagged buffer, stage {stage}"]
            self.assertRegex(jagged, r"^\[MODEL\] a buffer is a tensor subclass.*which: ragged; .*NestedTensor")


forked.preload("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp")


if __name__ == "__main__":
    unittest.main(verbosity=2)
