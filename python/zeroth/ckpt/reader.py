"""Checkpoint: a checkpoint of Zeroth as logical tensors."""

import json
import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from zeroth import _C
from zeroth._json_values import from_json
from zeroth._names import plain
from zeroth.ckpt import hypers
from zeroth.ckpt.contents import WEIGHT, Contents, Hypers, Lazy, Param
from zeroth.ckpt.dtypes import dtype_of
from zeroth.ckpt.refusals import refused

__all__ = ["Checkpoint", "accumulation_of", "is_checkpoint", "open_checkpoint"]


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """A folder with a manifest, whole or not."""
    return os.path.isfile(os.path.join(path, "manifest.json"))


class Checkpoint:
    """An open checkpoint. It reads the ranges of the files that have what is wanted, and compares every MiB that it
    reads with its digest. For one thread at a time. Methods that read block, and raise Error CHECKPOINT where bytes
    are not those that were written, and IO."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`path`: a checkpoint, not the folder around it; see open()."""
        self.path = os.fspath(path)
        self._reader = _C.CheckpointReader(self.path)
        self.manifest = self._reader.manifest
        self._params = {plain(param.name): param for param in self.manifest.params}
        self._name_of = {plain(alias): name for name, param in self._params.items() for alias in param.aliases}
        self._name_of |= {name: name for name in self._params}
        self._states: dict[str, dict[str, _C.CheckpointState]] = {param.name: {} for param in self.manifest.params}
        for one in self._reader.ranges():  # what the files have, of every rank
            name, _, state = one.key.rpartition("/")
            if name in self._states and "@" not in state:
                self._states[name].setdefault(state, _C.CheckpointState(state, one.dtype, one.shape))
        for param in self.manifest.params:
            if math.prod(param.shape) == 0:  # engines write nothing of it
                self._states[param.name].setdefault(WEIGHT, _C.CheckpointState(WEIGHT, param.dtype, param.shape))

    @property
    def names(self) -> list[str]:
        """Parameters, each once; tied ones by their first name, all without the wrappers of torch.compile()."""
        return list(self._params)

    @property
    def buffers(self) -> list[str]:
        return [plain(extra.name) for extra in self.manifest.extras]

    @property
    def step(self) -> int:
        """Committed updates."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return self.manifest.world

    @property
    def user(self) -> dict[str, Any]:
        """What Engine.save() took of its caller, client_state under "client"."""
        return _user(self.manifest, self.path)

    @property
    def client_state(self) -> Any:
        return self.user.get("client")

    @property
    def configuration(self) -> dict[str, Any]:
        """Of the engine that wrote it; empty if there was none."""
        return json.loads(self.manifest.configuration) if self.manifest.configuration else {}

    @property
    def groups(self) -> list[Hypers]:
        """Hyper-parameters of each group."""
        return [hypers.from_json(text, self.path) for text in self.manifest.groups]

    def param(self, name: str) -> _C.CheckpointParam:
        """By any of its names. Raises Error USAGE."""
        name = plain(name)
        if name not in self._name_of:
            raise refused("a checkpoint has no such parameter", code="USAGE", which=f"{self.path}, {name}")
        return self._params[self._name_of[name]]

    def states(self, name: str) -> list[str]:
        """ "weight", "exp_avg", ..."""
        own = self._states[self.param(name).name]
        return sorted(own, key=lambda state: (state != WEIGHT, state))

    def tensor(self, name: str, state: str = WEIGHT) -> torch.Tensor:
        """A whole state of a parameter, in the dtype of the file: the float32 master of a bfloat16 weight. Raises Error
        USAGE for a name or a state that is not there."""
        return self._lazy(name, state).read()

    def slice(self, name: str, begin: int, end: int, state: str = WEIGHT) -> torch.Tensor:
        """Elements [begin, end) of it, row major, in one dimension. Raises Error USAGE for others than it has."""
        found = self._state(name, state)
        return self._read(f"{self.param(name).name}/{state}", found, begin, end)

    def buffer(self, name: str) -> torch.Tensor:
        """Raises Error USAGE for a name that is not there."""
        for extra in self.manifest.extras:
            if plain(extra.name) == plain(name):
                return self._read(f"extra/{extra.name}", extra, 0, math.prod(extra.shape)).reshape(extra.shape)
        raise refused("a checkpoint has no such buffer", code="USAGE", which=f"{self.path}, {name}")

    def pieces(self, name: str, state: str = WEIGHT, elements: int = 1 << 22) -> Iterator[torch.Tensor]:
        """The state in parts of so many elements, in order: bounded memory for any size."""
        total = math.prod(self._state(name, state).shape)
        for begin in range(0, total, elements):
            yield self.slice(name, begin, min(begin + elements, total), state)

    def contents(self) -> Contents:
        """All of it, for a target. It reads from this object."""
        params = [
            Param(
                name=plain(param.name),
                shape=tuple(param.shape),
                dtype=dtype_of(param.dtype, f"{self.path}, {param.name}"),
                states={state: self._lazy(param.name, state) for state in self.states(param.name)},
                trainable=param.trainable,
                group=param.group,
                updates=param.updates,
                aliases=[plain(alias) for alias in param.aliases],
            )
            for param in self.manifest.params
        ]
        for param in params:
            if WEIGHT not in param.states:
                raise refused("a parameter of a checkpoint has no weight", which=f"{self.path}, {param.name}")
        buffers = {
            plain(extra.name): Lazy(
                shape=tuple(extra.shape),
                dtype=dtype_of(extra.dtype, f"{self.path}, {extra.name}"),
                read=lambda name=extra.name: self.buffer(name),  # type: ignore[misc]
            )
            for extra in self.manifest.extras
        }
        return Contents(
            origin=self.path,
            kind="zeroth",
            params=params,
            buffers=buffers,
            groups=self.groups,
            optimizer=self.manifest.optimizer,
            step=self.step,
            user=self.user,
            accumulation=accumulation_of(self.manifest, self.path),
            loss_scaler=hypers.scaler_from_json(self.manifest.loss_scaler, self.path),
            manifest=self.manifest,
        )

    def _state(self, name: str, state: str) -> _C.CheckpointState:
        own = self._states[self.param(name).name]
        if state not in own:
            raise refused(
                "a parameter has no such state in a checkpoint",
                code="USAGE",
                which=f"{self.path}, {name}",
                expected=", ".join(own),
                got=state,
            )
        return own[state]

    def _lazy(self, name: str, state: str) -> Lazy:
        found = self._state(name, state)
        key = f"{self.param(name).name}/{state}"
        elements = math.prod(found.shape)
        return Lazy(
            shape=tuple(found.shape),
            dtype=dtype_of(found.dtype, f"{self.path}, {key}"),
            read=lambda: self._read(key, found, 0, elements).reshape(found.shape),
        )

    def _read(self, key: str, about: _C.CheckpointState, begin: int, end: int) -> torch.Tensor:
        dtype = dtype_of(about.dtype, f"{self.path}, {key}")
        if begin < 0 or end < begin or end > math.prod(about.shape):
            raise refused(
                "a range is none of a state",
                code="USAGE",
                which=f"{self.path}, {key}",
                expected=f"elements of [0, {math.prod(about.shape)})",
                got=f"[{begin}, {end})",
            )
        values = torch.empty(end - begin, dtype=dtype)
        if end == begin:
            return values
        self._reader.read(key, begin, end, values.view(torch.uint8))
        return values


def accumulation_of(manifest: _C.Manifest, path: str) -> dict[str, Any]:
    """Of a step that was under way; empty between steps. Raises Error CHECKPOINT."""
    if not manifest.accumulation:
        return {}
    try:
        said = json.loads(manifest.accumulation)
        return {**said, "micro_step": int(said["micro_step"]), "micro_steps": int(said["micro_steps"])}
    except (ValueError, TypeError, KeyError) as error:
        raise refused("the accumulation of a checkpoint cannot be read", which=path, got=repr(error)) from error


def _user(manifest: _C.Manifest, path: str) -> dict[str, Any]:
    if not manifest.user:
        return {}
    try:
        user = from_json(manifest.user, path)
    except ValueError as error:
        raise refused("what the caller saved is no JSON", which=path, got=str(error)) from error
    return user if isinstance(user, dict) else {"client": user}


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """`path`: a checkpoint, or a folder with checkpoints, of which the newest whole one is taken. Raises Error
    CHECKPOINT if there is none."""
    if is_checkpoint(path):
        return Checkpoint(path)
    skipped = []
    for _, entry in _C.list_checkpoints(os.fspath(path)):
        try:
            return Checkpoint(entry)
        except _C.Error as error:
            if error.code != "CHECKPOINT" and error.code != "IO":
                raise
            skipped.append(str(error))
    raise refused(
        "there is no checkpoint",
        which=os.fspath(path),
        expected="a checkpoint, or a folder with checkpoints",
        got="; ".join(skipped) or "none",
    )
