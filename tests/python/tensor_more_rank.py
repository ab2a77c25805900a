"""One of four ranks: refusals, dropout, bytes, corrections, logits, own losses and adapters of tensor-parallel models;
see tensor_test.py."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import foreign_attentions
import low_rank_adapters
import own_losses
import safetensors.torch
import tensor_rank
import torch
import transformers
from refusing import refused
from torch import nn

import zeroth
from zeroth.parallel.tensor import ColumnLinear

TP = {"zeroth": {"mesh": {"tp": 2}}}


def engine_of(world: zeroth.World, model: nn.Module, stage: int = 0, **more: Any) -> zeroth.Engine:
    config = {"zero_optimization": {"stage": stage}, **TP, **more}
    return zeroth.Engine(model, config, world=world, log_level="error")


def refusals(world: zeroth.World) -> None:
    torch.manual_seed(world.rank)
    with refused("MISMATCH", "share matrices have other weights.*model.embed_tokens.weight.*ranks \\[1\\].*same seed"):
        zeroth.parallelize(tensor_rank.llama(), TP, world=world)
    model = tensor_rank.made("llama")
    engine = engine_of(world, model)
    with refused("MISMATCH", "given different samples.*input_ids: ranks \\[1\\] of .*tp have other values"):
        engine(**tensor_rank.batch(0, world.rank))
    tokens = torch.ones(1, 5 + world.rank % 2, dtype=torch.int64)
    with refused("MISMATCH", "given different samples.*input_ids.*another shape"):
        engine(input_ids=tokens, labels=tokens)
    with refused("USAGE", "split already"):
        zeroth.parallelize(model, TP, world=world)
    engine.close(keep_parameters=False)
    with refused("MODEL", "heads.*self_attn.*tp of 1, 3, 6.*tp=4 for 6 heads"):
        six = tensor_rank.llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
        zeroth.parallelize(six, {"zeroth": {"mesh": {"tp": 4}}}, world=world)
    with refused("CONFIG", "does not fit.*multiple of 3"):
        zeroth.parallelize(tensor_rank.made("llama"), {"zeroth": {"mesh": {"tp": 3}}}, world=world)
    split = tensor_rank.made("llama")
    zeroth.parallelize(split, TP, world=world)
    with refused("CONFIG", "model is split.*the configuration is not"):
        zeroth.Engine(split, {}, world=world, log_level="off")
    with refused("USAGE", "meets no module.*layers.9"):
        zeroth.parallelize(tensor_rank.made("llama"), TP, world=world, corrections={"model.layers.9.*": "whole"})
    with refused("USAGE", "no such way.*diagonal"):
        zeroth.parallelize(
            tensor_rank.made("llama"),
            TP,
            world=world,
            corrections={"*": "diagonal"},  # type: ignore[dict-item]
        )


def corrections(world: zeroth.World) -> None:
    """What is left whole trains as it is."""
    losses, _, _ = tensor_rank.plain("llama", 2, 1, 0.0)
    model = tensor_rank.made("llama")
    done = zeroth.parallelize(model, TP, world=world, corrections={"model.layers.0.mlp.*": "whole", "lm_head": "whole"})
    assert "model.layers.*.mlp.gate_proj     whole" in str(done), done
    engine = engine_of(world, model, 3, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    for step, expected in enumerate(losses):
        # The head is whole, and so is transformers' own loss, in float32.
        loss = tensor_rank.loss_of(model, **tensor_rank.batch(step, done.mesh.coordinate("dp")))
        engine.backward(loss)
        engine.step()
        assert tensor_rank.close(engine.average(loss.item()), expected)
    engine.close(keep_parameters=False)


def whole_logits(world: zeroth.World) -> None:
    """Logits are whole without labels, and in eval(). In training with labels nobody has them whole: what is there
    says so, and gives them."""
    plain, model = tensor_rank.made("qwen2"), tensor_rank.made("qwen2")
    engine = engine_of(world, model, 3)
    tokens = tensor_rank.batch(0, 0)["input_ids"]
    with torch.no_grad():
        expected = plain(input_ids=tokens).logits
        assert (engine(input_ids=tokens).logits - expected).abs().max() < 1e-12
    for training in (False, True):
        model.train(training)
        output = engine(input_ids=tokens, labels=tokens)
        logits, pair = output.logits, engine(input_ids=tokens, labels=tokens, return_dict=False)
        expected_loss = tensor_rank.loss_of(plain, input_ids=tokens, labels=tokens)
        assert tensor_rank.close(output.loss.item(), expected_loss.item())
        if not training:
            assert (logits - expected).abs().max() < 1e-12 and torch.equal(pair[1], logits)
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))
            continue
        assert logits.local.shape[-1] == len(logits.rows) == (49 if world.rank % 2 == 0 else 48)
        assert (logits.local - expected[..., logits.rows.start : logits.rows.stop]).abs().max() < 1e-12
        assert "of a vocabulary of 97" in repr(logits) and not hasattr(logits, "argmax")
        for reads in (
            lambda: logits.argmax(-1),
            lambda: logits[:, -1],
            lambda: torch.softmax(logits, -1),
            lambda: logits > 0,
            lambda: len(pair[1]),
        ):
            with refused("USAGE", "no rank has whole logits of a training forward.*output.logits.whole.*rows .* of 97"):
                reads()
        whole = logits.whole()
        assert (whole - expected).abs().max() < 1e-12
        engine.backward(nn.functional.cross_entropy(whole[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        plain.train().zero_grad()
        tensor_rank.loss_of(plain, **tensor_rank.batch(0, 0)).backward()
        for name, parameter in plain.named_parameters():
            assert (engine.full(name, "grad") - parameter.grad).abs().max() < 1e-12, name
        engine.step()
    engine.close(keep_parameters=False)


def outside_the_vocabulary(world: zeroth.World) -> None:
    """An index or a label that there is not is an error on all ranks, as torch's own; the ignored label is none."""
    tokens = tensor_rank.batch(0, 0)["input_ids"]
    ignored = tokens.masked_fill(tokens > 40, -100)
    for mesh in ({"tp": 2}, {"tp": 2, "sp": 2}):
        model = tensor_rank.made("llama")
        engine = zeroth.Engine(model, {"zeroth": {"mesh": mesh}}, world=world, log_level="error")
        for inputs, labels, text in (
            (tensor_rank.VOCAB, tokens, "an index is outside.*expected: 0 to 96; got: 97"),
            (-1, tokens, "an index is outside.*expected: 0 to 96; got: -1"),
            (1, tensor_rank.VOCAB, "a label is outside.*expected: 0 to 96, or -100 .*; got: 97"),
            (1, -1, "a label is outside.*got: -1"),
        ):
            wrong = tokens.clone()
            wrong[1, 3] = inputs
            target = labels
            if isinstance(labels, int):
                target = ignored.clone()
                target[1, 3] = labels
            with refused("USAGE", text):
                try:
                    engine(input_ids=wrong, labels=target)
                except IndexError:
                    raise
                except zeroth.Error as error:
                    raise AssertionError("no IndexError") from error
        loss = engine(input_ids=tokens, labels=ignored).loss
        expected = tensor_rank.loss_of(tensor_rank.made("llama"), input_ids=tokens, labels=ignored)
        assert tensor_rank.close(loss.item(), expected.item())
        engine.close(keep_parameters=False)


