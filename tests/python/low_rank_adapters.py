"""Adapters as PEFT makes them, on layers that ranks share; see tensor_more_rank.py."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from typing import Any

import tensor_rank
import torch
from torch import nn

import zeroth
from zeroth.parallel import find_plan
from zeroth.parallel.tensor import ColumnLinear, RowLinear


class LowRank(nn.Module):
    """Has the names of PEFT's lora.Linear."""

    def __init__(self, base_layer: nn.Module, rank: int, dropout: float) -> None:
        super().__init__()
        outputs, inputs = base_layer.weight.shape  # type: ignore[misc]
        low = nn.Linear(inputs, rank, bias=False, dtype=torch.float64)  # type: ignore[arg-type]
        high = nn.Linear(rank, outputs, bias=False, dtype=torch.float64)  # type: ignore[arg-type]
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.lora_A = nn.ModuleDict({"default": low})
        self.lora_B = nn.ModuleDict({"default": high})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + 2 * self.lora_B["default"](low)  # type: ignore[no-any-return]


class OfWeights(nn.Module):
    """As PEFT's IA3."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.ones(8))})


def adapted(targets: tuple[str, ...], dropout: float = 0.0, **more: Any) -> nn.Module:
    torch.manual_seed(1)
    model = tensor_rank.llama(**more).double()
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in targets:
            model.get_submodule(parent).register_module(last, LowRank(module, 3, dropout))
    return model


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def plans() -> None:
    """An adapter has the role of its layer; one of another kind leaves the layer whole, and the table says why."""
    plan = {share.name: share for share in find_plan(adapted(ALL), 2).shares}
    block = "model.layers.0."
    for layer, low, high in (("self_attn.q_proj", "whole", "column"), ("mlp.down_proj", "row", "whole")):
        name = block + layer
        assert plan[f"{name}.base_layer"].role == ("column" if high == "column" else "row")
        assert plan[f"{name}.lora_A.default"].role == low and plan[f"{name}.lora_B.default"].role == high
        assert plan[f"{name}.lora_B.default"].heads == (plan[f"{name}.base_layer"].heads if high == "column" else 0)
    corrected = find_plan(adapted(ALL), 2, {"model.layers.*.mlp.*_proj": "whole"})
    assert {share.role for share in corrected.shares if ".mlp." in share.name} == {"whole"}
    other = adapted(("o_proj",))
    attention = other.get_submodule("model.layers.0.self_attn")
    attention.register_module("q_proj", OfWeights(attention.get_submodule("q_proj")))
    why = {share.name: share.why for share in find_plan(other, 2).shares}
    assert "OfWeights has ia3_l.default beside" in why[block + "self_attn.q_proj.base_layer"], why


def tied_heads() -> None:
    """An adapter on one of two layers with one matrix leaves both whole."""
    for name in ("lm_head", "embed_tokens"):
        model: Any = tensor_rank.llama(tie_word_embeddings=True)
        holder: Any = LowRank(nn.Linear(2, 2), 3, 0.0)
        if name == "lm_head":
            holder.base_layer, model.lm_head = model.lm_head, holder
        else:
            holder.base_layer, model.model.embed_tokens = model.model.embed_tokens, holder
        type(holder).weight = property(lambda self: self.base_layer.weight)
        roles = {share.role for share in find_plan(model, 2).shares if "lm_head" in share.name or "embed" in share.name}
        del type(holder).weight
        assert roles == {"whole"}, (name, roles)


def numbers(world: zeroth.World) -> None:
    """Losses, gradients and weights are those of one process; exports have the whole adapter."""
    for targets, heads in ((ALL, 2), (("q_proj", "v_proj"), 1)):
        plain = adapted(targets, num_key_value_heads=heads)
        names = [name for name, one in plain.named_parameters() if one.requires_grad]
        optimizer = torch.optim.SGD([one for one in plain.parameters() if one.requires_grad], lr=0.1)
        dp, own = world.size // 2, world.rank // 2
        losses, grads = [], []
        for step in range(2):
            optimizer.zero_grad()
            loss = sum(tensor_rank.loss_of(plain, **tensor_rank.batch(step, number)) for number in range(dp)) / dp
            loss.backward()  # type: ignore[union-attr]
            losses.append(loss.item())  # type: ignore[union-attr]
            grads.append({name: plain.get_parameter(name).grad.clone() for name in names})  # type: ignore[union-attr]
            optimizer.step()
        mine = []
        for stage in (0, 3):
            model = adapted(targets, num_key_value_heads=heads)
            config = {
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zeroth": {"mesh": {"tp": 2}},
            }
            engine = zeroth.Engine(model, config, world=world, log_level="error")
            attention: Any = model.get_submodule("model.layers.1.self_attn")
            assert isinstance(attention.q_proj.base_layer, ColumnLinear)
            assert isinstance(attention.q_proj.lora_B["default"], ColumnLinear)
            assert targets != ALL or isinstance(attention.o_proj.lora_A["default"], RowLinear)
            for step in range(2):
                loss = tensor_rank.loss_of(engine, **tensor_rank.batch(step, own))  # type: ignore[arg-type]
                engine.backward(loss)
                assert tensor_rank.close(engine.average(loss.item()), losses[step]), (stage, step)
                for name in names:
                    assert (engine.full(name, "grad") - grads[step][name]).abs().max() < 1e-12, (stage, name)
                engine.step()
            weights = engine.state_dict(ranks=None)
            for name in names:
                assert (weights[name] - plain.get_parameter(name)).abs().max() < 1e-12, (stage, name)
            mine.append(weights)
            folder = pathlib.Path(tempfile.gettempdir(), f"adapters {heads} {stage}")  # one for all ranks
            engine.save(folder)
            engine.close(keep_parameters=False)
            config["zeroth"] = {"mesh": {"tp": 4}}
            again = zeroth.Engine(adapted(targets, num_key_value_heads=heads), config, world=world, log_level="error")
            again.load(folder)
            loaded = again.state_dict(ranks=None)
            assert all(torch.equal(loaded[name], value) for name, value in weights.items())
            again.close(keep_parameters=False)
            if world.rank == 0:
                shutil.rmtree(folder)
        assert all(torch.equal(mine[0][name], mine[1][name]) for name in mine[0])


class Wrapped(nn.Module):
    """As PEFT's models: the forward of a causal model inside, which gets the labels, or does not."""

    def __init__(self, inner: nn.Module, passes: bool) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        self.passes = passes

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.passes:
            return self.inner(input_ids=input_ids, labels=labels).loss  # type: ignore[no-any-return]
        return tensor_rank.loss_of(self.inner, input_ids=input_ids, labels=labels)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()  # type: ignore[operator,no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()  # type: ignore[operator,no-any-return]


