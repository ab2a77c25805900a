"""Errors of this package."""

from typing import NoReturn

from zeroth import _C

__all__ = ["refuse", "who"]


def who(group: _C.Communicator) -> str:
    """ "rank 1/4 of world/mesh0/sp", as other errors name a rank of a group"""
    return f"rank {group.rank}/{group.size} of {group.name}"


def refuse(
    message: str,
    *,
    where: str,
    code: str = "USAGE",
    who: str = "",
    which: str = "",
    expected: object = "",
    got: object = "",
    hint: str = "",
) -> NoReturn:
    """Raises Error `code`."""
    raise _C.make_error(
        code, message, where=where, who=who, which=which, expected=str(expected), got=str(got), hint=hint
    )
