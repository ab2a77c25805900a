#!/usr/bin/env python3
"""Holds the layers in what was compiled.

usage: check_symbols.py --levels base=0,device=1,... [--nm NM] [--optimised] ROOM=LIBRARY.a ...

By the undefined symbols of each room's static library:
  torch  no room below libtorch (nor the launcher) wants a symbol of the namespaces at, c10, torch, caffe2
  mpi    no room wants a function of MPI: it is loaded when an MPI world is asked for
  layer  no room wants a symbol that only a room of the same or a higher level defines
  wide   (--optimised) no object that is compiled for AVX2 or AVX-512 defines an inline function that the linker may
         choose for everybody: it would run those instructions on a processor that lacks them
This catches what includes do not show: a function declared by hand, or a header that reaches across.
Prints one line for each violation; exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys

# An object for wide instructions and a weak symbol in it, as nm prints them.
WIDE = re.compile(r"\[(\w*_avx(?:2|512)\w*)\.cpp\.o\]: (\S+) [WVu] ")
# A nested name of the Itanium ABI that begins in one of torch's namespaces.
TORCH = re.compile(r"N[VKRO]*(2at|3c10|5torch|6caffe2)[0-9]")


def symbols(nm: str, library: pathlib.Path, *options: str) -> set[str]:
    command = [nm, "--format=posix", *options, str(library)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    names = (line.split(" ") for line in done.stdout.splitlines())
    return {fields[0] for fields in names if len(fields) >= 2 and fields[0]}


def demangled(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def check(nm: str, levels: dict[str, int], libraries: dict[str, pathlib.Path]) -> list[str]:
    defined = {room: symbols(nm, file, "--defined-only", "--extern-only") for room, file in libraries.items()}
    violations = []
    for room, file in libraries.items():
        wanted = symbols(nm, file, "--undefined-only") - defined[room]
        below = set().union(*(defined[other] for other in libraries if levels[other] < levels[room]))
        if room != "libtorch":
            names = sorted(name for name in wanted if TORCH.search(name))
            violations += [f"{room}: torch: wants {name}" for name in demangled(names)]
        violations += [f"{room}: mpi: wants {name}" for name in sorted(wanted) if name.startswith(("MPI_", "ompi_"))]
        for other in libraries:
            if other == room or levels[other] < levels[room]:
                continue
            # A weak symbol (an inline function) of a header below may be in any archive; it is no dependency.
            names = sorted((wanted & defined[other]) - below)
            violations += [
                f"{room} (level {levels[room]}): layer: wants {name} of {other} (level {levels[other]})"
                for name in demangled(names)
            ]
    return violations


def check_wide(nm: str, room: str, library: pathlib.Path) -> list[str]:
    command = [nm, "--format=posix", "--print-file-name", "--defined-only", str(library)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = WIDE.findall(done.stdout)
    names = demangled([name for _, name in found])
    return [f"{room}: wide: {member} defines the inline function {name}" for (member, _), name in zip(found, names)]


def parse_levels(text: str) -> dict[str, int]:
    return {name: int(level) for name, level in (pair.split("=") for pair in text.split(","))}


def parse_library(text: str) -> tuple[str, pathlib.Path]:
    room, _, file = text.partition("=")
    return room, pathlib.Path(file)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hold the layers in what was compiled.")
    parser.add_argument("libraries", nargs="+", type=parse_library, metavar="ROOM=LIBRARY")
    parser.add_argument("--levels", required=True, type=parse_levels)
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--optimised", action="store_true", help="inline functions were inlined: check the rule wide")
    arguments = parser.parse_args()
    violations = check(arguments.nm, arguments.levels, dict(arguments.libraries))
    if arguments.optimised:
        for room, library in arguments.libraries:
            violations += check_wide(arguments.nm, room, library)
    print("\n".join(violations) if violations else f"the layers hold in {len(arguments.libraries)} rooms")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
