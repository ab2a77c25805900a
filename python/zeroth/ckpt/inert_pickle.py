"""Reads torch.save() files that hold objects of other programs, without running or importing anything of theirs.

[Note: Inert objects] Checkpoints of DeepSpeed have objects of its classes beside the tensors (its loss scaler, enums,
addresses of fragments), and a DCP has its .metadata in a pickle: weights_only=True refuses both. A pickle can only do
what its classes and functions do. So every name in it that is not in a short list of harmless ones (tensors, their
storages, dtypes, sizes, dictionaries) becomes an Inert class: it keeps what it was made of, and has no behaviour. No
module is imported for it, whatever it is called.
"""

import collections
import io
import pickle
import types
import zipfile
from typing import Any

import torch

from zeroth import _C
from zeroth.ckpt.refusals import io_error, refused

__all__ = ["Inert", "load_inert", "load_inert_bytes"]


class Inert:
    """In the place of an object of a class that is not made."""

    module = ""
    name = ""

    def __init__(self, *arguments: Any, **values: Any) -> None:
        self.arguments = arguments
        self.fields: dict[str, Any] = dict(values)

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = state[1]
        if isinstance(state, dict):
            self.fields = {str(key): value for key, value in state.items()}

    # What REDUCE and the opcodes for lists and dictionaries may ask of an object.
    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)

    def get(self, name: str, otherwise: Any = None) -> Any:
        return getattr(self, "fields", {}).get(name, otherwise)

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}, not made>"


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, requires_grad, hooks, state: data,
    # A tensor with attributes, of whatever class; the function is of this list, too.
    ("torch._tensor", "_rebuild_from_type_v2"): lambda function, kind, arguments, state: function(*arguments),
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins", "torch.tensor": "torch._tensor"}.get(module, module)
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        return type("Inert", (Inert,), {"module": module, "name": name})


def _refuse(*_: Any, **__: Any) -> Any:
    raise pickle.UnpicklingError("a form of torch.save() that is not read")


_MODULE: Any = types.ModuleType("inert_pickle")
_MODULE.Unpickler = _Unpickler
_MODULE.load = _refuse  # of files that are no zip archives
_MODULE.UnpicklingError = pickle.UnpicklingError


def load_inert(path: str) -> Any:
    """A file of torch.save(), a zip archive; tensors are mapped and read when they are used. Objects of classes that
    are not in the short list are Inert. Raises Error CHECKPOINT for what is no such file, and IO."""
    try:
        with open(path, "rb"):
            pass
        if not zipfile.is_zipfile(path):
            raise refused("a file is no zip archive of torch.save()", which=path)
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise refused("a file is a program of TorchScript", which=path)
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_MODULE)
    except _C.Error:
        raise
    except OSError as error:
        raise io_error("a file cannot be read", error, path) from error
    except Exception as error:  # whatever bytes can lead to
        raise refused("a file of torch.save() cannot be read", which=path, got=repr(error)) from error


def load_inert_bytes(data: bytes, which: str) -> Any:
    """A pickle without tensors. Raises Error CHECKPOINT."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever bytes can lead to
        raise refused("a pickle cannot be read", which=which, got=repr(error)) from error
