"""zeroth.ckpt on checkpoints of others: Hugging Face, torch, DCP, DeepSpeed, and what is none."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import tarfile
import unittest
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from ckpt_case import Case, Tensors, example, param
from safetensors.torch import load_file, save_file

import zeroth.ckpt
from zeroth.ckpt.dtypes import computed

HERE = pathlib.Path(__file__).resolve().parent


class Conversions(Case):
    def test_hugging_face_and_back_is_bit_for_bit(self) -> None:
        tensors = {
            "a.weight": torch.randn(5, 3).to(torch.bfloat16),
            "a.bias": torch.randn(5),
            "base": torch.randint(255, (4, 2), dtype=torch.uint8),
            "norm.running_mean": torch.randn(2),
        }
        (self.folder / "hf").mkdir()
        save_file(tensors, self.folder / "hf/model.safetensors", {"format": "pt", "head.weight": "a.weight"})
        path = self.ckpt("convert", self.folder / "hf", self.folder / "z", "--to", "zeroth", "--frozen", "base")[0]
        found = zeroth.ckpt.open(path.strip())
        self.assertEqual(found.tensor("head.weight").dtype, torch.float32)  # a master
        self.assertEqual((found.names, found.buffers), (["a.bias", "a.weight", "base"], ["norm.running_mean"]))
        self.ckpt("convert", path.strip(), self.folder / "back", "--to", "hf")
        self.equal(load_file(self.folder / "back/model.safetensors"), tensors)
        halves = ["--dtype", "fp16", "--max-shard-size", "20B"]
        self.ckpt("convert", path.strip(), self.folder / "half", "--to", "hf", *halves)
        index = json.loads((self.folder / "half/model.safetensors.index.json").read_text())
        self.assertEqual(len(set(index["weight_map"].values())), 3)
        half = {name: load_file(self.folder / "half" / file)[name] for name, file in index["weight_map"].items()}
        self.equal(half, {name: one.half() if one.is_floating_point() else one for name, one in tensors.items()})
        self.ckpt("convert", path.strip(), self.folder / "masters", "--to", "hf", "--weights", "master")
        masters = load_file(self.folder / "masters/model.safetensors")
        self.equal({"a": masters["a.weight"]}, {"a": tensors["a.weight"].float()})

    def test_what_comes_back_is_what_was_there(self) -> None:
        wrote = example()
        wrote.params.append(param("frozen", torch.randn(4).to(torch.bfloat16), trainable=False))
        wrote.params.append(param("idle", torch.randn(2, 2), updates=0))
        for state in ("exp_avg", "exp_avg_sq"):
            wrote.param("idle").states[state] = zeroth.ckpt.of_tensor(torch.zeros(2, 2))
        path = zeroth.ckpt.write(wrote, self.folder / "z")
        for form in ("dcp", "torch", "zeroth"):
            self.ckpt("convert", path, self.folder / form, "--to", form)
            self.ckpt("convert", self.folder / form, self.folder / f"{form}-back", "--to", "zeroth")
            self.assertEqual(zeroth.ckpt.diff(path, self.folder / f"{form}-back"), [])
        self.ckpt("convert", path, self.folder / "hf", "--to", "hf", "--weights", "master")
        self.ckpt("convert", self.folder / "hf", self.folder / "hf-back", "--to", "zeroth", "--step", 3)
        left = {one.what.partition("/")[2].partition(":")[0] for one in zeroth.ckpt.diff(path, self.folder / "hf-back")}
        self.assertEqual(left, {"exp_avg", "exp_avg_sq", ""}, "weights and buffers are equal")

    def test_complex_parameters_become_pairs_of_reals(self) -> None:
        model = torch.nn.ParameterDict({"c": torch.randn(3, dtype=torch.complex64), "r": torch.randn(2)})
        adam = torch.optim.AdamW(model.named_parameters())
        (model["c"].abs().sum() + model["r"].sum()).backward()
        adam.step()
        torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, self.folder / "x.pt")
        found = zeroth.ckpt.open(zeroth.ckpt.convert(self.folder / "x.pt", self.folder / "z", to="zeroth"))
        for state, theirs in (("weight", model["c"].detach()), ("exp_avg", adam.state[model["c"]]["exp_avg"])):
            self.equal({state: found.tensor("c", state)}, {state: torch.view_as_real(theirs)})

    def test_names_that_begin_as_the_dictionary_of_weights_are_kept(self) -> None:
        weights = {"model.a": torch.ones(2), "model.b": torch.zeros(3)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(weights, checkpoint_id=self.folder / "flat", no_dist=True)
            dcp.save({"model": weights}, checkpoint_id=self.folder / "deep", no_dist=True)
        for name in ("flat", "deep"):
            found = zeroth.ckpt.read(self.folder / name)
            self.assertEqual([one.name for one in found.params], ["model.a", "model.b"], name)
        found = zeroth.ckpt.read(self.folder / "flat", model_prefix="model.")
        self.assertEqual([one.name for one in found.params], ["a", "b"])

    def test_an_average_is_written_as_the_weights(self) -> None:
        wrote = example()
        wrote.param("block.weight").states["average"] = zeroth.ckpt.of_tensor(torch.full((6, 5), 0.5))
        path = zeroth.ckpt.write(wrote, self.folder)
        arguments = ["convert", path, self.folder / "hf", "--to", "hf"]
        self.assertIn("expected: average", self.ckpt(*arguments, "--state", "ema", code=64)[1])
        self.ckpt(*arguments, "--state", "average")
        loaded = load_file(self.folder / "hf/model.safetensors")
        self.equal({"b": loaded["block.weight"]}, {"b": torch.full((6, 5), 0.5, dtype=torch.bfloat16)})
        self.equal({"e": loaded["embed.weight"]}, {"e": wrote.param("embed.weight").states["weight"].read()})
        self.assertIn("not taken: the state average", self.ckpt("convert", path, self.folder / "x.pt")[0])
        back = zeroth.ckpt.open(zeroth.ckpt.convert(path, self.folder / "again", to="zeroth"))
        self.assertIn("average", back.states("block.weight"))

    def test_bfloat16_is_rounded_as_engines_do(self) -> None:
        ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000 + 0x8000], dtype=torch.int32).view(torch.float32)
        found = computed(ties, torch.bfloat16)
        expected = ((ties.view(torch.int32).to(torch.int64) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        self.assertTrue(torch.equal(found, expected))
        self.assertNotEqual(found[0].item(), ties[0].to(torch.bfloat16).item())  # a half, away from zero

    def test_names_can_be_changed_and_tied(self) -> None:
        torch.save({"module.a": torch.ones(2), "module.b": torch.zeros(2)}, self.folder / "x.pt")
        target = self.folder / "z"
        self.ckpt("convert", self.folder / "x.pt", target, "--to", "zeroth", "--rename", r"^module\.=", "--tie", "c=a")
        found = zeroth.ckpt.open(target)
        self.assertEqual((found.names, list(found.param("a").aliases)), (["a", "b"], ["c"]))
        for option, rule in (
            ("--rename", "[=x"),
            ("--rename", "x"),
            ("--rename", ".*=x"),
            ("--tie", "c=none"),
            ("--tie", "b=a"),
        ):
            arguments = ["convert", self.folder / "x.pt", self.folder / "w", "--to", "zeroth"]
            renamed = [] if option == "--rename" else ["--rename", r"^module\.="]
            self.ckpt(*arguments, *renamed, option, rule, code=64)
        self.assertFalse((self.folder / "w").exists())

    def test_a_torch_optimizer_is_taken_by_names_or_by_a_list(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        one, two = list(model[0].named_parameters(prefix="0")), list(model[1].named_parameters(prefix="1"))
        sgd = torch.optim.SGD([{"params": two}, {"params": one, "lr": 0.5}], lr=0.25, momentum=0.9, nesterov=True)
        model(torch.ones(4, 3)).sum().backward()
        sgd.step()
        whole = {"model": model.state_dict(), "optimizer": sgd.state_dict(), "global_step": 8, "extra": 1}
        torch.save(whole, self.folder / "named.pt")
        for group in whole["optimizer"]["param_groups"]:
            del group["param_names"]
        torch.save(whole, self.folder / "numbered.pt")
        found = self.json_of("ls", self.folder / "named.pt")
        self.assertEqual((found["optimizer"], found["step"]), ("SGD", 8))
        self.assertEqual(found["left_out"], ["keys of the file: extra"])
        _, err = self.ckpt("ls", self.folder / "numbered.pt", code=65)
        self.assertIn("--param-names", err)
        order = self.folder / "order.json"
        order.write_text(json.dumps([name for name, _ in [*two, *one]]))
        target = self.folder / "z"
        source = ["convert", self.folder / "numbered.pt"]
        self.ckpt(*source, target, "--to", "zeroth", "--param-names", order)
        checkpoint = zeroth.ckpt.open(target)
        for name, tensor in [*one, *two]:
            self.equal({name: checkpoint.tensor(name, "momentum_buffer")}, {name: sgd.state[tensor]["momentum_buffer"]})
            hypers = checkpoint.groups[checkpoint.param(name).group]
            self.assertEqual(checkpoint.param(name).updates, 8)  # without one an engine begins the momentum anew
            self.assertEqual((hypers["lr"], hypers["momentum"]), (0.25 if name.startswith("1") else 0.5, 0.9))
        self.assertEqual(zeroth.ckpt.diff(target, zeroth.ckpt.read(self.folder / "named.pt")), [])
        order.write_text(json.dumps([name for name, _ in [*one, *two]]))
        _, err = self.ckpt(*source, self.folder / "w", "--to", "zeroth", "--param-names", order, code=65)
        self.assertIn("another shape than its parameter", err)

    def test_the_momentum_of_sgd_goes_on_from_torch_and_back(self) -> None:
        batches = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(2))
        momentum = {"lr": 0.25, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01}
        for form, stage in (("torch", 0), ("dcp", 3)):
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.named_parameters(), **momentum)

            def plain_step(batch: torch.Tensor, module: torch.nn.Module, sgd: torch.optim.SGD) -> None:
                sgd.zero_grad()
                module(batch).square().mean().backward()
                sgd.step()

            plain_step(batches[0], model, optimizer)
            folder = self.folder / f"{form}-there"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self.folder / f"{form}.pt")
            zeroth.ckpt.convert(self.folder / f"{form}.pt", folder, to="zeroth")
            if form == "dcp":
                zeroth.ckpt.convert(folder, self.folder / "dcp-form", to="dcp")
                folder = self.folder / "dcp-back"
                zeroth.ckpt.convert(self.folder / "dcp-form", folder, to="zeroth")
            config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": momentum}}
            engine = zeroth.Engine(torch.nn.Linear(3, 2), config, log_level="off")
            engine.load(folder)
            engine.backward(engine(batches[1]).square().mean())
            engine.step()
            plain_step(batches[1], model, optimizer)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(engine.full(name), value, rtol=1e-6, atol=1e-7)
            zeroth.ckpt.convert(engine.save(folder), self.folder / f"{form}-out.pt", to="torch")
            engine.close()
            out = torch.load(self.folder / f"{form}-out.pt", weights_only=True)
            again = torch.nn.Linear(3, 2)
            again.load_state_dict(out["model"])
            sgd = torch.optim.SGD(again.named_parameters(), lr=1.0, momentum=0.5)
            sgd.load_state_dict(out["optimizer"])
            plain_step(batches[2], again, sgd)
            plain_step(batches[2], model, optimizer)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-6, atol=1e-7)

    def test_nothing_is_written_over_and_wrong_use_has_its_code(self) -> None:
        path = zeroth.ckpt.write(example(), self.folder)
        target = self.folder / "there"
        target.mkdir()
        (target / "mine").write_text("mine")
        for form in ("hf", "dcp", "torch"):
            self.assertIn("in the target's place", self.ckpt("convert", path, target, "--to", form, code=64)[1])
        self.assertEqual(os.listdir(target), ["mine"])
        self.ckpt("convert", path, self.folder / "x", code=64)
        self.ckpt("convert", path, self.folder / "x", "--to", "onnx", code=64)
        self.ckpt("convert", path, self.folder / "x", "--to", "zeroth", "--dtype", "bf16", code=64)
        self.ckpt("convert", path, self.folder / "x", "--to", "hf", "--dtype", "int4", code=64)
        self.ckpt("convert", path, self.folder / "x", "--to", "hf", "--max-shard-size", "big", code=64)
        self.ckpt("convert", path, self.folder / "x", "--to", "hf", "--frozen", "nobody.*", code=64)
        self.ckpt("convert", self.folder / "none", self.folder / "x", "--to", "hf", code=74)
        self.ckpt("convert", path, "/proc/none/x", "--to", "hf", code=74)
        self.ckpt("fly", code=64)
        self.ckpt(code=64)


def safetensors(header: dict[str, Any]) -> bytes:
    """With four bytes of data."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"0000"


