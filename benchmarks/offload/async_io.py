"""DeepSpeed's async_io: whole files, sequentially; "update" reads a file and writes it, as its swapper does.

async_io.py FOLDER BYTES BLOCK DEPTH SECONDS      prints a line of JSON: bytes a second
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found, unused-ignore]


def speed(call: Callable[[], None], size: int, seconds: float) -> float:
    call()
    times: list[float] = []
    while sum(times) < seconds:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return size / statistics.median(times)


def main() -> None:
    folder, size, block, depth = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    seconds = float(sys.argv[5])
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(block, depth, False, True, 1)
    memory = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    memory.fill_(90)
    path = str(pathlib.Path(folder) / "async_io")

    def write() -> None:
        handle.sync_pwrite(memory, path)

    def read() -> None:
        handle.sync_pread(memory, path)

    def update() -> None:
        read()
        memory.bitwise_xor_(1)
        write()

    speeds = {
        "write": speed(write, size, seconds),
        "read": speed(read, size, seconds),
        "update": speed(update, 2 * size, seconds),
    }
    print(json.dumps(speeds))


if __name__ == "__main__":
    main()
