"""A Hugging Face GPT-2 with random weights learns the bytes of a folder of text, partitioned by ZeRO. Nothing is
downloaded.

zeroth-run -n 2 python examples/hf_gpt2/train.py docs          (or torchrun --nproc-per-node 2, or python alone)
"""

import argparse
import pathlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zeroth

parser = argparse.ArgumentParser()
parser.add_argument("text", type=pathlib.Path, help="a folder; all files below it are read")
parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
parser.add_argument(
    "--checkpoint", action="store_true", help="compute activations again in backward instead of keeping them"
)
for name, default in dict(
    stage=3, steps=200, every=20, batch=8, n_layer=4, n_embd=128, n_head=4, n_positions=128
).items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
data = b"".join(path.read_bytes() for path in sorted(args.text.rglob("*")) if path.is_file())
text = torch.frombuffer(bytearray(data), dtype=torch.uint8).unfold(0, args.n_positions, args.n_positions).long()
shape = {name: getattr(args, name) for name in ("n_layer", "n_embd", "n_head", "n_positions")}
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=None, eos_token_id=None, **shape)).to(
    getattr(torch, args.dtype)
)
if args.checkpoint:
    model.activation_checkpointing_enable()
schedule = {"warmup_num_steps": args.steps // 10, "total_num_steps": args.steps, "cos_min_ratio": 0.0}
engine = zeroth.Engine(
    model,
    {
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-4}},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "gradient_clipping": 1.0,
    },
)
torch.manual_seed(engine.rank)  # other batches and other dropout on every rank
for step in range(1, args.steps + 1):
    ids = text[torch.randint(args.batch, len(text), (args.batch,))]
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()  # engine.backward(loss) does the same
    result, mean = engine.step(), engine.average(loss.item())
    if step % args.every == 0:
        with torch.no_grad():  # the first samples are never trained on
            held_out = model.eval()(input_ids=text[: args.batch], labels=text[: args.batch]).loss
        if engine.rank == 0:
            print(f"step {step} loss {mean} held out {held_out.item()} lr {result.lr}", flush=True)
