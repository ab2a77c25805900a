"""New files and folders that appear whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator

from zeroth.ckpt.refusals import io_error, refused

__all__ = ["new_file", "new_folder"]


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
    """Gives a temporary folder beside `path`, which gets that name when the block ends well; else it is removed. Raises
    Error USAGE if there is something already, and IO."""
    temporary = _beside(path)
    try:
        os.makedirs(temporary)
        yield temporary
        for base, _, names in os.walk(temporary):
            for name in names:
                _sync(os.path.join(base, name))
            _sync(base)
        os.rename(temporary, path)
        _sync(os.path.dirname(path) or ".")
    except OSError as error:
        raise io_error("a folder cannot be written", error, path) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: str) -> Iterator[str]:
    """The same for a file: the block makes it under the name that it is given."""
    temporary = _beside(path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        yield temporary
        _sync(temporary)
        os.rename(temporary, path)
        _sync(os.path.dirname(path) or ".")
    except OSError as error:
        raise io_error("a file cannot be written", error, path) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _beside(path: str) -> str:
    if os.path.lexists(path):
        raise refused(
            "there is something in the target's place",
            code="USAGE",
            which=path,
            hint="choose another name, or remove it",
        )
    return f"{path.rstrip('/')}.tmp-{secrets.token_hex(8)}"


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
