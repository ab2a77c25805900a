"""Checkpoints of a folder: what is there, whether it is whole, what may go."""

import dataclasses
import datetime
import os

from zeroth import _C
from zeroth.ckpt.reader import accumulation_of, is_checkpoint
from zeroth.ckpt.refusals import refused

__all__ = ["Entry", "entries", "prune", "verify"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A folder with the name of a checkpoint."""

    path: str
    step: int
    micro_step: int
    """of the step after it, if it was saved between micro-steps; else 0"""
    whole: bool
    """its manifest is, and every file is there with its size; digests are verify()'s"""
    why: str
    """it is not whole"""
    world_size: int
    """ranks that wrote it; 0 if it is not whole, as the following"""
    plan: str
    optimizer: str
    num_params: int
    elements: int
    """of the parameters"""
    bytes: int
    """of all files"""
    commit: int
    """how manieth of the folder's commits it is: the newest checkpoint has the largest; 0 if none was counted"""
    base: str
    """folder beside it that has its weights which never train; "" if they are in its files"""
    date: str
    """when it was committed, ISO 8601 with the zone"""


def entries(path: str | os.PathLike[str]) -> list[Entry]:
    """Checkpoints of a folder, the last commit first; or the one that `path` is. Raises Error IO, and CHECKPOINT
    if there is no such folder."""
    path = os.fspath(path)
    if not os.path.isdir(path):
        raise refused("there is no such folder", code="IO", which=path)
    if is_checkpoint(path):
        return [_entry(path, -1)]
    return [_entry(entry, step) for step, entry in _C.list_checkpoints(path)]


def _entry(path: str, step: int) -> Entry:
    try:
        manifest = _C.read_manifest(path)
    except _C.Error as error:
        if error.code not in ("CHECKPOINT", "IO"):
            raise
        return Entry(
            path=path,
            step=step,
            micro_step=0,
            whole=False,
            why=error.message,
            world_size=0,
            plan="",
            optimizer="",
            num_params=0,
            elements=0,
            bytes=0,
            commit=0,
            base="",
            date=_date(path),
        )
    why = _C.why_torn(path)
    return Entry(
        path=path,
        step=manifest.step,
        micro_step=accumulation_of(manifest, path).get("micro_step", 0),
        whole=not why,
        why=why,
        world_size=manifest.world,
        plan=manifest.plan,
        optimizer=manifest.optimizer,
        num_params=len(manifest.params),
        elements=sum(_product(param.shape) for param in manifest.params),
        bytes=sum(file.bytes for file in manifest.files) + os.path.getsize(os.path.join(path, "manifest.json")),
        commit=manifest.commit,
        base=manifest.base,
        date=_date(os.path.join(path, "manifest.json")),
    )


def _product(shape: list[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def _date(path: str) -> str:
    try:
        seconds = os.path.getmtime(path)
    except OSError:
        return ""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def verify(path: str | os.PathLike[str]) -> list[_C.Damage]:
    """Reads every byte of a checkpoint, compares it with its digest, and looks whether every element of every state is
    there once. Empty: all is well. Blocks. Raises Error CHECKPOINT if its manifest is not whole, and IO."""
    return _C.find_damage(os.fspath(path))


def prune(folder: str | os.PathLike[str], *, keep_last: int, keep_every: int = 0, dry_run: bool = False) -> list[str]:
    """Removes all but the `keep_last` checkpoints of a folder that were committed last, and those of steps that are
    multiples of `keep_every` (0: none), as Engine.save() does. Those that are not whole do not count, and stay; so the
    last whole one stays, too. Nothing with a name of others goes. The paths of what is gone, or, with `dry_run`, would
    go. Raises Error USAGE, IO."""
    if keep_last < 1 or keep_every < 0:
        raise refused(
            "retention cannot be this",
            code="USAGE",
            which="keep_last, keep_every",
            expected="at least 1, and at least 0",
            got=f"{keep_last}, {keep_every}",
        )
    if not os.path.isdir(folder):
        raise refused("there is no such folder", code="IO", which=os.fspath(folder))
    return _C.prune_checkpoints(os.fspath(folder), keep_last, keep_every, dry_run)
