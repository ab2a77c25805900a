"""Forwards of an evaluation."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["evaluating"]


@contextlib.contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; afterwards each module trains, or does not, as before."""
    training = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, was in training.items():
            module.training = was
