#!/usr/bin/env python3
"""No program needs an MPI to start: libzeroth_mpi.so is the one file that does, and it is loaded when an MPI world is
asked for.

usage: check_needed.py [--readelf READELF] FILE ...

Prints one line for each FILE, a program or shared library, that names a library of MPI among those that it needs; exit
code 1 if there is one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

# Open MPI, MPICH, Intel MPI; C, C++ and what Open MPI stands on.
MPI = re.compile(r"lib(mpi\w*|mpich\w*|open-(rte|pal)|zeroth_mpi)\.so")


def needed(readelf: str, file: str) -> list[str]:
    done = subprocess.run([readelf, "--dynamic", "--wide", file], check=True, capture_output=True, text=True)
    return re.findall(r"\(NEEDED\).*\[(.+)\]", done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description="No program needs an MPI to start.")
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--readelf", default="readelf")
    arguments = parser.parse_args()
    violations = [
        f"{file}: needs {library}"
        for file in arguments.files
        for library in needed(arguments.readelf, file)
        if MPI.match(library)
    ]
    print("\n".join(violations), end="\n" if violations else "")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
