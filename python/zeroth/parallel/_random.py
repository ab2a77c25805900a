"""Random numbers that are other ones on each rank of a group."""

import contextlib
from collections.abc import Iterator

import torch

from zeroth import _C

__all__ = ["mixed", "split_random"]

_MASK = (1 << 63) - 1


def mixed(*numbers: int) -> int:
    """A seed of 63 bits from several numbers, in order. Finalizer of splitmix64 (Steele, Lea, Flood 2014) on each."""
    state = 0
    for number in numbers:
        state = (state + (number & (2**64 - 1)) + 0x9E3779B97F4A7C15) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return state & _MASK


@contextlib.contextmanager
def split_random(group: _C.Communicator) -> Iterator[None]:
    """Inside, torch's default CPU generator gives each rank of `group` other numbers, also where all ranks came with
    the same state. Outside it has moved by one draw, so ranks that were equal stay equal; who restores the state before
    (activation checkpointing does) gets the same numbers again. No call of the group."""
    if group.size == 1:
        yield
        return
    seed = int(torch.randint(_MASK, (), dtype=torch.int64))
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(mixed(seed, group.rank))
    try:
        yield
    finally:
        torch.set_rng_state(before)
