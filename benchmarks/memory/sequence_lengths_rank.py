"""One rank of sequence_lengths.py: prints a JSON line for each row of the table."""

from __future__ import annotations

import json
import math
import pathlib
import sys
import warnings
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroth
from zeroth.parallel import split_sequence, tile_loss, tile_mlps

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from live_bytes import peak_bytes  # noqa: E402

LAYERS, HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 3, 64, 256, 4, 2048
MODEL = {"layers": LAYERS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "heads": HEADS, "vocabulary": VOCABULARY}
FLASH_BYTES = 2 * 256 * 512 * 4
"""of torch's flash attention for the CPU in backward: two blocks of scores, once a thread"""
STEP = 16
"""tokens of a rank: lengths are multiples"""


def planned_bytes(tokens: int, ranks: int, tiles: bool) -> float:
    """Peak of a rank in float32: the largest of the moments that need most, in floats a token of the rank.

    loss       without tiles: 3 V: logits, their log-softmax, its gradient; L + 3 hidden states: inputs of the blocks,
               result of the last, its norm and the gradient
    attention  backward of scaled_dot_product_attention in a block that is computed again: L inputs of blocks and 11 of
               h: two norms, two rotated, v, result and its gradient, gradients of q, k and v, and of the residual; on
               several ranks one more
    exchange   of q, k and v on several ranks: L inputs and 15 of h: sent, received and joined 3 each, and six of the
               above
    and of each 2 d for cosine and sine of positions, and positions, labels and sums of rows: 9."""
    own = math.ceil(tokens / ranks)
    rest = 2 * HIDDEN / HEADS + 9
    moments = [own * ((LAYERS + 11 + (ranks > 1)) * HIDDEN + rest) * 4 + FLASH_BYTES]
    if ranks > 1:
        moments.append(own * ((LAYERS + 15) * HIDDEN + rest) * 4)
    if not tiles:
        moments.append(own * (3 * VOCABULARY + (LAYERS + 3) * HIDDEN + rest) * 4)
    return max(moments)


def longest(memory: float, ranks: int, tiles: bool) -> int:
    steps = 1
    while planned_bytes((steps + 1) * STEP * ranks, ranks, tiles) <= memory:
        steps += 1
    return steps * STEP * ranks


def measured_bytes(tokens: int, group: zeroth.Communicator, tiles: bool) -> int:
    """Of the rank with most."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=1 << 20,
    )
    model: Any = LlamaForCausalLM(config)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if tiles:
        tile_mlps(model)
        tile_loss(model)
    split_sequence(model, group)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    peak = peak_bytes(lambda: model(input_ids=ids, labels=ids).loss.backward())
    return int(group.all_reduce(torch.tensor([peak]), "max"))


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    memory = float(sys.argv[1]) * 2**20
    world = zeroth.World.from_environment()
    group = world.mesh({"sp": world.size}).axis("sp")
    for tiles in (False, True):
        tokens = longest(memory, group.size, tiles)
        longer = math.ceil(tokens * 1.1 / STEP / group.size) * STEP * group.size
        found = {
            "tiles": tiles,
            "tokens": tokens,
            "planned": planned_bytes(tokens, group.size, tiles),
            "measured": measured_bytes(tokens, group, tiles),
            "measured_longer": measured_bytes(longer, group, tiles),
            "model": MODEL,
        }
        if group.rank == 0:
            print(json.dumps(found), flush=True)


main()