def dropouts(world: zeroth.World) -> None:
    """Equal outputs on tp ranks in training with dropout, also with activations computed again; other masks on other
    heads."""
    for recompute in (False, True):
        torch.manual_seed(3)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=None,
                                    eos_token_id=None)  # dropout 0.1 everywhere
        ).double()  # fmt: skip
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        engine = engine_of(world, model, 2).train()
        tp = zeroth.World.mesh(world, {"dp": 2, "tp": 2}).axis("tp")
        torch.manual_seed(10 + world.rank // 2)
        for step in range(2):
            sample = tensor_rank.batch(step, world.rank // 2)
            loss = engine(**sample).loss
            engine.backward(loss)
            engine.step()
            both = tp.all_gather(loss.detach().reshape(1))
            assert both[0] == both[1], both
            states = tp.all_gather(torch.get_rng_state()[None].to(torch.int32))
            assert torch.equal(states[0], states[1])
        engine.close(keep_parameters=False)
    # The masks themselves.
    masks: list[torch.Tensor] = []
    torch.manual_seed(5)
    region = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    from zeroth.parallel.split_region import SplitRegion

    SplitRegion(region, region[2], tp)
    region[1].register_forward_hook(lambda module, args, out: masks.append(out == 0))
    region(torch.ones(4, 8))
    both = tp.all_gather(masks[0][None].to(torch.uint8))
    assert not torch.equal(both[0], both[1])


def deferred_and_pretrained(world: zeroth.World) -> None:
    """Weights that an engine makes, or reads from files of the whole model, are cut."""
    for name in ("llama", "gpt2"):
        expected = tensor_rank.made(name).state_dict()
        torch.manual_seed(1)
        model = zeroth.deferred(lambda name=name: tensor_rank.MODELS[name]().double())
        assert next(model.parameters()).is_meta
        engine = zeroth.Engine(model, {**TP, "zero_optimization": {"stage": 3}}, world=world, log_level="warning")
        got = engine.state_dict(ranks=None)
        assert all(torch.equal(got[key], value) for key, value in expected.items() if key in got), name
        with tempfile.TemporaryDirectory() as own:
            tripled = {key: (3 * value).clone() for key, value in expected.items() if key in got}
            safetensors.torch.save_file(tripled, f"{own}/model.safetensors")
            zeroth.load_pretrained(engine, own, strict=False)
            got = engine.state_dict(ranks=None)
            assert all(torch.equal(got[key], 3 * value) for key, value in expected.items() if key in got), name
        engine.close(keep_parameters=False)
    torch.manual_seed(world.rank)
    model = zeroth.deferred(lambda: tensor_rank.MODELS["llama"]())
    with refused("MISMATCH", "other weights.*random numbers of deferred module"):
        zeroth.parallelize(model, TP, world=world)


def copies(world: zeroth.World) -> None:
    """A deep copy has parameters and hooks of its own, and the same ranks."""
    torch.manual_seed(1)
    model = tensor_rank.llama(attention_dropout=0.1).double()
    zeroth.parallelize(model, TP, world=world)
    twin = copy.deepcopy(model)
    losses = []
    for one in (model, twin):
        torch.manual_seed(3)
        losses.append(one(**tensor_rank.batch(0, world.rank // 2)).loss)
        losses[-1].backward()
    assert losses[0].item() == losses[1].item(), losses
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert parameter is not other and torch.equal(parameter.grad, other.grad), name
    of_model, of_twin = (
        [one.shared_input for one in each.modules() if isinstance(one, ColumnLinear) and one.shared_input is not None]
        for each in (model, twin)
    )
    assert len(of_twin) == len(of_model) == 10 and not {*map(id, of_model)} & {*map(id, of_twin)}


def verified(world: zeroth.World) -> None:
    """A sample shows whether the plan fits."""
    tokens = tensor_rank.batch(0, 0)["input_ids"]
    zeroth.parallelize(tensor_rank.made("llama"), TP, world=world, verify={"input_ids": tokens})
    torch.manual_seed(1)
    with refused("MODEL", "other outputs after it was split.*Normed.*relative difference.*whole"):
        zeroth.parallelize(foreign_attentions.Normed(), TP, world=world, verify={"x": torch.randn(3, 8)})
    torch.manual_seed(1)
    model = foreign_attentions.Normed()
    with refused("MODEL", "shares no layer"):
        zeroth.parallelize(model, TP, world=world, corrections={"blocks.*": "whole"})
    with refused("USAGE", "without values cannot be verified"):
        zeroth.parallelize(zeroth.deferred(foreign_attentions.Normed), TP, world=world, verify={"x": torch.randn(3, 8)})


def bytes_of_a_block(world: zeroth.World) -> None:
    """Four all_reduces of B S h a block, and none of them as large as the logits."""
    received: dict[int, int] = {}
    for layers in (1, 2):
        model = tensor_rank.llama(num_hidden_layers=layers)
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        done = zeroth.parallelize(model, TP, world=world)
        engine = engine_of(world, model)
        tp = done.mesh.axis("tp")
        sample = tensor_rank.batch(0, world.rank // 2)
        engine.backward(engine(**sample).loss)
        before = tp.received_bytes
        engine.backward(engine(**sample).loss)
        received[layers] = tp.received_bytes - before
        engine.close(keep_parameters=False)
    b, s = tensor_rank.batch(0, 0)["input_ids"].shape
    one = tensor_rank.MODELS["llama"]().config.hidden_size * b * s * 4  # float32
    per_block = received[2] - received[1]
    # An all_reduce over 2 ranks of one node: every rank reads the other's half, twice.
    assert per_block == 4 * one, (per_block, one)
    logits = b * s * tensor_rank.VOCAB * 4
    outside = received[1] - per_block  # the embedding's sum and the loss
    assert outside < 2 * one + logits // 2, (outside, one, logits)


def main() -> None:
    world = zeroth.World.from_environment()
    for part in (
        refusals,
        corrections,
        whole_logits,
        outside_the_vocabulary,
        own_losses.parts_of_groups,
        own_losses.terms,
        own_losses.weighted_by_tokens,
        own_losses.warned,
        low_rank_adapters.numbers,
        low_rank_adapters.wrapped,
        low_rank_adapters.around,
        low_rank_adapters.dropouts,
        dropouts,
        copies,
        deferred_and_pretrained,
        verified,
        foreign_attentions.attentions_of_torch,
        foreign_attentions.whole_by_correction,
        bytes_of_a_block,
    ):
        part(world)
        if world.rank == 0:
            print(f"{part.__name__}: ok", flush=True)
    print("all parts: ok")


if __name__ == "__main__":
    main()
