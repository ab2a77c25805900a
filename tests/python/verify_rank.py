"""One rank of two, or of four that are two stages: a model that a plan changes into something else is refused in its
first forward, by name, with what is exact; and the look at it changes nothing. See tensor_test.py.

verify_rank.py PART...
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import foreign_attentions
import torch
import transformers
from foreign_attentions import HEADS, SIZE, Net
from refusing import refused
from torch import nn
from torch.nn import functional

import zeroth
from zeroth import parallel

VOCAB, WIDTH, TOKENS = 61, 16, 24
GROUPS: list[zeroth.Communicator] = []
"""over which a module looks along the sequence; none: it has all of it"""


# --- tp ---------------------------------------------------------------------------------------------------------------


class CutsBySize(nn.Module):
    """As nanoGPT's: queries, keys and values are of its size, not of what its matrix gives."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.n_head, self.n_embd = HEADS, SIZE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (self.n_head, -1)) for one in self.c_attn(x).split(self.n_embd, dim=2))
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class CutsBySizeAttention(CutsBySize):
    """Found by the name of its class."""


class ConstantHeadsAttention(foreign_attentions.Attention):
    """Heads of a size that it has learnt by heart."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """An MLP that computes with a layer's matrix, not by the layer: nobody sums up over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(torch.tanh(self.up(x)), self.down.weight, self.down.bias)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class QuietAttention(ConstantHeadsAttention):
    """Begins as nothing, as if it were no attention: zeros hide what happens to them."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.proj.weight)


def config(axis: str, stage: int, **more: Any) -> dict[str, Any]:
    own = more.pop("zeroth", {})
    return {"zero_optimization": {"stage": stage}, "zeroth": {"mesh": {axis: 2}, **own}, **more}


def engine_of(
    model: nn.Module, axis: str, stage: int, world: zeroth.World, log_level: str = "error", **more: Any
) -> zeroth.Engine:
    return zeroth.Engine(model, config(axis, stage, **more), world=world, log_level=log_level)


def changed_by_tp(world: zeroth.World) -> None:
    for kind, stage, dtype, got, which, hint in (
        (CutsBySizeAttention, 0, "", "ValueError: not enough", "blocks.0.attn, CutsBySize of", "attn"),
        (ConstantHeadsAttention, 3, "", "got: 0.[0-9]", "blocks.0.attn, ConstantHeadsAttention of", "attn"),
        (ConstantHeadsAttention, 3, "bf16", "got: 0.[0-9]", "blocks.0.attn, ConstantHeadsAttention of", "attn"),
        (QuietAttention, 0, "", "got: 0.[0-9]", "blocks.0.attn, ConstantHeadsAttention of", "attn"),
    ):
        torch.manual_seed(1)
        model = Net(kind)
        x = torch.randn(6, 5, SIZE)
        more = {dtype: {"enabled": True}} if dtype else {}
        engine = engine_of(model, "tp", stage, world, **more)
        text = f'parallel.verify.*which: {which}.*{got}.*corrections={{"blocks.\\*.{hint}.\\*": "whole"}}'
        with refused("MODEL", text):
            engine(x)
        engine.close(keep_parameters=False)
        never = {"zeroth": {"parallel": {"verify": "never"}}}
        if kind is ConstantHeadsAttention and not dtype:  # what the look is for
            model = Net(kind)
            whole = copy.deepcopy(model)
            engine = engine_of(model, "tp", stage, world, **never)
            assert (engine(x) - whole(x)).abs().max() > 1e-3
            engine.close(keep_parameters=False)
    torch.manual_seed(1)
    model = foreign_attentions.Normed()
    zeroth.parallelize(model, config("tp", 0), world=world)
    with refused("MODEL", 'which: blocks.0, Sequential of torch.*{"blocks.\\*.0": "whole", "blocks.\\*.2"'):
        model(torch.randn(3, 8))
    engine = engine_of(Reading(), "tp", 3, world)
    with refused("MODEL", 'which: blocks.0, Reader of.*{"blocks.\\*.up": "whole", "blocks.\\*.down": "whole"}'):
        engine(torch.randn(3, SIZE))
    engine.close(keep_parameters=False)
    model = mixed(nn.Identity)
    model.model.layers[0].mlp.act_fn = nn.Softmax(-1)
    engine = engine_of(model, "tp", 0, world, zeroth={"tensor": {"norms": "split"}})
    with refused("MODEL", 'which: model.layers.0, LlamaDecoderLayer.*norms="whole"'):
        engine(**sample())
    engine.close(keep_parameters=False)


def whole_by_advice(world: zeroth.World) -> None:
    """What the refusal says is exact."""
    for kind, stage in ((CutsBySizeAttention, 0), (CutsBySizeAttention, 3), (ConstantHeadsAttention, 3)):
        advice = {"blocks.*.attn.*": "whole"}
        inputs = foreign_attentions.hidden("x")
        foreign_attentions.trains_as_whole(world, kind.__name__, lambda kind=kind: Net(kind), inputs, stage, advice)


# --- sp ---------------------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Beside an MLP, something of its own."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.linear = mlp, nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, 1, 3) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.mix(self.linear(x))

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


class Sums(Mixer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / TOKENS


class Frequencies(Mixer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x, dim=1).real / TOKENS


class Convolves(Mixer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(x.transpose(1, 2), (2, 0))
        return functional.conv1d(padded, self.weight, groups=WIDTH).transpose(1, 2)


class Shifts(Mixer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return functional.pad(x[:, :-1], (0, 0, 1, 0))


class Recurs(Mixer):
    def mix(self, x: torch.Tensor) -> torch.Tensor:
        states, state = [], torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            state = torch.tanh(token + state * self.weight[:, 0, 0])
            states.append(state)
        return torch.stack(states, 1)


class SumsOfChannels(Sums):
    """All tokens of a part of the channels: exact for whatever computes each channel by itself."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        if not GROUPS:
            return super().mix(x)
        channels = parallel.all_to_all(x, 2, 1, GROUPS[0])  # [batch, own tokens, size] -> [batch, tokens, own channels]
        return parallel.all_to_all(super().mix(channels), 1, 2, GROUPS[0])


