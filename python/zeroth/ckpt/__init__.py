"""Checkpoints without an engine: read, compare, convert, average. One process, on a host that need not have trained.

    checkpoint = zeroth.ckpt.open("runs/a")         # a checkpoint, or a folder with some: the newest whole one
    weight = checkpoint.tensor("blocks.0.weight")   # a torch tensor, read by bytes and compared with digests
    moment = checkpoint.tensor("blocks.0.weight", "exp_avg")
    zeroth.ckpt.convert("runs/a", "hf", to="hf", dtype=torch.bfloat16)

`zeroth ckpt --help` is the same as commands.
"""

from zeroth.ckpt.average import average
from zeroth.ckpt.contents import Contents, Lazy, Param, of_tensor
from zeroth.ckpt.convert import convert, read
from zeroth.ckpt.diff import Difference, diff
from zeroth.ckpt.folder import Entry, entries, prune, verify
from zeroth.ckpt.reader import Checkpoint
from zeroth.ckpt.reader import open_checkpoint as open
from zeroth.ckpt.writer import write

__all__ = [
    "Checkpoint",
    "Contents",
    "Difference",
    "Entry",
    "Lazy",
    "Param",
    "average",
    "convert",
    "diff",
    "entries",
    "of_tensor",
    "open",
    "prune",
    "read",
    "verify",
    "write",
]
