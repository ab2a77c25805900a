"""Checkpoints of DeepSpeed's ZeRO, stages 0 to 3: mp_rank_*_model_states.pt and *_optim_states.pt of all ranks. No
DeepSpeed is needed, and none of its objects is made (inert_pickle.py).

    stage 1, 2   a flat row a parameter group: parameters one after the other, cut into equal parts, one a rank
    stage 3      every parameter cut into equal parts, one a rank; a rank's row has its parts one after the other
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zeroth import _C
from zeroth.ckpt import hypers, optimizer_state
from zeroth.ckpt.contents import WEIGHT, Contents, Hypers, Lazy, Param, of_tensor
from zeroth.ckpt.inert_pickle import Inert, load_inert
from zeroth.ckpt.refusals import io_error, refused

__all__ = ["adam_w_of", "is_deepspeed", "model_files_of", "read_deepspeed", "read_model_states", "scaler_of"]

_OPTIMIZER_FILE = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_FILE = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info", "num_experts", "expert_parallel_size"),
}


def is_deepspeed(path: str) -> bool:
    folder = _tagged(path)
    return folder is not None and any(_MODEL_FILE.match(name) for name in os.listdir(folder))


def _tagged(path: str) -> str | None:
    """The folder with the files: `path`, or the one that its file "latest" names."""
    if not os.path.isdir(path):
        return None
    latest = os.path.join(path, "latest")
    if not os.path.isfile(latest):
        return path
    with open(latest, encoding="utf-8", errors="replace") as file:
        tag = file.read(4096).strip()
    folder = os.path.join(path, tag)
    return folder if os.path.basename(tag) == tag and tag not in ("", ".", "..") and os.path.isdir(folder) else path


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """Tensors of one dimension, one after the other."""

    parts: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        return sum(part.numel() for part in self.parts)

    def range(self, begin: int, end: int) -> list[torch.Tensor]:
        """Views of elements [begin, end)."""
        views, at = [], 0
        for part in self.parts:
            low, high = max(begin - at, 0), min(end - at, part.numel())
            if low < high:
                views.append(part[low:high])
            at += part.numel()
        return views


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies in rows: ranges [begin, begin + count) of each, one after the other."""

    rows: tuple[int, ...]
    begin: int
    count: int
    group: int
    """number of the row of a group (stages 1 and 2), or of the sub-group (stage 3), which states are numbered by"""


def read_deepspeed(path: str) -> Contents:
    """`path`: the folder of a tag, or the one around it with a file "latest". Files are mapped, and
    tensors are read from all ranks' when they are wanted. Raises Error CHECKPOINT: a rank's file is missing, tensor or
    pipeline parallelism, experts; IO."""
    folder = _tagged(path)
    if folder is None:
        raise refused("there is no such folder", code="IO", which=path)
    models, optimizers = _files_of(folder)
    ranks = [load_inert(name) for name in models]
    contents, frozen = read_model_states(folder, ranks)
    if optimizers:
        _Zero(folder, contents, ranks[0], [_optimizer_of(name) for name in optimizers]).read(frozen)
    else:
        _without_zero(contents, ranks[0])
    contents.require_unique()
    return contents


def _files_of(folder: str) -> tuple[list[str], list[str]]:
    models: dict[int, str] = {}
    optimizers: dict[int, str] = {}
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise io_error("a folder cannot be read", error, folder) from error
    if any(name.startswith("layer_") and name.endswith("-model_states.pt") for name in names):
        raise refused(
            "a checkpoint of DeepSpeed with experts or stages of a pipeline", which=folder, got="layer_* files"
        )
    for name in names:
        for pattern, into in ((_MODEL_FILE, models), (_OPTIMIZER_FILE, optimizers)):
            found = pattern.match(name)
            if found is None:
                continue
            if int(found[2]) != 0:
                raise refused(
                    "a checkpoint of DeepSpeed with tensor parallelism",
                    which=os.path.join(folder, name),
                    hint="ds_to_universal merges it; convert what that writes",
                )
            into[int(found[1] or 0)] = os.path.join(folder, name)
    for what, found_ranks in (("model", models), ("optimizer", optimizers)):
        if sorted(found_ranks) != list(range(len(found_ranks))):
            raise refused(f"files of {what} states are missing", which=folder, got=f"ranks {sorted(found_ranks)}")
    if not models:
        raise refused("a folder has no model states", which=folder)
    return [models[rank] for rank in sorted(models)], [optimizers[rank] for rank in sorted(optimizers)]


