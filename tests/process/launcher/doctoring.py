"""Runs of `zeroth doctor` on a Stage."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from launching import Run, Stage  # noqa: E402

DOCTOR = os.environ["ZEROTH_DOCTOR"]
LIMIT_S = 120.0
# On a machine that other tests keep busy nothing is slow but what is a hundred times slower than it should be.
PATIENT = ("--slow-below", "0.05", "--disk-mib", "1", "--min-free-gib", "0")


def run(stage: Stage, *arguments: str, prefix: Sequence[str] = (), **environment: str) -> Run:
    stage.runs += 1
    command = [*prefix, DOCTOR, "doctor", "--folder", str(stage.folder), *PATIENT, *arguments]
    # Which interface gloo takes would make a finding about names a note.
    return Run(
        stage.folder, f"doctor{stage.runs}", command, {**stage.environment, "GLOO_SOCKET_IFNAME": "", **environment}
    )


def found(run: Run) -> list[str]:
    """The lines of its findings."""
    return [line.removeprefix("found: ") for line in run.out.splitlines() if line.startswith("found: ")]


def report(run: Run) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run.out)
    return value
