"""Which keys each query of a sequence sees, without a matrix of the whole sequence.

Shapes: b batch, h heads, q queries, k keys; positions count in the whole sequence, whoever has the token.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch

from zeroth.parallel._refuse import refuse

__all__ = ["SequenceMask", "documents_of", "documents_of_boundaries"]

Index = torch.Tensor
IndexFunction = Callable[[Index, Index, Index, Index], torch.Tensor]
"""of batch, head, query and key indices that broadcast; True: seen"""
Block = Literal["none", "all", "causal"] | torch.Tensor
"""what queries of one range see of keys of another: nothing, everything, for equal ranges those up to their own
position, or [b or 1, 1, q, k] of bool"""

_KEPT_BYTES = 64 << 20
"""a mask keeps what it has computed up to so many bytes: all layers ask the same"""


@dataclasses.dataclass(slots=True, eq=False)
class SequenceMask:
    """A mask over positions of the whole sequence; `a & b` sees what both see. Ranks that share a sequence must have
    equal masks. Not to be changed once it is in use."""

    is_causal: bool = False
    """a query sees no later key"""
    functions: tuple[IndexFunction, ...] = ()
    """all of them must say True"""
    batch: int = 1
    """rows of the functions' result; 1: all sequences of the batch are alike"""
    _blocks: dict[tuple[range, range], Block] = dataclasses.field(default_factory=dict, repr=False)
    _bytes: int = 0

    @classmethod
    def causal(cls) -> "SequenceMask":
        return cls(is_causal=True)

    @classmethod
    def window(cls, size: int) -> "SequenceMask":
        """A query sees its own and the `size` - 1 positions before it, as Mistral's sliding window does."""
        return cls(is_causal=True, functions=(lambda b, h, q, k: k > q - size,))

    @classmethod
    def documents(cls, documents: torch.Tensor) -> "SequenceMask":
        """Queries see keys of their own document. documents: int [1 or b, sequence], the number of each token's."""
        return cls(
            functions=(lambda b, h, q, k: documents[_row(documents, b), q] == documents[_row(documents, b), k],),
            batch=documents.shape[0],
        )

    @classmethod
    def keys(cls, kept: torch.Tensor) -> "SequenceMask":
        """Only keys where kept (bool [1 or b, sequence]) are seen: padding is not. A query that sees nothing gets 0."""
        return cls(functions=(lambda b, h, q, k: kept[_row(kept, b), k],), batch=kept.shape[0])

    @classmethod
    def matrix(cls, seen: torch.Tensor) -> "SequenceMask":
        """seen: bool [1 or b, 1, sequence, sequence], the same for all heads."""
        if seen.dim() != 4 or seen.shape[1] != 1 or seen.dtype != torch.bool:
            refuse(
                "a matrix of a mask has another form",
                where="parallel.SequenceMask.matrix",
                which="seen",
                expected="bool [1 or batch, 1, sequence, sequence]",
                got=f"{seen.dtype} {list(seen.shape)}",
                hint="what differs between heads is a bias",
            )
        return cls(functions=(lambda b, h, q, k: seen[_row(seen, b), 0, q, k],), batch=seen.shape[0])

    def __and__(self, other: "SequenceMask") -> "SequenceMask":
        return SequenceMask(
            self.is_causal or other.is_causal, self.functions + other.functions, max(self.batch, other.batch)
        )

    @property
    def is_plain(self) -> bool:
        """Nothing but causal or not."""
        return not self.functions

    def may_see(self, queries: range, keys: range) -> bool:
        """False: no query of the range sees a key of the other, known without a look at the functions."""
        return len(queries) > 0 and len(keys) > 0 and not (self.is_causal and queries[-1] < keys[0])

    def block(self, queries: range, keys: range, device: torch.device | None = None) -> Block:
        """What queries at these positions see of keys at those."""
        if not self.may_see(queries, keys):
            return "none"
        if self.is_plain:
            if not self.is_causal or queries[0] >= keys[-1]:
                return "all"
            if queries == keys:
                return "causal"
        key = (queries, keys)
        if key not in self._blocks:
            block = _shortened(self._evaluate(queries, keys, device))
            size = block.numel() if isinstance(block, torch.Tensor) else 0
            if self._bytes + size > _KEPT_BYTES:
                return block
            self._bytes += size
            self._blocks[key] = block
        return self._blocks[key]

    def _evaluate(self, queries: range, keys: range, device: torch.device | None) -> torch.Tensor:
        q = torch.arange(queries.start, queries.stop, device=device)[None, None, :, None]
        k = torch.arange(keys.start, keys.stop, device=device)[None, None, None, :]
        b = torch.arange(self.batch, device=device)[:, None, None, None]
        h = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        seen = (
            (k <= q) if self.is_causal else torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=device)
        )
        for function in self.functions:
            seen = seen & function(b, h, q, k)
        return seen


def _row(table: torch.Tensor, b: Index) -> Index:
    return b if table.shape[0] > 1 else b * 0


def _shortened(seen: torch.Tensor) -> Block:
    if not bool(seen.any()):
        return "none"
    return "all" if bool(seen.all()) else seen


def documents_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Number of each token's document, where position_ids (int [b, sequence]) of packed documents start again; None if
    no row has more than one. The rule of transformers: a step other than +1 starts a document."""
    steps = torch.diff(position_ids, dim=-1) != 1
    if not bool(steps.any()):
        return None
    return torch.nn.functional.pad(steps.cumsum(-1), (1, 0))


def documents_of_boundaries(boundaries: torch.Tensor, length: int) -> torch.Tensor:
    """Number of each token's document, int64 [1, length], from boundaries 0, ..., length ("cu_seqlens")."""
    bounds = boundaries.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
        refuse(
            "boundaries of documents do not fit the sequence",
            where="parallel.documents",
            which="boundaries",
            expected=f"rising from 0 to {length}, the tokens of the whole sequence",
            got=str(bounds[:8])[:-1] + (", ...]" if len(bounds) > 8 else "]"),
        )
    sizes = torch.diff(boundaries.to(torch.int64))
    return torch.repeat_interleave(torch.arange(len(sizes), device=boundaries.device), sizes)[None]
