"""A Llama of Hugging Face with random weights learns the bytes of a folder of text: its matrices split over tp ranks,
its sequences over sp ranks, its states over dp x sp by ZeRO-3, all by one configuration. Nothing is downloaded.

zeroth-run -n 4 python examples/tensor_sequence/train.py                         dp=1 x sp=2 x tp=2
zeroth-run -n 4 python examples/tensor_sequence/train.py --sp 1                  dp=2 x sp=1 x tp=2
python examples/tensor_sequence/train.py --tp 1 --sp 1 --dp 2                    the losses of dp=2 on one rank
"""

import argparse
import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroth

parser = argparse.ArgumentParser()
docs = pathlib.Path(__file__).resolve().parents[2] / "docs"
parser.add_argument("text", type=pathlib.Path, nargs="?", default=docs, help="a folder; all files below it are read")
parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
for name, default in dict(tp=2, sp=2, stage=3, steps=100, every=10, batch=8, length=128, layers=2, size=128).items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--dp", type=int, default=0, help="batches of a step; 0: as many as the mesh has ranks for")
args = parser.parse_args()
data = b"".join(path.read_bytes() for path in sorted(args.text.rglob("*")) if path.is_file())
text = torch.frombuffer(bytearray(data), dtype=torch.uint8).unfold(0, args.length, args.length).long()

torch.manual_seed(0)  # the same weights on every rank
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=args.size,
        intermediate_size=args.size * 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=args.length,
        bos_token_id=None,
        eos_token_id=None,
    )
).to(getattr(torch, args.dtype))
world = zeroth.World.from_environment()
ranks = world.size // (args.tp * args.sp)  # with batches of their own
config = {
    "zero_optimization": {"stage": args.stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"warmup_num_steps": args.steps // 10, "total_num_steps": args.steps, "cos_min_ratio": 0.0},
    },
    "gradient_clipping": 1.0,
    "gradient_accumulation_steps": (args.dp or ranks) // ranks,
    "zeroth": {"mesh": {"sp": args.sp, "tp": args.tp}},
}
split = zeroth.parallelize(model, config, world=world)
engine = zeroth.Engine(model, config, world=world)
if engine.rank == 0:
    print(split)
generator = torch.Generator().manual_seed(1)  # the same on every rank: each takes the batches of its place along dp
for step in range(1, args.steps + 1):
    batches = torch.randint(args.batch, len(text), (args.dp or ranks, args.batch), generator=generator)
    total = 0.0
    for batch in batches[split.mesh.coordinate("dp") :: ranks]:
        loss = engine(input_ids=text[batch], labels=text[batch]).loss
        engine.backward(loss)
        total += loss.item()
        result = engine.step()
    mean = engine.average(total / (len(batches) // ranks))
    if engine.rank == 0 and step % args.every == 0:
        print(f"step {step} loss {mean} norm {result.grad_norm}", flush=True)
