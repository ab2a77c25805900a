"""One rank: runs examples/hf_gpt2/train.py several times in this process and compares what it prints; see hf_test.py.

hf_rank.py stages FOLDER      stages 0 and 3 and checkpointing give the same digits; the loss falls; the model is
Hugging Face's again hf_rank.py plain FOLDER       the same loop in plain torch, with Hugging Face's own schedule, in
float64
"""

from __future__ import annotations

import contextlib
import io
import math
import pathlib
import runpy
import sys
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import zeroth.ckpt

TRAIN = pathlib.Path(__file__).resolve().parents[2] / "examples/hf_gpt2/train.py"
PLAIN_STEPS = 9
"""below ten the example has no warmup: then its curve is that of get_cosine_schedule_with_warmup"""
BATCH = 4
SHAPE: dict[str, Any] = {"n_layer": 3, "n_embd": 64, "n_head": 2, "n_positions": 32}
TOLERANCE = 1e-12


def example(text: str, num_steps: int, *more: str) -> tuple[list[list[float]], dict[str, Any]]:
    """Loss, held-out loss and learning rate of each step (of rank 0), and the globals of the script."""
    sizes = [f"--{name}={value}" for name, value in (SHAPE | {"steps": num_steps, "batch": BATCH, "every": 1}).items()]
    sys.argv = [str(TRAIN), text, *sizes, *more]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script = runpy.run_path(str(TRAIN))
    steps = [
        [float(word) for word in line.split() if word[0].isdigit()][1:] for line in printed.getvalue().splitlines()
    ]
    assert len(steps) == (num_steps if script["engine"].rank == 0 else 0), printed.getvalue()
    return steps, script


def stages(text: str) -> None:
    first, script = example(text, 20, "--stage=0")
    rank = script["engine"].rank
    for more in (["--stage=3"], ["--stage=3", "--checkpoint"]):
        steps, script = example(text, 20, *more)
        assert script["model"].is_activation_checkpointing == ("--checkpoint" in more)
        assert steps == first, f"{more}: {steps}, stage 0: {first}"
    assert rank != 0 or max(first[-1][:2]) < min(first[0][:2]) - 0.5, f"the losses do not fall: {first}"

    model, engine, ids = script["model"], script["engine"], script["text"][:2]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        said = model.generate(ids[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
    engine.save(f"{text}/saved")
    if rank == 0:
        zeroth.ckpt.convert(f"{text}/saved", f"{text}/converted", to="hf", max_shard_bytes=100_000)
        model.config.save_pretrained(f"{text}/converted")
        converted: Any = GPT2LMHeadModel.from_pretrained(f"{text}/converted")
        with torch.no_grad():
            assert torch.equal(converted.eval()(input_ids=ids).logits, expected)
    engine.close()
    assert model.lm_head.weight is model.transformer.wte.weight
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again: Any = GPT2LMHeadModel.from_pretrained(folder)
        assert torch.equal(again(input_ids=ids).logits, expected), "another model was saved"
        assert torch.equal(again.generate(ids[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0), said)


def plain(text: str) -> None:
    mine, script = example(text, PLAIN_STEPS, "--dtype=float64")
    ids = script["text"]
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **SHAPE)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 0, PLAIN_STEPS)
    torch.manual_seed(0)
    for step, of_zeroth in enumerate(mine):
        batch = ids[torch.randint(BATCH, len(ids), (BATCH,))]
        model.train()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            held_out = model(input_ids=ids[:BATCH], labels=ids[:BATCH]).loss
        expected = [loss.item(), held_out.item(), rate]
        for one, other in zip(of_zeroth, expected, strict=True):
            assert math.isclose(one, other, rel_tol=TOLERANCE), f"step {step}: {of_zeroth}, plain torch: {expected}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"stages": stages, "plain": plain}[sys.argv[1]](sys.argv[2])