class Evil:
    """What a pickle would run."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


class Untrusted(Case):
    def test_no_pickle_runs_anything(self) -> None:
        trap = self.folder / "trap"
        torch.save({"a": torch.ones(2), "b": Evil(trap)}, self.folder / "x.pt")
        self.assertIn("plain values", self.ckpt("ls", self.folder / "x.pt", code=65)[1])
        (self.folder / "ds").mkdir()
        model = {"module": {"a": torch.ones(2)}, "epoch": Evil(trap), "global_steps": 4}
        torch.save(model, self.folder / "ds/mp_rank_00_model_states.pt")
        found = self.json_of("ls", self.folder / "ds")
        self.assertEqual((found["kind"], found["step"], len(found["left_out"])), ("deepspeed", 4, 1))
        (self.folder / "dcp").mkdir()
        (self.folder / "dcp/.metadata").write_bytes(pickle.dumps(Evil(trap)))
        self.ckpt("ls", self.folder / "dcp", code=65)
        self.assertFalse(trap.exists())

    def test_files_that_are_none_are_refused(self) -> None:
        for name, data in [
            ("x.pt", b""),
            ("y.pt", b"PK\x03\x04 and no more"),
            ("z.pt", b"\x80\x02}q\x00."),
            ("a.safetensors", b"\xff" * 8),
            ("b.safetensors", (4).to_bytes(8, "little") + b"[1] "),
            ("c.safetensors", safetensors({"a": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 4]}})),
            ("d.safetensors", safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})),
            ("e.safetensors", safetensors({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}})),
            ("f.safetensors", safetensors({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}})),
        ]:
            (self.folder / name).write_bytes(data)
            self.ckpt("ls", self.folder / name, code=65)
        index = self.folder / "hf"
        index.mkdir()
        (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
        self.assertIn("elsewhere", self.ckpt("ls", index, code=65)[1])


class OfOthers(Case):
    """Real checkpoints, made by golden/deepspeed_rank.py and golden/dcp_rank.py. truth.pt of each is what DeepSpeed's
    zero_to_fp32, or FSDP, says is in them."""

    def setUp(self) -> None:
        super().setUp()
        with tarfile.open(HERE / "golden/of_others.tar.xz") as archive:
            archive.extractall(self.folder, filter="data")

    def weights(self, found: zeroth.ckpt.Contents) -> Tensors:
        loaded = {one: p.states["weight"].read() for p in found.params for one in (p.name, *p.aliases)}
        return loaded | {name: lazy.read() for name, lazy in found.buffers.items()}

    def test_deepspeed_of_every_stage_is_what_its_own_tool_says(self) -> None:
        of_two = [f"2-ranks-stage-{kind}" for kind in ("1-bf16", "2-fp16", "2-fp32", "3-bf16")]
        for name in (*of_two, "3-ranks-stage-3-fp32"):
            found = zeroth.ckpt.read(self.folder / name)
            self.assertEqual((found.kind, found.step, found.optimizer, found.left_out), ("deepspeed", 3, "AdamW", []))
            self.assertEqual(found.user, {"client": {"epoch": 2}})
            truth = torch.load(self.folder / name / "truth.pt", weights_only=True)
            weights = self.weights(found)
            self.assertEqual(weights.keys(), {*truth, "scale"})
            for key, tensor in truth.items():
                self.assertTrue(torch.equal(weights[key].float(), tensor.float()), f"{name}, {key}")
            scaler = {"scale": 16.0, "steps": 3, "last_overflow": -1, "hysteresis": 2} if "fp16" in name else {}
            self.assertEqual(found.loss_scaler, scaler)
            embed, bias, scale = (found.param(one) for one in ("embed.weight", "norm.bias", "scale"))
            self.assertEqual((embed.aliases, embed.updates), (["head.weight"], 3))
            self.assertFalse(scale.trainable)
            decay = [found.groups[one.group]["weight_decay"] for one in (embed, bias)]
            self.assertEqual((decay, found.groups[0]["beta2"], found.groups[0]["eps"]), ([0.1, 0.0], 0.95, 1e-7))
            target = zeroth.ckpt.convert(self.folder / name, self.folder / "z" / name, to="zeroth")
            self.assertEqual(zeroth.ckpt.verify(target), [])
            self.assertEqual(zeroth.ckpt.diff(self.folder / name, target), [])

    def test_a_universal_checkpoint_has_the_states_of_its_source(self) -> None:
        name = self.folder / "2-ranks-stage-3-bf16"
        found = zeroth.ckpt.read(name / "step3_universal")
        self.assertEqual(found.kind, "deepspeed-universal")
        self.assertEqual(zeroth.ckpt.diff(name, found), [])

    def test_a_checkpoint_that_lacks_a_rank_is_refused(self) -> None:
        folder = self.folder / "2-ranks-stage-3-bf16/step3"
        file = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        data = file.read_bytes()
        file.unlink()
        self.assertIn("optimizer states are missing", self.ckpt("ls", folder, code=65)[1])
        file.write_bytes(data[: len(data) // 2])
        self.ckpt("ls", folder, code=65)
        shutil.copy(
            folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
            file.with_name("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        )
        self.assertIn("tensor parallelism", self.ckpt("ls", folder, code=65)[1])

    def test_a_dcp_of_two_ranks_is_put_together(self) -> None:
        found = zeroth.ckpt.read(self.folder / "dcp-2-ranks/dcp")
        truth = torch.load(self.folder / "dcp-2-ranks/truth.pt", weights_only=True)
        loaded = self.weights(found)
        for one in found.params:
            loaded |= {f"{one.name}/{state}": one.states[state].read() for state in ("exp_avg", "exp_avg_sq")}
            loaded[f"{one.name}/step"] = torch.tensor(float(one.updates))
        for own in ("3.running_mean", "3.running_var"):  # each rank had others, and DCP took one rank's
            self.assertEqual(loaded.pop(own).shape, truth.pop(own).shape)
        self.equal(loaded, truth)
        self.assertEqual((found.optimizer, found.step, found.left_out), ("AdamW", 2, []))
        self.assertEqual((found.groups[0]["lr"], found.groups[0]["beta1"]), (0.02, 0.8))
        os.truncate(self.folder / "dcp-2-ranks/dcp/__1_0.distcp", 1000)
        self.ckpt("convert", self.folder / "dcp-2-ranks/dcp", self.folder / "z", "--to", "zeroth", code=65)


if __name__ == "__main__":
    unittest.main()
