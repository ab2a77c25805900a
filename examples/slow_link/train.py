"""Two sites with a slow link between them train one model in three ways: with AdamW, whose ranks exchange sums of
gradients; with 1-bit Adam, whose ranks exchange signs of momenta after the first steps; and with Streaming DiLoCo,
whose sites train apart and exchange a part of the weights, in codes of 4 bits, once in some steps. All see the same
batches from the same weights over the same emulated link; each rank is a site.

    zeroth-run -n 2 python examples/slow_link/train.py                              a link of 100 Mbit/s
    zeroth-run -n 2 python examples/slow_link/train.py --mbit 1000 --steps 200 --out FOLDER

Prints a table, and writes it to FOLDER/slow_link.csv; FOLDER/slow_link.png shows losses over steps, over time and over
bytes, where matplotlib is installed. Expected: losses within a few percent of each other; after `--freeze` steps a 32nd
of the bytes with 1-bit Adam, and less than a hundredth of them with Streaming DiLoCo from the start. How much of the
time that saves depends on the link, and on the time of computing a step. A loss is the mean of both sites' on their
batches, with Streaming DiLoCo of each on weights of its own. The last lines are like

    AdamW: loss 2.618, 47.8 s, 3.469 MB a step over the link at last, 416.3 MB in all
    OneBitAdam: loss 2.596, 24.2 s, 0.110 MB a step over the link at last, 114.0 MB in all
    StreamingDiLoCo: loss 2.642, 10.3 s, 0.010 MB a step over the link at last, 2.4 MB in all

docs/slow-links.md says which method fits which link, and what is exact.
"""

import argparse
import csv
import importlib.util
import itertools
import pathlib
import time

import torch
from torch import nn
from torch.nn import functional

import zeroth

parser = argparse.ArgumentParser()
docs = pathlib.Path(__file__).resolve().parents[2] / "docs"
parser.add_argument("text", type=pathlib.Path, nargs="?", default=docs, help="a folder; its files *.md are read")
parser.add_argument("--mbit", type=float, default=100.0, help="of the link, a second")
parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder of the table and the plot")
parser.add_argument("--lr", type=float, default=2e-3)
numbers = dict(steps=120, freeze=30, stage=0, batch=8, length=64, width=128, layers=4, every=20)
numbers |= dict(
    window=20, fragments=2, delay=5
)  # of Streaming DiLoCo: steps from one exchange of a fragment to the next
for name, default in numbers.items():
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
data = b"".join(path.read_bytes() for path in sorted(args.text.rglob("*.md")))
text = torch.frombuffer(bytearray(data), dtype=torch.uint8).unfold(0, args.length + 1, args.length).long()
world = zeroth.World.from_environment()
Row = tuple[int, float, float, int]
"""step, mean loss of both sites, seconds since the start, bytes that came over this site's link in the step"""
METHODS = ("AdamW", "OneBitAdam", "StreamingDiLoCo")


class Model(nn.Module):
    """The next byte of each byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, args.width)
        self.places = nn.Parameter(torch.zeros(args.length, args.width))
        layer = nn.TransformerEncoderLayer(
            args.width, args.width // 32, 4 * args.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(args.length)
        hidden = self.layers(self.embed(inputs) + self.places, mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def begin(method: str) -> zeroth.Engine:
    """An engine of both sites, or of this one, and what it exchanges with the other."""
    torch.manual_seed(0)
    apart = method == "StreamingDiLoCo"
    params = {"lr": args.lr, "weight_decay": 0.01} | ({"freeze_step": args.freeze} if method == "OneBitAdam" else {})
    config = {
        "zero_optimization": {"stage": args.stage},
        "optimizer": {"type": "AdamW" if apart else method, "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": args.freeze // 2, "warmup_max_lr": args.lr}},
        "gradient_clipping": 1.0,
        "zeroth": {"threads": 1, "ranks_per_node": 1, "link_bytes_per_s": int(args.mbit * 125_000)},
    }
    model = Model()
    units = [model.embed, *model.layers.layers, model.head]  # fragments are made of these
    engine = zeroth.Engine(model, config, units=units, world=world.site(2) if apart else world)
    if not apart:
        return engine
    zeroth.local_updates(
        engine,
        args.window,
        fragments=args.fragments,
        delay=args.delay,
        outer_lr=0.7,
        outer_momentum=0.9,
        keep_local=0.5,
        payload="fp4",
    )
    return engine


def train(method: str) -> list[Row]:
    engine = begin(method)
    generator = torch.Generator().manual_seed(1 + world.rank)  # a site has texts of its own
    rows = []
    start = time.monotonic()
    for step in range(1, args.steps + 1):
        engine.reset_counters()
        loss = engine(text[torch.randint(len(text), (args.batch,), generator=generator)])
        engine.backward(loss)
        engine.step()
        wire = engine.wire_report()
        far = wire["between_nodes"] + wire["between_sites"]
        rows.append((step, loss.item(), time.monotonic() - start, far))
        if world.rank == 0 and step % args.every == 0:
            print(f"{method}: step {step}, {rows[-1][2]:.1f} s, {far / 1e6:.2f} MB", flush=True)
    engine.close(keep_parameters=False)
    everyone = world.mesh({"sites": world.size}).world
    of_both = everyone.all_reduce(torch.tensor([row[1] for row in rows])) / world.size
    return [(step, loss, seconds, far) for (step, _, seconds, far), loss in zip(rows, of_both.tolist(), strict=True)]


def write(runs: dict[str, list[Row]]) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "slow_link.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["method", "step", "loss", "seconds", "bytes"])
        for method, rows in runs.items():
            table.writerows((method, *row) for row in rows)
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True)
    for method, rows in runs.items():
        steps, losses, seconds, far = zip(*rows, strict=True)
        means = [sum(losses[max(0, i - 4) : i + 1]) / min(i + 1, 5) for i in range(len(rows))]
        megabytes = [total / 1e6 for total in itertools.accumulate(far)]
        for plot, along in zip(axes, (steps, seconds, megabytes), strict=True):
            plot.plot(along, means, label=method, linewidth=1)
    axes[0].set(xlabel="step", ylabel="loss, mean of 5 steps")
    axes[0].axvline(args.freeze, linestyle=":", color="grey")
    axes[1].set(xlabel=f"seconds, over {args.mbit:g} Mbit/s")
    axes[2].set(xlabel="MB over the link", xscale="log")
    axes[2].legend()
    figure.tight_layout()
    figure.savefig(args.out / "slow_link.png")


torch.set_num_threads(1)
runs = {method: train(method) for method in METHODS}
if world.rank == 0:
    write(runs)
    for method, rows in runs.items():
        last = rows[-args.window :]  # a whole window, in which each part of the weights was exchanged once
        loss = sum(row[1] for row in last) / len(last)
        late, total = (sum(row[3] for row in part) / 1e6 for part in (last, rows))
        bytes_of = f"{late / len(last):.3f} MB a step over the link at last, {total:.1f} MB in all"
        print(f"{method}: loss {loss:.3f}, {rows[-1][2]:.1f} s, {bytes_of}")
