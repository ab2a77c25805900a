"""Groups of every size, made once: a batch plan chooses among them each step."""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from zeroth import _C
from zeroth.parallel._bytes import bytes_of
from zeroth.parallel.batch_plan import BatchPlan, Work, group_sizes

__all__ = ["LengthGroups"]


class LengthGroups:
    """For P ranks the aligned groups of each power of two that divides P, and of all of them: for eight ranks those of
    1, 2, 4 and 8. Of each size a rank is in one.

    `inner`: axes of the mesh inside, {"tp": 2} for one: then P is the number of ranks by theirs, and ranks that differ
    along them only are in groups of their own, with the same plan. Collective and blocking: all ranks of the world make
    it, once; log2(P) groups are connected. Raises Error as World.mesh()."""

    def __init__(self, world: _C.World, inner: Mapping[str, int] | None = None) -> None:
        inside = 1
        for size in (inner or {}).values():
            inside *= size
        if inside < 1 or world.size % inside != 0:
            raise _C.make_error(
                "USAGE",
                "inner axes do not divide the ranks",
                where="parallel.length_groups",
                which=", ".join(f"{name}={size}" for name, size in (inner or {}).items()),
                expected=f"a divisor of {world.size}",
                got=str(inside),
            )
        self.ranks = world.size // inside
        """P"""
        self.sizes = group_sizes(self.ranks)
        """of groups, rising"""
        widths = [self.sizes[0], *(size // below for below, size in zip(self.sizes, self.sizes[1:], strict=False))]
        names = [f"len{size}" for size in self.sizes]
        self.mesh = world.mesh(dict(zip(reversed(names), reversed(widths), strict=True)) | dict(inner or {}))
        """axes len<size>, and the inner ones"""
        self._groups = {
            size: self.mesh.axes(names[1 : place + 1] or names[:1]) for place, size in enumerate(self.sizes)
        }
        self.rank = self._groups[self.sizes[-1]].rank
        """of this process, from 0 to P - 1"""

    def of_size(self, size: int) -> _C.Communicator:
        """This rank's group of that size. Raises Error USAGE if there is none."""
        if size not in self._groups:
            raise _C.make_error(
                "USAGE",
                "there are no groups of this size",
                where="parallel.length_groups",
                expected=", ".join(map(str, self.sizes)),
                got=str(size),
            )
        return self._groups[size]

    def of_work(self, work: Work) -> _C.Communicator:
        """The group that computes a row in which this rank has a part."""
        group = self.of_size(work.size)
        if self.rank not in work.ranks or work.begin % work.size != 0:
            raise _C.make_error(
                "USAGE",
                "this rank has no part in a row",
                where="parallel.length_groups",
                who=f"rank {self.rank}/{self.ranks}",
                expected=f"one of {list(work.ranks)}",
            )
        return group

    def require_same(
        self, plan: BatchPlan, sequences: Sequence[Mapping[str, torch.Tensor]], options: Sequence[object] = ()
    ) -> None:
        """Raises Error, on all ranks: MISMATCH, with their numbers, if they have other plans, batches or options; USAGE
        for a plan of other ranks. Collective: one all_gather of 24 bytes a rank."""
        group = self.of_size(self.ranks)
        batch = hashlib.blake2b(digest_size=7)
        for one in sequences:
            for name, value in sorted(one.items()):
                if not isinstance(value, torch.Tensor):
                    batch.update(f"{name}{value!r}".encode())
                    continue
                batch.update(f"{name}{value.dtype}{list(value.shape)}".encode())
                batch.update(bytes_of(value))
            batch.update(b"/")
        texts = [repr((plan.ranks, plan.works)), repr(tuple(options))]
        plans, said = (hashlib.blake2b(text.encode(), digest_size=7) for text in texts)
        own = [int.from_bytes(one.digest()) for one in (plans, batch, said)]
        every = group.all_gather(torch.tensor([own])).tolist()
        for place, what in enumerate(("plans", "batches", "options")):
            others = [rank for rank, row in enumerate(every) if row[place] != every[group.rank][place]]
            if others:
                raise _C.make_error(
                    "MISMATCH",
                    f"ranks have other {what}",
                    where="parallel.run_plan",
                    who=f"rank {group.rank}/{group.size} of {group.name}",
                    expected="the same on all ranks",
                    got=f"others on rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}",
                )
        if plan.ranks != self.ranks:
            raise _C.make_error(
                "USAGE",
                "a plan is of another number of ranks",
                where="parallel.run_plan",
                expected=str(self.ranks),
                got=str(plan.ranks),
            )
