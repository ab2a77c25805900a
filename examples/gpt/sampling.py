"""Choosing the next byte of generated text."""

import math
from collections.abc import Sequence


def sample_index(logits: Sequence[float], temperature: float, random: float) -> int:
    """Draws an index from softmax(logits / temperature), in double; `random` in [0, 1) decides, so equal inputs choose
    equally on all ranks. Temperature 0 takes the largest (the first of equals)."""
    largest = max(logits)
    best = logits.index(largest)
    if temperature <= 0:
        return best
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    total = 0.0
    for weight in weights:  # sum() compensates for rounding in newer versions of Python: other bits
        total += weight
    left = random * total
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return best  # rounding left a crumb


def printable(text: bytes) -> str:
    """Bytes made safe for a terminal: control and non-ASCII bytes appear as \\xNN, line breaks and tabs stay."""
    return "".join(chr(byte) if byte in b"\n\t" or 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in text)
