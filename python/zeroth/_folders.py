"""Which engine of this program saves in which folder."""

import gc
import os
import pathlib
import weakref
from typing import TYPE_CHECKING

from zeroth import _C

if TYPE_CHECKING:
    from zeroth._engine import Engine

__all__ = ["inside", "leave", "place_of"]

_savers: "weakref.WeakValueDictionary[str, Engine]" = weakref.WeakValueDictionary()
"""open engines by the folder in which they save: checkpoints of two would take each other's place"""


def inside(*, folder: str | os.PathLike[str], name: str) -> str:
    """The folder, or the one inside that has the name. Raises Error USAGE for a name that leads elsewhere, and for one
    that a checkpoint could have."""
    if not name:
        return os.fspath(folder)
    if pathlib.PurePath(name).name != name or name.startswith(("step-", ".")):
        raise _C.make_error(
            "USAGE",
            "a name of an engine's checkpoints is none",
            where="python.save",
            which="name",
            expected='the name of a folder, such as "critic", which does not begin with "step-"',
            got=repr(name),
        )
    return os.path.join(folder, name)


def place_of(engine: "Engine", folder: str | os.PathLike[str], name: str) -> str:
    """The same for a save. Raises Error USAGE if another engine that is open has saved there."""
    place = inside(folder=folder, name=name)
    key = os.path.realpath(place)
    if _savers.get(key) not in (None, engine):
        gc.collect()  # one that nobody has any more may wait for it: its optimizer refers to it
    if _savers.get(key) not in (None, engine):
        raise _C.make_error(
            "USAGE",
            "another engine of this program saves in this folder",
            where="python.save",
            which=place,
            hint='give each engine a name: save(folder, name="critic") and load(folder, name="critic"); '
            "or close() the other one",
        )
    _savers[key] = engine
    return place


def leave(engine: "Engine") -> None:
    """It is closed."""
    for key in [key for key, saver in _savers.items() if saver is engine]:
        del _savers[key]
