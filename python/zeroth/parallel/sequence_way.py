"""How the ranks of sp share attention: what a configuration or a call of parallelize() says."""

import dataclasses
from typing import Any

from torch import nn

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.parallel.split import SplitModel, split_sequence

__all__ = ["SequenceWay"]

_WHERE = "parallel.parallelize"


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceWay:
    """A frozen value."""

    method: str
    """ulysses, ring or grid"""
    order: str
    """ring or token"""
    ulysses: int
    """ranks inside of a grid; 0: the largest divisor of sp below it"""

    @staticmethod
    def of(config: _C.Config, **said: Any) -> "SequenceWay":
        """What a call says, else the configuration."""
        return SequenceWay(**{**config.sequence, **{key: value for key, value in said.items() if value is not None}})

    def require(self, sp: int) -> None:
        """Raises Error CONFIG for a grid that is none of `sp` ranks, and for words without a meaning there."""
        for which, value, choices in (
            ("method", self.method, ("ulysses", "ring", "grid")),
            ("order", self.order, ("ring", "token")),
        ):
            if value not in choices:
                refuse(f"there is no such {which}", where=_WHERE, which=which, expected=", ".join(choices), got=value)
        if self.method == "grid":
            fits = [inside for inside in range(1, sp + 1) if sp % inside == 0]
            if sp > 1 and self.ulysses not in (0, *fits):
                refuse(
                    "a grid does not fit the ranks that share a sequence",
                    code="CONFIG",
                    where=_WHERE,
                    which="ulysses, /zeroth/sequence/ulysses",
                    expected=f"a divisor of sp={sp}: {', '.join(map(str, fits))}",
                    got=self.ulysses,
                )
        elif self.ulysses != 0 or (self.method == "ulysses" and self.order != "ring"):
            refuse(
                "the way of a sequence has numbers or orders that its method does not use",
                code="CONFIG",
                where=_WHERE,
                which="/zeroth/sequence",
                expected='ulysses with method "grid", order "token" with "ring" and "grid"',
                got=f"method {self.method}, ulysses {self.ulysses}, order {self.order}",
            )

    def split(self, model: nn.Module, world: _C.World, mesh: _C.Mesh, config: _C.Config) -> SplitModel:
        """split_sequence() over the axis sp. A grid's groups are made here: a call of all ranks."""
        sp = mesh.axis("sp")
        if self.method != "grid":
            return split_sequence(model, sp, self.method, order=self.order)  # type: ignore[arg-type]
        inside = self.ulysses or max(one for one in range(1, sp.size) if sp.size % one == 0)
        axes: dict[str, int] = {}
        for name, size in mesh.sizes.items():  # sp is cut in two, Ulysses fastest
            axes |= {"ring": size // inside, "ulysses": inside} if name == "sp" else {name: size}
        grid = world.mesh(axes, config)
        return split_sequence(
            model,
            sp,
            "grid",
            order=self.order,  # type: ignore[arg-type]
            ulysses=grid.axis("ulysses"),
            ring=grid.axis("ring"),
        )