class RecursFromState(Mixer):
    """A linear recurrence, state = decay * state + x, whose state goes from rank to rank. The decay is a weight, so it
    is among the inputs: else it would get no gradient from the state."""

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        decay = torch.sigmoid(self.weight[:, 0, 0])
        state = torch.zeros_like(x[:, 0])
        if GROUPS:
            state, _ = parallel.pass_state(state, lambda state, x, decay: last(x, decay, state), GROUPS[0], x, decay)
        return scanned(x, decay, state)


def scanned(x: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    states = []
    for token in x.unbind(1):
        state = decay * state + token
        states.append(state)
    return torch.stack(states, 1)


def last(x: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return scanned(x, decay, state)[:, -1]


def mixed(kind: Callable[[nn.Module], nn.Module], **options: Any) -> Any:
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, **options,
        )
    )  # fmt: skip
    model.model.layers[1].mlp = kind(model.model.layers[1].mlp)
    return model


def sample() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens, "labels": tokens}


def changed_by_sp(world: zeroth.World) -> None:
    for kind, stage, dtype in (
        (Sums, 0, ""),
        (Frequencies, 3, ""),
        (Convolves, 3, "bf16"),
        (Shifts, 0, "fp16"),
        (Recurs, 3, ""),
    ):
        engine = engine_of(mixed(kind), "sp", stage, world, **({dtype: {"enabled": True}} if dtype else {}))
        with refused(
            "MODEL",
            "which: model.layers.1.mlp, Mixer of.*at most 5e-05; got: .*all_to_all",
        ):
            engine(**sample())
        engine.close(keep_parameters=False)
    model = mixed(nn.Identity)
    model.model.norm.register_forward_hook(lambda module, args, output: output + output.roll(1, 1))
    engine = engine_of(model, "sp", 0, world)
    with refused("MODEL", "which: model.norm, LlamaRMSNorm of.*sp=1"):
        engine(**sample())
    engine.close(keep_parameters=False)
    never = {"zeroth": {"parallel": {"verify": "never"}}}
    model = mixed(Sums)
    whole = copy.deepcopy(model)
    engine = engine_of(model, "sp", 0, world, **never)
    assert abs(engine(**sample()).loss.item() - whole(**sample()).loss.item()) > 1e-4
    engine.close(keep_parameters=False)


def exact_over_sp(world: zeroth.World) -> None:
    """Both ways that docs/parallelism.md shows, at stages 0 and 3: loss and gradients of one process."""
    for kind in (SumsOfChannels, RecursFromState):
        for stage in (0, 3):
            GROUPS.clear()
            model = mixed(kind).double()
            whole = copy.deepcopy(model)
            expected = whole(**sample()).loss
            expected.backward()
            engine = engine_of(model, "sp", stage, world)
            assert engine.mesh is not None
            GROUPS.append(engine.mesh.axis("sp"))
            loss = engine(**sample()).loss
            engine.backward(loss)
            assert abs(loss.item() - expected.item()) < 1e-6, (kind, stage)  # transformers' own is in float32
            for name, parameter in whole.named_parameters():
                if parameter.grad is not None:
                    difference = (engine.full(name, "grad") - parameter.grad).abs().max()
                    assert difference < 1e-8, (kind, stage, name, difference)
            report = zeroth._boxes.split_of(model).verification.report  # type: ignore[union-attr,attr-defined]
            assert "verified sequences over sp" in report and "left out" not in report, report
            engine.close(keep_parameters=False)
    GROUPS.clear()


