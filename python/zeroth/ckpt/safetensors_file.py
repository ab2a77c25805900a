"""Reads safetensors files, one tensor at a time. Format: https://github.com/huggingface/safetensors"""

import json
import math
import os
import struct
from typing import Any

import torch

from zeroth.ckpt.contents import Lazy
from zeroth.ckpt.dtypes import dtype_of
from zeroth.ckpt.refusals import io_error, refused

__all__ = ["SafetensorsFile"]

_MOST_HEADER_BYTES = 100_000_000


class SafetensorsFile:
    """Its header, checked: every tensor lies in the file and has the bytes of its shape."""

    def __init__(self, path: str) -> None:
        """Raises Error CHECKPOINT for what is no such file, and IO."""
        self.path = path
        try:
            with open(path, "rb") as file:
                self._bytes = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
                if not 0 <= length <= min(_MOST_HEADER_BYTES, self._bytes - 8):
                    raise refused("a file is no safetensors file", which=path, got=f"a header of {length} bytes")
                self._data = 8 + length
                header = json.loads(file.read(length))
        except OSError as error:
            raise io_error("a file cannot be read", error, path) from error
        except ValueError as error:
            raise refused("a file is no safetensors file", which=path, got=str(error)) from error
        if not isinstance(header, dict):
            raise refused("a file is no safetensors file", which=path, got="a header that is no object")
        metadata = header.pop("__metadata__", {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        self.tensors = {name: self._lazy(name, about) for name, about in header.items()}

    def _lazy(self, name: str, about: Any) -> Lazy:
        which = f"{self.path}, {name}"
        try:
            dtype = dtype_of(str(about["dtype"]), which)
            shape = tuple(int(extent) for extent in about["shape"])
            begin, end = (int(offset) for offset in about["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise refused("a tensor of a safetensors file is not described", which=which, got=repr(error)) from error
        fits = all(extent >= 0 for extent in shape) and 0 <= begin <= end <= self._bytes - self._data
        if not fits or end - begin != math.prod(shape) * dtype.itemsize:
            raise refused(
                "a tensor of a safetensors file does not fit its bytes",
                which=which,
                expected=f"{math.prod(shape) * dtype.itemsize} bytes inside the file",
                got=f"[{begin}, {end}) of {self._bytes - self._data}",
            )

        def read() -> torch.Tensor:
            data = bytearray(end - begin)
            try:
                with open(self.path, "rb", buffering=0) as file:
                    file.seek(self._data + begin)
                    view, done = memoryview(data), 0
                    while done < len(data):
                        count = file.readinto(view[done : done + (1 << 30)])
                        if not count:
                            raise refused("a file has become shorter", which=which)
                        done += count
            except OSError as error:
                raise io_error("a file cannot be read", error, self.path) from error
            if not data:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)

        return Lazy(shape=shape, dtype=dtype, read=read)
