"""Row-parallel products in chunks whose sums overlap the next chunk's product (zeroth.parallel.chunked_linear_reduce).

    zeroth-run -n 2 python benchmarks/parallel/chunks.py [--rows 2048] [--features 1024] [--out 1024] [--repeats 20]

For 1, 2, 4 and 8 chunks: the median time of the call on the slowest rank, of the product alone, and the difference,
which is the time of the sum that stays exposed. On ranks that share cores with each other or with anything else the
numbers say little: give every rank cores of its own (zeroth-run binds them).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import zeroth
from zeroth import parallel


def median_ms(call: Callable[[], object], group: zeroth.Communicator, repeats: int) -> float:
    """Of the slowest rank of each repeat; ranks begin together."""
    times = []
    for _ in range(repeats):
        group.barrier()
        begin = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        times.append(float(group.all_reduce(took, "max").item()) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 2048), ("features", 1024), ("out", 1024), ("repeats", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    world = zeroth.World.from_environment()
    tp = world.mesh({"tp": world.size}).axis("tp")
    torch.manual_seed(tp.rank)
    x = torch.randn(given.rows, given.features // tp.size)
    weight = torch.randn(given.out, given.features // tp.size)
    with torch.no_grad():
        product = median_ms(lambda: torch.nn.functional.linear(x, weight), tp, given.repeats)
        blocking = median_ms(
            lambda: parallel.reduce_from_group(torch.nn.functional.linear(x, weight), tp), tp, given.repeats
        )
        rows = [("sum afterwards", blocking)]
        for chunks in (1, 2, 4, 8):

            def call(chunks: int = chunks) -> torch.Tensor:
                return parallel.chunked_linear_reduce(x, weight, None, chunks, tp)

            call()  # makes the memory of its sums
            rows.append((f"{chunks} chunks", median_ms(call, tp, given.repeats)))
    if tp.rank == 0:
        print(f"product alone {product:8.3f} ms, {tp.size} ranks, [{given.rows}, {given.features}] to {given.out}")
        for name, took in rows:
            print(f"{name:>14} {took:8.3f} ms, exposed {took - product:8.3f} ms")


main()