class Around(Wrapped):
    """Passes everything on, as PEFT's."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **others)


def around(world: zeroth.World) -> None:
    """A model of transformers inside another module takes split sequences, too."""
    for mesh in ({"sp": 2}, {"sp": 2, "tp": 2}):
        number = world.rank // (2 * mesh.get("tp", 1))
        plain = adapted(ALL)
        expected = tensor_rank.loss_of(plain, **tensor_rank.batch(0, number))
        model = Around(adapted(ALL), True)
        engine = zeroth.Engine(model, {"zeroth": {"mesh": mesh}}, world=world, log_level="error")
        loss = engine(**tensor_rank.batch(0, number)).loss
        assert tensor_rank.close(loss.item(), expected.item(), 1e-6), mesh  # transformers' own loss is in float32
        engine.backward(loss)
        engine.step()
        engine.close(keep_parameters=False)


def wrapped(world: zeroth.World) -> None:
    """A causal model inside another one computes its loss from parts of the logits, where it is given the labels."""
    sample = tensor_rank.batch(0, world.rank // 2)
    expected = tensor_rank.loss_of(adapted(ALL), **sample).item()
    for passes in (True, False):
        model = Wrapped(adapted(ALL), passes)
        config = {"zeroth": {"mesh": {"tp": 2}, "parallel": {"verify": "never"}}}  # it would count, too
        engine = zeroth.Engine(model, config, world=world, log_level="error")
        mesh = engine.mesh
        assert mesh is not None and model.inner.lm_head.weight.shape[0] < tensor_rank.VOCAB  # type: ignore[union-attr]
        mesh.reset_received()
        assert tensor_rank.close(engine(**sample).item(), expected), passes
        logits = 8 * sample["input_ids"].numel() * tensor_rank.VOCAB // 3
        assert (mesh.axis("tp").received()["all_gather"][1] < logits) == passes, mesh.axis("tp").received()
        engine.close(keep_parameters=False)


def dropouts(world: zeroth.World) -> None:
    """What is whole stays alike on the ranks of tp, where adapters drop of their inputs, also with activations that are
    computed again; masks of parts differ."""
    for recompute in (False, True):
        model = adapted(ALL, 0.4, attention_dropout=0.2)
        if recompute:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            model.enable_input_require_grads()  # type: ignore[operator]
        config = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zeroth": {"mesh": {"tp": 2}}}
        engine = zeroth.Engine(model, config, world=world, log_level="error").train()
        mesh = engine.mesh
        assert mesh is not None
        tp = mesh.axis("tp")
        torch.manual_seed(10 + world.rank // 2)
        masks: dict[str, torch.Tensor] = {}
        for name in ("q_proj", "o_proj"):
            dropout = model.get_submodule(f"model.layers.0.self_attn.{name}.lora_dropout.default")
            dropout.register_forward_hook(lambda module, args, out, name=name: masks.update({name: out == 0}))
        for step in range(2):
            loss = engine(**tensor_rank.batch(step, world.rank // 2)).loss
            engine.backward(loss)
            engine.step()
            alike = [loss.detach().double()[None]]
            alike += [
                one.detach().flatten()
                for name, one in model.named_parameters()
                if "q_proj.lora_A" in name or "o_proj.lora_B" in name
            ]
            both = tp.all_gather(torch.cat(alike)[None])
            assert torch.equal(both[0], both[1]), recompute
        for name, same in (("q_proj", True), ("o_proj", False)):
            both = tp.all_gather(masks[name][None].to(torch.uint8))
            assert torch.equal(both[0], both[1]) == same, name
        engine.close(keep_parameters=False)
