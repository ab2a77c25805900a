"""Build backend of the package (PEP 517): scikit-build-core, beside the torch of the environment.

    pip install .                          # pip fetches scikit-build-core; torch is the one of the environment
    pip install --no-build-isolation .     # scikit-build-core is there already; nothing is fetched

LibTorch has no stable C++ interface, so a wheel serves exactly the torch that it was built with. The wheel requires
that version and pip leaves the installed torch alone. Torch is no build requirement: pip would fetch another one.

Before anything is compiled, the backend lists all that is missing.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

OLDEST, NEWEST = "2.11.0", "2.15.0"
"""the torch versions that one source is built and tested beside"""
Settings = Mapping[str, str | list[str]] | None

HEADERS = {
    "fmt/core.h": "libfmt-dev",
    "spdlog/spdlog.h": "libspdlog-dev",
    "nlohmann/json.hpp": "nlohmann-json3-dev",
    "CLI/CLI.hpp": "libcli11-dev",
    "openssl/evp.h": "libssl-dev",
    "xxhash.h": "libxxhash-dev",
}
"""what the C++ sources include, and the Debian package that has it"""


def torch_folder() -> pathlib.Path | None:
    """The torch that the package will be imported with. Pip hides the packages of the environment from an isolated
    build, but the interpreter is that of the environment, and knows where they are."""
    found = importlib.util.find_spec("torch")
    if found is not None and found.submodule_search_locations:
        return pathlib.Path(found.submodule_search_locations[0])
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if "posix_user" in sysconfig.get_scheme_names():
        places.append(sysconfig.get_path("purelib", "posix_user"))
    for place in dict.fromkeys(places):
        folder = pathlib.Path(place) / "torch"
        if (folder / "version.py").is_file():
            return folder
    return None


def torch_version(folder: pathlib.Path) -> str:
    """ "2.15.0": without the part behind '+', which names the CUDA of a wheel and no interface."""
    text = (folder / "version.py").read_text()
    match = re.search(r"^__version__ = ['\"]([^'\"+]+)", text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"zeroth: {folder}/version.py names no version")
    return match.group(1)


def _missing_torch() -> str:
    return (
        f"torch in {sysconfig.get_path('purelib')}. Install the one to train with first (pip install torch). "
        "If it is there and the build runs in another environment: pip install --no-build-isolation ."
    )


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor; none for what is no version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _old_or_new(version: str) -> str | None:
    """What to say of a torch that is too old; prints a line for one that no test has seen."""
    release, oldest, newest = _release(version), _release(OLDEST), _release(NEWEST)
    assert oldest is not None and newest is not None
    if release is not None and release < oldest:
        return f"torch {oldest[0]}.{oldest[1]} or newer: this is torch {version}"
    if release is not None and release > newest:
        print(f"zeroth: torch {version} is newer than the last one that was tested ({newest[0]}.{newest[1]})")
    return None


def _missing_headers(compiler: str) -> list[str]:
    """One compiler run for each header, as a build would find them."""
    missing = []
    for header, package in HEADERS.items():
        done = subprocess.run(
            [compiler, "-std=c++20", "-M", "-x", "c++", "-"],
            input=f"#include <{header}>\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode != 0:
            missing.append(f"the header <{header}> (Debian: {package})")
    return missing


def missing(environment: Mapping[str, str]) -> list[str]:
    """One line for each thing that the build needs and that is not there."""
    lines = []
    folder = torch_folder()
    if folder is None:
        lines.append(_missing_torch())
    elif (problem := _old_or_new(torch_version(folder))) is not None:
        lines.append(problem)
    include = pathlib.Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        lines.append(f"the header Python.h in {include} (Debian: python3-dev)")
    if importlib.util.find_spec("scikit_build_core") is None:
        lines.append("scikit-build-core: pip install scikit-build-core, or leave out --no-build-isolation")
    compiler = environment.get("CXX") or "g++"
    program = shutil.which(compiler.split()[0])
    if program is None:
        lines.append(f"a C++20 compiler, g++ 12 or newer: {compiler} is not there (Debian: g++)")
    else:
        lines += _missing_headers(program)
    return lines


def require_all(environment: Mapping[str, str]) -> pathlib.Path:
    """The folder of torch. Ends the build with all that is missing, before anything is compiled."""
    lines = missing(environment)
    if lines:
        raise SystemExit("\nzeroth cannot be built here. Not there:\n" + "\n".join(f"  - {line}" for line in lines))
    folder = torch_folder()
    assert folder is not None
    return folder


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, list[str]]:
    """The torch that the wheel serves, for its metadata. Called by scikit-build-core."""
    del settings, project
    folder = torch_folder()
    if folder is None:
        raise SystemExit("\nzeroth cannot be built here. Not there:\n  - " + _missing_torch())
    return {"dependencies": [f"torch=={torch_version(folder)}"]}


# --- PEP 517 and 660 --------------------------------------------------------------------------------------------------


def _core() -> Any:
    """scikit-build-core, which pip has fetched, or the user has installed for a build without isolation."""
    try:
        from scikit_build_core import build
    except ModuleNotFoundError:
        require_all(os.environ)  # names it, with all else that is missing
        raise
    return build


def _with_torch(settings: Settings) -> dict[str, str | list[str]]:
    return {**(settings or {}), "cmake.define.ZEROTH_TORCH_DIR": str(require_all(os.environ))}


def get_requires_for_build_wheel(config_settings: Settings = None) -> Sequence[str]:
    """cmake and ninja, where this machine has none that will do. Pip asks first where it isolates the build: what is
    missing is named before it fetches them."""
    require_all(os.environ)
    return _core().get_requires_for_build_wheel(dict(config_settings or {}))


get_requires_for_build_editable = get_requires_for_build_wheel


def get_requires_for_build_sdist(config_settings: Settings = None) -> Sequence[str]:
    return _core().get_requires_for_build_sdist(dict(config_settings or {}))


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return _core().prepare_metadata_for_build_wheel(metadata_directory, dict(config_settings or {}))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return _core().build_wheel(wheel_directory, _with_torch(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return _core().build_editable(wheel_directory, _with_torch(config_settings), metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    return _core().build_sdist(sdist_directory, dict(config_settings or {}))
