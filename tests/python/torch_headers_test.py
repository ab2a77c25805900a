"""Our sources against the headers of other torch versions, syntax only: says in a week what a new torch breaks.

The versions: the other one of the two that are tested, and the newest that pip finds, release candidates included. An
index of nightly builds is looked at, too, where ZEROTH_TORCH_INDEX names one. A wheel is fetched without its
requirements and only its headers are kept.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
import unittest
import zipfile
from collections.abc import Sequence

import tier
from environments import BUILD, NETWORK_S, SOURCE, other_torch, own_environment, require, run, torch_of_this_build

HEADERS = BUILD / "torch-headers"
OURS = ("src/libtorch/", "python/bindings/", "examples/")
"""sources that a user's build compiles"""
FILE_S = 900


def fetched(requirement: str, options: Sequence[str] = ()) -> pathlib.Path:
    """A folder as that of an installed torch, with include/ and version.py alone."""
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        download = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        wanted = ["--only-binary", ":all:", "--dest", folder, *options, requirement]
        require(run([*download, *wanted], timeout_s=NETWORK_S, environment=own_environment()))
        (wheel,) = pathlib.Path(folder).glob("torch-*.whl")
        version = wheel.name.split("-")[1]
        target = HEADERS / version
        shutil.rmtree(target, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.match(r"torch/(include/|version\.py$)", name)]
            archive.extractall(target, names)
    return target / "torch"


def compilations() -> list[tuple[str, list[str]]]:
    """Our sources that include torch: the file, and its command without an output."""
    found = []
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        file = pathlib.Path(entry["directory"], entry["file"]).resolve()
        place = file.relative_to(SOURCE) if file.is_relative_to(SOURCE) else file
        below = str(place.relative_to(BUILD.relative_to(SOURCE))) if file.is_relative_to(BUILD) else str(place)
        if not below.startswith(OURS) or not any(word.endswith("/torch/include") for word in words):
            continue
        output = words.index("-o")
        found.append((below, [*words[:output], *words[output + 2 :], "-fsyntax-only"]))
    return found


def errors_of(words: Sequence[str], ours: str, other: pathlib.Path) -> str:
    """What the compiler says beside the other headers; "" if it takes the file."""
    command = [word.replace(ours, str(other)) for word in words if word != "-c"]
    done = run(command, timeout_s=FILE_S)
    return "" if done.returncode == 0 else done.stdout


class TorchHeadersTest(unittest.TestCase):
    def check(self, folder: pathlib.Path) -> None:
        commands = compilations()
        self.assertGreater(len(commands), 10, "sources that include torch were not found")
        (ours,) = {
            word.removeprefix("-isystem").removeprefix("-I").removesuffix("/include")
            for _, words in commands
            for word in words
            if word.endswith("/torch/include")
        }
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            said = list(pool.map(lambda item: errors_of(item[1], ours, folder), commands))
        wrong = [f"{file}:\n{text[-4_000:]}" for (file, _), text in zip(commands, said, strict=True) if text]
        self.assertEqual(wrong, [], f"{len(wrong)} of {len(commands)} files are not taken beside {folder.parent.name}")
        print(f"{len(commands)} files are taken beside torch {folder.parent.name}")

    @tier.long
    def test_the_other_version(self) -> None:
        self.check(fetched(f"torch=={other_torch()}"))

    @tier.long
    def test_the_newest_that_pip_finds(self) -> None:
        index = os.environ.get("ZEROTH_TORCH_INDEX", "")
        folder = fetched("torch", ["--pre", *(["--index-url", index] if index else [])])
        version = folder.parent.name.split("+")[0]
        if version in (torch_of_this_build(), other_torch()):
            print(f"the newest torch is {version}, which is tested anyway")
            return
        self.check(folder)


if __name__ == "__main__":
    tier.main()
