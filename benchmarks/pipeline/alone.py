"""A rank of a job that holds one trainer: start-up, loss, bytes.

  zeroth-run -n 2 python alone.py --work JSON --trainer NAME --report DIR [--end {step-1,steps,bytes}]

Writes DIR/rank<r>.json. It ends after step 1, after STEPS steps, or after a look at bytes, whose tools take memory of
their own. Times are of the clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import stack  # noqa: E402
import torch  # noqa: E402
from live_bytes import peak_bytes  # noqa: E402
from saved import Saved  # noqa: E402
from setups import Work  # noqa: E402
from trainers import MAKERS, Trainer, needs_group  # noqa: E402
from versions import versions  # noqa: E402

STEPS = 3
"""before anything but the start-up is measured"""


def saved_peak(trainer: Trainer, batch: list[Any]) -> int:
    saved = Saved(trainer.parameters())
    with saved.watching():
        trainer.step(batch)
    return saved.peak


def run(work: Work, name: str, end_after: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    batches = stack.batches(work)
    begin = time.monotonic()
    if needs_group(name):
        torch.distributed.init_process_group("gloo")
    trainer = MAKERS[name](work, int(os.environ["RANK"]))
    trainer.step(batches[0])
    end = time.monotonic()
    report: dict[str, Any] = {"step_1_end": end, "construction": end - begin}
    if end_after == "step-1":
        return report
    for number in range(1, STEPS):
        trainer.step(batches[number % len(batches)])
    report["loss"] = trainer.loss
    report["parameters"] = sum(parameter.numel() for parameter in trainer.parameters())
    report["versions"] = versions()
    if end_after == "steps":
        return report
    report["saved"] = saved_peak(trainer, batches[0])
    report["allocated"] = peak_bytes(lambda: trainer.step(batches[1]))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, type=Work.from_json)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--report", required=True, type=pathlib.Path)
    parser.add_argument("--end", choices=("step-1", "steps", "bytes"), default="bytes")
    given = parser.parse_args()
    report = run(given.work, given.trainer, given.end)
    path = given.report / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
