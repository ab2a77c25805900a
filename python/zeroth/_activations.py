"""Saved tensors of autograd in files or in the memory of the host."""

import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from zeroth import _C

__all__ = ["ActivationOffload", "offload_activations", "of_engine"]

_CHECKPOINT = "torch.utils.checkpoint"
Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class ActivationOffload:
    """A context manager: what forwards inside save for backward rests in files, and backward reads it ahead.

    Made by offload_activations(). May be entered again and again; only forwards need to be inside, a backward may be
    outside. Gradients are those without it, to the last bit. A tensor that was modified in place since it was saved is
    an error, as in plain torch. What a graph saved is dropped with the graph: after backward, or when a loss is thrown
    away.
    """

    def __init__(self, tensors: _C.SavedTensors, saved: str) -> None:
        self._tensors = tensors
        self._all = saved == "all"
        self._entered: list[saved_tensors_hooks] = []

    def __enter__(self) -> "ActivationOffload":
        hooks = saved_tensors_hooks(self._pack, _C.SavedTensor.unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._entered:
            self._entered.pop().__exit__(kind, error, trace)

    def attach(self, *modules: nn.Module) -> list[RemovableHandle]:
        """Every forward of these modules runs inside, until the handles are removed."""
        handles = []
        for module in modules:
            handles.append(module.register_forward_pre_hook(self._before, prepend=True))
            handles.append(module.register_forward_hook(self._after, always_call=True))
        return handles

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """These tensors, and views of them, are never moved: parameters that live anyway."""
        self._tensors.keep(list(tensors))

    @property
    def tensors(self) -> _C.SavedTensors:
        """Where they go."""
        return self._tensors

    def of_all(self) -> "ActivationOffload":
        """With the same files and counters, for every saved tensor."""
        return ActivationOffload(self._tensors, "all")

    def report(self) -> dict[str, int]:
        """Since reset_counters(). Tensors: `moved`, `shared` (their bytes were moved already) and `kept`. Reads:
        `restored`, `on_demand` (nobody had asked for them before they were needed), `wait_ns` for all transfers. Bytes
        of tensors: `bytes_moved`, `bytes_restored`, and of files, rounded up to 4096: `bytes_written`, `bytes_read`.
        Now: `live` blocks, `live_bytes`, `peak_live_bytes`, and `file_bytes` on disk."""
        return self._tensors.report()

    def reset_counters(self) -> None:
        """The counters begin at 0."""
        self._tensors.reset_counters()

    def leave(self) -> None:
        """After a forward that ended without its hook, by KeyboardInterrupt."""
        while self._entered:
            self.__exit__()

    def _before(self, module: nn.Module, args: Any) -> None:
        self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.__exit__()

    def _pack(self, tensor: torch.Tensor) -> _C.SavedTensor:
        return self._tensors.pack(tensor, self._all or _in_checkpoint())

    def __deepcopy__(self, memo: dict[int, Any]) -> "ActivationOffload":
        return self  # hooks of a copied module


def _in_checkpoint() -> bool:
    """Whether torch.utils.checkpoint saves the inputs of a function. What the checkpointed function itself saves comes
    by other ways. It saves them by an autograd function (checkpoint -> Function.apply -> pack); since torch 2.15
    Function.apply is no frame of Python's, and a checkpoint that is not reentrant packs its inputs itself."""
    frame = sys._getframe(2)  # of who called pack
    caller = frame.f_back
    if frame.f_globals.get("__name__") == _CHECKPOINT:
        return frame.f_code.co_name == "_checkpoint_impl" or "save_inputs" in frame.f_code.co_qualname
    return (
        caller is not None
        and frame.f_globals.get("__name__") == torch.autograd.function.__name__
        and caller.f_globals.get("__name__") == _CHECKPOINT
    )


def offload_activations(
    folders: Folders | None = None,
    *,
    device: Literal["nvme", "cpu"] = "nvme",
    saved: Literal["checkpoints", "all"] = "checkpoints",
    min_bytes: int = 4096,
    prefetch: int = 2,
    buffer_bytes: int = 32 << 20,
    piece_bytes: int = 1 << 20,
    io: str = "probe",
    direct: bool = True,
) -> ActivationOffload:
    """Moves what autograd saves for backward out of memory::

        moved = zeroth.offload_activations("/local/disk")
        with moved:
            loss = model(batch)  # with torch.utils.checkpoint inside
        loss.backward()

    `folders`: of the files, one a disk; they have no names and leave nothing behind. `device`: "nvme": files; "cpu":
    the memory of the host, for tensors of a GPU; those of a CPU are there already and stay. `saved`: "checkpoints":
    inputs of functions under torch.utils.checkpoint, reentrant or not; "all": every saved tensor. `min_bytes`: smaller
    ones stay. `prefetch`: saved tensors that backward reads ahead. `buffer_bytes`: memory for what is on its way, in
    pieces of `piece_bytes`, each one transfer. `io`, `direct`: as zeroth.offload.io and zeroth.offload.direct.

    Parameters of an engine are never moved; for others see ActivationOffload.keep(). An engine does all this by the
    section zeroth.activations of its configuration.
    Raises Error: USAGE; IO if a folder takes no files. In forwards and backwards IO for a full disk, transfers that
    failed, and bytes that are not those that were written."""
    if saved not in ("checkpoints", "all") or device not in ("nvme", "cpu"):
        raise _C.make_error(
            "USAGE",
            "there is no such way to move activations",
            where="python.activations",
            which="device and saved",
            expected='"nvme" or "cpu", and "checkpoints" or "all"',
            got=f"{device!r} and {saved!r}",
        )
    store = None
    if device == "nvme":
        store = _C.open_activation_store(
            folders=_folders(folders),
            prefetch=prefetch,
            buffer_bytes=buffer_bytes,
            piece_bytes=piece_bytes,
            io=io,
            direct=direct,
        )
    return ActivationOffload(_C.SavedTensors(store, min_bytes), saved)


def of_engine(core: _C.Engine, model: nn.Module) -> ActivationOffload | None:
    """As the configuration of the engine says; None if nothing moves: tensors of a CPU are in the host's memory."""
    keys = core.config.activations
    if keys["device"] == "none" or (keys["device"] == "cpu" and core.device.type == "cpu"):
        return None
    tensors = _C.SavedTensors(_C.activation_store_of(core), keys["min_bytes"])
    tensors.keep([*model.parameters(), *model.buffers()])
    return ActivationOffload(tensors, keys["saved"])


def _folders(folders: Folders | None) -> list[str]:
    if folders is None:
        return []
    if isinstance(folders, str):
        return [folder for folder in folders.split(":") if folder]
    return [os.fspath(folder) for folder in ([folders] if isinstance(folders, os.PathLike) else folders)]