def model_files_of(folder: str) -> list[str]:
    """Of all ranks. Raises Error CHECKPOINT, IO."""
    return _files_of(folder)[0]


def _optimizer_of(path: str) -> Mapping[str, Any]:
    loaded = load_inert(path)
    state = loaded.get("optimizer_state_dict") if isinstance(loaded, dict) else None
    if not isinstance(state, dict):
        raise refused("a file has no states of a ZeRO optimizer", which=path)
    return {**state, "ds_config": loaded.get("ds_config")}


def read_model_states(folder: str, ranks: Sequence[Any]) -> tuple[Contents, dict[str, Lazy]]:
    """Buffers, step and client state, and frozen parameters by name. `ranks`: the loaded files, one a rank at stage 3,
    else one."""
    first = ranks[0]
    if not isinstance(first, dict) or not isinstance(first.get("module"), Mapping):
        raise refused("a file has no states of a module", which=folder)
    if int(first.get("mp_world_size") or 1) != 1:
        raise refused("a checkpoint of DeepSpeed with tensor parallelism", which=folder)
    contents = Contents(origin=folder, kind="deepspeed", params=[])
    contents.step = int(first.get("global_steps") or 0) - int(first.get("skipped_steps") or 0)
    module = first["module"]
    for name in first.get("buffer_names") or []:
        if isinstance(module.get(name), torch.Tensor):
            contents.buffers[name] = of_tensor(module[name])
    for key in ("lr_scheduler", "data_sampler", "random_ltd"):
        if first.get(key) is not None:
            contents.left_out.append(f"{key}: of DeepSpeed or torch")
    client = {str(key): value for key, value in first.items() if key not in _OWN_KEYS}
    for key in [key for key, value in client.items() if not _is_plain(value)]:
        contents.left_out.append(f"client state {key!r}: a {type(client.pop(key)).__name__}")
    if client:
        contents.user = {"client": client}
    frozen: dict[str, Lazy] = {}
    fragments = [rank.get("frozen_param_fragments") or {} for rank in ranks]
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        frozen[name] = _joined([own[name] for own in fragments if name in own], tuple(shape), f"{folder}, {name}")
    return contents, frozen


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _joined(parts: Sequence[torch.Tensor], shape: tuple[int, ...], which: str) -> Lazy:
    """Parts of ranks, with padding behind the last."""
    elements = math.prod(shape)
    if not parts or sum(part.numel() for part in parts) < elements:
        raise refused("parts of a parameter are missing", which=which, expected=f"{elements} elements")
    return Lazy(
        shape=shape,
        dtype=parts[0].dtype,
        read=lambda: torch.cat([part.reshape(-1) for part in parts])[:elements].reshape(shape),
    )


def adam_w_of(config: Any) -> bool | None:
    """Whether the optimizer of a configuration of DeepSpeed decouples weight decay: its Adam does too, unless told."""
    about = config.get("optimizer") if isinstance(config, dict) else None
    kind = str(about.get("type", "")).lower() if isinstance(about, dict) else ""
    if kind == "adam":
        return bool((about.get("params") or {}).get("adam_w_mode", True)) if isinstance(about, dict) else None
    return True if kind == "adamw" else None


def scaler_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Of a dynamic loss scaler of DeepSpeed, which the engine's follows step for step; empty for any other."""
    scaler = optimizer.get("loss_scaler")
    if not isinstance(scaler, Inert) or not optimizer.get("dynamic_loss_scale"):
        return {}
    names = {"scale": "cur_scale", "steps": "cur_iter", "last_overflow": "last_overflow_iter"}
    state = {ours: scaler.get(theirs) for ours, theirs in {**names, "hysteresis": "cur_hysteresis"}.items()}
    if not all(isinstance(value, int | float) for value in state.values()):
        return {}
    return {"scale": float(state.pop("scale")), **{name: int(value) for name, value in state.items()}}


