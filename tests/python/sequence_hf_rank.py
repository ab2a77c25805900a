"""One rank of a group that splits the sequence of transformers' models; see sequence_test.py. Losses and gradients,
summed over the group, are those of the same model whole on one rank, in float64.

sequence_hf_rank.py few|all models|masks|rest|refusals|plans...
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import tempfile
from typing import Any

import torch
import transformers
from refusing import refused
from sequence_rank import close
from torch.nn import functional
from transformers import masking_utils
from wide_norms import wide_norms

import zeroth
from zeroth import parallel
from zeroth.parallel.verify_choice import OF_SEQUENCES

FEW = sys.argv[1] == "few"
BOUND = 1e-10
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
WINDOW = {"sliding_window": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "Qwen3": ("Qwen3", {}),
    "Mistral": ("Mistral", WINDOW),
    "Gemma": ("Gemma", {"num_key_value_heads": 1}),
    "Gemma2": ("Gemma2", {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, **WINDOW}),
    "GPT2": ("GPT2", {"n_inner": 40}),
    "Llama, dynamic rotation": (
        "Llama",
        {
            "max_position_embeddings": 8,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "Llama, long rotation": (
        "Llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 4,
                "long_factor": [1.5, 2.0, 3.0, 4.0],
            },
        },
    ),
}


def reference_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, dropout: float = 0.0,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * (scaling or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    chances = torch.nan_to_num(scores.softmax(-1))
    return (chances @ v.repeat_interleave(groups, 1)).transpose(1, 2), None


def reference_mask(**arguments: Any) -> torch.Tensor:
    mask = masking_utils.sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    assert mask is not None
    return mask


def build(name: str, **more: Any) -> Any:
    family, own = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **own, **more})
    config._attn_implementation = "reference"
    kind = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).double().eval()
    wide_norms(model)
    return model


def sample(length: int, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, SMALL["vocab_size"], (batch, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "labels": labels}


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def check(name: str, model: Any, group: zeroth.Communicator, inputs: dict[str, Any], **split: Any) -> None:
    """The split model against itself whole."""
    whole = {key: value for key, value in inputs.items() if key not in ("labels", "cu_seq_lens_q")}
    if "cu_seq_lens_q" in inputs:  # the reference has no other way to say it
        bounds = inputs["cu_seq_lens_q"].tolist()
        whole["position_ids"] = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:])])[None]
        inputs = {**inputs, "position_ids": whole["position_ids"]}
    model.zero_grad()
    logits = model(**whole, use_cache=False).logits
    plain = loss_of(logits, inputs["labels"])
    plain.backward()
    expected = {key: value.grad for key, value in model.named_parameters()}
    model.zero_grad()
    handle = parallel.split_sequence(model, group, **split)
    output = model(**inputs)
    output.loss.backward()
    what = f"{name} {split}"
    close(output.loss.detach(), plain.detach(), f"loss of {what}", BOUND)
    close(handle.gather(output.logits), logits.detach(), f"logits of {what}", BOUND)
    for key, value in model.named_parameters():
        if expected[key] is None:
            assert value.grad is None, key
            continue
        close(group.all_reduce(value.grad.contiguous()), expected[key], f"gradient of {key} of {what}", BOUND)
    handle.remove()
    assert model.config._attn_implementation == "reference"


def ways(group: zeroth.Communicator, mesh: zeroth.Mesh) -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = [{"method": "ulysses"}, {"method": "ring"}]
    if not FEW:
        every.append({"method": "ring", "layout": "contiguous", "order": "token"})
    if group.size == 4:
        every.append({"method": "grid", "ring": mesh.axis("ring"), "ulysses": mesh.axis("ulysses")})
    return every


def main() -> None:
    torch.set_num_threads(1)
    transformers.AttentionInterface.register("reference", reference_attention)
    transformers.AttentionMaskInterface.register("reference", reference_mask)
    world = zeroth.World.from_environment()
    mesh = world.mesh({"ring": world.size // 2, "ulysses": 2})
    group = mesh.axes(["ring", "ulysses"])
    checks = {
        "models": check_models,
        "masks": check_masks,
        "rest": check_the_rest,
        "refusals": check_refusals,
        "plans": check_plans,
    }
    for name in sys.argv[2:]:
        checks[name](group, mesh)
    print("all of these: ok", flush=True)


def check_models(group: zeroth.Communicator, mesh: zeroth.Mesh) -> None:
    families = {getattr(transformers, f"{name}Config").__module__.split(".")[2] for name, _ in MODELS.values()}
    assert families == OF_SEQUENCES, families
    for name in MODELS if group.size == 2 else ["Llama"]:
        model = build(name)
        for way in ways(group, mesh):
            check(name, model, group, sample(21), **way)


def packed(length: int, *starts: int) -> torch.Tensor:
    """Positions that start again."""
    bounds = [0, *starts, length]
    return torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:], strict=False)])


def check_masks(group: zeroth.Communicator, mesh: zeroth.Mesh) -> None:
    """Padding, packed documents, prepared masks, sequences of few tokens."""
    length = 22
    left, right = torch.ones(2, 2, length, dtype=torch.int64)
    left[0, :7], right[1, -5:] = 0, 0
    two = torch.stack([packed(length, 5, 13), packed(length, 11, 12)])
    seen = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(5)) < 0.7
    seen |= torch.eye(length, dtype=torch.bool)
    bias = torch.randn(1, 4, length, length, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    inputs: dict[str, dict[str, Any]] = {
        "left padding": {"attention_mask": left},
        "right padding": {"attention_mask": right},
        "documents": {"position_ids": two},
        "one row of documents": {"position_ids": two[:1]},
        "boundaries": {"cu_seq_lens_q": torch.tensor([0, 4, 15, length], dtype=torch.int32)},
        "a matrix": {"attention_mask": seen},
        "a matrix of each head": {"attention_mask": seen.expand(2, 4, -1, -1).clone()},
        "a bias of each head": {"attention_mask": bias},
    }
    for what, more in inputs.items():
        for name in ("Mistral",) if FEW else ("Mistral", "Gemma2"):
            if name == "Gemma2" and "attention_mask" in more and more["attention_mask"].dim() == 4:
                continue  # its masks of two kinds are made from one
            model = build(name)
            batch = 1 if "cu_seq_lens_q" in more else 2
            for way in ways(group, mesh):
                check(f"{name} with {what}", model, group, {**sample(length, batch), **more}, **way)
    model = build("Llama")
    for few in (group.size, group.size + 1, 2 * group.size - 1, group.size - 1):
        if few >= 2:
            for way in ways(group, mesh):
                ids = sample(few)["input_ids"]
                check(f"{few} tokens", model, group, {"input_ids": ids, "labels": ids}, **way)


def check_the_rest(group: zeroth.Communicator, mesh: zeroth.Mesh) -> None:
    del mesh
    model = build("Llama")
    ids = sample(19)["input_ids"]
    embeds = model.get_input_embeddings()(ids).detach()
    split = parallel.split_sequence(model, group)
    first = model(ids, labels=ids)
    close(model(inputs_embeds=embeds, labels=ids).loss.detach(), first.loss.detach(), "embeddings", BOUND)
    as_tuple = model(ids, labels=ids, return_dict=False)
    close(as_tuple[0].detach(), first.loss.detach(), "a tuple", BOUND)
    items = model(ids, labels=ids, num_items_in_batch=torch.tensor(72)).loss
    close(items.detach(), (first.loss * 36 / 72).detach(), "num_items_in_batch", BOUND)
    shift = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    close(model(ids, shift_labels=shift).loss.detach(), first.loss.detach(), "shift_labels", BOUND)
    assert model(ids).loss is None
    assert "_attn_implementation" not in model.config.to_dict() and "zeroth" not in model.config.to_json_string()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
    assert type(copy.deepcopy(model.config)._attn_implementation) is str

    other = build("Llama", num_key_value_heads=4)  # another model with another group, at the same time
    alone = zeroth.World.from_environment().mesh({"dp": group.size, "sp": 1}).axis("sp")
    whole = other(ids).logits
    one = parallel.split_sequence(other, alone, "ring")
    close(other(ids, labels=ids).logits.detach(), whole.detach(), "a group of one", BOUND)
    close(model(ids, labels=ids).loss.detach(), first.loss.detach(), "beside another split model", BOUND)
    one.remove()

    # Autocast: the attention gets what torch's own gets.
    small = build("Llama").float()
    for method in ("ulysses", "ring"):
        with torch.autocast("cpu", torch.bfloat16):
            plain = small(ids, use_cache=False).logits
            cast = parallel.split_sequence(small, group, method)  # type: ignore[arg-type]
            close(cast.gather(small(ids).logits), plain, f"autocast, {method}")
        cast.remove()

    # Another model, verified: and one whose embedding looks at its neighbours.
    other.train()
    two = parallel.split_sequence(other, group, "ring")
    assert two.verify(1e-9, input_ids=ids, labels=ids) < 1e-9 and other.training
    spread = other.get_input_embeddings().register_forward_hook(lambda m, i, out: out + out.roll(1, 1))
    with refused("MODEL", "other logits with its sequence split.*which: LlamaForCausalLM"):
        two.verify(input_ids=ids)
    spread.remove()
    two.remove()

    # Under an engine, whose mean over the ranks is half of the sum that the sequence needs.
    curves = []
    for stage in (0, 3):
        trained = build("Llama").train()
        trained.gradient_checkpointing_enable()
        parallel.split_sequence(trained, group, "ring" if stage == 3 else "ulysses")
        optimizer = {"type": "SGD", "params": {"lr": 0.1 * group.size}}
        config = {"zero_optimization": {"stage": stage}, "optimizer": optimizer}
        engine = zeroth.Engine(trained, config, world=zeroth.World.from_environment(), log_level="off")
        curve = []
        for _ in range(3):
            output = engine(input_ids=ids, labels=ids)
            engine.backward(output.loss)
            engine.step()
            curve.append(output.loss.detach())
        engine.close()
        curves.append(torch.stack(curve))
    plain_model, curve = build("Llama").train(), []
    sgd = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    for _ in range(3):
        loss = loss_of(plain_model(ids, use_cache=False).logits, ids)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        curve.append(loss.detach())
    for one in curves:
        close(one, torch.stack(curve), "steps of an engine", BOUND)

    # Activation checkpointing: backward runs the attention again, after another forward of the same model.
    model.zero_grad()
    first.loss.backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.train()
    model.gradient_checkpointing_enable()
    loss = model(ids, labels=ids).loss
    model(ids[:, :5])
    loss.backward()
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        close(parameter.grad, grad, "checkpointing", BOUND)
    split.remove()

    # Dropout: checkpointing changes nothing, ranks have other numbers and go on with equal ones.
    for method in ("ulysses", "ring"):
        noisy = build("GPT2", attn_pdrop=0.3, embd_pdrop=0.2, resid_pdrop=0.1, num_key_value_heads=4).train()
        split = parallel.split_sequence(noisy, group, method)  # type: ignore[arg-type]
        runs = []
        dropped: list[torch.Tensor] = []  # where embeddings of the first tokens are
        noisy.transformer.drop.register_forward_hook(
            lambda module, args, out, dropped=dropped: dropped.append((out[:1, :4] == 0).to(torch.uint8))
        )
        for checkpointing in (False, True):
            if checkpointing:
                noisy.gradient_checkpointing_enable()
            torch.manual_seed(5)
            noisy.zero_grad()
            loss = noisy(ids, labels=ids).loss
            after = torch.randint(1 << 40, (1,))
            assert len(set(group.all_gather(after).tolist())) == 1
            loss.backward()
            every = group.all_gather(dropped[-1].contiguous())
            assert len({tuple(row.tolist()) for row in every.reshape(group.size, -1)}) == group.size
            runs.append([loss.detach(), *(p.grad.clone() for p in noisy.parameters())])
        for a, b in zip(*runs, strict=True):
            close(a, b, f"dropout with checkpointing, {method}", BOUND)
        split.remove()


class Recurrent(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module], *arguments: int) -> None:
        super().__init__()
        self.mixer = torch.nn.Sequential(torch.nn.Linear(8, 8), kind(*arguments))


def check_refusals(group: zeroth.Communicator, mesh: zeroth.Mesh) -> None:
    model = build("Llama")
    split = parallel.split_sequence(model, group)
    ids = sample(12)["input_ids"]
    last = group.rank == group.size - 1
    others = ids.clone()
    others[0, 3] = 1 + int(ids[0, 3]) % 60
    ranks = rf"ranks \[{group.size - 1}\] of world/mesh0\S* have {{}} than ranks \[0"
    different: list[tuple[str, dict[str, Any]]] = [
        ("which: input_ids: " + ranks.format("other values"), {"input_ids": others}),
        (r"input_ids: .*another shape.*expected: int64 \[2, 12\].*got: int64 \[2, 11\]", {"input_ids": ids[:, :11]}),
        (r"another shape.*got: int64 \[1, 12\]", {"input_ids": ids[:1]}),
        ("which: labels.*another shape.*expected: none", {"input_ids": ids, "labels": ids}),
        ("which: attention_mask", {"input_ids": ids, "attention_mask": torch.ones_like(ids)}),
        ("which: position_ids", {"input_ids": ids, "position_ids": packed(12, 5)[None]}),
        ("which: inputs_embeds|which: input_ids", {"inputs_embeds": torch.zeros(2, 12, 32).double()}),
        ("which: num_items_in_batch", {"input_ids": ids, "num_items_in_batch": torch.tensor(7)}),
    ]
    for text, own in different:
        with refused("MISMATCH", "given different samples.*" + text):
            model(**(own if last else {"input_ids": ids}))
    model(ids)  # all of them can go on
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("which: past_key_values", {"past_key_values": transformers.DynamicCache()}),
        ("which: use_cache.*got: True", {"use_cache": True}),
        ("which: output_attentions", {"output_attentions": True}),
        ("which: logits_to_keep", {"logits_to_keep": 1}),
        ("either input_ids or inputs_embeds", {"inputs_embeds": torch.zeros(2, 12, 32)}),
        ("not of the whole sequence.*which: labels", {"labels": ids[:, :5]}),
        ("not of the whole sequence.*which: position_ids", {"position_ids": packed(5)[None]}),
        ("how to cut.*which: pixel_values", {"pixel_values": torch.zeros(1, 3, 4, 4)}),
        ("boundaries", {"cu_seq_lens_q": torch.tensor([0, 11])}),
        (r"not of the whole sequence.*which: attention_mask.*got: \[2, 5\]", {"attention_mask": ids[:, :5]}),
    ]
    for text, more in wrong:
        with refused("USAGE", text):
            model(input_ids=ids, **more)
    with refused("USAGE", "past_key_values|use_cache"):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    with refused("USAGE", "not been called|other tokens than this rank had"):
        split.gather(torch.zeros(2, 40, 3))
    with refused("USAGE", "split already"):
        parallel.split_sequence(model, group)
    twin = copy.deepcopy(model)
    with refused("USAGE", "no group.*hint: call zeroth.parallel.split_sequence"):
        twin(ids)
    split.remove()
    assert model.generate(ids[:, :3], max_new_tokens=2, do_sample=False).shape == (2, 5)

    for text, arguments in (
        ("no such method", {"method": "star"}),
        ("no such layout", {"layout": "spiral"}),
        ("no such order", {"order": "back"}),
        ("needs tokens in their order", {"layout": "zigzag"}),
        ("only a grid has two axes", {"ring": group}),
        ("needs both of its axes", {"method": "grid", "ring": group}),
        ("not those of its group", {"method": "grid", "ring": group, "ulysses": group}),
    ):
        with refused("USAGE", text):
            parallel.split_sequence(model, group, **arguments)  # type: ignore[arg-type]
    one_head = build("Llama", num_attention_heads=1, num_key_value_heads=1)
    with refused("USAGE", "more ranks than heads.*which: LlamaForCausalLM.*hint: use method"):
        parallel.split_sequence(one_head, group)
    for text, bad in (
        ("cannot be split.*which: mixer.1, LSTM.*hint: keep", Recurrent(torch.nn.LSTM, 8, 8)),
        ("which: mixer.1, GRU", Recurrent(torch.nn.GRU, 8, 8)),
        ("which: mixer.1, RNN", Recurrent(torch.nn.RNN, 8, 8)),
        ("which: mixer.1, Conv1d", Recurrent(torch.nn.Conv1d, 8, 8, 3)),
        ("which: mixer.1, BatchNorm1d", Recurrent(torch.nn.BatchNorm1d, 8)),
        ("none of transformers", torch.nn.Linear(2, 2)),
        ("not one of each token.*got: ForSequenceClassification", transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**SMALL))),
        ("has an encoder", transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))),
        ("transformers' attention interface", transformers.BloomForCausalLM(transformers.BloomConfig(
            vocab_size=9, hidden_size=8, n_layer=1, n_head=2))),
    ):  # fmt: skip
        with refused("MODEL", text):
            parallel.split_sequence(bad, group)
    del mesh


def check_plans(group: zeroth.Communicator, mesh: zeroth.Mesh) -> None:
    """Batches of all lengths: the loss and the gradient of one process, for models that run_plan() splits, and for ones
    that were split before; attention that does not know the group is refused on all ranks."""
    world = zeroth.World.from_environment()
    groups = parallel.LengthGroups(world)
    sequences = [{key: one[0] for key, one in sample(length, 1).items()} for length in (24, 13, 9, 5, 4)]

    def work(begin: int, size: int, *numbers: int) -> parallel.Work:
        return parallel.Work(begin, size, numbers, sum(sequences[one]["input_ids"].numel() for one in numbers))

    works = [work(0, 2, 0), work(0, 1, 1), work(1, 1, 2, 3), work(1, 1, 4)]  # a shared row, a packed one
    plan = parallel.BatchPlan(2, tuple(works), (1.0, 1.0), 1.0, False)

    def built() -> Any:
        model = build("Llama", use_cache=True)
        model.config._attn_implementation = "sdpa"
        return model

    plain = built()
    valid = sum(int((one["labels"][1:] != -100).sum()) for one in sequences)
    each = [loss_of(plain(one["input_ids"][None]).logits, one["labels"][None]) for one in sequences]
    counts = [int((one["labels"][1:] != -100).sum()) for one in sequences]
    expected = torch.stack([one * count for one, count in zip(each, counts, strict=True)]).sum() / valid
    expected.backward()
    whole = {name: one.grad for name, one in plain.named_parameters()}

    def compare(result: parallel.PlanResult, gradients: Any, what: str) -> None:
        close(result.loss, expected.detach(), f"loss of {what}", BOUND)
        for name, gradient in whole.items():
            close(gradients(name), gradient, f"gradient of {name} of {what}", BOUND)

    def summed(model: Any) -> Any:
        return lambda name: group.all_reduce(model.get_parameter(name).grad.clone())

    for method in ("ulysses", "ring"):
        model = built()
        result = parallel.run_plan(
            plan,
            groups,
            sequences,
            lambda batch, group: model(**batch).loss,
            model=model,
            method=method,  # type: ignore[arg-type]
        )
        compare(result, summed(model), f"a model that a plan splits, {method}")
        assert model.config._attn_implementation == "sdpa" and type(model.config._attn_implementation) is str
    for stage in (0, 3):
        model = built().train()
        engine = zeroth.Engine(model, {"zero_optimization": {"stage": stage}}, world=world, log_level="off")
        result = parallel.run_plan(
            plan, groups, sequences, lambda batch, group: engine(**batch).loss,
            model=model, backward=engine.backward, mean_over=world.size,
        )  # fmt: skip
        compare(result, lambda name: engine.full(name, "grad"), f"an engine at stage {stage}")
        assert engine.step().committed
        engine.close()

    model = built()

    def by_hand(batch: dict[str, Any], group: zeroth.Communicator) -> torch.Tensor:
        split = parallel.split_sequence(model, group, "ring")
        try:
            return model(**batch).loss
        finally:
            split.remove()

    compare(parallel.run_plan(plan, groups, sequences, by_hand, cut=False), summed(model), "a model split by hand")

    alone = parallel.BatchPlan(2, tuple(works[1:]), (1.0, 1.0), 1.0, False)
    for text, code, arguments in (
        ("does not know the ranks that share a row.*LlamaModel, attention 'sdpa'.*model=model", "MODEL", {}),
        ("does not know the ranks that share a row", "MODEL", {"cut": False}),
        ("ranks have other options", "MISMATCH", {"ignore_index": -100 - world.rank}),
        ("there is no such method", "USAGE", {"model": model, "method": "star"}),
        ("none of transformers", "MODEL", {"model": torch.nn.Linear(2, 2)}),
        ("more ranks than heads", "USAGE", {"model": build("Llama", num_attention_heads=1, num_key_value_heads=1)}),
    ):
        with refused(code, text):
            parallel.run_plan(plan, groups, sequences, lambda batch, group: model(**batch).loss, **arguments)  # type: ignore[arg-type]
    with refused("MISMATCH", "ranks have other batches"):
        parallel.run_plan(
            plan, groups, sequences[: 5 - world.rank], lambda batch, group: model(**batch).loss, model=model
        )
    shorter = [{key: one[:3] for key, one in sequences[0].items()}, *sequences[1:]]
    with refused("MISMATCH", "ranks have other batches"):  # a plan of another batch on one rank
        parallel.run_plan(plan, groups, shorter if world.rank else sequences, by_hand, cut=False)
    with refused("USAGE", "a plan is of another batch.*24 tokens"):
        parallel.run_plan(plan, groups, shorter, by_hand, cut=False)
    with refused("MODEL", "other losses.*cut=False"):
        parallel.run_plan(
            plan, groups, sequences, lambda batch, group: by_hand(batch, group) * (1 + group.rank), cut=False
        )
    lone = torch.nn.Embedding(SMALL["vocab_size"], SMALL["vocab_size"]).double()

    def tokens(batch: dict[str, Any], group: zeroth.Communicator) -> torch.Tensor:
        logits = lone(batch["input_ids"]).flatten(0, 1)
        return functional.cross_entropy(logits, batch["shift_labels"].flatten(), reduction="sum")

    with refused("MODEL", "made no call to each other.*24 tokens on ranks 0 to 1"):
        parallel.run_plan(plan, groups, sequences, tokens)
    fewer = [sequences[number] for number in (1, 2, 3, 4)]
    apart = parallel.BatchPlan(
        2, tuple(dataclasses.replace(one, sequences=tuple(at - 1 for at in one.sequences)) for one in alone.works),
        (1.0, 1.0), 1.0, False,
    )  # fmt: skip
    with refused("MODEL", "does not tell the documents of a row apart.*use_cache=False"):
        parallel.run_plan(apart, groups, fewer, lambda batch, group: model(**batch).loss)
    parallel.run_plan(apart, groups, fewer, lambda batch, group: model(**batch, use_cache=False).loss)
    del mesh


if __name__ == "__main__":
    main()
