"""Which heads of an attention each rank of a group computes."""

import dataclasses

from zeroth._C import slice_sizes
from zeroth.parallel._refuse import refuse

__all__ = ["HeadSplit", "split_heads"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """Query heads and the key and value heads that they need, for each rank. A frozen value."""

    q: tuple[range, ...]
    """query heads of each rank: whole, in order, as equal as can be"""
    kv: tuple[range, ...]
    """key and value heads of each rank; neighbours share one where its query heads are on both"""
    group_size: int
    """query heads of one key and value head"""

    def q_counts(self) -> list[int]:
        return [len(heads) for heads in self.q]

    def kv_counts(self) -> list[int]:
        return [len(heads) for heads in self.kv]

    def kv_order(self) -> list[int]:
        """The key and value heads for rank 0, 1, ..., one after another: those that several ranks need come often."""
        return [head for heads in self.kv for head in heads]

    def kv_of_q(self, rank: int) -> list[int]:
        """For each query head of a rank, which of the rank's own key and value heads it reads."""
        return [head // self.group_size - self.kv[rank].start for head in self.q[rank]]

    def is_grouped(self, rank: int) -> bool:
        """Whether each of the rank's key and value heads has equally many query heads, in order."""
        if len(self.q[rank]) % len(self.kv[rank]) != 0:
            return False
        size = len(self.q[rank]) // len(self.kv[rank])
        return self.kv_of_q(rank) == [number // size for number in range(len(self.q[rank]))]


def split_heads(num_heads: int, num_kv_heads: int, ranks: int, *, where: str = "parallel.heads") -> HeadSplit:
    """Cuts `num_heads` query heads over `ranks`; each rank gets the key and value heads that its query heads read.
    Raises Error USAGE where query heads are no multiple of the key and value heads, or a rank would have none."""
    if num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        refuse(
            "query heads do not divide into groups, one for each key and value head",
            where=where,
            which="heads",
            expected="a multiple of the key and value heads",
            got=f"{num_heads} query heads, {num_kv_heads} key and value heads",
        )
    if ranks > num_heads:
        refuse(
            "there are more ranks than heads, so some would have nothing to compute",
            where=where,
            which="heads",
            expected=f"at most {num_heads} ranks for {num_heads} heads",
            got=f"{ranks} ranks",
            hint="use ring attention, which has no limit by heads, or both on a grid of ranks",
        )
    size = num_heads // num_kv_heads
    q, start = [], 0
    for count in slice_sizes(num_heads, ranks):
        q.append(range(start, start + count))
        start += count
    kv = tuple(range(heads[0] // size, heads[-1] // size + 1) for heads in q)
    return HeadSplit(q=tuple(q), kv=kv, group_size=size)
