"""The peak of live bytes of torch's CPU allocator while a function runs, from the allocator's own events: temporaries
inside of operators count, too. Memory of other libraries (MKL, oneDNN) does not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that were alive at once of what was allocated inside. What `run` returns is let go after the
    measurement."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        kept = run()
    del kept
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in measured.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


if __name__ == "__main__":
    kib = torch.empty(256)
    assert peak_bytes(lambda: kib + kib + kib) == 2048, peak_bytes(lambda: kib + kib + kib)
