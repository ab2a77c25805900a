"""Versions of the peers that a benchmark runs in."""

from __future__ import annotations

import importlib.metadata

import torch


def versions() -> dict[str, str]:
    """Of torch, and of DeepSpeed where it is installed."""
    found = {"torch": str(torch.__version__)}
    try:
        found["deepspeed"] = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        pass
    return found
