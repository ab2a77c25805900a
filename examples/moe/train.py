"""A language model whose feed-forward layers are experts, on the bytes of a folder: each token goes to two of eight,
and the ranks of the axis ep have other ones.

    zeroth-run -n 4 python examples/moe/train.py                          ep=2 x dp=2, ZeRO-3
    zeroth-run -n 4 python examples/moe/train.py --ep 4 --stage 1 --balance 0 --out FOLDER
    zeroth-run -n 4 python examples/moe/train.py --experts 2,4 --residual   the second layer has more: PR-MoE

Prints the loss, and how evenly the tokens are spread: 1 for the same number on each expert. FOLDER/load.csv has the
choices of each expert, layer and step, over all ranks. FOLDER/load.png is their picture, if matplotlib is installed.
Expected: any `--ep` and `--stage` give the same losses up to rounding, a rank of ep=4 holds a quarter of the experts,
and without a balance loss some experts are left behind: 0.868, 0.601. The last lines are like

    step 60: loss 2.915, entropy of the load 0.935, 0.941
    4 ranks, ep=2: 1.1 of 1.3 million parameters are experts; this rank's plan has 8.4 MB
"""

import argparse
import csv
import importlib.util
import math
import pathlib

import torch
from torch import nn
from torch.nn import functional

import zeroth
import zeroth.nn

parser = argparse.ArgumentParser()
docs = pathlib.Path(__file__).resolve().parents[2] / "docs"
parser.add_argument("text", type=pathlib.Path, nargs="?", default=docs, help="a folder; its files *.md are read")
parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder of the table and the picture")
parser.add_argument("--ep", type=int, default=2, help="ranks with other experts; the other ranks are dp")
parser.add_argument("--balance", type=float, default=0.02, help="weight of the balance loss")
parser.add_argument("--capacity", type=float, default=0.0, help="capacity factor; 0: no token is dropped")
parser.add_argument("--experts", default="8", help="of each layer; 2,4: of the first, and of those that follow")
parser.add_argument("--residual", action="store_true", help="each token has an expert of all tokens, too")
parser.add_argument("--lr", type=float, default=2e-3)
for name, default in dict(steps=60, stage=3, batch=4, length=64, width=128, layers=2, every=20).items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
numbers = [int(number) for number in args.experts.split(",")]
numbers = [numbers[min(layer, len(numbers) - 1)] for layer in range(args.layers)]
data = b"".join(path.read_bytes() for path in sorted(args.text.rglob("*.md")))
text = torch.frombuffer(bytearray(data), dtype=torch.uint8).unfold(0, args.length + 1, args.length).long()
world = zeroth.World.from_environment()


class Block(nn.Module):
    """Attention of torch, then experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(args.width)
        self.attention = nn.MultiheadAttention(args.width, args.width // 32, batch_first=True)
        self.norm_of_experts = nn.LayerNorm(args.width)
        expert = nn.Sequential(nn.Linear(args.width, 2 * args.width), nn.GELU(), nn.Linear(2 * args.width, args.width))
        self.experts = zeroth.nn.MoE(
            args.width,
            expert,
            num_experts=experts,
            use_residual=args.residual,
            k=2,
            drop_tokens=args.capacity > 0,
            capacity_factor=args.capacity or 1.0,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, h: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(h)
        h = h + self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        out, balance, _ = self.experts(self.norm_of_experts(h))
        return h + out, balance


class Model(nn.Module):
    """The next byte of each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, args.width)
        self.places = nn.Parameter(torch.zeros(args.length, args.width))
        self.blocks = nn.ModuleList(Block(experts) for experts in numbers)
        self.head = nn.Linear(args.width, 256)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the text, and the mean balance loss of the layers."""
        mask = nn.Transformer.generate_square_subsequent_mask(args.length)
        h, balances = self.embed(tokens[:, :-1]) + self.places, []
        for block in self.blocks:
            h, balance = block(h, mask)
            balances.append(balance)
        loss = functional.cross_entropy(self.head(h).flatten(0, 1), tokens[:, 1:].flatten())
        return loss, torch.stack(balances).mean()


def write(loads: list[list[list[int]]]) -> None:
    """`loads`: of steps, layers and experts."""
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "load.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", "layer", *(f"expert {expert}" for expert in range(max(numbers)))])
        for step, layers in enumerate(loads, 1):
            table.writerows((step, layer, *counts) for layer, counts in enumerate(layers))
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, args.layers, figsize=(5 * args.layers, 3.5), sharey=True, squeeze=False)
    for layer, plot in enumerate(plots[0]):
        shares = torch.tensor([of_step[layer] for of_step in loads], dtype=torch.float64)
        shares = shares / shares.sum(-1, keepdim=True)
        plot.stackplot(range(1, len(loads) + 1), shares.T, linewidth=0)
        plot.set(xlabel="step", title=f"layer {layer}", ylim=(0, 1))
    plots[0][0].set(ylabel="part of the tokens, by expert")
    figure.tight_layout()
    figure.savefig(args.out / "load.png")


torch.set_num_threads(1)
torch.manual_seed(0)
model = Model()
total = sum(parameter.numel() for parameter in model.parameters())
of_experts = sum(layer.elements for layer in zeroth.experts(model).layers)
config = {
    "train_micro_batch_size_per_gpu": args.batch,
    "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01}},
    "zero_optimization": {"stage": args.stage},
    "gradient_clipping": 1.0,
    "zeroth": {"threads": 1, "mesh": {"ep": args.ep if world.size > 1 else 1}},
}
engine = zeroth.Engine(model, config, units=[model.embed, *model.blocks, model.head])
layers = [block.experts for block in model.blocks]
generator = torch.Generator().manual_seed(1)
loads = []
for step in range(1, args.steps + 1):
    starts = torch.randint(len(text), (world.size, args.batch), generator=generator)
    loss, balance = engine(text[starts[world.rank]])
    engine.backward(loss + args.balance * balance)
    loads.append([layer.load.chosen for layer in layers])  # over all ranks; the step's end begins anew
    engine.step()
    if world.rank == 0 and step % args.every == 0:
        spreads = [torch.tensor(load, dtype=torch.float64) for load in loads[-1]]
        entropies = [torch.special.entr(one / one.sum()).sum().item() / math.log(max(len(one), 2)) for one in spreads]
        print(f"step {step}: loss {loss.item():.3f}, entropy of the load "
              + ", ".join(f"{one:.3f}" for one in entropies), flush=True)  # fmt: skip
if world.rank == 0:
    write(loads)
    planned = sum(engine.memory_report().planned.values()) / 1e6
    parts = f"{of_experts / 1e6:.1f} of {total / 1e6:.1f} million parameters are experts"
    print(f"{world.size} ranks, ep={args.ep}: {parts}; this rank's plan has {planned:.1f} MB")
engine.close(keep_parameters=False)