class _Zero:
    """Parameters out of the rows of all ranks."""

    def __init__(
        self, folder: str, contents: Contents, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
    ) -> None:
        self.folder = folder
        self.contents = contents
        self.model = model
        self.optimizers = optimizers
        self.world = len(optimizers)
        count = optimizers[0].get("partition_count")
        said = count[0] if isinstance(count, list) and count else count
        if isinstance(said, int) and said != self.world:
            raise refused(
                "files of optimizer states are missing", which=folder, expected=str(said), got=str(self.world)
            )
        self.by_parameter = "fp32_flat_groups" in optimizers[0]  # stage 3
        self.shapes = [
            {str(name): tuple(int(extent) for extent in shape) for name, shape in group.items()}
            for group in model.get("param_shapes") or []
        ]
        if not self.shapes:
            raise refused("a checkpoint does not say the shapes of its parameters", which=folder)

    def read(self, frozen: Mapping[str, Lazy]) -> None:
        module = self.model["module"]
        places = self._of_parameters() if self.by_parameter else self._of_groups()
        key = "fp32_flat_groups" if self.by_parameter else "single_partition_of_fp32_groups"
        weights = [self._rows(one.get(key), f"{self.folder}, {key}") for one in self.optimizers]
        bases = [self._base(one) for one in self.optimizers]
        groups, group_of_row = self._groups(bases[0])
        shapes = {name: shape for group in self.shapes for name, shape in group.items()}
        named = optimizer_state.NamedState(state={}, groups=groups)
        named.kind = optimizer_state.kind_of(bases[0]["param_groups"], adam_w_of(self.optimizers[0].get("ds_config")))
        for name, shape in shapes.items():
            place = places[name]
            compute = module[name].dtype if isinstance(module.get(name), torch.Tensor) else torch.float32
            weight = self._lazy(weights, place, shape, name)
            self.contents.params.append(
                Param(name=name, shape=shape, dtype=compute, states={WEIGHT: weight}, trainable=True)
            )
            named.state[name] = self._states(bases, place, shape, name)
            if place.group in group_of_row:
                groups[group_of_row[place.group]][1].append(name)
        optimizer_state.adopt(self.contents, named)
        self.contents.loss_scaler = scaler_of(self.optimizers[0])
        self._add_frozen(frozen)

    # --- where parameters lie ---

    def _of_groups(self) -> dict[str, _Place]:
        """Stages 1 and 2."""
        places: dict[str, _Place] = {}
        gaps = self.optimizers[0].get("param_alignment_paddings")
        for number, group in enumerate(self.shapes):
            at = 0
            for index, (name, shape) in enumerate(group.items()):
                places[name] = _Place((number,), at, math.prod(shape), number)
                at += math.prod(shape) + (int(gaps[number][index]) if gaps else 0)
        return places

    def _of_parameters(self) -> dict[str, _Place]:
        """Stage 3. The rows of a rank's sub-groups are one row."""
        places: dict[str, _Place] = {}
        sizes = [part.numel() for part in self.optimizers[0]["fp32_flat_groups"]]
        at = 0
        for group in self.shapes:
            for name, shape in group.items():
                count = -(-math.prod(shape) // self.world)
                behind, number = sizes[0] if sizes else 0, 0
                while at >= behind and number + 1 < len(sizes):
                    number += 1
                    behind += sizes[number]
                places[name] = _Place(tuple(range(len(sizes))), at, count, number)
                at += count
        return places

    def _rows(self, rows: Any, which: str) -> list[torch.Tensor]:
        if not isinstance(rows, list) or not all(isinstance(row, torch.Tensor) for row in rows):
            raise refused("rows of parameters are missing", which=which, got=type(rows).__name__)
        return [row.reshape(-1) for row in rows]

    def _lazy(self, rows: Sequence[Sequence[torch.Tensor]], place: _Place, shape: tuple[int, ...], name: str) -> Lazy:
        """`rows`: of each rank."""
        which = f"{self.folder}, {name}"
        elements = math.prod(shape)
        if self.by_parameter:
            of_ranks = [_Row(tuple(own)) for own in rows]
            begin, end = place.begin, place.begin + place.count
            views = [view for row in of_ranks for view in row.range(begin, end)]
        else:
            views = _Row(tuple(own[place.rows[0]] for own in rows)).range(place.begin, place.begin + place.count)
        if sum(view.numel() for view in views) < elements:
            raise refused("rows of a checkpoint are shorter than its parameters", which=which, expected=str(elements))
        return Lazy(
            shape=shape,
            dtype=views[0].dtype if views else torch.float32,
            read=lambda: (
                torch.cat(list(views))[:elements].reshape(shape) if views else torch.empty(shape, dtype=torch.float32)
            ),
        )

    # --- states ---

    def _base(self, optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
        """{"state", "param_groups"} of the optimizer below ZeRO's. An elastic checkpoint has a list of states."""
        base = optimizer.get("optimizer_state_dict" if self.by_parameter else "base_optimizer_state")
        if isinstance(base, list):
            note = "hyper-parameters: an elastic checkpoint has none"
            if note not in self.contents.left_out:
                self.contents.left_out.append(note)
            return {"state": dict(enumerate(base)), "param_groups": []}
        return base if isinstance(base, dict) else {"state": {}, "param_groups": []}

    def _states(
        self, bases: Sequence[Mapping[str, Any]], place: _Place, shape: tuple[int, ...], name: str
    ) -> dict[str, Any]:
        own = bases[0]["state"].get(place.group, {})
        states: dict[str, Any] = {}
        for state in _STATES:
            if not isinstance(own.get(state), torch.Tensor):
                continue
            count = max(bases[0]["state"], default=-1) + 1
            empty = torch.empty(0, dtype=torch.float32)
            rows = [
                [base["state"].get(number, {}).get(state, empty).reshape(-1) for number in range(count)]
                for base in bases
            ]
            states[state] = self._lazy(rows, place, shape, f"{name}/{state}")
        step = own.get("step")
        if step is None:
            step = next((group["step"] for group in bases[0]["param_groups"] if "step" in group), self.contents.step)
        return {**states, "step": step} if states else {}

    def _groups(self, base: Mapping[str, Any]) -> tuple[list[tuple[Hypers, list[str]]], dict[int, int]]:
        """Groups, still without names, and which row belongs to which group."""
        groups: list[tuple[Hypers, list[str]]] = []
        of_row: dict[int, int] = {}
        for number, group in enumerate(base["param_groups"]):
            groups.append((hypers.from_torch(group, f"{self.folder}, group {number}"), []))
            for row in group.get("params") or [number]:
                of_row[int(row)] = number
        return groups, of_row

    # --- the rest ---

    def _add_frozen(self, frozen: Mapping[str, Lazy]) -> None:
        """And tied names. What stage 1 does not list is in the module."""
        names = {param.name: param for param in self.contents.params}
        for name, lazy in frozen.items():
            self._freeze(name, lazy)
        shared = self.model.get("shared_params") or {}
        for other, name in shared.items() if isinstance(shared, Mapping) else shared:
            if name in names and other != name:
                names[name].aliases.append(str(other))
        known = {name for param in self.contents.params for name in (param.name, *param.aliases)}
        for name, tensor in self.model["module"].items():
            if name in known or name in self.contents.buffers or not isinstance(tensor, torch.Tensor):
                continue
            if self.by_parameter and tensor.numel() == 0:
                self.contents.left_out.append(f"{name}: its weight is in no file; is it tied? --tie {name}=NAME")
            else:
                self._freeze(name, of_tensor(tensor))

    def _freeze(self, name: str, lazy: Lazy) -> None:
        self.contents.params.append(
            Param(name=name, shape=lazy.shape, dtype=lazy.dtype, states={WEIGHT: lazy}, trainable=False)
        )


def _without_zero(contents: Contents, model: Mapping[str, Any]) -> None:
    """Stage 0: whole weights; its optimizer is one of many."""
    shared = model.get("shared_params") or {}
    tied = dict(shared.items() if isinstance(shared, Mapping) else shared)
    for name, tensor in model["module"].items():
        if name in contents.buffers or name in tied or not isinstance(tensor, torch.Tensor):
            continue
        lazy = of_tensor(tensor)
        aliases = [str(other) for other, kept in tied.items() if kept == name]
        contents.params.append(
            Param(name=name, shape=lazy.shape, dtype=lazy.dtype, states={WEIGHT: lazy}, aliases=aliases)
        )
    state = model.get("optimizer")
    if state is None:
        return
    try:
        optimizer_state.adopt(contents, optimizer_state.by_name(state, None, contents))
    except _C.Error as error:  # it numbers its parameters in an order that is written nowhere
        contents.left_out.append(f"states of the optimizer of stage 0: {error.message}")
