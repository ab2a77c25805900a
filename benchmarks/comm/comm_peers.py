#!/usr/bin/env python3
"""Collectives of Zeroth beside those of Open MPI and of torch's gloo, in one run of ranks that mpirun starts
(peers_bench.cpp).

comm_peers.py --build build/release --ranks 2 --json out.json
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile


def rank(arguments: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    own, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{arguments.store}/store", rank=own, world_size=size)
    ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)  # it looks for its own symbols among all
    library = ctypes.CDLL(str(arguments.build / "benchmarks" / "libcomm_peers.so"))
    group = dist.group.WORLD
    assert group is not None
    command = f"benchmarks/comm/comm_peers.py --ranks {size} --rounds {arguments.rounds} --largest {arguments.largest}"
    code: int = library.zeroth_comm_peers(
        group.group_name.encode(),
        command.encode(),
        str(arguments.json or "").encode(),
        arguments.rounds,
        arguments.largest,
    )
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/release"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest", type=int, default=28, help="logarithm of the largest size in bytes")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--store", help="of a rank; the launcher makes it")
    arguments = parser.parse_args()
    if arguments.store:
        return rank(arguments)
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        print("comm_peers: no mpirun; on Debian: apt-get install openmpi-bin libopenmpi-dev", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as store:
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        command = [
            mpirun,
            *root,
            "-n",
            str(arguments.ranks),
            "--oversubscribe",
            "--bind-to",
            "none",
            "--mca",
            "btl",
            "self,vader",
            sys.executable,
            __file__,
            *sys.argv[1:],
            "--store",
            store,
        ]
        environment = {
            **os.environ,
            "ZEROTH_MPI_LIBRARY": str(arguments.build.resolve() / "benchmarks" / "libzeroth_mpi.so"),
        }
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
