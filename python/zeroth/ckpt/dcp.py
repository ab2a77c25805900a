"""torch.distributed.checkpoint (DCP), read: the files of any number of ranks. Named as write_dcp() says."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zeroth._json_values import from_json
from zeroth.ckpt import hypers, optimizer_state
from zeroth.ckpt.contents import Contents, Lazy, weight_of
from zeroth.ckpt.facts import KEY, adopt_facts, tied_names
from zeroth.ckpt.huggingface import is_buffer
from zeroth.ckpt.inert_pickle import Inert, load_inert_bytes
from zeroth.ckpt.refusals import io_error, refused
from zeroth.ckpt.torch_file import load_plain_bytes

__all__ = ["is_dcp", "read_dcp"]

_METADATA = ".metadata"
_MOST_METADATA_BYTES = 1 << 31
_STATE = re.compile(
    r"^(?:.*\.)?state\.(?P<name>.+)\.(?P<state>step|exp_avg|exp_avg_sq|momentum_buffer|max_exp_avg_sq)$"
)
_GROUP = re.compile(r"^(?:.*\.)?param_groups\.(?P<place>.+)$")


def is_dcp(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _METADATA))


def read_dcp(path: str, *, model_prefix: str | None = None) -> Contents:
    """Its .metadata is a pickle, which is read without making objects of its classes (inert_pickle.py). `model_prefix`:
    of the keys of weights; None: "model." if they stood in a dictionary "model". Raises Error CHECKPOINT, IO."""
    folder = _Folder(path)
    contents = Contents(origin=path, kind="dcp", params=[])
    named = optimizer_state.NamedState(state={}, groups=[])
    flat_groups: dict[str, Any] = {}
    weights: dict[str, Lazy] = {}
    facts = None
    for key in folder.keys():
        state = _STATE.match(key)
        group = _GROUP.match(key)
        if state is not None:
            value = folder.tensor(key) if folder.is_tensor(key) else folder.value(key)
            named.state.setdefault(state["name"], {})[state["state"]] = value
        elif group is not None:
            flat_groups[group["place"]] = folder.value(key)
        elif folder.is_tensor(key):
            weights[key] = folder.tensor(key)
        elif key in ("step", "global_step"):
            contents.step = int(optimizer_state.scalar(folder.value(key)) or 0)
        elif key == KEY:
            facts = folder.value(key)
        elif key == "client_state":
            contents.user["client"] = _client_of(folder.value(key))
        else:
            contents.left_out.append(key)
    tied = tied_names(facts, path)
    prefix = model_prefix
    if prefix is None:
        prefix = _prefix_of(folder, weights)
    for key, lazy in weights.items():
        if not key.startswith(prefix):
            contents.left_out.append(key)
            continue
        name = key[len(prefix) :]
        if name in tied and prefix + tied[name] in weights:
            continue
        if is_buffer(name, lazy.dtype):
            contents.buffers[name] = lazy
        else:
            contents.params.append(weight_of(name, lazy))
    if not contents.params:
        raise refused("a DCP has no weights", which=path, expected=f"tensors under {prefix!r}", hint="--model-prefix")
    _adopt(contents, named, flat_groups)
    adopt_facts(contents, facts)
    return contents


def _prefix_of(folder: "_Folder", weights: Iterable[str]) -> str:
    """A name that begins with "model." is something else than a dictionary of that name; DCP says which it was."""
    for key in weights:
        path = folder.path_of(key)
        inside = path[0] == "model" and len(path) > 1 if path else key.startswith("model.")
        if inside and (path or all(other.startswith("model.") for other in weights)):
            return "model."
    return ""


def _client_of(value: Any) -> Any:
    """A JSON text, as write_dcp() writes it, or a plain value of others."""
    try:
        return from_json(value, "client_state")
    except (ValueError, TypeError):
        return value


def _adopt(contents: Contents, named: optimizer_state.NamedState, flat: Mapping[str, Any]) -> None:
    """`flat`: "0.lr" and values, or, where DCP has kept them whole, a list of groups."""
    groups: dict[str, dict[str, Any]] = {}
    for place, value in flat.items():
        number, _, rest = place.partition(".")
        if number.isdigit() and rest:
            groups.setdefault(number, {})
            _put(groups[number], rest, value)
    for number in sorted(groups, key=int):
        group = groups[number]
        members = group.get("params", [])
        if isinstance(members, dict):
            members = [members[index] for index in sorted(members, key=int)]
        betas = group.get("betas")
        if isinstance(betas, dict):
            group["betas"] = [betas[index] for index in sorted(betas, key=int)]
        which = f"{contents.origin}, group {number}"
        named.groups.append((hypers.from_torch(group, which), [str(name) for name in members]))
    named.kind = optimizer_state.kind_of(groups.values())
    if named.state or named.groups:
        optimizer_state.adopt(contents, named)


def _put(into: Any, place: str, value: Any) -> None:
    """Under "a.b" as into["a"]["b"]."""
    first, _, rest = place.partition(".")
    if rest:
        _put(into.setdefault(first, {}), rest, value)
    else:
        into[first] = value


class _Folder:
    """The files of a DCP, by its metadata."""

    def __init__(self, path: str) -> None:
        self.path = path
        where = os.path.join(path, _METADATA)
        try:
            with open(where, "rb") as file:
                data = file.read(_MOST_METADATA_BYTES)
        except OSError as error:
            raise io_error("a file cannot be read", error, where) from error
        metadata = load_inert_bytes(data, where)
        about = metadata.get("state_dict_metadata") if isinstance(metadata, Inert) else None
        places = metadata.get("storage_data") if isinstance(metadata, Inert) else None
        if not isinstance(about, dict) or not isinstance(places, dict):
            raise refused("a DCP has no metadata that is understood", which=where)
        self._about: dict[str, Any] = about
        paths = metadata.get("planner_data")
        self._paths: dict[str, Any] = paths if isinstance(paths, dict) else {}
        self._places: dict[str, list[tuple[tuple[int, ...], Inert]]] = {}
        for index, info in places.items():
            offset = tuple(index.get("offset") or ())
            self._places.setdefault(str(index.get("fqn")), []).append((offset, info))

    def path_of(self, key: str) -> tuple[Any, ...]:
        """Keys of the dictionaries in which it stood, one in the other; empty if nobody knows."""
        path = self._paths.get(key)
        return path if isinstance(path, tuple) else ()

    def keys(self) -> list[str]:
        return list(self._about)

    def is_tensor(self, key: str) -> bool:
        return isinstance(self._about[key], Inert) and self._about[key].name == "TensorStorageMetadata"

    def value(self, key: str) -> Any:
        """What is no tensor, or one of one element."""
        if self.is_tensor(key):
            return self.tensor(key).read()
        ((_, info),) = self._one(key)
        return self._load(info, key)

    def tensor(self, key: str) -> Lazy:
        about = self._about[key]
        properties = about.get("properties")
        dtype = (
            properties.state[0] if isinstance(getattr(properties, "state", None), tuple) else properties.get("dtype")
        )
        shape = about.get("size")
        which = f"{self.path}, {key}"
        if not isinstance(dtype, torch.dtype) or not isinstance(shape, torch.Size):
            raise refused("a tensor of a DCP is not described", which=which)
        chunks = [(tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))) for chunk in about.get("chunks") or []]
        return Lazy(shape=tuple(shape), dtype=dtype, read=lambda: self._assemble(key, tuple(shape), dtype, chunks))

    def _one(self, key: str) -> Sequence[tuple[tuple[int, ...], Inert]]:
        places = self._places.get(key, [])
        if len(places) != 1:
            raise refused("a value of a DCP is in no file, or in several", which=f"{self.path}, {key}")
        return places

    def _assemble(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        chunks: list[tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> torch.Tensor:
        which = f"{self.path}, {key}"
        infos = dict(self._places.get(key, []))
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for offsets, sizes in chunks:
            fits = len(offsets) == len(sizes) == len(shape) and all(
                0 <= begin and size >= 0 and begin + size <= extent
                for begin, size, extent in zip(offsets, sizes, shape, strict=True)
            )
            info = infos.get(offsets)
            if not fits or info is None:
                raise refused("a part of a tensor of a DCP is in no file", which=which, got=str(offsets))
            part = self._load(info, key)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
                raise refused("a part of a tensor of a DCP is another tensor", which=which, got=str(offsets))
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
            whole[place] = part
            covered += part.numel()
        if covered != whole.numel():
            raise refused(
                "a tensor of a DCP is not whole", which=which, expected=f"{whole.numel()} elements", got=str(covered)
            )
        return whole

    def _load(self, info: Inert, key: str) -> Any:
        name, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        which = f"{self.path}, {key}"
        if not isinstance(name, str) or os.path.basename(name) != name or name in ("", ".", ".."):
            raise refused("a DCP names a file elsewhere", which=which, got=str(name))
        if not isinstance(offset, int) or not isinstance(length, int) or offset < 0 or length < 0:
            raise refused("a DCP has a place that cannot be", which=which, got=f"{offset}, {length}")
        if info.get("transform_descriptors"):
            raise refused("a DCP is compressed", which=which, got=str(info.get("transform_descriptors")))
        path = os.path.join(self.path, name)
        try:
            with open(path, "rb") as file:
                if offset + length > os.fstat(file.fileno()).st_size:
                    raise refused("a file of a DCP is cut", which=which, got=path)
                file.seek(offset)
                data = file.read(length)
        except OSError as error:
            raise io_error("a file cannot be read", error, path) from error
        return load_plain_bytes(data, which)
