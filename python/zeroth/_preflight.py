"""Imports torch before the native module, which needs torch's libraries, and checks the version of torch."""

import hashlib as hashlib  # the shim then uses the libcrypto of this Python, and not the other way round

import torch

from zeroth._build import TORCH_VERSION, VERSION

__all__ = ["VERSION", "check_torch"]


def check_torch(found: str, built: str) -> None:
    """Raises ImportError unless `found` and `built` are the same release; text after a '+' is not compared."""
    if found.split("+")[0] != built.split("+")[0]:
        raise ImportError(
            f"zeroth {VERSION} was built with torch {built}, and this is torch {found}: LibTorch has no stable C++ interface. "  # noqa: E501
            f"Install torch=={built.split('+')[0]}, or build zeroth again beside this torch: "
            "pip install --no-deps --force-reinstall . in its source folder"
        )


check_torch(torch.__version__, TORCH_VERSION)
