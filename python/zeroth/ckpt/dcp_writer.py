"""torch.distributed.checkpoint (DCP), written: {"model": state_dict, "optimizer": {"state": by name, "param_groups":
[...]}}, as torch.distributed.checkpoint.state_dict.get_state_dict() names things; "step", "client_state" as JSON."""

import io
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeroth._json_values import to_json
from zeroth.ckpt import hypers, optimizer_state
from zeroth.ckpt.contents import WEIGHT, Contents, Lazy
from zeroth.ckpt.facts import KEY, facts_text
from zeroth.ckpt.new_path import new_folder

__all__ = ["write_dcp"]

_FILE = "__0_0.distcp"


class _Planner(DefaultSavePlanner):
    """Tensors of the state_dict are on the meta device; each is read when it is to be written."""

    def __init__(self, lazies: Mapping[int, Lazy]) -> None:
        super().__init__()
        self._lazies = lazies

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self.state_dict[write_item.index.fqn]
        lazy = self._lazies.get(id(value))
        return super().resolve_data(write_item) if lazy is None else lazy.read().clone()


class _Writer(FileSystemWriter):
    """torch's holds every tensor of a file until the file is written; this one holds one."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        results = []
        with open(os.path.join(self.path, _FILE), "wb") as file:
            for item in plan.items:
                begin = file.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(data, file)
                else:
                    file.write(data.getbuffer())
                length = file.tell() - begin
                place = _StorageInfo(_FILE, begin, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
                del data
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def write_dcp(contents: Contents, folder: str) -> None:
    """Weights, buffers and, if there are some, states of the optimizer; a tied weight under each of its names. One
    tensor in memory at a time. Raises Error USAGE if `folder` is there, and IO."""
    lazies: dict[int, Lazy] = {}

    def later(lazy: Lazy) -> torch.Tensor:
        stand_in = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
        lazies[id(stand_in)] = lazy
        return stand_in

    model = {name: later(param.states[WEIGHT]) for param in contents.params for name in (param.name, *param.aliases)}
    model |= {name: later(lazy) for name, lazy in contents.buffers.items()}
    whole: dict[str, Any] = {"model": model, KEY: facts_text(contents)}
    if contents.has_optimizer:
        state = {param.name: optimizer_state.states_of(param) for param in contents.params if param.trainable}
        whole["optimizer"] = {
            "state": {
                name: {key: later(value) if isinstance(value, Lazy) else value for key, value in own.items()}
                for name, own in state.items()
                if own
            },
            "param_groups": [
                {**hypers.to_torch(values, contents.optimizer), "params": [param.name for param in params]}
                for values, params in optimizer_state.groups_of(contents)
            ],
        }
        whole["step"] = contents.step
    if contents.user.get("client") is not None:
        whole["client_state"] = to_json(contents.user["client"], "client_state")
    with new_folder(folder) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
        save(whole, storage_writer=_Writer(temporary, sync_files=False), planner=_Planner(lazies), no_dist=True)
