"""Batches of a loader, cut over the ranks that share each sequence."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import torch

from zeroth import _C
from zeroth.parallel._bytes import bytes_of
from zeroth.parallel.cut_batch import cut_batch, whole_batch
from zeroth.parallel.cuts import Layout

__all__ = ["SequenceBatches"]

_Batch = TypeVar("_Batch")
_END = object()


class SequenceBatches(Generic[_Batch]):
    """Wraps a loader of whole sequences: every rank of `group` takes the same samples and gets its part of each.

    Iterating gives dictionaries: input_ids, position_ids, labels and shift_labels [B, own length], and
    num_items_in_batch, which the model's loss divides its sum by: so a rank's loss is its part of the loss of the whole
    batch, and `model(**batch).loss` of transformers is right as it is. With `data`, that batch is the one of all ranks,
    and the mean over the data ranks, which ZeRO takes, is weighted by tokens. What else there is as cut_batch() says.

    `loader`: any iterable, a DataLoader for one. Its batches: mappings, or sequences whose values have `names`.
    `dealt`: "group": the loaders of a group's ranks give the same samples, as by
    DistributedSampler(..., num_replicas=data ranks, rank=data rank); that is checked, by a digest a batch. "rank": they
    give other samples, as by a sampler over all ranks; the group takes them one after the other, so there are as many
    batches as ranks for each of the loader's.
    `layout`, `multiple`, `pad_id`, `ignore_index`: as cut_batch() and whole_batch(). By default nothing is padded:
    parts may differ by one. `uneven`: "error", or "drop": all end with the first that has no more. `cut`: False gives
    whole samples, for a model that cuts them itself (split_sequence()).

    Collective and blocking, once a batch: one all_gather of 32 bytes a rank in the group, and one all_reduce in `data`.
    Raises Error: MISMATCH on all ranks of a group, with their numbers, for other samples and for loaders that end
    earlier; USAGE for what cannot be cut."""

    def __init__(
        self,
        loader: Iterable[_Batch],
        group: _C.Communicator,
        *,
        data: _C.Communicator | None = None,
        dealt: Literal["group", "rank"] = "group",
        names: Sequence[str] = ("input_ids", "labels"),
        layout: Layout = "contiguous",
        multiple: int = 1,
        pad_id: int = 0,
        ignore_index: int = -100,
        uneven: Literal["error", "drop"] = "error",
        cut: bool = True,
    ) -> None:
        for which, got, known in (("dealt", dealt, ("group", "rank")), ("uneven", uneven, ("error", "drop"))):
            if got not in known:
                raise self._error("USAGE", "there is no such choice", which, " or ".join(known), repr(got))
        self._loader, self._group, self._data = loader, group, data
        self._dealt, self._names, self._layout = dealt, tuple(names), layout
        self._multiple, self._pad_id, self._ignore_index = multiple, pad_id, ignore_index
        self._drops, self._cuts = uneven == "drop", cut

    def __len__(self) -> int:
        """Batches of this rank, if the loader has a length."""
        return len(self._loader) * (self._group.size if self._dealt == "rank" else 1)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self._loader)
        while True:
            batch = next(batches, _END)
            sample = None if batch is _END else self._named(batch)
            if self._ends(sample):
                return
            assert sample is not None
            if self._dealt == "group":
                yield self._part(sample)
                continue
            for turn in range(self._group.size):
                yield self._part(_shared(sample, turn, self._group))

    def _part(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        whole = whole_batch(sample, multiple=self._multiple, pad_id=self._pad_id, ignore_index=self._ignore_index)
        if "labels" in whole:
            counted = (whole["labels"] != self._ignore_index).sum().to(torch.float64).cpu()
            if self._data is not None and self._data.size > 1:
                self._data.all_reduce(counted)
                counted /= self._data.size
            whole["num_items_in_batch"] = counted.clamp(min=1.0)
        return cut_batch(whole, self._group.size, self._group.rank, self._layout) if self._cuts else whole

    def _ends(self, sample: Mapping[str, Any] | None) -> bool:
        """All ranks of the group, and then of `data`, hear what the others have."""
        digest = 0 if sample is None or self._dealt == "rank" else _digest(sample)
        length = 0 if sample is None else sum(one.numel() for one in sample.values() if isinstance(one, torch.Tensor))
        said = self._group.all_gather(torch.tensor([[sample is not None, digest, length, 0]], dtype=torch.int64))
        has = said[:, 0].tolist()
        if self._data is not None:
            has_data = self._data.all_gather(torch.tensor([min(has)])).tolist()
            if min(has_data) != max(has_data) and min(has) == max(has):
                if self._drops:
                    return True
                self._refuse_end(self._data, has_data)
        if min(has) != max(has) and not self._drops:
            self._refuse_end(self._group, has)
        if min(has) == 0:
            return True
        if self._dealt == "group" and len({tuple(row) for row in said[:, 1:3].tolist()}) > 1:
            own = said[self._group.rank, 1:3].tolist()
            others = [rank for rank, row in enumerate(said[:, 1:3].tolist()) if row != own]
            raise self._error(
                "MISMATCH",
                "ranks that share a sequence were given other samples",
                f"rank {self._group.rank}/{self._group.size} of {self._group.name}",
                "the same sample on all ranks of the group",
                f"another one on {_ranks(others)}",
                'deal samples by the data rank, or say dealt="rank"',
            )
        return False

    def _refuse_end(self, group: _C.Communicator, has: list[int]) -> None:
        raise self._error(
            "MISMATCH",
            "some ranks have no batch, others have",
            f"rank {group.rank}/{group.size} of {group.name}",
            "loaders of one length",
            f"none on {_ranks([rank for rank, one in enumerate(has) if not one])}",
            'uneven="drop" ends with the first that ends',
        )

    def _named(self, batch: Any) -> Mapping[str, Any]:
        if isinstance(batch, Mapping):
            return batch
        if isinstance(batch, torch.Tensor):
            batch = (batch,)
        if isinstance(batch, Sequence) and len(batch) <= len(self._names):
            return dict(zip(self._names, batch, strict=False))
        raise self._error(
            "USAGE",
            "a batch is of a form that has no names",
            "batch",
            f"a mapping, or up to {len(self._names)} values: {', '.join(self._names)}",
            f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, Sequence) else type(batch).__name__,
            "SequenceBatches(..., names=[...])",
        )

    @staticmethod
    def _error(code: str, message: str, which: str, expected: str, got: str, hint: str = "") -> _C.Error:
        return _C.make_error(
            code, message, where="parallel.sequence_batches", which=which, expected=expected, got=got, hint=hint
        )


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _digest(sample: Mapping[str, Any]) -> int:
    digest = hashlib.blake2b(digest_size=7)
    for name, value in sorted(sample.items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name}{value.dtype}{list(value.shape)}".encode())
            digest.update(bytes_of(value))
    return int.from_bytes(digest.digest())


_DTYPES = {
    str(dtype): dtype
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16)
}


def _shared(sample: Mapping[str, Any], root: int, group: _C.Communicator) -> dict[str, torch.Tensor]:
    """The root's tensors on all ranks. Values that are no tensors stay behind. All ranks refuse what does not
    travel."""
    tensors = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}
    about = json.dumps({name: [str(one.dtype), list(one.shape)] for name, one in tensors.items()}).encode()
    size = int(group.broadcast(torch.tensor([len(about)]), root))
    text = torch.tensor(list(about), dtype=torch.uint8) if group.rank == root else torch.empty(size, dtype=torch.uint8)
    described = json.loads(bytes(group.broadcast(text, root).tolist()))
    for name, (dtype, _) in described.items():
        if dtype not in _DTYPES:
            raise _C.make_error(
                "USAGE",
                "a tensor of a batch has a dtype that ranks do not exchange",
                where="parallel.sequence_batches",
                who=f"rank {root}/{group.size} of {group.name}",
                which=name,
                expected=", ".join(_DTYPES),
                got=dtype,
            )
    result = {}
    for name, (dtype, shape) in described.items():
        flat = torch.empty(shape, dtype=_DTYPES[dtype]) if group.rank != root else tensors[name].detach().cpu().clone()
        flat = flat.contiguous()
        group.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, root)
        result[name] = flat
    return result