# --- nothing changes --------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """An MLP that counts its calls, and draws, also in evaluations if it is asked to."""

    def __init__(self, mlp: nn.Module, draws: bool = False) -> None:
        super().__init__()
        self.draws = draws
        self.mlp, self.dropout, self.calls = mlp, nn.Dropout(0.2), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        out = self.dropout(self.mlp(x))
        return out + torch.rand(()) / 8 if self.training or self.draws else out


def trained(world: zeroth.World, axis: str, stage: int, verify: str, kind: str) -> list[Any]:
    """Losses, weights and the state of the generator after two steps."""
    model = mixed(lambda mlp: Counting(mlp, axis == "tp"), attention_dropout=0.1)
    if kind == "recomputes":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    counting = model.model.layers[1].mlp
    more = {"fp16": {"enabled": True, "initial_scale_power": 4}} if kind == "fp16" else {}
    engine = engine_of(
        model, axis, stage, world, optimizer={"type": "AdamW", "params": {"lr": 1e-2}}, gradient_accumulation_steps=2,
        zeroth={"parallel": {"verify": verify}}, **more,
    )  # fmt: skip
    torch.manual_seed(3)
    results: list[Any] = []
    for step in range(4):
        loss = engine(**sample()).loss
        if step == 0:
            assert counting.calls == 1 and counting.seen == 1, (counting.calls, counting.seen)
        engine.backward(loss)
        engine.step()
        results.append(loss.detach().clone())
    report = zeroth._boxes.split_of(model).verification.report  # type: ignore[union-attr,attr-defined]
    assert report.startswith("verified") == (verify != "never"), report
    assert "left out" not in report, report
    results += [one.clone() for one in engine.state_dict(ranks=None).values()] + [torch.get_rng_state()]
    engine.close(keep_parameters=False)
    return results


def same_bits(world: zeroth.World) -> None:
    for axis, kind, stages in (
        ("tp", "", (0, 3)),
        ("tp", "fp16", (3,)),
        ("tp", "recomputes", (3,)),
        ("sp", "", (0, 3)),
        ("sp", "fp16", (0,)),
        ("sp", "recomputes", (3,)),
    ):
        runs = [trained(world, axis, stage, verify, kind) for stage in stages for verify in ("untested", "never")]
        for run in runs[1:]:
            assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True)), (axis, kind)


def deferred_models(world: zeroth.World) -> None:
    """No rank has the whole model."""
    for axis, text in (("tp", "verified 2 of 2 blocks over tp"), ("sp", "verified sequences over sp")):
        for kind, fine in ((Mixer, True), (Sums, axis == "tp")):
            model = zeroth.deferred(lambda kind=kind: mixed(kind))
            engine = engine_of(model, axis, 3, world, zeroth={"parallel": {"verify": "always"}})
            if fine:
                engine(**sample())
                report = zeroth._boxes.split_of(model).verification.report  # type: ignore[union-attr,attr-defined]
                assert text in report and "left out" not in report, report
            else:
                with refused("MODEL", "which: model.layers.1.mlp"):
                    engine(**sample())
            engine.close(keep_parameters=False)


@contextlib.contextmanager
def stderr() -> Iterator[io.StringIO]:
    kept, sys.stderr = sys.stderr, io.StringIO()
    try:
        yield sys.stderr
    finally:
        sys.stderr = kept


def said(world: zeroth.World) -> None:
    """The log says what was looked at, or why nothing was; a word without a meaning is refused."""
    for build, verify, before, after in (
        (lambda: mixed(Mixer), "untested", "over tp (model.layers.1.mlp, Mixer of", "verified 1 of 1 blocks over tp"),
        (lambda: mixed(nn.Identity), "untested", "not verified: all layers are of families that the tests cover", ""),
        (lambda: mixed(Mixer), "never", "not verified: as the configuration or the caller says", ""),
        (lambda: mixed(nn.Identity), "always", "2 blocks over tp (as asked for)", "verified 2 of 2 blocks over tp"),
    ):  # fmt: skip
        with stderr() as text:
            engine = engine_of(build(), "tp", 0, world, "info", zeroth={"parallel": {"verify": verify}})
            first = text.getvalue()
            engine(**sample())
            engine(**sample())
        rest = text.getvalue().removeprefix(first)
        if world.rank == 0:
            assert before in first, (before, first)
            assert rest.count("verified") == (1 if after else 0) and after in rest, (after, rest)
        else:
            assert "verified" not in text.getvalue()
        engine.close(keep_parameters=False)
    with refused("USAGE", "no such way to verify.*untested, always, never.*got: sometimes"):
        zeroth.parallelize(mixed(Mixer), config("tp", 0), world=world, verify="sometimes")  # type: ignore[arg-type]


