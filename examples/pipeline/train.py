"""A Hugging Face GPT-2 with random weights learns the bytes of a folder of text in the stages of a pipeline, whose
states are sharded by ZeRO-1 where there are several pipelines. Rank 0 prints what each stage has and does, and beside
the losses those of one process with the same batches. Nothing is downloaded.

zeroth-run -n 2 python examples/pipeline/train.py                                pp=2, 1F1B
zeroth-run -n 4 python examples/pipeline/train.py --schedule zb-h1 --stage 3     pp=2 x dp=2, another schedule and stage
zeroth-run -n 4 python examples/pipeline/train.py --pp 4 --micro 8               pp=4, eight micro-batches a step
"""

import argparse
import copy
import pathlib
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zeroth

parser = argparse.ArgumentParser()
docs = pathlib.Path(__file__).resolve().parents[2] / "docs"
parser.add_argument("text", type=pathlib.Path, nargs="?", default=docs, help="a folder; all files below it are read")
parser.add_argument("--schedule", default="1f1b", help="zeroth schedule --help lists them")
for name, default in dict(pp=2, micro=4, stage=1, steps=50, every=10, batch=4, length=128, layers=4, size=128).items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
data = b"".join(path.read_bytes() for path in sorted(args.text.rglob("*")) if path.is_file())
text = torch.frombuffer(bytearray(data), dtype=torch.uint8).unfold(0, args.length, args.length).long()

torch.manual_seed(0)  # the same weights on every rank
shape: dict[str, Any] = {"n_layer": args.layers, "n_embd": args.size, "n_head": 4, "n_positions": args.length}
no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **shape, **no_dropout))
alone = copy.deepcopy(model)
optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)

# 1. One configuration: stages, schedule, micro-batches, ZeRO.
config = {
    "zero_optimization": {"stage": args.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": args.micro,
    "zeroth": {"mesh": {"pp": args.pp}, "pipeline": {"schedule": args.schedule}},
}
# 2. The engine cuts the model, and says how; the program is what each stage does in a step.
engine = zeroth.Engine(model, config, log_level="warning")
mesh = engine.pipeline.mesh
if engine.rank == 0:
    print(engine.pipeline, engine.pipeline.program, sep="\n")
generator = torch.Generator().manual_seed(
    1
)  # the same on every rank: a pipeline takes the batches of its place along dp
for step in range(1, args.steps + 1):
    numbers = torch.randint(args.batch, len(text), (mesh.size("dp") * args.micro, args.batch), generator=generator)
    batches = [{"input_ids": text[batch], "labels": text[batch]} for batch in numbers]
    # 3. A step: every stage of a pipeline is given the same micro-batches.
    result, loss = engine.train_batch(iter(batches[mesh.coordinate("dp") :: mesh.size("dp")]))
    # 4. The same in one process, with all batches.
    if engine.rank == 0:
        losses = [alone(**batch).loss / len(batches) for batch in batches]
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0:
            print(f"step {step} loss {loss} norm {result.grad_norm} alone {sum(losses).item()}", flush=True)
# 5. Without gradients: the loss on samples that were never trained on, and what the whole model returns, on all ranks.
held_out = {"input_ids": text[: args.batch], "labels": text[: args.batch]}
loss = engine.eval_batch(iter([held_out]), micro_batches=1)
logits = engine.outputs(held_out)["logits"]
if engine.rank == 0:
    print(f"held out: loss {loss}, logits {list(logits.shape)}")
