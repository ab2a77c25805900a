"""A rank of steps with optimizer states on other tiers, in paired blocks: the job of benchmarks/peers with other
contestants.

  zeroth-run -n 2 python step_rank.py --cell JSON --folder DIR --contestants ... --report DIR
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "peers"))
import job  # noqa: E402
from contestants import MAKERS, DeepSpeed, Zeroth  # noqa: E402
from work import Work  # noqa: E402

AIO = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True}


def offloaded(device: str, folder: str) -> dict[str, Any]:
    where = {"nvme_path": folder, "buffer_count": 8} if device == "nvme" else {}
    return {"offload_optimizer": {"device": device, **where}}


def deepspeed(work: Work, stage: int, device: str, folder: str, *, tuned: bool = False) -> DeepSpeed:
    """With its own optimizer for this."""
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": work.lr, "weight_decay": 0.01}}, "aio": AIO}
    options = offloaded(device, folder)
    if tuned:
        options["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 16}
        options["sub_group_size"] = 2_000_000
    return DeepSpeed(work, stage, options, adam)


def add_contestants(folder: str) -> None:
    for stage in (1, 3):
        for device, name in (("cpu", "host"), ("nvme", "files")):
            MAKERS[f"zeroth-{stage}-{name}"] = lambda work, stage=stage, device=device: Zeroth(  # type: ignore[misc]
                work, stage, offloaded(device, folder)
            )
            MAKERS[f"deepspeed-{stage}-{name}"] = lambda work, stage=stage, device=device: deepspeed(  # type: ignore[misc]
                work, stage, device, folder
            )
    MAKERS["deepspeed-3-files-tuned"] = lambda work: deepspeed(work, 3, "nvme", folder, tuned=True)
    early = {"update": {"inside_backward": True}}
    for stage in (1, 3):
        MAKERS[f"zeroth-{stage}-files-inside"] = lambda work, stage=stage: Zeroth(  # type: ignore[misc]
            work, stage, offloaded("nvme", folder), early
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True)
    arguments, sys.argv[1:] = parser.parse_known_args()
    add_contestants(arguments.folder)
    job.main()


if __name__ == "__main__":
    main()
