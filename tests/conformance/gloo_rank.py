"""One rank of a conformance suite over torch's gloo. Started by zeroth-run; see CMakeLists.txt.

usage: gloo_rank.py LIBRARY ARGUMENTS...

LIBRARY holds a suite (gloo_suites.cpp), the arguments are GoogleTest's; rank 0 alone writes results, and tells of cases
that pass.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch
import torch.distributed as dist

NewGroup = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)


class Groups:
    """A group at a time, each of all ranks."""

    def __init__(self) -> None:
        self.current: dist.ProcessGroup | None = None

    def new(self, name: ctypes._Pointer[ctypes.c_char], capacity: int) -> None:
        """Who leaves the one before, its case being over here, has ended for those who are still in it."""
        self.leave()
        self.current = dist.new_group(backend="gloo")
        text = self.current.group_name.encode() + b"\0"
        assert len(text) <= capacity, text
        ctypes.memmove(name, text, len(text))

    def leave(self) -> None:
        if self.current is not None:
            dist.destroy_process_group(self.current)
        self.current = None


def main() -> int:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    arguments = [__file__, *sys.argv[2:]]
    if dist.get_rank() != 0:
        arguments = [argument for argument in arguments if not argument.startswith("--gtest_output")] + [
            "--gtest_brief=1"
        ]
    argv = (ctypes.c_char_p * (len(arguments) + 1))(*(argument.encode() for argument in arguments), None)
    groups = Groups()
    library = ctypes.CDLL(sys.argv[1])
    code: int = library.zeroth_gloo_suites(NewGroup(groups.new), dist.get_world_size(), len(arguments), argv)
    groups.leave()
    dist.barrier()  # the launcher ends all when one ends with an error, and rank 0 has results to write
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
