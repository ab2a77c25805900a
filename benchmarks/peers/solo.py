"""A rank of a process group that holds one contestant: start-up, loss, tracked bytes, wire bytes.

  zeroth-run -n 2 python solo.py --cell JSON --contestant NAME --report DIR [--startup]

Writes DIR/rank<r>.json. With --startup it ends after step 1; times are of the clock that all processes of a machine
share.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from cells import Cell  # noqa: E402
from contestants import Contestant, make, needs_group  # noqa: E402
from processes import pss  # noqa: E402
from tracked import Tracker, at_layers  # noqa: E402
from versions import versions  # noqa: E402
from work import Work  # noqa: E402

WIRE_STEPS = 2
SAMPLED_LAYERS = 60  # of a step, at most


def loopback_bytes() -> int:
    """Received on the loopback interface by all processes; headers and acknowledgements are in it."""
    for line in pathlib.Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":", 1)[1].split()[0])
    raise RuntimeError("there is no loopback interface in /proc/net/dev")


def step(contestant: Contestant, work: Work, number: int) -> float:
    loss = contestant.forward(work.batch(number))
    contestant.backward(loss)
    contestant.update()
    return loss.item()


def barrier() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def wire_bytes(contestant: Contestant, work: Work, first: int) -> dict[str, float]:
    """A step's bytes: of this rank by its own counters, or of all ranks by the loopback interface (the same on every
    rank)."""
    contestant.wire_bytes()
    barrier()
    before = loopback_bytes()
    barrier()
    for number in range(first, first + WIRE_STEPS):
        step(contestant, work, number)
    barrier()
    counted, seen = contestant.wire_bytes(), loopback_bytes() - before
    return {"loopback": seen / WIRE_STEPS} if counted is None else {"counted": counted / WIRE_STEPS}


def tracked_in_step(contestant: Contestant, work: Work, tracker: Tracker, number: int, *, floor: bool) -> list[int]:
    """Bytes at every sampled layer, activations among them; of the floor what is left without parameters, gradients and
    states, which are the activations (and what else the tracker takes for one), equal for all contestants."""
    samples: list[int] = []

    def sample() -> None:
        own = contestant.own_bytes() if floor else 0
        samples.append(tracker.live_bytes() - own)

    with at_layers(sample, every=-(-work.layers // SAMPLED_LAYERS)):
        step(contestant, work, number)
    return samples


def run(cell: Cell, name: str, startup: bool) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    report: dict[str, Any] = {"pss_imported": 0 if startup else pss(os.getpid())}
    torch.set_num_threads(1)
    if needs_group(name):
        torch.distributed.init_process_group("gloo")
    work = Work(cell, rank)
    tracker = None if startup else Tracker()
    contestant = make(name, work)
    loss = step(contestant, work, 0)
    report["step_1_end"] = time.monotonic()
    if tracker is None:
        return report
    for number in range(1, cell.solo_steps):
        loss = step(contestant, work, number)
    report["loss"] = loss
    report["tokens"] = work.tokens
    report["parameters"] = work.parameters
    report["versions"] = versions()
    contestant.backward(contestant.forward(work.batch(cell.solo_steps)))
    report["tracked_after_backward"] = contestant.tracked_bytes(tracker)
    contestant.update()
    report["tracked_after_step"] = contestant.tracked_bytes(tracker)
    peak = contestant.peak_bytes()
    if peak is not None:
        report["tracked_peak"] = peak
    elif contestant.has_floors_activations():
        report["tracked_in_step"] = tracked_in_step(
            contestant, work, tracker, cell.solo_steps + 1, floor=name == "floor"
        )
    report["bytes_by_state"] = contestant.bytes_by_state()
    return report | wire_bytes(contestant, work, cell.solo_steps + 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", required=True, type=Cell.from_json)
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    parser.add_argument("--startup", action="store_true")
    arguments = parser.parse_args()
    report = run(arguments.cell, arguments.contestant, arguments.startup)
    path = arguments.report / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
