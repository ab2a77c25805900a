"""One of two ranks that share matrices and split the sequence between them: lengths, activations computed again,
dropouts, bytes, memory and refusals; see tensor_mixes_test.py. Losses and weights: tensor_rank.py norms."""

from __future__ import annotations

import copy
import pathlib
import sys
from typing import Any

import tensor_rank
import torch
import transformers
from refusing import refused

import zeroth
from zeroth.parallel import tile_mlps

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks/support"))
from live_bytes import peak_bytes  # noqa: E402

TP = {"zeroth": {"mesh": {"tp": 2}}}
NORMS = ("whole", "split")


def split(model: Any, world: zeroth.World, **more: Any) -> zeroth.parallel.Parallel:
    return zeroth.parallelize(model, TP, world=world, norms="split", **more)


def tokens_of(length: int) -> torch.Tensor:
    return torch.randint(1, 90, (2, length), generator=torch.Generator().manual_seed(length))


def check_lengths(world: zeroth.World) -> None:
    """Uneven slices, and empty ones; forwards of several lengths before a backward, with blocks computed again."""
    for name in ("llama", "gpt2", "bert"):
        plain = tensor_rank.made(name)
        expected = torch.stack([plain(input_ids=tokens_of(length)).logits.sin().mean() for length in (7, 8, 1)])
        expected.sum().backward()
        for way in ("kept", "computed again", "computed again, reentrant"):
            model = tensor_rank.made(name)
            split(model, world)
            if way != "kept":
                reentrant = way.endswith("reentrant")
                model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
                if reentrant:
                    model.enable_input_require_grads()
            engine = zeroth.Engine(model, TP, world=world, log_level="error")
            losses = torch.stack([engine(input_ids=tokens_of(length)).logits.sin().mean() for length in (7, 8, 1)])
            assert (losses - expected).abs().max() < 1e-12, (name, way, losses, expected)
            engine.backward(losses.sum())
            for parameter, value in plain.named_parameters():
                got = engine.full(parameter, "grad")
                if value.grad is None:
                    continue
                worst = (got - value.grad).abs().max().item() if got is not None else torch.inf
                assert worst < 1e-12, (name, way, parameter, worst)
            engine.close()


def check_dropouts(world: zeroth.World) -> None:
    """Ranks agree on what is whole, and on the generator afterwards; dropouts of their slices differ."""
    tp = world.mesh({"tp": 2}).axis("tp")
    for recompute in (False, True):
        torch.manual_seed(3)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4)
        ).double()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        split(model, world)
        zeros: list[torch.Tensor] = []
        model.transformer.h[0].attn.resid_dropout.register_forward_hook(lambda _, args, out: zeros.append(out == 0))
        model.train()
        loss = model(input_ids=tokens_of(8), labels=tokens_of(8)).loss
        loss.backward()
        both = tp.all_gather(loss.detach().reshape(1))
        assert both[0] == both[1], both
        assert torch.equal(*tp.all_gather(torch.get_rng_state()[None].to(torch.int32)))
        assert not torch.equal(*tp.all_gather(zeros[0][None].to(torch.uint8)))
        assert all(torch.equal(one, zeros[0]) for one in zeros) and len(zeros) == 1 + recompute
        for parameter in model.lm_head.parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all()


def check_bytes(world: zeroth.World) -> None:
    """A block receives what it receives with whole norms: four sums of B S h."""
    one = tokens_of(8).numel() * 32 * 8
    for norms in NORMS:
        received: dict[int, int] = {}
        for layers in (1, 2):
            torch.manual_seed(1)
            model = tensor_rank.llama(num_hidden_layers=layers).double()
            done = zeroth.parallelize(model, TP, world=world, norms=norms)
            tp = done.mesh.axis("tp")
            for _ in range(2):
                before = tp.received_bytes
                model(input_ids=tokens_of(8), labels=tokens_of(8)).loss.backward()
                received[layers] = tp.received_bytes - before
        # Over 2 ranks a sum is 2 (P - 1) / P = 1 of its tensor.
        assert received[2] - received[1] == 4 * one, (norms, received, one)


def check_copies(world: zeroth.World) -> None:
    """A copy of a model is split as the model is: its gradients are summed where the model's are."""
    torch.manual_seed(1)
    plain = tensor_rank.qwen3().double()
    model = copy.deepcopy(plain)
    split(model, world)
    engine = zeroth.Engine(copy.deepcopy(model), TP, world=world, log_level="error")
    plain(input_ids=tokens_of(9)).logits.sin().mean().backward()
    engine.backward(engine(input_ids=tokens_of(9)).logits.sin().mean())
    for name, parameter in plain.named_parameters():
        got = engine.full(name, "grad")
        assert got is not None and torch.allclose(got, parameter.grad, rtol=1e-4, atol=1e-7), name  # float32 norms
    engine.close()


def check_memory(world: zeroth.World) -> None:
    """What norms and residual sums keep for backward is divided by the ranks."""
    peaks: dict[str, list[int]] = {}
    for norms in NORMS:
        peaks[norms] = []
        for layers in (1, 3):
            torch.manual_seed(1)
            model = tensor_rank.llama(num_hidden_layers=layers, intermediate_size=32)
            zeroth.parallelize(model, TP, world=world, norms=norms)
            tokens = tokens_of(128)
            peaks[norms].append(peak_bytes(lambda model=model, tokens=tokens: model(input_ids=tokens).logits))
    whole, sliced = ((many - few) // 2 for few, many in (peaks["whole"], peaks["split"]))
    assert sliced < 0.8 * whole, (whole, sliced)


def check_refusals(world: zeroth.World) -> None:
    def no(name: str, pattern: str, **more: Any) -> None:
        with refused("MODEL", pattern):
            split(tensor_rank.made(name), world, **more)

    no("t5", "slices of the sequence.*T5ForConditionalGeneration.*an encoder and a decoder.*norms=.whole")
    text = str(split(tensor_rank.made("gpt2"), world))
    assert "slices of the sequence from transformer.h.0 to transformer.ln_f" in text, text
    whole = {"model.layers.*.self_attn.*": "whole"}
    no("llama", "slices of the sequence.*layers.0.self_attn; expected: attention that ranks share", corrections=whole)
    part = {"model.layers.1.self_attn.k_proj": "whole"}
    no("llama", "slices of the sequence.*layers.1.self_attn; expected: attention that ranks share", corrections=part)
    with refused("USAGE", "norms.*whole, split.*diagonal"):
        zeroth.parallelize(tensor_rank.made("llama"), TP, world=world, norms="diagonal")  # type: ignore[arg-type]
    model: Any = tensor_rank.made("llama")
    split(model, world)
    with refused("USAGE", "does not give the whole sequence.*9 tokens"):
        tile_mlps(model, 2)
        model(input_ids=tokens_of(9))
    with refused("USAGE", "not given this rank's slice.*from the first block on"):
        model.model.layers[1](torch.zeros(1, 9, 32, dtype=torch.float64))


def main() -> None:
    world = zeroth.World.from_environment()
    for part in (check_lengths, check_dropouts, check_bytes, check_copies, check_memory, check_refusals):
        part(world)
        if world.rank == 0:
            print(f"{part.__name__}: ok", flush=True)
    print("split norms: ok")


if __name__ == "__main__":
    main()