# --- pipelines --------------------------------------------------------------------------------------------------------


def stages(world: zeroth.World) -> None:
    """Of two stages, each of two ranks: each looks at its own blocks."""
    for kind, axis, stage, mine in (
        (Mixer, "tp", 1, "verified 1 of 1 blocks over tp"),
        (SumsOfChannels, "sp", 0, "verified 1 blocks over sp"),
        (Sums, "sp", 1, ""),
    ):
        GROUPS.clear()
        model = mixed(kind)
        expected = copy.deepcopy(model)(**sample()).loss.item()
        settings = {
            "zero_optimization": {"stage": stage},
            "gradient_accumulation_steps": 2,
            "zeroth": {"mesh": {"pp": 2, axis: 2}},
        }
        zeroth.pipeline(model, settings, world=world)
        engine = zeroth.Engine(model, settings, world=world, log_level="error")
        assert engine.mesh is not None
        GROUPS.append(engine.mesh.axis(axis))
        if mine:
            _, loss = engine.train_batch(iter([sample()] * 2))
            assert abs(loss - expected) < 1e-5, (loss, expected)
            report = zeroth._boxes.split_of(model).verification.report  # type: ignore[union-attr,attr-defined]
            assert report == "" if axis == "tp" and world.rank < 2 else mine in report, report
            assert "left out" not in report, report
            engine.close(keep_parameters=False)
            continue
        try:
            engine.train_batch(iter([sample()] * 2))
        except zeroth.Error as error:
            text = str(error)  # the others hear of it
            told = ("MODEL",) if world.rank >= 2 else ("MODEL", "ABORTED", "PEER_LOST")
            assert "looks along the sequence" in text and error.code in told, text
            assert "which: model.layers.1.mlp, Mixer of" in text, text
        else:
            raise AssertionError("not refused")


# --- packed rows ------------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """Calls a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.inner(**batch)


def packed_rows(world: zeroth.World) -> None:
    """Documents of one row do not see each other, though a model of transformers makes a cache by default."""
    documents = [torch.arange(3, 3 + length) for length in (5, 8)]
    row = parallel.pack_sequences([{"input_ids": one} for one in documents])
    for mesh, stage, around in (({}, 0, False), ({}, 3, True), ({"tp": 2}, 3, False), ({"sp": 2}, 0, False)):
        model = mixed(nn.Identity).double()
        with torch.no_grad():
            expected = torch.cat([model(input_ids=one[None]).logits for one in documents], 1)
            together = model(**row).logits
        assert (together - expected).abs().max() > 1e-3  # as transformers has it
        engine = zeroth.Engine(
            Around(model) if around else model,
            {"zero_optimization": {"stage": stage}, "zeroth": {"mesh": mesh}},
            world=world,
            log_level="error",
        )
        for training in (False, True):
            engine.module.train(training)
            logits = engine(**row).logits
            if "sp" in mesh:
                rows = logits.detach().movedim(1, 0).contiguous()
                counts = parallel.part_sizes(sum(map(len, documents)), 2)
                logits = engine.mesh.axis("sp").all_gather(rows, counts=counts).movedim(0, 1)  # type: ignore[union-attr]
            assert (logits - expected).abs().max() < 1e-12, (mesh, stage, training)
        plain = engine(input_ids=documents[0][None])
        assert "sp" in mesh or plain.past_key_values is not None  # of one document nothing changes
        engine.close(keep_parameters=False)


def main() -> None:
    torch.set_num_threads(1)
    world = zeroth.World.from_environment()
    every = (
        changed_by_tp,
        whole_by_advice,
        changed_by_sp,
        exact_over_sp,
        same_bits,
        deferred_models,
        said,
        packed_rows,
    )
    for part in every if world.size == 2 else (stages,):
        if sys.argv[1:] in ([], [part.__name__]):
            part(world)
            if world.rank == 0:
                print(f"{part.__name__}: ok", flush=True)
    print("verify: ok")


if __name__ == "__main__":
    main()
